"""The ranks that `benchmarks.distributed` times, each a process that imports this file."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import flashattn_jit as fa
from benchmarks.parts.measure import Row, interleave, ratio

HEAD_DIM = 128
_APART = "two processes apart"
_HEADS = (8, 2)
_RUNS = {
    # name -> (q_len, kv_len, goal)
    "causal prefill 8k": ([8192], [8192], 1.7),
    "decode, 16 requests of 8k keys": ([1] * 16, [8192] * 16, None),
}


def run_rank(rank: int, ranks: int, store: str, pairs: int, queue: Any) -> None:
    """Measures as one rank of the group; rank 0 puts its rows in the queue."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    rows = []
    for name, (q_len, kv_len, goal) in _RUNS.items():
        q_indptr, kv_indptr = (torch.tensor([0, *x]).cumsum(0) for x in (q_len, kv_len))
        made = {
            "num_q_heads": _HEADS[0], "num_kv_heads": _HEADS[1], "head_dim": HEAD_DIM,
            "q_dtype": torch.bfloat16,
        }  # fmt: skip
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(int(n[-1]), heads, HEAD_DIM, dtype=torch.bfloat16)
            for n, heads in zip((q_indptr, kv_indptr, kv_indptr), (*_HEADS, _HEADS[1]), strict=True)
        )
        one = fa.BatchAttention(fa.Causal(), **made)
        one.plan(q_indptr, fa.Ragged(kv_indptr))
        candidates: dict[str, Any] = {"one process": lambda b=one, x=(q, k, v): b.run(*x)}
        # What the machine gives two processes that need nothing of each other.
        candidates[_APART] = lambda b=one, x=(q, k, v): (b.run(*x), dist.barrier())
        plans = {}
        shard = [x.chunk(ranks)[rank].clone() for x in (q, k, v)]
        for way in (None, "keys", "ring"):
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
        if rank == 0:
            value, spread = ratio(times["one process"], times[_APART])
            rows.append(
                Row(f"two processes without messages over one: {name}", None, 2 * value, "x",
                    spread=[2 * x for x in spread])
            )  # fmt: skip
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
