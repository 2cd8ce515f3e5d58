"""Scales the time limits of small Python work for machines slower than the reference machine."""

from __future__ import annotations

import time

import numpy as np

_REFERENCE_S = 0.0012
"""About the time of `_work` on a machine where the limits just hold."""


def slowdown() -> float:
    """How many times slower than the reference this machine runs now; never less than 1.

    Call it next to each measurement: the speed of a shared machine changes within seconds.
    """
    return max(1.0, _work() / _REFERENCE_S)


def _work() -> float:
    """CPU seconds of a fixed workload like that of the limits: small arrays and dictionaries."""
    begin = time.thread_time()
    table: dict[tuple[int, int], int] = {}
    values = np.arange(256)
    for i in range(800):
        table[(i, i & 7)] = len(table)
        values = np.minimum(values, values[::-1]) + table.get((i - 1, 0), 1)
    return time.thread_time() - begin
