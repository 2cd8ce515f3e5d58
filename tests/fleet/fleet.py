"""Starts, stops and kills processes; a compiler that a test can block or make fail."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("worker.py")
PATIENCE_S = 60.0

# A kernel's key is in its source, so equal sources give equal objects, and the script reuses the
# objects of earlier tests. All tests use the same script, so that the compiler identity that a
# cache remembers is the same for all of them.
_COMPILER = """#!/bin/sh
folder=$FLEET_COMPILER memory={memory} compiler={compiler}
case " $* " in
  *" -c "*) ;;
  *" --version "* | *" -dumpmachine "*)
    echo "$*" >>"$folder/questions"
    if [ -e "$folder/version" ] && [ "$1" = --version ]; then exec cat "$folder/version"; fi
    exec $compiler "$@" ;;
  *) exec $compiler "$@" ;;
esac
echo $$ >>"$folder/compiles"
while [ -e "$folder/hold" ]; do sleep 0.02; done
if [ -e "$folder/fail" ]; then echo "kernel.cpp:7:1: error: told to fail" >&2; exit 1; fi
for argument; do case $argument in *.cpp) source=$argument ;; esac; done
known=$memory/$(sha256sum <"$source" | cut -c1-32)
if [ -d "$known" ]; then exec cp "$known"/kernel.* .; fi
$compiler "$@" || exit
mkdir "$known.$$" && cp kernel.o kernel.su kernel.o.d "$known.$$" &&
  mv -T "$known.$$" "$known" 2>/dev/null || rm -rf "$known.$$"
exit 0
"""


def until(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Waits for a condition. Fails the test after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {patience_s:.0f} s for {what}")
        time.sleep(0.005)


def tree(root: Path) -> dict[str, tuple[int, int, int]]:
    """Modes, sizes and mtimes of a folder and everything below it, by path."""
    found = {}
    for path in (root, *root.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found


def entries(root: Path) -> list[Path]:
    """The entries of a cache."""
    return sorted(path.parent for path in root.glob("v1/[!.]*/??/*/meta.json"))


def open_to_others(*roots: Path) -> list[str]:
    """Paths of these folders and of what is below them that others may write to."""
    paths = (path for root in roots if root.exists() for path in (root, *root.rglob("*")))
    return [str(p) for p in paths if p.lstat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            and not p.is_symlink()]  # fmt: skip


def session_pids(session: int) -> list[int]:
    """The processes of a session, its leader first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(path.parent.name))
    return sorted(found)


@dataclass
class Process:
    """A process that does one task."""

    server: str
    pid: int
    answer: Path

    def poll(self) -> int | None:
        """Its exit code, less than 0 for a signal; None while it runs."""
        return _ask(self.server, {"poll": self.pid})

    def result(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Waits for its answer. Fails the test where it has none."""
        until(lambda: self.poll() is not None, f"process {self.pid}", patience_s)
        text = self.answer.with_suffix(".json").read_text()
        if self.poll() or not text:
            pytest.fail(f"process {self.pid} ended with {self.poll()}: {self.log()}")
        return dict(json.loads(text))

    def good(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Waits for its answer. Fails the test where it is an error."""
        result = self.result(patience_s)
        if "error" in result:
            pytest.fail(f"{result['error']}: {result['message']}\n{self.log()}")
        return result

    def log(self) -> str:
        """Its standard output and error."""
        return Path(f"{self.answer}.log").read_text()

    def signal(self, number: int, *, with_children: bool = True) -> None:
        """Sends it a signal, and by default to the compilers that it started."""
        for pid in session_pids(self.pid) if with_children else [self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass
class Compiler:
    """A C++ compiler that counts its runs, and waits or fails when a test tells it to."""

    folder: Path
    command: Path

    @property
    def compiles(self) -> int:
        """The number of compiles that it began."""
        path = self.folder / "compiles"
        return len(path.read_text().splitlines()) if path.exists() else 0

    @property
    def started(self) -> int:
        """The number of its runs except for linking."""
        path = self.folder / "questions"
        return self.compiles + (len(path.read_text().splitlines()) if path.exists() else 0)

    def hold(self) -> None:
        """Makes compiles wait at their start until `release`."""
        self.folder.joinpath("hold").touch()

    def release(self) -> None:
        """Lets compiles continue."""
        self.folder.joinpath("hold").unlink(missing_ok=True)

    def fail(self, fails: bool = True) -> None:
        """Whether compiles fail from now on."""
        if fails:
            self.folder.joinpath("fail").touch()
        else:
            self.folder.joinpath("fail").unlink()

    def until_compiling(self, count: int = 1) -> None:
        """Waits until `count` compiles have begun."""
        until(lambda: self.compiles >= count, f"{count} compilers")


def environment() -> dict[str, str]:
    """This process' environment without the package's variables."""
    return {n: v for n, v in os.environ.items() if not n.startswith("FLASHATTN_JIT_")}


def package_folder() -> str:
    """The folder from which this process, and every process of a test, imports the package."""
    spec = importlib.util.find_spec("flashattn_jit")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent.parent)


def write_compiler(folder: Path) -> Path:
    """Writes the script that is the compiler of all tests; it keeps objects in `folder`."""
    compiler = shutil.which(shlex.split(os.environ.get("CXX") or "c++")[0])
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    command = folder / "c++"
    command.write_text(_COMPILER.format(memory=shlex.quote(str(folder)), compiler=compiler))
    command.chmod(0o755)
    return command


@dataclass
class Fleet:
    """The processes of a test, which share one cache, one lock folder and one compiler.

    `server` has imported the package, `torch_server` only torch.
    """

    root: Path
    server: str
    torch_server: str
    compiler: Compiler
    env: dict[str, str]
    processes: list[Process] = field(default_factory=list)

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def locks(self) -> Path:
        return self.root / "locks"

    def start(
        self,
        task: str = "attend",
        *,
        env: dict[str, str | None] | None = None,
        arguments: dict[str, Any] | None = None,
        **request: Any,
    ) -> Process:
        """Starts a process. env: variables to change, None for those to unset. request: fields that
        `worker.run` reads: mounts, umask, uid, folder, tree."""
        answer = self.root / "answers" / str(len(self.processes))
        changed = {**self.env, **(env or {})}
        full = {
            "task": task,
            "arguments": arguments or {},
            "env": {name: value for name, value in changed.items() if value is not None},
            "answer": str(answer),
            **request,
        }
        server = self.torch_server if "tree" in request else self.server
        pid = _ask(server, full)
        assert isinstance(pid, int)
        process = Process(server, pid, answer)
        self.processes.append(process)
        return process

    def end(self) -> None:
        """Kills the remaining processes and their compilers."""
        self.compiler.release()
        for process in self.processes:
            process.signal(signal.SIGKILL)
        for process in self.processes:
            until(lambda p=process: p.poll() is not None, f"process {process.pid} to end")


def _ask(server: str, request: dict[str, Any]) -> int | None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(server)
        with connection.makefile("rwb") as stream:
            stream.write(json.dumps(request).encode() + b"\n")
            stream.flush()
            answer = json.loads(stream.readline())
            return int(answer) if answer is not None else None


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[tuple[str, str]]:
    """The sockets of a server that has imported the package, and of one with only torch."""
    # A socket's name may have about 100 characters.
    plain, full = (os.path.relpath(folder / name) for name in ("torch", "package"))
    env = {**environment(), "PYTHONPATH": package_folder()}
    with subprocess.Popen([sys.executable, str(WORKER), plain], stdin=subprocess.PIPE, env=env) as (
        process
    ):
        try:
            until(Path(plain).exists, "the server of processes")
            request = {"task": "serve", "arguments": {"path": full}, "env": env}
            _ask(plain, {**request, "answer": str(folder / "server"), "folder": str(Path.cwd())})
            until(Path(full).exists, "the server of processes with the package")
            yield full, plain
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(PATIENCE_S)
