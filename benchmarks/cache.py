"""What the kernel cache costs, and what it saves a fleet.

    python -m benchmarks.cache [--save] [--only look-up,herd,compile,warm,pack]

Look-ups are of a process that has imported the package. A herd is 16 processes that ask for one
kernel at once, from a barrier after the import, on an empty cache; the same for one process is
measured in turn with it. The share of the front end is that of `-fsyntax-only` in the compiler's
time; a header's cost is that of a source with nothing else in it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks._cache_compile import front_end_rows, nvcc_rows
from benchmarks._cache_folder import cache_in, variables
from benchmarks._measure import Row, arguments, median, ratio, report
from benchmarks._progress import say, steps
from flashattn_jit.codegen.spec import Request, default_target
from flashattn_jit.jit.compilation.nvcc import find_toolkit
from flashattn_jit.jit.module import default, prepare_kernel
from flashattn_jit.planner.tiles import Problem, choose, requests_of
from flashattn_jit.variants.ir.ir import VariantIR

_ROOT = Path(__file__).resolve().parent.parent
_HERD = 16
_CUDA_TARGET = "sm_90"
_KERNELS = ((1, "float32", "decode, fp32"), (512, "bfloat16", "prefill, bf16"))

# A process that has imported the package looks up what `--rows` and `--dtype` ask for; it says how
# long that took, and its parts.
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

# Forks processes that wait for one another, ask for one kernel, and end. Says how long that took.
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


def wanted(rows: int, dtype: str, target: str | None = None) -> tuple[Request, ...]:
    """The requests of unmasked attention of so many query rows, head dim 128."""
    problem = Problem((rows,), (1024,), 1, 1, 128, 128, *[dtype] * 3)
    return requests_of(choose(VariantIR(()), problem, target or default_target()))


def look_up_rows(options: argparse.Namespace) -> list[Row]:
    """Memory hits in this process, disk hits in new ones."""
    with tempfile.TemporaryDirectory(prefix="flashattn_jit-bench-") as folder:
        with cache_in(Path(folder)):
            requests = wanted(1, "float32")
            default.load_stepping(requests)
            rows = [
                _memory_row("memory hit, look-up of a spec", requests, _find, options),
                _memory_row("memory hit, with its fallbacks", requests, _load, options),
            ]
        for query_rows, dtype, what in _KERNELS:
            arguments_ = (str(query_rows), dtype)
            _process(_DISK_HIT, Path(folder), *arguments_)
            times, digests = [], []
            for _ in steps(f"disk hits, {what}", range(options.processes)):
                whole, digest, compiles = _process(_DISK_HIT, Path(folder), *arguments_)
                assert compiles == 0, "the kernel was not on disk"
                times.append(whole * 1e3)
                digests.append(digest * 1e3)
            detail = f"of this {median(digests):.2f} ms the digest of templates and headers"
            claim = f"disk hit in a new process, verification and dlopen, {what}"
            rows.append(Row(claim, 10.0, median(times), "ms", "lower", _quartiles(times), detail))
    return rows


def _find(requests: Sequence[Request]) -> Callable[[], object]:
    spec = requests[0].spec
    return lambda: default.find(spec)


def _load(requests: Sequence[Request]) -> Callable[[], object]:
    return lambda: default.load_stepping(requests)


def _memory_row(
    claim: str,
    requests: Sequence[Request],
    look_up: Callable[[Sequence[Request]], Callable[[], object]],
    options: argparse.Namespace,
) -> Row:
    run = look_up(requests)
    rounds = steps(claim, range(options.pairs))
    times = [timeit.timeit(run, number=20_000) / 20_000 * 1e6 for _ in rounds]
    return Row(claim, 2.0, median(times), "us", "lower", _quartiles(times))


def herd_rows(options: argparse.Namespace) -> list[Row]:
    """A cold start of many processes over that of one, in turn."""
    counts = {1: [], _HERD: []}  # type: dict[int, list[float]]
    for _ in steps(f"{_HERD} cold processes, and one", range(options.processes)):
        for count, times in counts.items():
            with tempfile.TemporaryDirectory(prefix="flashattn_jit-bench-") as folder:
                seconds, failed = _process(_COLD, Path(folder), "512", "bfloat16", str(count))
                assert failed == 0, "processes failed"
                times.append(seconds)
    value, spread = ratio(counts[_HERD], counts[1])
    detail = ", ".join(f"{n}: {median(times):.2f} s" for n, times in counts.items())
    claim = f"{_HERD} processes cold from a barrier after import, one kernel, over one process"
    return [Row(claim, 1.3, value, "x", "lower", spread, detail)]


def compile_rows(options: argparse.Namespace) -> list[Row]:
    """Where a compile's time goes."""
    rounds = max(5, options.pairs // 2)
    with (
        tempfile.TemporaryDirectory(prefix="flashattn_jit-bench-") as folder,
        cache_in(Path(folder)),
    ):
        rows = []
        for query_rows, dtype, what in _KERNELS:
            entry = prepare_kernel(wanted(query_rows, dtype)).path
            rows += front_end_rows(entry, what, rounds)
        if find_toolkit() is None:
            say("no CUDA toolkit: the shares of nvcc's programs are left out")
            return rows
        entry = prepare_kernel(wanted(512, "bfloat16", _CUDA_TARGET)).path
        return rows + nvcc_rows(entry, f"prefill, bf16, {_CUDA_TARGET}")


def _deploy_rows(name: str) -> Callable[[argparse.Namespace], list[Row]]:
    def rows(options: argparse.Namespace) -> list[Row]:
        from benchmarks import _cache_deploy

        found: list[Row] = getattr(_cache_deploy, name)(options)
        return found

    return rows


SECTIONS: Mapping[str, Callable[[argparse.Namespace], list[Row]]] = {
    "look-up": look_up_rows,
    "herd": herd_rows,
    "compile": compile_rows,
    "warm": _deploy_rows("warm_rows"),
    "pack": _deploy_rows("pack_rows"),
}


def _process(code: str, folder: Path, *words: str) -> list[float]:
    """The numbers that a new process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=os.environ | variables(folder),
        cwd=_ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [float(word) for word in done.stdout.split()]


def _quartiles(times: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(times)
    quarter = len(ordered) // 4
    return ordered[quarter], ordered[-1 - quarter]


def main() -> None:
    """Measure and report."""

    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", default=",".join(SECTIONS), help="parts (%(default)s)")
        parser.add_argument(
            "--processes", type=int, default=7, help="new processes a figure (%(default)s)"
        )

    options = arguments(__doc__, extend)
    for name in options.only.split(","):
        with torch.no_grad():
            rows = SECTIONS[name](options)
        # Each for itself, so that one part can be measured anew and the others stay.
        report(f"cache: {name}", rows, options)


if __name__ == "__main__":
    main()
