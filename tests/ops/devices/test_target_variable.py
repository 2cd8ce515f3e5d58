"""FLASHATTN_JIT_TARGET: the target of calls on CPU tensors that name none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen import spec as targets
from flashattn_jit.codegen.spec import default_target, host_target, resolve_target
from flashattn_jit.codegen.targets import CPU_TARGETS
from flashattn_jit.deploy.wanted.arguments import parse_targets
from flashattn_jit.errors import EnvironmentVariableError
from flashattn_jit.inspect.doctor import cache as _check_cache
from flashattn_jit.inspect.doctor import machine as _check_machine
from tests.harness import processes
from tests.ops.cases import HOST_TARGETS

NAME = "FLASHATTN_JIT_TARGET"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)


def tensors() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 2, 40, 16) for _ in range(3))


def dense(**options: object) -> object:
    return fa.attention(*tensors(), fa.Causal(), **options)


def packed(**options: object) -> object:
    rows = torch.tensor([0, 40])
    return fa.varlen_attention(
        *(x[0].transpose(0, 1).contiguous() for x in tensors()), rows, rows, fa.Causal(), **options
    )


def batch(**options: object) -> object:
    made = fa.BatchAttention(
        fa.Causal(), num_q_heads=2, num_kv_heads=2, head_dim=16, q_dtype=torch.float32, **options
    )
    rows = torch.tensor([0, 40])
    made.plan(rows, fa.Ragged(rows))
    return made.run(*(x[0].transpose(0, 1).contiguous() for x in tensors()))


_causal = fa.Causal()


@torch.compile(backend="eager", fullgraph=True)
def _compiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return fa.attention(q, k, v, _causal)


def compiled() -> object:
    return _compiled(*tensors())


def targets_of(call: Callable[[], object], path: Path) -> set[str]:
    """The targets of the kernels that a call ran."""
    path.unlink(missing_ok=True)
    with fa.record_manifest(str(path)):
        call()
    lines = map(json.loads, path.read_text().splitlines())
    return {line["spec"]["target"] for line in lines if "spec" in line}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("call", [dense, packed, batch, compiled], ids=lambda f: f.__name__)
def test_every_call_obeys_and_a_change_takes_effect_at_once(
    call: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for target in (*HOST_TARGETS, HOST_TARGETS[0]):
        monkeypatch.setenv(NAME, target)
        assert targets_of(call, tmp_path / "one.jsonl") == {target}
    monkeypatch.delenv(NAME)
    assert targets_of(call, tmp_path / "one.jsonl") == {host_target()}


@pytest.mark.parametrize("call", [dense, packed, batch], ids=lambda f: f.__name__)
def test_a_target_that_a_call_names_wins(
    call: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, "cpu:generic")
    run = lambda: call(target=host_target())  # noqa: E731
    assert targets_of(run, tmp_path / "one.jsonl") == {host_target()}
    monkeypatch.setenv(NAME, "nonsense")
    call(target=host_target())


@pytest.mark.parametrize("target", HOST_TARGETS)
def test_a_process_is_started_with_it(target: str) -> None:
    program = (
        "import torch, flashattn_jit as fa\n"
        "x = torch.randn(1, 2, 40, 16)\n"
        "fa.attention(x, x, x, fa.Causal())\n"
        "print(fa.Causal().explain(x, x, x).target)"
    )
    done = processes.run(["-c", program], env={**os.environ, NAME: target}, check=True)
    assert done.stdout == f"{target}\n"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("avx2", "must be a CPU target that this machine runs: cpu:generic"),
        ("cpu:AVX2", "must be a CPU target"),
        ("sm_80", "pass target= to a call"),
        ("emulated:sm_80", "pass target= to a call"),
        ("\udcff", "must be a CPU target"),
    ],
)
@pytest.mark.parametrize("call", [dense, packed, batch, compiled], ids=lambda f: f.__name__)
def test_what_is_no_cpu_target_is_refused_by_name(
    call: Callable[[], object], value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, value)
    with pytest.raises(EnvironmentVariableError, match=words) as info:
        call()
    assert str(info.value).startswith(f"{NAME}={value!r} ")
    assert str(info.value).endswith(f"or unset it, which means {host_target()}")
    monkeypatch.delenv(NAME)
    call()


def test_a_target_above_the_machines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "host_targets", lambda: ("cpu:generic", "cpu:avx2"))
    targets._forced.cache_clear()
    monkeypatch.setenv(NAME, "cpu:avx512")
    try:
        with pytest.raises(
            EnvironmentVariableError,
            match=r"lacks; set it to one of cpu:generic, cpu:avx2; or unset it",
        ):
            resolve_target(None)
    finally:
        targets._forced.cache_clear()


def test_an_empty_value_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "")
    assert default_target() == resolve_target(None) == host_target()


def test_warming_for_the_host_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "cpu:generic")
    assert parse_targets("host")[0] == "cpu:generic"


def test_doctor_shows_it_and_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = CPU_TARGETS[0]
    check = _check_machine.cpu()
    assert NAME not in check.detail
    monkeypatch.setenv(NAME, lower)
    check = _check_machine.cpu()
    assert (f"calls without target= run {lower} ({NAME})" in check.detail) == (
        host_target() != lower
    )
    assert f"{NAME}={lower}" in " ".join(c.detail for c in _check_cache.environment())
    monkeypatch.setenv(NAME, "cpu:avx3")
    problems = [c for c in _check_cache.environment() if c.status == "error"]
    assert any(NAME in c.detail for c in problems)
    check = _check_machine.cpu()
    assert check.status in ("ok", "warning")
