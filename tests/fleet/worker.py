"""A server that has imported torch and forks a process for each task of a test.

    python worker.py SOCKET

serves requests on a Unix socket, one JSON document for each connection, until its standard input
ends. A request with a task forks a process in a new session, which sets the environment of the
request, runs the task and writes a JSON answer; a request with `poll` returns the exit code of a
process. Importing torch takes longer than most tests, so the first server imports only torch; the
task `serve` turns a forked process into a second server that has imported the package too.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_PRELOADED = (
    "encodings.unicode_escape",
    "torch",
    "torch.utils.cpp_extension",
    "jinja2",
    "platformdirs",
    "ninja",
    "numpy",
)
_PACKAGE = (
    "flashattn_jit",
    "flashattn_jit.codegen.render",
    "flashattn_jit.inspect.cache",
    "flashattn_jit.jit.compilation.compile_job",
    "flashattn_jit.jit.cache.misses",
)

Json = dict[str, Any]


def serve(path: str) -> None:
    """Answers requests until standard input ends."""
    listener = socket.socket(socket.AF_UNIX)
    # The name appears only when the socket listens, as clients connect when they find it.
    listener.bind(f"{path}.new")
    listener.listen(128)
    Path(f"{path}.new").rename(path)
    ended: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            return
        connection, _ = listener.accept()
        # A test that gave up has closed its end.
        with contextlib.suppress(OSError, ValueError), connection:
            stream = connection.makefile("rwb")
            request = json.loads(stream.readline())
            if "poll" in request:
                answer: Any = _ended(ended).get(request["poll"])
            else:
                answer = os.fork()
                if answer == 0:
                    listener.close()
                    run(request)
            stream.write(json.dumps(answer).encode() + b"\n")
            stream.flush()


def _ended(statuses: dict[int, int]) -> dict[int, int]:
    """Adds the exit codes of processes that have ended to `statuses`, and returns it."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[found[0]] = os.waitstatus_to_exitcode(found[1])
    return statuses


def run(request: Json) -> None:
    """Runs one task in this process, then exits."""
    status = 1
    try:
        os.setsid()
        answer = Path(request["answer"])
        # Opened before mounts, which may cover its path, and before setuid.
        part = answer.with_suffix(".json").open("w")
        keep = request["task"] == "serve"
        for descriptor, name in ((0, os.devnull), (1, f"{answer}.log"), (2, f"{answer}.log")):
            if descriptor or not keep:
                file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(file, descriptor)
                os.close(file)
        os.environ.clear()
        os.environ.update(request["env"])
        sys.path[:0] = filter(None, [request.get("tree")])
        try:
            _confine(request)
            result = TASKS[request["task"]](**request["arguments"])
        except Exception as error:
            traceback.print_exc()
            result = {"error": type(error).__name__, "message": str(error)}
            for name in ("key", "command"):
                result[name] = str(getattr(error, name, ""))
        part.write(json.dumps(result))
        part.close()
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _confine(request: Json) -> None:
    """Sets private mounts, then user, umask and working folder."""
    if mounts := request.get("mounts"):
        private_mounts(mounts)
    if (uid := request.get("uid")) is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    os.umask(request.get("umask", 0o022))
    os.chdir(request.get("folder", "/"))


def private_mounts(commands: list[list[str]]) -> None:
    """Runs mount commands in a new mount namespace of this process. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNS | (_CLONE_NEWUSER if uid else 0)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare: no mount namespace")
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    for command in [["mount", "--make-rprivate", "/"], *commands]:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _attend(dim: int = 8) -> Json:
    """Runs and checks one call with this head dim; reports where its kernel came from."""
    import torch

    import flashattn_jit as fa
    from flashattn_jit.jit import module

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, dim) for n in (1, 16, 16))
    start = time.monotonic()
    out = fa.attention(q, k, v)
    elapsed = time.monotonic() - start
    # Not torch.testing, whose first use imports for a second.
    error = (out - torch.nn.functional.scaled_dot_product_attention(q, k, v)).abs().max()
    assert error < 1e-5, f"the kernel is wrong by {error}"
    return {
        "source": fa.last_kernel_source(),
        "elapsed": elapsed,
        "counters": dataclasses.asdict(module.default.counters),
        "mapped": [p for p in _maps() if p.endswith(".so") and "artifact" in p],
    }


def _maps() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(None, 5)[5] for line in lines if line.count("/")})


def _await(path: str) -> None:
    deadline = time.monotonic() + 60
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} never came")
        time.sleep(0.002)


def task_serve(path: str) -> Json:
    """Becomes a server that has imported the package."""
    for name in _PACKAGE:
        importlib.import_module(name)
    serve(path)
    return {}


def task_mounts() -> Json:
    """Does nothing: it fails before, in `_confine`, where mounts are not allowed."""
    return {}


def task_attend(dim: int = 8, mark: str = "", gate: str = "") -> Json:
    """Imports the package, makes the file `mark`, waits for `gate`, then makes a call."""
    import flashattn_jit  # noqa: F401

    if mark:
        Path(mark).touch()
    if gate:
        _await(gate)
    return _attend(dim)


def task_attend_twice(dims: list[int], mark: str, gate: str) -> Json:
    """Makes a call and the file `mark`; after `gate`, the same call and one of another kernel."""
    first = _attend(dims[0])
    Path(mark).touch()
    _await(gate)
    return {"first": first, "again": _attend(dims[0]), "second": _attend(dims[1])}


def task_threads(count: int, dim: int = 8) -> Json:
    """Threads that ask for one kernel at the same time."""
    barrier = threading.Barrier(count)
    results: list[Json] = []

    def ask() -> None:
        barrier.wait()
        results.append(_attend(dim))

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"answers": len(results), "counters": results[-1]["counters"]}


def task_fork_while_compiling(blocked: str, gate: str) -> Json:
    """While a thread compiles a kernel, a forked child calls another kernel and the same one."""
    results: list[Json] = []
    thread = threading.Thread(target=lambda: results.append(_attend(8)))
    thread.start()
    _await(blocked)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            Path(gate).touch()
            answers = [_attend(16)["source"], _attend(8)["source"]]
            os.write(write, json.dumps(answers).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        answers = json.loads(stream.read() or "null")
    thread.join()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"child": answers, "status": status, "parent": results[0]["source"]}


def task_key(target: str = "cpu:avx2", dim: int = 8) -> Json:
    """The key that the package in the request's tree gives a kernel."""
    import flashattn_jit
    from flashattn_jit.jit.cache.entry import kernel_key
    from flashattn_jit.jit.compilation.toolchain import flags_for
    from flashattn_jit.planner.tiles import Problem, build_requests, choose
    from flashattn_jit.variants.ir.ir import VariantIR

    problem = Problem((1,), (16,), 1, 1, dim, dim, *["float32"] * 3)
    (request,) = build_requests(choose(VariantIR(()), problem, target))
    key = kernel_key(request.spec, request.template, request.target, flags_for(request.target))
    return {"key": key.hex, "package": flashattn_jit.__file__}


def task_storm(count: int, dim: int = 8) -> Json:
    """Forks `count` processes that make the same call at once; the answers of all of them."""
    import flashattn_jit  # noqa: F401

    gate_read, gate_write = os.pipe()
    children: list[tuple[int, int]] = []
    for _ in range(count):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(gate_write)
            os.read(gate_read, 1)  # ends when the parent closes the gate
            try:
                answer = _attend(dim)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            os.write(write, json.dumps(answer).encode())
            os._exit(0)
        os.close(write)
        children.append((child, read))
    # Children forked later inherit the write end and hold the gate open until they close it.
    os.close(gate_write)
    answers = []
    for child, read in children:
        with os.fdopen(read) as stream:
            answers.append(json.loads(stream.read() or '{"error": "died"}'))
        os.waitpid(child, 0)
    return {"answers": answers}


def task_audited(dim: int = 8) -> Json:
    """A call, and the audit events of it that write, create, lock or start something."""
    import fcntl

    import flashattn_jit  # noqa: F401

    seen: list[str] = []
    flock = fcntl.flock
    fcntl.flock = lambda *a: (seen.append("flock"), flock(*a))[1]  # type: ignore[assignment]
    watched = (
        "subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system", "os.mkdir",
        "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.utime", "os.truncate", "fcntl.flock",
    )  # fmt: skip

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in watched:
            seen.append(f"{event} {args}")
        if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
            seen.append(f"{event} {args}")

    sys.addaudithook(audit)
    try:
        return {"answer": _attend(dim), "seen": list(seen)}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error), "seen": list(seen)}


def task_attend_until(gate: str, dims: list[int]) -> Json:
    """Forgets and loads kernels until the gate opens; counts where they came from."""
    from flashattn_jit.jit import module
    from flashattn_jit.ops.launching.launches import _kernels, forget_launches

    sources: dict[str, int] = {}
    rounds = 0
    while not Path(gate).exists() or not rounds:
        module.default.forget()
        forget_launches()
        _kernels.clear()
        for dim in dims:
            source = _attend(dim)["source"]
            sources[source] = sources.get(source, 0) + 1
        rounds += 1
    return {"sources": sources, "rounds": rounds, "corrupt": module.default.counters.corrupt}


def task_collect(root: str, max_bytes: int, grace_s: float, rounds: int = 1) -> Json:
    """Removes entries of a store, `rounds` times."""
    from flashattn_jit.jit.cache.eviction import collect
    from flashattn_jit.jit.cache.store import Store

    removed = 0
    for _ in range(rounds):
        removed += collect(Store(Path(root)), max_bytes, grace_s=grace_s).removed
        time.sleep(0.02)
    return {"removed": removed}


def _tasks() -> Iterator[tuple[str, Callable[..., Json]]]:
    for name, value in globals().items():
        if name.startswith("task_"):
            yield name.removeprefix("task_"), value


TASKS = dict(_tasks())

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module_name in _PRELOADED:
        importlib.import_module(module_name)
    serve(sys.argv[1])
