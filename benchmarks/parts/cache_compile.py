"""The parts of a compile's time: the front end, each header, nvcc's programs."""

from __future__ import annotations

import contextlib
import csv
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.parts.measure import Row, interleave, median, ratio
from benchmarks.parts.progress import show, steps
from flashattn_jit import env

_LINE = re.compile(r"^(\.+) (\S+)$")
_ANOTHER_OBJECT = re.compile(r"-MMD -MF \S+|-o \S+")


def front_end_rows(entry: Path, what: str, rounds: int) -> list[Row]:
    """Share of the C++ front end in the compile of a CPU kernel, and its slowest header."""
    command = _command(entry)
    work = entry.parent / f"{entry.name[:8]}-front-end"
    work.mkdir()
    times = interleave(
        {
            "front end": lambda: _run([*command, "-fsyntax-only"], work),
            "whole": lambda: _run([*command, "-c", "-o", "kernel.o"], work),
        },
        rounds,
        warm_up=1,
    )
    share, spread = ratio(times["front end"], times["whole"], 100.0)
    whole = median(times["whole"]) * 1e3
    rows = [
        Row(f"front end in the compile of {what}", None, share, "%", "lower", spread,
            f"of {whole:.0f} ms in the compiler")
    ]  # fmt: skip
    costs = header_seconds(command, work, rounds)
    slowest = max(costs, key=lambda name: costs[name])
    others = sorted(costs, key=lambda name: -costs[name])[1:4]
    others += [name for name in costs if not name.startswith("fajit/")]
    detail = ", ".join(f"<{name}> {costs[name] * 1e3:.0f}" for name in others)
    rows.append(
        Row(f"slowest header of {what}: <{slowest}>", None, costs[slowest] * 1e3, "ms", "lower",
            None, f"alone, with what it includes; then {detail}")
    )  # fmt: skip
    return rows


def header_seconds(command: list[str], work: Path, rounds: int) -> dict[str, float]:
    """Front-end seconds of each header that the kernel's source, or a header of ours, includes.

    Those of a source with nothing else, less those of an empty one. Headers that do not compile
    alone are left out.
    """
    source = work / "one.cpp"
    compiler = [part for part in command if not part.endswith("kernel.cpp")]

    def parse(text: str) -> float:
        source.write_text(text)
        begin = time.perf_counter()
        _run([*compiler, "-fsyntax-only", str(source)], work)
        return time.perf_counter() - begin

    seconds: dict[str, list[float]] = {}
    for name in steps("headers", sorted(set(_headers(command, work)))):
        with contextlib.suppress(RuntimeError):
            parse(f"#include <{name}>\n")
            seconds[name] = []
    for _ in steps(f"{len(seconds)} headers alone", range(max(3, rounds // 2))):
        empty = parse("")
        for name, values in seconds.items():
            values.append(parse(f"#include <{name}>\n") - empty)
    return {name: median(values) for name, values in seconds.items()}


def _headers(command: list[str], work: Path) -> Iterator[str]:
    """Names of our headers and of those that they include, from the compiler's include tree."""
    tree = _run([*command, "-fsyntax-only", "-H"], work)
    ours = str(env.include_dir())
    parents: list[str] = []
    for line in tree.splitlines():
        if not (found := _LINE.match(line)):
            continue
        depth, path = len(found[1]), found[2]
        parent = parents[depth - 2] if depth > 1 else ours
        del parents[depth - 1 :]
        parents.append(path)
        if path.startswith(ours):
            yield Path(path).relative_to(ours).as_posix()
        elif parent.startswith(ours):
            yield _written(Path(path).name)


def _written(name: str) -> str:
    """The name by which our headers include a header that is not ours."""
    pattern = re.compile(rf"#\s*include\s*<((?:[\w./]+/)?{re.escape(name)})>")
    for path in sorted(env.include_dir().rglob("*.h")):
        if found := pattern.search(path.read_text()):
            return found[1]
    return name


def nvcc_rows(entry: Path, what: str) -> list[Row]:
    """Share of preprocessing and cudafe++ in the compile of a CUDA kernel."""
    work = entry.parent / f"{entry.name[:8]}-nvcc"
    work.mkdir()
    work.joinpath("include").symlink_to(env.include_dir())
    source = work / "kernel.cu"
    source.write_bytes(entry.joinpath("kernel.cu").read_bytes())
    show(f"nvcc's programs, {what}")
    line = entry.joinpath("command").read_text().splitlines()[0]
    # The recorded command, without the option that keeps intermediate files.
    command = [part for part in shlex.split(line) if part != "--keep"]
    _run([*command, "--time=phases.csv"], work)
    phases = _phases(work / "phases.csv")
    total = sum(phases.values())
    front = sum(s for name, s in phases.items() if _is_front_end(name))
    detail = ", ".join(f"{n} {s:.0f} ms" for n, s in sorted(phases.items(), key=lambda p: -p[1]))
    return [
        Row(f"preprocessing and cudafe++ in the compile of {what}", None, 100 * front / total, "%",
            "lower", None, f"of {total:.0f} ms: {detail}")
    ]  # fmt: skip


def _is_front_end(phase: str) -> bool:
    return phase.startswith(("gcc (preprocessing", "cudafe++"))


def _phases(path: Path) -> Mapping[str, float]:
    """Milliseconds of each program that nvcc ran, from the table that its --time writes."""
    phases: dict[str, float] = {}
    with path.open(newline="") as file:
        for row in csv.reader(file):
            cells = [cell.strip() for cell in row]
            if len(cells) < 8 or cells[0].startswith("source file"):
                continue
            name = cells[1]
            phases[name] = phases.get(name, 0.0) + float(cells[6])
    return phases


def _command(entry: Path) -> list[str]:
    """The command that compiled an entry, without outputs, on the source in the entry."""
    line = _ANOTHER_OBJECT.sub("", entry.joinpath("command").read_text().splitlines()[0])
    parts = [part for part in shlex.split(line) if part not in ("-c", "-fstack-usage")]
    return [str(entry / "kernel.cpp") if p.endswith("/kernel.cpp") else p for p in parts]


def _run(command: list[str], work: Path) -> str:
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
    return done.stderr
