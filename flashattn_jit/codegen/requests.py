"""What the cache is asked for: a spec's canonical JSON, its template, and how its source is made.

A request may go to another process: it is picklable and holds no function but the renderer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..variants.ir_check import fitting_name
from .spec import KernelSpec
from .utility import UtilitySpec, render_utility

AnySpec = KernelSpec | UtilitySpec
"""Whatever names one artifact."""


@dataclass(frozen=True, slots=True)
class Request:
    """One kernel that is wanted: see `KernelCache.load`.

    render: makes the source, on a miss. name: of the variant, for people; no key depends on it.
    """

    spec: str
    template: str
    target: str
    render: Callable[[], str]
    name: str = "variant"


@dataclass(frozen=True, slots=True)
class Render:
    """Makes a spec's source when it is called."""

    spec: AnySpec

    def __call__(self) -> str:
        if isinstance(self.spec, UtilitySpec):
            return render_utility(self.spec)
        from .render import render  # imports Jinja: only on a miss

        return render(self.spec)


def request_of(spec: AnySpec) -> Request:
    """The request for one spec, without what may take its place."""
    return Request(spec.document(), spec.template, spec.target, Render(spec), name_of(spec))


def name_of(spec: AnySpec) -> str:
    """What people call the spec: its variant's name as manifests spell it, a utility's kernel."""
    return spec.kernel if isinstance(spec, UtilitySpec) else fitting_name(spec.name)
