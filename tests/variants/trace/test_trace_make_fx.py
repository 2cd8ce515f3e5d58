"""Op for op, the tracer's dtypes are those that make_fx finds on 0-dim tensors."""

from __future__ import annotations

import functools
from collections import defaultdict

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx

from flashattn_jit.variants.ir.dtypes import DTYPE_NAMES, TORCH_DTYPES, VALUE_DTYPES
from flashattn_jit.variants.ir.ir import promote, result_dtype
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.variant import as_variant
from tests.registry.case import Case
from tests.registry.masks import MASK_CASES
from tests.registry.scores import SCORE_CASES

_ATEN = {
    "add": "add", "sub": "sub", "rsub": "sub", "mul": "mul", "div": "div", "tanh": "tanh",
    "floor_divide": "floordiv", "remainder": "remainder", "fmod": "fmod", "exp": "exp",
    "exp2": "exp2", "log": "log", "sqrt": "sqrt", "sigmoid": "sigmoid", "sin": "sin", "cos": "cos",
    "tan": "tan", "abs": "abs", "neg": "neg", "minimum": "minimum", "maximum": "maximum",
    "ge": "ge", "gt": "gt", "le": "le", "lt": "lt", "eq": "eq", "ne": "ne", "where": "where",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "__rshift__": "shr",
    "__lshift__": "shl", "index": "gather", "sum": "sum", "any": "any", "pow": "mul",
    "bitwise_right_shift": "shr", "bitwise_left_shift": "shl", "sign": "sign",
}  # fmt: skip
# Functions that the tracer decomposes into operations of other dtypes.
_COMPOSITE = frozenset({"log_sigmoid_forward", "softplus", "gelu", "silu"})
_SAME = {"le": "ge", "lt": "gt"}  # the tracer may turn comparisons round


def _fx_dtypes(  # type: ignore[no-untyped-def]
    fn, is_score: bool, index: torch.dtype
) -> tuple[dict[str, set[str]], torch.dtype | None]:
    zero = torch.zeros((), dtype=index)
    inputs = [torch.zeros(())] * is_score + [zero] * 4
    call = (lambda s, b, h, q, k: fn(s, b, h, q, k)) if is_score else (
        lambda b, h, q, k: fn(b, h, q, k)
    )  # fmt: skip
    with TransformGetItemToIndex():
        graph = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs).graph
    found: dict[str, set[str]] = defaultdict(set)
    result = None
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor):
            packet = getattr(node.target, "overloadpacket", node.target)
            name = _ATEN.get(packet.__name__)
            dtype = VALUE_DTYPES.get(value.dtype)
            if packet.__name__ in _COMPOSITE:
                found.clear()
                return found, None
            if name is not None and dtype is not None:
                found[_SAME.get(name, name)].add(dtype)
        if node.op == "output" and isinstance(node.args[0], torch.fx.Node):
            result = node.args[0].meta["val"].dtype
    return found, result


@pytest.mark.parametrize("case", (*MASK_CASES, *SCORE_CASES), ids=lambda c: c.name)
def test_dtypes_are_those_of_make_fx(case: Case) -> None:
    made, params = case.build()
    variant = as_variant(made)
    ((hook, graph),) = variant.bind(Dims(*case.shape), params).ir.hooks
    fn = functools.partial(made)
    # Positions are int64, and are computed as int32 where the result fits.
    expected, result = _fx_dtypes(fn, hook == "score_mod", torch.int32)
    for name, dtypes in _fx_dtypes(fn, hook == "score_mod", torch.int64)[0].items():
        expected[name] |= dtypes
    for node in graph.nodes:
        name = _SAME.get(node.op, node.op)
        # A captured 0-dim tensor is an attribute in make_fx's graph, not an operation.
        zero_dim = node.op == "gather" and not node.args
        if name not in set(_ATEN.values()) or node.shape or zero_dim:
            continue
        # Simplification may replace an operation; one that is in both graphs must agree.
        if name in expected:
            assert node.dtype in expected[name], (node, expected[name])
    if result is not None and hook == "mask_mod":
        assert graph.result.dtype == "bool"


_DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64"]


def test_promotion_of_every_pair_is_torch_s() -> None:
    for a in _DTYPES:
        for b in _DTYPES:
            wanted = torch.promote_types(TORCH_DTYPES[a], TORCH_DTYPES[b])
            assert promote(a, b) == DTYPE_NAMES[wanted], (a, b)


def test_result_dtype_of_every_mix_is_torch_s() -> None:
    """Two tensors of rank 0 or 1, and a tensor with a Python number."""
    for a in _DTYPES:
        for b in _DTYPES:
            for ranks in ((0, 0), (0, 1), (1, 0), (1, 1)):
                tensors = [
                    torch.zeros((1,) * r, dtype=TORCH_DTYPES[d])
                    for d, r in zip((a, b), ranks, strict=True)
                ]
                wanted = DTYPE_NAMES[torch.result_type(*tensors)]
                assert result_dtype([(a, ranks[0], False), (b, ranks[1], False)]) == wanted
        for rank in (0, 1):
            for number, kind in ((True, "bool"), (2, "int64"), (2.5, "float64")):
                tensor = torch.zeros((1,) * rank, dtype=TORCH_DTYPES[a])
                wanted = DTYPE_NAMES[torch.result_type(tensor, number)]
                assert result_dtype([(a, rank, False), (kind, 0, True)]) == wanted
