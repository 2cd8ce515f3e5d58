"""A memory of what was planned: the latest entries stay."""

from __future__ import annotations

from threading import Lock
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Recent(dict[_Key, _Value]):
    """A dict in which `keep` leaves the newest `most` entries. Threads may share it."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._lock = Lock()

    def keep(self, key: _Key, value: _Value) -> _Value:
        """Remembers a value, and returns it."""
        with self._lock:
            self[key] = value
            while len(self) > self._most:
                del self[next(iter(self))]
        return value
