"""Attention over keys and values stored as codes, on CUDA targets, executed by the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.targets import CUDA_TARGETS
from flashattn_jit.variants.reference import attention_reference, varlen_reference
from tests.batch.batches import indptr
from tests.harness.rotation import turn
from tests.ops.cases import assert_close, normal
from tests.ops.quantised.storage import CHANNELS, FORMATS, LLOYD, OF_PAGES, named, rows_of

Format = fa.kv.Format
ROWS = (3, 40)  # query rows of a head: the few-row kernel, the prefill kernel
TARGETS = [t for t in CUDA_TARGETS if not t.endswith("a")]
INT8, INT4 = Format("int8"), Format("int4", group=32, zero=True)


def dtype_of(target: str) -> torch.dtype:
    return torch.float16 if target == "sm_75" else torch.bfloat16


def tensors(rows: int, dim: int, dim_v: int, keys: int = 150) -> tuple[torch.Tensor, ...]:
    sizes = ((2, 4, rows, dim), (2, 2, keys, dim), (2, 2, keys, dim_v))
    q, k, v = (normal(i, *size) for i, size in enumerate(sizes))
    return q, k, v


def check(q: torch.Tensor, k: Any, v: Any, variant: Any, target: str) -> None:
    q = q.to(dtype_of(target))
    k, v = (x.to(q.dtype) if getattr(x, "dtype", None) is torch.float32 else x for x in (k, v))
    out = fa.attention(q, k, v, variant, target=f"emulated:{target}")
    exact, eager = (
        attention_reference(q, k, v, variant, dtype=dtype)[0] for dtype in (torch.float64, q.dtype)
    )
    assert_close(out, exact, eager)


@pytest.mark.parametrize("kv_format", turn(4, FORMATS), ids=named)
@pytest.mark.parametrize("target", turn(2, TARGETS))
@pytest.mark.parametrize("rows", ROWS)
def test_every_format(kv_format, target, rows) -> None:
    q, k, v = tensors(rows, 64, 128)
    stored = (kv_format.quantize(x, heads_dim=1) for x in (k, v))
    check(q, *stored, fa.Causal(), target)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("kv_format", [Format("e5m2"), INT8], ids=named)
@pytest.mark.parametrize(("target", "factor"), [("sm_75", 0.05), ("sm_90", 1e-3), ("sm_80", 1e4)])
def test_scales_of_any_size(kv_format, target, factor) -> None:
    """A weight times a scale may be no number of float16, where the value is one."""
    q, k, v = tensors(3, 64, 64)
    q, v = q.half() * 0.1, (v + 1.0) * factor
    stored = [kv_format.quantize(x, heads_dim=1) for x in (k, v)]
    out = fa.attention(q, *stored, target=f"emulated:{target}")
    exact, eager = (
        attention_reference(q, *stored, dtype=dtype)[0] for dtype in (torch.float64, q.dtype)
    )
    assert_close(out, exact, eager)


class Book(fa.Variant):
    """A lookup like that of a codebook, by a user."""

    book = fa.tensor(16)

    def key_mod(self, row, b, kv_h, kv_idx):
        return self.book[(row + 8.0).to(torch.int32)] * 2.0


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("code", ["int8", "bfloat16"])
@pytest.mark.parametrize("rows", ROWS)
def test_lookups_that_are_no_codebook(code, rows) -> None:
    q, k, v = tensors(rows, 64, 64)
    k = (k * 3).round().clamp(-8, 7).to(getattr(torch, code))
    variant = Book(book=torch.linspace(-1, 1, 16))
    v = v.bfloat16() if code == "int8" else INT8.quantize(v, heads_dim=1)
    check(q, k, v, variant, "sm_80")


SIDES = {
    "keys alone": (INT8, None), "values alone": (None, INT4), "both": (Format("e4m3"), INT4),
    "codebooks": (Format(LLOYD, group=16), Format("nf4", scale_dtype=torch.float16)),
}  # fmt: skip


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("sides", "rows"), [(sides, rows) for i, sides in enumerate(SIDES) for rows in turn(i, ROWS)]
)
@pytest.mark.parametrize("target", turn(1, TARGETS))
def test_sides_of_their_own(sides, target, rows) -> None:
    q, k, v = tensors(rows, 64, 64)
    formats = zip(SIDES[sides], (k, v), strict=True)
    k, v = (f.quantize(x, heads_dim=1) if f else x for f, x in formats)
    check(q, k, v, fa.ALiBi(), target)


HEAD_DIMS = ((40, 40), (33, 71), (96, 24), (256, 256), (8, 128))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("dim", "dim_v", "rows"),
    [(*dims, rows) for i, dims in enumerate(HEAD_DIMS) for rows in turn(i, ROWS)],
)
@pytest.mark.parametrize("target", turn(1, TARGETS))
def test_head_dims(dim, dim_v, target, rows) -> None:
    """Also rows that do not start or end at multiples of 16 bytes."""
    q, k, v = tensors(rows, dim, dim_v, 70)
    of_values = Format("int4") if dim_v % 2 == 0 else Format("e5m2")
    check(q, INT8.quantize(k, heads_dim=1), of_values.quantize(v, heads_dim=1), None, target)


HOOKS = {
    "rope": (fa.RoPE(), INT4), "soft cap": (fa.SoftCap(20.0), INT8),
    "sigmoid": (fa.Sigmoid(), INT4),
    "groups of 4": (None, Format("int8", group=4)),
    "groups of 16": (fa.SlidingWindow(40), Format("int4", group=16, scale_dtype=torch.float16)),
    "rotated": (None, Format("nf4", group=32, rotate=True)),
}  # fmt: skip


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("hooks", "rows"), [(name, rows) for i, name in enumerate(HOOKS) for rows in turn(i, ROWS)]
)
@pytest.mark.parametrize("target", turn(1, TARGETS))
def test_hooks_over_codes(hooks, target, rows) -> None:
    variant, kv_format = HOOKS[hooks]
    q, k, v = tensors(rows, 64, 64)
    stored = [kv_format.quantize(x, heads_dim=1) for x in (k, v)]
    check(q, *stored, variant, target)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("target", turn(2, TARGETS))
@pytest.mark.parametrize("rows", ROWS)
def test_floats_without_scales(dtype, target, rows) -> None:
    """Every code of 8 bits: subnormals, the largest, infinities and NaN."""
    q, k, _ = tensors(rows, 64, 64)
    check(q, k.to(dtype), k.to(dtype), None, target)
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    values = torch.zeros(1, 1, 300, 64, dtype=dtype)
    values[0, 0, 0], values[0, 0, 1] = codes[:64], codes[64:128]
    values[0, 0, 40], values[0, 0, 299] = codes[128:192], codes[192:]
    q = torch.zeros(1, 1, rows, 64, dtype=dtype_of(target))
    for row in (0, 1, 40, 299):
        keys = torch.full((1, 1, 300, 64), -16.0)
        keys[0, 0, row] = 16.0
        q.fill_(16.0)
        out = fa.attention(q, keys.to(dtype), values, target=f"emulated:{target}")
        want = values[0, 0, row].float()
        special = ~values[0, 0].float().isfinite().all(0)  # 0 times NaN
        torch.testing.assert_close(out[0, 0, -1][~special].float(), want[~special], rtol=0, atol=0)
        assert not out[0, 0, -1][special].isfinite().any()


@pytest.mark.parametrize("kv_format", turn(2, [INT8, INT4, *OF_PAGES, *CHANNELS]), ids=named)
@pytest.mark.parametrize("target", turn(2, TARGETS))
def test_batches_over_pages(kv_format, target) -> None:
    """Prefill and decoding in one batch, pages in any order; a cascade over the same pages."""
    size = 64
    q = normal(0, 50, 4, 64).to(dtype_of(target))
    pages = [kv_format.quantize(normal(i, 9, size, 2, 64)) for i in (1, 2)]
    order = torch.tensor([4, 1, 7, 0, 3], dtype=torch.int32)
    paged = fa.Paged(indptr([3, 2]), order, torch.tensor([11, 64]), size)
    batch = fa.BatchAttention(
        fa.Causal(), num_q_heads=4, num_kv_heads=2, head_dim=64, q_dtype=q.dtype,
        kv_format=kv_format, target=f"emulated:{target}",
    )  # fmt: skip
    batch.plan(indptr([49, 1]), paged)
    out = batch.run(q, *pages)
    slots = (order.long()[:, None] * size + torch.arange(size)).flatten()
    slots = torch.cat([slots[:139], slots[192:]])
    packed = [rows_of(x, slots) for x in pages]
    exact, eager = (
        varlen_reference(q, *packed, indptr([49, 1]), indptr([139, 128]), fa.Causal(), dtype=t)[0]
        for t in (torch.float64, q.dtype)
    )
    assert_close(out, exact, eager)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("kv_format", turn(2, [INT8, INT4, Format("nf4", group=32)]), ids=named)
@pytest.mark.parametrize("target", turn(2, TARGETS))
@pytest.mark.parametrize("kind", ["token lists", "token lists and RoPE", "cascade"])
def test_keys_of_other_plans(kv_format, target, kind) -> None:
    """Lists of keys, and keys that requests share, against the CPU's kernels."""
    q = normal(0, 3, 4, 64).to(dtype_of(target))
    pages = [kv_format.quantize(normal(i, 20, 8, 2, 64)) for i in (1, 2)]
    tables = [[0, 1, 2, 3 + b, 6 + b] for b in range(3)]
    order = torch.tensor(tables, dtype=torch.int32).flatten()
    paged = fa.Paged(indptr([5] * 3), order, torch.tensor([8, 3, 1]), 8)
    made = fa.CascadeAttention if kind == "cascade" else fa.BatchAttention
    results = []
    for where in (f"emulated:{target}", None):
        batch = made(
            fa.RoPE() if "RoPE" in kind else None, num_q_heads=4, num_kv_heads=2, head_dim=64,
            q_dtype=q.dtype, kv_format=kv_format, target=where,
        )  # fmt: skip
        if kind == "cascade":
            batch.plan(fa.cascade_levels(indptr([1] * 3), paged))
        else:
            lists = torch.tensor([[3, 0, 30, 17, 39], [9, 10, 11, -1, -1], [32, 1, 2, 3, 4]])
            batch.plan(indptr([1] * 3), paged, sparsity=fa.TokenSparse(lists))
        results.append(batch.run(q, *pages).float())
    torch.testing.assert_close(*results, rtol=2e-2, atol=1e-2)
