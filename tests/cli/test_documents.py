"""docs/command_line.md names every command, option and JSON field, and none that does not exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from flashattn_jit.cli.app import app
from flashattn_jit.cli.command import Group
from flashattn_jit.inspect.machine_code.disassembly import nvdisasm
from flashattn_jit.jit.compilation.toolchain import find_compiler

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").glob("*.md"))]  # fmt: skip
TEXT = (ROOT / "docs" / "command_line.md").read_text()


def documented() -> Iterator[tuple[str, list[str]]]:
    """Every command line of the documents: the file and the words after the program."""
    for path in DOCS:
        joined = path.read_text().replace("\\\n", " ")
        for line in joined.splitlines():
            found = re.match(r"(?:\s*\$ |\s*(?:RUN |\w+=\S+ )*)(flashattn-jit .*)", line)
            if found and not line.lstrip().startswith("|"):
                command = re.split(r"\s(?:>|\|\||&&|\||#|<<)\s?", found[1])[0]
                yield path.name, shlex.split(command)[1:]


def resolve(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words name, and the rest of the words."""
    command: click.Command = app
    while isinstance(command, Group) and words and not words[0].startswith("-"):
        _, inner, words = command.resolve_command(click.Context(command), words)
        assert inner is not None
        command = inner
    return command, words


def options(command: click.Command) -> set[str]:
    """All spellings of a command's options."""
    given = {name for p in command.params if isinstance(p, click.Option) for name in p.opts}
    return given | {"--help", "-h"}


def leaves(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command that is no group, by its full name."""
    if not isinstance(command, Group):
        yield name, command
        return
    context = click.Context(command)
    for part in command.list_commands(context):
        _, inner, _ = command.resolve_command(context, [part])
        assert inner is not None
        yield from leaves(inner, f"{name} {part}".strip())


def test_documented_commands_and_options_exist() -> None:
    lines = list(documented())
    assert len(lines) > 15
    for where, words in lines:
        command, rest = resolve(words)
        assert not isinstance(command, Group) or rest, f"{where}: {words}"
        for word in rest:
            if re.match(r"--?[a-z]", word):
                assert word.partition("=")[0] in options(command), f"{where}: {words}: {word}"


@pytest.mark.parametrize("name", [name for name, _ in leaves(app)])
def test_every_command_and_option_is_documented(name: str) -> None:
    command, _ = resolve(name.split())
    assert f"`{name}" in TEXT
    for option in command.params:
        if isinstance(option, click.Option):
            assert any(re.search(rf"{o}(?![\w-])", TEXT) for o in option.opts), option.opts


def names(document: object) -> Iterator[str]:
    """The fields of an object, and of the objects in its lists."""
    if isinstance(document, dict):
        for name, value in document.items():
            yield name
            if isinstance(value, list) and value:
                yield from names(value[0])


def check_row(name: str, document: object) -> None:
    """That the row of the command `name` lists all fields of what it printed."""
    table = TEXT[TEXT.index("## JSON") :]
    row = next(line for line in table.splitlines() if line.startswith(f"| `{name}"))
    # `cache show` has the fields of `cache ls` too.
    listed = row + (table if name == "cache show" else "")
    for field in set(names(document)) - {"schema", "command"}:
        assert f"`{field}`" in listed, f"{name}: {field}"


def test_json_fields_are_documented(run_json, entries, cache: Path, tmp_path: Path) -> None:
    key, manifest, pack = entries[0].key, tmp_path / "m.jsonl", tmp_path / "k.pack"
    spec = run_json("cache", "explain", key)["kernels"][0]
    manifest.write_text(spec["command"].splitlines()[1] + "\n" if spec["command"] else "")
    commands = {
        "doctor": ("doctor",),
        "cache ls": ("cache", "ls"),
        "cache show": ("cache", "show", key),
        "cache verify": ("cache", "verify"),
        "cache gc": ("cache", "gc", "--max-bytes", "1G"),
        "cache push": ("cache", "push", f"file://{tmp_path}/remote"),
        "cache explain A`": ("cache", "explain", key),
        "cache explain A B": ("cache", "explain", key, entries[1].key),
        "pack": ("pack", pack),
        "unpack": ("unpack", pack, "--directory", tmp_path / "layer"),
        "manifest show": ("manifest", "show", manifest),
        "manifest merge": ("manifest", "merge", manifest, "--output", tmp_path / "o.jsonl"),
        "explain": ("explain", "Causal", "--device", "H100", "--dtype", "bf16"),
        "completion": ("completion", "fish"),
    }
    for name, command in commands.items():
        check_row(name, run_json(*command))


def test_json_fields_of_what_was_compiled_are_documented(
    run_json, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ("Full", "--head-dim", "16", "--dtype", "fp32")
    if find_compiler("sm_90") and nvdisasm():
        check_row("explain", run_json("explain", "Causal", "--device", "H100", "--dtype", "bf16",
                                      "--machine-code"))  # fmt: skip
    benched = run_json("bench", *sizes, "--q-len", "8", "--seconds", "0")
    assert benched["timings"]
    check_row("bench", benched)
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    warmed = run_json("warm", *sizes, "--target", "cpu:generic", exit_code=3)
    assert warmed["kernels"]
    check_row("warm", warmed)
