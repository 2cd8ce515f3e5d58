"""Variant classes that functions of the library make, inside of compiled functions too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flashattn_jit.errors import VariantError
from flashattn_jit.variants.variant import Variant

_V = TypeVar("_V", bound=Variant)


class _Classes:
    """Classes by name; those that Dynamo instantiates must be found as attributes."""


_CLASSES = _Classes()


def made_class(name: str, make: Callable[..., type[_V]], *args: Any) -> type[_V]:
    """``make(*args)``, a class for the function `name` of the library.

    In a compiled function the arguments must be constants, or objects that were there before.

    Raises VariantError where the compiled function has made an argument itself.
    """
    if not torch.compiler.is_dynamo_compiling():
        return make(*args)
    return getattr(_CLASSES, _made(name, make, *args))  # type: ignore[no-any-return]


def _made(name: str, make: Callable[..., type[Variant]], *args: Any) -> str:
    try:
        made = make(*args)
    except AttributeError:  # Dynamo has an object without attributes
        raise VariantError(
            f"an argument of fa.{name}(...) is made inside of the compiled function, where its "
            "values are not known; make it outside, and let the function refer to it"
        ) from None
    place = f"{name}_{id(made)}"
    setattr(_CLASSES, place, made)
    return place


# What `torch.compiler.assume_constant_result` sets, which imports Dynamo to do so.
_made._dynamo_marked_constant = True  # type: ignore[attr-defined]
