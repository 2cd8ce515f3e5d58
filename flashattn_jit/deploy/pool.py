"""Processes of this machine that build kernels, as a `concurrent.futures.Executor`.

Threads would not do: `cpp_extension.load` reads the process's environment and globals, so one build
at a time runs in a process. `multiprocessing` would not do either: its children import the main
module again, which a script without a guard does not survive. These workers import this package
alone, each goes to work as soon as it is ready, and each leads a session, so that nothing that it
started outlives it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ..errors import CompileError
from .worker import end_session

_PATIENCE_S = 10.0  # for a worker to end by itself
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from flashattn_jit.deploy.worker import main; main()"
)

P = ParamSpec("P")
T = TypeVar("T")


class WorkerPool(ThreadPoolExecutor):
    """`jobs` threads, each with a process for `worker.build`, started when there is work for it.

    A process that dies fails its own task, and another takes its place for the next.
    """

    def __init__(self, jobs: int) -> None:
        super().__init__(jobs)
        self._own = threading.local()
        self._workers: list[_Worker] = []
        self._changing = threading.Lock()
        self._stopped = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Builds a task: `submit(worker.build, task)`, nothing else."""
        assert fn.__name__ == "build" and not kwargs
        (task,) = args
        return super().submit(self._build, str(task))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Lets the workers end once their tasks are done, or drops what has not begun."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        for worker in self._workers:
            worker.close()  # all of them, before the first is waited for
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def stop(self) -> None:
        """Ends everything now: workers, their compilers, and what waits."""
        with self._changing:
            self._stopped = True
            for worker in self._workers:
                worker.process.terminate()
        self.shutdown(cancel_futures=True)

    def _build(self, task: str) -> Any:
        worker: _Worker | None = getattr(self._own, "worker", None)
        if worker is None:
            worker = self._own.worker = self._start()
        try:
            return worker.ask(task)
        except Exception:
            self._own.worker = None
            with self._changing:
                self._workers.remove(worker)
            worker.end()
            raise

    def _start(self) -> _Worker:
        with self._changing:
            if self._stopped:
                raise CompileError("the builds were stopped")
            worker = _Worker()
            self._workers.append(worker)
            return worker


class _Worker:
    """One process, in a session of its own."""

    def __init__(self) -> None:
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps([p or str(Path.cwd()) for p in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            start_new_session=True,
        )

    def ask(self, task: str) -> Any:
        """The result of a task. Raises CompileError where the process dies over it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(task + "\n")
            self.process.stdin.flush()
        reply = self.process.stdout.readline()
        if not reply.endswith("\n"):
            raise CompileError(self._epitaph())
        return json.loads(reply)

    def close(self) -> None:
        """Tells the process that there are no more tasks."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self) -> None:
        """Waits for the process, for a while; then kills it and what it started."""
        assert self.process.stdout is not None
        self.close()
        try:
            self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.returncode:
            end_session(self.process.pid)
        self.process.stdout.close()
        self._words.close()

    def _epitaph(self) -> str:
        code = self.process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        said = f": {lines[-1]}" if lines else ""
        memory = "; if memory ran out, take fewer jobs" if code == -9 else ""
        return f"the process that compiled it died ({how}){said}{memory}"
