"""What a hook sees while it is traced: `Value`, `Number` and `Captured` in place of tensors.

All three carry ``__torch_function__``, so that ``torch.*`` calls reach the tracer; operators and
methods are attached by trace_ops.py, which holds what each means. Last what a hook is told where it
fails to trace, in its user's words: hook, file, line, source, remedy.
"""

from __future__ import annotations

import contextvars
import linecache
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from flashattn_jit.errors import TraceError
from flashattn_jit.variants.dtypes import TORCH_DTYPES
from flashattn_jit.variants.extract import UNARY, Node, Source, constant
from flashattn_jit.variants.modes import outside_modes
from flashattn_jit.variants.trace_host import HostNumber, HostTensor

if TYPE_CHECKING:
    from flashattn_jit.variants.trace import Tracer

ACTIVE: contextvars.ContextVar[Tracer | None] = contextvars.ContextVar("tracer", default=None)
"""The tracer of the hook being traced in this thread."""

Shape = tuple[int, ...]


def tracer() -> Tracer:
    """The active tracer; a proxy that outlived its trace raises."""
    active = ACTIVE.get()
    if active is None:
        raise TraceError(
            "a value of a traced hook was used after tracing ended; hooks must not store their "
            "arguments"
        )
    return active


def _dispatch(
    cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    return tracer().dispatch(func, args, kwargs or {})


class Value:
    """A value that depends on the hook's arguments: logical `shape` over a flat IR node.

    A value of one element is a scalar node whatever its shape; others are vectors, row-major.
    weak: a Python number on its way into an operation.
    """

    __slots__ = ("name", "node", "shape", "weak")
    __torch_function__: Any = classmethod(_dispatch)

    def __init__(self, node: int, name: str, shape: Shape = (), weak: bool = False) -> None:
        self.node = node
        self.name = name  # the IR dtype
        self.shape = torch.Size(shape)
        self.weak = weak

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype."""
        return TORCH_DTYPES[self.name]

    @property
    def ndim(self) -> int:
        """The logical rank."""
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        """The device of the call."""
        return tracer().device

    @property
    def numel_(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    requires_grad = False
    is_cuda = property(lambda self: self.device.type == "cuda")
    layout = torch.strided

    def size(self, dim: int | None = None) -> Any:
        """As ``Tensor.size``."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """As ``Tensor.numel``."""
        return self.numel_

    def dim(self) -> int:
        """As ``Tensor.dim``."""
        return len(self.shape)

    def is_floating_point(self) -> bool:
        """As ``Tensor.is_floating_point``."""
        return self.name.startswith("float")

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return int(self.shape[0])

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"Value({self.name}{list(self.shape)})"

    def _refuse(self, what: str) -> NoReturn:
        tracer().refuse_value(what)

    def __bool__(self) -> bool:
        self._refuse("bool")

    def __int__(self) -> int:
        self._refuse("int()")

    def __float__(self) -> float:
        self._refuse("float()")

    def __index__(self) -> int:
        self._refuse("index")

    def item(self) -> float:
        """Refused: the value is not known while tracing."""
        self._refuse(".item()")

    def tolist(self) -> float:
        """Refused: the value is not known while tracing."""
        self._refuse(".tolist()")


class Captured:
    """A captured tensor, or what the prelude computes, with some of its dims already indexed.

    index: per dim of `host` None (free), an int, a `Number` or an integer `Value`.
    """

    __slots__ = ("host", "index")
    __torch_function__: Any = classmethod(_dispatch)

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
        """What the hook sees: half precision reads as float32."""
        dtype = self.host.dtype
        small = dtype.is_floating_point and dtype.itemsize < 4
        return torch.float32 if small and not self.on_host else dtype

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
    is_cuda = property(lambda self: self.device.type == "cuda")

    def size(self, dim: int | None = None) -> Any:
        """As ``Tensor.size``."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As ``Tensor.dim``."""
        return self.ndim

    def numel(self) -> Any:
        """As ``Tensor.numel``."""
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        """As ``Tensor.is_floating_point``."""
        return self.dtype.is_floating_point

    def __len__(self) -> int:
        return int(self.shape[0])

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"Captured({self.host.name}, index={self.index})"

    def __bool__(self) -> bool:
        tracer().refuse_value("bool")

    def __int__(self) -> int:
        tracer().refuse_value("int()")

    def __float__(self) -> float:
        tracer().refuse_value("float()")

    def __index__(self) -> int:
        tracer().refuse_value("index")

    def item(self) -> float:
        """Refused: reading it would synchronise with the device on each call."""
        tracer().refuse_value(".item()")

    def tolist(self) -> float:
        """Refused, as `item`."""
        tracer().refuse_value(".tolist()")

    def __getattr__(self, name: str) -> Any:
        return tracer().captured_attribute(self, name)


class Number:
    """A captured Python number: its value now, and the node that gives it on later calls.

    Arithmetic with other numbers stays a number. Anything that needs the value (a comparison, a
    shape, ``math.sqrt``) specialises: the numbers it came from join the structural key.
    """

    __slots__ = ("node", "sources", "value")
    __torch_function__: Any = classmethod(_dispatch)

    def __init__(self, value: float, node: Node, sources: frozenset[Source]) -> None:
        self.value = value
        self.node = node
        self.sources = sources

    def pin(self) -> Any:
        """The value, specialised on."""
        tracer().specialise(self.sources)
        return self.value

    def host(self) -> HostNumber:
        """As an argument of a prelude call."""
        return HostNumber(self.node, self.value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance(number, int) answers for the number
        return type(self.value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pin(), name)

    def __repr__(self) -> str:
        return repr(self.pin())

    def __hash__(self) -> int:
        return hash(self.pin())

    def __bool__(self) -> bool:
        return bool(self.pin())

    def __int__(self) -> int:
        return int(self.pin())

    def __float__(self) -> float:
        return float(self.pin())

    def __index__(self) -> int:
        return self.pin().__index__()  # type: ignore[no-any-return]

    def __format__(self, spec: str) -> str:
        return format(self.pin(), spec)


def is_number(x: object) -> bool:
    """Whether `x` is a `Number`; isinstance would ask the number's own class."""
    return type(x) is Number


def _is_instance(x: Any, kinds: Any) -> bool:
    """`isinstance` as a hook means it: proxies are tensors."""
    return isinstance(_EXAMPLE if isinstance(x, Value | Captured) else x, kinds)


def _type_of(x: Any, *more: Any) -> Any:
    """`type` as a hook means it."""
    return (
        type(x, *more) if more else torch.Tensor if isinstance(x, Value | Captured) else x.__class__
    )


with outside_modes():
    _EXAMPLE = torch.empty(0, device="cpu")
STAND_INS: dict[str, Any] = {"isinstance": _is_instance, "type": _type_of}
"""Builtins of rebuilt hooks that ask for types: a proxy cannot pass for a tensor by itself."""


def _node(x: Any) -> Node:
    return x.node if type(x) is Number else constant(x)


def _sources(*xs: Any) -> frozenset[Source]:
    return frozenset[Source]().union(*(x.sources for x in xs if type(x) is Number))


def _plain(x: Any) -> Any:
    return x.value if type(x) is Number else x


_ARITHMETIC = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "//": operator.floordiv, "%": operator.mod, "**": operator.pow, "<<": operator.lshift,
    ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
}  # fmt: skip


def _arithmetic(symbol: str, operate: Callable[[Any, Any], Any]) -> None:
    def calculate(a: Any, b: Any) -> Any:
        if not all(type(x) in (Number, int, float, bool) for x in (a, b)):
            return NotImplemented
        if symbol == "**" and type(b) is Number and type(b.value) is int:
            b = b.pin()  # its sign decides whether the result is an int
        try:
            value = operate(_plain(a), _plain(b))
        except ArithmeticError as error:
            raise type(error)(f"{error} (in {_plain(a)!r} {symbol} {_plain(b)!r})") from None
        return Number(value, (symbol, _node(a), _node(b)), _sources(a, b))

    def forward(self: Any, other: Any) -> Any:
        result = calculate(self, other)
        return tracer().number_op(symbol, self, other) if result is NotImplemented else result

    def backward(self: Any, other: Any) -> Any:
        result = calculate(other, self)
        return tracer().number_op(symbol, other, self) if result is NotImplemented else result

    name = operate.__name__.strip("_")
    setattr(Number, f"__{name}__", forward)
    setattr(Number, f"__r{name}__", backward)


def _comparison(name: str, symbol: str) -> None:
    def compare(self: Any, other: Any) -> Any:
        if isinstance(other, Value | Captured):
            return tracer().number_op(symbol, self, other)
        mine, theirs = self.pin(), other.pin() if type(other) is Number else other
        return getattr(mine, name)(theirs)

    setattr(Number, name, compare)


def _unary(name: str) -> None:
    def apply(self: Any) -> Any:
        return Number(getattr(self.value, name)(), (name, self.node), self.sources)

    setattr(Number, name, apply)


for _symbol, _operate in _ARITHMETIC.items():
    _arithmetic(_symbol, _operate)
for _name, _symbol in (("__lt__", "<"), ("__le__", "<="), ("__gt__", ">"), ("__ge__", ">="),
                       ("__eq__", "=="), ("__ne__", "!=")):  # fmt: skip
    _comparison(_name, _symbol)
for _name in UNARY:
    _unary(_name)


# --- where a hook failed -------------------------------------------------------------------------

_REMEDIES = {
    ".item()": "keep it a tensor: arithmetic with the 0-dim tensor itself works",
    ".tolist()": "keep it a tensor and index it with constants",
    ".numpy()": "keep it a tensor",
    "float()": "keep it a tensor; math functions have torch forms (`torch.exp`, `torch.sqrt`)",
    "int()": "keep it a tensor: `.int()` or `.long()` converts",
    "index": "index captured tensors, not lists, with `t[q_idx]`; ranges and shapes need constants",
}
_BOOL_REMEDIES = (
    (r"\band\b", "`and`", "use `&` (with parentheses around comparisons)"),
    (r"\bor\b", "`or`", "use `|` (with parentheses around comparisons)"),
    (r"\bnot\b", "`not`", "use `~`"),
    (r"[<>]=?[^<>=&|()]+[<>]=?", "a chained comparison", "write `(a <= x) & (x < b)`"),
    (r"\b(min|max)\(", "`min` or `max`", "use torch.minimum, torch.maximum or torch.clamp"),
    (r"\b(if|while|assert)\b", "`if`", "use `torch.where(condition, a, b)`"),
)

_OF_A_FUNCTION = re.compile(r"\w+_mod\([^()|~]*\)")


class Where:
    """Names the variant's hook and finds the user's line among the frames of a call.

    owner: what the hook belongs to, codes: the code objects that are the user's.
    """

    def __init__(self, owner: str, codes: Iterable[types.CodeType] = ()) -> None:
        self.owner = owner
        self.kind = ""
        self._files = {c.co_filename for c in codes}
        self._hook: types.CodeType | None = None
        self._outside: types.FrameType | None = None

    def begin(self, kind: str, fn: Any) -> None:
        """A hook is about to run, called from the caller's frame."""
        self.kind = kind
        self._outside = sys._getframe(1)
        while not hasattr(fn, "__code__"):
            inner = getattr(fn, "func", None) or getattr(fn, "__func__", None)
            if inner is None:
                inner = type(fn).__call__
            if isinstance(inner, types.WrapperDescriptorType):
                break
            fn = inner
        code = getattr(fn, "__code__", None)
        self._hook = code if code is not None and code.co_filename in self._files else None

    def end(self) -> None:
        """The hook has run: let its frames go."""
        self._outside = None

    def _name(self) -> str:
        parts = self.owner.split(" & ")
        own = [part for part in parts if part.startswith(f"{self.kind}(")]
        if len(own) == 1 and all(_OF_A_FUNCTION.fullmatch(part) for part in parts):
            return own[0]  # of plain functions: score_mod(cap) & mask_mod(causal)
        owner = f"({self.owner})" if " " in self.owner else self.owner
        return f"{owner}.{self.kind}" if owner else self.kind

    def _line(self) -> tuple[str, int] | None:
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._outside:
            if frame.f_code.co_filename in self._files:
                return frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back
        return None

    def _text(self, place: tuple[str, int] | None) -> tuple[str, str]:
        if place is None and self._hook is not None:
            place = self._hook.co_filename, self._hook.co_firstlineno
        if place is None:
            return self._name(), ""
        source = linecache.getline(*place).strip()
        shown = f": `{source}`" if source else ""
        return f"{self._name()} ({place[0]}:{place[1]}{shown})", source

    def error(self, what: str, remedy: str, *, user_frame: bool = True) -> TraceError:
        """The error for an operation that cannot be part of a kernel."""
        text, _ = self._text(self._line() if user_frame else None)
        return TraceError(f"{text}: {what} cannot become a kernel; {remedy}")

    def value_error(self, what: str) -> TraceError:
        """The error for asking for the value of a tensor: `if`, `and`, float(), .item()."""
        text, source = self._text(self._line())
        remedy = _REMEDIES.get(what, "")
        if what == "bool":
            what, remedy = (
                "the truth of a tensor",
                ("use `&`, `|`, `~` instead of and, or, not, and `torch.where` instead of if"),
            )
            for pattern, name, better in _BOOL_REMEDIES:
                if re.search(pattern, source):
                    what, remedy = f"{name} on tensors", better
                    break
        return TraceError(
            f"{text}: {what} needs a value that is only known inside the kernel; {remedy}"
        )

    def from_exception(self, error: Exception) -> TraceError:
        """The error for anything that the hook raised by itself."""
        place = None
        tb = error.__traceback__
        while tb is not None:
            if tb.tb_frame.f_code.co_filename in self._files:
                place = tb.tb_frame.f_code.co_filename, tb.tb_lineno
            tb = tb.tb_next
        text, _ = self._text(place)
        return TraceError(
            f"{text}: {type(error).__name__} while tracing: {error}; expected a function of 0-dim "
            "tensors made of torch operations"
        )
