"""Limits on the time of small Python work, also on machines slower than the one they are for."""

from __future__ import annotations

import time

import numpy as np

_REFERENCE_S = 0.0012
"""Of `_work`, about, on a machine where the limits hold by a hair; elsewhere they leave room."""


def slowdown() -> float:
    """How many times slower this machine runs just now than that one; never less than 1.

    Asked for next to each measurement, because a shared machine is slow by the second.
    """
    return max(1.0, _work() / _REFERENCE_S)


def _work() -> float:
    """CPU seconds of a fixed mix of what the limits are about: small arrays and dictionaries."""
    begin = time.thread_time()
    table: dict[tuple[int, int], int] = {}
    values = np.arange(256)
    for i in range(800):
        table[(i, i & 7)] = len(table)
        values = np.minimum(values, values[::-1]) + table.get((i - 1, 0), 1)
    return time.thread_time() - begin
