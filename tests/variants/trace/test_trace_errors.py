"""Operations that hooks cannot use: errors name the hook, its file and line, and what to write."""

# Hooks are written as users write them.
# mypy: disable-error-code="no-untyped-call,no-untyped-def"

from __future__ import annotations

import collections
import inspect
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flashattn_jit.errors import FlashAttnJitError, TraceError
from flashattn_jit.variants import builtins
from flashattn_jit.variants.variant import as_variant, variant
from tests.variants.small_variants import Causal
from tests.variants.trace.trace_oracle import DIMS

T = torch.randn(8, 8)
MASK = torch.rand(8) > 0.5
LINEAR = torch.nn.Linear(1, 1).requires_grad_(False)
ARRAY, BY_HEAD = np.arange(8.0), {0: 1.0, 1: 2.0}


def _and(b, h, q, k):
    return q >= k and q - k < 3


def _or(b, h, q, k):
    return q >= k or h == 0


def _not(b, h, q, k):
    return not q >= k


def _chained(b, h, q, k):
    return 0 <= q - k < 3


def _if(b, h, q, k):
    if q > k:
        return True
    return k < 3


def _ternary(b, h, q, k):
    return k < 2 if h == 0 else k < 4


def _min(b, h, q, k):
    return min(q, k) > 1


def _while(s, b, h, q, k):
    while s > 1:
        s = s / 2
    return s


MESSAGES = [
    (_and, r"`and` on tensors.*use `&`"),
    (_or, r"`or` on tensors.*use `\|`"),
    (_not, r"`not` on tensors.*use `~`"),
    (_chained, r"chained comparison.*\(a <= x\) & \(x < b\)"),
    (_if, r"`if` on tensors.*torch\.where"),
    (_ternary, r"`if` on tensors.*torch\.where"),
    (_min, r"min.*torch\.minimum"),
    (_while, r"`if` on tensors.*torch\.where"),
    (lambda s, b, h, q, k: float(s), r"float\(\).*keep it a tensor"),
    (lambda s, b, h, q, k: s * int(q), r"int\(\).*\.int\(\)"),
    (lambda s, b, h, q, k: s * h.item(), r"\.item\(\).*keep it a tensor"),
    (lambda s, b, h, q, k: s.tolist(), r"\.tolist\(\)"),
    (lambda s, b, h, q, k: math.exp(s), r"float\(\).*torch\.exp"),
    (lambda s, b, h, q, k: s * [1, 2, 3][h], r"index.*t\[q_idx\]"),
    (lambda s, b, h, q, k: sum(range(q)), r"index"),
    (lambda s, b, h, q, k: s + T[0, 0].item(), r"\.item\(\)"),
    (lambda s, b, h, q, k: s if T[0, 0] > 0 else s * 2, r"`if` on tensors"),
    (lambda s, b, h, q, k: s * float(T[0, 0]), r"float\(\)"),
    (lambda s, b, h, q, k: s + torch.rand(()), r"`rand`.*random"),
    (lambda s, b, h, q, k: s + torch.randn_like(s), r"`randn_like`.*random"),
    (lambda s, b, h, q, k: F.dropout(s, 0.1), r"`dropout`.*random"),
    (lambda s, b, h, q, k: s + (T @ T[q])[k], r"matrix product"),
    (lambda s, b, h, q, k: s + T[q].sort().values[0], r"`(Tensor\.)?sort`"),
    (lambda s, b, h, q, k: s + torch.linalg.det(T[q].view(2, 4)), r"det"),
    (lambda s, b, h, q, k: T.add_(1)[q, k], r"`add_` on a captured tensor.*must not write"),
    (lambda s, b, h, q, k: T.__setitem__((0, 0), s), r"captured tensor.*must not write"),
    (lambda s, b, h, q, k: T[q].mul_(2).sum(), r"`mul_` on a captured tensor"),
    (lambda s, b, h, q, k: s + T[q][MASK[k]], r"dtype bool.*integer index"),
    (lambda s, b, h, q, k: s + T[s, k], r"dtype float32.*integer index"),
    (lambda s, b, h, q, k: s + T[q, k, h], r"3 indices.*2 dims"),
    (lambda s, b, h, q, k: s + T[q], r"shape \[8\]|\[8\]"),
    (lambda s, b, h, q, k: s + T[q, :, None], r"`None`"),
    (lambda s, b, h, q, k: s + T, r"64 elements"),
    (lambda s, b, h, q, k: None, r"returns nothing"),
    (lambda s, b, h, q, k: "x", r"type str"),
    (lambda s, b, h, q, k: (s, s), r"type tuple"),
    (lambda s, b, h, q, k: torch.tanh(s, out=s), r"out="),
    (lambda s, b, h, q, k: s.backward(), r"backward"),
    (lambda s, b, h, q, k: s.no_such_method(), r"no attribute 'no_such_method'"),
    (lambda s, b, h, q, k: undefined_name + s, r"NameError.*undefined_name"),  # noqa: F821
    (lambda s, b, h, q, k: 1 // 0 + s, r"ZeroDivisionError"),
    (lambda s, b, h, q, k: q // 0, r"zero"),
    (lambda s, b, h, q, k: -(q > k), r"boolean.*`~`"),
    (lambda s, b, h, q, k: (q > k) - (q > 1), r"booleans"),
    (lambda s, b, h, q, k: s & 1, r"floating.*compare first"),
    (lambda s, b, h, q, k: ~s, r"floating.*compare first"),
    (lambda s, b, h, q, k: torch.where(q, s, 0.0), r"not boolean.*x != 0"),
    (lambda s, b, h, q, k: torch.where(q > k), r"one argument.*both branches"),
    (lambda s, b, h, q, k: s.to(torch.complex64), r"complex64"),
    (lambda s, b, h, q, k: torch.complex(s, s).real, r"`complex`.*fa\.rotate\(row.*row\[0::2\]"),
    (lambda s, b, h, q, k: q.mean(), r"mean of integers"),
    (lambda s, b, h, q, k: k.view(1).var(), r"var and std of integers.*`\.float\(\)`"),
    (lambda s, b, h, q, k: torch.softmax(q.view(1), 0), r"softmax of integers.*`\.float\(\)`"),
    (lambda s, b, h, q, k: F.softmax(T[q]), r"softmax without a dim.*torch\.softmax\(x, -1\)"),
    (lambda s, b, h, q, k: torch.var_mean(T[q]), r"`x\.var\(-1\)` and `x\.mean\(-1\)`"),
    (lambda s, b, h, q, k: s + torch.einsum("d,e->", T[q], T[k]), r"`einsum` of 'd,e->'.*`a @ b`"),
    (lambda s, b, h, q, k: LINEAR(s.view(1)), r"nn\.Linear.*`w \* s \+ c`"),
    (lambda s, b, h, q, k: torch.cond(q > k, abs, abs, (s,)), r"use `torch\.where\(condition"),
    (lambda s, b, h, q, k: torch.vmap(torch.exp)(s), r"one pair: call the function itself"),
    (lambda s, b, h, q, k: s + torch.tensor([q, k]).sum(), r"write `torch\.stack\(\[i, j\]\)`"),
    (lambda s, b, h, q, k: s.new_tensor([q, k])[0], r"write `torch\.stack\(\[i, j\]\)`"),
    (lambda s, b, h, q, k: s + T[q].mul(2)[:0].sum(), r"an empty part of a value"),
    (lambda s, b, h, q, k: s + sum(T[q].mul(2).split([0, 8])).sum(), r"an empty part of a value"),
    (lambda s, b, h, q, k: s + T[q].mul(2).view(4, 2).t_()[0, 0],
     r"`t_`, which changes a shape in place.*`x = x\.t\(\.\.\.\)`"),
    (lambda s, b, h, q, k: s.unsqueeze_(0)[0], r"`unsqueeze_`.*`x = x\.unsqueeze\(\.\.\.\)`"),
    (lambda b, h, q, k: k in (1, 2) and q > 3, r"`in` of a tensor.*torch\.isin\(j, torch\.tensor"),
    (lambda b, h, q, k: k not in [1, 2], r"`in` of a tensor.*\(j == 1\) \| \(j == 2\)"),
    (lambda b, h, q, k: k in {1, 2}, r"a look-up of a tensor in a set.*torch\.isin\(j"),
    (lambda s, b, h, q, k: s + BY_HEAD.get(h, 0.0), r"look-up of a tensor.*`table\[j\]`"),
    (lambda s, b, h, q, k: s * (T[0, 0] in BY_HEAD), r"look-up of a tensor.*torch\.isin"),
    (lambda s, b, h, q, k: s * [1, 2, 3].index(h), r"a search in a list.*torch\.isin"),
    (lambda s, b, h, q, k: s * (f"{h}" == "0"), r"the text of a tensor.*print\(repr\(x\)\)"),
    (lambda s, b, h, q, k: s * T[0].tolist()[1], r"value of a captured.* or index the tensor"),
    (lambda s, b, h, q, k: s * T[q].tolist()[1], r"only known inside the kernel"),
    (lambda s, b, h, q, k: s.data, r"`Tensor\.data`.*use the value itself"),
    (lambda s, b, h, q, k: T[q].max(-1).values, r"use `\.amax\(dim\)`"),
    (lambda s, b, h, q, k: torch.searchsorted(T[q], k), r"captured 1-D tensor"),
    (lambda s, b, h, q, k: torch.no_such_function(s), r"no_such_function"),
    (lambda s, b, h, q, k: q ** -1, r"negative power"),
    (lambda s, b, h, q, k: s.relu(1, 2), r"TypeError.* relu\(\): too many positional"),
    (lambda s, b, h, q, k: s.fmod(), r"TypeError.* fmod\(\): missing a required"),
    (lambda s, b, h, q, k: torch.fmod(s, 2, 1), r"TypeError.* fmod\(\)"),
    (lambda s, b, h, q, k: s.lerp(s), r"TypeError.* lerp\(\): missing a required"),
    (lambda s, b, h, q, k: s.lerp(s, 0.5, 1), r"TypeError.* lerp\(\): too many positional"),
    (lambda s, b, h, q, k: s.lerp(s, 0.5, inplace=True),
     r"TypeError.* lerp\(\).*unexpected keyword"),
    (lambda s, b, h, q, k: s.heaviside(), r"TypeError.* heaviside\(\): missing a required"),
    (lambda s, b, h, q, k: s.heaviside(s, 1), r"TypeError.* heaviside\(\): too many positional"),
    (lambda s, b, h, q, k: s.hypot(), r"TypeError.* hypot\(\): missing a required"),
    (lambda s, b, h, q, k: s.hypot(s, s), r"TypeError.* hypot\(\): too many positional"),
    (lambda s, b, h, q, k: F.elu(), r"TypeError.* elu\(\) missing 1 required"),
    (lambda s, b, h, q, k: F.elu(s, 1.0, True, 3), r"TypeError.* elu\(\) takes from 1 to 3"),
    (lambda s, b, h, q, k: s.clamp_min(), r"TypeError.* clamp_min\(\): missing a required"),
    (lambda s, b, h, q, k: s.clamp_min(0.5, 1.0), r"TypeError.* clamp_min\(\): too many"),
    (lambda s, b, h, q, k: s.clamp_min(max=0.5), r"TypeError.* clamp_min\(\): missing a required"),
    (lambda s, b, h, q, k: s.type_as(), r"TypeError.* type_as\(\): missing a required"),
    (lambda s, b, h, q, k: s.positive(3), r"TypeError.* positive\(\): too many positional"),
    (lambda s, b, h, q, k: s.type_as(3), r"no attribute 'dtype'"),
    (lambda s, b, h, q, k: s.type_as(torch.int32), r"no attribute 'dtype'"),
    (lambda s, b, h, q, k: s + torch.ones(2, 3)[q], r"\[3\]|shape"),
    (lambda s, b, h, q, k: s + torch.from_numpy(ARRAY)[k], r"arrays are tensors .*`t\[j\]`"),
    (lambda s, b, h, q, k: s + np.log(k + 1), r"write torch's: `torch\.log`$"),
    (lambda s, b, h, q, k: np.where(q > k, s, 0.0), r"write torch's: `torch\.where`$"),
    (lambda s, b, h, q, k: s + BY_HEAD[h], r"a look-up of a tensor in .* `table\[j\]`"),
]  # fmt: skip


@pytest.mark.parametrize(("hook", "message"), MESSAGES)
def test_the_message_says_what_to_write(hook, message):
    with pytest.raises(TraceError, match=message) as error:
        as_variant(hook).bind(DIMS)
    text = str(error.value)
    lines, first = inspect.getsourcelines(hook)
    found = re.search(r"test_trace_errors\.py:(\d+)", text)
    assert found is not None, text
    assert first <= int(found.group(1)) < first + max(len(lines), 6), text


def test_the_line_is_where_it_happened_not_where_the_hook_starts():
    def helper(x):
        y = x + 1
        return float(y)

    def hook(s, b, h, q, k):
        s = s * 2
        return helper(s)

    with pytest.raises(TraceError) as error:
        as_variant(hook).bind(DIMS)
    line = inspect.getsourcelines(helper)[1] + 2
    assert f"test_trace_errors.py:{line}: `return float(y)`" in str(error.value)
    assert "score_mod(hook) (" in str(error.value)


def test_hooks_are_named_as_their_variant_is():
    """By the function where only one can be meant, else by the whole composition."""

    def cap(s, b, h, q, k):
        return s if s > 0 else -s

    def low(b, h, q, k):
        return q >= k

    capped = variant(score_mod=cap)
    for chosen, name in (
        (variant(score_mod=cap, mask_mod=low), "score_mod(cap)"),
        (as_variant(low) & capped, "score_mod(cap)"),
        (Causal() & capped, "(Causal & score_mod(cap)).score_mod"),
        (capped & capped, "(score_mod(cap) & score_mod(cap)).score_mod"),
    ):
        with pytest.raises(TraceError) as error:
            chosen.bind(DIMS)
        assert str(error.value).startswith(f"{name} (")


def test_a_floating_mask_is_an_error():
    with pytest.raises(TraceError, match=r"floating mask.*score_mod"):
        variant(mask_mod=lambda b, h, q, k: q * 0.5).bind(DIMS)


def test_integer_masks_are_taken_as_booleans():
    graph = variant(mask_mod=lambda b, h, q, k: (q >= k).int()).bind(DIMS).ir.hook("mask_mod")
    assert graph is not None and graph.result.dtype == "bool"


def test_constant_masks():
    for result in (True, False):
        graph = variant(mask_mod=lambda b, h, q, k, r=result: r).bind(DIMS).ir.hook("mask_mod")
        assert graph is not None and graph.result.op == "const"


def test_a_failed_trace_leaves_nothing_behind():
    bad = [True]

    def hook(s, b, h, q, k):
        return float(s) if bad[0] else s

    for _ in range(2):
        with pytest.raises(TraceError):
            as_variant(hook).bind(DIMS)
    bad[0] = False
    assert as_variant(hook).bind(DIMS).ir.hook("score_mod") is not None
    assert torch.ones(3).add(1)[torch.tensor(0)] == 2, "torch works as before"


def test_values_do_not_outlive_their_trace():
    leaked: collections.deque[torch.Tensor] = collections.deque()
    keep = leaked.append

    def hook(s, b, h, q, k):
        keep(s)
        return s

    as_variant(hook).bind(DIMS)
    with pytest.raises(FlashAttnJitError, match="after tracing ended"):
        leaked[0] + 1


def test_values_may_be_printed(capsys):
    def hook(s, b, h, q, k):
        print(repr(h), h)
        return s

    as_variant(hook).bind(DIMS)
    assert capsys.readouterr().out == "Value(int32[]) Value(int32[])\n"


def test_builtins_outside_hooks():
    with pytest.raises(FlashAttnJitError, match="outside a hook"):
        builtins.q_len(0)


def test_builtins_inside_hooks():
    def hook(s, b, h, q, k):
        return s + builtins.q_len(b) * builtins.kv_len(b) + T.view(-1)[builtins.kv_slot(b, k)]

    bound = as_variant(hook).bind(DIMS)
    graph = bound.ir.hook("score_mod")
    assert graph is not None
    dtypes = {n.op: n.dtype for n in graph.nodes}
    assert (dtypes["q_len"], dtypes["kv_len"], dtypes["kv_slot"]) == ("int32", "int32", "int64")


def test_complex_rows_name_the_real_forms():
    angles = torch.polar(torch.ones(16, 4), torch.rand(16, 4))

    def query_mod(row, b, h, q_idx):
        pairs = torch.view_as_complex(row.reshape(-1, 2))
        return torch.view_as_real(pairs * angles[q_idx]).flatten()

    with pytest.raises(TraceError, match=r"`view_as_complex`.*fa\.rotate\(row, cos, sin"):
        variant(query_mod=query_mod).bind(DIMS)
