"""Limits on the time of small Python work, also on machines slower than the one they are for."""

from __future__ import annotations

import time

import numpy as np

_REFERENCE_S = 0.0012
"""Of `_work`, about, on a machine where the limits hold by a hair; elsewhere they leave room."""


def allowed(seconds: float) -> float:
    """`seconds` on the reference machine, on this one: more where it is slower, never less.

    Measured anew for each limit, in CPU time, because a shared machine is slow by the minute.
    """
    return seconds * max(1.0, min(_work() for _ in range(9)) / _REFERENCE_S)


def _work() -> float:
    """CPU seconds of a fixed mix of what the limits are about: small arrays and dictionaries."""
    begin = time.thread_time()
    table: dict[tuple[int, int], int] = {}
    values = np.arange(256)
    for i in range(800):
        table[(i, i & 7)] = len(table)
        values = np.minimum(values, values[::-1]) + table.get((i - 1, 0), 1)
    return time.thread_time() - begin
