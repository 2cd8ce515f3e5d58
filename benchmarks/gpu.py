"""The CUDA kernels against their peers and this card's own limits; with --tests also tests/gpu.

    python -m benchmarks.gpu --tests

Prints a table last and writes results/<device>-<date>.json. Without a CUDA device it says so and
exits with status 2. Everything together takes less than ten minutes on 16 cores; what would begin
after `--limit` seconds is left out, and the report says what.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks._measure import PAIRS, RESULTS, Row, commit, save, table, versions
from benchmarks._progress import hide, say, show

SECTIONS = ("prefill", "hooks", "masks", "decode", "batch", "latency", "modules")
NO_DEVICE = 2
_TESTS_S = 300  # of the limit; they are stopped then


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", action="store_true", help="run tests/gpu first")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="interleaved rounds (%(default)s)")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    return parser.parse_args(given)


def device_name() -> str:
    """Such as ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


def run_tests(limit_s: float) -> Row:
    """tests/gpu as a process of its own, so that a broken context stays there."""
    # Without the project's strict options: a plugin that is missing here, or a warning of a torch
    # that is not the tested one, is no failure of a kernel.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default",
               "-o", "addopts=--import-mode=importlib", "tests/gpu"]  # fmt: skip
    try:
        done = subprocess.run(command, timeout=limit_s, check=False, capture_output=True, text=True)
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        out = late.stdout or b""
        text = (
            out.decode() if isinstance(out, bytes) else out
        ) + f"\nstopped after {limit_s:.0f} s"
        code = 1
    say(text[-8000:])
    failed, last = failures(text, code)
    return Row("tests/gpu: failures", 0.0, failed, "tests", "lower", detail=last)


def failures(text: str, code: int) -> tuple[float, str]:
    """How many tests failed by pytest's last line, at least one where its status is not 0."""
    last = next((x for x in reversed(text.splitlines()) if x.strip()), "")
    counted = sum(int(n) for n, _ in re.findall(r"(\d+) (failed|error)", last))
    return float(counted or (1 if code else 0)), last.strip("= ")


def context(options: argparse.Namespace) -> dict[str, object]:
    """What the figures depend on."""
    from benchmarks._gpu_peers import flashinfer_version, missing
    from flashattn_jit.planner.devices import device_hardware

    hardware = device_hardware(0)
    return {
        "commit": options.commit or commit(),
        "machine": torch.cuda.get_device_name(),
        "target": hardware.target,
        "multiprocessors": hardware.num_sms,
        "driver": _driver(),
        "rounds": options.pairs,
        "versions": {**versions(), "cuda": str(torch.version.cuda),
                     "flashinfer": flashinfer_version() or "none"},
        "peers_missing": dict(missing),
    }  # fmt: skip


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.partition("\n")[0].strip() or "unknown"


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """All rows that were asked for and that there is time for."""
    from benchmarks import _gpu_batch as batch
    from benchmarks import _gpu_compute as compute
    from benchmarks import _gpu_memory as memory
    from benchmarks._gpu_kernels import compile_all
    from benchmarks._gpu_measure import Clock, copy_run, interleave_on_device, matrix_rate
    from benchmarks._gpu_work import copy_bytes
    from benchmarks._measure import median
    from flashattn_jit.planner.devices import device_hardware

    clock, hardware = Clock(options.limit), device_hardware(0)
    torch.manual_seed(0)
    if options.tests:
        say("tests/gpu")
        show("tests/gpu")
        yield run_tests(min(_TESTS_S, clock.left()))
    say("compiling")
    show("compiling")
    compile_all(hardware.target)
    copied = interleave_on_device({"copy": copy_run(memory.KV_BYTES)}, 10)["copy"]
    yield Row("copy bandwidth of this card", None,
              copy_bytes(memory.KV_BYTES) / median(copied) / 1e12, "TB/s")  # fmt: skip
    yield Row("bf16 matrix product 8192^3, random data", None, matrix_rate() / 1e12, "TFLOP/s")
    sections: dict[str, Callable[[], Iterator[Row]]] = {
        "prefill": lambda: compute.prefill_rows(options.pairs, clock),
        "decode": lambda: memory.decode_rows(options.pairs, clock, hardware.l2_bytes),
        "batch": lambda: batch.batch_rows(options.pairs, clock, hardware.l2_bytes),
        "latency": lambda: memory.latency_rows(options.pairs, clock),
        "modules": lambda: memory.module_rows(clock),
        "hooks": lambda: compute.hook_rows(options.pairs, clock),
        "masks": lambda: compute.mask_rows(options.pairs, clock),
    }  # in order of how much would be missed
    for name, section in sections.items():
        if name in options.only:
            say(name)
            show(name)
            try:
                yield from section()
                torch.cuda.empty_cache()
            except Exception as error:  # one section's failure is a row, not the end of the run
                text = f"{type(error).__name__}: {str(error)[:300]}"
                say(f"  {name} FAILED: {text}")
                yield Row(f"{name}: FAILED", 0.0, 1.0, "errors", "lower", detail=text)
    for what in clock.skipped:
        yield Row(f"{what}: left out, no time", None, 0.0, "")


def main(given: list[str] | None = None) -> int:
    """Run; 0, 1 where a test or section failed, or 2 without a device."""
    options = arguments(given)
    if not torch.cuda.is_available():
        print("benchmarks.gpu: torch sees no CUDA device; nothing was measured", file=sys.stderr)
        return NO_DEVICE
    rows: list[Row] = []
    try:
        for row in rows_of(options):
            rows.append(row)  # what is measured is kept, whatever comes next
    except Exception as error:
        rows.append(Row("FAILED", 0.0, 1.0, "errors", "lower", detail=f"{error}"[:300]))
    hide()
    found = context(options)
    save("gpu", device_name(), found, rows, options.out)
    print(f"\ngpu on {found['machine']}, commit {found['commit']}, torch {torch.__version__}, "
          f"driver {found['driver']}")  # fmt: skip
    for name, why in dict(found["peers_missing"]).items():  # type: ignore[call-overload]
        print(f"no {name}: {why}")
    print(table(rows))
    broken = [r for r in rows if r.unit in ("tests", "errors") and r.measured]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
