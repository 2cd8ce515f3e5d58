"""`fa.ContextParallel`: balance, bytes sent and plan() for up to 64 ranks; two ranks against one.

    python -m benchmarks.distributed [--only plan|run] [--save]

Plans are made for ranks that do not exist; no kernel runs. The two ranks are processes of one
thread each over gloo on this machine, which needs two idle cores; the one process that they are
compared with has one thread, and runs while the other rank waits. torch's own `context_parallel`
(2.13) cannot be a peer: it has no CPU kernel.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.multiprocessing as mp

import flashattn_jit as fa
from benchmarks.distributed.ranks import HEAD_DIM, run_rank
from benchmarks.parts.measure import Row, interleave, run_parts, time_row
from flashattn_jit.distributed import context_parallel
from flashattn_jit.distributed.costs import Rates

_LONG = 131072
_HEADS = (32, 8)
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
            variant, size, num_q_heads=_HEADS[0], num_kv_heads=_HEADS[1], head_dim=HEAD_DIM,
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


def runs(options: argparse.Namespace) -> list[Row]:
    """Two ranks of one thread over one process of one thread."""
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").SimpleQueue()
        store = str(Path(folder, "store"))
        mp.spawn(run_rank, (2, store, options.pairs, queue), nprocs=2)
        return list(queue.get())


if __name__ == "__main__":
    run_parts("distributed", __doc__, {"plan": plans, "run": runs})
