"""Functions of upper layers that methods of lower layers call, imported when they are first used.

`Variant.verify`, for example, calls a function of `inspect`, which imports `Variant`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_MODULES = {
    "attention_reference": "variants.reference",
    "compose": "variants.compose",
    "explain": "inspect",
    "explain_plan": "inspect.explanation.batch",
    "plot_plan": "inspect.explanation.batch_plot",
    "rename": "variants.compose",
    "verify": "inspect",
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def upper(name: str) -> Callable[..., Any]:
    """The function of this name. Dynamo traces this look-up where the function is imported already,
    as `compose` and `rename` are by the package's start."""
    if name not in _FUNCTIONS:
        module = import_module(f".{_MODULES[name]}", __package__)
        _FUNCTIONS[name] = getattr(module, name)
    return _FUNCTIONS[name]
