"""One kernel built in another process: a task is text, its result is plain data.

`build` runs in any worker, on this machine or on another: in `concurrent.futures` pools, under
Dask, Ray or MPI. `main` is the process that `WorkerPool` starts: it takes tasks from its standard
input, a line each, until that is closed, and leaves no compiler behind when it is stopped.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import CompileError, FlashAttnJitError

_KEPT_LOG = 20_000  # bytes of a failed build's log that travel with its result
_PATIENCE_S = 10.0  # for killed processes to be gone


def make_task(document: str, name: str, *, ship: bool) -> str:
    """The task of building the kernel of a spec document.

    name: what its messages call the variant. ship: whether the result brings the entry's files.
    """
    return json.dumps({"document": document, "name": name, "ship": ship})


def build(task: str) -> dict[str, Any]:
    """Builds a task's kernel into the cache of the process that runs this, or finds it there.

    The result: fields of `KernelResult`, of what was asked for only `key`; `warnings` that were
    logged; `log`, of a build that failed; and if the task ships them `entries`, those of the kernel
    and of what it stepped down to: key, compiler_id, meta and files of each.

    A kernel that fails is a result, too; whatever else goes wrong is raised. For workers that are
    not of `WorkerPool` its arguments and result are picklable, and hold no paths but in messages.
    """
    from ...codegen.document import spec_from_document
    from ...jit.cache.layers import entries_of
    from ...jit.cache.remote import layers
    from ...jit.compilation.toolchain import key_of
    from ...jit.module import prepare_kernel
    from ...planner.tiles import build_requests

    begin = time.perf_counter()
    result: dict[str, Any]
    order = json.loads(task)
    with _warnings() as warnings:
        try:
            requests = build_requests(spec_from_document(order["document"], order["name"]))
            prepared = prepare_kernel(requests)
        except FlashAttnJitError as error:
            result = {"error": str(error), "error_type": type(error).__name__}
            if isinstance(error, CompileError):
                result["log_path"] = error.log_path
                with suppress(OSError):
                    log = Path(error.log_path).read_text(errors="replace")
                    result["log"] = log[-_KEPT_LOG:]
        else:
            keys = [key_of(request).hex for request in requests]
            entries = entries_of(keys, layers())
            result = {
                "key": keys[0],
                "tile": prepared.tile,
                "layer": prepared.found.layer,
                "compiler_id": entries[-1].compiler_id,
                "compile_s": prepared.compile_s,
                "artifact_bytes": prepared.found.artifact_bytes,
            }
            if order["ship"]:
                result["entries"] = [
                    {"key": entry.key, "compiler_id": entry.compiler_id, "meta": dict(entry.meta),
                     "files": {name: entry.read(name) for name in entry.meta["files"]}}
                    for entry in entries
                ]  # fmt: skip
    seconds = time.perf_counter() - begin
    return {**result, "warnings": warnings, "seconds": seconds, "host": socket.gethostname()}


def main() -> None:
    """Builds what comes on standard input, replying on standard output, until that is closed."""
    tasks_in, replies = _own_pipes()
    tasks: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    busy, gone = threading.Event(), threading.Event()
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides

    def receive() -> None:
        with tasks_in:
            for line in tasks_in:
                tasks.put(line)
        tasks.put(None)
        gone.set()
        if busy.is_set():
            # Nobody waits for the result: the process that started this one is gone.
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=receive, daemon=True).start()
    for name in ("codegen.document", "codegen.render", "jit.module", "planner.tiles"):
        import_module(f"flashattn_jit.{name}")  # while tasks are still on their way
    import_module("torch.utils.cpp_extension")
    while (task := tasks.get()) is not None:
        busy.set()
        if gone.is_set():
            break  # it went before this was begun
        reply = json.dumps(build(task))
        busy.clear()
        with suppress(BrokenPipeError):
            replies.write(reply + "\n")
            replies.flush()


def end_session(session: int) -> None:
    """Kills every process of a session but this one: compilers are in groups of their own.

    /proc is read until none is left, as a process forked during one reading is not in it.
    """
    end = time.monotonic() + _PATIENCE_S
    while _kill_session(session) and time.monotonic() < end:
        time.sleep(0.001)


def _kill_session(session: int) -> bool:
    """Kills what one reading of /proc shows of a session, and says whether that was anything."""
    found = False
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            # After the name, which may hold anything: state, parent, group, session.
            fields = folder.joinpath("stat").read_text().rpartition(")")[2].split()
            alive = fields[0] not in "ZX"
            if alive and int(fields[3]) == session and int(folder.name) != os.getpid():
                os.kill(int(folder.name), signal.SIGKILL)
                found = True
    return found


def _stop(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_session(os.getsid(0))
    sys.exit(128 + number)  # through the build's own clean-up


def _own_pipes() -> tuple[Any, Any]:
    """The pipes to the parent, kept from the compilers and from whatever prints."""
    tasks, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return os.fdopen(tasks), os.fdopen(replies, "w")


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collects what this package warns of in this thread, for the process that shows it."""
    found: list[str] = []
    own = threading.get_ident()  # other threads of an executor have their own builds

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread == own:
                found.append(record.getMessage())

    handler = Collect(logging.WARNING)
    logger = logging.getLogger("flashattn_jit")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
