"""`flashattn-jit explain`: what a variant becomes for one problem, and why."""

from __future__ import annotations

from typing import Any

import click

from . import output
from .app import Command
from .options import TargetType, VariantType, complete_sizes, shape_options


@click.command("explain", cls=Command, short_help="Explain what a variant becomes.")
@click.argument("variant", type=VariantType())
@shape_options
@click.option(
    "--q-offset", default="0", show_default=True, help="Position of row 0: a number or end."
)
@click.option(
    "--target", type=TargetType(emulated=True), help="What to compile for; else this host."
)
@click.option("--device", help="A GPU by name, such as H100, which need not be there; or cuda:0.")
@click.option("--source", is_flag=True, help="Print the kernel's source and nothing else.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw roofline and tiles to a file.")
def explain_command(
    variant: str,
    dtype: str,
    params: tuple[tuple[str, Any], ...],
    q_offset: str,
    target: str | None,
    device: str | None,
    source: bool,
    plot: str | None,
    **sizes: int | None,
) -> None:
    """Explain what VARIANT becomes: hooks, tiles, roofline, plan and kernel.

    VARIANT is a name of the library (Causal, "SlidingWindow(4096)", "Causal & ~Chunked(512)"),
    file.py:NAME or module:NAME. A file or module is run as code.

    For a CPU target the kernel is compiled where no cache layer has it; for a GPU nothing is.
    """
    import torch

    from .variant_names import params_of, variant_of

    offset: int | str = int(q_offset) if q_offset.lstrip("-").isdigit() else q_offset
    made = variant_of(variant)
    with output.activity(f"explaining {made.name}; a kernel that no layer has is compiled"):
        found = made.explain(
            dims=complete_sizes(sizes), dtype=getattr(torch, dtype), q_offset=offset,
            target=target, device=device, plot=plot, **params_of(made, params),
        )  # fmt: skip
    output.emit(_document(found), found.source if source else found)


def _document(found: Any) -> dict[str, Any]:
    problem, spec, counts = found.problem, found.plan.spec, found.tiles.counts
    return {
        "variant": found.name,
        "target": found.target,
        "problem": {
            name: list(value) if isinstance(value := getattr(problem, name), tuple) else value
            for name in problem.__dataclass_fields__
        },
        "params": dict(found.values),
        "specialised": dict(found.specialised),
        "tiles": {"visited_share": counts.visited_share},
        "roofline": {
            "bound": found.roofline.point.bound,
            "flops": found.roofline.flops,
            "bytes": found.roofline.bytes,
            "attainable_s": found.roofline.attainable_s,
        },
        "kernel": {
            "key": found.plan.key.hex,
            "tile_kind": spec.tile_kind,
            "tile_q": spec.tile_q,
            "tile_kv": spec.tile_kv,
        },
        "source": found.source,
        "text": str(found),
    }
