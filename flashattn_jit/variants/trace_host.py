"""Values that depend on captures alone: Python numbers and tensors computed by torch at bind time.

While a hook is traced, a captured number is a `Number` and a captured tensor a `Captured`
(trace_values.py). What a hook computes from them without touching its indices is recorded here and
replayed for the actual values: numbers as nodes (`extract.Node`), tensors as a *prelude* of torch
calls, whose results are kept while their inputs are the same tensors, unchanged.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashattn_jit.errors import ParamError
from flashattn_jit.variants.extract import (
    Finish,
    Node,
    Numbers,
    Source,
    Tensors,
    calculator,
    finisher,
    numbers_of,
)
from flashattn_jit.variants.modes import outside_modes

_CPU = torch.device("cpu")


@dataclass(eq=False, slots=True)
class HostTensor:
    """A tensor known at bind time: the captured one `raw`, or the result of prelude step `step`.

    tensor: its value in the call being traced, sources: what pinning all its sizes pins.
    """

    tensor: torch.Tensor
    name: str
    sources: frozenset[Source]
    raw: int = -1
    step: int = -1
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    device: torch.device = _CPU
    requires_grad: bool = False

    def __post_init__(self) -> None:
        # Attributes of a real tensor are torch functions too, and the tracer's mode is active.
        with torch._C.DisableTorchFunction():
            t = self.tensor
            self.dtype, self.shape, self.device = t.dtype, tuple(t.shape), t.device
            self.requires_grad = t.requires_grad


@dataclass(frozen=True, slots=True)
class HostNumber:
    """A number inside recorded arguments: how it follows from what was captured, and its value in
    the call being traced."""

    node: Node
    value: float


@dataclass(frozen=True, slots=True)
class _TensorRef:
    raw: int
    step: int


@dataclass(frozen=True, slots=True)
class _NumberRef:
    node: Node


def map_tree(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """`value` with `leaf` applied to what is inside its tuples, lists, dicts and slices."""
    if isinstance(value, tuple | list):
        return like(value, [map_tree(v, leaf) for v in value])
    if isinstance(value, dict):
        return {k: map_tree(v, leaf) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(leaf(value.start), leaf(value.stop), leaf(value.step))
    return leaf(value)


def like(value: Any, items: list[Any]) -> Any:
    """`items` as a list, a tuple or the named tuple that `value` is."""
    if isinstance(value, list):
        return items
    kind = type(value)
    if hasattr(kind, "n_sequence_fields"):  # torch.return_types
        return kind(items)
    return kind(*items) if hasattr(kind, "_fields") else tuple(items)


def _to_ref(x: Any) -> Any:
    if isinstance(x, HostTensor):
        return _TensorRef(x.raw, x.step)
    return _NumberRef(x.node) if isinstance(x, HostNumber) else x


def _to_real(x: Any) -> Any:
    if isinstance(x, HostTensor):
        return x.tensor
    return x.value if isinstance(x, HostNumber) else x


class _Step:
    """One recorded call; `pick` is the element of a tuple result, -1 for the result itself.

    The last result is kept for the same captured tensors at the same version and the same
    numbers. Views are not kept: they cost nothing, and would keep their base alive.
    """

    def __init__(
        self, program: HostProgram, func: Callable[..., Any], args: Any, kwargs: Any, pick: int
    ) -> None:
        self._program = program
        self.func, self.args, self.kwargs, self.pick = func, args, kwargs, pick
        self.raws: list[int] = []
        self.after: list[int] = []  # steps whose results it takes
        nodes: list[Node] = []

        def see(x: Any) -> Any:
            if isinstance(x, _TensorRef):
                if x.raw < 0:
                    self.after.append(x.step)
                found = [x.raw] if x.raw >= 0 else program.steps[x.step].raws
                self.raws += [r for r in found if r not in self.raws]
            elif isinstance(x, _NumberRef):
                nodes.append(x.node)
            return x

        map_tree((args, kwargs), see)
        self.numbers = {i for node in nodes for i in numbers_of(node)}
        self._nodes = nodes
        self._calculate = calculator(nodes)
        self._lock = threading.Lock()
        self._kept: tuple[Any, ...] | None = None

    def value(self, t: Tensors, n: Numbers) -> torch.Tensor:
        """The result for the captured tensors `t` and numbers `n`."""
        inputs = [t[i] for i in self.raws]
        # A kept result of a device would need an order between streams, and would freeze what a
        # captured graph is to compute at every replay; there it is computed for each call.
        keep = not any(x.is_inference() or x.device.type != "cpu" for x in inputs)
        kept = self._kept
        if (
            keep
            and kept is not None
            and kept[1] == tuple(n)
            and all(r() is x and v == _state(x) for (r, v), x in zip(kept[0], inputs, strict=True))
        ):
            return kept[2]  # type: ignore[no-any-return]
        numbers = dict(zip(self._nodes, self._calculate(t, n), strict=True))

        def real(x: Any) -> Any:
            if isinstance(x, _TensorRef):
                return t[x.raw] if x.raw >= 0 else self._program.steps[x.step].value(t, n)
            return numbers[x.node] if isinstance(x, _NumberRef) else x

        autocast = torch._C._is_any_autocast_enabled()
        try:
            with outside_modes() if autocast else contextlib.nullcontext():
                result = self.func(*map_tree(self.args, real), **map_tree(self.kwargs, real))
            result = result if self.pick < 0 else result[self.pick]
        except (RuntimeError, LookupError, TypeError, ValueError) as error:
            name = getattr(self.func, "__name__", "a function")
            shapes = ", ".join(str(list(x.shape)) for x in inputs)
            raise ParamError(
                f"a hook computes `{name}` from captured tensors, which fails for those of this "
                f"call (shapes {shapes}): {error}"
            ) from error
        keep = keep and all(_state(x) is not None for x in inputs)
        is_view = result._is_view() or any(result is x for x in inputs)
        if keep and not is_view and not result.requires_grad and not result.is_inference():
            entry = [(weakref.ref(x), _state(x)) for x in inputs]
            with self._lock:
                self._kept = (entry, tuple(n), result)
        return result  # type: ignore[no-any-return]


def _state(x: torch.Tensor) -> tuple[object, ...] | None:
    """What changes when a tensor's values do: its version, and what `x.data = y` exchanges. None
    for the tensors of functional transforms, which have no address."""
    try:
        return x._version, x.data_ptr(), x.shape, x.stride()
    except RuntimeError:
        return None


class HostProgram:
    """The prelude of one variant."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self._known: dict[str, Any] = {}

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record and execute the call; tensors in its result become `HostTensor`."""
        ref_args, ref_kwargs = map_tree(args, _to_ref), map_tree(kwargs, _to_ref)
        key = repr((func, ref_args, ref_kwargs))
        if key in self._known:
            return self._known[key]
        inputs: list[HostTensor] = []
        map_tree((args, kwargs), lambda x: inputs.append(x) if isinstance(x, HostTensor) else x)
        result = func(*map_tree(args, _to_real), **map_tree(kwargs, _to_real))
        many = isinstance(result, tuple | list)
        name = inputs[0].name if inputs else getattr(func, "__name__", "value")
        sources = frozenset[Source]().union(*(x.sources for x in inputs))
        made: list[Any] = []
        for i, item in enumerate(result if many else (result,)):
            if isinstance(item, torch.Tensor):
                self.steps.append(_Step(self, func, ref_args, ref_kwargs, i if many else -1))
                item = HostTensor(item, name, sources, step=len(self.steps) - 1)
            made.append(item)
        self._known[key] = like(result, made) if many else made[0]
        return self._known[key]

    def reads(self, tensor: HostTensor) -> tuple[set[int], set[int]]:
        """The captured tensors and numbers, by index, that a tensor's values depend on."""
        tensors, numbers = set[int](), set[int]()
        if tensor.raw >= 0:
            return {tensor.raw}, numbers
        seen, stack = set[int](), [tensor.step]
        while stack:
            step = stack.pop()
            if step in seen:
                continue
            seen.add(step)
            tensors.update(self.steps[step].raws)
            numbers.update(self.steps[step].numbers)
            stack.extend(self.steps[step].after)
        return tensors, numbers

    def finish(
        self,
        num_tensors: int,
        num_numbers: int,
        tensor_slots: Sequence[HostTensor],
        number_slots: Sequence[Node],
    ) -> Finish | None:
        """The function from extracted tensors and numbers to slots; None when they are equal.

        Ends the recording: the tensors of this call are let go.
        """
        self._known.clear()
        tensors = [t.raw if t.raw >= 0 else self.steps[t.step].value for t in tensor_slots]
        if tensors == list(range(num_tensors)) and list(number_slots) == [
            ("number", i) for i in range(num_numbers)
        ]:
            return None
        return finisher(tensors, number_slots)
