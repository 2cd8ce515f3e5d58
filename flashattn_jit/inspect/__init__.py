"""Tools that inspect variants, kernels and the cache: `verify`, `explain`, `cache_info`.

`verify` and `explain` are imported at first use, as `flashattn_jit` imports this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cache import CacheInfo, cache_info, last_kernel_source

if TYPE_CHECKING:
    from .explanation.explanation import Explanation, explain
    from .verification.verification import VerifyReport, verify

__all__ = [
    "CacheInfo",
    "Explanation",
    "VerifyReport",
    "cache_info",
    "explain",
    "last_kernel_source",
    "verify",
]

_LAZY = {
    "Explanation": "explanation.explanation",
    "explain": "explanation.explanation",
    "VerifyReport": "verification.verification",
    "verify": "verification.verification",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
