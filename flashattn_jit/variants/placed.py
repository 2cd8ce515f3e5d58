"""`placed` and `placed_heads`: variants for parts of a batch.

Where several machines share a batch, each computes some rows of a request as a request of its own,
or some of the heads. Hooks must see the request that the rows belong to (its number, its lengths,
its rows and slots in the whole batch) and the numbers of the heads in the whole batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flashattn_jit.errors import VariantError
from flashattn_jit.variants.builtins import CONTEXT
from flashattn_jit.variants.compose import ComposedVariant
from flashattn_jit.variants.ir.ir import HOOK_INPUTS, VariantIR
from flashattn_jit.variants.variant import CppHook, Variant, scalar, tensor


class Places(Variant):
    """Of each part, its request; and of each request, its lengths, first row and first slot."""

    placed_request: Tensor = tensor("parts")
    placed_q_len: Tensor = tensor("requests")
    placed_kv_len: Tensor = tensor("requests")
    placed_q_row: Tensor = tensor("requests")
    placed_kv_slot: Tensor = tensor("requests")


class HeadPlaces(Variant):
    """The numbers of the first query head and of the first kv head of a part."""

    placed_head: int = scalar(0)
    placed_kv_head: int = scalar(0)


class PlacedVariant(ComposedVariant):
    """A variant, and where its parts are: `Places` or `HeadPlaces`.

    Its b is ``placed_request[b]`` and its built-ins are those of that request, or its h is
    ``h + placed_head`` and its kv_h ``kv_h + placed_kv_head``.
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
        changed = _placed if self._operation == "placed" else _shifted
        return {name: changed(h, places, HOOK_INPUTS[name]) for name, h in inner.hooks().items()}


def placed(variant: Variant, places: Places) -> Variant:
    """The variant for parts of requests."""
    return PlacedVariant("placed", (variant, places))


def placed_heads(variant: Variant, places: HeadPlaces) -> Variant:
    """The variant for some of the heads."""
    return PlacedVariant("placed heads", (variant, places))


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
