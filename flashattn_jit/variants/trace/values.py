"""The proxies that a hook gets while it is traced: `Value`, `Number` and `Captured`.

All three have ``__torch_function__``, so that ``torch.*`` calls reach the tracer. methods.py gives
them operators and methods, which call the handlers of operations.py and other modules.
"""

from __future__ import annotations

import contextvars
import copy
import math
import operator
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from flashattn_jit.errors import TraceError
from flashattn_jit.torch_modes import outside_modes
from flashattn_jit.variants.capture.extract import (
    UNARY,
    HostNumber,
    HostTensor,
    Node,
    Source,
    constant,
)
from flashattn_jit.variants.ir.dtypes import TORCH_DTYPES
from flashattn_jit.variants.ir.halves import reads_as_float32
from flashattn_jit.variants.trace.positions import Bound

if TYPE_CHECKING:
    from flashattn_jit.variants.trace.tracer import Tracer

ACTIVE: contextvars.ContextVar[Tracer | None] = contextvars.ContextVar("tracer", default=None)
"""The tracer of the hook being traced in this thread."""

Shape = tuple[int, ...]
Handler = Callable[..., Any]

HANDLERS: dict[str, Handler] = {}
"""Handlers of torch functions and Tensor methods by name, which `operations.op` registers."""

HALVES = (torch.float16, torch.bfloat16)

READS = {"item": ".item()", "tolist": ".tolist()", "numpy": ".numpy()", "__bool__": "bool",
         "__float__": "float()", "__int__": "int()", "__index__": "index"}  # fmt: skip
"""Methods that read a tensor's values, with their names in error messages."""

_ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "//": operator.floordiv, "%": operator.mod, "**": operator.pow, "<<": operator.lshift,
    ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
}  # fmt: skip
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


def tracer() -> Tracer:
    """The active tracer; a proxy that outlived its trace raises."""
    active = ACTIVE.get()
    if active is None:
        raise TraceError(
            "a value of a traced hook was used after tracing ended; hooks must not store their "
            "arguments"
        )
    return active


def updated_by(name: str) -> str:
    """The operation that `name` does in place: ``__add__`` for ``__iadd__``, ``add`` for ``add_``;
    empty where `name` is not an in-place operation."""
    if name.startswith("__"):
        base = f"__{name[3:]}"
        return base if name.startswith("__i") and base in HANDLERS else ""
    return name[:-1] if name.endswith("_") and name != "requires_grad_" else ""


def _dispatch(
    cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    return tracer().dispatch(func, args, kwargs or {})


class _Proxy:
    """A stand-in for a tensor while a hook is traced, with a dtype, a device, a shape and an ndim.

    Reading its values raises TraceError: they are not known while tracing, and reading a captured
    tensor on a device would synchronise with it in each call.
    """

    __slots__ = ()
    __torch_function__: Any = classmethod(_dispatch)

    is_cuda = property(lambda self: self.device.type == "cuda")

    def size(self: Any, dim: int | None = None) -> Any:
        """As ``Tensor.size``."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self: Any) -> int:
        """As ``Tensor.dim``."""
        return self.ndim  # type: ignore[no-any-return]

    def numel(self: Any) -> Any:
        """As ``Tensor.numel``."""
        return math.prod(self.shape)

    @property
    def nbytes(self: Any) -> Any:
        """As ``Tensor.nbytes``."""
        return self.numel() * self.torch_dtype.itemsize

    def is_floating_point(self: Any) -> bool:
        """As ``Tensor.is_floating_point``."""
        return self.dtype.is_floating_point  # type: ignore[no-any-return]

    def __len__(self: Any) -> int:
        if not self.ndim:
            raise TypeError("len() of a 0-d tensor")
        return int(self.shape[0])

    def __hash__(self) -> int:
        # Equal values have other hashes, so that a set or a dict would never find one.
        tracer().refuse_look_up()

    def __format__(self, spec: str) -> str:
        tracer().refuse_text(sys._getframe(1))
        return repr(self)


def _refused(what: str) -> Callable[..., NoReturn]:
    def read(self: Any, *_: Any, **__: Any) -> NoReturn:
        tracer().refuse_value(what, self)

    return read


for _name, _what in READS.items():
    setattr(_Proxy, _name, _refused(_what))


class Value(_Proxy):
    """A value that depends on the hook's arguments: logical `shape` over a flat IR node.

    A value of one element is a scalar node whatever its shape; others are vectors, row-major.
    weak: it is a Python number, which promotes as such. bound: of an int64 of positions that is
    computed as int32 (`positions.py`); None for other values. root, places: where it is a view, the
    value whose memory it shares, which is none, and its element numbers there. Without a root,
    places have the strides of torch's tensor, and are None for row-major ones. views: those of it.
    half_dtype: torch's dtype where that is of half precision, which is computed as float32.
    unknown_strides: they depend on those of captured tensors. may_share: its memory may be that of
    a captured tensor, or of a value with such strides: in-place operations on it are refused.
    """

    __slots__ = (
        "__weakref__", "bound", "half_dtype", "may_share", "name", "node", "places", "root",
        "shape", "unknown_strides", "views", "weak",
    )  # fmt: skip

    def __init__(
        self, node: int, name: str, shape: Shape = (), weak: bool = False,
        bound: Bound | None = None,
    ) -> None:  # fmt: skip
        self.node = node
        self.bound = bound
        self.name = name  # the IR dtype
        self.shape = torch.Size(shape)
        self.weak = weak
        self.root: Value | None = None
        self.places: torch.Tensor | None = None
        self.views: list[weakref.ref[Value]] = []
        self.half_dtype: torch.dtype | None = None
        self.unknown_strides = self.may_share = False

    def with_view(self, made: Value, places: torch.Tensor) -> Value:
        """`made` as a view of this value."""
        made.root, made.places = self if self.root is None else self.root, places
        made.half_dtype = self.half_dtype
        made.unknown_strides, made.may_share = self.unknown_strides, self.may_share
        made.root.views.append(weakref.ref(made))
        return made

    def now(self) -> Value:
        """The value as it is, whatever is done to this one in place."""
        return Value(self.node, self.name, self.shape, self.weak, self.bound)

    @property
    def torch_dtype(self) -> torch.dtype:
        """torch's dtype: that of half precision too."""
        return self.half_dtype or self.dtype

    def __copy__(self) -> Value:
        return HANDLERS["alias"](self)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Value:
        made = self.now()
        if self.root is not None and self.places is not None:
            return copy.deepcopy(self.root, memo).with_view(made, self.places)
        made.places, made.half_dtype = self.places, self.half_dtype
        made.unknown_strides = self.unknown_strides
        return made

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype."""
        return torch.int64 if self.bound is not None else TORCH_DTYPES[self.name]

    @property
    def ndim(self) -> int:
        """The logical rank."""
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        """The device of the call."""
        return tracer().device

    requires_grad = False
    layout = torch.strided

    def __repr__(self) -> str:
        return f"Value({self.name}{list(self.shape)})"


def laid_out(shape: Shape, stride: Sequence[int]) -> torch.Tensor:
    """The element numbers of a shape, in memory of these strides."""
    with outside_modes(), torch._C.DisableTorchFunction():
        numbers = torch.arange(math.prod(shape), device="cpu").view(shape)
        return torch.empty_strided(shape, stride, dtype=torch.int64, device="cpu").copy_(numbers)


def is_row_major(x: Value) -> bool:
    """Whether torch's tensor is contiguous."""
    with torch._C.DisableTorchFunction():
        return x.places is None or x.places.is_contiguous()


class Captured(_Proxy):
    """A captured tensor, or what the prelude computes, with some of its dims already indexed.

    index: per dim of `host` None (free), an int, a `Number` or an integer `Value`.
    """

    __slots__ = ("host", "index")

    def __init__(self, host: HostTensor, index: tuple[Any, ...] = ()) -> None:
        self.host = host
        self.index = index or (None,) * len(host.shape)

    @property
    def free(self) -> tuple[int, ...]:
        """The dims of the host tensor that are not indexed."""
        return tuple(d for d, i in enumerate(self.index) if i is None)

    @property
    def on_host(self) -> bool:
        """Whether the value is known at bind time."""
        return not any(isinstance(i, Value) for i in self.index)

    @property
    def dtype(self) -> torch.dtype:
        """What the hook sees: the tensor's own, and float32 of an element of half precision."""
        dtype = self.host.dtype
        return torch.float32 if reads_as_float32(dtype) and not self.on_host else dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        """torch's dtype: that of half precision too."""
        return self.host.dtype

    @property
    def device(self) -> torch.device:
        """The tensor's device."""
        return self.host.device

    @property
    def ndim(self) -> int:
        """The number of dims that are not indexed."""
        return len(self.free)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The sizes of the free dims, as runtime numbers."""
        return tuple(tracer().size_of(self.host, d) for d in self.free)

    requires_grad = property(lambda self: self.host.requires_grad)

    def __repr__(self) -> str:
        return f"Captured({self.host.name}, index={self.index})"

    def __copy__(self) -> Captured:
        return self

    def __deepcopy__(self, memo: object) -> Captured:
        return self

    def __getattr__(self, name: str) -> Any:
        return tracer().captured_attribute(self, name)


class Number:
    """A captured Python number: its value now, and the node that computes it for later calls.

    Arithmetic with other numbers gives a `Number`. Operations that need the value (a comparison, a
    shape, ``math.sqrt``) specialise: the captured numbers that it depends on join the structural
    key.
    """

    __slots__ = ("node", "sources", "value")
    __torch_function__: Any = classmethod(_dispatch)

    def __init__(self, value: float, node: Node, sources: frozenset[Source]) -> None:
        self.value = value
        self.node = node
        self.sources = sources

    def pin(self) -> Any:
        """The value, on which the trace specialises."""
        tracer().specialise(self.sources)
        return self.value

    def __copy__(self) -> Number:
        return self

    def __deepcopy__(self, memo: object) -> Number:
        return self

    def host(self) -> HostNumber:
        """As an argument of a prelude call."""
        return HostNumber(self.node, self.value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance(number, int) answers for the number
        return type(self.value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pin(), name)


def _is_instance(x: Any, kinds: Any) -> bool:
    """`isinstance` for hooks: proxies are tensors."""
    return isinstance(_EXAMPLE if isinstance(x, Value | Captured) else x, kinds)


def _type_of(x: Any, *more: Any) -> Any:
    """`type` for hooks: that of a proxy is `torch.Tensor`, that of a copy its object's."""
    if more:
        return type(x, *more)
    # A hook compares it with what it reaches by the class's name, which may be a stand-in.
    own = x.__class__
    return torch.Tensor if isinstance(x, Value | Captured) else tracer().made.get(id(own), own)


with outside_modes():
    _EXAMPLE = torch.empty(0, device="cpu")
STAND_INS: dict[str, Any] = {"isinstance": _is_instance, "type": _type_of}
"""Replacements for builtins in rebuilt hooks, for which a proxy would not be a tensor."""


def pinned(x: Any) -> Any:
    """The value of a captured number (see `Number.pin`); anything else unchanged."""
    return x.pin() if type(x) is Number else x


def _node(x: Any) -> Node:
    return x.node if type(x) is Number else constant(x)


def _sources(*xs: Any) -> frozenset[Source]:
    return frozenset[Source]().union(*(x.sources for x in xs if type(x) is Number))


def plain(x: Any) -> Any:
    """The value of a captured number, without specialising on it; anything else unchanged."""
    return x.value if type(x) is Number else x


def _number_op(symbol: str, a: Any, b: Any) -> Any:
    """An operator with a captured number on one side and a tensor on the other."""
    function = _ARITHMETIC.get(symbol) or _COMPARISONS[symbol]
    if any(isinstance(x, Value) or (type(x) is Captured and not x.on_host) for x in (a, b)):
        name = function.__name__.strip("_").join(("__", "__"))
        return tracer()._handle(name, (a, b), {})
    if not all(type(x) in (Captured, Number, int, float, bool) for x in (a, b)):
        return NotImplemented
    return tracer().dispatch(function, (a, b), {})


def _arithmetic(symbol: str, operate: Callable[[Any, Any], Any]) -> None:
    def forward(a: Any, b: Any) -> Any:
        if not all(type(x) in (Number, int, float, bool) for x in (a, b)):
            return _number_op(symbol, a, b)
        if symbol == "**" and type(b) is Number and type(b.value) is int:
            b = b.pin()  # its sign decides whether the result is an int
        try:
            value = operate(plain(a), plain(b))
        except ArithmeticError as error:
            raise type(error)(f"{error} (in {plain(a)!r} {symbol} {plain(b)!r})") from None
        return Number(value, (symbol, _node(a), _node(b)), _sources(a, b))

    def backward(self: Any, other: Any) -> Any:
        return forward(other, self)

    name = operate.__name__.strip("_")
    setattr(Number, f"__{name}__", forward)
    setattr(Number, f"__r{name}__", backward)


def _comparison(symbol: str, operate: Callable[[Any, Any], Any]) -> None:
    name = f"__{operate.__name__}__"

    def compare(self: Any, other: Any) -> Any:
        if isinstance(other, Value | Captured):
            return _number_op(symbol, self, other)
        mine, theirs = self.pin(), other.pin() if type(other) is Number else other
        return getattr(mine, name)(theirs)

    setattr(Number, name, compare)


def _pinning(name: str) -> None:
    def apply(self: Any, *args: Any) -> Any:
        return getattr(self.pin(), name)(*args)

    setattr(Number, name, apply)


def _unary(name: str) -> None:
    def apply(self: Any) -> Any:
        return Number(getattr(self.value, name)(), (name, self.node), self.sources)

    setattr(Number, name, apply)


for _symbol, _operate in _ARITHMETIC.items():
    _arithmetic(_symbol, _operate)
for _symbol, _operate in _COMPARISONS.items():
    _comparison(_symbol, _operate)
for _name in ("bool", "int", "float", "index", "format", "hash", "repr"):
    _pinning(f"__{_name}__")
for _name in UNARY:
    _unary(_name)
