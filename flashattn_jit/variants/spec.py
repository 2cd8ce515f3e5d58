"""`Variant`: what attention computes. Hooks and declared params, without shapes or devices.

Two forms: a class (`class SoftCap(fa.Variant)`, class_form.py) whose methods are hooks and whose
annotated attributes are params, and `variant(score_mod=..., mask_mod=...)` around plain functions.
``&``, ``|``, ``~`` and `named` (compose.py) make variants of variants.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch

from flashattn_jit.errors import VariantError
from flashattn_jit.variants.binding import Bound
from flashattn_jit.variants.class_form import (
    HOOK_ARGUMENTS,
    CppHook,
    Variant,
    cpp,
    positional_count,
)
from flashattn_jit.variants.normalizers import (
    Normalizer,
    Pointwise,
    Softmax,
    is_default,
    normalizer_hooks,
)
from flashattn_jit.variants.params import Dims, scalar, tensor

__all__ = ["Bound", "CppHook", "Dims", "Pointwise", "Softmax", "Variant", "as_variant", "cpp",
           "scalar", "tensor", "variant"]  # fmt: skip


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
    """A cheap first guess at a hook's structure; the extractor checks the rest."""
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
    `Pointwise`. Raises VariantError for a hook that takes another number of arguments.

    >>> fa.variant(mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    """
    given = {"query_mod": query_mod, "key_mod": key_mod, "value_mod": value_mod,
             "score_mod": score_mod, "mask_mod": mask_mod, "output_mod": output_mod}  # fmt: skip
    hooks: dict[str, Any] = {}
    for hook, fn in given.items():
        if fn is not None:
            _check_hook(hook, fn)
            hooks[hook] = fn
    if not is_default(normalizer):
        normalizer_hooks(normalizer, None)
        hooks["normalizer"] = normalizer
    if name is not None and not isinstance(name, str):
        raise VariantError(f"name must be a string, got {type(name).__name__}")
    return FunctionVariant(hooks, name or _name_of(hooks))


def _name_of(hooks: Mapping[str, Any]) -> str:
    """Such as ``score_mod(alibi) & mask_mod(window)``; hooks given as C++ text have no names."""
    called = {h: _function_name(fn) for h, fn in hooks.items() if h != "normalizer"}
    return " & ".join(f"{h}({name})" for h, name in called.items() if name) or "variant"


def _function_name(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return "" if isinstance(fn, CppHook) else str(getattr(fn, "__name__", type(fn).__name__))


def _check_hook(hook: str, fn: Any) -> None:
    if isinstance(fn, CppHook):
        if hook not in ("score_mod", "mask_mod"):
            raise VariantError(
                f"{hook} is given as C++ text; only score_mod, mask_mod and Pointwise take it"
            )
        return
    if not callable(fn) or isinstance(fn, Variant):
        raise VariantError(f"{hook} must be a function, got {type(fn).__name__}")
    if torch.compiler.is_dynamo_compiling():
        return  # which cannot tell yet; it is checked when the graph runs
    count = positional_count(fn)
    wanted = HOOK_ARGUMENTS[hook]
    if count is not None and count != len(wanted):
        raise VariantError(
            f"{hook} takes {count} arguments without defaults; expected {len(wanted)}: "
            f"{', '.join(wanted)}"
        )


FULL = FunctionVariant({}, "Full")
_BY_ARITY = {4: "mask_mod", 5: "score_mod"}


def as_variant(x: Any) -> Variant:
    """`x` as a variant: None (full attention), a Variant, or a bare mask_mod or score_mod.

    The two are told apart by the number of positional arguments without defaults, as
    FlexAttention does: 4 is a mask, 5 a score. Raises VariantError for anything else.
    """
    if x is None:
        return FULL
    if isinstance(x, Variant):
        return x
    if isinstance(x, type) and issubclass(x, Variant):
        raise VariantError(f"got the class {x.__name__}; make a variant of it: {x.__name__}()")
    if isinstance(x, CppHook):
        raise VariantError("a bare fa.cpp hook could be a score or a mask; use fa.variant(...=)")
    if not callable(x):
        raise VariantError(
            f"expected a Variant, a score_mod or a mask_mod function, got {type(x).__name__}"
        )
    hook = _BY_ARITY.get(positional_count(x) or 0)
    if hook is None:
        raise VariantError(
            f"a bare function must take 4 arguments (mask_mod: b, h, q_idx, kv_idx) or 5 "
            f"(score_mod: score first), got {positional_count(x)}"
        )
    return FunctionVariant({hook: x}, _name_of({hook: x}))
