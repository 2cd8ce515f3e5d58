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
import queue
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from ...errors import CompileError
from .worker import build, end_session

_PATIENCE_S = 10.0  # for a worker to end by itself
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from flashattn_jit.deploy.warm.worker import main; main()"
)


class WorkerPool(Executor):
    """`jobs` processes for `worker.build`, started when there is work for them.

    One that dies fails its own task, and another takes its place for the next.
    """

    def __init__(self, jobs: int) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], str] | None] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._stopped = False
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(jobs)]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Builds a task: `submit(worker.build, task)`. Raises TypeError for any other call."""
        if fn is not build or len(args) != 1 or kwargs:
            raise TypeError(f"these processes run worker.build(task) alone, not {fn!r}")
        future: Future[Any] = Future()
        self._tasks.put((future, args[0]))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Lets the workers end once their tasks are done, or drops what has not begun."""
        with contextlib.suppress(queue.Empty):
            while cancel_futures and (item := self._tasks.get_nowait()):
                item[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error ends everything now: workers, their compilers, and what waits."""
        if kind is not None:
            with self._lock:
                self._stopped = True
                for worker in self._workers:
                    worker.process.terminate()
        self.shutdown(cancel_futures=kind is not None)

    def _serve(self) -> None:
        worker: _Worker | None = None
        while (item := self._tasks.get()) is not None:
            future, task = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                worker = worker or self._start()
                future.set_result(worker.ask(task))
            except Exception as error:
                future.set_exception(error)
                self._end(worker)
                worker = None
        self._end(worker)

    def _start(self) -> _Worker:
        with self._lock:
            if self._stopped:
                raise CompileError("the builds were stopped")
            worker = _Worker()
            self._workers.append(worker)
            return worker

    def _end(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.end()
            with self._lock:
                self._workers.remove(worker)


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

    def end(self) -> None:
        """Waits for the process, for a while; then kills it and what it started."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
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
