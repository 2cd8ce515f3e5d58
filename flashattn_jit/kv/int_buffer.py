"""`IntBuffer`: an integer array that grows at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[Any]


class IntBuffer:
    """A one-dimensional integer array that grows at its end, in amortised constant time."""

    __slots__ = ("_memory", "length")

    def __init__(self, values: Ints | Sequence[int] = (), dtype: type[np.integer[Any]] = np.int32):
        given = np.array(values, dtype)  # a copy
        self._memory: Ints = given
        self.length = len(given)

    @property
    def view(self) -> Ints:
        """The entries, not copied: valid until the buffer grows."""
        return self._memory[: self.length]

    def extend(self, values: Ints | list[int]) -> None:
        """Append entries."""
        end = self.length + len(values)
        if end > len(self._memory):
            memory = np.empty(max(16, end, 2 * len(self._memory)), self._memory.dtype)
            memory[: self.length] = self._memory[: self.length]
            self._memory = memory
        self._memory[self.length : end] = values
        self.length = end

    def append(self, value: int) -> None:
        """Append one entry."""
        if self.length == len(self._memory):
            self.extend(np.array((value,)))
            return
        self._memory[self.length] = value
        self.length += 1

    def last(self) -> int:
        """The last entry; there is one."""
        return int(self._memory[self.length - 1])

    def truncate(self, length: int) -> None:
        """Keep the first `length` entries."""
        assert 0 <= length <= self.length
        self.length = length

    def copy(self) -> IntBuffer:
        """A buffer of the same entries."""
        return IntBuffer(self.view, self._memory.dtype.type)
