"""Lengths and per-token positions inside hooks: `q_len`, `kv_len`, `q_row`, `kv_slot`.

They work in all hooks, while these are traced and in the eager reference, and raise elsewhere.
"""

from __future__ import annotations

import contextvars
from typing import Any, Protocol

from flashattn_jit.errors import VariantError


class Context(Protocol):
    """Gives the values of built-ins: a tracer, or the reference."""

    def builtin(self, name: str, args: tuple[Any, ...]) -> Any:
        """The value of the built-in `name`."""


CONTEXT: contextvars.ContextVar[Context | None] = contextvars.ContextVar("hook", default=None)


def _call(name: str, *args: Any) -> Any:
    context = CONTEXT.get()
    if context is None:
        raise VariantError(
            f"fa.{name} was called outside a hook; expected a call from score_mod, mask_mod, "
            "query_mod, ... with the hook's own indices"
        )
    return context.builtin(name, args)


def q_len(b: Any) -> Any:
    """The number of query rows of request `b`: a 0-dim int64 tensor."""
    return _call("q_len", b)


def kv_len(b: Any) -> Any:
    """The number of keys of request `b`: a 0-dim int64 tensor.

    >>> fa.variant(mask_mod=lambda b, h, q, k: k >= fa.kv_len(b) - 128)
    """
    return _call("kv_len", b)


def q_row(b: Any, q_idx: Any) -> Any:
    """The row of the packed q that holds position `q_idx` of request `b`: a 0-dim int64 tensor.

    It indexes per-token data given in the order of q: `gate[fa.q_row(b, q_idx)]`. In dense calls
    the rows of request b start at b * q_len.
    """
    return _call("q_row", b, q_idx)


def kv_slot(b: Any, kv_idx: Any) -> Any:
    """The physical slot of key `kv_idx` of request `b`: a 0-dim int64 tensor.

    It indexes per-token data stored beside the keys: `key_scale[fa.kv_slot(b, kv_idx)]`. In dense
    calls the slots of request b start at b * kv_len, counted in rows of k.
    """
    return _call("kv_slot", b, kv_idx)
