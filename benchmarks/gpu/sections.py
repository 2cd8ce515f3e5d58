"""What a call of the benchmark consists of: measurements, each run or left out alone."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from benchmarks.gpu.machine import Machine
from benchmarks.parts.measure import Row
from benchmarks.parts.progress import say, show


@dataclass(frozen=True)
class Measurement:
    """Rows that are measured together, and the seconds that they take at most."""

    what: str
    seconds: float
    rows: Callable[[], Iterable[Row]]


@dataclass
class Clock:
    """The time limit of a call. Measurements that would end too late are left out."""

    limit_s: float
    begin: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds left."""
        return self.limit_s - (time.monotonic() - self.begin)


def measured(machine: Machine, clock: Clock, measurements: Iterable[Measurement]) -> Iterator[Row]:
    """The rows. A measurement that fails is a row with the error, and the others follow."""
    for one in measurements:
        if clock.left() < one.seconds:
            say(f"  {one.what}: left out, {clock.left():.0f} s are left")
            yield Row(f"{one.what}: left out, no time", None, 0.0, "")
            continue
        show(one.what)
        try:
            for row in one.rows():
                say(f"  {row.claim}: {row.measured:.3g} {row.unit} ({row.detail})")
                yield row
            machine.synchronize()
            machine.release()
        except Exception as error:  # of any kind: of a kernel, of a peer, of this script
            text = f"{type(error).__name__}: {str(error)[:300]}"
            say(f"  {one.what} FAILED: {text}\n{traceback.format_exc()}")
            yield Row(f"{one.what}: FAILED", 0.0, 1.0, "errors", "lower", detail=text)
            if not machine.works():
                yield Row("the device has failed: nothing more can be measured", 0.0, 1.0, "errors",
                          "lower")  # fmt: skip
                return
