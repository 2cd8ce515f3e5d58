"""Kernels on the GPUs of this machine: do multiprocessors hold the blocks that were planned?

The tile of a kernel is chosen so that a multiprocessor holds a number of its blocks at once. Where
the compiled kernel takes more registers or shared memory, it holds fewer, and nothing but the speed
shows it. Kernels that the process has not loaded are loaded for the question and unloaded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ... import _C, env
from ...codegen.spec import cuda_target
from ...codegen.targets import called_target
from ...errors import AbiError, CacheError, LaunchError, TargetError
from ...jit.cache.layers import found_in_folder, unfit_driver
from ...jit.cache.store import Store
from ...jit.module import default, residency_shortages
from .check import Check, named, ok, warning

_LOAD_S = 0.5


def residency() -> Iterator[Check]:
    """The kernels of each GPU, in this process and in the user's folder of the cache."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        try:
            target = cuda_target(*torch.cuda.get_device_capability(index))
        except TargetError:  # a check of its own says so
            continue
        yield from named(f"gpu {index} kernels", _on_device(index, target))


def _on_device(index: int, target: str) -> Iterator[Check]:
    store = Store(env.cache_dir())
    end: float | None = None  # from the first load on, which also makes the device's context
    shortages: list[str] = []
    refusals: list[str] = []
    loaded = unread = 0
    for artifact in _artifacts(store, target):
        if end is not None and time.monotonic() > end:
            unread += 1
            continue
        try:
            module = artifact if isinstance(artifact, _C.Module) else _opened(store, artifact)
            residency = module.probe(index)
            end = end or time.monotonic() + _LOAD_S
        except (AbiError, CacheError, LaunchError, OSError) as refusal:
            refusals.append(str(refusal))
            continue
        loaded += 1
        shortages += [f"{words} ({module.path})" for words in residency_shortages(residency, index)]
    rest = f" ({unread} not looked at)" if unread else ""
    if shortages:
        yield warning(
            f"{len(shortages)} kernels of {loaded} artifacts{rest} run fewer blocks on a "
            f"multiprocessor than planned; the first: {shortages[0]}",
            "compile them with another release of nvcc (FLASHATTN_JIT_CUDA_HOME); report this",
        )
    if refusals:
        yield warning(
            f"{len(refusals)} artifacts cannot be loaded; the first: {refusals[0]}",
            "flashattn-jit cache verify; update the driver if it is older than the kernels need",
        )
    if not loaded and not refusals:
        yield ok(f"no kernels for {target} to look at{rest}")
    elif not shortages and not refusals:
        yield ok(
            f"{loaded} artifacts for {target}{rest}: multiprocessors hold the blocks that were "
            "planned"
        )


def _artifacts(store: Store, target: str) -> Iterator[_C.Module | Path]:
    """The modules for a target that this process has opened, then other entries of the store."""
    opened = {
        asked.module.path: asked.module
        for asked in default.loaded()
        if called_target(asked.request.target) == target
    }
    yield from opened.values()
    for entry in store.entries():
        fields = entry.document
        if (
            called_target(str(fields.get("target"))) == target
            and fields.get("abi_version") == str(_C.ABI_VERSION)
            and entry.artifact.is_file()
            and str(entry.artifact) not in opened
            and not unfit_driver(target, entry.meta.get("min_driver"))
        ):
            yield entry.path


def _opened(store: Store, entry: Path) -> _C.Module:
    with found_in_folder(store.verify(entry), "user").loadable() as artifact:
        return _C.Module(str(artifact))
