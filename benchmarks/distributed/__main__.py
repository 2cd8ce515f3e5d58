"""`fa.ContextParallel`: balance, bytes sent and plan() for up to 64 ranks; two ranks against one.

    python -m benchmarks.distributed [--only plan|run] [--save]

Plans are made for ranks that do not exist; no kernel runs. The two ranks are processes of one
thread each over gloo on this machine, which needs two idle cores; the one process that they are
compared with has one thread, and runs while the other rank waits. torch's own `context_parallel`
(2.13) cannot be a peer: it has no CPU kernel.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import flashattn_jit as fa
from benchmarks.parts.measure import Row, interleave, ratio, run_parts, time_row
from flashattn_jit.distributed import context_parallel
from flashattn_jit.distributed.costs import Rates

_LONG, _DIM = 131072, 128
_HEADS = (32, 8)
_RUN_HEADS = (8, 2)
_COUNTS = (2, 3, 4, 8, 16, 32, 64)


class _Rank:
    """A rank in the middle of a group that does not exist: it agrees with itself."""

    device, device_type = torch.device("cpu"), "cpu"

    def __init__(self, size: int) -> None:
        self.rank, self.size = size // 2, size

    def agree(self, doing: str, work: Any) -> Any:
        """The result of the work."""
        return work()[0]


def _alone(variant: Any, size: int, **options: Any) -> fa.ContextParallel:
    with patch.object(context_parallel, "Ranks", _Rank):
        made = fa.ContextParallel(
            variant, size, num_q_heads=_HEADS[0], num_kv_heads=_HEADS[1], head_dim=_DIM,
            q_dtype=torch.bfloat16, **options,
        )  # fmt: skip
    made._rates = Rates(1e-9, 1e-11)
    return made


def _masks() -> dict[str, tuple[Any, dict[str, Any]]]:
    dice = torch.Generator().manual_seed(0)
    lengths = torch.randint(256, 8192, (64,), generator=dice).tolist()
    documents = fa.variants.library.document_ids(lengths)[:_LONG][None]
    kept = torch.rand(_LONG // 512, _LONG // 512, generator=dice) < 0.2
    return {
        "causal": (fa.Causal(), {}),
        "documents, causal": (fa.DocumentMask() & fa.Causal(), {"documents": documents}),
        "window 4096": (fa.SlidingWindow(4096), {}),
        "prefix 40000": (fa.PrefixLM(), {"prefix_len": torch.tensor([40000])}),
        "random blocks of 512": (
            fa.variant(mask_mod=lambda b, h, q, k: kept[q // 512, k // 512]), {},
        ),
    }  # fmt: skip


def plans(options: argparse.Namespace) -> list[Row]:
    """Balance and bytes of one sequence of 128k tokens; the time of plan()."""
    rows = []
    tokens = torch.tensor([0, _LONG])
    for name, (variant, params) in _masks().items():
        worst, words = 0.0, []
        for ranks in _COUNTS:
            plan = _alone(variant, ranks, way="keys").plan(tokens, **params)
            worst = max(worst, plan.balance)
            sent = sum(plan.key_bytes) / sum(plan.gathered_key_bytes)
            words.append(
                f"{ranks} ranks: {plan.balance:.3f} (bound {plan.balance_bound:.3f}, at home "
                f"{plan.home_balance:.3f}), keys sent over an all-gather {sent:.3f}"
            )
            if name.startswith("window") and ranks == 8:
                rows.append(
                    Row("keys sent over an all-gather, window 4096 at 128k, 8 ranks", 0.1, sent,
                        "x", "lower")
                )  # fmt: skip
        rows.append(
            Row(f"longest rank over the mean, 2 to 64 ranks: {name}", 1.05, worst, "x", "lower",
                detail="; ".join(words))
        )  # fmt: skip
    dice = torch.Generator().manual_seed(1)
    many = torch.tensor([0, *torch.randint(100, 8000, (256,), generator=dice).tolist()]).cumsum(0)
    for name, variant in (("causal", fa.Causal()), ("window 1024", fa.SlidingWindow(1024))):
        parallel = _alone(variant, 64)
        times = interleave({"plan": lambda p=parallel: p.plan(many)}, options.pairs)
        rows.append(time_row(f"plan(), 64 ranks, 256 requests: {name}", 3.0, times["plan"], "ms"))
    return rows


_RUNS = {
    # name -> (q_len, kv_len, goal)
    "causal prefill 8k": ([8192], [8192], 1.7),
    "decode, 16 requests of 8k keys": ([1] * 16, [8192] * 16, None),
}


def runs(options: argparse.Namespace) -> list[Row]:
    """Two ranks of one thread over one process of one thread."""
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").SimpleQueue()
        store = str(Path(folder, "store"))
        mp.spawn(_rank, (2, store, options.pairs, queue), nprocs=2)
        return list(queue.get())


def _rank(rank: int, ranks: int, store: str, pairs: int, queue: Any) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    rows = []
    for name, (q_len, kv_len, goal) in _RUNS.items():
        q_indptr, kv_indptr = (torch.tensor([0, *x]).cumsum(0) for x in (q_len, kv_len))
        made = {
            "num_q_heads": _RUN_HEADS[0], "num_kv_heads": _RUN_HEADS[1], "head_dim": _DIM,
            "q_dtype": torch.bfloat16,
        }  # fmt: skip
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(int(n[-1]), heads, _DIM, dtype=torch.bfloat16)
            for n, heads in zip(
                (q_indptr, kv_indptr, kv_indptr), (*_RUN_HEADS, _RUN_HEADS[1]), strict=True
            )
        )
        one = fa.BatchAttention(fa.Causal(), **made)
        one.plan(q_indptr, fa.Ragged(kv_indptr))
        candidates: dict[str, Any] = {"one process": lambda b=one, x=(q, k, v): b.run(*x)}
        plans = {}
        shard = [x.chunk(ranks)[rank].clone() for x in (q, k, v)]
        for way in (None, "keys"):
            parallel = fa.ContextParallel(fa.Causal(), mesh, way=way, **made)
            plans[way] = parallel.plan(q_indptr, kv_indptr)
            candidates[str(way)] = lambda p=parallel, x=shard: p.run(*x)
        times: dict[str, list[float]] = {}
        if rank == 0:

            def together(label: str, run: Any) -> Any:
                def call() -> None:
                    if label == "one process":
                        run()
                        return
                    dist.barrier()
                    run()

                return call

            times = interleave({n: together(n, c) for n, c in candidates.items()}, pairs)
        else:
            for _ in range(pairs + 2):
                for label, run in candidates.items():
                    if label != "one process":
                        dist.barrier()
                        run()
        for way, plan in plans.items():
            if rank == 0:
                value, spread = ratio(times["one process"], times[str(way)])
                words = f"way {plan.way}, balance {plan.balance:.3f}"
                rows.append(
                    Row(f"two ranks over one process: {name}, {way or 'chosen'}",
                        goal if way is None else None, value, "x", spread=spread, detail=words)
                )  # fmt: skip
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_parts("distributed", __doc__, {"plan": plans, "run": runs})
