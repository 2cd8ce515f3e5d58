"""Every operation that a scalar hook may use: values and dtypes as eager torch gives them."""

# Hooks are written as users write them: lambdas of tensors.
# mypy: disable-error-code="no-untyped-call,no-untyped-def"

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import flashattn_jit as fa
from flashattn_jit.errors import TraceError
from flashattn_jit.variants.variant import variant
from tests.variants.trace.trace_oracle import DIMS, compare

G = torch.Generator().manual_seed(0)
BIAS = torch.randn(2, 3, 5, 7, generator=G)
TABLE = torch.randn(12, generator=G)
HALF = torch.randn(3, generator=G).to(torch.bfloat16)
BITS = torch.randint(0, 2, (5, 7), generator=G).bool()
INTS = torch.randint(-9, 9, (7,), generator=G)
SMALL_INTS = INTS.to(torch.int8)
BYTES = torch.randint(0, 250, (7,), generator=G).to(torch.uint8)
DOUBLES = torch.randn(7, dtype=torch.float64, generator=G)
POINTS = torch.randn(7, 3, generator=G)
OFFSETS = torch.tensor([0, 2, 3, 6])
SCALE = torch.tensor(1.5)
COUNT = torch.tensor(3)
WHICH = torch.tensor(1)


def _of_score(f):
    return lambda s, b, h, q, k: f(s)


def _of_key(f):
    return lambda s, b, h, q, k: f(k + 1)


ARITHMETIC = {
    "int_plus_int": lambda s, b, h, q, k: q + k,
    "int_times_float": lambda s, b, h, q, k: (k - q) * 0.5,
    "int_plus_python_int": lambda s, b, h, q, k: q + 3,
    "reflected": lambda s, b, h, q, k: 3 - q + (2.0 * s) - (1 / (k + 1)),
    "true_division_of_ints": lambda s, b, h, q, k: q / (k + 1),
    "true_division_by_number": lambda s, b, h, q, k: q / 2,
    "number_by_int": lambda s, b, h, q, k: 1 / (q + 1),
    "floor_division": lambda s, b, h, q, k: (q - 3) // 2,
    "floor_division_of_floats": lambda s, b, h, q, k: s // 0.7,
    "reflected_floor_division": lambda s, b, h, q, k: 17 // (k + 1),
    "modulo": lambda s, b, h, q, k: (q - 3) % 4,
    "modulo_negative": lambda s, b, h, q, k: (q - 3) % -4,
    "modulo_float": lambda s, b, h, q, k: s % 1.5,
    "reflected_modulo": lambda s, b, h, q, k: 7 % (k + 1),
    "fmod": lambda s, b, h, q, k: torch.fmod(q - 3, 2) + torch.fmod(s, 0.9),
    "div_modes": lambda s, b, h, q, k: torch.div(q - 3, 2, rounding_mode="floor")
    + torch.div(q - 3, 2, rounding_mode="trunc"),
    "div_mode_float": lambda s, b, h, q, k: torch.div(s, 0.7, rounding_mode="trunc"),
    "powers": lambda s, b, h, q, k: s**2 + s**3 + q**2 + (s.abs() + 1) ** 0.5,
    "negative_powers": lambda s, b, h, q, k: (s + 100) ** -1 + (s + 100) ** -2 + (s + 100) ** -0.5,
    "power_zero": lambda s, b, h, q, k: s**0 + q**0,
    "power_big": lambda s, b, h, q, k: (s / 10) ** 9,
    "float_power_of_ints": lambda s, b, h, q, k: torch.float_power(q * 100_000 + k, 2) * 1e-9,
    "float_power_negative": lambda s, b, h, q, k: torch.float_power(q + 1, -2) + s,
    "float_power_of_number": lambda s, b, h, q, k: torch.float_power(2, q - k) + s,
    "float_power_method": lambda s, b, h, q, k: (s.abs() + 1).float_power(0.3),
    "power_of_two": lambda s, b, h, q, k: 2 ** (-(h + 1) * 8.0 / 3),
    "power_of_numbers": lambda s, b, h, q, k: 1.5**q + 3**h,
    "power_tensors": lambda s, b, h, q, k: (s.abs() + 0.1) ** (q * 0.3),
    "alpha": lambda s, b, h, q, k: torch.add(s, q, alpha=3) - torch.sub(q, k, alpha=2),
    "rsub": lambda s, b, h, q, k: torch.rsub(q, 5),
    "rsub_scaled": lambda s, b, h, q, k: torch.rsub(s, 3.0, 2),
    "shifts": lambda s, b, h, q, k: (q << 2) + (k >> 1) + (1 << h),
    "bits": lambda s, b, h, q, k: (q & 3) | (k ^ 5),
    "invert": lambda s, b, h, q, k: ~q,
    "unary_minus": lambda s, b, h, q, k: -s - (-q) + (+k),
    "abs_sign": lambda s, b, h, q, k: abs(q - k) + torch.sign(s) + (q - 2).sign(),
    "clamps": lambda s, b, h, q, k: s.clamp(-1, 1) + q.clamp(min=2) + torch.clamp(k, max=3),
    "clamp_int_by_float": lambda s, b, h, q, k: q.clamp(min=1.5),
    "clamp_by_tensor": lambda s, b, h, q, k: torch.clamp(k, q - 2, q + 2),
    "clamp_min_max": lambda s, b, h, q, k: s.clamp_min(0.5).clamp_max(2) + s.clip(0, 1),
    "min_max": lambda s, b, h, q, k: torch.maximum(q, k) + torch.minimum(s, s * 2),
    "max_of_two": lambda s, b, h, q, k: torch.max(q, k) + torch.min(q, k + 1),
    "bool_times_float": lambda s, b, h, q, k: (q >= k) * 1.5 + (q > k) * s,
    "bool_plus_bool": lambda s, b, h, q, k: (q >= k) + (q < 3),
    "bool_times_bool": lambda s, b, h, q, k: (q >= k) * (q < 3),
    "lerp": lambda s, b, h, q, k: torch.lerp(s, s * 2, 0.25),
    "addcmul": lambda s, b, h, q, k: torch.addcmul(s, s, s, value=0.5),
    "square_reciprocal": lambda s, b, h, q, k: s.square() + (s + 50).reciprocal(),
    "hypot_atan2": lambda s, b, h, q, k: torch.hypot(s, s + 1) + torch.atan2(s, s - 1),
    "truncating_int64": lambda s, b, h, q, k: (q.long() * 5_000_000_000 + k) % 1000,
}  # fmt: skip
LOGIC = {
    "comparisons": lambda s, b, h, q, k: (q >= k).int() + (q > k).int() * 2 + (q < 2).int() * 4,
    "equal": lambda s, b, h, q, k: (q == k) | (q != 2),
    "reflected_comparison": lambda s, b, h, q, k: (q < 3) & (k >= 2),
    "int_against_float": lambda s, b, h, q, k: q < 2.5,
    "bool_order": lambda s, b, h, q, k: (q > 2) >= (k > 2),
    "bool_equality": lambda s, b, h, q, k: (q > 2) == (k > 2),
    "logical": lambda s, b, h, q, k: torch.logical_and(q, k) | torch.logical_not(s.int()),
    "logical_xor": lambda s, b, h, q, k: torch.logical_xor(q > 1, k > 1) ^ (q > 3),
    "invert_bool": lambda s, b, h, q, k: ~(q >= k),
    "where": lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf),
    "where_python_ints": lambda s, b, h, q, k: torch.where(q >= k, 16, 0),
    "where_python_floats": lambda s, b, h, q, k: torch.where(q >= k, 1.5, 0.0),
    "where_mixed": lambda s, b, h, q, k: torch.where(q >= k, q, 0.5),
    "where_int64": lambda s, b, h, q, k: torch.where(q >= k, q, k.long()),
    "where_method": lambda s, b, h, q, k: s.where(q >= k, 0.0),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(q < k, -1.0),
    "ands_of_ints": lambda s, b, h, q, k: torch.bitwise_and(q, 1) | torch.bitwise_not(k),
    "isnan": lambda s, b, h, q, k: torch.isnan(s / (q - q)) | torch.isnan(s),
    "isinf": lambda s, b, h, q, k: torch.isinf(1.0 / (k - 2).float()),
    "isfinite": lambda s, b, h, q, k: torch.isfinite(s / (k - 3)),
    "python_bool": lambda s, b, h, q, k: True,
    "python_float": lambda s, b, h, q, k: 2.5,
}  # fmt: skip
FUNCTIONS = {
    name: _of_score(f)
    for name, f in {
        "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "tanh": torch.tanh,
        "tanh_approx": fa.tanh_approx,
        "tanh_approx_of_captured": lambda s: s + fa.tanh_approx(SCALE),
        "sigmoid": torch.sigmoid, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan,
        "sinh": lambda s: torch.sinh(s / 9), "cosh": lambda s: torch.cosh(s / 9),
        "asinh": torch.asinh, "asinh_large": lambda s: torch.arcsinh(s * 1e30) + (s / 1e6).asinh(),
        "acosh": lambda s: torch.acosh(s + 1), "acosh_large": lambda s: torch.acosh(s * 1e30),
        "atanh": lambda s: torch.atanh(s / 30) + torch.arctanh(s / 1e6), "atanh_one": torch.atanh,
        "threshold": lambda s: F.threshold(s, 0.5, -2.0) + torch.threshold(s, 1.0, 3.0),
        "threshold_in_place": lambda s: F.threshold(s.clone(), 0.5, -2.0, inplace=True),
        "atan": torch.atan, "erf": torch.erf, "relu": F.relu, "relu6": F.relu6, "silu": F.silu,
        "gelu": F.gelu, "gelu_tanh": lambda s: F.gelu(s, approximate="tanh"),
        "softplus": F.softplus, "softplus_beta": lambda s: F.softplus(s, beta=2.5),
        "logsigmoid": F.logsigmoid, "leaky_relu": F.leaky_relu, "elu": F.elu, "mish": F.mish,
        "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish, "softsign": F.softsign,
        "hardtanh": F.hardtanh, "tanhshrink": F.tanhshrink, "floor": torch.floor,
        "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc, "frac": torch.frac,
        "nan_to_num": lambda s: torch.nan_to_num(torch.sqrt(s), nan=-1.0),
        "nan_to_num_inf": lambda s: torch.nan_to_num(torch.log(s * 0.0), neginf=-5.0),
        "log": lambda s: torch.log(s.abs() + 1), "log2": lambda s: torch.log2(s.abs() + 1),
        "log10": lambda s: torch.log10(s.abs() + 1), "log1p": lambda s: torch.log1p(s.abs()),
        "sqrt": lambda s: torch.sqrt(s.abs()), "rsqrt": lambda s: torch.rsqrt(s.abs() + 1),
        "asin": lambda s: torch.asin(s / 40), "acos": lambda s: torch.acos(s / 40),
        "expit": torch.special.expit, "erfc": torch.erfc,
        "logaddexp": lambda s: torch.logaddexp(s, -s),
        "xlogy": lambda s: torch.xlogy(s, s.abs() + 1),
        "copysign": lambda s: torch.copysign(s + 1, s),
        "deg2rad": torch.deg2rad, "heaviside": lambda s: torch.heaviside(s, s * 0 + 0.5),
        "methods": lambda s: s.tanh().exp().neg().abs().sqrt(),
        "logit": lambda s: torch.logit(torch.sigmoid(s / 10), eps=1e-6),
        "positive": torch.positive,
    }.items()
}  # fmt: skip
OF_INTS = {
    f"{name}_of_int": _of_key(f)
    for name, f in {
        "exp": torch.exp, "log": torch.log, "tanh": torch.tanh, "sqrt": torch.sqrt,
        "tanh_approx": fa.tanh_approx,
        "sigmoid": torch.sigmoid, "floor": torch.floor, "sin": torch.sin, "round": torch.round,
        "relu": F.relu, "isnan": torch.isnan, "nan_to_num": torch.nan_to_num,
    }.items()
}  # fmt: skip
CONVERSIONS = {
    "to_dtype": lambda s, b, h, q, k: s.to(torch.int32) + q.to(torch.float32),
    "to_dtype_keyword": lambda s, b, h, q, k: s.to(dtype=torch.float64),
    "to_other": lambda s, b, h, q, k: q.to(s) + q.type_as(s),
    "casts": lambda s, b, h, q, k: s.int() + s.long() + s.float().int() + (s > 0).int(),
    "double": lambda s, b, h, q, k: s.double() / 3,
    "small_ints": lambda s, b, h, q, k: (q.to(torch.int8) * 100).to(torch.int16) + k.byte(),
    "bool_of_float": lambda s, b, h, q, k: s.bool(),
    "cast_chain": lambda s, b, h, q, k: q.to(torch.int8).long().float() + q.float().int().long(),
    "no_ops": lambda s, b, h, q, k: s.clone().detach().contiguous() + s.view(()) + s.squeeze(),
    "item_like": lambda s, b, h, q, k: s.reshape(1)[0] + s.unsqueeze(0).squeeze(0),
    "inplace": lambda s, b, h, q, k: s.clone().add_(1).mul_(2).tanh_().clamp_(min=0),
}
CAPTURES = {
    "full_index": lambda s, b, h, q, k: s + BIAS[b, h, q, k],
    "chained": lambda s, b, h, q, k: s + BIAS[b][h][q][k],
    "mixed_chain": lambda s, b, h, q, k: s + BIAS[b, h][q, k] + BIAS[b][h, q][k],
    "constants_in_index": lambda s, b, h, q, k: s + BIAS[0, h, -1, k] + BIAS[1][h][0, k],
    "zero_dim_index": lambda s, b, h, q, k: s + BIAS[WHICH, h][q, k] + BIAS[b][h][WHICH, k],
    "ellipsis": lambda s, b, h, q, k: s + BIAS[b, ..., k][h, q] + BIAS[..., k][b, h, q],
    "whole_dims": lambda s, b, h, q, k: s + BIAS[:, h][b, q, k] + BIAS[b, :, q][h, k],
    "slice_next_to_index": lambda s, b, h, q, k: s + BIAS[b, 1:][h // 2, q, k],
    "negative_index": lambda s, b, h, q, k: TABLE[q - k],
    "out_of_range": lambda s, b, h, q, k: TABLE[q * 5] + TABLE[-q * 5],
    "gathered_index": lambda s, b, h, q, k: TABLE[INTS[k] + 9 - 9] + TABLE[BYTES[k]],
    "half": lambda s, b, h, q, k: s * HALF[h],
    "half_times_int": lambda s, b, h, q, k: HALF[h] * (k - q),
    "bool_tensor": lambda s, b, h, q, k: torch.where(BITS[q, k], s, 0.0),
    "bool_tensor_added": lambda s, b, h, q, k: s + BITS[q, k],
    "int64_tensor": lambda s, b, h, q, k: INTS[k] * q,
    "int8_tensor": lambda s, b, h, q, k: SMALL_INTS[k] + q,
    "uint8_tensor": lambda s, b, h, q, k: BYTES[k] + SMALL_INTS[k],
    "double_tensor": lambda s, b, h, q, k: DOUBLES[k] + s,
    "zero_dim": lambda s, b, h, q, k: s * SCALE + COUNT,
    "zero_dim_int": lambda s, b, h, q, k: q * COUNT,
    "zero_dim_float_by_int": lambda s, b, h, q, k: q * SCALE,
    "prelude": lambda s, b, h, q, k: s + (TABLE * 2 + 1)[k],
    "prelude_view": lambda s, b, h, q, k: s + BIAS.view(6, 35)[b * 3 + h, q * 7 + k],
    "prelude_transpose": lambda s, b, h, q, k: BITS.t()[k, q] + BITS.T[k, q],
    "prelude_slice": lambda s, b, h, q, k: s + TABLE[:-1][k] + TABLE[1:][k] + TABLE[::2][q],
    "prelude_to": lambda s, b, h, q, k: BITS.to(torch.uint8)[q, k] + INTS.float()[k],
    "prelude_functions": lambda s, b, h, q, k: s + torch.cumsum(TABLE, 0)[k] + TABLE.exp().sum(),
    "prelude_0dim": lambda s, b, h, q, k: s * (SCALE * 2).exp() + TABLE[0] + OFFSETS[-1],
    "prelude_index": lambda s, b, h, q, k: s + BIAS[0, 1][q, k] + BIAS[:, 1, 0][b, k],
    "prelude_stack": lambda s, b, h, q, k: torch.stack([TABLE, TABLE * 2])[1, k],
    "prelude_list_index": lambda s, b, h, q, k: POINTS[:, [2, 0]][k, 1],
    "factory_scalar": lambda s, b, h, q, k: s + torch.tensor(3.0) + torch.tensor(2) * q,
    "factory_arange": lambda s, b, h, q, k: torch.arange(10)[k] + s,
    "factory_zeros": lambda s, b, h, q, k: torch.zeros(()) + torch.ones((), dtype=torch.int32) + q,
    "factory_full": lambda s, b, h, q, k: torch.full((), 2.5) + s + torch.full((), 3) * q,
    "likes": lambda s, b, h, q, k: torch.zeros_like(s) + torch.ones_like(q),
    "full_like": lambda s, b, h, q, k: s + torch.full_like(q, 7.9),
    "news": lambda s, b, h, q, k: q.new_zeros(q.shape) + h.new_ones(()) + s.new_full((), 2),
    "new_tensor": lambda s, b, h, q, k: s.new_tensor(3) / 2 + q.new_tensor(3),
    "new_tensor_dtype": lambda s, b, h, q, k: s.new_tensor(3),
    "new_tensor_of_ints": lambda s, b, h, q, k: INT32[k].new_tensor(-3.5),
    "new_tensor_of_positions": lambda s, b, h, q, k: q.new_tensor(3.5) * k,
    "new_tensor_of_a_list": lambda s, b, h, q, k: s.new_tensor([1, 2, 4])[k % 3],
    "new_tensor_of_a_vector": lambda s, b, h, q, k: s.new_tensor(OFFSETS).sum(),
    "new_tensor_with_a_dtype": lambda s, b, h, q, k: s.new_tensor(3.5, dtype=torch.int16) + k,
    "empty_as_index": lambda s, b, h, q, k: TABLE[h.new_zeros(h.shape)],
    "size_of_capture": lambda s, b, h, q, k: s + TABLE[q % TABLE.shape[0]] + len(OFFSETS),
    "size_method": lambda s, b, h, q, k: s + BIAS.size(-1) + BIAS.numel() + BIAS.dim(),
    "searchsorted": lambda s, b, h, q, k: torch.searchsorted(OFFSETS, k, right=True) - 1,
    "searchsorted_left": lambda s, b, h, q, k: torch.searchsorted(OFFSETS, k, out_int32=True),
    "bucketize": lambda s, b, h, q, k: torch.bucketize(k, OFFSETS, right=True),
    "bucketize_float": lambda s, b, h, q, k: torch.bucketize(s, TABLE.sort().values),
}  # fmt: skip
VECTORS = {
    "dot": lambda s, b, h, q, k: s + torch.dot(POINTS[q], POINTS[k]),
    "matmul_of_vectors": lambda s, b, h, q, k: s + POINTS[q] @ POINTS[k],
    "distance": lambda s, b, h, q, k: torch.exp(-torch.sqrt(((POINTS[q] - POINTS[k]) ** 2).sum())),
    "sum_dim": lambda s, b, h, q, k: (POINTS[q] * POINTS[k]).sum(-1),
    "keepdim": lambda s, b, h, q, k: (POINTS[q] - POINTS[q].mean(-1, keepdim=True)).abs().sum(),
    "norm": lambda s, b, h, q, k: torch.linalg.norm(POINTS[q]) + POINTS[k].norm(),
    "norm_1": lambda s, b, h, q, k: torch.linalg.vector_norm(POINTS[q], 1),
    "norm_p": lambda s, b, h, q, k: POINTS[k].norm(p=1) + torch.norm(POINTS[k]),
    "extrema": lambda s, b, h, q, k: POINTS[q].max() - POINTS[k].min() + POINTS[q].amax(-1),
    "any_all": lambda s, b, h, q, k: (POINTS[q] > 0).any() | (POINTS[k] < 1).all(),
    "any_of_offsets": lambda s, b, h, q, k: ((OFFSETS[:-1] <= q) & (q < OFFSETS[1:])).any(),
    "count": lambda s, b, h, q, k: (k >= OFFSETS).sum(),
    "mean_prod": lambda s, b, h, q, k: POINTS[q].mean() + POINTS[k].prod(),
    "elements": lambda s, b, h, q, k: POINTS[q][0] + POINTS[k][-1] + POINTS[q, 1],
    "computed_elements": lambda s, b, h, q, k: (POINTS[q] * 2)[1] + POINTS[k].tanh()[2],
    "int_vector": lambda s, b, h, q, k: (OFFSETS * q).sum(),
    "double_vector_times_zero_dim": lambda s, b, h, q, k: (DOUBLES * s).sum(),
    "float_vector_times_double": lambda s, b, h, q, k: (POINTS[q] * DOUBLES[k]).sum(),
    "int_vector_times_double": lambda s, b, h, q, k: (OFFSETS * DOUBLES[k]).sum(),
    "two_dims": lambda s, b, h, q, k: (POINTS[:4].t() * s).sum(0).amax(),
    "free_leading_dim": lambda s, b, h, q, k: POINTS[:, 1][k] + POINTS[:5].t()[h].sum(),
    "stack_scalars": lambda s, b, h, q, k: torch.stack([s, s * 2, q.float()]).amax(),
    "where_vector": lambda s, b, h, q, k: torch.where(POINTS[q] > 0, POINTS[k], 0.0).sum(),
    "isin": lambda s, b, h, q, k: torch.isin(k, OFFSETS),
    "norm_inf": lambda s, b, h, q, k: torch.linalg.vector_norm(POINTS[q], float("inf")),
}  # fmt: skip
ALL = {**ARITHMETIC, **LOGIC, **FUNCTIONS, **OF_INTS, **CONVERSIONS, **CAPTURES, **VECTORS}


@pytest.mark.filterwarnings("ignore:.*batching rule.*", "ignore:To copy construct from a tensor")
@pytest.mark.parametrize("name", ALL)
def test_values_and_dtypes_are_torch_s(name):
    compare(ALL[name], rtol=3e-5, atol=3e-5)


LENGTH, TILE = 70_000, 8


def updated(first, *rest):
    """The first value after in-place operations of another number each."""

    def hook(s, b, h, q, k):
        x = first(q, k)
        for operation, number in rest:
            getattr(x, operation)(number(q, k) if callable(number) else number)
        return x * 1000

    return hook


def beside(operation):
    """A position after an in-place operation on what another operation made of it."""

    def hook(s, b, h, q, k):
        y = operation(q)
        y += 100
        return q - y

    return hook


def assigned(value):
    """A row of positions with an item assigned."""

    def hook(s, b, h, q, k):
        x = torch.stack([q & 7, k & 7]) & 7
        x[0] = value(q, k)
        return x[0] * 2**20 - x[1]

    return hook


POSITIONS = {
    "sum": lambda s, b, h, q, k: (q + 2_000_000_000) * 2,
    "pair": lambda s, b, h, q, k: ((q + LENGTH - 1) * LENGTH + k) % 7,
    "hash": lambda s, b, h, q, k: ((q + 40_000) * 1_000_003 * (k + 1)) % 1000,
    "shift": lambda s, b, h, q, k: ((q + 70_000) << 15) % 1001,
    "shift_by_position": lambda s, b, h, q, k: ((q + 1) << (k * 9)) % 1001,
    "xorshift": lambda s, b, h, q, k: (q * 77_777 ^ (k << 21) ^ (q >> 1)) & 0xFFFFFF,
    "square": lambda s, b, h, q, k: (q + 60_000) ** 2 % 1009,
    "power": lambda s, b, h, q, k: (q + 3) ** (k + 20) % 1009,
    "number_beyond": lambda s, b, h, q, k: (q + 5_000_000_000) % 1013,
    "add_alpha": lambda s, b, h, q, k: torch.add(q, k, alpha=2_000_000_000) % 1013,
    "addcmul": lambda s, b, h, q, k: torch.addcmul(q, k + 50_000, k + 50_000) % 1013,
    "where": lambda s, b, h, q, k: torch.where(q > k, q + 60_000, k) * 50_000 % 1013,
    "clamp": lambda s, b, h, q, k: (q * 40_000).clamp(0, 100_000) * 40_000 % 1013,
    "of_request_and_head": lambda s, b, h, q, k: (b * 60_000 + 1) * (h + 60_000) % 1013,
    "stacked": lambda s, b, h, q, k: (torch.stack([q, k]) + 60_000).prod() % 1013,
    "tensor_of_int32": lambda s, b, h, q, k: (INT32[k] * q) % 1013,
    "sum_with_int32": lambda s, b, h, q, k: (q + INT32[k]) * 2 % 1013,
    "limit_of_int32": lambda s, b, h, q, k: k <= q + INT32[k],
    "minus_int32": lambda s, b, h, q, k: -torch.minimum(q, INT32[k]),
    "clamped": lambda s, b, h, q, k: (q - k).clamp(max=2**40) + (q - k).clip(-(2**35), 2**31),
    "filled": lambda s, b, h, q, k: torch.minimum(q, k.masked_fill(q < k, 2**63 - 1)),
    "fourth_power": lambda s, b, h, q, k: torch.where(q > k, (q + 3000) ** 4, k) // (k + 1),
    "fifth_power": lambda s, b, h, q, k: (q + 3000) ** 5 % (k + 7),
    "power_and_large_divisor": lambda s, b, h, q, k: -((q + 100) ** 8) % 2**40,
    "full_of_sentinels": lambda s, b, h, q, k: torch.minimum(q, torch.full_like(q, 2**63 - 1)),
    "ones_like": lambda s, b, h, q, k: torch.ones_like(q) * 70_000 * 70_000 - q,
    "zeros_like": lambda s, b, h, q, k: torch.zeros_like(q) + 2**31 + k.new_full((), 2**33),
    "joined": lambda s, b, h, q, k: torch.stack([q * 2**27, k * 2**27])[0] * 16 + q,
    "joined_extremum": lambda s, b, h, q, k: torch.stack([q << 27, k << 27]).amax(0) * 16,
    "updated": updated(lambda q, k: q.clone(), ("mul_", 100_000), ("mul_", 100_000)),
    "updated_by_number": updated(lambda q, k: q.clone(), ("add_", 2**40)),
    "updated_by_position": updated(lambda q, k: q % 8, ("add_", lambda q, k: k + 2**24)),
    "rounded_is_new": beside(lambda q: q.round()),
    "power_of_one_is_new": beside(lambda q: q**1),
    "clone_is_new": beside(lambda q: q.clone()),
    "assigned": assigned(lambda q, k: q * 1000),
    "assigned_number": assigned(lambda q, k: 2**40),
    "vector_with_wide": lambda s, b, h, q, k: (torch.stack([q, k]) + q * 2**31)[1] % 1013,
    "vector_with_int64": lambda s, b, h, q, k: (torch.stack([q, k]) + INT64[k])[1],
    "vector_by_int64": lambda s, b, h, q, k: (torch.stack([q, k]) * torch.tensor(2**31))[0],
    "vector_below_int64": lambda s, b, h, q, k: (torch.stack([q, k]) < INT64[0])[1],
    "vector_alpha": lambda s, b, h, q, k: torch.add(torch.stack([q, k]), INT32[6], alpha=2)[0],
    "vector_of_int32": lambda s, b, h, q, k: (VECTORS[0] + q)[1] + (VECTORS[0] * q)[2],
    "least_int32_chosen": lambda s, b, h, q, k: torch.where(q > 1, INT32[5], q) * -1,
    "least_int32_taken_off": lambda s, b, h, q, k: 0 - torch.minimum(INT32[5], q),
    "least_int32_by_position": lambda s, b, h, q, k: INT32[k] * (q - q - 1),
    "int32_filled": lambda s, b, h, q, k: INT32[k].masked_fill(q > 1, q) * 2**30,
    "int32_updated": updated(lambda q, k: q.int().clamp(max=3), ("clamp_", lambda q, k: k)),
    "int32_zeros": lambda s, b, h, q, k: torch.zeros_like(q, dtype=torch.int32).add_(q) * 2**30,
    "int32_sum": lambda s, b, h, q, k: torch.stack([q, k]).sum(dtype=torch.int32) * 2**30,
    "power_of_zero": lambda s, b, h, q, k: q**0 * 70_000 * 70_000,
    "rounded": lambda s, b, h, q, k: q.round() * 2**27 * 16,
    "ands_of_negatives": lambda s, b, h, q, k: ((-q - 5) & (-k - 4)) * 2**28,
    "asked_for_int32": lambda s, b, h, q, k: (q.int() + 2_000_000_000) * 2,
    "asked_for_int32_twice": lambda s, b, h, q, k: ((q + 3).to(torch.int32) * 1_000_003) * 1_003,
    "int32_alone": lambda s, b, h, q, k: INT32[k] * INT32[k] * INT32[q],
    "small_numbers": lambda s, b, h, q, k: (q // TILE * TILE + k % TILE) * 3 - q,
}
INT64 = torch.tensor([2**40, -(2**33), 3, -1, 5, 2**31, 7])
VECTORS = torch.full((2, 4), 2**31 - 1, dtype=torch.int32)
INT32 = torch.tensor([3, -70_000, 65_536, 2**30, 7, -(2**31), 2**31 - 1], dtype=torch.int32)


@pytest.mark.filterwarnings("ignore:.*batching rule.*")
@pytest.mark.parametrize("name", POSITIONS)
def test_integers_of_positions_are_those_of_int64(name):
    compare(POSITIONS[name])


def test_numbers_between_the_bounds_of_positions_and_of_int32():
    numbers = [5]
    f = lambda s, b, h, q, k: ((q + numbers[0]) * 8 - k) % 1013  # noqa: E731
    for numbers[0] in (5, 2**29, 2**30, 2**31, 7, 2**29 + 1):
        compare(f)


def test_numbers_that_are_too_large_for_int32_leave_the_graph_of_others_as_it_is():
    graphs = {}
    for width in (2**40, 9, 2**35, 10, 2**31, 2**20):
        ir = fa.SlidingWindow(width).bind(DIMS).ir
        assert graphs.setdefault(width > 2**30, ir) is ir
    assert graphs[True] != graphs[False]


def test_positions_are_computed_in_32_bits_where_the_result_fits():
    def dtypes(f):
        graph = variant(score_mod=lambda s, b, h, q, k: s + f(q, k)).bind(DIMS).ir.hook("score_mod")
        return {n.dtype for n in graph.nodes if n.dtype.startswith("int") and n.op != "scalar"}

    assert dtypes(lambda q, k: (q - k).abs() * 10 + (k & 31) * 1000 + q // 64 * 64) == {"int32"}
    assert "int64" in dtypes(lambda q, k: (q - k) * 40)
    # A captured number counts with its value.
    for tile, wanted in ((8, {"int32"}), (4096, {"int32", "int64"}), (8, {"int32"})):
        assert dtypes(lambda q, k: (q % 1000) * tile + (k % 7000) * tile**2) >= wanted  # noqa: B023
        assert dtypes(lambda q, k: q * tile) == wanted  # noqa: B023


WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", WHOLE)
def test_chains_of_casts_wrap_at_each_step(dtype):
    edges = [0, 1, -1] if dtype == torch.bool else [torch.iinfo(dtype).min, torch.iinfo(dtype).max]
    values = torch.tensor([*edges, -128, 127, 255, 40_000, -3][:7]).to(dtype)
    for middle in WHOLE:
        for last in (*WHOLE, torch.float32):
            compare(lambda s, b, h, q, k, m=middle, z=last: values[k].to(m).to(z))


SIZES = {
    dtype: torch.tensor([100, 5, 7, 2, 90, 3, 1, 120]).to(dtype)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
}


@pytest.mark.parametrize("other", SIZES)
@pytest.mark.parametrize("dtype", SIZES)
def test_factors_of_sums_are_applied_after_promotion(dtype, other):
    x, y = SIZES[dtype], SIZES[other] * 250  # wraps in 8 bits
    compare(lambda s, b, h, q, k: torch.add(s, y[k], alpha=300))
    compare(lambda s, b, h, q, k: torch.add(x[q], y[k], alpha=100))
    compare(lambda s, b, h, q, k: x[q].sub(y[k], alpha=-3))
    compare(lambda s, b, h, q, k: torch.rsub(x[q], y[k], alpha=7))
    compare(lambda s, b, h, q, k: torch.addcmul(s, x[q], y[k]))
    compare(lambda s, b, h, q, k: torch.addcmul(x[q], y[k], y[q], value=2))
    compare(lambda s, b, h, q, k: torch.add(q, y[k], alpha=2_000_000_000))


def test_constants_are_folded_as_torch_computes():
    third = lambda x: torch.div(x, 3, rounding_mode="trunc") & 0xFFF  # noqa: E731
    compare(lambda s, b, h, q, k: third(torch.tensor(2**60 + 1)) + q)
    compare(lambda s, b, h, q, k: third(torch.tensor(-(2**60) - 1)) + q)
    compare(lambda s, b, h, q, k: s + torch.tensor(float("nan")).sign())
    compare(lambda s, b, h, q, k: q + torch.tensor(2) ** torch.tensor(-1))
    compare(lambda s, b, h, q, k: q + torch.tensor(-1) ** torch.tensor(-3))


def test_captured_numbers_promote_as_python_numbers():
    third, three = 1 / 3, 3
    bound = compare(lambda s, b, h, q, k: s * third + (q * three) + (k < third) + k / three)
    assert bound.scalars == (third, three)
    bound = compare(lambda s, b, h, q, k: q * third)
    assert [p.dtype for p in bound.ir.scalars] == ["float64"]


def test_numbers_computed_from_captured_numbers_stay_at_run_time():
    window, ratio = 8, 0.25
    f = lambda s, b, h, q, k: s + (window // 2 + 1) * ratio + -window % 3 + abs(-ratio) ** 2  # noqa: E731
    bound = compare(f)
    assert bound.specialised == ()
    assert bound.ir.scalars


def test_a_large_python_integer_needs_a_wider_tensor():
    with pytest.raises(TraceError, match=r"\.long\(\)"):
        variant(mask_mod=lambda b, h, q, k: q.int() < 5_000_000_000).bind(DIMS)


def test_equal_expressions_are_one_node():
    f = lambda s, b, h, q, k: s + (q - k) * (q - k) + BIAS[b, h, q, k] * BIAS[b][h][q][k]  # noqa: E731
    graph = variant(score_mod=f).bind(DIMS).ir.hook("score_mod")
    assert graph is not None
    assert sum(n.op == "gather" for n in graph.nodes) == 1
    assert sum(n.op == "sub" for n in graph.nodes) == 1


def test_constants_are_folded():
    f = lambda b, h, q, k: (q >= k) & torch.tensor(True) & ~torch.tensor(False)  # noqa: E731
    graph = variant(mask_mod=f).bind(DIMS).ir.hook("mask_mod")
    assert graph is not None
    assert [n.op for n in graph.nodes] == ["input", "input", "ge"]


def test_what_a_hook_captures_and_computes_is_bound():
    gain = 2.5
    bound = variant(score_mod=lambda s, b, h, q, k: s * gain + (TABLE * 2)[k]).bind(DIMS)
    assert bound.scalars == (2.5,) and torch.equal(bound.tensors[0], TABLE * 2)
    graph = bound.ir.hook("score_mod")
    assert graph is not None and graph.inputs == ("score", "b", "h", "q_idx", "kv_idx")
