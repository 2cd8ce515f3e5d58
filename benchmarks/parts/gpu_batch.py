"""Rows of plan() and run(): host time of a plan, pages, uneven lengths, shared prefixes, graphs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import flashattn_jit as fa
from benchmarks.parts.batch_work import constant_lengths, indptr, page_table, zipf_lengths
from benchmarks.parts.gpu_measure import Clock, Flush, graph_of, host_seconds, interleave_on_device
from benchmarks.parts.measure import Row, ratio, time_row
from benchmarks.parts.progress import say

HEADS, DIM, PAGE = (32, 8), 128, 16
_BF16 = torch.bfloat16


def batch_rows(rounds: int, clock: Clock, l2_bytes: int) -> Iterator[Row]:
    """All rows, the most important first."""
    flush = Flush(l2_bytes)
    for name, seconds, rows in (
        ("plan() of 256 requests", 10, partial(plan_rows, rounds)),
        ("uneven lengths", 20, partial(uneven_rows, rounds, flush)),
        ("pages over packed keys", 20, partial(paged_rows, rounds, flush)),
        ("a shared prefix", 20, partial(cascade_rows, rounds, flush)),
        ("replay of a graph", 15, partial(graph_rows, rounds)),
    ):
        if clock.allows(name, seconds):
            for row in rows():
                say(f"  {row.claim}: {row.measured:.3g} {row.unit} ({row.detail})")
                yield row


def _engine(heads: tuple[int, int] = HEADS, variant: Any = None, **options: Any) -> Any:
    return fa.BatchAttention(
        variant, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=DIM, q_dtype=_BF16,
        device="cuda", **options,
    )  # fmt: skip


def _random(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, dtype=_BF16, device="cuda")


def plan_rows(rounds: int) -> Iterator[Row]:
    """Host time of plan() with its upload, and of run(), causal, 256 requests of mixed lengths."""
    kv_len = [1 + (i * 7919) % 4096 for i in range(256)]
    q_len = [1 if i % 4 else min(64, n) for i, n in enumerate(kv_len)]
    paged = page_table(kv_len, PAGE, shuffled=True, device="cuda")
    made = _engine(variant=fa.Causal())
    rows = indptr(q_len)
    q = _random(sum(q_len), HEADS[0], DIM)
    k, v = (_random(len(paged.page_indices), PAGE, HEADS[1], DIM) for _ in range(2))
    times = host_seconds(lambda: made.plan(rows, paged), 20, rounds)
    yield time_row("plan() of 256 requests of mixed lengths, causal, host time", None, times, "us")
    times = host_seconds(lambda: made.run(q, k, v), 20, rounds)
    yield time_row("run() after plan(), host time", None, times, "us")


def uneven_rows(rounds: int, flush: Flush) -> Iterator[Row]:
    """Decoding requests whose lengths follow Zipf's law, against equal ones of the same total."""
    for count in (16, 256):
        mean = 262144 // count
        cases = {"constant": constant_lengths(count, mean), "zipf": zipf_lengths(count, mean)}
        q = _random(count, HEADS[0], DIM)
        k, v = (_random(count * mean // PAGE + count, PAGE, HEADS[1], DIM) for _ in range(2))
        runs = {}
        for name, lengths in cases.items():
            made = _engine()
            made.plan(indptr([1] * count), page_table(lengths, PAGE, device="cuda"))
            runs[name] = partial(made.run, q, k, v)
        times = interleave_on_device(runs, rounds, flush)
        value, spread = ratio(times["zipf"], times["constant"])
        detail = f"constant {statistics.median(times['constant']) * 1e6:.0f} us, "
        detail += f"longest {max(cases['zipf'])} of {count * mean} keys"
        yield Row(f"decode of {count} requests: zipf over constant lengths", 1.1, value, "x",
                  "lower", spread, detail)  # fmt: skip


def paged_rows(rounds: int, flush: Flush) -> Iterator[Row]:
    """Pages of 16 in random order against the same keys packed."""
    for name, count, q_len, kv_len in (("decode", 64, 1, 4096), ("prefill", 8, 2048, 2048)):
        lengths = [kv_len] * count
        q = _random(count * q_len, HEADS[0], DIM)
        k, v = (_random(count * kv_len // PAGE, PAGE, HEADS[1], DIM) for _ in range(2))
        paged, packed = (_engine(variant=fa.Causal()) for _ in range(2))
        rows = indptr([q_len] * count)
        paged.plan(rows, page_table(lengths, PAGE, shuffled=True, device="cuda"))
        packed.plan(rows, fa.Ragged(indptr(lengths)))
        runs = {
            "paged": partial(paged.run, q, k, v),
            "packed": partial(packed.run, q, k.flatten(0, 1), v.flatten(0, 1)),
        }
        times = interleave_on_device(runs, rounds, flush)
        value, spread = ratio(times["paged"], times["packed"])
        detail = f"packed {statistics.median(times['packed']) * 1e6:.0f} us"
        yield Row(f"{name} B{count} kv{kv_len}: pages of {PAGE} over contiguous keys", None, value,
                  "x", "lower", spread, detail)  # fmt: skip


def cascade_rows(rounds: int, flush: Flush) -> Iterator[Row]:
    """Eight and 64 requests that share 8k keys and have 128 of their own, decoding."""
    for count, heads in ((8, (32, 32)), (8, HEADS), (64, HEADS)):
        prefix, tail = 8192 // PAGE, 128 // PAGE
        order = torch.arange(prefix + count * tail).int()
        tables = [torch.cat([order[:prefix], own]) for own in order[prefix:].split(tail)]
        last = torch.full((count,), PAGE)
        starts, table = indptr([prefix + tail] * count), torch.cat(tables)
        paged = fa.Paged(starts, table.cuda(), last, PAGE)
        q = _random(count, heads[0], DIM)
        k, v = (_random(len(order), PAGE, heads[1], DIM) for _ in range(2))
        flat = _engine(heads)
        flat.plan(indptr([1] * count), paged)
        cascade = fa.CascadeAttention(
            None, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=DIM, q_dtype=_BF16,
            device="cuda",
        )  # fmt: skip
        everyone = fa.Paged(indptr([prefix]), order[:prefix].cuda(), last[:1], PAGE)
        own = fa.Paged(indptr([tail] * count), order[prefix:].cuda(), last, PAGE)
        cascade.plan([
            fa.CascadeLevel(indptr([count]), everyone),
            fa.CascadeLevel(indptr([1] * count), own),
        ])  # fmt: skip
        runs = {"flat": partial(flat.run, q, k, v), "cascade": partial(cascade.run, q, k, v)}
        times = interleave_on_device(runs, rounds, flush)
        value, spread = ratio(times["flat"], times["cascade"])
        detail = ", ".join(f"{n} {statistics.median(t) * 1e6:.0f} us" for n, t in times.items())
        yield Row(f"{count} requests share 8192 keys, heads {heads[0]}/{heads[1]}: flat over "
                  "cascade", None, value, "x", "higher", spread, detail)  # fmt: skip


def graph_rows(rounds: int) -> Iterator[Row]:
    """A captured decode step whose plan changes between replays: device time of a replay."""
    count, kv_len = 32, 2048
    limits = fa.Limits(count, count, kv_len, count * kv_len // PAGE)
    made = _engine(limits=limits, cuda_graph=True)
    q = _random(count, HEADS[0], DIM)
    k, v = (_random(count * kv_len // PAGE, PAGE, HEADS[1], DIM) for _ in range(2))
    whole = page_table([kv_len] * count, PAGE, shuffled=True, device="cuda")
    made.plan(indptr([1] * count), whole)
    replay = graph_of(lambda: made.run(q, k, v), 1)
    plain = _engine()
    plain.plan(indptr([1] * count), whole)
    times = interleave_on_device(
        {"replay": replay, "plain": graph_of(lambda: plain.run(q, k, v), 1)}, rounds
    )
    value, spread = ratio(times["replay"], times["plain"])
    detail = f"plain {statistics.median(times['plain']) * 1e6:.0f} us"
    yield Row(f"decode of {count} requests at their limits: replay over a graph of one plan", None,
              value, "x", "lower", spread, detail)  # fmt: skip
    made.plan(indptr([1]), page_table([64], PAGE, device="cuda"))
    small = interleave_on_device({"replay": replay}, rounds)["replay"]
    yield time_row("the same graph after a plan of one short request", None, small, "us")
