"""`fa.kv`: a KV cache of pages that knows the masks of a model's layers.

`Spec` says what is stored, `Cache` has the pages, `Sequence` is one request, `Step` the new tokens
of some. Attention itself is `fa.BatchAttention` or `fa.CascadeAttention` over the step's pages.
"""

from __future__ import annotations

from .cache import Cache
from .policy import LFU, LRU, Entry, Priority, RecomputeCost
from .reclaim import dead_pages
from .sequence import Sequence
from .spec import Group, Spec
from .stats import GroupStats, Stats
from .step import Step

__all__ = [
    "LFU",
    "LRU",
    "Cache",
    "Entry",
    "Group",
    "GroupStats",
    "Priority",
    "RecomputeCost",
    "Sequence",
    "Spec",
    "Stats",
    "Step",
    "dead_pages",
]
