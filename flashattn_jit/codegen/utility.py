"""Specs of CUDA kernels that are no attention: merging states, writing to pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..variants.ir import canonical_json

SCHEMA = 1
"""Version of the document; part of every cache key."""


@dataclass(frozen=True, slots=True)
class UtilitySpec:
    """Names one artifact with one kernel.

    append_paged_kv copies rows in units of `unit_bytes`: 1, 2, 4, 8 or 16. merge_states has none.
    """

    kernel: Literal["merge_states", "append_paged_kv"]
    target: str
    unit_bytes: int = 0

    @property
    def template(self) -> str:
        """The template that renders this spec, below templates/."""
        return f"cuda/{self.kernel}.cu.j2"

    def document(self) -> str:
        """The canonical JSON that identifies the spec."""
        return canonical_json(
            {
                "utility_schema": SCHEMA,
                "kernel": self.kernel,
                "target": self.target,
                "unit_bytes": self.unit_bytes,
            }
        )


def render_utility(spec: UtilitySpec) -> str:
    """The source of the artifact that `spec` names. For a cache miss: it imports Jinja."""
    from .render import environment

    return environment().get_template(spec.template).render(spec=spec)
