"""A dictionary of what was used last, bounded by size."""

from __future__ import annotations

from threading import Lock
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Recent(dict[_Key, _Value]):
    """A dict in which `keep` leaves the newest entries, whose sizes sum to `most` at most.

    Threads may share it.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._total = 0
        self._sizes: dict[_Key, int] = {}
        self._lock = Lock()

    def keep(self, key: _Key, value: _Value, size: int = 1) -> _Value:
        """Remembers a value, and returns it."""
        with self._lock:
            self[key] = value
            self._total += size - self._sizes.get(key, 0)
            self._sizes[key] = size
            while self._total > self._most and len(self) > 1:
                oldest = next(iter(self))
                del self[oldest]
                self._total -= self._sizes.pop(oldest)
        return value

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            super().clear()
            self._sizes.clear()
            self._total = 0
