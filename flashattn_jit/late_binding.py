"""Functions of upper layers that methods of lower layers call.

`Variant.verify`, for example, calls a function of `inspect`, which imports `Variant`. So that no
layer imports from a layer above it, `forwards.py`, the top layer, provides these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def provide(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let `upper` find a function by its name."""
    _FUNCTIONS[function.__name__] = function
    return function


def upper(name: str) -> Callable[..., Any]:
    """The function of this name. Dynamo traces this look-up, unlike an import by name."""
    return _FUNCTIONS[name]
