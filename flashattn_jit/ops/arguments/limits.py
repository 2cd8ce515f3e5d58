"""`fa.Limits`: bounds of the batches that an object will plan."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import cache

import torch

from .checks import check_int


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of every later `plan()`, which determine the sizes of buffers and grids.

    Args:
        max_requests: requests of a batch, and groups of shared keys on each level.
        max_q_tokens: query tokens of a batch.
        max_kv_len: keys of one request.
        max_pages: entries of page_indices; 0 for ragged keys.

    Raises:
        InputError: one is no int, is negative or does not fit 32 bits.

    Example:
        >>> limits = fa.Limits(max_requests=64, max_q_tokens=512, max_kv_len=8192, max_pages=4096)
        >>> batch = fa.BatchAttention(fa.Causal(), ..., limits=limits, cuda_graph=True)
    """

    max_requests: int
    max_q_tokens: int
    max_kv_len: int
    max_pages: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "max_pages" else 1
            object.__setattr__(self, field.name, check_int(field.name, value, least))

    def native(self) -> tuple[int, int, int, int]:
        """The bounds as a tuple, for the scheduler."""
        return self.max_requests, self.max_q_tokens, self.max_kv_len, self.max_pages


@cache
def memory_bytes(device: torch.device) -> int:
    """Bytes of memory that a device has in all; 2**63 - 1 where nobody tells."""
    try:
        if device.type == "cuda":
            return int(torch.cuda.get_device_properties(device).total_memory)
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AssertionError, RuntimeError, OSError, ValueError, AttributeError):
        return 2**63 - 1
