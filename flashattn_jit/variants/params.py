"""The params of a variant, the dims that they are checked against, and normalisers.

`scalar` and `tensor` declare params; `resolve` finds the value of each for one call. `Softmax`,
optionally with a sink, or `Pointwise` turns scores into weights.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flashattn_jit import _C
from flashattn_jit.errors import ParamError, VariantError
from flashattn_jit.torch_modes import (
    PLAIN,
    is_capturing,
    is_quiet,
    outside_modes,
    refuse_unreadable,
    unreadable,
)
from flashattn_jit.variants.counterparts import COUNTERPARTS
from flashattn_jit.variants.ir.dtypes import DTYPE_NAMES

RESERVED = frozenset({
    "q", "k", "v", "variant", "scale", "q_offset", "kv_len", "q_len", "return_lse", "partial",
    "out", "target", "q_indptr", "kv_indptr", "max_q_len", "max_kv_len", "dtype", "sparsity",
    "storage", "lse", "score", "b", "h", "kv_h", "q_idx", "kv_idx", "row", "dims", "device",
    "seed", "cases", "plot", "dtypes", "raise_on_failure", "batch", "num_q_heads", "num_kv_heads",
    "head_dim", "head_dim_v", "name", "params", "k_pages", "v_pages",
})  # fmt: skip
"""Names that a param may not have: arguments of the operations and of hooks."""


class Dims(NamedTuple):
    """The sizes of one call; -1 where a size is not known (then it is not checked).

    In packed calls q_len and kv_len are the longest request's.
    """

    batch: int = -1
    num_q_heads: int = -1
    num_kv_heads: int = -1
    q_len: int = -1
    kv_len: int = -1
    head_dim: int = -1
    head_dim_v: int = -1
    device: torch.device = torch.device("cpu")

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return self.num_q_heads // self.num_kv_heads


SIZE_NAMES = frozenset(Dims._fields) - {"device"}


class _Size(NamedTuple):
    """A declared dim: a number, or a field of `Dims`, or a free name, whose dims are equal."""

    name: str
    number: int | None
    field: int | None
    may_be_one: bool

    @classmethod
    def of(cls, dim: str | int) -> _Size:
        """Of a dim as it is declared, such as ``"batch|1"``."""
        if isinstance(dim, int):
            return cls("", dim, None, False)
        name = dim.removesuffix("|1")
        field = Dims._fields.index(name) if name in SIZE_NAMES else None
        return cls(name, None, field, dim != name)


class _Missing:
    def __repr__(self) -> str:
        return "<required>"


MISSING = _Missing()
Default = Callable[[Dims], Any]


class _Watch:
    """A `Dims` that records which of its fields a default reads."""

    def __init__(self, dims: Dims) -> None:
        self._dims = dims
        self.read: list[str] = []

    def __getattr__(self, name: str) -> Any:
        names = ("num_q_heads", "num_kv_heads") if name == "group_size" else (name,)
        for n in names:
            if n in Dims._fields and n not in self.read:
                self.read.append(n)
        return getattr(self._dims, name)


class Limit(NamedTuple):
    """The numbers that a scalar param takes: finite ones from `least` on, or above it.

    remedy: what to do instead, for the error message. where_not: the name of a flag of the same
    variant, and what takes the place of `least` where that is False.
    """

    least: int
    remedy: str
    above: bool = False
    where_not: tuple[str, int] | None = None

    def check(self, name: str, value: float, value_of: Callable[[str], Any]) -> None:
        """Raises ParamError for another number. value_of: gives the variant's params by name."""
        least, condition = self.least, ""
        if self.where_not is not None:
            flag, least_without = self.where_not
            if not value_of(flag):
                least, condition = least_without, f" where {flag} is False"
        if (value > least if self.above else value >= least) and value < math.inf:
            return
        wanted = f"a finite number above {least}" if self.above else f"at least {least}"
        raise ParamError(f"param {name!r} must be {wanted}{condition}, got {value}; {self.remedy}")


class Param:
    """One declared param, a descriptor whose value is that of the instance.

    kind: ``scalar`` (int or float at run time), ``static`` (a bool or string: part of the
    structure) or ``tensor``.
    """

    def __init__(
        self, kind: str, default: Any, dims: tuple[str | int, ...] = (),
        dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    ) -> None:  # fmt: skip
        self.kind = kind
        self.default = default
        self.dims = dims
        self._sizes = tuple(map(_Size.of, dims))
        self.dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype
        self.limit: Limit | None = None
        self.name = ""
        self.type: type = float
        self._made: dict[object, Any] = {}
        self._reads: set[tuple[str, ...]] = set()

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.settle(inspect.get_annotations(owner).get(name))

    def settle(self, annotation: Any) -> None:
        """Fix a scalar's type by its annotation, or by its default."""
        if self.kind == "tensor":
            return
        text = getattr(annotation, "__name__", str(annotation))
        text = text.replace("| None", "").removeprefix("Optional[").strip("'\"] ")
        named = {"int": int, "float": float, "bool": bool, "str": str}.get(text)
        if named is None:
            named = type(self.default) if isinstance(self.default, int | float | str) else float
        self.type = named
        if named in (bool, str):
            self.kind = "static"

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        if obj is None:
            return self
        if self.default is MISSING or callable(self.default):
            raise AttributeError(
                f"{self.name!r} of {type(obj).__name__} has no value yet: it is given at the call"
            )
        return self.default

    def make_default(self, dims: Dims) -> Any:
        """The default for a call of these dims; a function's result is kept for equal dims."""
        if not callable(self.default):
            return self.default
        for read in self._reads:
            key = _memo_key(read, dims)
            if key in self._made:
                return self._made[key]
        watch = _Watch(dims)
        value = _made(self.default, watch, dims.device)
        if dims.device.type == "cuda":
            if is_capturing(dims.device):
                return value  # in the graph's memory, computed at its replays
            # Once per default, so that calls on other streams see the values.
            torch.cuda.synchronize(dims.device)
        if len(self._made) >= _KEPT_DEFAULTS:
            self._made.clear()
        read = tuple(watch.read)
        self._reads.add(read)
        self._made[_memo_key(read, dims)] = value
        return value

    def check(self, name: str, value: Any) -> Any:
        """The value in its canonical type; ParamError for one of the wrong kind."""
        if value is None and self.default is None:
            return value
        if self.kind == "tensor":
            return self._check_tensor(name, value)
        if self.kind == "static":
            if not isinstance(value, self.type):
                raise ParamError(
                    f"param {name!r} expects a {self.type.__name__}, got "
                    f"{_describe(value)}; it is part of the variant's structure"
                )
            return value
        if type(value) is self.type:
            if type(value) is int and not -(2**63) <= value < 2**63:
                raise ParamError(
                    f"param {name!r} does not fit 64 bits, got {value}; scalar params hold "
                    "integers up to 2**53"
                )
            return value
        if isinstance(value, torch.Tensor | builtins.bool | str) or not isinstance(
            value, numbers.Real
        ):
            remedy = (
                "; pass a Python number, or declare the param with fa.tensor()"
                if isinstance(value, torch.Tensor)
                else ""
            )
            raise ParamError(
                f"param {name!r} expects a number ({self.type.__name__}), got "
                f"{_describe(value)}{remedy}"
            )
        if self.type is int and not isinstance(value, numbers.Integral):
            raise ParamError(f"param {name!r} expects an int, got {_describe(value)}")
        return self.check(name, self.type(value))

    def _check_tensor(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            raise ParamError(
                f"param {name!r} expects a tensor of shape [{self._dims_text()}], got "
                f"{_describe(value)}; pass {self._made_of(name, value)}"
            )
        if type(value) not in PLAIN or value.is_nested:
            refuse_unreadable(name, value)
        if value.dim() != len(self.dims):
            remedy = ""
            missing = self._sizes[: max(0, len(self.dims) - value.dim())]
            if missing and all(size.may_be_one for size in missing):
                remedy = f"; pass {name}[{', '.join(['None'] * len(missing))}]"
            elif len(missing) == 1 and self.dims[0] == "batch":
                remedy = f"; for a batch of one pass {name}[None]"
            elif self.dims == ("num_q_heads",) and value.dim() == 2:
                remedy = f"; for values of each request, write a score_mod that reads {name}[b, h]"
            raise ParamError(
                f"param {name!r} expects {len(self.dims)} dims [{self._dims_text()}], got shape "
                f"{list(value.shape)}{remedy}"
            )
        if self.dtypes is not None and value.dtype not in self.dtypes:
            wanted = " or ".join(str(d).removeprefix("torch.") for d in self.dtypes)
            raise ParamError(
                f"param {name!r} expects dtype {wanted}, got "
                f"{str(value.dtype).removeprefix('torch.')}; convert it with `.to(...)`"
            )
        if value.dtype not in DTYPE_NAMES:
            raise ParamError(
                f"param {name!r} has dtype {value.dtype}, which hooks cannot read; convert it to a "
                "bool, integer or real floating dtype"
            )
        return value

    def _made_of(self, name: str, value: Any) -> str:
        """A tensor made of a number or a list of numbers, in Python, for messages."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            sizes = "".join(f"{str(d).removesuffix('|1')}, " for d in self.dims).rstrip()
            sizes = sizes if len(self.dims) == 1 else sizes.rstrip(",")
            return f"torch.full(({sizes}), {value})"
        is_list = isinstance(value, list | tuple)
        return f"torch.tensor({name})" if is_list else "a torch.Tensor"

    def _dims_text(self) -> str:
        return ", ".join(str(d) for d in self.dims)

    def check_dims(
        self, name: str, value: torch.Tensor, dims: Dims, free: dict[str, tuple[int, str]]
    ) -> None:
        """Compare the shape with the call's dims; sizes of the same free name must be equal."""
        if value.device != dims.device and (value.dim() > 0 or value.device.type != "cpu"):
            raise ParamError(
                f"param {name!r} is on {value.device}, the call on {dims.device}; move it with "
                f"`.to({str(dims.device)!r})`"
            )
        for axis, (size, wanted) in enumerate(zip(value.shape, self._sizes, strict=True)):
            if size == 1 and wanted.may_be_one:
                continue
            other = ""
            if wanted.number is not None:
                expected = wanted.number
            elif wanted.field is not None:
                expected = dims[wanted.field]  # type: ignore[assignment]  # a size
                if expected < 0:
                    continue
            else:
                expected, other = free.setdefault(wanted.name, (size, name))
            if size == expected:
                continue
            reason = f"{wanted.name}={expected}" if wanted.name else f"{expected}"
            reason += f", as {other!r} has" if other else ""
            raise ParamError(
                f"param {name!r} expects [{self._dims_text()}] with {reason} at dim {axis}, "
                f"got shape {list(value.shape)}; pass a tensor whose dim {axis} has "
                f"{expected} elements"
            )


def _made(default: Default, dims: Any, device: torch.device) -> Any:
    """The value of a default: an ordinary tensor on the device, which may be cached."""
    if torch.get_num_threads() > 1:
        _C.refuse_stranded()  # torch may compute the default on several threads
    autocast = torch._C._is_any_autocast_enabled()
    plain = is_quiet() and not (autocast or torch.is_inference_mode_enabled())
    with contextlib.nullcontext() if plain else outside_modes():
        value = default(dims)
        moves = isinstance(value, torch.Tensor) and value.device != device
        return value.to(device) if moves else value


_KEPT_DEFAULTS = 64  # of one param, for different dims


def _memo_key(read: tuple[str, ...], dims: Dims) -> tuple[object, ...]:
    return (read, dims.device, torch.get_default_dtype(), *(getattr(dims, n) for n in read))


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if problem := unreadable(value):
            return f"a tensor that {problem.partition('; ')[0]}"
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, int | float | str | bytes | None):
        return f"{type(value).__name__} {value!r}"
    return type(value).__name__


def scalar(default: Any = MISSING) -> Any:
    """Declare a number of a variant: ``cap: float = fa.scalar(30.0)``.

    default: an int or float, or a function of the call's `Dims`; without one the number must be
    given. It reaches the kernel at run time: a new value never recompiles. A bool or str is part
    of the variant's structure instead.
    """
    return Param("scalar", default)


def tensor(
    *dims: str | int,
    default: Any = MISSING,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
) -> Any:
    """Declare a tensor of a variant: ``slopes: torch.Tensor = fa.tensor("num_q_heads")``.

    dims: one per dim of the tensor: a size of the call (``batch``, ``num_q_heads``,
    ``num_kv_heads``, ``q_len``, ``kv_len``, ``head_dim``, ``head_dim_v``), an int, or a free name
    that must agree wherever it is used in the variant; ``batch|1`` also takes a dim of 1, which
    reads are clamped to: a broadcast. default: a tensor, None (the param may be
    left out), or a function of the call's `Dims`. dtype: one dtype or several; None: any.
    """
    for d in dims:
        if not isinstance(d, str | int):
            raise VariantError(f"a dim of fa.tensor is a name or an int, got {type(d).__name__}")
    return Param("tensor", default, dims, dtype)


class Declared(NamedTuple):
    """A param of a variant tree: its full name, its declaration and the variant it belongs to."""

    name: str
    param: Param
    owner: Any


ENGINE_PREFIX = "placed_"
"""Of params that the engine adds to a variant, such as those of `placed.Places`."""

COMPUTED = ("_shape", "_declared")
"""Attributes of a variant that making it computes: its copies leave them out."""

PARTS = "_parts"
"""The attribute with the parts of a composed variant, where it is needed as a path to them."""


def declared_params(variant: Any) -> tuple[Declared, ...]:
    """The params of a variant and its parts.

    A function, as every public attribute of `Variant` is a name that a user's class may not have.
    """
    found: tuple[Declared, ...] = variant._declared
    return found


def parts_of(variant: Any) -> tuple[Any, ...]:
    """The variants that a composed one was made of; none for any other."""
    found: tuple[Any, ...] = getattr(variant, PARTS, ())
    return found


def resolve(
    declared: Sequence[Declared], dims: Dims, given: Mapping[str, object], what: str
) -> list[Any]:
    """The value of each declared param for one call: given by keyword, set, or the default."""
    values: list[Any] = []
    free: dict[str, tuple[int, str]] = {}
    used, limited = 0, False
    for name, param, owner in declared:
        if name in given:
            value = given[name]
            used += 1
        else:
            value = owner.__dict__.get(param.name, MISSING)
            if value is MISSING:
                value = param.make_default(dims)
            if value is MISSING:
                refuse_unknown(declared, given, what)  # a misspelt name may be what is missing
                raise ParamError(
                    f"{what} needs the param {name!r}"
                    + (f" [{param._dims_text()}]" if param.kind == "tensor" else "")
                    + f"; pass {name}=... at the call or when making the variant"
                )
        value = param.check(name, value)
        if param.kind == "tensor" and value is not None:
            param.check_dims(name, value, dims, free)
        limited = limited or param.limit is not None
        values.append(value)
    if used != len(given):
        refuse_unknown(declared, given, what)
    if limited:
        _check_limits(declared, values)
    return values


def _check_limits(declared: Sequence[Declared], values: Sequence[Any]) -> None:
    known: dict[int, dict[str, Any]] = {}
    for d, value in zip(declared, values, strict=True):
        known.setdefault(id(d.owner), {})[d.param.name] = value
    for (name, param, owner), value in zip(declared, values, strict=True):
        if param.limit is not None:
            param.limit.check(name, value, known[id(owner)].__getitem__)


def refuse_unknown(declared: Sequence[Declared], given: Mapping[str, object], what: str) -> None:
    """Raises ParamError for a name that is no declared param."""
    known = [d.name for d in declared if not d.name.startswith(ENGINE_PREFIX)]
    for name in given:
        if name not in known:
            raise unknown_param(what, name, known, _OPTIONS)


_OPTIONS = (
    "scale", "q_offset", "kv_len", "return_lse", "partial", "out", "lse", "target",
    "max_q_len", "max_kv_len", "sparsity",
)  # fmt: skip
"""Options of calls; none has all of them."""


def unknown_param(
    what: str, name: str, known: Sequence[str], options: Sequence[str] = ()
) -> ParamError:
    """The error for a param that a variant does not have, with the most similar name, or with what
    stands for an argument of another library.

    known, options: names of params and of options of calls.
    """
    import difflib  # for errors only

    # For a single match heapq creates an object(), which Dynamo cannot trace.
    near = difflib.get_close_matches(name, [*known, *options], 2, 0.6)[:1]
    if not near:  # short names: c for cc
        near = [n for n in known if n.startswith(name) or name.startswith(n)][:1]
    if not near:  # a part of the name: cap for logits_soft_cap
        near = [n for n in known if n in name.split("_")][:1]
    if name in COUNTERPARTS and not (near and near[0] in known):
        return ParamError(f"there is no argument {name!r}: {COUNTERPARTS[name]}")
    text = f"{what} has no param {name!r}; "
    text += f"its params are {', '.join(known)}" if known else "it has no params"
    if name in options:
        text += f"; {name} is an option of other calls, see this one's signature"
    elif near:
        kind = "the option " if near[0] in options else ""
        text += f"; did you mean {kind}{near[0]}=?"
    return ParamError(text)


# --- the normaliser ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Softmax:
    """Softmax over the kept keys; with a sink sigma, exp(sigma) joins the denominator.

    sink: None, a number, a tensor [num_q_heads] (or [batch, num_q_heads], or 0-dim), the name of
    a param of the variant holding one, or a function (b, h) of 0-dim int32 tensors. `lse`
    includes it. Source: gpt-oss' attention sinks.

    >>> fa.variant(normalizer=fa.Softmax(sink=torch.zeros(8)))  # softmax-off-by-one
    """

    sink: Any = None

    __fajit_names__ = frozenset({"sink"})


@dataclass(frozen=True)
class Pointwise:
    """Weights that are a function of one score: out = scale * sum_j fn(score_j) v_j.

    fn: a function of the fp32 score; masked pairs add 0. scale: None (1), a number, or a function
    (b, h, q_idx). Asking for lse raises. Source: sigmoid attention (arXiv 2409.04431).

    >>> fa.variant(normalizer=fa.Pointwise(torch.sigmoid))
    """

    fn: Callable[[Any], Any]
    scale: Any = None

    __fajit_names__ = frozenset({"fn", "scale"})


Normalizer = Softmax | Pointwise


def is_default(normalizer: Any) -> bool:
    """Whether the normaliser is a softmax without a sink."""
    return normalizer is None or isinstance(normalizer, Softmax) and normalizer.sink is None


def normalizer_hooks(normalizer: Any, owner: Any) -> dict[str, Callable[..., Any]]:
    """The hooks ``sink``, ``pointwise`` and ``pointwise_scale`` of a normaliser.

    owner: the variant (or the proxy of it) whose params a sink may name.
    """
    if normalizer is None:
        return {}
    if isinstance(normalizer, Softmax):
        return {} if normalizer.sink is None else {"sink": _sink(normalizer.sink, owner)}
    if isinstance(normalizer, Pointwise):
        hooks: dict[str, Callable[..., Any]] = {"pointwise": normalizer.fn}
        scale = normalizer.scale
        if scale is not None:
            hooks["pointwise_scale"] = scale if callable(scale) else lambda b, h, q_idx: scale
        return hooks
    raise VariantError(
        f"a normalizer is fa.Softmax(...) or fa.Pointwise(...), got {type(normalizer).__name__}"
    )


def _sink(sink: Any, owner: Any) -> Callable[..., Any]:
    if isinstance(sink, str):
        if not hasattr(type(owner), sink) and not hasattr(owner, sink):
            raise VariantError(f"fa.Softmax(sink={sink!r}) names no param of the variant")
        sink = getattr(owner, sink)
    if callable(sink):
        return sink  # type: ignore[no-any-return]

    def hook(b: Any, h: Any) -> Any:
        rank = getattr(sink, "ndim", 0)
        if rank > 2:
            raise VariantError(
                f"a sink is a tensor of at most 2 dims [batch, num_q_heads], got {rank} dims"
            )
        return sink[b, h] if rank == 2 else sink[h] if rank == 1 else sink

    return hook
