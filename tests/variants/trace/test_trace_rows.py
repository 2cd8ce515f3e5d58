"""Row hooks: one fp32 row in, one of the same length out; values as eager torch gives them."""

# Hooks are written as users write them: lambdas of tensors.
# mypy: disable-error-code="no-untyped-call,no-untyped-def"

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flashattn_jit.errors import TraceError
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.reference import HookFunctions
from flashattn_jit.variants.variant import variant
from tests.variants.ir_eval import evaluate

D = 12
DIMS = Dims(2, 3, 3, 5, 7, D, D)
G = torch.Generator().manual_seed(0)
COS = torch.rand(7, D // 2, generator=G)
SIN = torch.rand(7, D // 2, generator=G)
FULL = torch.rand(7, D, generator=G)
WEIGHT = torch.rand(D, generator=G)
PER_HEAD = torch.rand(3, 2, D // 2, generator=G)
HALF = torch.rand(7, D, generator=G).half()
GATE = torch.rand(3, generator=G)
BOOK = torch.rand(16, generator=G)
BOOKS = torch.rand(3, 9, generator=G)
NUMBERS = torch.tensor([4, 4, 0, 1, 8, -2, 7, 3, 3, 2, 5, 6])
PLACES = torch.rand(3, 2, 7, generator=G)
FREQUENCIES = torch.rand(D // 2, generator=G)


def neox(x, b, h, i):
    x1, x2 = x.chunk(2, -1)
    c, s = COS[i], SIN[i]
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)


def rotate_half(x, b, h, i):
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * FULL[i] + turned * FULL[i, :]


def interleaved(x, b, h, i):
    x1, x2 = x[..., ::2], x[..., 1::2]
    c, s = COS[i], SIN[i]
    return torch.stack((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1).flatten(-2)


def pairs(x, b, h, i):
    p = x.view(-1, 2)
    c, s = COS[i], SIN[i]
    return torch.stack([p[..., 0] * c - p[:, 1] * s, p[..., 1] * c + p[:, 0] * s], -1).reshape(-1)


def partial(x, b, h, i):
    rotated, rest = x[..., :8], x[..., 8:]
    c = COS[i, :4]
    first, second = rotated.split(4, -1)
    return torch.cat((first * c, second * SIN[i][:4], rest), -1)


def computed_angles(x, b, h, i):
    angles = i * FREQUENCIES
    x1, x2 = x.unflatten(-1, (2, -1)).unbind(0)
    return torch.cat((x1 * angles.cos() - x2 * angles.sin(), x2 * angles.cos() + x1 * angles.sin()))


def in_place_assembly(x, b, h, i):
    out = torch.empty_like(x)
    out[..., ::2] = x[..., 1::2] * 2
    out[1::2] = x[::2]
    return out


def rms(x, b, h, i):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * WEIGHT


def layer(x, b, h, i):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)


HOOKS = {
    "identity": lambda x, b, h, i: x,
    "scaled": lambda x, b, h, i: x * (i + 1) * 0.5 + h,
    "by_head": lambda x, b, h, i: x * GATE[h],
    "constant": lambda x, b, h, i: torch.zeros_like(x),
    "broadcast_scalar": lambda x, b, h, i: x.sum(-1, keepdim=True).expand(D),
    "neox": neox,
    "rotate_half": rotate_half,
    "interleaved": interleaved,
    "pairs": pairs,
    "partial": partial,
    "computed_angles": computed_angles,
    "in_place_assembly": in_place_assembly,
    "rms": rms,
    "layer": layer,
    "rms_norm": lambda x, b, h, i: F.rms_norm(x, (D,), WEIGHT, 1e-5),
    "rms_norm_no_eps": lambda x, b, h, i: F.rms_norm(x, (D,)),
    "layer_norm": lambda x, b, h, i: F.layer_norm(x, (D,), WEIGHT, WEIGHT),
    "l2": lambda x, b, h, i: F.normalize(x, dim=-1),
    "norm": lambda x, b, h, i: x / x.norm(dim=-1, keepdim=True) + x / torch.linalg.norm(x),
    "max": lambda x, b, h, i: x / x.abs().amax(-1, keepdim=True),
    "softmax_like": lambda x, b, h, i: (x - x.amax()).exp() / (x - x.max()).exp().sum(),
    "softmax": lambda x, b, h, i: x.softmax(-1) + F.softmax(x.view(3, 4), dim=0).flatten(),
    "softmax_of_infinite": lambda x, b, h, i: torch.softmax(torch.where(x > 0, x, -torch.inf), 0),
    "softmax_to_double": lambda x, b, h, i: torch.softmax(x, 0, dtype=torch.float64),
    "log_softmax": lambda x, b, h, i: x.log_softmax(0) + F.log_softmax(x * 99, -1),
    "logsumexp": lambda x, b, h, i: x - x.logsumexp(0) + torch.logsumexp(x * 99, -1, keepdim=True),
    "logsumexp_of_parts": lambda x, b, h, i: x * x.view(3, 4).logsumexp((0, 1)) + i,
    "logsumexp_of_infinite": lambda x, b, h, i: x * 0 + (x * torch.inf).logsumexp(-1),
    "logsumexp_of_nothing": lambda x, b, h, i: x * 0 + (x - torch.inf).logsumexp(-1),
    "std": lambda x, b, h, i: (x - x.mean()) / x.std() + torch.std(x, 0, keepdim=True),
    "var": lambda x, b, h, i: x / x.var(unbiased=False) + torch.var(x, -1) + x.var(False),
    "var_correction": lambda x, b, h, i: x + x.var(0, correction=3) + x.view(3, 4).var(1).repeat(4),
    "einsum": lambda x, b, h, i: x * torch.einsum("d, d->", x, WEIGHT) + torch.einsum("i,i", x, x),
    "flip": lambda x, b, h, i: x.flip(-1) + torch.flip(x, (0,)),
    "negative_step_by_flip": lambda x, b, h, i: x.flip(0)[::2].repeat_interleave(2),
    "roll": lambda x, b, h, i: x.roll(3) + torch.roll(x, -1, 0),
    "transposed_pairs": lambda x, b, h, i: x.view(2, -1).t().reshape(-1),
    "transpose_3d": lambda x, b, h, i: x.view(2, 3, 2).permute(2, 0, 1).flatten(),
    "swap_halves": lambda x, b, h, i: x.reshape(2, D // 2).flip(0).flatten(),
    "stack_leading": lambda x, b, h, i: torch.stack(x.chunk(3)).flatten(),
    "group_norm": lambda x, b, h, i: (x.view(3, 4) - x.view(3, 4).mean(-1, keepdim=True)).flatten(),
    "group_sum": lambda x, b, h, i: x.view(3, 4).sum(0).repeat(3) + x.view(6, 2).sum(1).repeat(2),
    "narrow_select": lambda x, b, h, i: x * x.narrow(0, 2, 1) + x.select(0, 3),
    "captured_pairs": lambda x, b, h, i: (x.view(2, -1) * PER_HEAD[h]).flatten(),
    "captured_half": lambda x, b, h, i: x * HALF[i],
    "captured_element": lambda x, b, h, i: x * FULL[i, 3] + FULL[i][0],
    "arange": lambda x, b, h, i: x * torch.arange(D),
    "prelude_rows": lambda x, b, h, i: x * torch.cat((COS, COS), -1)[i] + (FULL * 2)[i],
    "where": lambda x, b, h, i: torch.where(x > 0, x, x * 0.1),
    "index_list": lambda x, b, h, i: x[[1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10]],
    "int_row": lambda x, b, h, i: (x * 4).round().int(),
    "outer_broadcast": lambda x, b, h, i: (x.view(3, 4) * x[:3, None]).flatten(),
    "chunks_uneven": lambda x, b, h, i: torch.cat(x.split([2, 7, 3])[::-1]),
    "lookup": lambda x, b, h, i: BOOK[(x * 4).round().int()] * x,
    "lookup_by_head": lambda x, b, h, i: BOOKS[h, (x * 40).long()] + BOOKS[1][x.int()],
    "lookup_of_a_constant": lambda x, b, h, i: x[:6].repeat(2) * BOOKS[h, NUMBERS],
    "lookup_of_a_list": lambda x, b, h, i: x * BOOKS[h][[3, -1, 0, 2, 2, 1, 4, 4, 5, 3, 2, 1]],
    "lookup_in_the_first_dim": lambda x, b, h, i: x * BOOKS.mT[NUMBERS, h] + BOOKS[x.int(), h],
    "lookup_by_parts": lambda x, b, h, i: PLACES[:, b, i][NUMBERS % 3] + PLACES[h, NUMBERS % 2, i],
    "lookup_of_half": lambda x, b, h, i: HALF[i, x.int()] * BOOK[(x[:6] * 3).int()].repeat(2),
    "setitem_scalar": lambda x, b, h, i: _zeroed(x),
}  # fmt: skip


def _zeroed(x):
    y = x.clone()
    y[:4] = 0
    y[5] = x[0]
    return y


@pytest.mark.parametrize("name", HOOKS)
def test_rows_equal_eager(name):
    hook = HOOKS[name]
    bound = variant(query_mod=hook).bind(DIMS)
    graph = bound.ir.hook("query_mod")
    assert graph is not None
    assert graph.result.dtype == "float32" and graph.result.shape == (D,)
    rows = torch.randn(2, 3, 5, D, generator=torch.Generator().manual_seed(1))
    b, h, i = (
        torch.arange(n, dtype=torch.int32).view(shape).expand(2, 3, 5)
        for n, shape in ((2, (2, 1, 1)), (3, (1, 3, 1)), (5, (1, 1, 5)))
    )
    inputs = {"row": rows, "b": b, "h": h, "q_idx": i}
    got = evaluate(graph, inputs, bound.tensors, bound.scalars)
    with HookFunctions():
        wanted = torch.vmap(hook)(rows.view(-1, D), b.flatten(), h.flatten(), i.flatten())
    torch.testing.assert_close(got.expand(2, 3, 5, D), wanted.view(2, 3, 5, D).float())


def test_rotary_embeddings_are_a_few_vector_operations():
    for hook, joint in ((neox, "cat"), (interleaved, "interleave"), (pairs, "interleave")):
        graph = variant(query_mod=hook).bind(DIMS).ir.hook("query_mod")
        assert graph is not None
        ops = [n.op for n in graph.nodes]
        assert ops.count("slice") == 2 and ops.count(joint) == 1 and ops.count("gather") == 2


def test_one_trace_per_head_dim():
    v = variant(query_mod=neox, mask_mod=lambda b, h, q, k: q >= k)
    assert v.bind(DIMS).structure == v.bind(DIMS._replace(batch=9, kv_len=11)).structure
    assert ("head_dim", D) in v.bind(DIMS).specialised
    with pytest.raises(TraceError, match=r"\[8\]"):
        v.bind(DIMS._replace(head_dim=16))


def test_output_mod_sees_lse_and_value_rows():
    v = variant(output_mod=lambda o, lse, b, h, i: o * torch.sigmoid(lse - GATE[h]))
    bound = v.bind(DIMS._replace(head_dim=40, head_dim_v=6))
    graph = bound.ir.hook("output_mod")
    assert graph is not None and graph.uses("lse") and graph.result.shape == (6,)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda x, b, h, i: x[:4], r"shape \[4\].*return shape \[12\]"),
        (lambda x, b, h, i: x.sum(), r"shape \[\].*return shape \[12\]"),
        (lambda x, b, h, i: x @ torch.eye(D), "matrix product"),
        (lambda x, b, h, i: x.sort().values, "sort"),
        (lambda x, b, h, i: x.cumsum(-1), "cumsum"),
        (lambda x, b, h, i: x[i], "indexed by a tensor"),
        (lambda x, b, h, i: x.view(2, -1), r"shape \[2, 6\]"),
        (lambda x, b, h, i: x + COS[i], "shapes"),
        (lambda x, b, h, i: BOOK[x], "index of dtype float32"),
        (lambda x, b, h, i: BOOKS[x.int(), NUMBERS], r"that is a vector .* in a hook of rows one"),
        (lambda x, b, h, i: PLACES[h, NUMBERS], r"an index that is a vector .* every other dim"),
        (
            lambda x, b, h, i: BOOKS[h, NUMBERS > 3],
            r"lists or masks .* in a hook of rows",
        ),
        (lambda x, b, h, i: BOOKS[x.int()][:, 0], "an index that is a vector"),
        (lambda x, b, h, i: x.max(-1)[0], "amax"),
    ],
)
def test_what_a_row_cannot_do(hook, message):
    with pytest.raises(TraceError, match=message) as error:
        variant(query_mod=hook).bind(DIMS)
    assert "test_trace_rows.py" in str(error.value)
