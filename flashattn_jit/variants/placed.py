"""`placed`, `placed_heads` and `placed_keys`: variants for parts of a batch.

Where several machines share a batch, each computes some rows of a request as a request of its own,
some of the heads, or all rows with some of the keys. Hooks must see the request that the rows
belong to (its number, its lengths, its rows and slots in the whole batch), the numbers of the heads
in the whole batch, and the positions of the keys in the whole request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from flashattn_jit.errors import VariantError
from flashattn_jit.variants.builtins import CONTEXT
from flashattn_jit.variants.compose import ComposedVariant
from flashattn_jit.variants.ir.ir import HOOK_INPUTS, VariantIR
from flashattn_jit.variants.variant import CppHook, Variant, scalar, tensor


class Places(Variant):
    """Of each part, its request; and of each request, its lengths, first row and first slot."""

    placed_request: Tensor = tensor("placed_parts")
    placed_q_len: Tensor = tensor("placed_requests")
    placed_kv_len: Tensor = tensor("placed_requests")
    placed_q_row: Tensor = tensor("placed_requests")
    placed_kv_slot: Tensor = tensor("placed_requests")


class HeadPlaces(Variant):
    """The numbers of the first query head and of the first kv head of a part."""

    placed_head: int = scalar(0)
    placed_kv_head: int = scalar(0)


class KeyPlaces(Variant):
    """The first key of a rank whose pages are every n-th one, and the lengths of whole requests."""

    placed_first_key: int = scalar(0)
    placed_kv_len: Tensor = tensor("placed_requests")


class PlacedVariant(ComposedVariant):
    """A variant, and where its parts are: `Places`, `HeadPlaces` or `KeyPlaces`.

    Its b is ``placed_request[b]`` and its built-ins are those of that request, or its h is
    ``h + placed_head`` and its kv_h ``kv_h + placed_kv_head``, or its kv_idx is the position of
    that key in the whole request.
    """

    # Type checkers would make one of the annotations of `ComposedVariant`.
    def __init__(
        self,
        operation: str,
        parts: tuple[Variant, ...],
        prefix: str = "",
        kept: tuple[str, ...] = (),
    ) -> None:
        super().__init__(operation, parts, prefix, kept)

    def hooks(self) -> dict[str, Any]:
        """The hooks of the variant, with the requests or heads of the whole batch."""
        inner, places = self._parts
        kind, *numbers = self._operation.split(":")
        changed = _CHANGES[kind]
        counts = [int(x) for x in numbers]
        return {
            name: changed(hook, places, HOOK_INPUTS[name], *counts)
            for name, hook in inner.hooks().items()
        }


def placed(variant: Variant, places: Places) -> Variant:
    """The variant for parts of requests."""
    return PlacedVariant("placed", (variant, places))


def placed_heads(variant: Variant, places: HeadPlaces) -> Variant:
    """The variant for some of the heads."""
    return PlacedVariant("placed heads", (variant, places))


def placed_keys(variant: Variant, places: KeyPlaces, page_size: int, num_ranks: int) -> Variant:
    """The variant for the keys of every num_ranks-th page of each request."""
    # The numbers are part of the kernel: divisions by constants are shifts.
    return PlacedVariant(f"placed keys:{page_size}:{num_ranks}", (variant, places))


def check_key_text(ir: VariantIR, name: str) -> None:
    """Raises VariantError for hooks in C++ text that read the position of a key.

    name: of the variant.
    """
    _reads(ir, name, ("kv_idx", "kv_len"))


def reads_request(ir: VariantIR, name: str) -> bool:
    """Whether a hook reads the request b, also for a length or a row.

    name: of the variant. Raises VariantError for C++ text that does.
    """
    return _reads(ir, name, ("b",))


def reads_head(ir: VariantIR, name: str) -> bool:
    """Whether a hook reads the number of a query head or of a kv head.

    name: of the variant. Raises VariantError for C++ text that does.
    """
    return _reads(ir, name, ("h", "kv_h"))


def _reads(ir: VariantIR, name: str, inputs: Sequence[str]) -> bool:
    for hook, text in ir.cpp:
        if re.search(rf"\b({'|'.join(inputs)})\b", text):
            raise VariantError(
                f"{hook} of {name} is C++ text that reads {inputs[0]}, which is numbered anew in a "
                "part of a batch; write the hook in Python"
            )
    return any(graph.uses(i) for _, graph in ir.hooks for i in inputs)


class _OfRequest:
    """Built-ins as a `builtins.Context`: b is a request of the whole batch."""

    def __init__(self, places: Any) -> None:
        self._places = places

    def builtin(self, name: str, args: tuple[Any, ...]) -> Any:
        """The value of a built-in such as `fa.q_len`."""
        table = getattr(self._places, f"placed_{name}")[args[0]]
        return table + args[1] if len(args) > 1 else table


def _placed(hook: Any, places: Any, inputs: Sequence[str]) -> Any:
    if "b" not in inputs or isinstance(hook, CppHook):
        return hook
    position = inputs.index("b")

    def inside(*args: Any) -> Any:
        request = places.placed_request[args[position]]
        token = CONTEXT.set(_OfRequest(places))
        try:
            return hook(*args[:position], request, *args[position + 1 :])
        finally:
            CONTEXT.reset(token)

    return inside


def _shifted(hook: Any, places: Any, inputs: Sequence[str]) -> Any:
    at = next((i for i, name in enumerate(inputs) if name in ("h", "kv_h")), None)
    if at is None or isinstance(hook, CppHook):
        return hook
    kv = inputs[at] == "kv_h"

    def inside(*args: Any) -> Any:
        head = args[at] + (places.placed_kv_head if kv else places.placed_head)
        return hook(*args[:at], head, *args[at + 1 :])

    return inside


class _OfKeys:
    """Built-ins as a `builtins.Context`: lengths of whole requests, slots of the keys at hand."""

    def __init__(self, outer: Any, places: Any, key: Any, own_key: Any) -> None:
        self._outer, self._places, self._key, self._own_key = outer, places, key, own_key

    def builtin(self, name: str, args: tuple[Any, ...]) -> Any:
        """The value of a built-in such as `fa.kv_len`."""
        if name == "kv_len":
            return self._places.placed_kv_len[args[0]]
        if name == "kv_slot":
            if args[1] is not self._key:
                raise VariantError(
                    "fa.kv_slot(b, k) of another key than kv_idx, which may be on another rank: "
                    "where pages are divided among ranks it must be fa.kv_slot(b, kv_idx)"
                )
            args = (args[0], self._own_key)
        return self._outer.builtin(name, args)


def _keyed(hook: Any, places: Any, inputs: Sequence[str], page_size: int, num_ranks: int) -> Any:
    if isinstance(hook, CppHook):
        return hook
    at = inputs.index("kv_idx") if "kv_idx" in inputs else None

    def inside(*args: Any) -> Any:
        own = key = None
        if at is not None:
            own = args[at]
            key = own + own // page_size * (page_size * (num_ranks - 1)) + places.placed_first_key
            args = (*args[:at], key, *args[at + 1 :])
        token = CONTEXT.set(_OfKeys(CONTEXT.get(), places, key, own))
        try:
            return hook(*args)
        finally:
            CONTEXT.reset(token)

    return inside


_CHANGES: Mapping[str, Callable[..., Any]] = {
    "placed": _placed,
    "placed heads": _shifted,
    "placed keys": _keyed,
}
