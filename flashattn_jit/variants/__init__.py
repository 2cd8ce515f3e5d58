"""Attention variants: what attention computes, without shapes or devices.

`fa.variants` has every name of the library; `variant` has the classes for users' own variants.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .library import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # `from flashattn_jit.variants import trace` calls this before it imports the submodule.
    if name.startswith("_") or find_spec(f"{__name__}.{name}") is not None:
        raise AttributeError(name)
    library = import_module(".library", __name__)
    if name not in library.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(library, name)


def __dir__() -> list[str]:
    return sorted(import_module(".library", __name__).__all__)
