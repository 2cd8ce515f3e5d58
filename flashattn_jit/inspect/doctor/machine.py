"""torch, the CPU, GPUs, OpenMP and the package's own files."""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from ... import env
from ...codegen.spec import cuda_target, default_target, host_target, host_targets
from ...errors import EnvironmentVariableError, TargetError
from ...jit.cache.layers import driver_version, version_words
from ...planner.roofline import host_hardware
from .check import Check, error, named, ok, warning

LEAST_TORCH = (2, 11)
"""The oldest version of torch that the package is made for."""

_OPENMP = re.compile(r"/(lib(?:gomp|iomp5|omp)[^/]*\.so[^/]*)$")


def torch_version() -> Check:
    """Its version and build."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    cuda = torch.version.cuda
    detail = (
        f"{torch.__version__}, {f'built for CUDA {cuda}' if cuda else 'built without CUDA'}, "
        f"Python {platform.python_version()}"
    )
    if version >= LEAST_TORCH:
        return ok(detail)
    wanted = "torch>={}.{}".format(*LEAST_TORCH)
    return warning(f"{detail}; this package is made for {wanted}", f"pip install '{wanted}'")


def cpu() -> Check:
    """Instruction set, cores and threads, and what calls run on where that is another target."""
    machine, threads = host_hardware(), torch.get_num_threads()
    detail = f"{host_target()}, {machine.cores} cores, {threads} threads"
    if (widest := host_targets()[-1]) != host_target():
        detail += f"; runs {widest} too, which is slower here"
    with contextlib.suppress(EnvironmentVariableError):  # what is wrong there is said of it there
        if default_target() != host_target():
            detail += f"; calls without target= run {default_target()} (FLASHATTN_JIT_TARGET)"
    if threads <= machine.cores:
        return ok(detail)
    return warning(
        f"{detail}: more threads than cores that this process may use",
        f"set OMP_NUM_THREADS={machine.cores}, or call torch.set_num_threads",
    )


def gpu() -> Iterator[Check]:
    """The GPUs that torch sees, and the driver."""
    if torch.version.cuda is None:
        yield ok(
            "none: this torch is built without CUDA. Kernels for GPUs can be compiled here all the "
            "same, where there is a CUDA toolkit"
        )
        return
    if not torch.cuda.is_available():
        yield warning(
            f"torch is built for CUDA {torch.version.cuda} but sees no GPU",
            "where there should be one: run nvidia-smi, check the driver, CUDA_VISIBLE_DEVICES "
            "and, in a container, that it was started with GPUs",
        )
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        try:
            target = cuda_target(device.major, device.minor)
            check = ok(f"{device.name}, {target}, {driver_words()}")
        except TargetError as unknown:
            check = error(f"{device.name}: {unknown}", "use another GPU, or CPU tensors")
        yield from named(f"gpu {index}", [check])


def driver_words() -> str:
    """The driver in words."""
    version = driver_version()
    if not version:
        return "no driver"
    return f"driver for CUDA {version_words(version)}"


def openmp() -> Iterator[Check]:
    """How many OpenMP runtimes this process holds: two start twice as many threads."""
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return
    loaded = {
        line.split(maxsplit=5)[5]
        for line in maps.read_text(errors="replace").splitlines()
        if _OPENMP.search(line)
    }
    if len(loaded) > 1:
        yield warning(
            f"{len(loaded)} runtimes in a process: {', '.join(sorted(loaded))}",
            "import torch first, and remove the packages that bring the others (often "
            "intel-openmp or a conda llvm-openmp): threads of two runtimes fight for the cores",
        )
    else:
        yield ok(f"one runtime, {Path(next(iter(loaded), 'none')).name}")


def sources() -> Check:
    """The templates and headers that kernels are made of."""
    try:
        return ok(f"{env.templates_dir()}, {env.include_dir()}")
    except FileNotFoundError as missing:
        return error(str(missing), "reinstall the package")
