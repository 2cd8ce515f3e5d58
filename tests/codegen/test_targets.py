"""The table of CPU targets: what a machine takes, and which kernels run where."""

from __future__ import annotations

import pytest

from flashattn_jit.codegen import targets
from flashattn_jit.codegen.targets import (
    CPU_ROWS,
    CPU_TARGETS,
    CpuTarget,
    architecture,
    best_cpu_target,
    compiled_here,
    cpu_flags,
    included,
    runnable_cpu_targets,
    runs_on,
    sm_version,
)
from flashattn_jit.errors import TargetError
from flashattn_jit.jit.cache import layers
from flashattn_jit.jit.compilation import toolchain


def on(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(targets, "machine", lambda: machine)


def test_rows_stand_behind_those_that_they_include() -> None:
    for name in CPU_TARGETS:
        *lower, own = included(name)
        assert own == name
        assert lower == sorted(lower, key=CPU_TARGETS.index)
        assert {*CPU_ROWS[name].includes} <= {*lower}
    assert all("cpu:generic" in included(name) for name in CPU_TARGETS)


@pytest.mark.parametrize(
    ("features", "target"),
    [
        ("", "cpu:generic"),
        ("x86-64-v3", "cpu:avx2"),
        ("x86-64-v4", "cpu:generic"),  # what a target includes must be there too
        ("x86-64-v3 x86-64-v4", "cpu:avx512"),
        ("x86-64-v3 x86-64-v4 avx512_bf16 fast_avx512_bf16", "cpu:avx512"),
        ("x86-64-v3 x86-64-v4 avx512_vnni", "cpu:avx512_vnni"),
        ("x86-64-v3 x86-64-v4 avx512_vnni avx512_bf16", "cpu:avx512_vnni"),
        ("x86-64-v3 x86-64-v4 avx512_vnni avx512_fp16 avx512_bf16", "cpu:avx512_fp16"),
        ("x86-64-v3 x86-64-v4 avx512_vnni avx512_bf16 fast_avx512_bf16", "cpu:avx512_bf16"),
        ("x86-64-v3 x86-64-v4 avx512_vnni avx512_bf16 amx_tile amx_bf16", "cpu:avx512_vnni"),
        (
            "x86-64-v3 x86-64-v4 avx512_vnni avx512_fp16 avx512_bf16 amx_tile amx_bf16",
            "cpu:amx_bf16",
        ),
    ],
)
def test_a_machine_takes_the_last_target_that_it_runs(
    features: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, "x86_64")
    assert best_cpu_target(features.split()) == target
    on(monkeypatch, "riscv64")
    assert best_cpu_target(features.split()) == "cpu:generic"


def test_a_machine_runs_targets_that_are_not_fast_there(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "x86_64")
    features = "x86-64-v3 x86-64-v4 avx512_vnni avx512_bf16".split()
    assert runnable_cpu_targets(features) == (*included("cpu:avx512_vnni"), "cpu:avx512_bf16")
    assert best_cpu_target(features) == "cpu:avx512_vnni"


def test_targets_need_not_include_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    one = CpuTarget("cpu:one", 4, "aarch64", ("cpu:generic",), ("a",), flags=("-march=one",))
    two = CpuTarget("cpu:two", 8, "aarch64", ("cpu:generic",), ("b",), flags=("-march=two",))
    rows = {**CPU_ROWS, one.name: one, two.name: two}
    for module in (targets, layers, toolchain):
        for table, value in (("CPU_ROWS", rows), ("CPU_TARGETS", tuple(rows))):
            if hasattr(module, table):
                monkeypatch.setattr(module, table, value)
    on(monkeypatch, "aarch64")
    assert [best_cpu_target(f) for f in ("", "a", "b", "ab")] == [
        "cpu:generic", "cpu:one", "cpu:two", "cpu:two",
    ]  # fmt: skip
    assert included("cpu:two") == ("cpu:generic", "cpu:two")
    assert cpu_flags("cpu:one") == ("-march=one",) and compiled_here("cpu:one")
    monkeypatch.setattr(layers, "host_targets", lambda: included("cpu:two"))
    assert not layers.unfit_target("cpu:two") and not layers.unfit_target("cpu:generic")
    assert "instructions of cpu:one" in layers.unfit_target("cpu:one")
    on(monkeypatch, "x86_64")
    assert best_cpu_target(["x86-64-v3", "a", "b"]) == "cpu:avx2"
    with pytest.raises(TargetError, match=r"'cpu:one' is compiled on aarch64 machines"):
        toolchain.flags_for("cpu:one")


@pytest.mark.parametrize("target", ["sm_75", "sm_90a", "sm_120", "emulated:sm_100a"])
def test_the_version_of_a_cuda_target_is_its_number(target: str) -> None:
    assert f"sm_{sm_version(target)}" == target.removeprefix("emulated:").removesuffix("a")


@pytest.mark.parametrize("target", ["sm_100f", "emulated:sm_100f", "sm_90aa", "sm_", "90", "cpu:a"])
def test_names_of_no_cuda_architecture_are_refused(target: str) -> None:
    for read in (sm_version, architecture, lambda name: runs_on(name, 10, 0)):
        with pytest.raises(TargetError, match=f"{target!r} is no CUDA target.* end with a.*fix f"):
            read(target)


@pytest.mark.parametrize(
    ("target", "runs"),
    [
        ("sm_80", ["8.0", "8.6", "8.7", "8.9"]),
        ("sm_86", ["8.6", "8.7", "8.9"]),
        ("sm_90", ["9.0", "9.1"]),
        ("sm_90a", ["9.0"]),
        ("sm_120a", ["12.0"]),
        ("emulated:sm_90a", ["9.0"]),
    ],
)
def test_which_devices_run_the_code_of_a_target(target: str, runs: list[str]) -> None:
    devices = ["7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "9.1", "10.0", "12.0", "12.1"]
    assert [d for d in devices if runs_on(target, *map(int, d.split(".")))] == runs
