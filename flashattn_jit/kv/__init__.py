"""`fa.kv`: a KV cache of pages that knows the masks of a model's layers.

`Spec` says what is stored, `Cache` has the pages, `Sequence` is one request, `Step` the new tokens
of some. Attention itself is `fa.BatchAttention` or `fa.CascadeAttention` over the step's pages.
`estimate` and `recommend` tell what a cache costs before there is one.
"""

from __future__ import annotations

from ..formats import Format, Stored
from ..ops.keys.columns import latent_parts
from .cache import Cache
from .capacity.estimate import Absorption, Estimate, GroupEstimate, estimate
from .capacity.replay import Option, Recommendation, Replay, Request, recommend
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
    "Absorption",
    "Cache",
    "Collector",
    "Entry",
    "Estimate",
    "Format",
    "Group",
    "GroupEstimate",
    "GroupStats",
    "Option",
    "Policy",
    "Priority",
    "Recommendation",
    "RecomputeCost",
    "Replay",
    "Request",
    "Sequence",
    "Spec",
    "Stats",
    "Step",
    "Stored",
    "Timeline",
    "dead_pages",
    "estimate",
    "latent_parts",
    "recommend",
]
