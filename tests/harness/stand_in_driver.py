"""A stand-in for the CUDA driver, `stand_in_libcuda.cpp`: it records what the runtime calls."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashattn_jit import _C
from flashattn_jit.jit.cache.layers import driver_version
from flashattn_jit.jit.compilation.toolchain import find_compiler

SOURCE = Path(__file__).with_name("stand_in_libcuda.cpp")


class StandIn:
    """The library at a path, in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.stand_in_calls.restype = ctypes.c_char_p
        self.library.stand_in_params.argtypes = (ctypes.c_size_t,)
        self.library.stand_in_capture.argtypes = (ctypes.c_void_p, ctypes.c_bool)

    def calls(self, *names: str) -> list[str]:
        """The calls since the last time, in order; those of some functions, if names are given."""
        lines = self.library.stand_in_calls().decode().splitlines()
        return [line for line in lines if not names or line.split()[0] in names]

    def fail(self, function: str, result: int) -> None:
        """Let a function fail from now on; result 0: no longer."""
        self.library.stand_in_fail(function.encode(), result)

    def holds(self, blocks: int) -> None:
        """A multiprocessor holds this number of blocks of any kernel."""
        self.library.stand_in_blocks(blocks)

    def supports(self, version: int) -> None:
        """The driver supports this version of CUDA, 12040 for 12.4, from the next load on."""
        self.library.stand_in_version(version)

    def records_params(self, count: int) -> None:
        """Launches record this number of bytes of the kernel's parameter."""
        self.library.stand_in_params(count)

    def captures(self, stream: int = 0, elsewhere: bool = False) -> None:
        """A stream is being captured; elsewhere: by another thread, in the global mode."""
        self.library.stand_in_capture(stream, elsewhere)

    def set_device(self, device: int) -> None:
        """This thread's current context is the device's primary one."""
        self.library.stand_in_set_device(device)

    def state(self) -> tuple[int, int, int]:
        """Of this thread: device of the current context (-1: none), contexts, capture mode."""
        library = self.library
        return library.stand_in_device(), library.stand_in_depth(), library.stand_in_mode()


def compile_stand_in(folder: Path, *flags: str) -> Path:
    """The library, compiled into a folder."""
    compiler = find_compiler()
    assert compiler is not None
    library = folder / "libcuda.so.1"
    subprocess.run(
        [*compiler.command, "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags,
         "-o", str(library), str(SOURCE)],
        check=True,
    )  # fmt: skip
    return library


@pytest.fixture(scope="session")
def stand_in_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled stand-in."""
    return compile_stand_in(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(stand_in_library: Path) -> Iterator[StandIn]:
    """The stand-in is the driver that modules are loaded with; this thread has no context."""
    stand_in = StandIn(stand_in_library)
    stand_in.library.stand_in_reset()
    previous = _C.use_driver(str(stand_in_library))
    driver_version.cache_clear()
    yield stand_in
    _C.use_driver(previous)
    driver_version.cache_clear()
