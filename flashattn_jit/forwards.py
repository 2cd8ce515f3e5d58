"""What methods of variants and plans forward to: each imports the function that does it.

Imported by the package's start, so nothing is imported here before it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from .late_binding import provide


@provide
def compose(*args: Any) -> Any:
    """``&``, ``|`` and ``~`` of variants."""
    from .variants import compose

    return compose.compose(*args)


@provide
def rename(*args: Any) -> Any:
    """`Variant.named`."""
    from .variants import compose

    return compose.rename(*args)


@provide
def only(*args: Any) -> Any:
    """`Variant.only` and `Variant.without`."""
    from .variants import compose

    return compose.only(*args)


@provide
def attention_reference(*args: Any, **options: Any) -> Any:
    """`Variant.reference`."""
    from .variants import reference

    return reference.attention_reference(*args, **options)


FORWARDED = {
    "verify": "inspect.verification.verification",  # `Variant.verify`
    "explain": "inspect.explanation.explanation",  # `Variant.explain`
    "explain_plan": "inspect.explanation.batch",  # `Plan.explain`
    "plot_plan": "inspect.explanation.batch_plot",  # `Plan.plot`
    "plot_pages": "inspect.explanation.pages_plot",  # `kv.Timeline.plot`
    "show_estimate": "inspect.explanation.kv_capacity",  # ``str()`` of a `kv.Estimate`
    "plot_estimate": "inspect.explanation.kv_capacity",  # `kv.Estimate.plot`
    "show_recommendation": "inspect.explanation.kv_capacity",  # of a `kv.Recommendation`
    "over_mesh": "distributed.mesh_batch",  # `BatchAttention` and `CascadeAttention` with a mesh
}
"""Functions and their modules. No compiled code calls them, so Dynamo need not follow these."""


def _forward(name: str) -> Callable[..., Any]:
    def forward(*args: Any, **options: Any) -> Any:
        function: Callable[..., Any] = getattr(
            import_module(f"{__package__}.{FORWARDED[name]}"), name
        )
        return function(*args, **options)

    forward.__name__ = name
    return forward


for _name in FORWARDED:
    provide(_forward(_name))
