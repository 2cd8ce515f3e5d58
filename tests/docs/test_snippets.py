"""Every block of Python of every page runs, and every command of its sessions on a terminal."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from docs.generator.snippets import execute, snippets
from flashattn_jit.jit.compilation.nvcc import find_toolkit
from tests.harness import processes

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

KINDS = {"", "python", "run", "console", "sh", "dockerfile", "yaml", "mermaid"}
"""First words of fences. Without one: drawings and layouts. Those of docker, Kubernetes and mermaid
are not run; tests/test_examples.py runs the README's shell commands, or .ci/run does."""


NEED_GPU = ('title="FlashInfer"', 'title="FlashAttention"', 'title="on a GPU"')
"""Titles of blocks that need a GPU. All but the last are of other packages and never run."""


def code(page: Path) -> list:
    """The Python of a page that runs: all but other packages' and, without one, that for a GPU."""
    found = [s for s in snippets(page) if s.kind.split()[:1] in (["python"], ["run"])]
    skipped = NEED_GPU[:-1] if torch.cuda.is_available() else NEED_GPU
    return [s for s in found if not any(title in s.kind for title in skipped)]


def test_there_are_pages() -> None:
    assert len([page for page in PAGES if code(page)]) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_kinds_of_blocks_are_known(page: Path) -> None:
    for snippet in snippets(page):
        assert (snippet.kind.split() or [""])[0] in KINDS, f"{page}:{snippet.line}"
        if any(title in snippet.kind for title in NEED_GPU):
            compile(snippet.text, str(page), "exec")


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if code(page)], ids=lambda page: str(page.relative_to(ROOT))
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for snippet in code(page):
        execute(page, snippet, scope)


# --- sessions on a terminal -----------------------------------------------------------------------

NOT_RUN = {
    "pip install dist/": "installs into the environment",
    "flashattn-jit cache push s3://": "needs a bucket",
    "flashattn-jit completion zsh": "only zsh knows ${fpath[1]}",
}
"""Beginnings of commands that are not run, and why. Their options are checked by tests/cli."""


SHELL_ONLY = re.compile(r"[|&;<>()`~*?\[{#!\\]|\$(?!PWD\b)")
"""What only a shell can read."""


def programs(command: str, cwd: Path) -> tuple[dict[str, str], list[str]] | None:
    """The variables that a command sets, and the arguments of Python that run it; None where it
    needs a shell."""
    if SHELL_ONLY.search(command):
        return None
    words, given = shlex.split(command.replace("$PWD", str(cwd))), {}
    while words and re.match(r"\w+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        given[name] = value
    if words[:1] == ["flashattn-jit"]:
        return given, ["-m", "flashattn_jit", *words[1:]]
    return (given, words[1:]) if words[:1] == ["python"] else None


def sessions(page: Path) -> list[str]:
    """The commands of a page, after ``$ `` in its console blocks."""
    blocks = [s.text.replace("\\\n", " ") for s in snippets(page) if s.kind == "console"]
    return [line[2:] for text in blocks for line in text.splitlines() if line.startswith("$ ")]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", ["tutorial.md", "cache.md", "command_line.md"])
def test_sessions_run(name: str, tmp_path: Path) -> None:
    """One after the other in one folder, as the pages say; each exits with 0.

    The page's first command and those that need a shell start interpreters; the others are forked
    from a process that has imported torch.
    """
    page = ROOT / "docs" / name
    service = next(
        s.text for s in snippets(ROOT / "docs" / "command_line.md") if s.kind == "python"
    )
    if name == "cache.md":  # whose builder compiles for sm_90
        service = service.replace("512, 64)", "512, 64, dtype=torch.bfloat16)")
    (tmp_path / "service.py").write_text(service)
    home = tmp_path / "home"
    for folder in (".local/share/bash-completion/completions", ".config/fish/completions"):
        (home / folder).mkdir(parents=True)
    env = {**os.environ, "HOME": str(home), "NO_COLOR": "1"}
    if name == "command_line.md":  # which lists and clears the cache
        env["FLASHATTN_JIT_CACHE_DIR"] = str(tmp_path / "kernels")

    def run(command: str, *, forked: bool = True) -> str:
        if forked and (program := programs(command, tmp_path)):
            given, arguments = program
            result = processes.run(arguments, cwd=tmp_path, env={**env, **given})
            assert result.returncode == 0, f"{page}: {command}\n{result.stdout}{result.stderr}"
            return result.stdout
        words = (
            'flashattn-jit() { "$PYTHON" -m flashattn_jit "$@"; }; python() { "$PYTHON" "$@"; };'
        )
        result = subprocess.run(
            ["bash", "-c", f"{words} {command}"], cwd=tmp_path, text=True, capture_output=True,
            check=False, env={**env, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable},
        )  # fmt: skip
        assert result.returncode == 0, f"{page}: {command}\n{result.stdout}{result.stderr}"
        return result.stdout

    run("python service.py")
    if name != "command_line.md":
        run("flashattn-jit pack kernels.pack --manifest service.jsonl")
    keys: list[str] = []
    ran = 0
    for command in sessions(page):
        if any(command.startswith(begin) for begin in NOT_RUN):
            continue
        if "sm_90" in command and find_toolkit() is None:
            continue
        if re.search(r"\b(67c7|0d32)\b", command):  # keys of the machine that wrote the page
            keys = keys or [line.split()[0] for line in run("flashattn-jit cache ls").splitlines()]
            command = command.replace("67c7", keys[0]).replace("0d32", keys[1])
        run(command.replace("/tmp/demo", str(tmp_path)), forked=ran > 0)
        ran += 1
    assert ran > 2


def test_all_sessions_are_run() -> None:
    with_sessions = {page.name for page in PAGES if sessions(page)}
    assert with_sessions == {"tutorial.md", "cache.md", "command_line.md"}
