"""Kernels of batches whose values are columns of their keys, ahead of their calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.deploy.wanted.specs import wanted_specs
from flashattn_jit.deploy.warm.warm import warm
from flashattn_jit.errors import InputError
from flashattn_jit.jit.module import default
from flashattn_jit.planner.reachable import reachable, retarget
from flashattn_jit.planner.tiles import choose_rows
from flashattn_jit.variants.ir.ir import VariantIR

TARGET = "cpu:generic"


def serve(head_dim: int, head_dim_v: int, kv_dtype: torch.dtype) -> None:
    """A batch over ragged keys: few rows of a request, and many."""
    width = head_dim if kv_dtype.is_floating_point else 656  # bytes of FlashMLA's rows
    for q_len in (1, 60):
        batch = fa.BatchAttention(
            fa.Causal(), num_q_heads=2, num_kv_heads=1, head_dim=head_dim, head_dim_v=head_dim_v,
            v_in_k=True, q_dtype=torch.float32, kv_dtype=kv_dtype, target=TARGET,
        )  # fmt: skip
        batch.plan(torch.tensor([0, q_len]), fa.Ragged(torch.tensor([0, 70])))
        keys = torch.zeros(70, 1, width, dtype=kv_dtype)
        batch.run(torch.randn(q_len, 2, head_dim), keys, scale=0.1)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("dims", "dtypes", "kv_dtype"),
    [
        ((320, 256), "fp32", torch.float32),
        ((48, 32), "fp32", torch.float32),
        ((576, 512), "fp32/fp8_ds_mla", torch.uint8),
    ],
    ids=str,
)
def test_warmed_kernels_compile_nothing_at_their_first_call(
    dims: tuple[int, int], dtypes: str, kv_dtype: torch.dtype, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    warm(
        fa.Causal(), head_dims=[dims], dtypes=dtypes, targets=TARGET, formats=["ragged"],
        v_in_k=True, progress=False,
    )  # fmt: skip
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    default.forget()
    with fa.record_manifest(tmp_path / "m.jsonl"):
        serve(*dims, kv_dtype)
    # What was recorded is built again elsewhere.
    monkeypatch.delenv("FLASHATTN_JIT_COMPILE")
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path / "other"))
    warm(tmp_path / "m.jsonl", progress=False)
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    default.forget()
    serve(*dims, kv_dtype)
    assert default.last_source == "disk"


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("features", [(), ("paged",), ("sparse",), ("mixed_rows",)], ids=str)
def test_recorded_kernels_stand_for_themselves(target: str, features: tuple[str, ...]) -> None:
    dims, dtypes = (576, 512), ("bfloat16",) * 3
    for rows in (1, 100):
        spec = choose_rows(VariantIR(()), dims, dtypes, target, rows, (*features, "values_in_keys"))
        assert "values_in_keys" in spec.features
        assert spec in retarget(spec, target)
        assert "values_in_keys" in retarget(spec, "sm_90")[0].features
        of_cpu = ("indirect",) if features else ()
        on_cpu = choose_rows(
            VariantIR(()), dims, dtypes, "cpu:avx2", rows, (*of_cpu, "values_in_keys")
        )
        assert on_cpu.features == of_cpu and on_cpu in retarget(spec, "cpu:avx2")
        assert spec in retarget(on_cpu, target)
    listed = reachable(VariantIR(()), dims, dtypes, target, ("ragged", "paged"), v_in_k=True)
    assert listed and all("values_in_keys" in s.features for s in listed)
    assert retarget(spec, "sm_75") == ()


def test_errors() -> None:
    given = {"head_dims": "64/32", "dtypes": "bf16", "v_in_k": True}
    for changed, message in (
        ({"head_dims": "32/64"}, "head_dim_v=64 exceeds head_dim=32"),
        ({"head_dims": (64, 32)}, r"give \[\(64, 32\)\], or \[64, 32\]"),
        ({"formats": ["dense"]}, "v_in_k is of batches"),
        ({"kv_format": fa.kv.Format("int4")}, "int4 packs channels"),
    ):
        with pytest.raises(InputError, match=message):
            wanted_specs("Causal", **{**given, **changed})
