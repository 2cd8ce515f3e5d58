"""Random mask graphs: every operation that a mask may hold, every dtype, awkward constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from flashattn_jit.variants.interval.tile_runs import MaskParams
from flashattn_jit.variants.ir.ir import GraphBuilder

from .bounds_oracle import Mask, described

INTS = ("int32", "int32", "int32", "int64", "int64", "uint8", "int8", "int16")
REALS = ("float32", "float32", "float64")
LENGTH = 70

Choose = Callable[[int], int]
"""Picks one of n: from hypothesis, or from a seeded generator."""

_INT_OPS = ("add", "add", "sub", "sub", "mul", "floordiv", "remainder", "minimum", "maximum",
            "truncdiv", "fmod", "and", "or", "xor", "shl", "shr")  # fmt: skip
_INT_UNARY = ("neg", "abs", "sign", "not")
_REAL_OPS = ("add", "sub", "mul", "div", "minimum", "maximum", "floordiv", "remainder", "pow",
             "atan2", "fmod", "truncdiv")  # fmt: skip
_REAL_UNARY = ("neg", "abs", "sign", "floor", "ceil", "round", "trunc", "sqrt", "exp", "exp2",
               "log", "log2", "log1p", "tanh", "sigmoid", "sin", "cos", "atan", "expm1",
               "erf", "tanh_approx")  # fmt: skip
_CONSTS = (0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 33, -1, -2, -7, 64, 100, 127)
_REAL_CONSTS = (0.0, 1.0, -1.0, 0.5, 2.0, 3.3, -0.25, float("inf"), float("nan"), 1e30)


class RandomMask:
    """Builds one graph with its params out of choices."""

    def __init__(self, choose: Choose, seed: int) -> None:
        self.choose, self.rng = choose, np.random.default_rng(seed)
        self.g = GraphBuilder(("b", "h", "q_idx", "kv_idx"))
        self.tensors: list[torch.Tensor] = []
        self.scalars: list[int | float] = []

    def pick(self, options: tuple[Any, ...]) -> Any:
        """One of `options`."""
        return options[self.choose(len(options))]

    def finish(self, depth: int = 4) -> Mask:
        """The mask."""
        graph = self.g.finish(self.condition(depth))
        return Mask(graph, MaskParams(self.tensors, self.scalars), described(self.tensors))

    def condition(self, depth: int) -> int:
        """A boolean node."""
        kind = self.choose(13) if depth > 0 else 9
        if kind == 12:
            return self.over_vector(depth - 1)
        if kind < 3:
            args = [self.condition(depth - 1), self.condition(depth - 1)]
            return self.g.add(self.pick(("and", "or", "xor", "and", "or")), args, "bool")
        if kind == 3:
            return self.g.add("not", [self.condition(depth - 1)], "bool")
        if kind == 4:
            args = [self.condition(depth - 1) for _ in range(3)]
            return self.g.add("where", args, "bool")
        if kind == 5:
            return self.gather("bool", depth - 1)
        if kind == 6:
            dtype = self.pick(REALS)
            op = self.pick(("ge", "gt", "le", "lt", "eq", "ne"))
            return self.g.add(
                op, [self.real(dtype, depth - 1), self.real(dtype, depth - 1)], "bool"
            )
        if kind == 7:
            op = self.pick(("isnan", "isinf"))
            return self.g.add(op, [self.real(self.pick(REALS), depth - 1)], "bool")
        if kind == 8:
            dtype = self.pick((*INTS, *REALS))
            return self.g.add("cast", [self.number(dtype, depth - 1)], "bool")
        dtype = self.pick(INTS)
        op = self.pick(("ge", "gt", "le", "lt", "eq", "ne"))
        return self.g.add(
            op, [self.integer(dtype, depth - 1), self.integer(dtype, depth - 1)], "bool"
        )

    def over_vector(self, depth: int) -> int:
        """any or all of a comparison of short vectors, or a reduced vector compared."""
        dtype = self.pick(("int32", "int64", "float32"))
        a, b = (self.vector(dtype, depth) for _ in range(2))
        if self.choose(3):
            op = self.pick(("ge", "gt", "le", "lt", "eq", "ne"))
            compared = self.g.add(op, [a, b], "bool", (6,))
            return self.g.add(self.pick(("any", "all")), [compared], "bool")
        reduced = self.g.add(self.pick(("sum", "prod", "amax", "amin")), [a], dtype)
        return self.g.add(self.pick(("ge", "lt")), [reduced, self.number(dtype, depth)], "bool")

    def vector(self, dtype: str, depth: int) -> int:
        """A vector of 6 elements."""
        g, kind = self.g, self.choose(6)
        if kind == 0:
            return g.add("broadcast", [self.number(dtype, depth)], dtype, (6,), length=6)
        if kind == 1 and dtype != "float32":
            return g.add("iota", dtype=dtype, shape=(6,), length=6)
        if kind == 2 and depth > 0:
            op = self.pick(("add", "sub", "mul", "minimum"))
            args = [self.vector(dtype, depth - 1), self.vector(dtype, depth - 1)]
            return g.add(op, args, dtype, (6,))
        self.tensors.append(self.tensor(dtype, (LENGTH, 6)))
        slot = len(self.tensors) - 1
        row = g.add("gather", [self.integer("int32", depth - 1)], dtype, (6,), slot=slot)
        if kind == 3:
            return g.add("slice", [row], dtype, (6,), start=5, step=-1, length=6)
        if kind == 4:
            halves = [g.add("slice", [row], dtype, (3,), start=s, step=2, length=3) for s in (0, 1)]
            return g.add(self.pick(("cat", "interleave")), halves, dtype, (6,))
        return row

    def number(self, dtype: str, depth: int) -> int:
        """An integer or a real node."""
        return self.integer(dtype, depth) if dtype in INTS else self.real(dtype, depth)

    def integer(self, dtype: str, depth: int) -> int:
        """An integer node."""
        kind = self.choose(11) if depth > 0 else self.choose(3)
        if kind == 0:
            return self.index(dtype)
        if kind == 1:
            value = self.pick(_CONSTS)
            low = 0 if dtype == "uint8" else -128
            return self.g.add("const", dtype=dtype, value=max(low, value))
        if kind == 2:
            return self.scalar(dtype)
        if kind == 3:
            return self.gather(dtype, depth - 1)
        if kind == 4:
            args = [self.condition(depth - 1), *(self.integer(dtype, depth - 1) for _ in range(2))]
            return self.g.add("where", args, dtype)
        if kind == 5:
            other = self.pick(("bool", *INTS, *REALS))
            value = self.condition(depth - 1) if other == "bool" else self.number(other, depth - 1)
            return value if other == dtype else self.g.add("cast", [value], dtype)
        if kind == 6:
            return self.g.add(self.pick(_INT_UNARY), [self.integer(dtype, depth - 1)], dtype)
        if kind == 7 and dtype == "int64":
            return self.search(depth - 1)
        args = [self.integer(dtype, depth - 1), self.integer(dtype, depth - 1)]
        return self.g.add(self.pick(_INT_OPS), args, dtype)

    def index(self, dtype: str) -> int:
        """An index, converted to `dtype`."""
        name = self.pick(("q_idx", "kv_idx", "q_idx", "kv_idx", "b", "h"))
        node = self.g.add("input", dtype="int32", name=name)
        return node if dtype == "int32" else self.g.add("cast", [node], dtype)

    def scalar(self, dtype: str) -> int:
        """A scalar param, converted to `dtype`."""
        whole = dtype in INTS
        value = self.pick(_CONSTS) if whole else self.pick(_REAL_CONSTS)
        self.scalars.append(int(value) if whole else float(value))
        own = "int64" if whole else "float64"
        node = self.g.add("scalar", dtype=own, slot=len(self.scalars) - 1)
        return node if own == dtype else self.g.add("cast", [node], dtype)

    def gather(self, dtype: str, depth: int) -> int:
        """An element of a new tensor of one or two dims."""
        rank = 1 + self.choose(2)
        shape = (LENGTH,) if rank == 1 else self.pick(((3, LENGTH), (LENGTH, 5), (7, 9)))
        self.tensors.append(self.tensor(dtype, shape))
        slot = len(self.tensors) - 1
        indices = [self.integer(self.pick(("int32", "int64")), depth - 1) for _ in range(rank)]
        return self.g.add("gather", indices, dtype, slot=slot)

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Sorted, small, wild or constant values, or integers with the dtype's ends among them."""
        kind = self.choose(4)
        if dtype == "bool":
            return torch.as_tensor(self.rng.random(shape) < (0.1, 0.9, 0.5, 1.0)[kind])
        if dtype in REALS:
            values = np.asarray(self.rng.normal(size=shape) * 4)
            if kind == 1:
                values = np.sort(values)
            if kind == 2:
                values = np.where(self.rng.random(shape) < 0.05, np.nan, values)
            return torch.as_tensor(values).to(getattr(torch, dtype))
        info = np.iinfo(dtype)
        values = self.rng.integers(max(info.min, -3), 9, shape)
        if kind == 1:
            values = np.sort(values)
        if kind == 2:
            values = self.rng.integers(info.min, info.max, shape, dtype)
        if dtype in INTS and self.rng.random() < 0.3:
            ends = self.rng.choice(np.array([info.min, info.max], dtype), shape)
            values = np.where(self.rng.random(shape) < (0.2, 1.0)[self.choose(2)], ends, values)
        return torch.as_tensor(values.astype(dtype))

    def search(self, depth: int) -> int:
        """A rank in a sorted tensor."""
        self.tensors.append(torch.as_tensor(np.sort(self.rng.integers(0, LENGTH, 6))))
        slot, right = len(self.tensors) - 1, bool(self.choose(2))
        value = self.integer("int64", depth)
        return self.g.add("searchsorted", [value], "int64", slot=slot, right=right)

    def real(self, dtype: str, depth: int) -> int:
        """A real node."""
        kind = self.choose(8) if depth > 0 else self.choose(2)
        if kind == 0:
            return self.g.add("const", dtype=dtype, value=self.pick(_REAL_CONSTS))
        if kind == 1:
            return self.g.add("cast", [self.index("int32")], dtype)
        if kind == 2:
            return self.gather(dtype, depth - 1)
        if kind == 3:
            return self.scalar(dtype)
        if kind == 4:
            source = self.pick(("float32", "float64", "int64", "int32"))
            value = self.number(source, depth - 1)
            return value if source == dtype else self.g.add("cast", [value], dtype)
        if kind == 5:
            args = [self.condition(depth - 1), *(self.real(dtype, depth - 1) for _ in range(2))]
            return self.g.add("where", args, dtype)
        if kind == 6:
            return self.g.add(self.pick(_REAL_UNARY), [self.real(dtype, depth - 1)], dtype)
        args = [self.real(dtype, depth - 1), self.real(dtype, depth - 1)]
        return self.g.add(self.pick(_REAL_OPS), args, dtype)
