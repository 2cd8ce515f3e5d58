"""Mutants of CUDA kernels: kernels with a planted mistake, which the emulator runs in their place.

A mutant is a change of the headers' text, or of the rendered source. It is compiled to PTX, which
runs in a call instead of the kernel's; the launch is unchanged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import _C, env
from flashattn_jit.errors import EmulatorFault
from flashattn_jit.jit.emulator import programs
from flashattn_jit.ops.device import emulated
from tests.cuda.kernels import ptx_of_source

SOURCE = "kernel.cu"
"""Stands for the rendered source among the names of headers."""

Edit = tuple[str, str, str, int]
"""A file below fajit/cuda or `SOURCE`, the text that is replaced, the new text, and which of the
occurrences of the old one is meant."""


WRONG_RESULT: tuple[str, ...] = ()
"""`Mutant.found`: any fault, or values that differ."""


@dataclass(frozen=True)
class Mutant:
    """found: what finds it: kinds of faults, "NaN" or "wrong" values, or `WRONG_RESULT`.

    call: the name of a call in the test file. host: the change is one of the host's code, so the
    whole artifact is compiled. more_shared: bytes of shared memory added to the launch.
    """

    name: str
    call: str
    found: tuple[str, ...]
    edits: tuple[Edit, ...]
    host: bool = False
    more_shared: int = 0


def plant(
    name: str, call: str, found: tuple[str, ...], file: str, old: str, new: str, place: int = 0,
    **more: Any,
) -> Mutant:  # fmt: skip
    """A mutant of one edit."""
    return Mutant(name, call, found, ((file, old, new, place),), **more)


def changed(text: str, edit: Edit) -> str:
    """The text with one edit."""
    file, old, new, place = edit
    parts = text.split(old)
    count = len(parts) - 1
    assert -count <= place < count, f"{file} has {count} times {old!r}"
    at = place % count + 1
    return old.join(parts[:at]) + new + old.join(parts[at:])


def mutated_headers(mutant: Mutant, tmp_path: Path) -> Path:
    """A copy of the include folder with the mutant's edits of headers."""
    include = tmp_path / "include"
    shutil.copytree(env.include_dir(), include)
    for edit in mutant.edits:
        header = include / "fajit/cuda" / edit[0]
        if edit[0] != SOURCE:
            header.write_text(changed(header.read_text(), edit))
    return include


def check_texts(mutants: Iterable[Mutant]) -> None:
    """That the headers have the texts that the mutants change: runs take some of them by turns."""
    folder = env.include_dir() / "fajit/cuda"
    for mutant in mutants:
        texts = {e[0]: (folder / e[0]).read_text() for e in mutant.edits if e[0] != SOURCE}
        for edit in mutant.edits:
            if edit[0] != SOURCE:
                texts[edit[0]] = changed(texts[edit[0]], edit)


class MoreShared(programs.Program):
    """A program whose launches have more shared memory."""

    more = 0

    def run(self, kernel: str, grid: Any, block: Any, shared_bytes: int, *rest: Any, **named: Any):
        super().run(kernel, grid, block, shared_bytes + self.more, *rest, **named)


def mutated_ptx(mutant: Mutant, include: Path, original: _C.Module) -> str:
    """The PTX of the module's rendered source with the mutant's edits."""
    source = Path(original.path).with_name(SOURCE).read_text()
    for edit in mutant.edits:
        if edit[0] == SOURCE:
            source = changed(source, edit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env, "include_dir", lambda: include)
        return ptx_of_source(source, json.loads(original.description)["target"])


def run_mutated(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the emulator runs kernels with the mutant's change."""
    include = mutated_headers(mutant, tmp_path)
    made: dict[str, programs.Program] = {}

    def mutated(original: _C.Module) -> programs.Program:
        if original.path not in made:
            program = made[original.path] = MoreShared(mutated_ptx(mutant, include, original))
            program.more = mutant.more_shared
        return made[original.path]

    monkeypatch.setattr(emulated, "program", mutated)


def assert_found(mutant: Mutant, call: Callable[[], float], wrong: float) -> None:
    """The call raises a fault of the mutant's kinds. `WRONG_RESULT` is any fault, or an error that
    is larger than `wrong`."""
    if mutant.found:
        with pytest.raises(EmulatorFault) as caught:
            call()
        assert caught.value.kind in mutant.found
        # A thread ends on a line of the kernel itself.
        assert caught.value.source.startswith(("fajit/cuda/", "kernel.cu:"))
        return
    try:
        found = call()
    except EmulatorFault:
        return
    assert found > wrong


def kinds_that_run(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The tile kinds of programs from here on."""
    kinds: set[str] = set()
    program = emulated.program

    def noted(original: _C.Module) -> programs.Program:
        kinds.add(json.loads(original.description)["tile_kind"])
        return program(original)

    monkeypatch.setattr(emulated, "program", noted)
    return kinds


# --- calls of mutants, compared with fp32 ---------------------------------------------------------

WRONG = 0.05
"""Larger differences from the fp32 result are no rounding errors; kernels stay below a third."""


MARGIN = 1 << 15
"""Elements of nobody before and after a tensor: a kernel that leaves it meets no other tensor."""


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))
    memory = torch.empty(values.numel() + 2 * MARGIN, dtype=dtype)
    return memory[MARGIN:-MARGIN].view(shape).copy_(values)


def difference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Any, target: str, **options: Any
) -> float:
    out = fa.attention(q, k, v, variant, target=target, **options)
    expected = fa.attention(q.float(), k.float(), v.float(), variant, **options)
    if options.get("partial"):
        out, expected = out[0], expected[0]
    error = (out.float() - expected).abs()
    return float("inf") if error.isnan().any() else float(error.max())


# --- texts and files that mutants of several test files change ------------------------------------

BARRIER, LANES = "__syncthreads();", "__syncwarp();"
RACE = ("race", "in flight", "uninitialised")  # which of them depends on timing
PREFILL, FEW_ROW, PRODUCTS = "mma_sync/prefill.h", "mma_sync/few_row.h", "mma_sync/products.h"
KEYS, WALK, SCORES = "common/key_rows.h", "common/kv_walk.h", "common/scores.h"
