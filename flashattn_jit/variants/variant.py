"""`Variant`: what attention computes, as hooks and declared params, without shapes or devices.

Two forms: a class (`class SoftCap(fa.Variant)`) whose methods are hooks and whose annotated
attributes are params, and `variant(score_mod=..., mask_mod=...)` around plain functions. ``&``,
``|``, ``~`` and `named` (compose.py) combine and rename variants.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, ClassVar

import torch

from flashattn_jit.errors import ParamError, VariantError
from flashattn_jit.late_binding import upper
from flashattn_jit.variants.binding import Bound, bind
from flashattn_jit.variants.capture.objects import attribute, positional_names, uncompiled
from flashattn_jit.variants.counterparts import instead_of
from flashattn_jit.variants.ir import ir
from flashattn_jit.variants.params import (
    COMPUTED,
    MISSING,
    RESERVED,
    Declared,
    Dims,
    Normalizer,
    Param,
    Pointwise,
    Softmax,
    is_default,
    normalizer_hooks,
    scalar,
    tensor,
    unknown_param,
)

if sys.version_info >= (3, 11):
    from typing import dataclass_transform
else:
    from typing_extensions import dataclass_transform  # a requirement of torch

__all__ = ["Bound", "CppHook", "Dims", "Pointwise", "Softmax", "Variant", "as_variant", "cpp",
           "is_pointwise", "scalar", "tensor", "variant"]  # fmt: skip

_NO_PARAMS: Mapping[str, object] = types.MappingProxyType({})


class CppHook:
    """A hook given as C++ text; see `cpp`."""

    __slots__ = ("reference", "text")
    __fajit_constant__ = True

    def __init__(self, text: str, reference: Callable[..., Any] | None) -> None:
        self.text = text
        self.reference = reference

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CppHook) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"cpp({self.text!r})"


def cpp(text: str, *, reference: Callable[..., Any] | None = None) -> Any:
    """A scalar hook as C++: the body of a function (with ``return``), or one expression.

    text sees the hook's arguments by their names (``score``, ``b``, ``h``, ``q_idx``, ``kv_idx``:
    float and int32_t) and the variant's declared params that it names: scalars as values, tensors
    as functions of their indices (``slopes(h)``). It may be a `score_mod`, a `mask_mod`, or the
    function of `Pointwise`; row hooks take Python only. reference: the same hook in torch, for
    `Variant.reference` and `Variant.verify`, which raise without it.

    >>> fa.variant(score_mod=fa.cpp("return score + 0.5f * (kv_idx - q_idx);",
    ...                             reference=lambda s, b, h, q, k: s + 0.5 * (k - q)))
    """
    if not isinstance(text, str) or not text.strip():
        got = repr(text) if isinstance(text, str) else type(text).__name__
        raise VariantError(f"fa.cpp expects C++ text, got {got}")
    text = text.strip()
    return CppHook(text if "return" in text else f"return {text.rstrip(';')};", reference)


# No field_specifiers: for type checkers `fa.scalar()` is then a default value, so that constructors
# may omit params that a call gives.
@dataclass_transform()
class Variant:
    """What attention computes: subclass it, annotate params, define hooks as methods.

    Hooks are functions of 0-dim tensors; the row hooks take one fp32 row of rank 1:

    * ``score_mod(score, b, h, q_idx, kv_idx)``, ``mask_mod(b, h, q_idx, kv_idx)``
    * ``query_mod(row, b, h, q_idx)``, ``key_mod(row, b, kv_h, kv_idx)``, ``value_mod`` likewise,
      ``output_mod(row, lse, b, h, q_idx)``
    * ``normalizer``: `Softmax` or `Pointwise`, or a method without arguments that returns one.

    Annotated attributes are params: `scalar` and `tensor` ones may be given when the variant is
    made or at each call; plain ones only when it is made.

    >>> class SoftCap(fa.Variant):
    ...     cap: float = fa.scalar(30.0)
    ...     def score_mod(self, score, b, h, q_idx, kv_idx):
    ...         return self.cap * torch.tanh(score / self.cap)
    >>> out = fa.attention(q, k, v, SoftCap(cap=50.0))

    Raises VariantError for ill-formed classes, ParamError for unknown or wrongly typed params.
    """

    __fajit_params__: ClassVar[dict[str, Param]] = {}
    __fajit_fields__: ClassVar[frozenset[str]] = frozenset()
    __fajit_positional__: ClassVar[tuple[str, ...]] = ()
    __fajit_names__: ClassVar[frozenset[str]] = frozenset({*ir.USER_HOOKS, "normalizer"})
    __fajit_made_by__: ClassVar[tuple[Any, ...]]
    _shape: Any
    _declared: tuple[Declared, ...]
    _twin: Variant | None = None
    """Of a variant whose numbers are placeholders: the same with other placeholders, whose graphs
    are equal unless a hook reads a placeholder where it is not replaced."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__fajit_view__" in cls.__dict__:
            return
        params: dict[str, Param] = {}
        fields: set[str] = set()
        annotated: dict[str, None] = {}
        for base in reversed(cls.__mro__):
            annotations = inspect.get_annotations(base)
            annotated.update(dict.fromkeys(annotations))
            for name, value in base.__dict__.items():
                if isinstance(value, Param):
                    params[name] = value
                elif name in annotations and base is not Variant and not name.startswith("_"):
                    params.pop(name, None)
                    fields.add(name)
            for name in annotations:
                if name not in base.__dict__ and base is not Variant and name not in params:
                    fields.add(name)
        for name in params:
            if name in RESERVED or name in ir.USER_HOOKS or name.startswith("_"):
                raise VariantError(
                    f"{cls.__name__}.{name}: a param may not be called {name!r}, which is an "
                    "argument of the operation or a hook; rename it"
                )
        cls.__fajit_params__ = params
        cls.__fajit_fields__ = frozenset(f for f in fields - set(params) if not f.startswith("__"))
        known = cls.__fajit_fields__ | params.keys()
        cls.__fajit_positional__ = tuple(n for n in annotated if n in known)
        for hook in ir.USER_HOOKS:
            _check_arity(cls, hook)

    def __new__(cls, *args: Any, **kwargs: Any) -> Variant:
        # Not in __init__, which a user's class may override.
        self = super().__new__(cls)
        declared = tuple(Declared(n, p, self) for n, p in cls.__fajit_params__.items())
        self.__dict__.update(_shape=cls, _declared=declared)
        return self

    def __init__(self, *args: Any, **values: Any) -> None:
        cls = type(self)
        if args:
            values = self._named_values(args, values)
        for name, value in values.items():
            if name in cls.__fajit_params__:
                value = cls.__fajit_params__[name].check(name, value)
            elif name not in cls.__fajit_fields__:
                known = [*cls.__fajit_params__, *sorted(cls.__fajit_fields__)]
                raise unknown_param(cls.__name__, name, known)
            self.__dict__[name] = value
        for name in cls.__fajit_fields__:
            if name not in self.__dict__ and not hasattr(cls, name):
                raise ParamError(f"{cls.__name__} needs {name!r} when it is made")
        if not torch.compiler.is_dynamo_compiling():  # there a call checks them, when it runs
            for name in values:
                _check_limit(self, name, self.__dict__[name])

    def __reduce__(self) -> Any:
        # A class that a library function made is pickled as that function and its arguments.
        made_by = type(self).__dict__.get("__fajit_made_by__")
        if made_by is None:
            return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]
        return _made_again, made_by, self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        # `_declared` refers to its owner: `__new__` makes that of a copy.
        return {n: v for n, v in self.__dict__.items() if n not in COMPUTED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @classmethod
    def _named_values(cls, args: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
        """All values by name; positional ones are in the order of the annotations."""
        names = cls.__fajit_positional__
        if len(args) > len(names):
            raise ParamError(
                f"{cls.__name__} takes at most {len(names)} positional values "
                f"({', '.join(names)}), got {len(args)}"
            )
        twice = [n for n in names[: len(args)] if n in values]
        if twice:
            raise ParamError(f"{cls.__name__} got {twice[0]!r} twice, by position and by name")
        return {**dict(zip(names, args, strict=False)), **values}

    def __setattr__(self, name: str, value: Any) -> None:
        param = type(self).__fajit_params__.get(name)
        value = value if param is None else param.check(name, value)
        if not torch.compiler.is_dynamo_compiling():
            _check_limit(self, name, value)
        self.__dict__[name] = value

    # --- structure ---------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The variant's name in messages."""
        return str(self.__dict__.get("_name", type(self).__name__))

    @property
    def param_names(self) -> tuple[str, ...]:
        """The params that a call may give by keyword."""
        return tuple(d.name for d in self._declared)

    def hooks(self) -> dict[str, Any]:
        """The hooks of the variant by name (`ir.HOOKS`): callables, or `CppHook` texts."""
        found = {h: f for h in ir.USER_HOOKS if (f := getattr(self, h, None)) is not None}
        found.update(normalizer_hooks(self._normalizer(), self))
        return {h: found[h] for h in ir.HOOKS if h in found}

    def _normalizer(self) -> Normalizer | None:
        normalizer = getattr(self, "normalizer", None)
        if callable(normalizer) and not isinstance(normalizer, Softmax | Pointwise):
            normalizer = normalizer()
        return None if is_default(normalizer) else normalizer

    def bind(self, dims: Dims, params: Mapping[str, object] = _NO_PARAMS) -> Bound:
        """The variant for one call: its IR, and the tensors and numbers of its slots.

        A known structure costs a few microseconds; a new one is traced. Raises ParamError for
        params that are missing, unknown or do not fit `dims`, TraceError for hooks that cannot
        become a kernel.
        """
        return bind(self, dims, params)

    # --- composition -------------------------------------------------------------------------

    def __and__(self, other: Variant | Callable[..., object]) -> Variant:
        """Both: masks and-ed, score and row hooks chained left to right; `other` may be a bare
        score_mod or mask_mod."""
        return _compose("and", self, other)  # type: ignore[no-any-return]

    def __rand__(self, other: Variant | Callable[..., object]) -> Variant:
        return _compose("and", other, self)  # type: ignore[no-any-return]

    def __or__(self, other: Variant | Callable[..., object]) -> Variant:
        """Either mask; both must have nothing but a mask."""
        return _compose("or", self, other)  # type: ignore[no-any-return]

    def __ror__(self, other: Variant | Callable[..., object]) -> Variant:
        return _compose("or", other, self)  # type: ignore[no-any-return]

    def __invert__(self) -> Variant:
        """The opposite mask; the variant must have nothing but a mask."""
        return _compose("not", self)  # type: ignore[no-any-return]

    def named(self, prefix: str) -> Variant:
        """The same variant with ``prefix_`` before the names of its params.

        >>> fa.SlidingWindow(64).named("local") | fa.SlidingWindow(4096).named("far")
        """
        return upper("rename")(self, prefix)  # type: ignore[no-any-return]

    def only(self, *hooks: str) -> Variant:
        """The same variant with these of its hooks, and no other.

        >>> variant.only("key_mod", "value_mod")  # what `fa.append_paged_kv(transform=)` applies
        """
        return upper("only")(self, _known_hooks(hooks))  # type: ignore[no-any-return]

    def without(self, *hooks: str) -> Variant:
        """The same variant without these hooks: over keys that were stored rotated, for example,

        >>> fa.RoPE().without("key_mod") & fa.Causal()
        """
        left = {*_HOOK_NAMES} - _known_hooks(hooks)
        return upper("only")(self, left)  # type: ignore[no-any-return]

    # --- running -----------------------------------------------------------------------------

    def reference(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        q_offset: Any = 0,
        kv_len: torch.Tensor | None = None,
        return_lse: bool = False,
        partial: bool = False,
        dtype: torch.dtype = torch.float64,
        **params: object,
    ) -> Any:
        """What `fa.attention` means, by eager torch in `dtype`: out, or (out, lse).

        The hooks run as they are on every pair: O(q_len * kv_len) memory. See
        `reference.attention_reference` for shapes and what each dtype computes in.
        """
        out, lse = upper("attention_reference")(
            q, k, v, self, scale=scale, q_offset=q_offset, kv_len=kv_len, dtype=dtype,
            partial=partial, params=params,
        )  # fmt: skip
        return (out, lse) if return_lse else out

    def verify(
        self,
        dims: Dims | Mapping[str, int] | Sequence[int] | None = None,
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        target: str | None = None,
        seed: int = 0,
        raise_on_failure: bool = True,
        **params: object,
    ) -> Any:
        """Compare the compiled kernels with the reference on about 40 inputs: a `VerifyReport`.

        dims: sizes that the params fit; those left out are of the tensors that the variant holds,
        else chosen. dtypes: of q, k and v; all that the target takes by default. target: the
        host's best by default. seed: of the random inputs. raise_on_failure: raise
        VerificationError, which holds the report, where a case fails. params: the variant's; a
        function of `Dims` gives each case its own, such as ``slopes=lambda dims:
        torch.rand(dims.num_q_heads)``; cases that a given tensor does not fit are skipped.

        >>> print(fa.ALiBi(slopes=torch.rand(12)).verify())
        """
        return upper("verify")(
            self, dims, dtypes=dtypes, target=target, seed=seed,
            raise_on_failure=raise_on_failure, **params,
        )  # fmt: skip

    def explain(
        self,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        *,
        dims: Dims | Mapping[str, int] | Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        q_offset: int | torch.Tensor | str = 0,
        kv_len: torch.Tensor | None = None,
        plot: str | PathLike[str] | None = None,
        target: str | None = None,
        device: str | int | None = None,
        **params: object,
    ) -> Any:
        """IR, tiles, the planner's choice and source of a call: an `Explanation`.

        q, k, v: as for `fa.attention`, or dims and dtype instead of them. plot: a file to draw the
        roofline and the tile map to. target, device: the host's best by default; a GPU by name
        (``"H100"``) need not be there, and takes float16 and bfloat16.

        >>> print(fa.SlidingWindow(4096).explain(dims={"q_len": 65536, "kv_len": 65536}))
        """
        return upper("explain")(
            self, q, k, v, dims=dims, dtype=dtype, q_offset=q_offset, kv_len=kv_len, plot=plot,
            target=target, device=device, **params,
        )  # fmt: skip

    def __repr__(self) -> str:
        shown = [f"{n}={self.__dict__[n]!r}" for n in type(self).__fajit_params__
                 if not isinstance(self.__dict__.get(n, MISSING), torch.Tensor)
                 and n in self.__dict__]  # fmt: skip
        return f"{self.name}({', '.join(shown)})"


def _check_limit(variant: Variant, name: str, value: Any) -> None:
    param = type(variant).__fajit_params__.get(name)
    if param is not None and param.limit is not None:
        param.limit.check(name, value, lambda other: getattr(variant, other))


def _made_again(make: Callable[..., type[Variant]], *args: Any) -> Variant:
    made = make(*args)
    return made.__new__(made)


def _compose(operation: str, *parts: Any) -> Any:
    if not all(isinstance(p, Variant) or callable(p) for p in parts):
        return NotImplemented
    return upper("compose")(operation, *map(as_variant, parts))


_HOOK_NAMES = (*ir.USER_HOOKS, "normalizer")


def _known_hooks(hooks: Sequence[str]) -> set[str]:
    for hook in hooks:
        if hook not in _HOOK_NAMES:
            raise VariantError(f"unknown hook {hook!r}; hooks are {', '.join(_HOOK_NAMES)}")
    return {*hooks}


def _check_arity(cls: type, hook: str) -> None:
    fn = cls.__dict__.get(hook)
    if isinstance(fn, staticmethod | classmethod) or not isinstance(fn, types.FunctionType):
        return
    wanted = ir.HOOK_INPUTS[hook]
    names = positional_names(fn)
    if names is not None and len(names) != len(wanted) + 1:
        raise VariantError(
            f"{cls.__name__}.{hook} takes {len(names)} arguments without defaults; expected self, "
            f"{', '.join(wanted)}"
        )


# --- the form of functions -----------------------------------------------------------------------


class FunctionVariant(Variant):
    """A variant of plain functions; `variant` makes it."""

    def __init__(self, hooks: Mapping[str, Any], name: str) -> None:
        self.__dict__.update(hooks)
        self.__dict__["_name"] = name
        self.__dict__["_shape"] = tuple((h, structure_id(f)) for h, f in hooks.items())

    def __setstate__(self, state: dict[str, Any]) -> None:
        hooks = {n: f for n, f in state.items() if n != "_name"}
        for hook, fn in hooks.items():
            if hook != "normalizer":
                _check_hook(hook, fn)
        self.__init__(hooks, state["_name"])  # type: ignore[misc]


def structure_id(fn: Any) -> object:
    """A cheap key for a hook's structure; the extractor checks the rest."""
    if type(fn) is types.FunctionType:
        return id(fn.__code__)
    if isinstance(fn, CppHook):
        return fn.text
    if isinstance(fn, types.MethodType):
        return id(fn.__func__.__code__) if hasattr(fn.__func__, "__code__") else type(fn)
    if isinstance(fn, functools.partial):
        return ("partial", structure_id(fn.func))
    return type(fn)


def variant(
    mod: Callable[..., object] | None = None,
    /,
    *,
    score_mod: Any = None,
    mask_mod: Any = None,
    query_mod: Any = None,
    key_mod: Any = None,
    value_mod: Any = None,
    output_mod: Any = None,
    normalizer: Normalizer | None = None,
    name: str | None = None,
) -> Variant:
    """A variant of plain functions: FlexAttention's `score_mod` and `mask_mod`, and the row hooks.

    Functions may be closures, lambdas, partials, bound methods or callable objects; tensors and
    numbers that they capture are read at each call and never recompile. normalizer: `Softmax` or
    `Pointwise`. mod: a score_mod or a mask_mod, told apart by its number of arguments. Raises
    VariantError for a hook that takes another number of arguments.

    >>> fa.variant(mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    """
    given = {"query_mod": query_mod, "key_mod": key_mod, "value_mod": value_mod,
             "score_mod": score_mod, "mask_mod": mask_mod, "output_mod": output_mod}  # fmt: skip
    if mod is not None:
        if isinstance(mod, Variant):
            raise VariantError(f"{mod.name} is a variant already; join variants with `&`")
        hook, fn = _bare_hook(mod)
        if given[hook] is not None:
            raise VariantError(f"variant() got two {hook} functions; join them with `&`")
        given[hook] = fn
    hooks: dict[str, Any] = {}
    for hook, fn in given.items():
        if fn is not None:
            fn = uncompiled(fn)
            _check_hook(hook, fn)
            hooks[hook] = fn
    if not is_default(normalizer):
        normalizer_hooks(normalizer, None)
        hooks["normalizer"] = normalizer
    if name is not None and not isinstance(name, str):
        raise VariantError(f"name must be a string, got {type(name).__name__}")
    return FunctionVariant(hooks, name or _name_of(hooks))


def _name_of(hooks: Mapping[str, Any]) -> str:
    """A name such as ``score_mod(alibi) & mask_mod(window)``, without hooks given as C++ text."""
    called = {h: _function_name(fn) for h, fn in hooks.items() if h != "normalizer"}
    return " & ".join(f"{h}({name})" for h, name in called.items() if name) or "variant"


def _function_name(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, CppHook):
        return ""
    name = attribute(fn, "__name__")
    return name if isinstance(name, str) else type(fn).__name__


def _check_hook(hook: str, fn: Any) -> None:
    if isinstance(fn, CppHook):
        if hook not in ir.TEXT_HOOKS:
            raise VariantError(
                f"{hook} is given as C++ text; only score_mod, mask_mod and Pointwise take it"
            )
        return
    if not callable(fn) or isinstance(fn, Variant):
        raise VariantError(f"{hook} must be a function, got {type(fn).__name__}")
    if torch.compiler.is_dynamo_compiling():
        return  # it is checked when the graph runs
    names = positional_names(fn)
    wanted = ir.HOOK_INPUTS[hook]
    if names is not None and len(names) != len(wanted):
        raise VariantError(
            f"{hook} takes {len(names)} arguments without defaults; expected {len(wanted)}: "
            f"{', '.join(wanted)}"
        )


FULL = FunctionVariant({}, "Full")
_BY_ARITY = {4: "mask_mod", 5: "score_mod"}


def as_variant(x: Any) -> Variant:
    """`x` as a variant: None (full attention), a Variant, or a bare mask_mod or score_mod.

    The two are told apart by the number of positional arguments without defaults, as
    FlexAttention does: 4 is a mask, 5 a score. Raises VariantError for anything else, and for a
    function whose first argument is `row`, which is a row hook.
    """
    if x is None:
        return FULL
    if isinstance(x, Variant):
        return x
    hook, fn = _bare_hook(x)
    return FunctionVariant({hook: fn}, _name_of({hook: fn}))


def _bare_hook(x: Any) -> tuple[str, Any]:
    """Which hook a bare function is, and the function. Raises VariantError."""
    if isinstance(x, type) and issubclass(x, Variant):
        raise VariantError(f"got the class {x.__name__}; make a variant of it: {x.__name__}()")
    if isinstance(x, CppHook):
        raise VariantError("a bare fa.cpp hook could be a score or a mask; use fa.variant(...=)")
    if not callable(x):
        raise VariantError(
            f"expected a Variant, a score_mod or a mask_mod function, got {type(x).__name__}"
            f"{instead_of(x)}"
        )
    x = uncompiled(x)
    names = positional_names(x)
    if names is None:  # a decorated function is told by what it wraps
        call = x if inspect.isroutine(x) else attribute(x, "__call__")
        wrapped = attribute(call, "__wrapped__")
        names = positional_names(wrapped) if callable(wrapped) else None
        if names and inspect.ismethod(call):
            names = names[1:]  # what it wraps is not bound
    if names and names[0] == "row":
        raise VariantError(
            f"{_function_name(x)}({', '.join(names)}) is a row hook by its first argument; a bare "
            "function is a mask_mod or a score_mod: give it as fa.variant(query_mod=...), "
            "fa.variant(key_mod=...), fa.variant(value_mod=...) or fa.variant(output_mod=...)"
        )
    hook = _BY_ARITY.get(len(names or ()))
    if hook is None:
        raise VariantError(
            f"a bare function must take 4 arguments (mask_mod: b, h, q_idx, kv_idx) or 5 "
            f"(score_mod: score first), got {None if names is None else len(names)}"
        )
    return hook, x


def is_pointwise(variant: Variant) -> bool:
    """Whether a variant has a pointwise normaliser, and so no lse."""
    return isinstance(variant._normalizer(), Pointwise)
