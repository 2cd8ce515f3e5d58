"""Codes: each is the value that torch says it is, and quantising keeps within half a step."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashattn_jit as fa
from flashattn_jit.formats import CODES, SCALE_DTYPES, SCALES
from tests.harness.rotation import other_target, takes_all
from tests.ops.cases import HOST_TARGETS

TARGETS = HOST_TARGETS if takes_all() else [other_target()]
FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize(
    ("target", "q_dtype"),
    [(HOST_TARGETS[-1], torch.bfloat16), *((t, torch.float32) for t in TARGETS)],
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


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))


RELATIVE = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}
SMALLEST = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}  # half of the smallest subnormal


@settings(max_examples=60, deadline=None)
@given(
    code=st.sampled_from(sorted(CODES)), scale=st.sampled_from(SCALES),
    scale_dtype=st.sampled_from(SCALE_DTYPES), seed=st.integers(0, 2**30),
    spread=st.floats(0, 8), zeros=st.booleans(),
)  # fmt: skip
def test_values_keep_within_a_step(code, scale, scale_dtype, seed, spread, zeros) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 4, 2, 32, generator=generator)
    x *= torch.exp2(torch.rand(3, 4, 2, 1, generator=generator) * spread)
    x[..., 5] *= 30.0  # an outlier
    if zeros:
        x[1] = 0.0
    stored = fa.kv.Format(code, scale, scale_dtype).quantize(x)
    assert stored.codes.dtype == CODES[code].dtype and stored.scales.dtype == scale_dtype
    error = (stored.dequantize() - x).abs()
    step = stored.of_rows().float().unsqueeze(-1)
    if code == "int8":
        allowed = 0.5 * step
    else:
        allowed = torch.maximum(RELATIVE[code] * x.abs(), SMALLEST[code] * step)
    assert (error <= allowed + 1e-6 * x.abs()).all()
    if zeros and scale == "token_head":
        assert (stored.dequantize()[1] == 0).all() and (stored.scales[1] == 0).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**30), code=st.sampled_from(["int8", "e4m3"]))
def test_outputs_keep_within_the_bound_of_their_scores_and_values(seed: int, code: str) -> None:
    """|out error| <= (exp(2 e) - 1) (max v - min v) + the largest error of v, where no score is
    off by more than e."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator) for n in (1, 40, 40))
    k[..., 7] *= 30.0
    v[:, :, 3] *= 20.0
    kv_format = fa.kv.Format(code)
    stored_k, stored_v = (kv_format.quantize(x, heads_dim=1) for x in (k, v))
    scores, moved = ((q @ x.mT) / 8.0 for x in (k, stored_k.dequantize()))
    e = (scores - moved).abs().amax(-1, keepdim=True)
    spread = v.amax(2, keepdim=True) - v.amin(2, keepdim=True)
    of_values = (stored_v.dequantize() - v).abs().amax(2, keepdim=True)
    error = (fa.attention(q, stored_k, stored_v) - fa.attention(q, k, v)).abs()
    assert (error <= (torch.exp(2 * e) - 1) * spread + of_values + 1e-5 * spread).all()
    assert error.max() < math.inf


def test_values_that_no_scale_can_represent() -> None:
    x = torch.randn(4, 2, 32)
    x[0, 1, 3], x[1, 0, 0], x[2] = float("nan"), float("inf"), 3e38
    for code, scale_dtype in (("int8", torch.float32), ("e4m3", torch.float16)):
        stored = fa.kv.Format(code, scale_dtype=scale_dtype).quantize(x)
        values = stored.dequantize()
        assert values[0, 1].isnan().all() and values[1, 0].isnan().all()
        assert values[0, 0].isfinite().all() and values[1, 1].isfinite().all()
        if scale_dtype == torch.float16:  # ends at 65,504
            assert stored.scales[2].isinf().all()
        else:
            torch.testing.assert_close(values[2], x[2], rtol=0.01, atol=0)
    whole = fa.kv.Format("int8", "tensor").quantize(x)
    assert whole.scales.isnan() and (whole.codes == 0).all()
