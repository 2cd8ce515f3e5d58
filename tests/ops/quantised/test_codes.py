"""Codes: each is the value that torch says it is, and quantising keeps within half a step."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashattn_jit as fa
from flashattn_jit.codegen.spec import host_targets
from flashattn_jit.codegen.targets import CPU_ROWS
from flashattn_jit.errors import InputError
from flashattn_jit.formats import CODES, SCALE_DTYPES, hadamard
from flashattn_jit.variants.ir.dtypes import CODES4
from tests.harness.rotation import chosen, other_target, takes_all
from tests.ops.cases import HOST_TARGETS
from tests.ops.quantised.storage import FORMATS, LLOYD

TARGETS = HOST_TARGETS if takes_all() else [other_target()]
BF16_TARGETS = dict.fromkeys(
    [HOST_TARGETS[-1], *(t for t in host_targets() if CPU_ROWS[t].bf16_rate or CPU_ROWS[t].fp16)]
)
FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("target", "q_dtype"),
    [*((t, torch.bfloat16) for t in BF16_TARGETS), *((t, torch.float32) for t in TARGETS)],
)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
def test_every_code_is_read_as_its_value(dtype, q_dtype, target) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).reshape(4, 64)
    one = fa.variant(
        key_mod=lambda row, b, kv_h, kv_idx: row * 1.0,
        value_mod=lambda row, b, kv_h, kv_idx: row * 1.0,
    )
    for row in codes:
        # One key is twice the only one, as keys are multiplied in pairs.
        twice = row.expand(1, 1, 2, 64)
        zero = torch.zeros(1, 1, 2, 64).to(dtype)
        q = torch.zeros(1, 1, 1, 64, dtype=q_dtype)
        out = fa.attention(q, zero, twice, one, target=target)
        assert_same(out[0, 0, 0].float(), row.float())
        unit = torch.eye(64, dtype=q_dtype).reshape(1, 64, 1, 64)  # each head reads one channel
        key = row.reshape(1, 1, 1, 64)
        _, lse = fa.attention(
            unit, key, zero[:, :, :1], one, scale=1.0, return_lse=True, target=target
        )
        finite = torch.where(row.float().isfinite(), row.float(), 0.0)
        if torch.equal(finite, row.float()):  # else 0 * inf is in every score
            assert_same(lse[0, :, 0], row.float())


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("dim", [33, 48, 64])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_float_of_8_bits_is_read_as_its_value_in_every_place(
    dtype, target, dim, rows
) -> None:
    """Two vectors at once, one, and what is left of a row; few rows, several groups, a tile."""
    padded = -(-256 // dim) * dim
    codes = (torch.arange(padded) % 256).to(torch.uint8).view(dtype).view(-1, 1, 1, dim)
    q = torch.zeros(codes.shape[0], 1, rows, dim)
    out = fa.attention(
        q, torch.zeros_like(codes, dtype=torch.float32).to(dtype), codes, target=target
    )
    assert_same(out, codes.float().expand_as(out))
    # Head c reads channel c of the only key. NaN and infinity are tested above.
    finite = torch.where(codes.float().isfinite(), codes.float(), 1.0)
    heads = torch.eye(dim).view(1, dim, 1, dim).expand(codes.shape[0], dim, rows, dim)
    keys = finite.to(dtype).expand(-1, 1, 1, dim)
    _, lse = fa.attention(heads, keys, keys, scale=1.0, return_lse=True, target=target)
    torch.testing.assert_close(
        lse, finite[:, 0, 0, :, None].expand(-1, dim, rows), rtol=2**-22, atol=0.0
    )


@pytest.mark.parametrize(
    ("target", "q_dtype", "dim"),
    chosen(
        [
            (target, dtype, dim)
            for dtype, targets in ((torch.bfloat16, BF16_TARGETS), (torch.float32, TARGETS))
            for target in targets
            for dim in (32, 40, 64, 128, 192, 256)
        ],
        6,
        lambda case: case[:2],
    ),
)
def test_every_code_of_4_bits_is_read_as_its_value(dim, q_dtype, target) -> None:
    """In every channel, as an integer, and as an index of a codebook."""
    codes = (torch.arange(32).view(-1, 1) + torch.arange(dim)) % 16
    pairs = (codes[:, : dim // 2] | codes[:, dim // 2 :] << 4).to(torch.uint8).view(1, 1, 32, -1)
    zero = torch.full_like(pairs, 0x88)
    book = torch.arange(16.0) ** 2 - 8
    for codebook, values in ((None, codes - 8.0), (book, book[codes])):
        one = torch.ones(1, 1, 32, dtype=q_dtype)
        k, v = (fa.kv.Stored(x, one.float(), codebook=codebook) for x in (zero, pairs))
        for i in range(32):  # keys whose weight is 1
            kept = fa.variant(mask_mod=lambda b, h, q, k, i=i: k == i)
            out = fa.attention(torch.zeros(1, 1, 1, dim, dtype=q_dtype), k, v, kept, target=target)
            assert torch.equal(out[0, 0, 0].float(), values[i])
        unit = torch.eye(dim, dtype=q_dtype).reshape(1, dim, 1, dim)
        k = fa.kv.Stored(pairs[:, :, :1], one[:, :, :1].float(), codebook=codebook)
        v = fa.kv.Stored(zero[:, :, :1], one[:, :, :1].float())
        _, lse = fa.attention(unit, k, v, scale=1.0, return_lse=True, target=target)
        torch.testing.assert_close(lse[0, :, 0], values[0], rtol=1e-6, atol=0)


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))


RELATIVE = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}
SMALLEST = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}  # half of the smallest subnormal
MANTISSA = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@st.composite
def formats(draw) -> fa.kv.Format:
    code = draw(st.sampled_from([*CODES, LLOYD]))
    scale = draw(st.sampled_from(("tensor", "head", "token_head", "page_head")))
    return fa.kv.Format(
        code, scale, draw(st.sampled_from(SCALE_DTYPES)),
        group=draw(st.sampled_from([None, 4, 8])) if scale in ("token_head", "page_head") else None,
        zero=code in ("int8", "int4") and draw(st.booleans()), rotate=draw(st.booleans()),
    )  # fmt: skip


def steps_of(kv_format: fa.kv.Format, stored: fa.kv.Stored) -> torch.Tensor:
    """The scale of each value."""
    ones = torch.ones_like(stored.dequantize())
    one = 1 if kv_format.values.book else 8 + 1
    book = None if not kv_format.values.book else torch.ones(16)
    codes = torch.full_like(stored.codes.view(torch.uint8), one | one << 4)
    if kv_format.dtype is not CODES4:
        codes = ones.to(kv_format.dtype)
    return fa.kv.Stored(
        codes, stored.scales, codebook=book, group=stored.group, block=stored.block
    ).dequantize()


@settings(max_examples=120, deadline=None)
@given(
    kv_format=formats(), seed=st.integers(0, 2**30), spread=st.floats(0, 8), zeros=st.booleans(),
    offset=st.sampled_from([0.0, 0.0, 3.0, 10.0]),
)  # fmt: skip
def test_values_keep_within_a_step(kv_format, seed, spread, zeros, offset) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 4, 2, 32, generator=generator) + offset
    x *= torch.exp2(torch.rand(3, 4, 2, 1, generator=generator) * spread)
    x[..., 5] *= 30.0  # an outlier
    if zeros:
        x[1] = 0.0
    stored = kv_format.quantize(x)
    assert stored.codes.dtype == kv_format.dtype and stored.scales.dtype == kv_format.scale_dtype
    step = steps_of(kv_format, stored)
    values = hadamard(x) if kv_format.rotate else x  # what is quantised
    error = stored.dequantize() - x
    error = (hadamard(error) if kv_format.rotate else error).abs()
    if kv_format.values.book:
        allowed = step * torch.tensor(sorted(kv_format.values.book)).diff().max() / 2
    elif kv_format.name in RELATIVE:
        code = kv_format.name
        allowed = torch.maximum(RELATIVE[code] * values.abs(), SMALLEST[code] * step)
    else:
        allowed = 0.5 * step
        if stored.zeros is not None:  # rounded, so that the codes' ends may be off
            allowed = step * (0.5 + 1300 * MANTISSA[kv_format.scale_dtype])
    assert (error <= allowed + 3e-6 * values.abs().amax(-1, keepdim=True)).all()
    if zeros and kv_format.scale in ("token_head", "page_head"):
        assert (stored.dequantize()[1] == 0).all() and (stored.scales[1] == 0).all()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**30),
    kv_format=st.sampled_from([f for f in FORMATS if f.scale == "token_head"]),
)
def test_outputs_keep_within_the_bound_of_their_scores_and_values(seed, kv_format) -> None:
    """|out error| <= (exp(2 e) - 1) (max v - min v) + the largest error of v, where no score is
    off by more than e."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator) for n in (1, 40, 40))
    k[..., 7] *= 30.0
    v[:, :, 3] *= 20.0
    stored_k, stored_v = (kv_format.quantize(x, heads_dim=1) for x in (k, v))
    scores, moved = ((q @ x.mT) / 8.0 for x in (k, stored_k.dequantize(heads_dim=1)))
    e = (scores - moved).abs().amax(-1, keepdim=True)
    spread = v.amax(2, keepdim=True) - v.amin(2, keepdim=True)
    of_values = (stored_v.dequantize(heads_dim=1) - v).abs().amax(2, keepdim=True)
    error = (fa.attention(q, stored_k, stored_v) - fa.attention(q, k, v)).abs()
    assert (error <= (torch.exp(2 * e) - 1) * spread + of_values + 1e-5 * spread).all()
    assert error.max() < math.inf


def test_values_that_no_scale_can_represent() -> None:
    x = torch.randn(4, 2, 32)
    x[0, 1, 3], x[1, 0, 0], x[2] = float("nan"), float("inf"), 3e38
    for code, scale_dtype in (
        ("int8", torch.float32),
        ("e4m3", torch.float16),
        ("nf4", torch.float16),
    ):
        stored = fa.kv.Format(code, scale_dtype=scale_dtype).quantize(x)
        values = stored.dequantize()
        assert values[0, 1].isnan().all() and values[1, 0].isnan().all()
        assert values[0, 0].isfinite().all() and values[1, 1].isfinite().all()
        if scale_dtype == torch.float16:  # ends at 65,504
            assert stored.scales[2].isinf().all()
        else:
            torch.testing.assert_close(values[2], x[2], rtol=0.01, atol=0)
    with pytest.raises(InputError, match=r"scales.* is nan, which many slots share"):
        fa.kv.Format("int8", "tensor").quantize(x)
