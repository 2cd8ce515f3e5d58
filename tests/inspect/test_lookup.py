"""`look_up`: the layer that has a kernel, and the reasons why earlier layers do not serve it."""

from __future__ import annotations

from pathlib import Path

import pytest

import flashattn_jit as fa
from flashattn_jit.codegen.spec import KernelSpec
from flashattn_jit.inspect.lookup import look_up
from flashattn_jit.jit.cache import layers
from flashattn_jit.jit.cache.entry import ARTIFACT, CompilerIdentity, kernel_key
from flashattn_jit.jit.cache.store import Store
from flashattn_jit.jit.compilation.toolchain import flags_for
from flashattn_jit.variants.ir.ir import VariantIR


def spec_of(head_dim: int, target: str = "cpu:generic") -> KernelSpec:
    """Full attention in fp32."""
    return KernelSpec(
        VariantIR(()), *("float32",) * 3, head_dim, head_dim, target, "prefill", 16, 96
    )


def publish(root: Path, spec: KernelSpec, compiler: str = "gcc-1-00000000") -> None:
    """Publishes an entry whose artifact is text with its key."""
    key = kernel_key(spec.document(), spec.template, spec.target, flags_for(spec.target))
    store = Store(root)
    with store.staging() as staging:
        staging.joinpath(ARTIFACT).write_text(key.hex)
        store.publish(staging, key.hex, CompilerIdentity(compiler, ""), {"document": key.document})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, where nothing may be compiled."""
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    monkeypatch.delenv("FLASHATTN_JIT_CACHE_PATH", raising=False)
    monkeypatch.delenv("FLASHATTN_JIT_CACHE_REMOTE", raising=False)
    return tmp_path / "user"


def test_the_first_layer_that_has_it_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    publish(first, spec_of(32))
    publish(second, spec_of(64))
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_PATH", f"{first}:{second}")
    found = look_up(spec_of(64))
    assert (found.layer, found.path.startswith(str(second))) == ("read_only", True)
    assert [(s.layer, s.location) for s in found.searched] == [
        ("user", str(cache)),
        ("read_only", str(first)),
    ]
    assert "no such kernel" in found.searched[1].reason


def test_a_miss_names_the_nearest_entry_and_the_command(cache: Path) -> None:
    publish(cache, spec_of(32))
    missed = look_up(spec_of(64))
    assert not missed.layer
    assert missed.nearest is not None
    assert {d.field for d in missed.nearest.differences} == {"spec.head_dims"}
    assert "flashattn-jit warm" in missed.command
    assert "makes a call fail" in str(missed)


def test_another_compilers_kernel_is_a_miss_with_that_reason(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(cache, spec_of(64), "gcc-0.1-00000000")
    assert look_up(spec_of(64)).layer == "user"
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "missing")
    missed = look_up(spec_of(64))
    if missed.compiler_id:  # else there is no compiler here, and any will do
        assert not missed.layer
        assert "gcc-0.1-00000000" in missed.searched[0].reason


def test_a_kernel_that_this_machine_cannot_run_is_a_miss_with_that_reason(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(cache, spec_of(64))
    monkeypatch.setattr(layers, "unfit_target", lambda target: "it needs other instructions")
    missed = look_up(spec_of(64))
    assert not missed.layer
    assert missed.searched[0].reason == "it needs other instructions"


def test_it_writes_nothing(cache: Path) -> None:
    look_up(spec_of(64))
    assert not cache.exists()
    assert not fa.cache_info().kernels
