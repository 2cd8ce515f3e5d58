"""Compiles the kernels of the GPU benchmark before it measures, in parallel processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

import flashattn_jit as fa
from benchmarks.parts import gpu_mods as mods
from benchmarks.parts.progress import say, steps
from flashattn_jit.codegen.spec import KernelSpec
from flashattn_jit.jit.module import load_stepping
from flashattn_jit.planner.tiles import Problem, build_requests, choose
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.variant import as_variant

_BF16 = "bfloat16"


@dataclass(frozen=True)
class Want:
    """One kernel: name of the variant, packed rows, head_dim, features."""

    variant: str
    rows: int
    head_dim: int
    features: tuple[str, ...] = ()


WANTS = (
    *(Want(name, 4096, d) for name in ("full", "causal", "alibi", "softcap") for d in (64, 128)),
    *(Want(name, 4096, 128) for name in ("window", "document")),
    Want("full", 1, 128, ("paged",)),
    Want("full", 4, 128),
)
"""The kernels of most rows; others are compiled when a row first needs them."""


def spec_of(want: Want, target: str) -> KernelSpec:
    """The spec of a kernel."""
    made = {
        "full": lambda: None,
        "causal": fa.Causal,
        "alibi": lambda: mods.alibi(torch.zeros(16)),
        "softcap": lambda: mods.softcap(30.0),
        "window": lambda: mods.window(1024),
        "document": lambda: mods.document(torch.zeros(4096, dtype=torch.int64)),
    }
    chosen = as_variant(made[want.variant]())
    dims = Dims(1, 16, 16, want.rows, 4096, want.head_dim, want.head_dim)
    problem = Problem((want.rows,), (4096,), 1, 1, want.head_dim, want.head_dim, *(_BF16,) * 3)
    return choose(chosen.bind(dims, {}).ir, problem, target, want.features, chosen.name)


def compile_one(want: Want, target: str) -> str:
    """Compile one kernel into the cache; returns the error, or an empty text."""
    try:
        load_stepping(build_requests(spec_of(want, target)))
    except Exception as error:  # the row that needs the kernel raises it again
        return f"{want}: {type(error).__name__}: {error}"
    return ""


def compile_all(target: str) -> None:
    """Compile `WANTS`, with one process per core."""
    begin = time.perf_counter()
    workers = min(len(os.sched_getaffinity(0)), len(WANTS))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        made = pool.map(compile_one, WANTS, [target] * len(WANTS))
        failed = [f for _, f in zip(steps("compiling", WANTS), made, strict=True) if f]
    for text in failed:
        say(f"  not compiled ahead: {text}")
    say(f"  {len(WANTS)} kernels in {time.perf_counter() - begin:.0f} s")
