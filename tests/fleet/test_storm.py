"""Many processes over a warm cache only read it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet.fleet import WORKER, Fleet, package_folder, tree

NO_TOOLS = {"PATH": "/nowhere", "FLASHATTN_JIT_CXX": None, "CXX": None, "CUDA_HOME": None}


def test_64_processes_lock_start_and_write_nothing(warm: Fleet) -> None:
    before = tree(warm.cache)
    result = warm.start("storm", arguments={"count": 64}).good()
    answers = result["answers"]
    assert [a.get("source", a) for a in answers] == ["disk"] * 64
    for answer in answers:
        assert not any(answer["counters"].get(n) for n in ("misses", "compiles", "corrupt"))
        assert answer["counters"]["lock_wait_s"] == 0
    # No lock folder was made and no compiler started.
    assert not warm.locks.exists()
    assert warm.compiler.started == 0
    assert tree(warm.cache) == before


@pytest.mark.parametrize("mode", ["missing", "never"])
def test_64_processes_without_any_tool_on_path(warm: Fleet, mode: str) -> None:
    before = tree(warm.cache)
    env = {**NO_TOOLS, "FLASHATTN_JIT_COMPILE": mode}
    answers = warm.start("storm", arguments={"count": 64}, env=env).good()["answers"]
    assert [a.get("source", a) for a in answers] == ["disk"] * 64
    assert not warm.locks.exists()
    assert tree(warm.cache) == before


def test_a_hit_opens_locks_and_starts_nothing_for_writing(warm: Fleet) -> None:
    result = warm.start("audited").good()
    assert result["answer"]["source"] == "disk"
    assert result["seen"] == []


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_system_calls_of_a_hit(warm: Fleet) -> None:
    """System calls of libraries and threads, which Python's audit events do not show."""
    trace = warm.root / "trace"
    calls = (
        "openat,flock,fcntl,fsync,execve,fork,vfork,mkdir,mkdirat,rename,renameat,renameat2,"
        "unlink,unlinkat,symlink,link,linkat,chmod,fchmod,fchmodat,truncate,ftruncate,utimensat"
    )
    program = (
        "import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
        "import os, worker, flashattn_jit\n"
        "worker._maps()\n"
        "open('/dev/null')\n"
        "assert worker._attend()['source'] == 'disk'\n"
        "open('/dev/null')\n"
    )
    command = ["strace", "-f", "-qq", "-o", str(trace), "-e", f"trace={calls}",
               sys.executable, "-c", program, package_folder(), str(WORKER.parent)]  # fmt: skip
    done = subprocess.run(command, env=warm.env, capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr.lower():
        pytest.skip(f"strace may not trace: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    _, between, _ = trace.read_text().rsplit('"/dev/null"', 2)
    assert "artifact.so" in between
    # Opening files for reading and queries of descriptors are allowed.
    harmless = re.compile(r"openat\(.*O_RDONLY|fcntl\(\d+, F_[GD]|exited with|^ *O_RDONLY|^\d* *$")
    assert [line for line in between.splitlines()[1:-1] if not harmless.search(line)] == []


def test_a_miss_where_compiling_is_forbidden_writes_and_starts_nothing(warm: Fleet) -> None:
    before = tree(warm.root / "cache")
    process = warm.start("audited", env={"FLASHATTN_JIT_COMPILE": "never"}, arguments={"dim": 24})
    result = process.result()
    assert result["error"] == "MissingKernelError"
    assert result["seen"] == []
    assert warm.compiler.started == 0
    assert tree(warm.root / "cache") == before
    assert not warm.locks.exists()


def test_an_empty_cache_where_compiling_is_forbidden_is_not_even_made(fleet: Fleet) -> None:
    result = fleet.start("audited", env={"FLASHATTN_JIT_COMPILE": "never"}).result()
    assert result["error"] == "MissingKernelError"
    assert result["seen"] == []
    assert not fleet.cache.exists()
    assert not fleet.locks.exists()
    assert fleet.compiler.started == 0


def test_the_error_of_a_miss_says_where_it_looked_and_what_builds_it(warm: Fleet) -> None:
    site = warm.root / "site"
    shutil.copytree(warm.cache, site)
    env = {"FLASHATTN_JIT_COMPILE": "never", "FLASHATTN_JIT_CACHE_PATH": str(site)}
    result = warm.start(env=env, arguments={"dim": 24}).result()
    assert result["error"] == "MissingKernelError"
    message = result["message"]
    for word in (str(warm.cache), str(site), "head_dims", "24", "flashattn-jit warm"):
        assert word in message
    assert result["command"] and result["command"] in message


def test_the_command_in_the_error_builds_what_was_missing(fleet: Fleet) -> None:
    never = {"FLASHATTN_JIT_COMPILE": "never"}
    missed = fleet.start(env=never).result()
    assert missed["error"] == "MissingKernelError"
    env = {**fleet.env, "PYTHONPATH": package_folder(),
           "PATH": f"{Path(sys.executable).parent}:{fleet.env.get('PATH', '')}"}  # fmt: skip
    command = missed["command"]
    if shutil.which("flashattn-jit", path=env["PATH"]) is None:
        command = command.replace("flashattn-jit", f"{sys.executable} -m flashattn_jit", 1)
    done = subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True,
                          cwd=fleet.root, check=False)  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert fleet.start(env=never).good()["source"] == "disk"
