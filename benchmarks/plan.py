"""plan(): its time, and how evenly it distributes uneven batches over workers.

    python -m benchmarks.plan [--save]

Time is that of the whole Python call, `BatchAttention.plan`, for 264 workers; no kernel runs. There
are two sets of tiles: those of an H100, and this CPU's, as if it had 264 threads. The former are
planned for `emulated:sm_90`, which writes the plan to pageable memory instead of a pinned buffer;
page indices are not checked, as indices on a device are not. Balance is that of predicted loads, by
the costs of flashattn_jit/planner/tiles.py: the longest worker over the mean, for the three
distributions of lengths of Ye et al. 2025 (arXiv 2501.01005), 16 to 256 requests of 1,024 keys on
average.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import flashattn_jit as fa
from benchmarks.parts.batch_work import (
    constant_lengths,
    indptr,
    page_table,
    uniform_lengths,
    zipf_lengths,
)
from benchmarks.parts.measure import Row, arguments, interleave, median, ratio, report, time_row
from benchmarks.parts.progress import say, steps
from flashattn_jit import _C
from flashattn_jit.codegen.spec import default_target
from flashattn_jit.codegen.targets import is_cuda
from flashattn_jit.ops.device import cuda
from flashattn_jit.ops.planning.batch_plan import native_kind
from flashattn_jit.planner.tiles import Problem, choose, few_rows
from flashattn_jit.variants.ir.ir import VariantIR

_WORKERS, _DIM, _PAGE = 264, 128, 16
_COUNTS = (16, 32, 64, 128, 256)


def variants() -> dict[str, Any]:
    """Three masks that are planned from bounds, then two that are planned from cells."""
    documents = torch.arange(16384) // 700
    return {
        "full": fa.Full(),
        "causal": fa.Causal(),
        "window 1024": fa.SlidingWindow(1024),
        "window 1024 and 4 sinks": fa.StreamingLLM(1024, 4),
        "documents, causal": fa.variant(
            mask_mod=lambda b, h, i, j: (documents[i] == documents[j]) & (j <= i)
        ),
    }


def mixed() -> tuple[list[int], list[int]]:
    """(q_len, kv_len) of a step of a serving engine, with up to 8,191 earlier keys per request.

    240 requests decode, 8 verify 4 drafted tokens, 8 prefill a chunk of 512.
    """
    dice = random.Random(0)
    q_len = [1] * 240 + [4] * 8 + [512] * 8
    return q_len, [q + dice.randrange(8192) for q in q_len]


def _planner(
    variant: Any, q_len: Sequence[int], kv_len: Sequence[int], target: str | None = None
) -> Callable[[], object]:
    batch = fa.BatchAttention(
        variant, num_q_heads=32, num_kv_heads=8, head_dim=_DIM, q_dtype=torch.bfloat16,
        target=target,
    )  # fmt: skip
    queries = indptr(q_len).int()
    keys = page_table(kv_len, _PAGE, shuffled=True)
    return partial(batch.plan, queries, keys)


def time_rows(options: argparse.Namespace, target: str | None) -> list[Row]:
    """Microseconds of plan() for 256 mixed requests."""
    what = "CPU tiles" if target is None else target
    variables = {} if target is None else {"FLASHATTN_JIT_CHECK_PAGES": "0"}
    with patch.dict(os.environ, variables):
        try:
            runs = {name: _planner(v, *mixed(), target) for name, v in variants().items()}
            times = interleave(runs, options.pairs * 10, warm_up=10)
        except fa.CompileError as error:
            say(f"no figures of {what}: {error}")
            return []
    rows = []
    for i, name in enumerate(runs):
        goal = 150.0 if i < 3 else 1000.0
        claim = f"plan(), 256 mixed requests, {what}, {name}"
        fastest = f"fastest {min(times[name]) * 1e6:.0f}"
        rows.append(time_row(claim, goal, times[name], "us", fastest))
    return rows


def growth_rows(options: argparse.Namespace) -> list[Row]:
    """Milliseconds of plan() for thousands of decoding requests."""
    dice = random.Random(1)
    kv_len = [1 + dice.randrange(4096) for _ in range(4096)]
    rows = []
    for name in ("full", "causal"):
        variant = variants()[name]
        runs = {
            count: _planner(variant, [1] * count, kv_len[:count]) for count in (1024, 2048, 4096)
        }
        times = interleave({str(n): run for n, run in runs.items()}, options.pairs * 2)
        detail = ", ".join(f"{n}: {median(times[str(n)]) * 1e3:.2f} ms" for n in runs)
        claim = f"plan(), 4,096 requests, {name}"
        rows.append(time_row(claim, 2.0, times["4096"], "ms", detail))
        value, spread = ratio(times["4096"], times["1024"])
        rows.append(
            Row(f"plan(), 4,096 over 1,024 requests, {name}", 4.4, value, "x", "lower", spread)
        )
    return rows


def _kind(target: str, packed_rows: int) -> _C.Kind:
    problem = Problem((packed_rows,), (1024,), 1, 1, _DIM, _DIM, *["bfloat16"] * 3)
    return native_kind(choose(VariantIR(()), problem, target), target)


def loads(
    target: str, heads: tuple[int, int], workers: int, q_len: Sequence[int], kv_len: Sequence[int]
) -> list[float]:
    """Predicted nanoseconds of every worker."""
    most = few_rows(target, "bfloat16")
    prefill, few_row = _kind(target, 4096), _kind(target, 1)
    held = [np.array(indptr(n), np.int64) for n in (q_len, kv_len)]
    queries, keys = ((a.ctypes.data, a.size, a.itemsize) for a in held)
    plan = _C.BatchPlan(
        _C.BatchLengths(queries, (keys, None, None, 0, 0)),
        (prefill, few_row),
        _C.PlanOptions(
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim_v=_DIM,
            few_rows=most,
            num_workers=(workers, workers),
            share_workers=not is_cuda(target),
            limits=(len(q_len), sum(q_len), max(kv_len), 0),
        ),
    )
    both = zip(plan.load_ns(0), plan.load_ns(1), strict=True)
    return [a + b for a, b in both]


def balance_rows(target: str, heads: tuple[int, int], workers: int, goal: float) -> list[Row]:
    """The least even of all numbers of requests, for each distribution of lengths."""
    rows = []
    for name, lengths in (
        ("constant", constant_lengths), ("uniform", uniform_lengths), ("Zipf", zipf_lengths),
    ):  # fmt: skip
        worst, detail = 0.0, []
        for count in steps(f"balance, {target}, {name}", _COUNTS):
            kv_len = lengths(count, 1024)
            load = loads(target, heads, workers, [1] * count, kv_len)
            value = max(load) * len(load) / sum(load)
            detail.append(f"{count}: {value:.3f}")
            worst = max(worst, value)
        claim = f"longest worker over the mean, {workers} of {target}, heads {heads}, {name}"
        rows.append(Row(claim, goal, worst, "x", "lower", None, ", ".join(detail)))
    return rows


def main() -> None:
    """Measure and report."""
    options = arguments(__doc__)
    # Not set_num_threads, which would make torch start the threads, and not mocks, which keep a
    # list of their calls: that took up to 10 us of each plan.
    with (
        patch.object(torch, "get_num_threads", lambda: _WORKERS),
        patch.object(cuda, "EMULATED_SLOTS", _WORKERS),
    ):
        rows = time_rows(options, "emulated:sm_90") + time_rows(options, None)
        rows += growth_rows(options)
    for heads in ((32, 32), (32, 8)):
        rows += balance_rows("sm_90", heads, _WORKERS, 1.08)
    for heads in ((32, 8), (8, 1)):
        rows += balance_rows(default_target(), heads, 2, 1.05)
    report("plan", rows, options)


if __name__ == "__main__":
    main()
