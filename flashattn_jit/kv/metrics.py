"""`Collector`: a cache's figures for prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .stats import Stats

if TYPE_CHECKING:
    from .cache import Cache

PREFIX = "flashattn_jit_kv_"


class Collector:
    """Exports `Cache.stats` when it is scraped; register it with a prometheus_client registry.

    It reads counters alone, so that scraping from another thread is allowed. A scrape during a step
    may see figures of before and after it.

    Args:
        cache: the cache.
        name: the value of the label `cache`, to tell several apart.

    Raises InputError if prometheus_client is missing.

    Example:
        >>> prometheus_client.REGISTRY.register(fa.kv.Collector(cache))
    """

    def __init__(self, cache: Cache, name: str = "kv") -> None:
        try:
            from prometheus_client import core
        except ImportError:
            raise InputError(
                "fa.kv.Collector needs prometheus_client, which is not installed: "
                "pip install prometheus-client"
            ) from None
        self._core: Any = core
        self._cache, self._name = cache, name

    def collect(self) -> Iterator[Any]:
        """The metrics, as prometheus_client asks for them."""
        stats = self._cache.stats()
        yield self._pages(stats)
        for name, text, values in (
            ("evicted_pages", "Cached pages dropped for room.", [g.evicted for g in stats.groups]),
            ("reclaimed_pages", "Pages that a mask gave up.", [g.reclaimed for g in stats.groups]),
            ("copied_pages", "Pages copied before a write.", [g.copied for g in stats.groups]),
        ):
            family = self._core.CounterMetricFamily(PREFIX + name, text, labels=["cache", "group"])
            for group, value in enumerate(values):
                family.add_metric([self._name, str(group)], value)
            yield family
        for name, text, value in (
            ("asked_tokens", "Tokens of opened sequences.", stats.asked_tokens),
            ("hit_tokens", "Tokens of opened sequences that were cached.", stats.hit_tokens),
            ("appended_tokens", "Tokens of committed steps.", stats.appended_tokens),
            ("swapped_bytes", "Bytes moved to the host and back.", stats.swapped_bytes),
        ):
            yield self._one(self._core.CounterMetricFamily, name, text, value)
        for name, text, value in (
            ("sequences", "Sequences that are not closed.", stats.num_sequences),
            ("suspended_sequences", "Sequences in host memory.", stats.num_suspended),
            ("host_bytes", "Bytes of suspended sequences.", stats.host_bytes),
        ):
            yield self._one(self._core.GaugeMetricFamily, name, text, value)

    def _pages(self, stats: Stats) -> Any:
        labels = ["cache", "group", "state"]
        family = self._core.GaugeMetricFamily(PREFIX + "pages", "Pages by state.", labels=labels)
        for number, group in enumerate(stats.groups):
            for state in ("free", "used", "evictable"):
                family.add_metric([self._name, str(number), state], getattr(group, state))
        return family

    def _one(self, kind: Any, name: str, text: str, value: float) -> Any:
        family = kind(PREFIX + name, text, labels=["cache"])
        family.add_metric([self._name], value)
        return family
