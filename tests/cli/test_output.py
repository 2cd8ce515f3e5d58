"""Tables on a terminal, plain lines in a pipe, one JSON object with --json."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashattn_jit.cli import output
from flashattn_jit.cli.app import app
from tests.cli.test_documents import leaves

ESCAPE = "\x1b"


COMMANDS = [tuple(name.split()) for name, _ in leaves(app)]


def test_the_commands_are_these() -> None:
    assert {" ".join(path) for path in COMMANDS} >= {
        "doctor", "warm", "cache ls", "cache show", "cache verify", "cache gc", "cache clear",
        "cache explain", "cache push", "pack", "unpack", "explain", "bench", "completion",
        "manifest show", "manifest merge",
    }  # fmt: skip


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_json_and_debug(run, path: tuple[str, ...]) -> None:
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert "--debug" in result.stdout


@pytest.mark.parametrize(
    "args",
    [("cache", "ls"), ("cache", "verify"), ("doctor",), ("explain", "Causal", "--device", "H100",
                                                         "--dtype", "bf16")],
    ids=" ".join,
)  # fmt: skip
def test_pipes_get_no_escapes_and_no_tabs(process, entries, args: tuple[str, ...]) -> None:
    done = process(*args, FORCE_COLOR="")
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert ESCAPE not in done.stdout + done.stderr
    assert "\t" not in done.stdout
    assert not set("─━│┃") & set(done.stdout)


def test_terminals_get_a_table_with_a_header(on_terminal, entries) -> None:
    code, text = on_terminal("cache", "ls")
    assert code == 0
    assert "target" in text
    assert "━" in text or "─" in text
    assert "3 kernels" in text


def test_terminals_get_colour_unless_no_color_is_set(on_terminal, cache) -> None:
    assert ESCAPE in on_terminal("doctor", NO_COLOR="")[1]
    assert ESCAPE not in on_terminal("doctor", NO_COLOR="1")[1]
    assert ESCAPE not in on_terminal("cache", "show", "abc", NO_COLOR="1")[1]


def test_clear_asks_on_a_terminal(on_terminal, entries) -> None:
    code, text = on_terminal("cache", "clear", answer="n\n")
    assert code == 130
    assert "Remove 3 kernels" in text
    assert all(e.path.exists() for e in entries)
    code, _ = on_terminal("cache", "clear", answer="y\n")
    assert code == 0
    assert not any(e.path.exists() for e in entries)


def test_a_reader_that_has_seen_enough_is_no_error(entries) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", '"$0" -m flashattn_jit cache show "$1" | head -n 1', sys.executable,
         entries[0].key],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("key")
    assert done.stderr == ""


def test_json_is_all_that_stdout_gets(process, entries) -> None:
    for args in (("cache", "ls"), ("cache", "verify"), ("doctor",)):
        document = json.loads(process(*args, "--json").stdout)
        assert document["command"] == " ".join(args)


def test_the_module_and_the_script_are_one_program(process) -> None:
    done = process("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("flashattn-jit, version ")
    assert "Usage: flashattn-jit" in process("--help").stdout


class Stream(io.StringIO):
    """Standard error: a terminal or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: terminal  # type: ignore[method-assign]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the progress display, which tests advance."""
    time = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: time[0])
    return time


def test_a_pipe_is_told_of_long_work_in_lines_a_few_seconds_apart(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(terminal=False)
    monkeypatch.setattr(output, "sys", SimpleNamespace(stderr=stream, stdout=None))
    with output.activity("verifying") as show:
        for done in range(1, 11):
            now[0] += 1.0
            show(f"verifying: {done}/10")
    assert stream.getvalue().splitlines() == [f"verifying: {done}/10" for done in (3, 6, 9)]


def test_a_terminal_shows_one_line_of_what_is_going_on(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr(output, "sys", SimpleNamespace(stderr=stream, stdout=None))
    monkeypatch.setenv("COLUMNS", "12")
    with output.activity("compiling") as show:
        show("round 1")  # too soon after the last one
        now[0] = 1.0
        show("round 2 of many")
    assert stream.getvalue() == f"compiling\rround 2 of \r{' ' * 11}\r"


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("args", "words"),
    [(("pack", "{folder}/k.pack"), "packing"), (("doctor",), "checking"),
     (("cache", "push", "file://{folder}/remote"), "connecting"), (("cache", "verify"), "verify")],
    ids=lambda x: x[0] if isinstance(x, tuple) else "",
)  # fmt: skip
def test_long_commands_say_what_they_do(
    on_terminal, process, entries, tmp_path: Path, args: tuple[str, ...], words: str
) -> None:
    given = [arg.format(folder=tmp_path) for arg in args]
    environment = {"FLASHATTN_JIT_COMPILE": "never"}
    assert words in on_terminal(*given, **environment)[1]
    assert process(*given, **environment).stderr == "", "it took no three seconds"


def test_no_cell_reaches_the_terminal_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    output.rows(["key", "variant"], [["abc", "evil\x1b]0;title\x07\x1b[2J"]])
    output.fields([("name", "x\x1b[2J")])
    assert "\x1b" not in (shown := capsys.readouterr().out)
    assert "\\x1b[2J" in shown
