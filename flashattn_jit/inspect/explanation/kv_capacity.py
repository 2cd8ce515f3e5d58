"""`fa.kv.Estimate` and `fa.kv.Recommendation` as tables, and an estimate as an image.

Drawing needs matplotlib, the extra `plot`; imported only when something is drawn.
"""

from __future__ import annotations

from os import PathLike

from ...env import format_bytes
from ...formats import KvFormat
from ...kv.capacity.estimate import Estimate
from ...kv.capacity.replay import Option, Recommendation
from ..table import si, table
from .plots import require_matplotlib, save

_POINTS = 48


def format_name(kv_format: KvFormat | None) -> str:
    """Such as ``int4:64`` for groups of 64 channels; "none", and two of them for a pair."""
    if kv_format is None:
        return "none"
    if isinstance(kv_format, tuple):
        return " / ".join(map(format_name, kv_format))
    name = kv_format.name if kv_format.group is None else f"{kv_format.name}:{kv_format.group}"
    name += ", by channel" if kv_format.scale == "channel" else ""
    return name + (", rotated" if kv_format.rotate else "")


def show_estimate(found: Estimate) -> str:
    """A table of the groups, and what they come to."""
    own = len(found.spec.stores)
    rows = [
        [
            ("" if i < own else "cross, ") + g.kind, str(g.num_layers), str(g.row_bytes),
            f"{g.token_bytes:,}", str(g.pages), format_bytes(g.held_bytes), f"{g.keys:,}",
            format_bytes(g.decode_bytes),
        ]
        for i, g in enumerate(found.groups)
    ]  # fmt: skip
    header = ["layers", "count", "bytes a row", "a token", "pages", "held", "keys read", "read"]
    dtype = str(found.spec.dtype).removeprefix("torch.")
    text = [
        f"one sequence of {found.kv_len:,} tokens, pages of {found.spec.page_size}, {dtype} where "
        "nothing is quantised",
        table(header, rows, indent="  "),
        f"a token {found.token_bytes:,} bytes, a sequence {format_bytes(found.sequence_bytes)}",
        f"batch of {found.batch}: {format_bytes(found.held_bytes)}, of these "
        f"{format_bytes(found.rounding_bytes)} in unused slots; a cache of them "
        f"{format_bytes(found.cache_bytes)}",
        f"a decode step reads {format_bytes(found.decode_bytes)} and multiplies "
        f"{si(found.decode_flops, 'FLOP')}: {found.intensity:.3g} FLOP a byte",
    ]
    if found.max_batch is not None:
        assert found.budget_bytes is not None
        text.append(f"{format_bytes(found.budget_bytes)} hold {found.max_batch} sequences")
    costs = found.absorption
    if costs is not None:
        q_len = costs.break_even_q_len
        text.append(
            f"absorbed, latent attention takes fewer FLOP up to {q_len - 1} new tokens a call"
            if q_len is not None
            else "absorbed, latent attention takes fewer FLOP at any length"
        )
        text.append(
            f"  decode: absorbed {si(costs.flops(1, True), 'FLOP')} a layer, expanded "
            f"{si(costs.flops(1, False), 'FLOP')}; expanded keys and values are "
            f"{costs.expanded_token_bytes:,} bytes a token and layer"
        )
    return "\n".join(text)


def show_recommendation(found: Recommendation) -> str:
    """A table of the options, the best one marked."""
    rows = [_option(option, option is found.best) for option in found.options]
    header = ["", "format", "page size", "pages", "cache", "steps", "batch", "peak", "used",
              "preempted", "recomputed", "hits"]  # fmt: skip
    best = found.best
    verdict = "serves all requests" if best.serves else "serves them with preemptions"
    return "\n".join([
        f"options within {format_bytes(found.budget_bytes)}, for requests of up to "
        f"{found.max_kv_len:,} keys",
        table(header, rows, indent="  "),
        f"best: format {format_name(best.kv_format)}, pages of {best.spec.page_size}, "
        f"num_pages={list(best.num_pages)}: {verdict}",
    ])  # fmt: skip


def _option(option: Option, is_best: bool) -> list[str]:
    name, size = format_name(option.kv_format), str(option.spec.page_size)
    replay = option.replay
    if not replay.fits:
        return ["", name, size, "does not fit", *[""] * 8]
    return [
        "*" if is_best else "", name, size, " ".join(map(str, option.num_pages)),
        format_bytes(option.cache_bytes), str(replay.num_steps), f"{replay.mean_batch:.1f}",
        str(replay.peak_batch), format_bytes(replay.peak_bytes), str(replay.preemptions),
        str(replay.recomputed_tokens), str(replay.hit_tokens),
    ]  # fmt: skip


def plot_estimate(found: Estimate, path: str | PathLike[str]) -> None:
    """Write two drawings to `path`: by length, the bytes that a sequence holds and those that its
    decode step reads, a group above another.

    Raises InputError: matplotlib is missing, or it cannot write this format.
    """
    figure = require_matplotlib()(figsize=(12, 5), layout="constrained")
    most = max(2 * found.kv_len, _POINTS)
    lengths = [most * i // _POINTS for i in range(_POINTS + 1)]
    points = [found.at(n) for n in lengths]
    for axes, name, title in zip(
        figure.subplots(1, 2), ("held_bytes", "decode_bytes"),
        ("bytes held by a sequence", "bytes read by a decode step of a sequence"), strict=True,
    ):  # fmt: skip
        stack = [
            [getattr(point.groups[i], name) / (1 << 20) for point in points]
            for i in range(len(found.groups))
        ]
        labels = [f"{g.kind} x {g.num_layers}" for g in found.groups]
        axes.stackplot(lengths, stack, labels=labels, linewidth=0)
        axes.axvline(found.kv_len, color="black", linestyle=":", linewidth=1)
        axes.set(xlabel="kv_len", ylabel="MiB", title=title, xlim=(0, most))
        axes.legend(loc="upper left", frameon=False, fontsize="small")
    save(figure, "plot", path)
