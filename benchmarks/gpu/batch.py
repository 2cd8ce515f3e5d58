"""Rows of plan() and run(): host time of a plan, pages, uneven lengths, shared prefixes, graphs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import flashattn_jit as fa
from benchmarks.gpu.kernels import plan_kernels
from benchmarks.gpu.machine import Machine, host_seconds, interleave
from benchmarks.gpu.sections import Measurement
from benchmarks.parts.batch_work import constant_lengths, indptr, page_table, zipf_lengths
from benchmarks.parts.measure import Row, ratio, time_row

HEADS, DIM, PAGE = (32, 8), 128, 16
_REDUCED_HEADS = (4, 1)


def batches(machine: Machine, rounds: int) -> Iterator[Measurement]:
    """All measurements, the most important first."""
    for what, seconds, rows in (
        ("plan() of requests of mixed lengths", 10, plan_rows),
        ("uneven lengths", 20, uneven_rows),
        ("pages over packed keys", 20, paged_rows),
        ("a shared prefix", 20, cascade_rows),
        ("replay of a graph", 15, graph_rows),
    ):
        yield Measurement(what, seconds, partial(rows, machine, rounds))


def _engine(
    machine: Machine, heads: tuple[int, int], variant: Any = None, **options: Any
) -> fa.BatchAttention:
    return fa.BatchAttention(
        variant, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=DIM, q_dtype=torch.bfloat16,
        **machine.options(), **options,
    )  # fmt: skip


def plan_rows(machine: Machine, rounds: int) -> Iterator[Row]:
    """Host time of plan() with its upload, and of run(), causal, requests of mixed lengths."""
    heads = machine.pick(HEADS, _REDUCED_HEADS)
    count, longest = machine.pick((256, 4096), (8, 100))
    kv_len = [1 + (i * 7919) % longest for i in range(count)]
    q_len = [1 if i % 4 else min(64, n) for i, n in enumerate(kv_len)]
    paged = page_table(kv_len, PAGE, shuffled=True, device=machine.device)
    made = _engine(machine, heads, variant=fa.Causal())
    rows = indptr(q_len)
    q = machine.random(sum(q_len), heads[0], DIM)
    k, v = (machine.random(len(paged.page_indices), PAGE, heads[1], DIM) for _ in range(2))
    times = host_seconds(machine, lambda: made.plan(rows, paged), 20, rounds)
    yield time_row(
        f"plan() of {count} requests of mixed lengths, causal, host time", None, times, "us"
    )
    times = host_seconds(machine, lambda: made.run(q, k, v), 20, rounds)
    yield time_row("run() after plan(), host time", None, times, "us")


def uneven_rows(machine: Machine, rounds: int) -> Iterator[Row]:
    """Decoding requests whose lengths follow Zipf's law, against equal ones of the same total."""
    heads = machine.pick(HEADS, _REDUCED_HEADS)
    for count in machine.pick((16, 256), (4, 8)):
        mean = machine.pick(262144, 512) // count
        cases = {"constant": constant_lengths(count, mean), "zipf": zipf_lengths(count, mean)}
        q = machine.random(count, heads[0], DIM)
        k, v = (machine.random(count * mean // PAGE + count, PAGE, heads[1], DIM) for _ in range(2))
        runs = {}
        for name, lengths in cases.items():
            made = _engine(machine, heads)
            made.plan(indptr([1] * count), page_table(lengths, PAGE, device=machine.device))
            runs[name] = partial(made.run, q, k, v)
        times = interleave(machine, runs, rounds, flush=True)
        value, spread = ratio(times["zipf"], times["constant"])
        detail = f"constant {statistics.median(times['constant']) * 1e6:.0f} us, "
        detail += f"longest {max(cases['zipf'])} of {count * mean} keys; {plan_kernels(made)}"
        yield Row(f"decode of {count} requests: zipf over constant lengths", 1.1, value, "x",
                  "lower", spread, detail)  # fmt: skip


def paged_rows(machine: Machine, rounds: int) -> Iterator[Row]:
    """Pages of 16 in random order against the same keys packed."""
    heads = machine.pick(HEADS, _REDUCED_HEADS)
    for name, count, q_len, kv_len in machine.pick(
        (("decode", 64, 1, 4096), ("prefill", 8, 2048, 2048)),
        (("decode", 2, 1, 96), ("prefill", 2, 48, 48)),
    ):
        lengths = [kv_len] * count
        q = machine.random(count * q_len, heads[0], DIM)
        k, v = (machine.random(count * kv_len // PAGE, PAGE, heads[1], DIM) for _ in range(2))
        paged, packed = (_engine(machine, heads, variant=fa.Causal()) for _ in range(2))
        rows = indptr([q_len] * count)
        paged.plan(rows, page_table(lengths, PAGE, shuffled=True, device=machine.device))
        packed.plan(rows, fa.Ragged(indptr(lengths)))
        runs = {
            "paged": partial(paged.run, q, k, v),
            "packed": partial(packed.run, q, k.flatten(0, 1), v.flatten(0, 1)),
        }
        times = interleave(machine, runs, rounds, flush=True)
        value, spread = ratio(times["paged"], times["packed"])
        detail = f"packed {statistics.median(times['packed']) * 1e6:.0f} us; {plan_kernels(paged)}"
        yield Row(f"{name} B{count} kv{kv_len}: pages of {PAGE} over contiguous keys", None, value,
                  "x", "lower", spread, detail)  # fmt: skip


def cascade_rows(machine: Machine, rounds: int) -> Iterator[Row]:
    """Eight and 64 requests that share 8k keys and have 128 of their own, decoding."""
    grouped = machine.pick(HEADS, _REDUCED_HEADS)
    shared, own_keys = machine.pick((8192, 128), (96, 32))
    for count, heads in ((8, machine.pick((32, 32), (1, 1))), (8, grouped), (64, grouped)):
        prefix, tail = shared // PAGE, own_keys // PAGE
        order = torch.arange(prefix + count * tail).int()
        tables = [torch.cat([order[:prefix], own]) for own in order[prefix:].split(tail)]
        last = torch.full((count,), PAGE)
        starts, table = indptr([prefix + tail] * count), torch.cat(tables)
        paged = fa.Paged(starts, table.to(machine.device), last, PAGE)
        q = machine.random(count, heads[0], DIM)
        k, v = (machine.random(len(order), PAGE, heads[1], DIM) for _ in range(2))
        flat = _engine(machine, heads)
        flat.plan(indptr([1] * count), paged)
        cascade = fa.CascadeAttention(
            None, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=DIM, q_dtype=torch.bfloat16,
            **machine.options(),
        )  # fmt: skip
        everyone = fa.Paged(indptr([prefix]), order[:prefix].to(machine.device), last[:1], PAGE)
        own = fa.Paged(indptr([tail] * count), order[prefix:].to(machine.device), last, PAGE)
        cascade.plan([
            fa.CascadeLevel(indptr([count]), everyone),
            fa.CascadeLevel(indptr([1] * count), own),
        ])  # fmt: skip
        runs = {"flat": partial(flat.run, q, k, v), "cascade": partial(cascade.run, q, k, v)}
        times = interleave(machine, runs, rounds, flush=True)
        value, spread = ratio(times["flat"], times["cascade"])
        detail = ", ".join(f"{n} {statistics.median(t) * 1e6:.0f} us" for n, t in times.items())
        detail += f"; flat {plan_kernels(flat)}"
        yield Row(f"{count} requests share {shared} keys, heads {heads[0]}/{heads[1]}: flat over "
                  "cascade", None, value, "x", "higher", spread, detail)  # fmt: skip


def graph_rows(machine: Machine, rounds: int) -> Iterator[Row]:
    """A captured decode step whose plan changes between replays: device time of a replay."""
    heads = machine.pick(HEADS, _REDUCED_HEADS)
    count, kv_len = machine.pick((32, 2048), (4, 96))
    limits = fa.Limits(count, count, kv_len, count * kv_len // PAGE)
    made = _engine(machine, heads, limits=limits, cuda_graph=True)
    q = machine.random(count, heads[0], DIM)
    k, v = (machine.random(count * kv_len // PAGE, PAGE, heads[1], DIM) for _ in range(2))
    whole = page_table([kv_len] * count, PAGE, shuffled=True, device=machine.device)
    made.plan(indptr([1] * count), whole)
    replay = machine.graph(partial(made.run, q, k, v), 1)
    plain = _engine(machine, heads)
    plain.plan(indptr([1] * count), whole)
    runs = {"replay": replay, "plain": machine.graph(partial(plain.run, q, k, v), 1)}
    times = interleave(machine, runs, rounds)
    value, spread = ratio(times["replay"], times["plain"])
    detail = f"plain {statistics.median(times['plain']) * 1e6:.0f} us"
    yield Row(f"decode of {count} requests at their limits: replay over a graph of one plan", None,
              value, "x", "lower", spread, detail)  # fmt: skip
    made.plan(indptr([1]), page_table([64], PAGE, device=machine.device))
    small = interleave(machine, {"replay": replay}, rounds)["replay"]
    yield time_row("the same graph after a plan of one short request", None, small, "us")
