"""Measuring and reporting of all benchmarks: interleaved runs, medians, a table, a JSON file.

Candidates run in turn, A B C A B C, so that other work on the machine slows all of them alike. A
ratio is the median of the ratios within rounds, with its quartiles.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import torch

from benchmarks.parts import target
from benchmarks.parts.progress import hide, show, steps

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAIRS = 20
Run = Callable[[], object]
_numbers = itertools.count(1)
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6}

median = statistics.median


@dataclass(frozen=True)
class Row:
    """One line of a report.

    goal: None for a figure without one. better: the side of the goal that meets it. spread: the
    range of the middle half. predicted: by a model, before it was measured.
    """

    claim: str
    goal: float | None
    measured: float
    unit: str
    better: Literal["higher", "lower"] = "higher"
    spread: tuple[float, float] | None = None
    detail: str = ""
    predicted: float | None = None

    @property
    def verdict(self) -> str:
        """ "met", "missed" or "" where there is no goal."""
        if self.goal is None:
            return ""
        met = self.measured >= self.goal if self.better == "higher" else self.measured <= self.goal
        return "met" if met else "missed"


def interleave(
    candidates: Mapping[str, Run], rounds: int, warm_up: int = 2, rest: float = 0.0
) -> dict[str, list[float]]:
    """Wall times in seconds of each candidate over `rounds` rounds; warm-up calls do not count.

    rest: seconds to sleep before each call, in which the threads of the last one stop spinning.
    """
    what = f"measurement {next(_numbers)}: {', '.join(candidates)}"
    show(f"{what}: first calls")
    for _ in range(warm_up):
        for run in candidates.values():
            run()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in steps(what, range(rounds)):
        for name, run in candidates.items():
            if rest:
                time.sleep(rest)
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return times


def ratio(
    numerator: Sequence[float], denominator: Sequence[float], factor: float = 1.0
) -> tuple[float, tuple[float, float]]:
    """Median and quartiles of factor * numerator / denominator, taken within rounds."""
    values = [factor * a / b for a, b in zip(numerator, denominator, strict=True)]
    return median(values), quartiles(values)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The range of the middle half."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def time_row(
    claim: str, goal: float | None, seconds: Sequence[float], unit: str, detail: str = ""
) -> Row:
    """Median and quartiles of times in seconds, in `unit`: "s", "ms" or "us", as `goal` is."""
    times = [t * _PER_SECOND[unit] for t in seconds]
    return Row(claim, goal, median(times), unit, "lower", quartiles(times), detail)


def arguments(
    description: str | None, extend: Callable[[argparse.ArgumentParser], object] | None = None
) -> argparse.Namespace:
    """Parses the options that all benchmarks share, and those that `extend` adds."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/*.json")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="interleaved rounds (%(default)s)")
    parser.add_argument(
        "--target", choices=target.TARGETS, help="hold this package and torch to a CPU target"
    )
    if extend is not None:
        extend(parser)
    options = parser.parse_args()
    if options.target is not None:
        target.hold(options.target)
    options.load_before = os.getloadavg()[0]
    return options


def run_parts(
    benchmark: str,
    description: str | None,
    parts: Mapping[str, Callable[[argparse.Namespace], list[Row]]],
    extend: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> None:
    """A benchmark's main: the parts that ``--only`` names, without gradients, in one report."""

    def extended(parser: argparse.ArgumentParser) -> None:
        names = list(parts)
        parser.add_argument("--only", nargs="+", choices=parts, default=names, help="parts to run")
        extend(parser)

    options = arguments(description, extended)
    torch.manual_seed(0)
    with torch.no_grad():
        rows = [row for name in options.only for row in parts[name](options)]
    report(benchmark, rows, options)


def machine_name() -> str:
    """Such as ``amd-epyc-2c-avx512_bf16``; the last part is the target that calls run."""
    from flashattn_jit.codegen.spec import default_target

    model = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2]
                break
    except OSError:
        pass
    words = re.sub(r"\(.*?\)|CPU|Processor|@.*", " ", model).lower()
    name = re.sub(r"[^a-z0-9]+", "-", words).strip("-")
    return f"{name}-{len(os.sched_getaffinity(0))}c-{default_target().partition(':')[2]}"


def report(benchmark: str, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print the rows as a table and, when asked, save them by machine and date."""
    from flashattn_jit.codegen.spec import host_target

    hide()
    context = {
        "commit": commit(),
        "machine": machine_name(),
        "host_target": host_target(),
        "threads": torch.get_num_threads(),
        "load": [options.load_before, os.getloadavg()[0]],
        "rounds": options.pairs,
        "versions": versions(),
    }
    print(
        f"\n{benchmark} on {context['machine']}, {context['threads']} threads, "
        f"commit {context['commit']}, torch {torch.__version__}"
    )
    print(table(rows))
    if options.save:
        print(f"saved to {save(benchmark, context['machine'], context, rows)}")


def save(
    benchmark: str,
    machine: str,
    context: Mapping[str, object],
    rows: Sequence[Row],
    folder: Path = RESULTS,
) -> Path:
    """Write the rows to `folder`/<machine>-<date>.json, beside those of other benchmarks; returns
    the path."""
    now = datetime.now(timezone.utc)
    path = folder / f"{machine}-{now:%Y-%m-%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = json.loads(path.read_text()) if path.exists() else {}
    written = [asdict(r) | {"verdict": r.verdict} for r in rows]
    for row in written:
        if not math.isfinite(row["measured"]):  # JSON has no such number
            row["measured"] = str(row["measured"])
    document[benchmark] = {"time": now.isoformat(timespec="seconds"), **context, "rows": written}
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return path


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text; with a column of predictions if there are any."""
    cells = [["what", "goal", "measured", "predicted", "middle half", "", ""]]
    for r in rows:
        sign = "" if r.goal is None else (">= " if r.better == "higher" else "<= ")
        goal = "" if r.goal is None else f"{sign}{_number(r.goal)} {r.unit}"
        spread = "" if r.spread is None else f"{_number(r.spread[0])} .. {_number(r.spread[1])}"
        predicted = "" if r.predicted is None else f"{_number(r.predicted)} {r.unit}"
        measured = f"{_number(r.measured)} {r.unit}"
        cells.append([r.claim, goal, measured, predicted, spread, r.verdict, r.detail])
    if all(r.predicted is None for r in rows):
        cells = [row[:3] + row[4:] for row in cells]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells
    ]
    lines.insert(1, "  ".join("-" * w for w in widths[:-2]))
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def commit() -> str:
    """The checkout's commit, with a plus if tracked files differ from it; "unknown" without git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    import numpy as np

    gcc = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=False).stdout
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "g++": gcc.partition("\n")[0],
        "linux": platform.release(),
    }
