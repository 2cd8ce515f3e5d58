"""The kernel cache: look-ups, cold starts of many processes, compiles, warming, packs.

    python -m benchmarks.cache [--save] [--only look-up herd compile cuda warm pack]

Look-ups are timed in a process that has imported the package. A herd is 16 processes that need one
kernel at once, from a barrier after the import, on an empty cache; one such process is measured in
turn with it. The share of the front end is that of `-fsyntax-only` in the compiler's time; a
header's cost is that of a source with nothing else in it.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable, Mapping

import torch

from benchmarks.parts.cache_compile import front_end_rows, nvcc_rows
from benchmarks.parts.cache_deploy import cuda_rows, pack_rows, warm_rows
from benchmarks.parts.cache_folder import fresh_cache, words_of
from benchmarks.parts.measure import Row, Run, arguments, median, ratio, report, time_row
from benchmarks.parts.progress import say, steps
from flashattn_jit.codegen.spec import BuildRequest, default_target
from flashattn_jit.jit.compilation.nvcc import find_toolkit
from flashattn_jit.jit.module import default, prepare_kernel
from flashattn_jit.planner.tiles import Problem, build_requests, choose
from flashattn_jit.variants.ir.ir import VariantIR

_HERD = 16
_CUDA_TARGET = "sm_90"
_KERNELS = ((1, "float32", "decode, fp32"), (512, "bfloat16", "prefill, bf16"))

# Arguments: query rows, dtype. Imports the package and loads the kernel; prints the seconds of that
# and of the digest of templates and headers, and the number of compiles.
_DISK_HIT = """
import sys, time
import torch
import flashattn_jit
from benchmarks.cache import wanted
from flashattn_jit import _C
from flashattn_jit.jit.cache import entry, store
from flashattn_jit.jit.compilation import toolchain
from flashattn_jit.jit.module import load_stepping

requests = wanted(int(sys.argv[1]), sys.argv[2])
begin = time.perf_counter()
_, module = load_stepping(requests)
whole = time.perf_counter() - begin
begin = time.perf_counter()
entry.sources_digest.cache_clear()
entry.sources_digest(requests[0].template)
digest = time.perf_counter() - begin
print(whole, digest, flashattn_jit.cache_info().compiles)
"""

# Arguments: query rows, dtype, processes. Forks processes that load one kernel from a barrier on;
# prints the seconds until all have ended, and how many failed.
_COLD = """
import os, sys, time
import torch
import flashattn_jit
from benchmarks.cache import wanted
from flashattn_jit.jit.module import load_stepping

requests = wanted(int(sys.argv[1]), sys.argv[2])
gate, opener = os.pipe()
children = []
for _ in range(int(sys.argv[3])):
    child = os.fork()
    if child == 0:
        os.close(opener)
        os.read(gate, 1)
        load_stepping(requests)
        os._exit(0)
    children.append(child)
time.sleep(0.2)
begin = time.perf_counter()
os.close(opener)
failed = [child for child in children if os.waitpid(child, 0)[1]]
print(time.perf_counter() - begin, len(failed))
"""


def wanted(rows: int, dtype: str, target: str | None = None) -> tuple[BuildRequest, ...]:
    """The kernel requests of unmasked attention with `rows` query rows, head dim 128."""
    problem = Problem((rows,), (1024,), 1, 1, 128, 128, *[dtype] * 3)
    return build_requests(choose(VariantIR(()), problem, target or default_target()))


def look_up_rows(options: argparse.Namespace) -> list[Row]:
    """Memory hits in this process, disk hits in new ones."""
    with fresh_cache():
        requests = wanted(1, "float32")
        spec = requests[0].spec
        default.load_stepping(requests)
        rows = [
            _memory_row("memory hit, look-up of a spec", lambda: default.find(spec), options),
            _memory_row(
                "memory hit, with its fallbacks", lambda: default.load_stepping(requests), options
            ),
        ]
        for query_rows, dtype, what in _KERNELS:
            _numbers(_DISK_HIT, query_rows, dtype)
            times, digests = [], []
            for _ in steps(f"disk hits, {what}", range(options.processes)):
                whole, digest, compiles = _numbers(_DISK_HIT, query_rows, dtype)
                assert compiles == 0, "the kernel was not on disk"
                times.append(whole)
                digests.append(digest)
            detail = f"of this {median(digests) * 1e3:.2f} ms the digest of templates and headers"
            claim = f"disk hit in a new process, verification and dlopen, {what}"
            rows.append(time_row(claim, 10.0, times, "ms", detail))
    return rows


def _memory_row(claim: str, run: Run, options: argparse.Namespace) -> Row:
    rounds = steps(claim, range(options.pairs))
    times = [timeit.timeit(run, number=20_000) / 20_000 for _ in rounds]
    return time_row(claim, 2.0, times, "us")


def herd_rows(options: argparse.Namespace) -> list[Row]:
    """A cold start of many processes over that of one, in turn."""
    counts: dict[int, list[float]] = {1: [], _HERD: []}
    for _ in steps(f"{_HERD} cold processes, and one", range(options.processes)):
        for count, times in counts.items():
            with fresh_cache():
                seconds, failed = _numbers(_COLD, 512, "bfloat16", count)
                assert failed == 0, "processes failed"
                times.append(seconds)
    value, spread = ratio(counts[_HERD], counts[1])
    detail = ", ".join(f"{n}: {median(times):.2f} s" for n, times in counts.items())
    claim = f"{_HERD} processes cold from a barrier after import, one kernel, over one process"
    return [Row(claim, 1.3, value, "x", "lower", spread, detail)]


def compile_rows(options: argparse.Namespace) -> list[Row]:
    """The parts of a compile's time."""
    rounds = max(5, options.pairs // 2)
    with fresh_cache():
        rows = []
        for query_rows, dtype, what in _KERNELS:
            entry = prepare_kernel(wanted(query_rows, dtype)).found.path
            rows += front_end_rows(entry, what, rounds)
        if find_toolkit() is None:
            say("no CUDA toolkit: the shares of nvcc's programs are left out")
            return rows
        entry = prepare_kernel(wanted(512, "bfloat16", _CUDA_TARGET)).path
        return rows + nvcc_rows(entry, f"prefill, bf16, {_CUDA_TARGET}")


SECTIONS: Mapping[str, Callable[[argparse.Namespace], list[Row]]] = {
    "look-up": look_up_rows,
    "herd": herd_rows,
    "compile": compile_rows,
    "cuda": cuda_rows,
    "warm": warm_rows,
    "pack": pack_rows,
}


def _numbers(code: str, *words: object) -> list[float]:
    return [float(word) for word in words_of(code, *map(str, words))]


def main() -> None:
    """Measure and report."""

    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
        parser.add_argument(
            "--processes", type=int, default=7, help="new processes per figure (%(default)s)"
        )

    options = arguments(__doc__, extend)
    for name in options.only:
        with torch.no_grad():
            rows = SECTIONS[name](options)
        # One report per part, so that a part can be measured again while the others stay.
        report(f"cache: {name}", rows, options)


if __name__ == "__main__":
    main()
