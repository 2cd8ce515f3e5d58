"""Compositions of variants: ``&``, ``|``, ``~``, `Variant.named`, `only` and `without`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from flashattn_jit.errors import VariantError
from flashattn_jit.variants.ir import ir
from flashattn_jit.variants.ir.ir import USER_HOOKS
from flashattn_jit.variants.params import PARTS, RESERVED, Declared, Normalizer, is_default
from flashattn_jit.variants.variant import FULL, CppHook, Variant


class ComposedVariant(Variant):
    """``a & b``, ``a | b``, ``~a``, a variant with renamed params or with some of its hooks."""

    __fajit_names__ = frozenset({PARTS})
    _parts: tuple[Variant, ...]
    _operation: str
    _prefix: str
    _kept: tuple[str, ...]
    _name: str

    def __init__(
        self,
        operation: str,
        parts: tuple[Variant, ...],
        prefix: str = "",
        kept: tuple[str, ...] = (),
    ) -> None:
        declared = [
            Declared(f"{prefix}_{d.name}" if prefix else d.name, d.param, d.owner)
            for part in parts
            for d in part._declared
        ]
        _check_names(declared, parts)
        self.__dict__.update(_operation=operation, _parts=parts, _prefix=prefix, _kept=kept)
        self.__dict__["_shape"] = (operation, prefix, kept, *(p._shape for p in parts))
        self.__dict__["_declared"] = tuple(declared)

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = ("_operation", "_parts", "_prefix", "_kept")
        self.__init__(*(state[name] for name in names))  # type: ignore[misc]

    @property
    def name(self) -> str:
        """The expression without arguments: ``Causal & ~Chunked``; made once, as calls read it."""
        if "_name" not in self.__dict__:
            self.__dict__["_name"] = self._expression()
        return self._name

    def _expression(self) -> str:
        looser = {"and": ("or",), "not": ("and", "or")}.get(self._operation, ())
        names = [f"({p.name})" if _joint(p) in looser else p.name for p in self._parts]
        joint = {"and": " & ", "or": " | "}.get(self._operation)
        if joint is not None:
            return joint.join(names)
        return f"~{names[0]}" if self._operation == "not" else names[0]

    def _normalizer(self) -> Normalizer | None:
        if self._operation == "only" and "normalizer" not in self._kept:
            return None
        found = [n for part in self._parts if (n := part._normalizer()) is not None]
        return found[0] if found else None

    def hooks(self) -> dict[str, Any]:
        """The hooks of the parts, combined."""
        parts = [p.hooks() for p in self._parts]
        if self._operation == "renamed":
            return parts[0]
        if self._operation == "only":
            kept = (*self._kept, *(ir.NORMALIZER_HOOKS if "normalizer" in self._kept else ()))
            return {name: hook for name, hook in parts[0].items() if name in kept}
        if self._operation == "not":
            return {"mask_mod": _inverted(parts[0]["mask_mod"])}
        if self._operation == "or":
            return {"mask_mod": _joined(parts[0]["mask_mod"], parts[1]["mask_mod"], "or")}
        combined: dict[str, Any] = {}
        for hook in ir.HOOKS:
            present = [p[hook] for p in parts if hook in p]
            if len(present) == 1:
                combined[hook] = present[0]
            elif present:
                combined[hook] = _both(hook, present[0], present[1])
        return combined

    def __repr__(self) -> str:
        texts = [repr(p) for p in self._parts]
        joint = {"and": " & ", "or": " | "}.get(self._operation)
        if joint is not None:
            return f"({joint.join(texts)})"
        return f"~{texts[0]}" if self._operation == "not" else texts[0]


def _joint(part: Variant) -> str:
    """The operation in the name of a part; empty for a variant that is not composed."""
    while isinstance(part, ComposedVariant) and part._operation == "renamed":
        part = part._parts[0]
    return part._operation if isinstance(part, ComposedVariant) else ""


def compose(operation: str, *parts: Variant) -> Variant:
    """The composed variant; raises VariantError for parts that cannot be combined."""
    hooks = [present_hooks(p) for p in parts]
    if operation != "and":
        symbol = {"or": "|", "not": "~"}[operation]
        for part, present in zip(parts, hooks, strict=True):
            if present != {"mask_mod"}:
                has = ", ".join(sorted(present)) or "no mask"
                raise VariantError(
                    f"`{symbol}` combines variants that have a mask and nothing else; {part.name} "
                    f"has {has}"
                )
    elif all("normalizer" in present for present in hooks):
        raise VariantError(
            f"{parts[0].name} and {parts[1].name} both have a normalizer; a variant has one"
        )
    made = ComposedVariant(operation, parts)
    _check_cpp(parts)
    return made


def present_hooks(part: Variant) -> set[str]:
    """The names of a variant's hooks, without calling methods of the user's class."""
    if isinstance(part, ComposedVariant):
        found = {name for p in part._parts for name in present_hooks(p)}
        return found & {*part._kept} if part._operation == "only" else found
    found = {h for h in USER_HOOKS if getattr(part, h, None) is not None}
    normalizer = getattr(part, "normalizer", None)
    return found if is_default(normalizer) else found | {"normalizer"}


def shared_hooks(one: Variant, other: Variant) -> list[str]:
    """The names of hooks for which two variants have a function in common, whatever its params."""

    def functions(part: Variant, hook: str) -> set[int]:
        return {id(getattr(f, "__func__", f)) for f in _leaf_hooks(part, hook)}

    return [hook for hook in USER_HOOKS if functions(one, hook) & functions(other, hook)]


def _check_cpp(parts: tuple[Variant, ...]) -> None:
    for hook in ("score_mod", "mask_mod"):
        leaves = [leaf for part in parts for leaf in _leaf_hooks(part, hook)]
        has_text = any(isinstance(leaf, CppHook) for leaf in leaves)
        if has_text and (len(leaves) > 1 or len(parts) == 1):
            raise VariantError(
                f"a {hook} given as C++ text cannot be combined with another; write one text"
            )


def _leaf_hooks(part: Variant, hook: str) -> list[Any]:
    if hook not in present_hooks(part):
        return []
    if isinstance(part, ComposedVariant):
        return [leaf for p in part._parts for leaf in _leaf_hooks(p, hook)]
    return [getattr(part, hook)]


def rename(part: Variant, prefix: str) -> Variant:
    """`part` with ``prefix_`` before the names of its params."""
    if not prefix.isidentifier():
        raise VariantError(f"named() expects an identifier, got {prefix!r}")
    return ComposedVariant("renamed", (part,), prefix)


def only(part: Variant, hooks: Collection[str]) -> Variant:
    """`part` with those of its hooks that are among `hooks`, and the params of what has them."""
    present = present_hooks(part)
    kept = present & {*hooks}
    if kept == present:
        return part
    if not kept:
        return FULL
    if isinstance(part, ComposedVariant) and part._operation == "and":
        left = [p for p in (only(p, kept) for p in part._parts) if present_hooks(p)]
        return left[0] if len(left) == 1 else ComposedVariant("and", tuple(left))
    if isinstance(part, ComposedVariant) and part._operation == "renamed":
        return rename(only(part._parts[0], kept), part._prefix)
    return ComposedVariant("only", (part,), kept=tuple(sorted(kept)))


def _check_names(declared: list[Declared], parts: tuple[Variant, ...]) -> None:
    seen: set[str] = set()
    for d in declared:
        if d.name in seen:
            names = " and ".join(p.name for p in parts)
            raise VariantError(
                f"{names} both have a param {d.name!r}; tell them apart with .named(...), such as "
                f"`{parts[-1].name}(...).named('local')`, which makes it 'local_{d.name}'"
            )
        if d.name in RESERVED:
            raise VariantError(f"a param may not be called {d.name!r}; choose another prefix")
        seen.add(d.name)


# --- combined hooks, which are called with proxies by the tracer, with tensors by the reference ---


def _as_bool(x: Any) -> Any:
    return x if isinstance(x, bool) else x.bool()


def _joined(first: Callable[..., Any], second: Callable[..., Any], how: str) -> Any:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        x = _as_bool(first(b, h, q_idx, kv_idx))
        y = _as_bool(second(b, h, q_idx, kv_idx))
        return x & y if how == "and" else x | y

    return mask_mod


def _inverted(mask: Callable[..., Any]) -> Any:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kept = _as_bool(mask(b, h, q_idx, kv_idx))
        return not kept if isinstance(kept, bool) else ~kept

    return mask_mod


def _both(hook: str, first: Callable[..., Any], second: Callable[..., Any]) -> Any:
    if hook == "mask_mod":
        return _joined(first, second, "and")

    def chained(x: Any, *rest: Any) -> Any:
        return second(first(x, *rest), *rest)

    return chained
