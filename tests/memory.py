"""The memory that a call takes at its peak, whoever allocates it: Python, numpy, torch or C++."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

PROCESS = Path("/proc/self")


def peak_bytes(call: Callable[[], object]) -> int:
    """How far the process grows while `call` runs."""
    (PROCESS / "clear_refs").write_text("5")  # the high-water mark begins anew
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    """A figure of /proc/self/status in bytes."""
    (line,) = (x for x in (PROCESS / "status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024
