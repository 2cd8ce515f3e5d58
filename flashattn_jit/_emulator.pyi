"""The PTX emulator: runs kernels that nvcc compiled, on the CPU, instruction by instruction."""

from typing import Literal

Allocation = tuple[str, int, int, bool] | tuple[str, int, int, bool, bool]
"""Name, address, bytes, whether the kernel may write it, and whether it holds values already (if
not, reads before the first write are faults)."""

class Program:
    """A PTX module. Raises `EmulatorError` for text that it cannot read."""

    def __init__(self, ptx: str) -> None: ...
    @property
    def kernels(self) -> list[str]: ...
    @property
    def target(self) -> str:
        """As in the text, for example ``"sm_80"``."""

    def local_bytes(self, kernel: str) -> int:
        """Local memory of a thread of `kernel`."""

    def num_instructions(self, kernel: str) -> int: ...
    def run(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        params: bytes,
        allocations: list[Allocation],
        *,
        async_copies: Literal["late", "early"] = "late",
        check_races: bool = True,
        num_threads: int = 0,
        uninitialised: bool = True,
        step_limit: int = 4_000_000_000,
    ) -> None:
        """Runs all blocks of a launch; global memory is this process's, at its own addresses.

        Args:
            async_copies: cp.async writes when it is waited for, or when it is issued.
            check_races: accesses of shared memory without a barrier between them, or to bytes
                that an asynchronous copy may still be writing, are faults.
            num_threads: blocks that run at a time; 0: one a core. Results do not depend on it.
            uninitialised: reads of shared memory that nothing has written are faults.
            step_limit: instructions of a block's warps after which it counts as stuck.

        Raises:
            EmulatorError: an unknown kernel or instruction.
            EmulatorFault: the kernel did what it must not; memory keeps what it wrote till then.
        """

def opcodes() -> list[tuple[str, str, str, str]]:
    """The table of opcodes: name, types, semantics, test vector."""
