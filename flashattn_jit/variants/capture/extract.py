"""The captured values that every call reads and computes again, as data and as Python functions.

A `Location` describes where a hook finds a value and what must hold of it, a `Node` how a number is
computed from others, a `HostProgram` how tensors are. This is the one module of the package that
generates and runs Python source: every call reads every location of its variant, and generated code
is the fastest way to do so.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from flashattn_jit.errors import ParamError
from flashattn_jit.torch_modes import outside_modes
from flashattn_jit.variants.capture.objects import lacks
from flashattn_jit.variants.ir.halves import call_as_read

# --- locations -----------------------------------------------------------------------------------

ROOT, PARAMS, NOWHERE = -1, -2, -3
"""Where a location may start besides another one: the object that was visited, the values of the
declared params, and nowhere: the first step then names an object."""

StepKind = Literal["attribute", "item", "cell", "class", "object", "call"]
"""Steps from one object to the next, with their operands: ``.name``, ``[key]``, the contents of the
cell ``[i]``, the class (`Held`), an object (`Held`), the result of a function (`Held`)."""

GuardKind = Literal[
    "type", "is", "alive", "same", "length", "keys", "lacks", "disjoint", "without", "empty",
    "strided",
]  # fmt: skip
"""Conditions on the object at a location, with their operands: it has this type (`Held`), is this
object (`Held`), the object of a weak reference (`Held`) or the object at an earlier location, has
this length or these keys (a tuple), lacks this key or all of these (a frozenset), has none of these
attributes (a frozenset), is empty, is a strided tensor."""

Yields = Literal["", "tensor", "number", "value", "repr", "reprs"]
"""What a location adds to the result: nothing, a tensor, a number, or a part of the structural key
(the value, its repr, the set of the reprs of its entries)."""

LOST = (AttributeError, LookupError, TypeError, ValueError)
"""Exceptions of reading a location that no longer exists."""


class Held:
    """An object by identity: equal to itself alone."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


Step = tuple[StepKind, Any]
Guard = tuple[GuardKind, Any]


@dataclass(slots=True)
class Location:
    """An object that is read on every call: how to reach it, and what must hold of it.

    base: the index of the location that it starts from, or ROOT, PARAMS or NOWHERE. Equal lists of
    locations have equal extractors.
    """

    base: int
    steps: tuple[Step, ...]
    guards: list[Guard] = field(default_factory=list)
    yields: Yields = ""


Extracted = tuple[Any, tuple[torch.Tensor, ...], tuple[float, ...]]
Extractor = Callable[[object, Sequence[object]], Extracted | None]


def stride_pattern(t: torch.Tensor) -> str:
    """Per dim ``0`` (broadcast), ``1`` (dense) or ``n``; dims of one element count as dense."""
    last = t.dim() - 1
    inner_dense = last >= 0 and (t.size(last) <= 1 or t.stride(last) == 1)
    out = ["1" if d == last else "n" for d in range(last + 1)]
    for d, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if size > 1:
            out[d] = "0" if stride == 0 else "n"
            if stride == 1 and (d == last or not inner_dense):
                out[d] = "1"
    return "".join(out)


# --- numbers -------------------------------------------------------------------------------------

Source = tuple[str, int] | tuple[str, int, int] | tuple[str, str]
"""The sources of numbers: ("number", i), ("size", tensor i, dim), ("dim", field of `Dims`)."""

Node = tuple[Any, ...]
"""How a number is computed: a `Source`, ("constant", x, its repr), ("repr", node), which tells 0.0
from -0.0, or an operator of `BINARY` or `UNARY` with the nodes of its operands."""

BINARY = ("+", "-", "*", "/", "//", "%", "**", "<<", ">>", "&", "|", "^")
UNARY = {
    "__neg__": "(-{})", "__pos__": "(+{})", "__invert__": "(~{})", "__abs__": "abs({})",
    "__round__": "round({})", "__floor__": "floor({})", "__ceil__": "ceil({})",
    "__trunc__": "trunc({})",
}  # fmt: skip

Tensors = Sequence[torch.Tensor]
Numbers = Sequence[float]
Finish = Callable[[Tensors, Numbers], tuple[tuple[torch.Tensor, ...], tuple[float, ...]]]
"""Computes the tensors and numbers of a kernel's slots from the captured ones."""


def constant(x: float) -> Node:
    """The node of a literal, which differs for 1, 1.0 and True and for 0.0 and -0.0."""
    return "constant", x, repr(x)


def numbers_of(node: Node) -> set[int]:
    """The indices of the captured numbers that a node depends on."""
    if node[0] == "number":
        return {node[1]}
    return set[int]().union(*(numbers_of(x) for x in node[1:] if isinstance(x, tuple)))


def _number(node: Node) -> str:
    kind = node[0]
    if kind == "number":
        return f"n[{node[1]}]"
    if kind == "size":
        return f"t[{node[1]}].shape[{node[2]}]"
    if kind == "dim":
        return f"d.{node[1]}"
    if kind == "repr":
        return f"repr({_number(node[1])})"
    if kind == "constant":
        return f"({node[2]})"
    operands = [_number(x) for x in node[1:]]
    return f"({f' {kind} '.join(operands)})" if kind in BINARY else UNARY[kind].format(*operands)


# --- functions -----------------------------------------------------------------------------------

_SCOPE = {
    "__builtins__": {}, "LOST": LOST, "LACKS": lacks, "strided": torch.strided,
    "pattern": stride_pattern, "frozenset": frozenset, "len": len, "map": map, "repr": repr,
    "tuple": tuple, "type": type, "abs": abs, "round": round, "floor": math.floor,
    "ceil": math.ceil, "trunc": math.trunc, "inf": math.inf, "nan": math.nan,
}  # fmt: skip

_FAILS: dict[GuardKind, str] = {
    "type": "type({0}) is not {1}", "is": "{0} is not {1}", "alive": "{0} is not {1}()",
    "same": "{0} is not {1}", "length": "len({0}) != {1}", "keys": "tuple({0}) != {1}",
    "lacks": "{1} in {0}", "disjoint": "not {1}.isdisjoint({0})",
    "without": "not LACKS({0}, {1})", "empty": "{0}",
    "strided": "{0}.layout is not strided or {0}.is_nested",
}  # fmt: skip
"""The conditions under which guards fail, as formats of the location and the operand."""

_KEYS = {"value": "{}", "repr": "repr({})", "reprs": "frozenset(map(repr, {}))"}


def _function(header: str, body: Sequence[str], scope: dict[str, Any]) -> Any:
    """The function of a header such as ``f(x)`` and the lines of its body."""
    text = "\n    ".join([f"def {header}:", *body])
    made = {**_SCOPE, **scope}
    exec(compile(text, "<flashattn_jit captures>", "exec"), made)
    return made[header.partition("(")[0]]


def _tuple(items: Collection[str]) -> str:
    return f"({', '.join(items)},)" if items else "()"


class _Constants:
    """The objects that a generated function refers to, by name."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {}
        self._names: dict[Held, str] = {}

    def text(self, x: Any) -> str:
        """A literal, or the name of the object."""
        value = x.value if isinstance(x, Held) else x
        if value is None or value is Ellipsis or type(value) in (int, str):
            return repr(value)
        name = self._names.setdefault(Held(value), f"k{len(self._names)}")
        self.scope[name] = value
        return name


def extractor(locations: Sequence[Location]) -> Extractor:
    """The function (root, params) -> (structural key, tensors, numbers) that reads the locations.

    It returns None where a guard fails or a location no longer exists: the structure is another.
    """
    constants = _Constants()
    bases = {x.base for x in locations}
    bases.update(operand for x in locations for kind, operand in x.guards if kind == "same")
    names = {ROOT: "v", PARAMS: "p", NOWHERE: ""}
    lines: list[str] = []
    keys: list[str] = []
    found_tensors: list[str] = []
    found_numbers: list[str] = []
    for i, location in enumerate(locations):
        text = names[location.base]
        for kind, operand in location.steps:
            if kind == "attribute":
                text = f"{text}.{operand}"
            elif kind == "item":
                text = f"{text}[{constants.text(operand)}]"
            elif kind == "cell":
                text = f"{text}[{operand}].cell_contents"
            elif kind == "call":
                text = f"{constants.text(operand)}({text})"
            else:
                text = constants.text(operand)
        if location.steps and (i in bases or location.yields or len(location.guards) != 1):
            lines.append(f"x{i} = {text}")
            text = f"x{i}"
        names[i] = text
        failed = [
            _FAILS[kind].format(text, names[operand] if kind == "same" else constants.text(operand))
            for kind, operand in location.guards
        ]
        if failed:
            lines.append(f"if {' or '.join(failed)}: return None")
        if location.yields == "tensor":
            # Most tensors are contiguous, which is a fast check; the rank then gives the pattern.
            pattern = f"{text}.dim() if {text}.is_contiguous() else pattern({text})"
            keys += [f"{text}.dtype", pattern]
            found_tensors.append(text)
        elif location.yields == "number":
            found_numbers.append(text)
        elif location.yields:
            keys.append(_KEYS[location.yields].format(text))
    lines.append(f"return {_tuple(keys)}, {_tuple(found_tensors)}, {_tuple(found_numbers)}")
    body = ["try:", *(f"    {line}" for line in lines), "except LOST:", "    return None"]
    return _function("extract(v, p)", body, constants.scope)  # type: ignore[no-any-return]


def calculator(nodes: Sequence[Node]) -> Callable[..., tuple[Any, ...]]:
    """The function (tensors, numbers, dims or nothing) -> the values of the nodes."""
    return _function(  # type: ignore[no-any-return]
        "calculate(t, n, d=None)", [f"return {_tuple([_number(x) for x in nodes])}"], {}
    )


# --- tensors -------------------------------------------------------------------------------------

# What a hook computes from captures alone, without its indices, is recorded while it is traced and
# replayed for the values of each call: numbers as nodes, tensors as a *prelude* of torch calls. The
# results of the prelude are kept while their inputs are the same unchanged tensors.

_CPU = torch.device("cpu")


@dataclass(eq=False, slots=True)
class HostTensor:
    """A tensor known at bind time: the captured one `raw`, or the result of prelude step `step`.

    tensor: its value in the call being traced. sources: those that its sizes depend on.
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
        # Reading attributes of a tensor is a torch function, which the active tracer would get.
        with torch._C.DisableTorchFunction():
            t = self.tensor
            self.dtype, self.shape, self.device = t.dtype, tuple(t.shape), t.device
            self.requires_grad = t.requires_grad


@dataclass(frozen=True, slots=True)
class HostNumber:
    """A number in recorded arguments: its node, and its value in the call being traced."""

    node: Node
    value: float


@dataclass(frozen=True, slots=True)
class _TensorRef:
    raw: int
    step: int


def map_tree(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """`value` with `leaf` applied to the entries of its tuples, lists, dicts and slices."""
    if isinstance(value, tuple | list):
        return like(value, [map_tree(v, leaf) for v in value])
    if isinstance(value, dict):
        return {k: map_tree(v, leaf) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(leaf(value.start), leaf(value.stop), leaf(value.step))
    return leaf(value)


def leaves(tree: Any) -> list[Any]:
    """The entries to which `map_tree` applies its function, in order."""
    found: list[Any] = []
    map_tree(tree, found.append)
    return found


def like(value: Any, items: list[Any]) -> Any:
    """`items` as a list, a tuple or the named tuple that `value` is."""
    if isinstance(value, list):
        return items
    kind = type(value)
    if hasattr(kind, "n_sequence_fields"):  # torch.return_types
        return kind(items)
    return kind(*items) if hasattr(kind, "_fields") else tuple(items)


def _to_ref(x: Any) -> Any:
    return _TensorRef(x.raw, x.step) if isinstance(x, HostTensor) else x


def _to_real(x: Any) -> Any:
    if isinstance(x, HostTensor):
        return x.tensor
    return x.value if isinstance(x, HostNumber) else x


class _Step:
    """One recorded call; `pick` is the element of a tuple result, -1 for the result itself.

    The last result is kept, for the same captured tensors at the same version and the same
    numbers. Views are not kept: they are cheap, and would keep their base alive. read: what each
    argument is read as; see `call_as_read`.
    """

    def __init__(
        self, program: HostProgram, func: Callable[..., Any], args: Any, kwargs: Any, pick: int,
        read: Callable[[Any], Any] | None,
    ) -> None:  # fmt: skip
        self._program = program
        self._read = read
        self.func, self.args, self.kwargs, self.pick = func, args, kwargs, pick
        self.raws: list[int] = []
        self.after: list[int] = []  # steps whose results it takes
        nodes: list[Node] = []
        for x in leaves((args, kwargs)):
            if isinstance(x, _TensorRef):
                if x.raw < 0:
                    self.after.append(x.step)
                found = [x.raw] if x.raw >= 0 else program.steps[x.step].raws
                self.raws += [r for r in found if r not in self.raws]
            elif isinstance(x, HostNumber):
                nodes.append(x.node)
        self.numbers = {i for node in nodes for i in numbers_of(node)}
        self._nodes = nodes
        self._calculate = calculator(nodes)
        self._lock = threading.Lock()
        self._kept: tuple[Any, ...] | None = None

    def value(self, t: Tensors, n: Numbers) -> torch.Tensor:
        """The result for the captured tensors `t` and numbers `n`."""
        inputs = [t[i] for i in self.raws]
        # On devices each call computes it: a kept result would need synchronisation of streams, and
        # a captured CUDA graph would not compute it again at each replay.
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
                x = t[x.raw] if x.raw >= 0 else self._program.steps[x.step].value(t, n)
            elif isinstance(x, HostNumber):
                x = numbers[x.node]
            return x if self._read is None else self._read(x)

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
    """What changes when a tensor's values do: its version, and what `x.data = y` replaces. None for
    tensors of functional transforms, which have no address."""
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
        """Record and execute the call; tensors in its result become `HostTensor`.

        It computes tensors of half precision and fp8 in float32, as kernels do, and floats from
        integers; views are theirs.
        """
        ref_args, ref_kwargs = map_tree(args, _to_ref), map_tree(kwargs, _to_ref)
        key = repr((func, ref_args, ref_kwargs))
        if key in self._known:
            return self._known[key]
        inputs = [x for x in leaves((args, kwargs)) if isinstance(x, HostTensor)]
        result, read = call_as_read(func, map_tree(args, _to_real), map_tree(kwargs, _to_real))
        many = isinstance(result, tuple | list)
        name = inputs[0].name if inputs else getattr(func, "__name__", "value")
        sources = frozenset[Source]().union(*(x.sources for x in inputs))
        made: list[Any] = []
        for i, item in enumerate(result if many else (result,)):
            if isinstance(item, torch.Tensor):
                self.steps.append(_Step(self, func, ref_args, ref_kwargs, i if many else -1, read))
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
        """The function from extracted tensors and numbers to slots; None where they are equal.

        Ends the recording, and drops its references to the tensors of the traced call.
        """
        self._known.clear()
        extracted = [("number", i) for i in range(num_numbers)]
        if [t.raw for t in tensor_slots] == [*range(num_tensors)] and extracted == [*number_slots]:
            return None
        steps = {f"step{t.step}": self.steps[t.step].value for t in tensor_slots if t.raw < 0}
        texts = [f"t[{t.raw}]" if t.raw >= 0 else f"step{t.step}(t, n)" for t in tensor_slots]
        result = f"return {_tuple(texts)}, {_tuple([_number(x) for x in number_slots])}"
        return _function("finish(t, n)", [result], steps)  # type: ignore[no-any-return]
