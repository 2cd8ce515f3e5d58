"""Functions that methods forward to, though they build on the class of the method.

`Variant.verify` is a method of a class that `inspect`, where verifying is written, builds upon. So
that no layer imports from above, `forwards.py`, which stands above all layers, provides them.
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
    """The function of this name. Dynamo follows it, as an import by name it would not."""
    return _FUNCTIONS[name]
