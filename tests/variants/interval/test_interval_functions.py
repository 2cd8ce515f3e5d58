"""Functions of the interval form, one by one, against all values of small boxes.

An interval must hold every value: a comparison with it is full or empty in a box only if it is so
for all pairs of the box. Functions that can be exact must hold nothing more. The tests compare
intervals with thresholds, which are a tensor here: box i reads its entry i.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flashattn_jit.variants.functions import TANH_APPROX_ERROR
from flashattn_jit.variants.interval.terms import EMPTY, FULL
from flashattn_jit.variants.interval.tile_runs import MaskParams
from flashattn_jit.variants.ir.ir import GraphBuilder

from .bounds_oracle import evaluate
from .tile_states import classify_boxes

Indices = Callable[[GraphBuilder], int]
SHIFT = 12
"""Taken from kv_idx, so that second operands are negative as well."""


def index(g: GraphBuilder, name: str, dtype: str) -> int:
    node = g.add("input", dtype="int32", name=name)
    return node if dtype == "int32" else g.add("cast", [node], dtype)


def shifted(g: GraphBuilder, dtype: str) -> int:
    """kv_idx - SHIFT."""
    value = float(SHIFT) if dtype.startswith("float") else SHIFT
    const = g.add("const", dtype=dtype, value=value)
    return g.add("sub", [index(g, "kv_idx", dtype), const], dtype)


class Expression:
    """A value computed from the indices of a pair; tests look at its interval over boxes."""

    def __init__(self, build: Indices, dtype: str, tensors: tuple[torch.Tensor, ...] = ()) -> None:
        self.build, self.dtype, self.tensors = build, dtype, tensors

    def extremes(self, boxes: np.ndarray[Any, Any]) -> tuple[Any, Any]:
        """The least and the greatest value in each box, pair by pair."""
        g = GraphBuilder(("b", "h", "q_idx", "kv_idx"))
        graph = g.finish(self.build(g))
        low, high = [], []
        for b0, b1, h0, h1, q0, q1, k0, k1 in boxes.tolist():
            ends = ((b0, b1), (h0, h1), (q0, q1), (k0, k1))
            axes = np.ix_(*(np.arange(x, y + 1) for x, y in ends))
            names = ("b", "h", "q_idx", "kv_idx")
            values = evaluate(graph, MaskParams(self.tensors),
                              **dict(zip(names, axes, strict=True)))  # fmt: skip
            low.append(np.min(values))
            high.append(np.max(values))
        return np.array(low), np.array(high)

    def compared(self, op: str, thresholds: Any, boxes: np.ndarray[Any, Any]) -> Any:
        """The states of ``value op threshold``, each box with its own threshold."""
        g = GraphBuilder(("b", "h", "q_idx", "kv_idx"))
        table = torch.as_tensor(np.asarray(thresholds, self.dtype))
        threshold = g.add("gather", [index(g, "h", "int32")], self.dtype, slot=len(self.tensors))
        graph = g.finish(g.add(op, [self.build(g), threshold], "bool"))
        boxes = boxes.copy()
        boxes[:, 2:4] = np.arange(len(boxes))[:, None]
        return classify_boxes(graph, MaskParams([*self.tensors, table]), boxes)


def assert_sound(x: Expression, boxes: np.ndarray[Any, Any]) -> None:
    low, high = x.extremes(boxes)
    above = np.nextafter(low, np.inf) if low.dtype.kind == "f" else low + 1
    below = np.nextafter(high, -np.inf) if low.dtype.kind == "f" else high - 1
    assert (x.compared("ge", above, boxes) != FULL).all()
    assert (x.compared("le", below, boxes) != FULL).all()
    assert (x.compared("ge", high, boxes) != EMPTY).all()
    assert (x.compared("le", low, boxes) != EMPTY).all()


def assert_exact(x: Expression, boxes: np.ndarray[Any, Any], slack: float = 0) -> None:
    """slack: how much wider the interval may be, relative to 1 and to its ends."""
    low, high = x.extremes(boxes)
    if slack:
        low = low - slack * (1 + abs(low))
        high = high + slack * (1 + abs(high))
    assert (x.compared("ge", low, boxes) == FULL).all()
    assert (x.compared("le", high, boxes) == FULL).all()


def small_boxes(count: int, seed: int, longest: int = 9) -> np.ndarray[Any, Any]:
    """Boxes of q_idx from -20 and kv_idx from 0, both also single."""
    rng = np.random.default_rng(seed)
    q, k = rng.integers(-20, 30, count), rng.integers(0, 30, count)
    sizes = rng.integers(0, longest, (2, count)) * rng.integers(0, 2, (2, count))
    zero = np.zeros(count, np.int64)
    return np.stack([zero, zero, zero, zero, q, q + sizes[0], k, k + sizes[1]], 1)


# --- integers -------------------------------------------------------------------------------------

INTEGERS = ("add", "sub", "mul", "floordiv", "truncdiv", "remainder", "fmod", "minimum", "maximum",
            "and", "or", "xor", "shl", "shr")  # fmt: skip
UNARY = ("neg", "abs", "sign", "not")
LOOSE = ("remainder", "fmod", "and", "or", "xor")
"""Exact only where their operands are single, or lie in one period."""


def of_two(op: str, dtype: str) -> Expression:
    return Expression(
        lambda g: g.add(op, [index(g, "q_idx", dtype), shifted(g, dtype)], dtype), dtype
    )


@pytest.mark.parametrize("op", INTEGERS)
def test_integers_of_two(op: str) -> None:
    boxes = small_boxes(600, INTEGERS.index(op))
    if op in ("shl", "shr"):  # shift counts that are defined
        boxes[:, 6:] = np.minimum(boxes[:, 6:] + SHIFT, SHIFT + 20)
    x = of_two(op, "int64")
    assert_sound(x, boxes)
    exact = boxes
    if "div" in op or op in ("remainder", "fmod"):
        exact = boxes[(boxes[:, 6] > SHIFT) | (boxes[:, 7] < SHIFT)]
    if op in LOOSE:
        exact = exact[(exact[:, 4] == exact[:, 5]) & (exact[:, 6] == exact[:, 7])]
    assert len(exact) > 80
    assert_exact(x, exact)


@pytest.mark.parametrize("divisor", [1, 2, 7, 16])
@pytest.mark.parametrize("op", ["remainder", "fmod", "floordiv"])
def test_a_constant_divisor_is_exact_within_a_period(op: str, divisor: int) -> None:
    def build(g: GraphBuilder) -> int:
        const = g.add("const", dtype="int64", value=divisor)
        return g.add(op, [index(g, "q_idx", "int64"), const], "int64")

    x, boxes = Expression(build, "int64"), small_boxes(400, divisor)
    assert_sound(x, boxes)
    within = boxes[(boxes[:, 4] // divisor == boxes[:, 5] // divisor) & (boxes[:, 4] >= 0)]
    assert_exact(x, boxes if op == "floordiv" else within)


@pytest.mark.parametrize("op", UNARY)
def test_integers_of_one(op: str) -> None:
    boxes = small_boxes(400, 1)
    x = Expression(lambda g: g.add(op, [index(g, "q_idx", "int64")], "int64"), "int64")
    assert_sound(x, boxes)
    assert_exact(x, boxes)


# --- reals ----------------------------------------------------------------------------------------

INCREASING = ("exp", "exp2", "expm1", "tanh", "erf", "atan", "sinh", "sigmoid", "floor", "ceil",
              "round", "trunc", "neg", "abs", "sign", "tanh_approx")  # fmt: skip
ROOTS = ("sqrt", "log", "log2", "log10", "log1p")
REALS = ("add", "sub", "mul", "div", "minimum", "maximum", "floordiv", "remainder")


def scaled(g: GraphBuilder, name: str, dtype: str, add: float = 0.0) -> int:
    """The index divided by 2.7, plus a constant."""
    divisor, more = (g.add("const", dtype=dtype, value=x) for x in (2.7, add))
    quotient = g.add("div", [index(g, name, dtype), divisor], dtype)
    return g.add("add", [quotient, more], dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", [*INCREASING, *ROOTS])
def test_reals_of_one(op: str, dtype: str) -> None:
    boxes = small_boxes(150, 2)
    x = Expression(
        lambda g: g.add(op, [scaled(g, "q_idx", dtype, 8.0 * (op in ROOTS))], dtype), dtype
    )
    assert_sound(x, boxes)
    slack = 1e-4 if dtype == "float32" else 1e-10
    if op == "tanh_approx" and dtype == "float32":
        slack += TANH_APPROX_ERROR
    assert_exact(x, boxes, slack)


def test_tanh_approx_may_have_its_error() -> None:
    """A kernel may or may not reach a threshold that is closer than that: the tile is partial."""
    boxes = small_boxes(150, 2, 1)
    x = Expression(
        lambda g: g.add("tanh_approx", [scaled(g, "q_idx", "float32")], "float32"), "float32"
    )
    value, high = (end.astype(np.float64) for end in x.extremes(boxes))
    assert (value == high).all() and (value != 0).any()
    for sign in (-0.9, 0.9):
        near = value * (1 + sign * TANH_APPROX_ERROR)
        for op in ("ge", "le"):
            assert (x.compared(op, near, boxes)[value != 0] == 1).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", REALS)
def test_reals_of_two(op: str, dtype: str) -> None:
    boxes = small_boxes(200, 3, 4)
    x = Expression(
        lambda g: g.add(op, [scaled(g, "q_idx", dtype), scaled(g, "kv_idx", dtype, -4.5)], dtype),
        dtype,
    )
    if op in ("div", "floordiv", "remainder"):  # divisors of one sign
        boxes = boxes[(boxes[:, 6] > SHIFT) | (boxes[:, 7] < SHIFT)]
    assert_sound(x, boxes)
    if op not in ("floordiv", "remainder"):
        assert_exact(x, boxes, 1e-4 if dtype == "float32" else 1e-10)


@pytest.mark.parametrize("dtype", ["bool", "int32", "float32", "float64"])
@pytest.mark.parametrize("op", ["ge", "gt", "le", "lt", "eq", "ne"])
def test_comparisons_are_exact(op: str, dtype: str) -> None:
    """All small boxes: comparisons go wrong at equal ends."""
    ends = [(low, high) for low in range(4) for high in range(low, 4)]
    boxes = np.array([[0, 0, 0, 0, *q, *k] for q in ends for k in ends])
    g = GraphBuilder(("b", "h", "q_idx", "kv_idx"))
    values = torch.tensor([0, 0, 1, 1]).bool()
    sides = [index(g, n, "int32" if dtype == "bool" else dtype) for n in ("q_idx", "kv_idx")]
    if dtype == "bool":
        sides = [g.add("gather", [side], "bool", slot=0) for side in sides]
    graph = g.finish(g.add(op, sides, "bool"))
    compare = {"ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "lt": np.less,
               "eq": np.equal, "ne": np.not_equal}[op]  # fmt: skip
    expected = []
    for _, _, _, _, q0, q1, k0, k1 in boxes.tolist():
        q, k = np.arange(q0, q1 + 1)[:, None], np.arange(k0, k1 + 1)
        kept = compare(q > 1, k > 1) if dtype == "bool" else compare(q, k)
        expected.append(FULL if kept.all() else int(kept.any()))
    assert classify_boxes(graph, MaskParams([values]), boxes).tolist() == expected


# --- gathers --------------------------------------------------------------------------------------

LENGTHS = (1, 5, 63, 64, 65, 128, 1000, 1024, 1089, 1500)
"""From 1024 on there are tables, of 64 entries a block."""


def ranges(length: int, seed: int) -> np.ndarray[Any, Any]:
    """Boxes of q_idx: all sorts of ranges below `length`, and the borders of blocks."""
    rng = np.random.default_rng(seed)
    low = rng.integers(0, length, 200)
    high = np.minimum(low + rng.integers(0, length, 200), length - 1)
    borders = [x for x in (0, 1, 63, 64, 65, 127, 128, 640, 1023, length - 1) if x < length]
    pairs = [(x, y) for x in borders for y in borders if x <= y]
    q = np.concatenate([np.stack([low, high], 1), np.array(pairs)])
    zero = np.zeros((len(q), 1), np.int64)
    return np.concatenate([*[zero] * 4, q, *[zero] * 2], axis=1)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "float32", "float64",
                                   "float16", "bfloat16"])  # fmt: skip
def test_the_extremes_of_every_range(dtype: str, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    tensor = torch.randint(-90, 100, (length,), generator=generator)
    tensor = (tensor.abs() if dtype == "uint8" else tensor).to(getattr(torch, dtype))
    value = "float32" if "float" in dtype and dtype != "float64" else dtype
    x = Expression(
        lambda g: g.add("gather", [index(g, "q_idx", "int32")], value, slot=0), value, (tensor,)
    )
    boxes = ranges(length, 1)
    spans = [tensor[q0 : q1 + 1].double() for q0, q1 in boxes[:, 4:6].tolist()]
    low, high = (np.array([float(f(s)) for s in spans]) for f in (torch.min, torch.max))
    fits = np.iinfo(value) if "int" in value else np.finfo("float32")
    assert (x.compared("ge", low, boxes) == FULL).all()
    assert (x.compared("le", high, boxes) == FULL).all()
    assert (x.compared("ge", np.minimum(low + 1, fits.max), boxes) != FULL).all()
    assert (x.compared("le", np.maximum(high - 1, fits.min), boxes) != FULL).all()


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("length", [70, 1500])
def test_the_truth_of_every_range(length: int, words: bool) -> None:
    """A bool tensor, and bit 3 of words."""
    truth = torch.arange(length) // 17 % 3 != 0
    noise = torch.randint(0, 2**62, (length,), generator=torch.Generator().manual_seed(length))
    tensor = (noise & ~8) | 8 * truth if words else truth
    g = GraphBuilder(("b", "h", "q_idx", "kv_idx"))
    node = g.add("gather", [index(g, "q_idx", "int32")], "int64" if words else "bool", slot=0)
    if words:
        one, bit = g.add("const", dtype="int64", value=1), index(g, "b", "int64")
        node = g.add("and", [g.add("shr", [node, bit], "int64"), one], "int64")
        node = g.add("cast", [node], "bool")
    boxes = ranges(length, 2)
    boxes[:, :2] = 3
    kept = [truth[q0 : q1 + 1] for q0, q1 in boxes[:, 4:6].tolist()]
    expected = [FULL if x.all() else int(x.any()) for x in kept]
    assert set(expected) == {EMPTY, 1, FULL}
    assert classify_boxes(g.finish(node), MaskParams([tensor]), boxes).tolist() == expected


@pytest.mark.parametrize("length", [300, 1500])
def test_a_range_that_holds_nan_is_partial(length: int) -> None:
    tensor = torch.arange(float(length))
    tensor[[100, 200]] = float("nan")
    g = GraphBuilder(("b", "h", "q_idx", "kv_idx"))
    zero = g.add("const", dtype="float32", value=0.0)
    value = g.add("gather", [index(g, "q_idx", "int32")], "float32", slot=0)
    graph = g.finish(g.add("ge", [value, zero], "bool"))
    boxes = ranges(length, 3)
    states = classify_boxes(graph, MaskParams([tensor]), boxes)
    holds = [bool(tensor[q0 : q1 + 1].isnan().any()) for q0, q1 in boxes[:, 4:6].tolist()]
    assert (states == np.where(holds, 1, FULL)).all()


SHAPES = ((), (40,), (3, 40), (40, 3), (2, 3, 40), (2, 40, 3), (3, 1, 2, 1, 40), (1,) * 7 + (40,))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gathers_of_any_rank(shape: tuple[int, ...]) -> None:
    """Indices are b where a dim is 2 long, kv_idx at 3, q_idx at 40; some are beyond the dim."""
    generator = torch.Generator().manual_seed(len(shape))
    tensor = torch.randint(-99, 99, shape, generator=generator)

    def build(g: GraphBuilder) -> int:
        at = [index(g, {1: "b", 2: "b", 3: "kv_idx", 40: "q_idx"}[n], "int32") for n in shape]
        return g.add("gather", at, "int64", slot=0)

    boxes = small_boxes(400, 4)
    rng = np.random.default_rng(5)
    boxes[:, 0] = rng.integers(0, 3, len(boxes))
    boxes[:, 1] = np.minimum(boxes[:, 0] + rng.integers(0, 3, len(boxes)), 2)
    boxes[:, 4:6] += 25 * rng.integers(0, 2, (len(boxes), 1))
    x = Expression(build, "int64", (tensor,))
    assert_sound(x, boxes)
    # A negative index wraps: a box with both signs counts as the whole dim.
    assert_exact(x, boxes[(boxes[:, 4] >= 0) | (boxes[:, 5] < 0)])


@pytest.mark.parametrize("right", [False, True])
def test_ranks_in_a_sorted_tensor_are_exact(right: bool) -> None:
    tensor = torch.tensor([-5, -5, 0, 3, 3, 3, 17, 29])

    def build(g: GraphBuilder) -> int:
        return g.add("searchsorted", [index(g, "q_idx", "int64")], "int64", slot=0, right=right)

    x, boxes = Expression(build, "int64", (tensor,)), small_boxes(400, 6)
    assert_sound(x, boxes)
    assert_exact(x, boxes)
