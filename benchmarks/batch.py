"""plan() and run() on this CPU: uneven lengths, pages, shared prefixes, windows, overhead.

    python -m benchmarks.batch [--only zipf paged cascade window overhead] [--save]

bf16, head_dim 128, random normal data. All parts take five minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashattn_jit as fa
from benchmarks.parts.batch_work import (
    constant_lengths,
    indptr,
    page_table,
    uniform_lengths,
    visited_tiles,
    zipf_lengths,
)
from benchmarks.parts.measure import Row, arguments, interleave, median, ratio, report, time_row
from benchmarks.parts.progress import say

_DIM, _PAGE = 128, 16
_BF16 = torch.bfloat16


def _engine(heads: tuple[int, int], variant: Any = None, cls: Any = None) -> Any:
    return (cls or fa.BatchAttention)(
        variant, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=_DIM, q_dtype=_BF16
    )


def _keys(tokens: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """k and v [tokens / page, page, heads, dim]; flattened, they are packed keys."""
    pages = -(-tokens // _PAGE)
    k, v = (torch.randn(pages, _PAGE, kv_heads, _DIM).to(_BF16) for _ in range(2))
    return k, v


def _planned(
    made: Any, q_len: Sequence[int], storage: Any, q: Tensor, k: Tensor, v: Tensor
) -> partial[Tensor]:
    made.plan(indptr(q_len), storage)
    return partial(made.run, q, k, v, out=torch.empty_like(q))


def zipf_rows(options: argparse.Namespace) -> list[Row]:
    """Decoding requests of uneven lengths, against as many equal ones of the same total."""
    rows, heads, mean = [], (32, 8), 1024
    for count in options.requests:
        k, v = _keys(count * (mean + _PAGE), heads[1])  # last pages are partly filled
        q = torch.randn(count, heads[0], _DIM).to(_BF16)
        cases = {
            "constant": constant_lengths(count, mean),
            "uniform": uniform_lengths(count, mean),
            "zipf": zipf_lengths(count, mean),
        }
        runs = {
            name: _planned(_engine(heads), [1] * count, page_table(lengths, _PAGE), q, k, v)
            for name, lengths in cases.items()
        }
        times = interleave(runs, options.pairs)
        for name in ("zipf", "uniform"):
            value, spread = ratio(times[name], times["constant"])
            detail = f"constant {median(times['constant']) * 1e3:.2f} ms, "
            detail += f"longest {max(cases[name])} of {count * mean} keys"
            claim = f"decode of {count} requests, {name} over constant lengths"
            rows.append(Row(claim, 1.1 if name == "zipf" else None, value, "x", "lower", spread,
                            detail))  # fmt: skip
    return rows


def paged_rows(options: argparse.Namespace) -> list[Row]:
    """Pages of 16, in order and in random order, against the same keys packed; causal."""
    rows, heads = [], (32, 8)
    scale = options.scale
    for name, count, q_len, kv_len, goal in (
        ("decode", 8, 1, 4096 // scale, 1.05),
        ("prefill", 2, 1024 // scale, 1024 // scale, 1.10),
    ):
        lengths = [kv_len] * count
        k, v = _keys(count * kv_len, heads[1])
        q = torch.randn(count * q_len, heads[0], _DIM).to(_BF16)
        runs = {
            order: _planned(_engine(heads, fa.Causal()), [q_len] * count,
                            page_table(lengths, _PAGE, shuffled=order == "shuffled"), q, k, v)
            for order in ("shuffled", "in order")
        }  # fmt: skip
        ragged = fa.Ragged(indptr(lengths))
        packed = [t.flatten(0, 1) for t in (k, v)]
        runs["packed"] = _planned(_engine(heads, fa.Causal()), [q_len] * count, ragged, q, *packed)
        times = interleave(runs, options.pairs)
        for order in ("shuffled", "in order"):
            value, spread = ratio(times[order], times["packed"])
            detail = f"packed {median(times['packed']) * 1e3:.2f} ms"
            claim = f"{name} B{count} kv{kv_len}: pages of {_PAGE}, {order}, over contiguous keys"
            rows.append(Row(claim, goal, value, "x", "lower", spread, detail))
    return rows


def cascade_rows(options: argparse.Namespace) -> list[Row]:
    """Eight requests that share 8k keys and have 128 of their own, decoding."""
    rows, count, shared, own = [], 8, 8192 // options.scale, 128
    for heads, goal in (((32, 32), 5.0), ((32, 8), 2.5)):
        k, v = _keys(shared + count * own, heads[1])
        q = torch.randn(count, heads[0], _DIM).to(_BF16)
        prefix, tail = shared // _PAGE, own // _PAGE
        order = torch.randperm(len(k)).int()
        tables = [
            torch.cat([order[:prefix], order[prefix + b * tail : prefix + (b + 1) * tail]])
            for b in range(count)
        ]
        paged = fa.Paged(indptr([prefix + tail] * count), torch.cat(tables),
                         torch.full((count,), _PAGE), _PAGE)  # fmt: skip
        flat, cascade = _engine(heads), _engine(heads, cls=fa.CascadeAttention)
        cascade.plan(fa.cascade_levels(indptr([1] * count), paged))
        runs = {
            "flat": _planned(flat, [1] * count, paged, q, k, v),
            "cascade": partial(cascade.run, q, k, v, out=torch.empty_like(q)),
        }
        times = interleave(runs, options.pairs)
        torch.testing.assert_close(runs["cascade"](), runs["flat"](), rtol=2e-2, atol=1e-2)
        value, spread = ratio(times["flat"], times["cascade"])
        detail = ", ".join(f"{n} {median(t) * 1e3:.2f} ms" for n, t in times.items())
        claim = f"{count} requests share {shared} keys, {own} own, heads {heads[0]}/{heads[1]}"
        rows.append(Row(f"{claim}: flat over cascade", goal, value, "x", "higher", spread, detail))
    return rows


def window_rows(options: argparse.Namespace) -> list[Row]:
    """A window of 4096 at 64k keys: its share of full attention's time over its share of tiles."""
    rows, heads, window, kv_len = [], (8, 2), 4096 // options.scale, 65536 // options.scale
    for name, count, q_len in (("decode", 4, 1), ("prefill of the last 1024", 1, 1024)):
        lengths = [kv_len] * count
        k, v = _keys(count * kv_len, heads[1])
        q = torch.randn(count * q_len, heads[0], _DIM).to(_BF16)
        storage = page_table(lengths, _PAGE, shuffled=True)
        made = {"window": _engine(heads, fa.SlidingWindow(window)), "full": _engine(heads)}
        runs = {n: _planned(m, [q_len] * count, storage, q, k, v) for n, m in made.items()}
        tiles = {
            n: visited_tiles(q_len, kv_len, heads[0] // heads[1], _BF16, _DIM, width)
            for n, width in (("window", window), ("full", None))
        }
        share = tiles["window"] / tiles["full"]
        times = interleave(runs, options.pairs)
        value, spread = ratio(times["window"], times["full"], 1 / share)
        detail = f"time {median(times['window']) / median(times['full']):.4f} of full, "
        detail += f"tiles {share:.4f}, full {median(times['full']) * 1e3:.1f} ms"
        claim = f"window {window} at kv {kv_len}, {name}: time over its share of the tiles"
        rows.append(Row(claim, 1.10, value, "x", "lower", spread, detail))
    return rows


def overhead_rows(options: argparse.Namespace) -> list[Row]:
    """run() of a batch that computes next to nothing."""
    rows = []
    for name, lengths in (("one request", [1]), ("four requests", [1, 2, 3, 4])):
        k, v = _keys(16 * len(lengths), 1)
        q = torch.randn(len(lengths), 1, _DIM).to(_BF16)
        run = _planned(_engine((1, 1)), [1] * len(lengths), page_table(lengths, _PAGE), q, k, v)

        def many(run: Any = run) -> None:
            for _ in range(200):
                run()

        times = [t / 200 for t in interleave({"run": many}, options.pairs)["run"]]
        rows.append(time_row(f"run() after plan(), {name} of a few keys", 20.0, times, "us"))
    return rows


_PARTS = {
    "zipf": zipf_rows,
    "paged": paged_rows,
    "cascade": cascade_rows,
    "window": window_rows,
    "overhead": overhead_rows,
}


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--requests", nargs="+", type=int, default=[16, 64], help="%(default)s")
    parser.add_argument("--scale", type=int, default=1, help="divide lengths, to try it out")


def main() -> None:
    """Run the parts asked for and report."""
    options = arguments(__doc__, _extend)
    torch.manual_seed(0)
    rows = []
    with torch.no_grad():
        for name in options.only:
            for row in _PARTS[name](options):
                say(f"  {row.claim}: {row.measured:.3g} {row.unit} {row.detail}")
                rows.append(row)
    report("batch", rows, options)


if __name__ == "__main__":
    main()
