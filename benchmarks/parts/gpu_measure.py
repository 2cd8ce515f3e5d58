"""Times on the device: events around each call, candidates in turn, the L2 flushed if asked.

Launching takes the host longer than a short kernel takes the device. So each timed call is queued
behind a spin kernel, which gives the host time to queue it; the events then measure the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.parts.measure import Run
from benchmarks.parts.progress import say, show, steps

_SPIN_CYCLES = 2_000_000  # about 1 ms


@dataclass
class Clock:
    """The time limit of the run. Sections that would begin too late are left out and reported."""

    limit_s: float
    begin: float = field(default_factory=time.monotonic)
    skipped: list[str] = field(default_factory=list)

    def left(self) -> float:
        """Seconds left."""
        return self.limit_s - (time.monotonic() - self.begin)

    def allows(self, what: str, seconds: float) -> bool:
        """Whether `seconds` are left for `what`; if not, adds it to `skipped`."""
        if self.left() >= seconds:
            return True
        self.skipped.append(what)
        say(f"  {what}: left out, {self.left():.0f} s are left")
        return False


class Flush:
    """Evicts the L2: writes four times its size."""

    def __init__(self, l2_bytes: int) -> None:
        self._buffer = torch.empty(max(4 * l2_bytes, 1 << 26), dtype=torch.uint8, device="cuda")

    def __call__(self) -> None:
        self._buffer.zero_()


def interleave_on_device(
    candidates: Mapping[str, Run],
    rounds: int,
    flush: Flush | None = None,
    calls: int = 1,
    warm_up: int = 3,
) -> dict[str, list[float]]:
    """Device seconds a call of each candidate, A B C A B C; `calls` of them between two events."""
    what = ", ".join(candidates)
    show(f"{what}: first calls")
    for _ in range(warm_up):
        for run in candidates.values():
            run()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    pending: list[tuple[str, Any, Any]] = []
    for _ in steps(what, range(rounds)):
        for name, run in candidates.items():
            if flush is not None:
                flush()
            torch.cuda._sleep(_SPIN_CYCLES)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                run()
            end.record()
            pending.append((name, begin, end))
            end.synchronize()
    for name, begin, end in pending:
        times[name].append(begin.elapsed_time(end) / 1e3 / calls)
    return times


def graph_of(run: Run, calls: int) -> Run:
    """A CUDA graph of `calls` calls, as a function that replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph.replay


def host_seconds(run: Run, calls: int, rounds: int) -> list[float]:
    """Host seconds a call, the device's queue empty at the start of each round."""
    for _ in range(20):
        run()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - begin) / calls)
    torch.cuda.synchronize()
    return times


def copy_run(nbytes: int) -> Run:
    """A device-to-device copy of random bytes."""
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def matrix_rate(rounds: int = 10, size: int = 8192) -> float:
    """FLOP/s of torch's bf16 matrix product on random data."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    times = interleave_on_device({"matmul": lambda: a @ b}, rounds)["matmul"]
    return 2.0 * size**3 / statistics.median(times)
