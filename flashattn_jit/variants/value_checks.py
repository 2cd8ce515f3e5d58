"""What a graph takes for granted of the values that it reads, and its checks at every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flashattn_jit.errors import ParamError
from flashattn_jit.variants.ir.ir import INTEGER_DIVISIONS, VariantIR, is_float
from flashattn_jit.variants.params import Declared, Dims
from flashattn_jit.variants.trace.positions import MOST_NUMBER

_EXACT = 2**53  # float64 holds every integer up to here
_COUNTS = {"b": "batch", "h": "num_q_heads", "kv_h": "num_kv_heads"}


class ValueChecks(NamedTuple):
    """divisors: scalars by which integers are divided. indexed: (slot, dim, index) of captured
    tensors that hooks index with b, h or kv_h itself. narrow, wide: scalars that are int32 in the
    graph, and integers that were too large for it when it was traced.
    """

    divisors: tuple[int, ...]
    indexed: tuple[tuple[int, int, str], ...]
    narrow: tuple[int, ...]
    wide: tuple[int, ...]

    @classmethod
    def of(
        cls, ir: VariantIR, scalars: Sequence[float], declared: Sequence[Declared]
    ) -> ValueChecks:
        """Those of a graph that was traced with these scalars."""
        wide = tuple(
            i for i, s in enumerate(ir.scalars) if s.dtype == "int64" and _is_wide(scalars[i])
        )
        narrow = tuple(i for i in _narrow(ir) if i not in wide)
        return cls(_divisors(ir), _indexed(ir, declared), narrow, wide)

    def fit(self, scalars: Sequence[float]) -> bool:
        """Whether the graph is the one for these scalars."""
        return not any(_is_wide(scalars[i]) for i in self.narrow) and all(
            _is_wide(scalars[i]) for i in self.wide
        )

    def check(
        self, ir: VariantIR, tensors: Sequence[torch.Tensor], scalars: Sequence[float], dims: Dims
    ) -> None:
        """Raises ParamError for values that the graph cannot compute with."""
        if scalars:
            _check_exact(scalars)
            for i in self.divisors:
                if scalars[i] == 0:
                    name = ir.scalars[i].name
                    raise ParamError(
                        f"a hook divides an integer by {name}, which is 0 in this call"
                    )
        for slot, d, index in self.indexed:
            _check_indexed(ir.tensors[slot].name, tensors[slot], d, index, dims)


def _is_wide(number: float) -> bool:
    return abs(number) > MOST_NUMBER


def _divisors(ir: VariantIR) -> tuple[int, ...]:
    """Scalars by which integers are divided: as in torch, that is an error if they are 0."""
    found = set[int]()
    for _, graph in ir.hooks:
        for node in graph.nodes:
            if node.op not in INTEGER_DIVISIONS or is_float(node.dtype):
                continue
            divisor = graph.nodes[node.args[1]]
            while divisor.op == "cast":
                divisor = graph.nodes[divisor.args[0]]
            if divisor.op == "scalar":
                found.add(divisor.int_attr("slot"))
    return tuple(sorted(found))


def _narrow(ir: VariantIR) -> list[int]:
    """Scalars that hooks convert to int32."""
    found = set[int]()
    for _, graph in ir.hooks:
        for node in graph.nodes:
            if node.op == "cast" and node.dtype == "int32":
                number = graph.nodes[node.args[0]]
                if number.op == "scalar" and number.dtype == "int64":
                    found.add(number.int_attr("slot"))
    return sorted(found)


def _indexed(ir: VariantIR, declared: Sequence[Declared]) -> tuple[tuple[int, int, str], ...]:
    """As in torch, the dim must have an element for each index. Declared params have rules of their
    own.
    """
    names = {d.name for d in declared}
    found = dict[tuple[int, int, str], None]()
    for _, graph in ir.hooks:
        for node in graph.nodes:
            if node.op not in ("gather", "lookup"):
                continue
            slot = node.int_attr("slot")
            for d, argument in enumerate(node.args):
                index = graph.nodes[argument]
                if index.op == "cast":
                    index = graph.nodes[index.args[0]]
                name = str(index.attr("name")) if index.op == "input" else ""
                if name in _COUNTS and ir.tensors[slot].name not in names:
                    found[slot, d, name] = None
    return tuple(found)


def _check_indexed(name: str, tensor: torch.Tensor, d: int, index: str, dims: Dims) -> None:
    count = getattr(dims, _COUNTS[index])
    if tensor.shape[d] < count:
        raise ParamError(
            f"a hook indexes dim {d} of captured tensor {name!r}, of shape {list(tensor.shape)}, "
            f"with {index}, but {_COUNTS[index]}={count}: make it of that size"
        )


def _check_exact(numbers: Sequence[float]) -> None:
    """Raises ParamError for an integer that float64 cannot represent: graphs pass scalars as it."""
    for value in numbers:
        if type(value) is complex:
            raise ParamError(f"a hook computes {value} from captured numbers: it must be real")
        if type(value) is int and not -_EXACT <= value <= _EXACT:
            remedy = (
                ": capture it as a 0-dim int64 tensor"
                if -(2**63) <= value < 2**63
                else ", 0-dim int64 tensors up to 2**63 - 1: capture a smaller one, or a float"
            )
            raise ParamError(
                f"a hook captures the integer {value}; scalar params hold integers up to "
                f"2**53{remedy}"
            )
