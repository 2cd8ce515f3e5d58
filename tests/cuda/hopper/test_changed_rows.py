"""The wgmma kernels over codes, and with key_mod or value_mod: against the fp64 reference, in the
emulator, and their resources and machine code.

What no request may read is NaN: rows of requests without queries, slots without a key, other pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.budget import CHANGE_SPILLS
from flashattn_jit.inspect.machine_code.disassembly import nvdisasm
from flashattn_jit.jit.compilation.loops import count, loops, spills_of_changes
from flashattn_jit.planner.cuda_tiles import against_wgmma
from flashattn_jit.variants.reference import attention_reference
from tests.batch.oracle import Math
from tests.cuda.hopper.test_machine_code_wgmma import code_of
from tests.cuda.kernels import KERNEL, assert_clean, by_mma_sync, coded_spec, compiled
from tests.emulator.mutants import kinds_that_run
from tests.emulator.wgmma_calls import (
    BF16,
    FP16,
    Made,
    ScaledValues,
    few_workers,  # noqa: F401
    stored,
)
from tests.harness import rotation
from tests.harness.toolkit import needs_nvcc
from tests.ops.cases import assert_close, normal

pytestmark = [needs_nvcc, pytest.mark.usefixtures("few_workers")]

Format = fa.kv.Format
MODES = ("late", "early", "random:1", "random:2")
REQUESTS = ((50, 0, 40, 9), (300, 43, 0, 170))
CAUSAL, WINDOW, CAP = Math(causal=True), Math(window=60), Math(causal=True, cap=5.0)
ROPE = Math(causal=True, rope=True)
INT8, INT4, E4M3 = Format("int8"), Format("int4", group=32, zero=True), Format("e4m3")
NF4 = Format("nf4", group=32)


def over(k: Format | None, v: Format | None, what: Any = CAUSAL, **more: Any) -> Callable[[], Made]:
    """A call over the same requests, rows packed or in pages."""
    return lambda: stored(*REQUESTS, (k, v), what, **more)


def documents(kv_format: Format) -> Made:
    """A dense call with a document mask."""
    ids = torch.arange(300).div(70, rounding_mode="floor").expand(2, -1).int()
    q, k, v = (normal(i, 2, h, n, 64) for i, (h, n) in enumerate(((4, 40), (2, 300), (2, 300))))
    k, v = (kv_format.quantize(x, heads_dim=1) for x in (k, v))
    call = {"q_offset": 100}

    def holds(results: tuple[torch.Tensor, ...]) -> None:
        exact, eager = (
            attention_reference(
                q.to(BF16), k, v, fa.DocumentMask(), params={"documents": ids}, dtype=t, **call
            )[0]
            for t in (torch.float64, BF16)
        )
        assert_close(results[0], exact, eager)

    return Made(
        lambda: (
            fa.attention(
                q.to(BF16), k, v, fa.DocumentMask(), target="emulated:sm_90", documents=ids, **call
            ),
        ),
        holds,
    )


CALLS: dict[str, Callable[[], Made]] = {
    "int8 of a tensor": over(*(Format("int8", "tensor"),) * 2),
    "int8 of heads, fp16": over(*(Format("int8", "head", FP16),) * 2, dtype=FP16),
    "int8, zero points": over(*(Format("int8", zero=True),) * 2, WINDOW, page_size=8),
    "int8 of groups of 16": over(*(Format("int8", group=16),) * 2, page_size=16),
    "int8 rotated": over(*(Format("int8", rotate=True),) * 2),
    "e4m3 in pages of 64": over(E4M3, E4M3, page_size=64),
    "e5m2 of heads": over(*(Format("e5m2", "head"),) * 2, CAP, heads=(8, 1)),
    "int4": over(INT4, INT4, page_size=8, heads=(6, 2)),
    "nf4": over(NF4, NF4, page_size=16),
    "int8 and nf4, 128": over(INT8, NF4, dim=128),
    "e4m3 and int4, 128": over(E4M3, INT4, WINDOW, dim=128, page_size=64),
    "keys alone, 96 and 64": over(INT8, None, dim=96, dim_v=64, page_size=16),
    "values alone, 64 and 128": over(None, E4M3, CAP, dim_v=128),
    "int8, 80": over(INT8, INT8, dim=80),
    "int4, 192 and 128": over(INT4, INT4, dim=192, dim_v=128),
    "int8, 256": over(INT8, INT8, dim=256, page_size=8),
    "e4m3, documents": lambda: documents(E4M3),
    "rope": over(None, None, ROPE),
    "rope, 128, pages": over(None, None, ROPE, dim=128, page_size=8),
    "rope, 72, fp16": over(None, None, ROPE, dim=72, dtype=FP16),
    "rope, 120 and 256": over(None, None, ROPE, dim=120, dim_v=256, page_size=64),
    "norm of keys, values int4": over(None, INT4, fa.QKNorm(), dim=128),
    "value_mod": over(None, None, ScaledValues(), page_size=16),
    "value_mod, 256, keys e4m3": over(E4M3, None, ScaledValues(), dim=256),
    "rope and value_mod": over(None, None, ScaledValues() & fa.RoPE(max_position=512), dim=64),
    "value_mod, codes of keys": over(NF4, None, ScaledValues(), page_size=8),
}  # fmt: skip


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("call", rotation.chosen(list(CALLS), 6))
def test_every_kind_of_rows(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = kinds_that_run(monkeypatch)
    made = CALLS[call]()
    mode = MODES[(list(CALLS).index(call) + rotation.seed()) % len(MODES)]
    monkeypatch.setenv("FLASHATTN_JIT_EMULATOR_COPIES", mode)
    made.check(made.run())
    assert kinds == {"prefill_wgmma"}


KERNELS = [
    (formats, variant, dim)
    for formats, variant in (
        ((INT8, INT8), None),
        ((E4M3, E4M3), fa.Causal()),
        ((INT4, NF4), fa.Causal() & fa.SoftCap(30.0)),
        ((INT4, INT4), None),
        ((INT8, None), fa.SlidingWindow(100)),
        ((None, E4M3), fa.RoPE() & fa.Causal()),
        ((None, None), fa.RoPE()),
        ((None, None), ScaledValues()),
    )
    for dim in (64, 128, 192, 256)
]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("formats", "variant", "dim"), rotation.chosen(KERNELS, 12))
def test_resources_and_machine_code(formats: Any, variant: Any, dim: int) -> None:
    """No spill among the products, which nothing interrupts; copies and changes have own roles."""
    kernel = compiled(coded_spec(formats, (dim, dim), variant))
    spec = kernel.spec
    assert spec.tile_kind == "prefill_wgmma"
    assert_clean(kernel)
    if nvdisasm() is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    code = code_of(kernel)
    changes = spills_of_changes(code)
    assert kernel.report.kernel(KERNEL).spills_of_changes == changes <= CHANGE_SPILLS
    found = loops(code)
    assert len(found) == 2, "full tiles and partial ones have a loop each"
    for loop in found:
        assert loop.products == -(-dim // 16) + spec.tile_kv // 16
        assert loop.spills_among_products == 0
    at = {
        name: [n for n, i in enumerate(code) if i.opcode.startswith(name)]
        for name in ("UTMALDG", "HGMMA", "USETMAXREG", "FENCE.VIEW.ASYNC")
    }
    # Producer, changers, consumers, each behind its own count of registers.
    *others, consumers = at["USETMAXREG"]
    assert len(others) == (2 if spec.tile_q == 128 else 1)
    assert others[0] < min(at["UTMALDG"]) and max(at["UTMALDG"]) < consumers < min(at["HGMMA"])
    fences = [n for n in at["FENCE.VIEW.ASYNC"] if others[-1] < n < consumers]
    hooks = ("key_mod", "value_mod")
    sides = sum(f is not None or spec.variant.has(h) for f, h in zip(formats, hooks, strict=True))
    assert spec.tile_q == 64 or len(fences) == sides
    assert not count(code[consumers:], "UTMALDG")


def test_up_to_64_rows_are_left_to_mma_sync() -> None:
    for dim, kind in ((64, "prefill"), (128, "prefill"), (192, "prefill"), (256, "prefill_wgmma")):
        assert coded_spec((INT8, INT8), (dim, dim), rows=60).tile_kind == kind
        assert coded_spec((INT8, INT8), (dim, dim), rows=70).tile_kind == "prefill_wgmma"
    assert by_mma_sync(coded_spec((INT8, INT8), (128, 128))).tile_kind == "prefill"


@pytest.mark.parametrize(
    ("formats", "variant", "hook"),
    [
        ((INT8, INT8), fa.RoPE(), "key_mod"),
        ((None, INT4), ScaledValues(), "value_mod"),
        ((Format("int8", "channel"),) * 2, None, "key_mod"),
        ((Format("int8", group=4), None), None, "key_mod"),
    ],
)
def test_hooks_over_codes_are_left_to_mma_sync(formats: Any, variant: Any, hook: str) -> None:
    spec = coded_spec(formats, (64, 64), variant)
    assert spec.tile_kind == "prefill"
    assert against_wgmma(spec) == f"{hook} does more than decode: it is run on each row of codes"
