"""What methods of variants and plans forward to: each imports the function that does it.

Imported by the package's start, so nothing is imported here before it is called.
"""

from __future__ import annotations

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


@provide
def verify(*args: Any, **options: Any) -> Any:
    """`Variant.verify`."""
    from . import inspect

    return inspect.verify(*args, **options)


@provide
def explain(*args: Any, **options: Any) -> Any:
    """`Variant.explain`."""
    from . import inspect

    return inspect.explain(*args, **options)


@provide
def explain_plan(*args: Any) -> Any:
    """`Plan.explain`."""
    from .inspect.explanation import batch

    return batch.explain_plan(*args)


@provide
def plot_pages(*args: Any) -> Any:
    """`kv.Timeline.plot`."""
    from .inspect.explanation import pages_plot

    return pages_plot.plot_pages(*args)


@provide
def plot_plan(*args: Any) -> Any:
    """`Plan.plot`."""
    from .inspect.explanation import batch_plot

    return batch_plot.plot_plan(*args)


@provide
def show_estimate(*args: Any) -> Any:
    """``str()`` of a `kv.Estimate`."""
    from .inspect.explanation import kv_capacity

    return kv_capacity.show_estimate(*args)


@provide
def plot_estimate(*args: Any) -> Any:
    """`kv.Estimate.plot`."""
    from .inspect.explanation import kv_capacity

    return kv_capacity.plot_estimate(*args)


@provide
def show_recommendation(*args: Any) -> Any:
    """``str()`` of a `kv.Recommendation`."""
    from .inspect.explanation import kv_capacity

    return kv_capacity.show_recommendation(*args)


@provide
def over_mesh(*args: Any) -> Any:
    """`BatchAttention` and `CascadeAttention` with a mesh."""
    from .distributed import mesh_batch

    return mesh_batch.over_mesh(*args)
