"""Library biases and score functions against formulas written directly on dense grids."""

from __future__ import annotations

import math

import pytest
import torch

import flashattn_jit.variants.library as lib
from flashattn_jit.errors import ParamError, VariantError
from flashattn_jit.variants.variant import Variant
from tests.variants.library.library_tools import bound, normal, softmax, weights

SIZES = [(1, 1), (13, 13), (9, 31), (31, 9)]


def check(
    variant: Variant, score: object, q_len: int, kv_len: int, q_offset: int = 0, batch: int = 2,
    num_q_heads: int = 4, scale: float | None = None, **params: object,
) -> None:  # fmt: skip
    """Weights of the variant equal softmax of ``score(s, b, h, i, j)`` on broadcast grids."""
    q, k = normal(1, batch, num_q_heads, q_len, 8), normal(2, batch, 2, kv_len, 8)
    got = weights(variant, q, k, q_offset, scale, **params)
    plain = q @ k.repeat_interleave(num_q_heads // 2, 1).mT
    plain = plain * (1 / math.sqrt(8) if scale is None else scale)
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(num_q_heads)[:, None, None]
    i, j = torch.arange(q_len)[:, None] + q_offset, torch.arange(kv_len)
    expected = softmax(score(plain, b, h, i, j))  # type: ignore[operator]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


# --- ALiBi --------------------------------------------------------------------------------------


def press_slopes(n: int) -> list[float]:
    """The function of the ALiBi repository, as published."""

    def power_of_2(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_2(closest) + press_slopes(2 * closest)[0::2][: n - closest]


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7, 8, 12, 16, 28, 40, 64, 71, 112])
def test_alibi_slopes_of_any_head_count(heads: int) -> None:
    slopes = lib.alibi_slopes(heads)
    assert slopes.dtype == torch.float32 and slopes.shape == (heads,)
    torch.testing.assert_close(slopes.tolist(), press_slopes(heads), rtol=1e-6, atol=0)


def test_alibi_slopes_are_the_default_of_a_call() -> None:
    assert bound(lib.ALiBi(), num_q_heads=6).tensors[0].tolist() == lib.alibi_slopes(6).tolist()
    with pytest.raises(VariantError, match="at least 1"):
        lib.alibi_slopes(0)


@pytest.mark.parametrize("q_len, kv_len", SIZES)
def test_alibi(q_len: int, kv_len: int) -> None:
    slopes = torch.tensor(press_slopes(4)).view(4, 1, 1)
    check(lib.ALiBi(), lambda s, b, h, i, j: s + slopes * (j - i), q_len, kv_len)
    symmetric = lib.ALiBi(symmetric=True)
    check(symmetric, lambda s, b, h, i, j: s - slopes * (j - i).abs(), q_len, kv_len, 5)
    own = torch.tensor([0.5, 0.1, -0.2, 0.0])
    given = own.view(4, 1, 1)
    check(lib.ALiBi(), lambda s, b, h, i, j: s + given * (j - i), q_len, kv_len, slopes=own)


def test_alibi_equals_its_symmetric_form_under_a_causal_mask() -> None:
    q, k = normal(1, 1, 4, 11, 8), normal(2, 1, 4, 11, 8)
    signed = weights(lib.ALiBi() & lib.Causal(), q, k)
    symmetric = weights(lib.ALiBi(symmetric=True) & lib.Causal(), q, k)
    torch.testing.assert_close(signed, symmetric, rtol=1e-9, atol=1e-12)


# --- soft cap -----------------------------------------------------------------------------------


@pytest.mark.parametrize("q_len, kv_len", SIZES)
def test_soft_cap(q_len: int, kv_len: int) -> None:
    for cap in (0.5, 30.0):
        score = lambda s, b, h, i, j, c=cap: c * torch.tanh(s / c)  # noqa: E731
        check(lib.SoftCap(cap), score, q_len, kv_len)
        check(lib.SoftCap(), score, q_len, kv_len, cap=cap)
    assert bound(lib.SoftCap()).scalars == (50.0,)


def test_an_approximate_soft_cap_has_the_same_meaning() -> None:
    score = lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0)  # noqa: E731
    check(lib.SoftCap(30.0, approximate=True), score, 9, 12)
    made = [bound(lib.SoftCap(2.0, approximate=flag)) for flag in (False, True)]
    functions = [[n.op for n in x.ir.hooks[0][1].nodes if "tanh" in n.op] for x in made]
    assert functions == [["tanh"], ["tanh_approx"]]
    assert bound(lib.SoftCap(2.0)).ir == made[0].ir and made[1].scalars == (2.0,)


def test_soft_caps_of_both_kinds_are_composed() -> None:
    def both(s, b, h, i, j):  # type: ignore[no-untyped-def]
        return torch.tanh(3.0 * torch.tanh(s / 3.0))

    first = lib.SoftCap(3.0, approximate=True).named("first")
    chained = first & lib.SoftCap(1.0).named("then")
    check(chained, both, 9, 12)
    nodes = bound(chained).ir.hooks[0][1].nodes
    assert [n.op for n in nodes if "tanh" in n.op] == ["tanh_approx", "tanh"]
    check(chained, both, 9, 12, first_approximate=False)


def test_chains_run_left_to_right() -> None:
    slopes = torch.tensor(press_slopes(4)).view(4, 1, 1)

    def cap_then_alibi(s, b, h, i, j):  # type: ignore[no-untyped-def]
        return torch.tanh(s) + slopes * (j - i)

    def alibi_then_cap(s, b, h, i, j):  # type: ignore[no-untyped-def]
        return torch.tanh(s + slopes * (j - i))

    check(lib.SoftCap(1.0) & lib.ALiBi(), cap_then_alibi, 9, 12)
    check(lib.ALiBi() & lib.SoftCap(1.0), alibi_then_cap, 9, 12)


# --- T5 -----------------------------------------------------------------------------------------


def hf_bucket(
    relative: torch.Tensor, bidirectional: bool, num_buckets: int, max_distance: int
) -> torch.Tensor:
    """T5Attention._relative_position_bucket of Hugging Face transformers, as published."""
    buckets = torch.zeros_like(relative)
    if bidirectional:
        num_buckets //= 2
        buckets += (relative > 0).to(torch.long) * num_buckets
        relative = torch.abs(relative)
    else:
        relative = -torch.min(relative, torch.zeros_like(relative))
    max_exact = num_buckets // 2
    is_small = relative < max_exact
    large = max_exact + (
        torch.log(relative.float() / max_exact)
        / math.log(max_distance / max_exact)
        * (num_buckets - max_exact)
    ).to(torch.long)
    large = torch.min(large, torch.full_like(large, num_buckets - 1))
    buckets += torch.where(is_small, relative, large)
    return buckets


T5_SETTINGS = [(True, 32, 128), (False, 32, 128), (True, 16, 40), (False, 8, 20), (True, 64, 256)]


@pytest.mark.parametrize("bidirectional, num_buckets, max_distance", T5_SETTINGS)
def test_t5_buckets(bidirectional: bool, num_buckets: int, max_distance: int) -> None:
    relative = torch.arange(-3000, 3001)
    got = lib.t5_buckets(relative, num_buckets, max_distance, bidirectional)
    expected = hf_bucket(relative, bidirectional, num_buckets, max_distance)
    assert got.dtype == torch.int32 and torch.equal(got.long(), expected)


@pytest.mark.parametrize("bidirectional, num_buckets, max_distance", T5_SETTINGS)
def test_t5_bias(bidirectional: bool, num_buckets: int, max_distance: int) -> None:
    table = normal(3, num_buckets, 4)

    def score(s, b, h, i, j):  # type: ignore[no-untyped-def]
        buckets = hf_bucket(j - i, bidirectional, num_buckets, max_distance)
        return s + table[buckets].permute(2, 0, 1)

    variant = lib.RelativeBias(
        bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )
    check(variant, score, 9, 31, 0, scale=1.0, table=table)
    check(variant, score, 5, 300, 290, scale=1.0, table=table)  # beyond max_distance behind
    check(variant, score, 3, 270, 0, scale=1.0, table=table)  # and ahead
    given = lib.RelativeBias(
        table, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )
    check(given, score, 7, 7, scale=1.0)


def test_t5_bias_reads_one_value_a_pair() -> None:
    """No logarithm is left in the kernel, whatever the head count."""
    ir = bound(lib.RelativeBias(), num_q_heads=3, table=torch.zeros(32, 3)).ir
    graph = ir.hook("score_mod")
    assert graph is not None
    operations = [n.op for n in graph.nodes]
    assert operations.count("gather") == 1 and "log" not in operations


@pytest.mark.parametrize(
    "arguments",
    [{"num_buckets": 31}, {"num_buckets": 2}, {"max_distance": 8}, {"num_buckets": 0}],
)
def test_t5_bias_refuses_settings_without_buckets(arguments: dict[str, int]) -> None:
    with pytest.raises(VariantError, match="num_buckets"):
        lib.RelativeBias(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("q_len, kv_len", SIZES)
def test_relative_table(q_len: int, kv_len: int) -> None:
    reach = 6
    table = normal(4, 4, 2 * reach + 1)

    def score(s, b, h, i, j):  # type: ignore[no-untyped-def]
        return s + table[h, (j - i).clamp(-reach, reach) + reach]

    check(lib.RelativeTable(reach=reach), score, q_len, kv_len, table=table)
    check(lib.RelativeTable(table, reach), score, q_len, kv_len, 9)


# --- additive bias ------------------------------------------------------------------------------


@pytest.mark.parametrize("per_batch", [True, False])
@pytest.mark.parametrize("per_head", [True, False])
def test_additive_bias_broadcasts(per_batch: bool, per_head: bool) -> None:
    for q_len, kv_len in SIZES:
        bias = normal(5, 2 if per_batch else 1, 4 if per_head else 1, q_len, kv_len)
        check(lib.AdditiveBias(), lambda s, b, h, i, j, x=bias: s + x, q_len, kv_len, bias=bias)


def test_additive_bias_rows_are_rows_of_q_at_any_offset() -> None:
    bias = normal(6, 2, 1, 3, 20)
    check(lib.AdditiveBias(), lambda s, b, h, i, j: s + bias, 3, 20, 17, bias=bias)


def test_additive_bias_of_minus_infinity_masks() -> None:
    bias = torch.zeros(1, 1, 6, 6, dtype=torch.float16)
    bias[..., 3:] = -math.inf
    bias[:, :, 2] = -math.inf
    check(lib.AdditiveBias(), lambda s, b, h, i, j: s + bias.double(), 6, 6, bias=bias)


@pytest.mark.parametrize(
    "variant, params",
    [
        (lib.ALiBi(), {"slopes": torch.ones(3)}),  # num_q_heads is 4
        (lib.ALiBi(), {"slopes": 0.5}),
        (lib.SoftCap(), {"cap": "30"}),
        (lib.SoftCap(), {"cap": torch.tensor(30.0)}),
        (lib.SoftCap(), {"approximate": 0.5}),
        (lib.SoftCap(), {"approximate": "tanh"}),
        (lib.SoftCap(), {"approximated": True}),
        (lib.RelativeBias(), {}),
        (lib.RelativeBias(), {"table": torch.zeros(31, 4)}),
        (lib.RelativeBias(), {"table": torch.zeros(32, 5)}),
        (lib.RelativeTable(reach=3), {"table": torch.zeros(7)}),
        (lib.AdditiveBias(), {"bias": torch.zeros(4, 16, 16)}),
        (lib.AdditiveBias(), {"bias": torch.zeros(1, 1, 15, 16)}),
        (lib.AdditiveBias(), {"bias": torch.zeros(1, 1, 16, 17)}),
        (lib.AdditiveBias(), {"bias": torch.zeros(3, 1, 16, 16)}),  # batch is 2
        (lib.AdditiveBias(), {"bias": torch.zeros(1, 2, 16, 16)}),
        (lib.AdditiveBias(), {"mask": torch.zeros(1, 1, 16, 16)}),
    ],
)
def test_wrong_params_are_errors(variant: Variant, params: dict[str, object]) -> None:
    with pytest.raises(ParamError):
        bound(variant, batch=2, num_q_heads=4, **params)


@pytest.mark.parametrize("cap", [0.0, 0, -1.0, math.nan, math.inf])
def test_a_cap_is_a_finite_number_above_0(cap: float) -> None:
    """A cap of 0 is no way to say "no cap": all scores would be NaN or 0."""
    words = "'cap' must be a finite number above 0, got .*leave fa.SoftCap out"
    with pytest.raises(ParamError, match=words):
        lib.SoftCap(cap)
    with pytest.raises(ParamError, match=words):
        bound(lib.SoftCap(), cap=cap)


def test_numbers_that_divide_by_0_are_refused() -> None:
    with pytest.raises(ParamError, match="'floor_scale' must be a finite number above 0"):
        lib.TemperatureTuning(floor_scale=0.0)
    with pytest.raises(ParamError, match="'train_len' must be at least 2, got 1"):
        lib.LogN(1)
    with pytest.raises(ParamError, match="'reach' must be at least 0"):
        lib.RelativeTable(reach=-1)
