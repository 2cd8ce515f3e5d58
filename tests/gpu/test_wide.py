"""Head dims above 256 on the device: two warps share the rows of a tile; latents are read once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.variants.reference import varlen_reference
from tests.batch.batches import indptr
from tests.gpu.harness import Want, case_named, run_case
from tests.gpu.place import DEVICE, TARGET, synchronize
from tests.ops.cases import assert_close, normal
from tests.registry.case import Shape

FP16, BF16 = torch.float16, torch.bfloat16
SHAPES = [
    Shape(2, 4, 2, 70, 150, 512, 512), Shape(1, 4, 1, 40, 90, 576, 512),
    Shape(2, 4, 2, 3, 150, 320, 257), Shape(1, 2, 2, 33, 100, 264, 64),
]  # fmt: skip
NAMES = ("plain full", "plain causal", "plain window", "plain alibi")
WANTS = tuple(Want(name, shape, BF16) for name in NAMES for shape in SHAPES)
PAGE, RANK, WIDTH = 16, 512, 576


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.id)
@pytest.mark.parametrize("case", NAMES)
def test_dense_calls(case: str, shape: Shape, dtype: torch.dtype) -> None:
    run_case(case_named(case), shape, dtype)


FORMATS: list[Any] = [None, fa.kv.Format("e4m3", group=64), fa.kv.Format("int8", group=64)]


@pytest.mark.parametrize("kv_format", FORMATS, ids=["plain", "e4m3", "int8"])
@pytest.mark.parametrize("heads", [16, 128])
def test_latents_in_pages(heads: int, kv_format: fa.kv.Format | None) -> None:
    """Prefill, a chunk and decoding in one batch; slots that were never written are NaN."""
    q_len, kv_len = [20, 5, 1, 0, 1], [20, 70, 130, 30, 1]
    counts = [-(-n // PAGE) for n in kv_len]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    last = torch.tensor([(n - 1) % PAGE + 1 for n in kv_len])
    rows = normal(0, sum(kv_len), 1, WIDTH).to(BF16)
    q = normal(1, sum(q_len), heads, WIDTH).to(BF16)
    pages = torch.full((sum(counts), PAGE, 1, WIDTH), torch.nan, dtype=BF16)
    owner = order.split(counts)
    for request, own in zip(rows.split(kv_len), owner, strict=True):
        for i, row in enumerate(request):
            pages[own[i // PAGE], i % PAGE] = row
    stored: Any = pages.to(DEVICE)
    if kv_format is not None:
        stored = kv_format.quantize(stored.nan_to_num())
        rows = kv_format.quantize(rows).dequantize()
    paged = fa.Paged(indptr(counts), order.int().to(DEVICE), last, PAGE)
    batch = fa.BatchAttention(
        fa.Causal(), num_q_heads=heads, num_kv_heads=1, head_dim=WIDTH, head_dim_v=RANK,
        v_in_k=True, q_dtype=BF16, kv_format=kv_format, device=DEVICE, target=TARGET,
    )  # fmt: skip
    batch.plan(indptr(q_len), paged)
    out = batch.run(q.to(DEVICE), stored, scale=192**-0.5)
    synchronize()
    exact, eager = (
        varlen_reference(
            q, rows, rows[..., :RANK], indptr(q_len), indptr(kv_len), fa.Causal(),
            scale=192**-0.5, q_offset="end", dtype=dtype,
        )[0]
        for dtype in (torch.float64, BF16)
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    assert_close(out.cpu(), exact, eager)
