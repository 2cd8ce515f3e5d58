"""`fa.kv`: a KV cache of pages that knows the masks of a model's layers.

`Spec` says what is stored, `Cache` has the pages, `Sequence` is one request, `Step` the new tokens
of some. Attention itself is `fa.BatchAttention` or `fa.CascadeAttention` over the step's pages.
"""

from __future__ import annotations

from ..formats import Format, Stored
from .cache import Cache
from .metrics import Collector
from .policy import LFU, LRU, Entry, Policy, Priority, RecomputeCost
from .reclaim import dead_pages
from .sequence import Sequence
from .spec import Group, Spec
from .stats import GroupStats, Stats
from .step import Step
from .timeline import Timeline

__all__ = [
    "LFU",
    "LRU",
    "Cache",
    "Collector",
    "Entry",
    "Format",
    "Group",
    "GroupStats",
    "Policy",
    "Priority",
    "RecomputeCost",
    "Sequence",
    "Spec",
    "Stats",
    "Step",
    "Stored",
    "Timeline",
    "dead_pages",
]
