"""Kernels of quantised keys and values ahead of their calls: `kv_format=` says all that decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.deploy.manifest.file import read_manifest
from flashattn_jit.deploy.pack.pack import pack
from flashattn_jit.deploy.pack.unpack import unpack
from flashattn_jit.deploy.wanted.specs import wanted_specs
from flashattn_jit.deploy.warm.warm import warm
from flashattn_jit.errors import InputError
from flashattn_jit.jit.module import default
from tests.harness import rotation

TARGET = "cpu:generic"
HQ, HKV, DIM, PAGE = 4, 2, 16, 64
HERE: dict[str, Any] = {"head_dims": DIM, "dtypes": "fp32", "targets": TARGET}
Format = fa.kv.Format
INT8 = Format("int8")
FORMATS: list[Any] = [
    INT8, (Format("e4m3", "head"), None), Format("int4", group=8, zero=True, rotate=True),
    (Format("nf4", scale_dtype=torch.float16), Format("int8", "page_head")),
    Format("int4", "channel", torch.bfloat16), (None, Format("e5m2", "tensor")),
]  # fmt: skip


def pair(kv_format: Any) -> tuple[Any, Any]:
    return kv_format if isinstance(kv_format, tuple) else (kv_format, kv_format)


def tensors(kv_format: Any, *shape: int, heads_dim: int = -2) -> list[Any]:
    return [
        x if form is None else form.quantize(x, heads_dim=heads_dim)
        for x, form in zip(torch.randn(2, *shape), pair(kv_format), strict=True)
    ]


PAGED = fa.Paged(torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1]).int(), torch.tensor([5, 9]), PAGE)
ROWS = torch.tensor([0, 1, 4])


def serve(variant: Any, kv_format: Any) -> None:
    """A batch, a prefill, and a cascade under a tail that is not quantised; appends."""
    options: dict[str, Any] = {
        "num_q_heads": HQ, "num_kv_heads": HKV, "head_dim": DIM, "q_dtype": torch.float32,
        "target": TARGET,
    }  # fmt: skip
    pages, q = tensors(kv_format, 3, PAGE, HKV, DIM), torch.randn(4, HQ, DIM)
    batch = fa.BatchAttention(variant, kv_format=kv_format, **options)
    batch.plan(ROWS, PAGED)
    batch.run(q, *pages)
    batch.plan(torch.tensor([0, 60]), fa.Paged(torch.tensor([0, 2]), torch.tensor([0, 1]).int(),
                                               torch.tensor([20]), PAGE))  # fmt: skip
    batch.run(torch.randn(60, HQ, DIM), *pages)
    cascade = fa.CascadeAttention(variant, **options)
    prefix = fa.Paged(torch.tensor([0, 1]), torch.tensor([1]).int(), torch.tensor([64]), PAGE)
    cascade.plan([
        fa.CascadeLevel(torch.tensor([0, 4]), prefix, kv_format=kv_format),
        fa.CascadeLevel(ROWS, PAGED, kv_format=kv_format),
    ])  # fmt: skip
    cascade.run(q, *pages)
    cascade.plan([
        fa.CascadeLevel(torch.tensor([0, 4]), prefix, kv_format=kv_format),
        fa.CascadeLevel(ROWS, PAGED),
    ])  # fmt: skip
    cascade.run(q, [tuple(pages), tuple(torch.randn(2, 3, PAGE, HKV, DIM))])
    new = torch.randn(2, 4, HKV, DIM)
    for transform in (None, variant) if hasattr(variant, "key_mod") else (None,):
        fa.append_paged_kv(*new, *pages, ROWS, PAGED, transform=transform, target=TARGET)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of this file: formats share the kernels of pages that are not quantised."""
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("kv_format", rotation.chosen(FORMATS, 2))
def test_what_calls_ask_for_is_wanted(
    kv_format: Any, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of calls themselves, whatever the strides of scales; none is given a param."""
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(kernels))
    variant = fa.Causal() & fa.RoPE() if kv_format is FORMATS[2] else fa.Causal()
    wanted = {s.document() for s in wanted_specs(variant, kv_format=kv_format, **HERE)}
    wanted |= {s.document() for s in wanted_specs(variant, **HERE)}  # of the tail
    default.forget()
    serve(variant, kv_format)
    if "page_head" not in {f and f.scale for f in pair(kv_format)}:
        q, keys = torch.randn(1, HQ, 3, DIM), tensors(kv_format, 1, HKV, PAGE, DIM, heads_dim=1)
        fa.attention(q, *keys, variant, target=TARGET)
        rows, ends = torch.randn(3, HQ, DIM), [torch.tensor([0, n]) for n in (3, PAGE)]
        packed = tensors(kv_format, PAGE, HKV, DIM)
        fa.varlen_attention(rows, *packed, *ends, variant, target=TARGET)
    asked = {loaded.request.spec for loaded in default.loaded()}
    assert len(asked) >= 4 and asked <= wanted


def test_a_warmed_format_compiles_nothing_at_its_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, kv_format = fa.Causal(), (INT8, Format("int4", rotate=True))
    calls = ["paged", "cascade", "append"]
    report = warm(variant, kv_format=kv_format, formats=calls, progress=False, **HERE)
    warm(variant, formats=calls[:2], progress=False, **HERE)
    assert report.results and all(r.built for r in report.results)
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    default.forget()
    manifest = tmp_path / "m.jsonl"
    with fa.record_manifest(manifest):
        serve(variant, kv_format)
    assert default.last_source == "disk"
    lines = read_manifest(manifest)
    assert {"int8", "bits4x2"} <= {d for x in lines for d in (x.spec.k_dtype, x.spec.v_dtype)}  # type: ignore[union-attr]
    # A manifest says its formats itself, and packs hold what it stands for.
    pack(tmp_path / "kernels.pack", manifest=manifest)
    cache = tmp_path / "other"
    unpack(tmp_path / "kernels.pack", cache)
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(cache))
    default.forget()
    serve(variant, kv_format)
    assert default.last_source == "disk"


def test_targets_and_dtypes_of_queries() -> None:
    specs = wanted_specs(
        fa.Causal(), head_dims=64, dtypes=("fp32", "bf16"), targets=("cpu:avx2", "sm_80"),
        formats=["paged", "append"], kv_format=(INT8, None),
    )  # fmt: skip
    kernels = [s for s in specs if hasattr(s, "q_dtype")]
    assert {(s.target, s.q_dtype, s.k_dtype, s.v_dtype) for s in kernels} == {
        ("cpu:avx2", "float32", "int8", "float32"), ("cpu:avx2", "bfloat16", "int8", "bfloat16"),
        ("sm_80", "bfloat16", "int8", "bfloat16"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("what", "given", "words"),
    [
        ("Causal", {"kv_format": "int8"}, "kv_format must be an fa.kv.Format, or a pair"),
        ("Causal", {"kv_format": Format("int4", group=5)}, "group=5 does not divide head_dim=16"),
        ("Causal", {"kv_format": INT8, "formats": ["block_mask"]}, "values without kv_format"),
        ("Causal", {"kv_format": INT8, "formats": ["page"]}, "unknown format 'page'"),
    ],
)
def test_wrong_formats(what: str, given: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        wanted_specs(what, **{**HERE, **given})


def test_formats_are_for_variants() -> None:
    spec = wanted_specs("Causal", **HERE)[0]
    with pytest.raises(InputError, match="kv_format and v_in_k are for variants"):
        wanted_specs(spec, kv_format=INT8)
