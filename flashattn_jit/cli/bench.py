"""`flashattn-jit bench`: a variant's kernel beside torch's attention and the eager reference."""

from __future__ import annotations

from typing import Any

import click

from . import output
from .app import Command
from .options import VariantType, complete_sizes, shape_options


@click.command("bench", cls=Command, short_help="Time a variant's kernel beside torch's.")
@click.argument("variant", type=VariantType())
@shape_options
@click.option(
    "--device", default="cpu", show_default=True, help="Where the tensors lie: cpu, cuda:0."
)
@click.option("--seconds", default=3.0, show_default=True, type=click.FloatRange(min=0.0),
              help="About how long to measure.")  # fmt: skip
def bench_command(
    variant: str,
    dtype: str,
    params: tuple[tuple[str, Any], ...],
    device: str,
    seconds: float,
    **sizes: int | None,
) -> None:
    """Time VARIANT's kernel, torch's attention and the eager reference in turn.

    Prints the median, the range of the middle half, the share of the roofline that is reached (the
    machine's rates are estimates), and the time as a multiple of the kernel's. VARIANT is named as
    for `explain`.
    """
    import torch

    from ..inspect.bench import bench
    from .variant_names import params_of, variant_of

    made = variant_of(variant)
    with output.activity(f"compiling {made.name}") as show:
        report = bench(
            made, dims=complete_sizes(sizes), dtype=getattr(torch, dtype), device=device,
            seconds=seconds, params=params_of(made, params), progress=show,
        )  # fmt: skip
    output.emit({
        "variant": report.variant,
        "target": report.target,
        "dims": {name: getattr(report.dims, name) for name in report.dims._fields[:7]},
        "dtype": report.dtype,
        "attainable_s": report.attainable_s,
        "bound": report.bound,
        "visited_share": report.visited_share,
        "timings": [
            {"name": t.name, "computes": t.note, "median_s": t.median_s,
             "middle_half_s": list(t.spread_s), "rounds": len(t.times_s),
             "roofline_share": report.roofline_share(t)}
            for t in report.timings
        ],
        "skipped": [{"name": name, "reason": why} for name, why in report.skipped],
    }, report)  # fmt: skip
