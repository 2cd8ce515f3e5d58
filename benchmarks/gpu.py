"""The CUDA kernels against their peers and the device's bandwidth; with --tests also tests/gpu.

    python -m benchmarks.gpu --tests

Writes results/<device>-<date>.json and prints a table last. Without a CUDA device it reports that
and exits with status 2. All sections together take less than ten minutes on 16 cores; those that
would begin after `--limit` seconds are left out and listed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.parts.gpu_batch import batch_rows
from benchmarks.parts.gpu_compute import hook_rows, mask_rows, prefill_rows
from benchmarks.parts.gpu_kernels import compile_all
from benchmarks.parts.gpu_measure import Clock, copy_run, interleave_on_device, matrix_rate
from benchmarks.parts.gpu_memory import KV_BYTES, decode_rows, latency_rows, module_rows
from benchmarks.parts.gpu_peers import flashinfer_version
from benchmarks.parts.measure import PAIRS, RESULTS, Row, commit, median, save, table, versions
from benchmarks.parts.peers import missing
from benchmarks.parts.progress import hide, say, show
from benchmarks.parts.work import copy_bytes
from flashattn_jit.planner.devices import device_hardware

SECTIONS: dict[str, Callable[[int, Clock, int], Iterator[Row]]] = {
    "prefill": lambda rounds, clock, l2_bytes: prefill_rows(rounds, clock),
    "decode": decode_rows,
    "batch": batch_rows,
    "latency": lambda rounds, clock, l2_bytes: latency_rows(rounds, clock),
    "modules": lambda rounds, clock, l2_bytes: module_rows(clock),
    "hooks": lambda rounds, clock, l2_bytes: hook_rows(rounds, clock),
    "masks": lambda rounds, clock, l2_bytes: mask_rows(rounds, clock),
}
"""The most important first: the last ones may be left out for lack of time."""

NO_DEVICE = 2
_TESTS_S = 300  # the tests' time limit


def arguments() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", action="store_true", help="run tests/gpu first")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--pairs", type=int, default=PAIRS, help="interleaved rounds (%(default)s)")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--commit", default="", help="the commit, if there is no git")
    return parser.parse_args()


def device_name() -> str:
    """Such as ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


def run_tests(limit_s: float) -> Row:
    """Runs tests/gpu in a separate process: an error may make a CUDA context unusable."""
    # Without the project's strict options: a missing plugin, or a warning of another version of
    # torch, is not a failure of a kernel.
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
    """How many tests failed by pytest's last line, at least one if its status is not 0."""
    last = next((x for x in reversed(text.splitlines()) if x.strip()), "")
    counted = sum(int(n) for n, _ in re.findall(r"(\d+) (failed|error)", last))
    return float(counted or (1 if code else 0)), last.strip("= ")


def context(options: argparse.Namespace) -> dict[str, object]:
    """What the figures depend on."""
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
    """The rows of the chosen sections, as far as the time limit allows."""
    clock, hardware = Clock(options.limit), device_hardware(0)
    torch.manual_seed(0)
    if options.tests:
        say("tests/gpu")
        show("tests/gpu")
        yield run_tests(min(_TESTS_S, clock.left()))
    say("compiling")
    show("compiling")
    compile_all(hardware.target)
    copied = interleave_on_device({"copy": copy_run(KV_BYTES)}, 10)["copy"]
    bandwidth = copy_bytes(KV_BYTES) / median(copied) / 1e12
    yield Row("copy bandwidth of this device", None, bandwidth, "TB/s")
    yield Row("bf16 matrix product 8192^3, random data", None, matrix_rate() / 1e12, "TFLOP/s")
    for name, section in SECTIONS.items():
        if name in options.only:
            say(name)
            show(name)
            try:
                yield from section(options.pairs, clock, hardware.l2_bytes)
                torch.cuda.empty_cache()
            except Exception as error:  # a failed section is a row, and the run continues
                text = f"{type(error).__name__}: {str(error)[:300]}"
                say(f"  {name} FAILED: {text}")
                yield Row(f"{name}: FAILED", 0.0, 1.0, "errors", "lower", detail=text)
    for what in clock.skipped:
        yield Row(f"{what}: left out, no time", None, 0.0, "")


def main() -> int:
    """Measure; returns 0, 1 if a test or section failed, or 2 without a device."""
    options = arguments()
    if not torch.cuda.is_available():
        print("benchmarks.gpu: torch sees no CUDA device; nothing was measured", file=sys.stderr)
        return NO_DEVICE
    rows: list[Row] = []
    try:
        for row in rows_of(options):
            rows.append(row)  # measured rows are saved even if a later one raises
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
