"""The PTX emulator: interprets kernels that nvcc compiled on the CPU, instruction by instruction.

Its library is compiled at first use (`library.py`).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Sequence

from flashattn_jit.env import EmulatorCopies as AsyncCopies
from flashattn_jit.errors import EmulatorError, EmulatorFault
from flashattn_jit.jit.emulator.library import Allocation as _Allocation
from flashattn_jit.jit.emulator.library import Launch, library

Allocation = tuple[str, int, int, bool] | tuple[str, int, int, bool, bool]
"""Name, address, bytes, whether the kernel may write it, and whether it is initialised (True by
default; otherwise reads before the first write are faults)."""

_BETWEEN = "\x1f"
_MOMENTS = ("late", "early")


class Program:
    """A PTX module. Raises EmulatorError for invalid PTX, and the errors of `library`."""

    def __init__(self, ptx: str) -> None:
        _check_text("ptx", ptx)
        self._library = library()
        self._handle = ctypes.c_void_p()
        _check(self._library.fajit_emulator_open(ptx.encode(), ctypes.byref(self._handle)))
        closing = weakref.finalize(self, self._library.fajit_emulator_close, self._handle)
        closing.atexit = False  # a thread may still be running it

    def run(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        params: bytes,
        allocations: Sequence[Allocation],
        *,
        async_copies: AsyncCopies = "late",
        check_races: bool = True,
        num_threads: int = 0,
        uninitialised: bool = True,
        overlaps: Collection[str] | None = None,
        step_limit: int = 4_000_000_000,
    ) -> None:
        """Runs all blocks of a launch; global memory is this process's, at its own addresses.

        Args:
            async_copies: when asynchronous operations take effect: as late as waits allow, when
                they are issued, or at moments drawn from a seed, which also draws the order of
                warps.
            check_races: accesses of shared memory without a barrier between them, or to bytes
                that an asynchronous copy may still be writing, are faults.
            num_threads: blocks that run at a time; 0: one per core. Results do not depend on it.
            uninitialised: reads of shared memory that nothing has written are faults.
            overlaps: names of the allocations that the kernel before may write, if this launch
                starts while that one runs: before `griddepcontrol.wait`, reads of these and all
                writes are faults, and so is a thread that ends. None: launches are in order.
            step_limit: instructions of a block's warps after which the block counts as stuck.

        Raises:
            EmulatorError: an unknown kernel or instruction.
            EmulatorFault: an illegal access, a race or another fault of the kernel; memory keeps
                what was written before.
        """
        seed = async_copies if isinstance(async_copies, int) else None
        if async_copies not in _MOMENTS and not (seed is not None and 0 <= seed < 1 << 64):
            raise ValueError(f"async_copies is 'late', 'early' or a seed, not {async_copies!r}")
        moment = _MOMENTS.index(async_copies) if isinstance(async_copies, str) else len(_MOMENTS)
        _check_numbers("grid", grid, 3)
        _check_numbers("block", block, 3)
        _check_numbers("shared_bytes, num_threads", (shared_bytes, num_threads), 2)
        _check_text("kernel", kernel)
        given = (_Allocation * len(allocations))()
        for one, (name, begin, num_bytes, writable, *initialised) in zip(
            given, allocations, strict=True
        ):
            _check_text("an allocation's name", name)
            if begin < 0 or num_bytes < 0 or len(initialised) > 1:
                raise EmulatorError(f"allocation {name}: {num_bytes} bytes from {begin} are none")
            one.name, one.begin, one.bytes = name.encode(), begin, num_bytes
            one.writable, one.initialised = writable, all(initialised)
            one.pending = overlaps is not None and name in overlaps
        launch = Launch(
            kernel.encode(), grid, block, shared_bytes, num_threads, params, len(params), given,
            len(given), step_limit, seed or 0, moment, check_races, uninitialised,
            overlaps is not None,
        )  # fmt: skip
        _check(self._library.fajit_emulator_run(self._handle, ctypes.byref(launch)))


def _check_numbers(name: str, values: Sequence[int], count: int) -> None:
    """Raises EmulatorError for values that do not fit into 32 bits."""
    if len(values) != count or not all(
        isinstance(value, int) and 0 <= value < 1 << 31 for value in values
    ):
        raise EmulatorError(f"{name} must be {count} ints from 0 to 2**31 - 1, got {values!r}")


def _check_text(name: str, text: str) -> None:
    """Raises EmulatorError for characters that end or separate texts in the library."""
    if "\0" in text or _BETWEEN in text:
        raise EmulatorError(f"{name} holds a character that no PTX has")


def opcodes() -> list[tuple[str, str, str, str]]:
    """The table of opcodes: name, types, semantics, test vector."""
    fields = _fields(library().fajit_emulator_opcodes())
    return list(zip(*(fields[i::4] for i in range(4)), strict=True))


def _check(failed: int | None) -> None:
    """Raises the error that a function of the library returned, if any."""
    if not failed:
        return
    kind, message, *rest = _fields(failed)
    if kind == "memory":
        raise MemoryError(message)
    if kind != "fault":
        raise EmulatorError(message)
    fault_kind, kernel, source, x, y, z, thread, address, allocation = rest
    raise EmulatorFault(
        message,
        kind=fault_kind,
        kernel=kernel,
        source=source,
        block=(int(x), int(y), int(z)),
        thread=int(thread),
        address=int(address) if address else None,
        allocation=allocation,
    )


def _fields(text: int) -> list[str]:
    """The fields of the text at an address, whose memory is returned to the library."""
    try:
        return ctypes.string_at(text).decode(errors="replace").split(_BETWEEN)[:-1]
    finally:
        library().fajit_emulator_free(text)
