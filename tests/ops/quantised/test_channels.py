"""Scales of channels, which blocks of 64 slots share: wherever blocks and tiles of keys begin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.variants.reference import attention_reference, varlen_reference
from tests.batch.batches import indptr
from tests.harness.rotation import other_target, turn
from tests.ops.cases import HOST_TARGETS, assert_close, normal
from tests.ops.quantised.storage import named, rows_of

Format = fa.kv.Format
BF16 = torch.bfloat16
KIVI = Format("int4", "channel", zero=True, scale_dtype=torch.float16)
TOKENS = Format("int4", group=32)
OTHERS = [
    Format("int8", "channel", BF16), Format("e4m3", "channel"), Format("nf4", "channel"),
    Format("int8", "channel", zero=True),
]  # fmt: skip
TARGETS = turn(31, HOST_TARGETS)


def check_calls(
    keys: fa.kv.Format, values: fa.kv.Format, shapes: list[tuple[int, int]], target: str
) -> None:
    """Calls of `rows` query tokens and a head dim, with channels of very different magnitudes."""
    for rows, dim in shapes:
        q, k, v = (normal(i, 2, 2, n, dim) for i, n in enumerate((rows, 192, 192)))
        k[..., 3] += 4.0
        k[..., 7] *= 30.0
        q, k, v = q.to(BF16), keys.quantize(k, heads_dim=1), values.quantize(v, heads_dim=1)
        out = fa.attention(q, k, v, target=target)
        exact, eager = (
            attention_reference(q, k, v, dtype=dtype)[0] for dtype in (torch.float64, BF16)
        )
        assert_close(out, exact, eager)


@pytest.mark.parametrize("target", TARGETS)
def test_groups_of_every_size(target) -> None:
    check_calls(KIVI, TOKENS, [(rows, 128) for rows in (1, 2, 3, 7)], target)


@pytest.mark.parametrize("kv_format", turn(4, OTHERS), ids=named)
def test_keys_and_values_by_channel(kv_format) -> None:
    """Of few rows and of many, and of a head dim that does not fill vectors."""
    check_calls(kv_format, kv_format, [(3, 128), (4, 40), (90, 128)], other_target())


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("target", [t for t in HOST_TARGETS if t.startswith("cpu:avx")][-2:])
def test_codes_near_their_zero_point(target, dtype) -> None:
    """Of channels with one outlier in a block: what rounding changed in q must cancel."""
    keys = Format("int8", "channel", zero=True)
    q, k, v = (normal(i, 2, 2, n, 96) for i, n in enumerate((1, 192, 192)))
    q, k = q - q.mean(-1, keepdim=True), k.abs()
    k[..., ::64, :] = 30.0
    q, k, v = q.to(dtype), keys.quantize(k.to(dtype), heads_dim=1), v.to(dtype)
    out = fa.attention(q, k, v, target=target)
    exact, eager = (attention_reference(q, k, v, dtype=t)[0] for t in (torch.float64, dtype))
    assert_close(out, exact, eager)


@pytest.mark.parametrize("scale", ["token_head", "channel"])
def test_integer_sums_of_the_longest_rows(scale) -> None:
    """576 products of the largest integers, all of one sign."""
    q = torch.full((1, 2, 2, 576), 0.05, dtype=BF16)
    k = torch.ones(1, 1, 128, 576)
    k[:, :, ::2] = -1
    v = normal(2, 1, 1, 128, 576)
    k, v = Format("int8", scale).quantize(k, heads_dim=1), Format("int8").quantize(v, heads_dim=1)
    out = fa.attention(q, k, v, target=HOST_TARGETS[-1])
    exact, eager = (attention_reference(q, k, v, dtype=t)[0] for t in (torch.float64, BF16))
    assert_close(out, exact, eager)


@pytest.mark.parametrize("target", TARGETS)
def test_blocks_that_begin_within_a_tile(target) -> None:
    """Of packed rows, whose requests begin at any slot, and of tokens of a list."""
    q = normal(0, 3, 8, 128).to(BF16)
    k, v = (normal(i, 320, 2, 128) for i in (1, 2))
    stored = KIVI.quantize(k), TOKENS.quantize(v)
    lengths, one_each = indptr([70, 1, 249]), indptr([1, 1, 1])
    batch = fa.BatchAttention(
        fa.Causal(), num_q_heads=8, num_kv_heads=2, head_dim=128, q_dtype=BF16,
        kv_format=(KIVI, TOKENS), target=target,
    )  # fmt: skip
    batch.plan(one_each, fa.Ragged(lengths))
    check(batch.run(q, *stored), q, stored, torch.arange(320), lengths)
    lists = torch.full((3, 80), -1)
    lists[0, :2], lists[1, 0] = torch.tensor([64, 3]), 0
    lists[2] = torch.randperm(249, generator=torch.Generator().manual_seed(3))[:80]
    batch.plan(one_each, fa.Ragged(lengths), sparsity=fa.TokenSparse(lists))
    slots = torch.cat([lists[0, :2], lists[1, :1] + 70, lists[2] + 71])
    check(batch.run(q, *stored), q, stored, slots, indptr([2, 1, 80]))


def check(
    out: torch.Tensor, q: torch.Tensor, stored: tuple[fa.kv.Stored, ...], slots: torch.Tensor,
    lengths: torch.Tensor,
) -> None:  # fmt: skip
    """out is attention of one query token a request over the keys in these slots."""
    as_page = (
        replace(
            x, codes=x.codes[None], scales=x.scales[None],
            zeros=None if x.zeros is None else x.zeros[None],
        )
        for x in stored
    )  # fmt: skip
    packed = [rows_of(x, slots) for x in as_page]
    exact, eager = (
        varlen_reference(q, *packed, indptr([1, 1, 1]), lengths, dtype=t)[0]
        for t in (torch.float64, BF16)
    )
    assert_close(out, exact, eager)
