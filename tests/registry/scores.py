"""Score mods as users of FlexAttention write them: those of torch's own tests and attention-gym.

Each maker takes (shape, generator) and returns a bare ``score_mod(score, b, h, q_idx, kv_idx)``.
"""
# Hooks are written as their authors wrote them: bare closures over tensors and numbers.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import math

import torch

from tests.registry.case import Case, Make, Shape, tags


def _random(generator: torch.Generator, *sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=generator)


def _simple(fn) -> Make:
    return lambda shape, generator: fn


def _identity(score, b, h, q, k):
    return score


def _times_two(score, b, h, q, k):
    return score * 2


def _squared(score, b, h, q, k):
    return score * score


def _causal(score, b, h, q, k):
    return torch.where(q >= k, score, float("-inf"))


def _inverse_causal(score, b, h, m, n):
    return torch.where(m <= n, score, float("-inf"))


def _rel_bias(score, b, h, m, n):
    return score + (m - n)


def _rel_causal(score, b, h, m, n):
    return torch.where(m >= n, score + (m - n), float("-inf"))


def _alibi(shape: Shape, generator: torch.Generator):
    heads = shape.num_q_heads

    def alibi(score, b, h, q, k):
        return score + torch.exp2(-(h + 1) * 8.0 / heads) * (k - q)

    return alibi


def _windowed(shape: Shape, generator: torch.Generator):
    offset = 1000

    def windowed(score, b, h, q, k):
        return torch.where(q + offset >= k, score, float("-inf"))

    return windowed


def _head_offset(shape: Shape, generator: torch.Generator):
    head_offset = torch.rand(shape.num_q_heads, generator=generator)

    def mod(score, b, h, m, n):
        return score * head_offset[h]

    return mod


def _trig(score, b, h, m, n):
    return torch.sin(torch.cos(score)) + torch.tan(b)


def _trig2(score, b, h, m, n):
    cos_score = torch.cos(score)
    sin_score = torch.sin(score)
    return cos_score * sin_score + torch.tan(b)


def _captured_buffers(shape: Shape, generator: torch.Generator):
    token_scale = torch.randn(shape.tokens, generator=generator)

    def mod(score, b, h, q, k):
        return score + token_scale[q]

    return mod


def _captured_all_dims(shape: Shape, generator: torch.Generator):
    tok_scale = _random(generator, shape.tokens)
    batch_scale = _random(generator, shape.batch)
    head_scale = _random(generator, shape.num_q_heads)

    def all_bias(score, b, h, q, k):
        score = score + tok_scale[q]
        score = score + batch_scale[b]
        return score + head_scale[h]

    return all_bias


def _seq_masking(shape: Shape, generator: torch.Generator):
    seq_idx = torch.zeros(shape.tokens, dtype=torch.bool)
    seq_idx[shape.tokens // 2 :] = True

    def mod(score, b, h, q, k):
        return torch.where(seq_idx[q] == seq_idx[k], score, float("-inf"))

    return mod


def _bias_seq(shape: Shape, generator: torch.Generator):
    bias = _random(generator, shape.tokens, shape.tokens)
    return lambda score, b, h, q, k: score + bias[q, k]


def _bias_seq_batch(shape: Shape, generator: torch.Generator):
    bias = _random(generator, shape.batch, shape.tokens, shape.tokens)
    return lambda score, b, h, q, k: score + bias[b, q, k]


def _bias_head_seq_batch(shape: Shape, generator: torch.Generator):
    n = shape.tokens
    bias = _random(generator, shape.batch, shape.num_q_heads, n, n)
    return lambda score, b, h, q, k: score + bias[b, h, q, k]


def _load_rel_bias(shape: Shape, generator: torch.Generator):
    n = shape.tokens
    rel_bias = _random(generator, 2 * n)
    return lambda score, b, h, q, k: score + rel_bias[(q - k) + n]


def _view_buffer(shape: Shape, generator: torch.Generator):
    """Decomposed relative positions of SAM: rows of width W."""
    width = 8
    heights = shape.tokens // width + 1
    b, h, n = shape.batch, shape.num_q_heads, shape.tokens
    rel_h = _random(generator, b * h, n, heights, 1).view(b, h, n, heights)
    rel_w = _random(generator, b * h, n, 1, width).view(b, h, n, width)

    def mod(score, batch, head, q, k):
        return score + rel_h[batch, head, q, k // width] + rel_w[batch, head, q, k % width]

    return mod


def _index_multiple(shape: Shape, generator: torch.Generator):
    bias = _random(generator, shape.batch, shape.tokens)
    return lambda score, b, h, q, k: score + bias[b][q]


def _index_weird1(shape: Shape, generator: torch.Generator):
    bias = _random(generator, 4, shape.batch, shape.num_q_heads, shape.tokens)
    return lambda score, b, h, q, k: score + bias[0][b, h][q]


def _index_weird2(shape: Shape, generator: torch.Generator):
    bias = _random(generator, shape.batch, shape.num_q_heads, 4, shape.tokens)
    which = torch.tensor(2)
    return lambda score, b, h, q, k: score + bias[b][h][which, q]


def _captured_scale(shape: Shape, generator: torch.Generator):
    scale = torch.ones((), dtype=torch.int32) * 3
    return lambda score, b, h, q, k: score + scale


def _captured_first(shape: Shape, generator: torch.Generator):
    scale = torch.randn(1, generator=generator)
    return lambda score, b, h, q, k: score * scale[0]


def _bool_branch(shape: Shape, generator: torch.Generator):
    add = True

    def mod(score, b, h, q, k):
        return score + (q - k) if add else score - (q - k)

    return mod


def _padded_dense_causal(shape: Shape, generator: torch.Generator):
    lengths = torch.arange(1, shape.batch + 1, dtype=torch.int32) * shape.tokens // shape.batch

    def mod(score, b, h, q, k):
        valid = (q >= k) & (q < lengths[b]) & (k < lengths[b])
        return torch.where(valid, score, float("-inf"))

    return mod


def _natten_true_division(shape: Shape, generator: torch.Generator):
    width, kernel = 6, 3

    def mod(score, b, h, q, k):
        q_x, q_y = q / width, q % width
        k_x, k_y = k / width, k % width
        near = ((q_x - k_x).abs() <= kernel) & ((q_y - k_y).abs() <= kernel)
        return torch.where(near, score, float("-inf"))

    return mod


def _skip_odd_keys(score, b, h, q, k):
    return torch.where(k % 2 == 0, score, float("-inf"))


def _silu(score, b, h, q, k):
    return torch.nn.functional.silu(score)


def _composition(shape: Shape, generator: torch.Generator):
    def scaled(score, b, h, q, k):
        return score * 1.5

    def shifted(score, b, h, q, k):
        return score + 0.25 * h

    return lambda score, b, h, q, k: shifted(scaled(score, b, h, q, k), b, h, q, k)


def _partial(shape: Shape, generator: torch.Generator):
    def mod(score, b, h, q, k, *, slope):
        return score + slope * (k - q)

    return functools.partial(mod, slope=0.05)


def _distance_of_points(shape: Shape, generator: torch.Generator):
    points = _random(generator, shape.batch, shape.tokens, 3)

    def mod(score, b, h, q, k):
        difference = points[b, q] - points[b, k]
        return score + torch.sqrt((difference * difference).sum(dim=-1) + 1e-6)

    return mod


def _swin_like(shape: Shape, generator: torch.Generator):
    """Continuous position bias read through an index matrix, gated by row and key tables."""
    n, heads = shape.tokens, shape.num_q_heads
    index = torch.randint(0, 32, (n, n), generator=generator)
    table = _random(generator, 32, heads)
    gate_q = torch.rand(shape.batch, heads, n, generator=generator)
    gate_k = torch.rand(shape.batch, heads, n, generator=generator)

    def mod(score, b, h, q, k):
        bias = table[index[q, k], h]
        gated = (gate_q[b, h, q] + gate_k[b, h, k]) * bias
        return score + gated * (q != k).to(score.dtype)

    return mod


def _symbol_closure(shape: Shape, generator: torch.Generator):
    batch = shape.batch
    return lambda score, b, h, q, k: score + batch


def _reciprocal(score, b, h, q, k):
    """NaN where a score is 0, as in lanes past the last key: it must not leak.

    Bounded, so that a small score is not an ill-conditioned one.
    """
    return torch.clamp(1 / score, -4.0, 4.0) + 0 / score


def _poisoned_rel_logits(shape: Shape, generator: torch.Generator):
    """Rows of the table beyond the batch hold NaN, which must not leak."""
    table = torch.full((shape.batch + 1, shape.num_q_heads, shape.tokens), float("nan"))
    table[: shape.batch] = _random(generator, shape.batch, shape.num_q_heads, shape.tokens)
    return lambda score, b, h, q, k: score + table[b, h, k]


def _key_scale(shape: Shape, generator: torch.Generator):
    scale = torch.rand(shape.batch, shape.num_q_heads, generator=generator) + 0.5
    return lambda score, b, h, q, k: score * scale[b, h]


# --- learnable biases, forward ------------------------------------------------------------------


def _relative_1d(shape: Shape, generator: torch.Generator):
    bias = _random(generator, 2 * shape.tokens)
    return lambda score, b, h, q, k: score + bias[torch.abs(q - k)]


def _absolute_2d(shape: Shape, generator: torch.Generator):
    bias = _random(generator, shape.tokens, shape.tokens).half()
    return lambda score, b, h, q, k: score + bias[q, k]


def _head_specific(shape: Shape, generator: torch.Generator):
    bias = _random(generator, shape.num_q_heads, shape.tokens, shape.tokens).bfloat16()
    return lambda score, b, h, q, k: score + bias[h, q, k]


def _multiplicative(shape: Shape, generator: torch.Generator):
    bias = _random(generator, shape.tokens, shape.tokens)
    return lambda score, b, h, q, k: score * bias[q, k]


def _local_window(shape: Shape, generator: torch.Generator):
    window = 32
    bias = _random(generator, 2 * window + 1)

    def mod(score, b, h, q, k):
        return score + bias[torch.clamp(q - k, -window, window) + window]

    return mod


def _global_tokens(shape: Shape, generator: torch.Generator):
    bias = _random(generator, shape.tokens)
    return lambda score, b, h, q, k: score + bias[k]


def _indirect(shape: Shape, generator: torch.Generator):
    offset = torch.randint(0, shape.tokens, (shape.tokens,), generator=generator)
    bias = _random(generator, shape.tokens)
    return lambda score, b, h, q, k: score + bias[offset[q]]


def _symmetric(shape: Shape, generator: torch.Generator):
    bias = _random(generator, shape.tokens, shape.tokens)
    return lambda score, b, h, q, k: score + bias[q, k] + bias[k, q]


def _flipped(shape: Shape, generator: torch.Generator):
    bias = _random(generator, shape.tokens, shape.tokens)
    return lambda score, b, h, q, k: score + bias[k, q]


def _head_gate(shape: Shape, generator: torch.Generator):
    gate = _random(generator, shape.num_q_heads)
    return lambda score, b, h, q, k: score * torch.sigmoid(gate[h])


def _distinct(shape: Shape, generator: torch.Generator):
    b1, b2 = _random(generator, shape.tokens), _random(generator, shape.tokens)
    return lambda score, b, h, q, k: score + b1[q] + b2[k]


def _weird(shape: Shape, generator: torch.Generator):
    bias = _random(generator, shape.batch, shape.num_q_heads, 4, shape.tokens)
    which = torch.tensor(0)
    return lambda score, b, h, q, k: score + bias[b, h, which, q]


def _prelude(shape: Shape, generator: torch.Generator):
    """What depends on captured tensors alone is computed before the call."""
    slopes = torch.rand(shape.num_q_heads, generator=generator)
    table = _random(generator, 65, shape.num_q_heads)

    def mod(score, b, h, q, k):
        return score * (slopes * 2 + 1)[h] + table.t()[h, torch.clamp(k - q, -32, 32) + 32]

    return mod


# --- attention-gym and models ---------------------------------------------------------------------


def _softcap(shape: Shape, generator: torch.Generator):
    cap = 30.0
    return lambda score, b, h, q, k: cap * torch.tanh(score / cap)


def _softcap_approx(shape: Shape, generator: torch.Generator):
    """The rational approximation of tanh, for |x| where it is one."""
    cap = 30.0

    def mod(score, b, h, q, k):
        x = torch.clamp(score / cap, -3.0, 3.0)
        return cap * (x * (27.0 + x * x) / (27.0 + 9.0 * x * x))

    return mod


def _sandwich(shape: Shape, generator: torch.Generator):
    """Chi et al. 2023: a sum of cosines of the distance over a ratio of the head."""
    frequencies = 10000.0 ** (-2.0 * torch.arange(1, 9) / 16.0)
    heads = shape.num_q_heads

    def mod(score, b, h, q, k):
        ratio = 8.0 * (h + 1) / heads
        return score + (torch.cos((q - k) * frequencies).sum() - 8.0) / ratio

    return mod


def _kerple(shape: Shape, generator: torch.Generator):
    r1 = torch.rand(shape.num_q_heads, generator=generator)
    r2 = torch.rand(shape.num_q_heads, generator=generator)
    return lambda score, b, h, q, k: score - r1[h] * torch.log(1 + r2[h] * torch.abs(q - k))


def _graphormer(shape: Shape, generator: torch.Generator):
    n = shape.tokens
    distance = torch.randint(0, 16, (shape.batch, n, n), generator=generator, dtype=torch.uint8)
    table = _random(generator, 16, shape.num_q_heads)
    return lambda score, b, h, q, k: score + table[distance[b, q, k].long(), h]


def _mla_rope(shape: Shape, generator: torch.Generator):
    """The rotary part of MLA as a dot product of short captured rows."""
    n, group = shape.tokens, shape.num_q_heads // shape.num_kv_heads
    q_rope = _random(generator, shape.batch, shape.num_q_heads, n, 8)
    k_rope = _random(generator, shape.batch, shape.num_kv_heads, n, 8)

    def mod(score, b, h, q, k):
        return score + torch.dot(q_rope[b, h, q], k_rope[b, h // group, k])

    return mod


def _long_dot(shape: Shape, generator: torch.Generator):
    """A low-rank bias of 48 columns: a loop on every target."""
    left, right = (_random(generator, shape.tokens, 48) for _ in range(2))
    return lambda score, b, h, q, k: score + 0.1 * torch.dot(left[q], right[k])


def _long_reductions(shape: Shape, generator: torch.Generator):
    """Other reductions of long rows: of strided and half-precision tensors, slices, integers."""
    strided = _random(generator, 40, shape.tokens).t()
    halves = _random(generator, shape.tokens, 40).bfloat16()
    counts = torch.randint(1, 50, (shape.num_q_heads, 40), generator=generator)
    step, cap = 7, 3.0

    def mod(score, b, h, q, k):
        far = (strided[q] - halves[k]).abs()
        whole = (counts[h] // step).sum() * 0.001 + (counts[h] / cap)[1::3].mean()
        joined = torch.cat([strided[q][:2], halves[k][20:23]])  # parts differ: written out
        return score + far.amax() - far[2::2].sum() * 0.1 + whole * (joined * joined).amin()

    return mod


def _t5_inline(shape: Shape, generator: torch.Generator):
    """T5's buckets computed for every pair, as HF writes them."""
    num_buckets, max_distance = 32, 128
    table = _random(generator, num_buckets, shape.num_q_heads)

    def mod(score, b, h, q, k):
        relative = k - q
        half = num_buckets // 2
        bucket = (relative > 0).to(torch.int32) * half
        distance = torch.abs(relative)
        exact = half // 2
        # Half a step off the exact boundaries, where the last bit of a logarithm would decide.
        grown = torch.log((distance.float() + 0.5) / exact) / math.log(max_distance / exact)
        large = exact + (grown * (half - exact)).to(torch.int32)
        large = torch.clamp(large, max=half - 1)
        return score + table[bucket + torch.where(distance < exact, distance, large), h]

    return mod


def _forgetting(shape: Shape, generator: torch.Generator):
    """Forgetting attention: cumulated log gates of rows and keys."""
    gates = _random(generator, shape.batch, shape.num_q_heads, shape.tokens)
    c = torch.nn.functional.logsigmoid(gates).cumsum(-1)
    return lambda score, b, h, q, k: score + c[b, h, q] - c[b, h, k]


def _cosine_temperature(shape: Shape, generator: torch.Generator):
    t = _random(generator, shape.num_q_heads)
    return lambda score, b, h, q, k: score * torch.exp(torch.clamp(t[h], max=math.log(100.0)))


def _odds_and_ends(shape: Shape, generator: torch.Generator):
    """One mod with the rarer operations."""
    c = 0.5

    def mod(score, b, h, q, k):
        x = torch.nn.functional.softplus(score) + torch.nn.functional.gelu(score)
        x = x + torch.nn.functional.logsigmoid(score) + torch.sign(score) * torch.sqrt(k + c)
        x = torch.minimum(x, torch.maximum(score, -score)) + torch.fmod(score, 2.0)
        x = torch.nan_to_num(x.masked_fill((q ^ k) == 5, 1.0)) + ((q >> 1) - (k << 1)) * 0.01
        return x + torch.erf(score) + torch.expm1(score * 0.1) + ((q < k) * 0.25) + c**2

    return mod


def _entry(name: str, make: Make, **more) -> Case:
    return Case(f"flex_{name}", make, tags=tags("score closure"), **more)


_MADE = {
    "alibi": _alibi, "windowed": _windowed, "head_offset": _head_offset,
    "captured_buffers": _captured_buffers, "captured_buffers_all_dims": _captured_all_dims,
    "seq_masking": _seq_masking, "bias_seq_only": _bias_seq, "bias_seq_batch": _bias_seq_batch,
    "bias_head_seq_batch": _bias_head_seq_batch, "load_rel_bias": _load_rel_bias,
    "load_from_view_buffer": _view_buffer, "index_multiple": _index_multiple,
    "index_weird1": _index_weird1, "index_weird2": _index_weird2,
    "captured_scale": _captured_scale, "captured_first": _captured_first,
    "bool_branch": _bool_branch, "padded_dense_causal": _padded_dense_causal,
    "natten_true_division": _natten_true_division, "function_composition": _composition,
    "partial": _partial, "reduction_unrolled": _distance_of_points, "swin_cpb": _swin_like,
    "symbol_closure": _symbol_closure, "poisoned_rel_logits": _poisoned_rel_logits,
    "kv_scale": _key_scale, "relative_1d": _relative_1d, "absolute_2d_fp16": _absolute_2d,
    "head_specific_bf16": _head_specific, "multiplicative": _multiplicative,
    "local_window_bias": _local_window, "global_tokens": _global_tokens,
    "indirect": _indirect, "symmetric": _symmetric, "flipped_indexed": _flipped,
    "head_specific_gate": _head_gate, "distinct_biases": _distinct, "weird": _weird,
    "prelude": _prelude, "softcap": _softcap, "softcap_approx": _softcap_approx,
    "sandwich": _sandwich, "kerple": _kerple, "graphormer": _graphormer,
    "mla_rope": _mla_rope, "long_dot": _long_dot, "long_reductions": _long_reductions,
    "t5_inline": _t5_inline, "forgetting": _forgetting,
    "cosine_temperature": _cosine_temperature, "odds_and_ends": _odds_and_ends,
}  # fmt: skip
_PLAIN = {
    "identity": _identity, "times_two": _times_two, "squared": _squared,
    "causal_score": _causal, "inverse_causal_score": _inverse_causal, "rel_bias": _rel_bias,
    "rel_causal": _rel_causal, "trig": _trig, "trig2": _trig2, "skip_odd_keys": _skip_odd_keys,
    "silu_on_score": _silu,
}  # fmt: skip

SCORE_CASES: tuple[Case, ...] = (
    *(_entry(name, _simple(fn)) for name, fn in _PLAIN.items()),
    *(_entry(name, make) for name, make in _MADE.items()),
    _entry("poison_reciprocal", _simple(_reciprocal), reaches_nan=True),
)
"""Every score mod as a case."""
