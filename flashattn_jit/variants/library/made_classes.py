"""Variant classes that functions of the library create, also in functions under torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flashattn_jit.errors import VariantError
from flashattn_jit.variants.variant import Variant

_V = TypeVar("_V", bound=Variant)


class _Classes:
    """Classes by name, as attributes: Dynamo cannot instantiate others."""


_CLASSES = _Classes()


def made_class(name: str, make: Callable[..., type[_V]], *args: Any) -> type[_V]:
    """``make(*args)``, a class for the function `name` of the library.

    In a compiled function the arguments must be constants, or objects from outside the function.

    Raises VariantError where the compiled function itself creates an argument.
    """
    if not torch.compiler.is_dynamo_compiling():
        return make(*args)
    return getattr(_CLASSES, _made(name, make, *args))  # type: ignore[no-any-return]


def _made(name: str, make: Callable[..., type[Variant]], *args: Any) -> str:
    try:
        made = make(*args)
    except AttributeError:  # Dynamo passes an object without attributes
        raise VariantError(
            f"an argument of fa.{name}(...) is made inside of the compiled function, where its "
            "values are not known; make it outside, and let the function refer to it"
        ) from None
    attribute = f"{name}_{id(made)}"
    setattr(_CLASSES, attribute, made)
    return attribute


# As `torch.compiler.assume_constant_result` does, which would import Dynamo.
_made._dynamo_marked_constant = True  # type: ignore[attr-defined]
