"""`flashattn-jit explain` and `bench`: what a variant becomes for one problem, and its speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import update_wrapper
from textwrap import indent
from typing import TYPE_CHECKING, Any

import click

from ..codegen.spec import default_target
from . import output
from .command import Command
from .options import DTYPE, OUTPUT, Q_OFFSET, SECONDS, TARGET, VARIANT, params_option

if TYPE_CHECKING:
    from ..inspect.explanation.explanation import Explanation
    from ..inspect.machine_code.prediction import LoopCost

SIZES = {
    "batch": (1, "Requests."),
    "num_q_heads": (8, "Query heads."),
    "num_kv_heads": (None, "Key-value heads; as many as query heads if unset."),
    "q_len": (1024, "Query positions."),
    "kv_len": (None, "Keys; as many as query positions if unset."),
    "head_dim": (64, "Head dim of queries and keys."),
    "head_dim_v": (None, "Head dim of values; as the others if unset."),
}
"""A problem's sizes by `Dims`' names: what they are by default, and what they mean."""

_SAME = {"num_kv_heads": "num_q_heads", "kv_len": "q_len", "head_dim_v": "head_dim"}
"""Which size one that is left out is equal to."""


def size_flag(name: str) -> str:
    """The option of one of `SIZES`: ``--q-heads`` for num_q_heads."""
    return "--" + name.removeprefix("num_").replace("_", "-")


def _problem_options(function: Callable[..., None]) -> Callable[..., None]:
    """The argument and options of a problem. The command gets the variant, dims, dtype, params."""

    def command(variant: str, dtype: str, params: Any, **rest: Any) -> None:
        import torch

        from .variant_names import params_of, variant_of

        made = variant_of(variant)
        sizes = {name: rest.pop(name) for name in SIZES}
        dims = sizes | {name: sizes[name] or sizes[other] for name, other in _SAME.items()}
        function(made, dims, getattr(torch, dtype), params_of(made, params), **rest)

    wrapped: Callable[..., None] = update_wrapper(command, function)
    for name, (default, text) in reversed(SIZES.items()):
        wrapped = click.option(
            size_flag(name), name, type=click.IntRange(min=1), default=default,
            show_default=default is not None, help=text,
        )(wrapped)  # fmt: skip
    dtype = click.option(
        "--dtype", type=DTYPE, default="fp32", show_default=True, help="Of q, k and v."
    )
    for option in (dtype, params_option(), click.argument("variant", type=VARIANT)):
        wrapped = option(wrapped)
    return wrapped


@click.command("explain", cls=Command)
@_problem_options
@click.option(
    "--q-offset",
    type=Q_OFFSET,
    default="0",
    show_default=True,
    help="Position of row 0: a number or end.",
)
@click.option("--target", type=TARGET, help="What to compile for; else this host.")
@click.option("--device", help="A GPU by name, such as H100, which need not be there; or cuda:0.")
@click.option("--source", is_flag=True, help="Print the kernel's source and nothing else.")
@click.option(
    "--machine-code",
    is_flag=True,
    help="For a GPU: compile, and simulate the loops of the machine code.",
)
@click.option("--plot", type=OUTPUT, help="Draw roofline and tiles to a file.")
def explain_command(
    variant: Any, dims: dict[str, int], dtype: Any, params: dict[str, Any], *, q_offset: int | str,
    target: str | None, device: str | None, source: bool, machine_code: bool, plot: str | None,
) -> None:  # fmt: skip
    """Explain what VARIANT becomes: hooks, tiles, roofline, plan and kernel.

    VARIANT is a name of the library (Causal, "SlidingWindow(4096)", "Causal & ~Chunked(512)"),
    file.py:NAME or module:NAME. A file or module is run as code.

    For a CPU target the kernel is compiled where no cache layer has it; for a GPU nothing is,
    except with --machine-code. What that prints is simulated, not measured.
    """
    with output.activity(f"explaining {variant.name}; a kernel that no layer has is compiled"):
        found = variant.explain(
            dims=dims, dtype=dtype, q_offset=q_offset, device=device, plot=plot,
            target=default_target() if target == "host" else target, **params,
        )  # fmt: skip
        cycles = found.cycles if machine_code else None
    text = found.source if source else str(found)
    document = _document(found)
    if cycles is not None and not source:
        text += f"\n\nmachine code\n{indent(str(cycles), '  ')}"
        document["machine_code"] = [_loop(cost) for cost in cycles.loops]
    output.emit(document, text)


def _loop(cost: LoopCost) -> dict[str, Any]:
    return {
        "instructions": len(cost.loop.common),
        "longest_instructions": len(cost.loop.longest),
        "longest_cycles": cost.longest.cycles,
        "spills": cost.loop.spills,
        "spills_among_products": cost.loop.spills_among_products,
        "binding": cost.common.binding,
        **asdict(cost.common),
    }


def _document(found: Explanation) -> dict[str, Any]:
    spec, roofline = found.plan.spec, found.roofline
    return {
        "variant": found.name,
        "target": found.target,
        "problem": asdict(found.problem),
        "params": dict(found.values),
        "specialised": dict(found.specialised),
        "tiles": {"visited_share": found.tiles.counts.visited_share},
        "roofline": {
            "bound": roofline.point.bound,
            **{name: getattr(roofline, name) for name in ("flops", "bytes", "attainable_s")},
        },
        "kernel": {
            "key": found.plan.key.hex,
            **{name: getattr(spec, name) for name in ("tile_kind", "tile_q", "tile_kv")},
        },
        "source": found.source,
        "text": str(found),
    }


@click.command("bench", cls=Command)
@_problem_options
@click.option(
    "--device", default="cpu", show_default=True, help="Where the tensors lie: cpu, cuda:0."
)
@click.option(
    "--seconds", default=3.0, show_default=True, type=SECONDS, help="About how long to measure."
)
def bench_command(
    variant: Any, dims: dict[str, int], dtype: Any, params: dict[str, Any], **options: Any
) -> None:
    """Time VARIANT's kernel, torch's attention and the eager reference in turn.

    Prints the median, the range of the middle half, the share of the roofline that is reached (the
    machine's rates are estimates), and the time as a multiple of the kernel's. VARIANT is named as
    for `explain`.
    """
    from ..inspect.bench import bench

    with output.activity(f"compiling {variant.name}") as show:
        report = bench(variant, dims=dims, dtype=dtype, params=params, progress=show, **options)
    output.emit({
        **asdict(report),
        "dims": {name: getattr(report.dims, name) for name in SIZES},
        "timings": [
            {"name": t.name, "computes": t.note, "median_s": t.median_s,
             "middle_half_s": t.spread_s, "rounds": len(t.times_s),
             "roofline_share": report.roofline_share(t)}
            for t in report.timings
        ],
        "skipped": [{"name": name, "reason": why} for name, why in report.skipped],
    }, report)  # fmt: skip
