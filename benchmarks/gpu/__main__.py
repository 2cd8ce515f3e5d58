"""The CUDA kernels on a GPU, in three commands of less than ten minutes each.

    python -m benchmarks.gpu pack FOLDER       on any machine with a CUDA toolkit: compiles all
    python -m benchmarks.gpu check FOLDER      is anything wrong? three minutes
    python -m benchmarks.gpu compute FOLDER    prefill, hooks, masks, tiles, counters; with peers
    python -m benchmarks.gpu memory FOLDER     decoding, splits, batches, graphs; then tests/gpu

FOLDER is the pack. The last three take their kernels from it and compile none; without FOLDER,
compute and memory compile what they need. Each is useful alone, writes
results/<device>-<command>-<date>.json (--out) and prints a table last; --only TEXT measures what
has that text in its name. A measurement that fails is a row, and the others follow; those that
would end after --limit seconds are left out and listed. Without a CUDA device they say so and exit
with status 2. With --dry-run they run in the emulator, with kernels that are compiled as needed,
small sizes and fewer cases; the times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.gpu import pack
from benchmarks.gpu.checks import checks, print_smoke
from benchmarks.gpu.compute import PROFILED, compute, profiled_call
from benchmarks.gpu.machine import Emulated, Gpu, Machine
from benchmarks.gpu.memory import memory
from benchmarks.gpu.peers import flashinfer_version
from benchmarks.gpu.sections import Clock, Measurement, measured
from benchmarks.gpu.smoke import SMOKE, smoke
from benchmarks.parts.measure import PAIRS, RESULTS, Row, commit, save, table, versions
from benchmarks.parts.peers import missing
from benchmarks.parts.progress import hide, say

LIMITS_S = {"check": 180.0, "compute": 560.0, "memory": 560.0}
CALLS: dict[str, Callable[[Machine, int, Path, Clock], Iterator[Measurement]]] = {
    "check": lambda machine, rounds, folder, clock: checks(machine, rounds, folder),
    "compute": lambda machine, rounds, folder, clock: compute(machine, rounds),
    "memory": lambda machine, rounds, folder, clock: memory(machine, rounds, clock),
}
NO_DEVICE = 2
FAILURES = ("tests", "errors", "of the allowed error", "blocks")
"""Units of rows that fail the call if they miss their goal."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command and its options."""
    parser = argparse.ArgumentParser(
        "benchmarks.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("pack", help="compile all kernels into a folder")
    made.add_argument("folder", type=Path)
    made.add_argument("--no-tests", action="store_true", help="without the kernels of tests/gpu")
    for name in CALLS:
        call = commands.add_parser(name, help=f"the {name} call")
        optional = {} if name == "check" else {"nargs": "?"}
        call.add_argument("folder", type=Path, help="the pack", **optional)
        call.add_argument("--only", action="append", metavar="TEXT", help="may be given again")
        call.add_argument("--pairs", type=int, default=PAIRS, help="rounds (%(default)s)")
        call.add_argument("--limit", type=float, default=LIMITS_S[name],
                          help="seconds (%(default)s)")  # fmt: skip
        call.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
        call.add_argument("--dry-run", action="store_true", help="in the emulator")
    tried = commands.add_parser("smoke", help="the values of some calls, in this process")
    tried.add_argument("names", nargs="*", metavar="NAME", default=list(SMOKE))
    tried.add_argument("--dry-run", action="store_true")
    counted = commands.add_parser("profiled", help="one call, for Nsight Compute")
    counted.add_argument("name", choices=PROFILED)
    counted.add_argument("--dry-run", action="store_true")
    return parser.parse_args(given)


def call(name: str, machine: Machine, options: argparse.Namespace) -> int:
    """Measures and reports; returns 1 if a measurement or test failed, else 0."""
    torch.manual_seed(0)
    clock = Clock(options.limit)
    rows: list[Row] = []
    found = context(machine, options)
    measurements = [
        one
        for one in CALLS[name](machine, options.pairs, options.folder, clock)
        if not options.only or any(text in one.what for text in options.only)
    ]
    for row in measured(machine, clock, measurements):
        rows.append(row)  # saved at each row: a later kernel may hang
        save(f"gpu {name}", f"{machine.name()}-{name}", found, rows, options.out)
    found |= {"after": machine.describe(), "peers_missing": dict(missing)}
    path = save(f"gpu {name}", f"{machine.name()}-{name}", found, rows, options.out)
    hide()
    print(f"\n{name} on {machine.hardware.name}, commit {commit()}, torch {torch.__version__}, "
          f"{found['before'] or 'nvidia-smi says nothing'}")  # fmt: skip
    for peer, why in missing.items():
        print(f"no {peer}: {why}")
    print(table(rows))
    print(f"saved to {path}")
    failed = [r for r in rows if r.unit in FAILURES and r.verdict == "missed"]
    return int(bool(failed))


def context(machine: Machine, options: argparse.Namespace) -> dict[str, object]:
    """What the figures depend on."""
    return {
        "commit": commit(),
        "machine": machine.hardware.name,
        "target": machine.architecture,
        "multiprocessors": machine.hardware.num_sms,
        "before": machine.describe(),
        "rounds": options.pairs,
        "pack": pack.about(options.folder) if options.folder else {},
        "versions": {**versions(), "cuda": str(torch.version.cuda),
                     "flashinfer": flashinfer_version() or "none"},
    }  # fmt: skip


def dry_run(folder: Path) -> int:
    """All calls in the emulator, once each, for the kernels that they need."""
    status = 0
    with tempfile.TemporaryDirectory() as out:
        for name in CALLS:
            given = [name, str(folder), "--pairs", "1", "--out", out, "--dry-run", "--limit", "inf"]
            status |= call(name, Emulated(all_cases=True), arguments(given))
    return status


def main() -> int:
    """Runs a command; returns its exit status."""
    options = arguments()
    if options.command == "pack":
        return pack.build(options.folder, lambda: dry_run(options.folder), not options.no_tests)
    if not options.dry_run and not torch.cuda.is_available():
        say("benchmarks.gpu: torch sees no CUDA device; nothing was measured")
        return NO_DEVICE
    machine = Emulated() if options.dry_run else Gpu()
    if options.command == "smoke":
        print_smoke(smoke(machine, options.names))
        return 0
    if options.command == "profiled":
        profiled_call(machine, options.name)
        return 0
    # The emulator runs PTX, which a pack does not hold.
    compiles = options.dry_run or options.folder is None
    with contextlib.nullcontext() if compiles else pack.used(options.folder):
        return call(options.command, machine, options)


if __name__ == "__main__":
    sys.exit(main())
