"""Codes that bf16 queries are multiplied with as they are: as integers, halves or words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.variants.reference import attention_reference, varlen_reference
from tests.batch.batches import indptr
from tests.harness.rotation import turn
from tests.ops.cases import HOST_TARGETS, assert_close, normal
from tests.ops.quantised.storage import named, rows_of

Format = fa.kv.Format
INT8 = Format("int8")
CODES = [INT8, Format("e4m3"), Format("nf4")]
GROUPS = [
    Format("int4", group=32, scale_dtype=torch.float16), Format("int8", group=64, zero=True),
    Format("int4", group=64, zero=True, scale_dtype=torch.bfloat16), Format("int4", zero=True),
    Format("int8", group=32), Format("int8", group=96), Format("int4", group=96),
    Format("e4m3", group=32), Format("e4m3", group=64), Format("e4m3", group=96),
    Format("nf4", group=32), Format("nf4", group=64), Format("e2m1", group=96),
]  # fmt: skip
OF_128 = [f for f in GROUPS if not (f.group and 128 % f.group)]  # that divide 128 channels
TARGETS = turn(30, HOST_TARGETS)


def check(q: torch.Tensor, k: Any, v: Any, variant: Any = None, target: str | None = None) -> None:
    out = fa.attention(q, k, v, variant, target=target)
    exact, eager = (
        attention_reference(q, k, v, variant, dtype=dtype)[0]
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert_close(out, exact, eager)


def tensors(rows: int, dim: int, dim_v: int, keys: int = 150) -> tuple[torch.Tensor, ...]:
    sizes = ((2, 2 * rows, 1, dim), (2, 2, keys, dim), (2, 2, keys, dim_v))
    q, k, v = (normal(i, *size) for i, size in enumerate(sizes))
    return q.bfloat16(), k, v


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kv_format", CODES, ids=named)
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 128), (192, 64), (256, 256), (128, 40)])
def test_groups_of_any_size(dim, dim_v, kv_format, target) -> None:
    for rows in (1, 2, 3, 4, 7, 8):  # query heads of a KV head
        q, k, v = tensors(rows, dim, dim_v)
        check(q, *(kv_format.quantize(x, heads_dim=1) for x in (k, v)), target=target)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 128), (192, 192), (256, 256), (128, 64)])
@pytest.mark.parametrize("kv_format", turn(3, GROUPS), ids=named)
def test_channels_with_numbers_of_their_own(kv_format, dim, dim_v, target) -> None:
    if kv_format.group and (dim % kv_format.group or dim_v % kv_format.group):
        dim = dim_v = 192
    for rows in (1, 2, 4, 7):
        q, k, v = tensors(rows, dim, dim_v)
        k[..., 3] += 4.0
        check(q, *(kv_format.quantize(x, heads_dim=1) for x in (k, v)), target=target)
        other = INT8.quantize(v, heads_dim=1)
        check(q, kv_format.quantize(k, heads_dim=1), other, fa.Sigmoid(), target=target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kv_format", turn(3, [Format("int4"), *OF_128]), ids=named)
@pytest.mark.parametrize("num_kv_heads", [8, 3])
def test_heads_of_one_token_are_read_together(kv_format, num_kv_heads, target) -> None:
    """Also where their numbers are more than a vector has, or lie apart."""
    q = normal(0, 3, 2 * num_kv_heads, 128).bfloat16()
    pages = [kv_format.quantize(normal(i, 30, 16, num_kv_heads, 128)) for i in (1, 2)]
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))[:21].int()
    paged = fa.Paged(indptr([10, 1, 10]), order, torch.tensor([5, 16, 1]), 16)
    batch = fa.BatchAttention(
        fa.Causal(), num_q_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=128,
        q_dtype=torch.bfloat16, kv_format=kv_format, target=target,
    )  # fmt: skip
    batch.plan(indptr([1, 1, 1]), paged)
    out = batch.run(q, *pages)
    slots = (order.long()[:, None] * 16 + torch.arange(16)).flatten()
    slots = torch.cat([slots[:149], slots[160:176], slots[176:321]])
    packed = [rows_of(x, slots) for x in pages]
    lengths = indptr([149, 16, 145])
    exact, eager = (
        varlen_reference(q, *packed, indptr([1, 1, 1]), lengths, fa.Causal(), dtype=t)[0]
        for t in (torch.float64, torch.bfloat16)
    )
    assert_close(out, exact, eager)
    apart = [replace(x, scales=spread(x.scales), zeros=spread(x.zeros)) for x in pages]
    torch.testing.assert_close(batch.run(q, *apart), out, rtol=0, atol=0)


def spread(numbers: torch.Tensor | None) -> torch.Tensor | None:
    """The same numbers, every second entry of a row of its own."""
    if numbers is None:
        return None
    wide = torch.full((*numbers.shape, 2), 7.0, dtype=numbers.dtype)
    wide[..., 0] = numbers
    return wide[..., 0]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kv_format", CODES, ids=named)
def test_rows_of_many_magnitudes(kv_format, target) -> None:
    q, k, v = (x.float() for x in tensors(4, 128, 128))
    # An outlier, which most keys do not meet; others lose as many bits of a word of 16.
    q[..., 7] *= 300.0 if kv_format.name == "nf4" else 1000.0
    k[:, :, 1:, 7] = 0.0
    q[:, 1] = 0.0
    q[:, 2] *= 1e-38
    k[:, :, 3] *= 1e4
    v[:, :, 5] *= 1e-6
    v[:, :, 9] *= 1e5
    k, v = (kv_format.quantize(x, heads_dim=1) for x in (k, v))
    check((q / 300).bfloat16(), k, v, target=target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["int8", "e4m3", "int4", "nf4"])
def test_small_weights_next_to_a_large_one(name, target) -> None:
    """As of an attention sink: most of the weight is that of a key whose value is nearly 0."""
    kv_format = Format(name, "head")
    for keys, delta in ((64, 7.0), (64, 9.0), (256, 10.0)):
        q, k, v = (normal(i, *size) for i, size in enumerate(
            [(1, 8, 1, 128), (1, 2, keys, 128), (1, 2, keys, 128)]
        ))  # fmt: skip
        v += 0.5
        k[:, :, :, 0] = 0.0
        k[:, :, 0] = 0.0
        k[:, :, 0, 0], q[..., 0] = 3.0, delta * 128**0.5 / 3
        v[:, :, 0] *= 0.01
        stored = [kv_format.quantize(x, heads_dim=1) for x in (k / 2, v)]
        out = fa.attention(2 * q.bfloat16(), *stored, target=target)
        exact, eager = (
            attention_reference(2 * q.bfloat16(), *stored, dtype=dtype)[0].double()
            for dtype in (torch.float64, torch.bfloat16)
        )
        # A tile of 64 keys has weights that are off by 2^-16 of the largest, 1.
        of_weights = 2.0**-16 * stored[1].dequantize().double().square().sum(-2).sqrt().mean()
        error = (out.double() - exact).square().mean().sqrt()
        bound = (
            1.5 * (eager - exact).square().mean().sqrt() + 2.0**-9 * exact.square().mean().sqrt()
        )
        assert error <= bound + of_weights


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kv_format", CODES, ids=named)
def test_weights_of_a_pointwise_normaliser(kv_format, target) -> None:
    """They are of either sign, and far from 1."""
    for fn in (lambda s: s, lambda s: s * 1e-6, lambda s: torch.relu(s) * 100.0):
        q, k, v = tensors(4, 64, 64)
        k, v = (kv_format.quantize(x, heads_dim=1) for x in (k, v))
        check(q, k, v, fa.variant(normalizer=fa.Pointwise(fn)), target)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("code", ["int8", "int4", "e4m3", "codebook"])
def test_the_extreme_codes(code, target) -> None:
    """-128 too, in every lane: sums of 256 such products fit."""
    book = None
    if code in ("int8", "e4m3"):
        lowest, highest = (-128, 127) if code == "int8" else (-2, 126)  # 0xfe and 0x7e: -448, 448
        codes = torch.full((1, 1, 64, 256), lowest, dtype=torch.int8)
        codes[:, :, 1::2] = highest
        codes = codes if code == "int8" else codes.view(torch.float8_e4m3fn)
    else:
        codes = torch.zeros(1, 1, 64, 128, dtype=torch.uint8)
        codes[:, :, 1::2] = 0xFF
        book = torch.linspace(-7.999, 7.999, 16) if code == "codebook" else None
    stored = fa.kv.Stored(codes, torch.tensor(1.0), codebook=book)
    q = torch.full((1, 4, 1, 256), 3e-3).bfloat16()
    check(q, stored, stored, target=target)
    check(-q, stored, stored, target=target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kv_format", CODES, ids=named)
def test_a_row_that_is_not_finite_changes_no_other(kv_format, target) -> None:
    q, k, v = tensors(4, 128, 128)
    k, v = (kv_format.quantize(x, heads_dim=1) for x in (k, v))
    clean = fa.attention(q, k, v, target=target)
    q[0, 1, 0, 5], q[1, 2, 0, 9] = float("nan"), float("inf")
    out = fa.attention(q, k, v, target=target)
    assert out[0, 1].isnan().all() and out[1, 2].isnan().all()
    out[0, 1], out[1, 2] = clean[0, 1], clean[1, 2]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kv_format", CODES, ids=named)
def test_many_keys_and_scores_far_from_0(kv_format, target) -> None:
    """Sums of thousands of weights, and scores of which eager bf16 has whole numbers."""
    for scale in (1.0, 8.0):
        q, k, v = tensors(4, 128, 128, keys=3000)
        k, v = (kv_format.quantize(x, heads_dim=1) for x in (k, v))
        check((q * scale).bfloat16(), k, v, target=target)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kv_format", CODES, ids=named)
def test_sums_of_equal_products(kv_format, target) -> None:
    """Roundings of each step go the same way."""
    for rows, dim in ((1, 64), (4, 128), (7, 256)):
        q, k, v = tensors(rows, dim, dim, keys=1000)
        for same in (0, 1):
            k, v = k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v)
            if same:  # in all dims too
                q, k, v = (x[..., :1].expand_as(x).contiguous() for x in (q, k, v))
            stored = (kv_format.quantize(x.contiguous(), heads_dim=1) for x in (k, v))
            check(q, *stored, target=target)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [1, 3, 6])
@pytest.mark.parametrize("group", [None, 64])
def test_nan_codes_are_nan_where_they_are_read(group, rows, target) -> None:
    form = Format("e4m3", group=group)
    q, k, v = tensors(rows, 128, 128, keys=70)
    k, v = (form.quantize(x, heads_dim=1) for x in (k, v))
    clean = fa.attention(q, k, v, target=target)
    for key, dim, code in ((0, 0, 0x7F), (37, 77, 0xFF), (69, 127, 0x7F)):
        keys, values = (replace(x, codes=x.codes.clone()) for x in (k, v))
        values.codes.view(torch.uint8)[0, 1, key, dim] = code
        out = fa.attention(q, keys, values, target=target)
        assert out[0, rows:, 0, dim].isnan().all()
        out[0, rows:, 0, dim] = clean[0, rows:, 0, dim]
        assert torch.equal(out, clean)
        keys.codes.view(torch.uint8)[1, 0, key, dim] = code
        out = fa.attention(q, keys, v, target=target)
        assert out[1, :rows].isnan().all()
        out[1, :rows] = clean[1, :rows]
        assert torch.equal(out, clean)


BOOKS = {
    "of many magnitudes": [*(s * 10.0**i for s in (1, -1) for i in range(-5, 3))],
    "tiny": [1e-36 * i for i in range(-8, 8)],
    "huge": [2e35 * i for i in range(-8, 8)],
    "zero": [0.0] * 16,
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("book", BOOKS)
def test_codebooks_of_any_magnitude(book, target) -> None:
    """The values of codes are as exact as those of queries, down to 2^-18 of the largest."""
    table = torch.tensor(BOOKS[book])
    largest = table.abs().max().item() or 1.0
    for rows in (1, 4, 6):
        q = tensors(rows, 128, 128)[0]
        codes = [
            torch.randint(0, 256, (2, 2, 150, 64), generator=torch.Generator().manual_seed(i))
            for i in (5, 6)
        ]
        codes[0][0] = codes[0][0] % 4 * 17  # keys and values of the smallest entries alone
        codes[1][1] = codes[1][1] % 4 * 17
        scales = torch.full((2, 2, 150), 1.0 / largest)
        k, v = (fa.kv.Stored(x.to(torch.uint8), scales, codebook=table) for x in codes)
        check(q, k, v, target=target)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("code", ["int8", "e4m3", "codebook"])
def test_factors_whose_product_is_ordinary(code, target) -> None:
    """Scales of 1e35 over queries of 1e-36, or over a codebook of 1e-36."""
    q, k, v = tensors(4, 128, 128)
    if code == "codebook":
        table = torch.linspace(-1, 1, 16) * 1e-36
        codes = torch.randint(0, 256, (2, 2, 150, 64), dtype=torch.uint8)
        k = fa.kv.Stored(codes, torch.full((2, 2, 150), 1e36), codebook=table)
    else:
        factor = 1e32 if code == "int8" else 1e36  # integers of a query below 1e-34 are 0
        k = Format(code).quantize(k, heads_dim=1)
        k, q = replace(k, scales=k.scales * factor), (q.float() / factor).bfloat16()
    check(q, k, INT8.quantize(v, heads_dim=1), target=target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("code", ["e4m3", "nf4"])
def test_values_near_zero_points(code, target) -> None:
    """The differences are small beside codes and zero points, and are all that counts."""
    q, k, v = tensors(4, 128, 128)
    stored = [Format(code).quantize(x.abs() * 1e-2 + 3.0, heads_dim=1) for x in (k, v)]
    near = [replace(x, zeros=3.0 / x.scales) for x in stored]
    check((q * 30).bfloat16(), *near, target=target)
