"""`doctor` loads cached kernels on GPUs and compares their residency with the plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import env
from flashattn_jit.inspect.doctor import kernels
from flashattn_jit.inspect.doctor.check import Check
from flashattn_jit.jit.cache import layers
from flashattn_jit.jit.module import KernelCache
from flashattn_jit.planner.tiles import build_request
from tests.cuda.kernels import Compiled, compiled, spec_of
from tests.harness.stand_in_driver import StandIn, driver, stand_in_library  # noqa: F401
from tests.harness.toolkit import needs_nvcc

pytestmark = needs_nvcc


@pytest.fixture(scope="module")
def kernel() -> Compiled:
    """A kernel for sm_80 that is planned for two blocks on a multiprocessor."""
    return compiled(spec_of("plain", "sm_80", "prefill"))


@pytest.fixture
def entry(kernel: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its entry in a cache of its own, which this process has not used."""
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "default", KernelCache())
    base = kernel.folder.parents[3]
    copy = tmp_path / "cache" / kernel.folder.relative_to(base)
    shutil.copytree(kernel.folder, copy)
    for folder in (tmp_path / "cache", *copy.parents[:3]):
        folder.chmod(0o700)
    return copy


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sees three GPUs, of sm_90, of sm_80, and one without kernels, and a new driver."""
    capabilities = [(9, 0), (8, 0), (7, 0)]
    monkeypatch.setattr(layers, "driver_version", lambda: 13000)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)


def checks() -> list[Check]:
    return list(kernels.residency())


def test_kernels_of_the_cache_are_loaded_on_their_device(
    entry: Path,
    driver: StandIn,  # noqa: F811
) -> None:
    driver.holds(2)
    first, second = checks()
    assert str(first) == "ok       gpu 0 kernels: no kernels for sm_90 to look at"
    assert str(second).startswith("ok       gpu 1 kernels: 1 artifacts for sm_80: multiprocessors")
    calls = driver.calls("cuModuleLoadData", "cuModuleUnload")
    assert calls == ["cuModuleLoadData on 1", "cuModuleUnload on 1"]


def test_kernels_that_a_plan_may_use_stay_loaded(
    entry: Path,
    driver: StandIn,  # noqa: F811
    kernel: Compiled,
) -> None:
    _, module = kernels.default.load_stepping([build_request(kernel.spec)])
    driver.holds(2)
    module.load(1)
    held = module.residency(1)
    driver.calls()
    assert "1 artifacts for sm_80" in checks()[1].detail
    assert driver.calls("cuModuleLoadData", "cuModuleUnload") == []
    assert module.residency(1) == held


def test_fewer_blocks_than_planned_are_a_warning_with_a_remedy(
    entry: Path,
    driver: StandIn,  # noqa: F811
) -> None:
    driver.holds(1)
    _, found = checks()
    assert (found.status, found.name) == ("warning", "gpu 1 kernels")
    for words in ("1 kernels of 1 artifacts run fewer blocks", "fajit_attention_kernel runs 1",
                  "planned for 2", str(entry / "artifact.so")):  # fmt: skip
        assert words in found.detail
    assert "FLASHATTN_JIT_CUDA_HOME" in found.remedy


def test_the_report_has_them(
    entry: Path,
    driver: StandIn,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver.holds(1)
    named = {check.name: check.status for check in fa.doctor()}
    assert (named["gpu 0 kernels"], named["gpu 1 kernels"]) == ("ok", "warning")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not any(check.name.endswith("kernels") for check in fa.doctor())


def test_kernels_that_this_process_uses_are_asked_of_first(
    entry: Path,
    driver: StandIn,  # noqa: F811
    kernel: Compiled,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels.default.load_stepping([build_request(kernel.spec)])
    monkeypatch.setattr(kernels, "_LOAD_S", 10.0)
    driver.holds(2)
    assert "1 artifacts for sm_80" in checks()[1].detail, "the entry is not asked of twice"


def test_what_cannot_be_loaded_or_is_corrupt_is_a_warning(
    entry: Path,
    driver: StandIn,  # noqa: F811
) -> None:
    driver.fail("cuModuleLoadData", 209)
    _, found = checks()
    assert found.status == "warning" and "CUDA_ERROR_NO_BINARY_FOR_GPU" in found.detail
    driver.fail("cuModuleLoadData", 0)
    artifact = entry / "artifact.so"
    artifact.write_bytes(artifact.read_bytes()[:-1])
    driver.calls()
    _, found = checks()
    assert found.status == "warning" and "1 artifacts cannot be loaded" in found.detail
    assert "cache verify" in found.remedy and driver.calls("cuModuleLoadData") == []


def test_entries_of_another_interface_or_a_newer_driver_are_left_alone(
    entry: Path,
    driver: StandIn,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = entry.joinpath("meta.json").read_text()
    meta = json.loads(text)
    document = [[n, "3" if n == "abi_version" else t] for n, t in meta["document"]]
    entry.joinpath("meta.json").write_text(json.dumps(meta | {"document": document}))
    assert checks()[1].status == "ok" and "no kernels" in checks()[1].detail
    entry.joinpath("meta.json").write_text(text)
    monkeypatch.setattr(kernels, "unfit_driver", lambda target, needed: f"needs driver {needed}")
    assert "no kernels" in checks()[1].detail


def test_it_stops_in_time(
    entry: Path,
    driver: StandIn,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "_LOAD_S", -1.0)
    monkeypatch.setattr(kernels, "_artifacts", lambda *_: iter([entry] * 3))
    driver.holds(9)
    assert "1 artifacts for sm_80 (2 not looked at)" in checks()[1].detail
