"""The cost of warming beyond its compiles, and the speed of packing and unpacking."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import flashattn_jit as fa
from benchmarks.parts.cache_folder import fresh_cache
from benchmarks.parts.measure import Row, median
from benchmarks.parts.progress import show, steps
from flashattn_jit.deploy.pack.pack import pack
from flashattn_jit.deploy.pack.unpack import unpack
from flashattn_jit.deploy.warm.progress import WarmEvent
from flashattn_jit.deploy.warm.warm import warm
from flashattn_jit.jit.cache.entry import ARTIFACT, Entry, document_digest, sha256
from flashattn_jit.jit.cache.store import Store
from flashattn_jit.jit.compilation.nvcc import find_toolkit

JOBS = 2
CPU_ENTRIES = 500
CUDA_BYTES = 300e6
_DTYPES = ("fp32", "bf16")
_ROUNDS = 5

_MASKS: dict[str, Callable[..., Any] | None] = {
    "full": None,
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j < 256),
    "band": lambda b, h, i, j: (i - j < 128) & (j - i < 128),
    "prefix": lambda b, h, i, j: (j < 100) | (i >= j),
    "chunks": lambda b, h, i, j: (i // 64 == j // 64) & (i >= j),
    "sink": lambda b, h, i, j: (i >= j) & ((j < 4) | (i - j < 256)),
    "dilated": lambda b, h, i, j: (i >= j) & ((i - j) % 2 == 0),
}
_SCORES: dict[str, Callable[..., Any] | None] = {
    "plain": None,
    "cap": lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0),
    "slope": lambda s, b, h, i, j: s - 0.1 * (i - j) * (h + 1),
    "distance": lambda s, b, h, i, j: s - torch.log1p(torch.abs(i - j)),
    "heads": lambda s, b, h, i, j: torch.where(h % 2 == 0, s, 0.5 * s),
}


def variants() -> list[fa.Variant]:
    """40 variants with different structures."""
    return [
        fa.variant(score_mod=score, mask_mod=mask, name=f"{name}_{other}")
        for name, mask in _MASKS.items()
        for other, score in _SCORES.items()
    ]


def warm_rows(options: argparse.Namespace) -> list[Row]:
    """One run on `JOBS` workers against its compilers' time, and against a run on one worker."""
    chosen = variants()
    sizes = {"head_dims": 64, "dtypes": _DTYPES, "formats": ("dense",), "progress": _show}
    with fresh_cache():
        warm(chosen[0], **sizes, jobs=JOBS)  # loads the compiler's files into the page cache
    walls: dict[int, float] = {}
    reports = {}
    for jobs in (JOBS, 1):
        with fresh_cache():
            begin = time.perf_counter()
            reports[jobs] = warm(chosen, **sizes, jobs=jobs)
            walls[jobs] = time.perf_counter() - begin
    parallel = reports[JOBS]
    assert len(parallel.built) == len(parallel.results) == 2 * len(_DTYPES) * len(chosen)
    what = f"warm of {len(chosen)} variants x {len(_DTYPES)} dtypes on {JOBS} workers"
    kernels = f"{len(parallel.results)} kernels in {walls[JOBS]:.1f} s"
    return [
        Row(
            f"{what}: wall over the compilers' walls / {JOBS}", 1.1,
            walls[JOBS] / (parallel.compile_s / JOBS), "x", "lower",
            detail=f"{kernels}, of them {parallel.compile_s:.1f} s / {JOBS} in compilers",
        ),
        Row(
            f"{what}: wall over that of one worker / {JOBS}", 1.35,
            walls[JOBS] / (walls[1] / JOBS), "x", "lower",
            detail=f"one worker took {walls[1]:.1f} s, {reports[1].compile_s:.1f} s in compilers",
        ),
    ]  # fmt: skip


def cuda_rows(options: argparse.Namespace) -> list[Row]:
    """Compiles of CUDA kernels one at a time: each tile of every fourth variant."""
    if find_toolkit() is None:
        return []
    chosen = {"head_dims": (64, 128, 256), "dtypes": "bf16", "formats": ("dense",)}
    with fresh_cache():
        warm(fa.Full(), targets="sm_90", head_dims=64, dtypes="bf16", jobs=1, progress=_show)
    with fresh_cache():
        done = warm(variants()[::4], targets="sm_90", **chosen, jobs=1, progress=_show)
    taken = sorted(result.compile_s for result in done.built)
    middle = taken[len(taken) // 4], taken[len(taken) * 3 // 4]
    what = f"compile of a CUDA kernel on {len(os.sched_getaffinity(0))} cores, of {len(taken)}"
    return [
        Row(f"{what}: median", 2.0, median(taken), "s", "lower", middle),
        Row(f"{what}: the slowest", 3.0, taken[-1], "s", "lower"),
    ]


def _show(event: WarmEvent) -> None:
    show(f"warm: {', '.join(event.compiling)}", event.done, event.total)


def pack_rows(options: argparse.Namespace) -> list[Row]:
    """Packing and unpacking many entries, all with real artifacts."""
    rows = []
    with fresh_cache() as folder:
        warm(fa.Causal(), head_dims=64, dtypes=_DTYPES, formats=("dense",), progress=_show)
        _multiply(Store(folder), CPU_ENTRIES)
        packing, unpacking, size = _times(folder)
        detail = f"{size / 1e6:.0f} MB"
        rows.append(
            Row(f"pack of {CPU_ENTRIES} CPU entries", 2.0, packing, "s", "lower", None, detail)
        )
        rows.append(
            Row(f"unpack of {CPU_ENTRIES} CPU entries", 2.0, unpacking, "s", "lower", None, detail)
        )
    if find_toolkit() is None:
        return rows
    with fresh_cache() as folder:
        warm(fa.Causal(), head_dims=128, dtypes="bf16", targets="sm_90", formats=("dense",),
             progress=_show)  # fmt: skip
        store = Store(folder)
        kernels = [e for e in store.entries() if e.document["target"] == "sm_90"]
        mean = sum(e.bytes for e in kernels) / len(kernels)
        count = max(2 * len(kernels), round(CUDA_BYTES / mean))
        _multiply(store, count)
        packing, unpacking, size = _times(folder)
        detail = f"{count} entries, {size / 1e6:.0f} MB"
        rows.append(Row("pack of CUDA entries", 200.0, size / 1e6 / packing, "MB/s", detail=detail))
        rows.append(
            Row("unpack of CUDA entries", 200.0, size / 1e6 / unpacking, "MB/s", detail=detail)
        )
    return rows


def _times(folder: Path) -> tuple[float, float, int]:
    """Median seconds of packing and of unpacking to a new folder, with fsync; the pack's bytes."""
    packing, unpacking, size = [], [], 0
    for _ in steps("pack and unpack", range(_ROUNDS)):
        with tempfile.TemporaryDirectory(prefix="bench-", dir=folder.parent) as work:
            archive = Path(work) / "kernels.pack"
            report = pack(archive)
            packing.append(report.wall_s)
            unpacked = unpack(archive, Path(work) / "layer")
            assert unpacked.added == report.entries
            unpacking.append(unpacked.wall_s)
            size = report.bytes
    return median(packing), median(unpacking), size


def _multiply(store: Store, count: int) -> None:
    """Copies the store's entries under other keys until there are `count`."""
    made = list(store.entries())
    for i in steps("entries to pack", range(count - len(made))):
        _copy(store, made[i % len(made)], i)


def _copy(store: Store, entry: Entry, number: int) -> None:
    """Publishes a copy of an entry, with another key in its document and its files."""
    document = [[n, f"{t} {number}" if n == "spec" else t] for n, t in entry.meta["document"]]
    key = document_digest(document)
    files = {}
    for name in entry.meta["files"]:
        content = entry.path.joinpath(name).read_bytes()
        files[name] = content.replace(entry.key.encode(), key.encode())
        assert name != ARTIFACT or key.encode() in files[name]
    stated = {n: {"bytes": len(c), "sha256": sha256(c)} for n, c in files.items()}
    meta = {**entry.meta, "key": key, "document": document, "files": stated}
    store.adopt(key, entry.compiler_id, files, meta, durable=False)
