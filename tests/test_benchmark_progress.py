"""Benchmarks show progress on standard error, and never while something is timed."""

from __future__ import annotations

import ast
import io
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.parts import measure, progress

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
SHOWS = {"show", "steps"}


def functions() -> dict[str, set[str]]:
    """The names that each function of the benchmarks uses, by "module.function"."""
    found = {}
    for path in FOLDER.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                found[f"{path.stem}.{node.name}"] = names
    return found


def reaches_progress(names: set[str], everything: dict[str, set[str]]) -> bool:
    """Whether a function of these names calls `show` or `steps`, directly or through others."""
    by_name: dict[str, set[str]] = {}
    for function, used in everything.items():
        by_name.setdefault(function.partition(".")[2], set()).update(used)
    seen: set[str] = set()
    while new := names - seen:
        if new & SHOWS:
            return True
        seen |= new
        names = set().union(*(by_name.get(name, set()) for name in new))
    return False


@pytest.mark.parametrize(
    "module", sorted(p.stem for p in FOLDER.glob("*.py") if "\ndef main(" in p.read_text())
)
def test_every_benchmark_shows_its_progress(module: str) -> None:
    everything = functions()
    measuring = [p for p in everything if p.startswith(f"{module}.") and p.endswith("rows")]
    if module == "cache":
        measuring += ["cache_deploy.warm_rows", "cache_deploy.pack_rows"]
    for place in measuring or [f"{module}.main"]:
        assert reaches_progress(everything[place], everything), place


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch):
    """A stream in place of standard error; a terminal if `tty` is set."""

    class Stream(io.StringIO):
        tty = False

        def isatty(self) -> bool:
            return self.tty

    stream = Stream()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream, argv=["a/benchmark.py"]))
    monkeypatch.setattr(progress, "_shown", {"at": float("-inf")})
    yield stream
    progress.hide()


def test_a_pipe_gets_lines_a_few_seconds_apart(
    errors, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for i in progress.steps("ours, theirs", range(10)):
        assert i == len(range(i))
        now[0] += 1.0
    lines = errors.getvalue().splitlines()
    assert [line.partition("  ")[2] for line in lines] == [
        f"ours, theirs, {i}/10" for i in (0, 3, 6, 9)
    ]
    progress.say("a result")
    assert capsys.readouterr().out == "a result\n"


def test_a_terminal_gets_one_bar_and_no_thread(
    errors, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors.tty = True
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(progress, "_DRAWINGS_APART_S", 0.0)
    threads = threading.active_count()
    for _ in progress.steps("ours", range(3)):
        assert threading.active_count() == threads
    assert "2/3" in errors.getvalue() and len(progress._bars) == 1
    progress.say("a result")
    assert not progress._bars and capsys.readouterr().out == "a result\n"


def test_nothing_is_shown_while_a_candidate_is_timed(
    errors, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = []
    monkeypatch.setattr(progress, "LINES_APART_S", 0.0)

    def run() -> None:
        inside.append(len(errors.getvalue()))

    measure.interleave({"a": run, "b": run}, 3, warm_up=0)
    assert inside[0::2] == inside[1::2], "between the candidates of a round"
    assert errors.getvalue().count(": a, b, ") == 3
