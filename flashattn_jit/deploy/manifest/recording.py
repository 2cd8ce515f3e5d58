"""`fa.record_manifest`: which kernels ran, or were planned with, written as a manifest.

Each module of the process remembers the epoch in which it last ran. A block begins a new one, and
at its end the modules that ran since are what it records: kernels that were loaded before, calls
whose plans are remembered and other threads' calls are among them. Nothing is added to a call.
The kernels of a plan, and of `workspace_bytes` on CUDA, count as run: a later process asks for them
again, even where the runs of the plan need others, of params that plan() did not know.

A kernel is recorded as it was asked for, before it stepped down to a smaller tile: that is what a
later process asks for. A CUDA graph is recorded when it is captured, not when it is replayed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ... import _C, env
from ...codegen.document import Line, line_of, spec_from_document
from ...errors import ManifestError
from ...jit.module import default
from .file import check_writable, write_manifest

log = logging.getLogger(__name__)


@contextlib.contextmanager
def record_manifest(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the kernels that run, or are planned with, inside the block to a manifest.

    Make `fa.BatchAttention` and `fa.CascadeAttention`, or at least plan with them, inside the
    block: a plan can ask for other kernels than its runs, and one from before adds those of its
    runs alone.

    All of the process counts, whatever thread runs it. Blocks may be nested, and several, of other
    processes too, may write one file: lines are merged, and the same work leaves the same file byte
    for byte. An error inside the block is passed on after what ran before it was written. Forked
    children record as well, and write when they leave the block or end; not those that end by
    ``os._exit`` or a signal.

    Where a call's tensor params have other dtypes, or are expanded in other dims, it is another
    kernel: record a call of each.

    FLASHATTN_JIT_RECORD=path does the same for the life of a process and of its children.

    Args:
        path: the manifest, made where there is none; see `deploy.manifest.file`.

    Raises:
        ManifestError: the file cannot be written, or is no manifest; at once, where that shows.

    Example:
        >>> with fa.record_manifest("service.jsonl"):
        ...     serve(requests)
    """
    recorder = _Recorder(Path(path).absolute())
    try:
        yield
    except BaseException:
        recorder.write_or_warn()
        raise
    else:
        recorder.write()
    finally:
        recorder.close()


def record_process() -> None:
    """Record the life of the process where FLASHATTN_JIT_RECORD says so. Called at import.

    Raises:
        ManifestError: the file cannot be written, or is no manifest.
    """
    if path := env.record_path():
        _process.append(_Recorder(path.absolute(), 1, even_nothing=False))
        atexit.register(_process[-1].write_or_warn)  # in children of os.fork too


_process: list[_Recorder] = []  # lives as long as the process


def ran_since(epoch: int) -> tuple[Line, ...]:
    """What ran in this process since an epoch of `_C.begin_run_epoch` began."""
    lines = []
    for loaded in default.loaded():
        if loaded.module.last_run >= epoch:
            try:
                spec = spec_from_document(loaded.request.spec, loaded.request.name)
                lines.append(line_of(spec))
            except ManifestError as error:
                log.warning("kernel %s is not recorded: %s", loaded.request.name, error)
    return tuple(lines)


@dataclass(eq=False)  # not slotted: multiprocessing refers to it weakly
class _Recorder:
    """Writes what ran since `epoch` to `path`. epoch: 0 begins one, once `path` was checked.
    even_nothing: whether a file is made where nothing ran."""

    path: Path
    epoch: int = 0
    even_nothing: bool = True
    open: bool = True
    finalizer: multiprocessing.util.Finalize | None = None

    def __post_init__(self) -> None:
        check_writable(self.path)
        self.epoch = self.epoch or _C.begin_run_epoch()
        multiprocessing.util.register_after_fork(self, _write_at_end)

    def write(self) -> None:
        """Add what ran so far to the file. Raises ManifestError."""
        lines = ran_since(self.epoch) if self.open else ()
        if lines or (self.open and self.even_nothing):
            write_manifest(self.path, lines)

    def write_or_warn(self) -> None:
        """As `write`, where an error has nobody to go to."""
        try:
            self.write()
        except ManifestError as error:
            log.error("what ran is not recorded: %s", error)

    def close(self) -> None:
        """The block has been left: children forked from here on do not belong to it."""
        self.open = False
        if self.finalizer is not None:
            self.finalizer.cancel()


def _write_at_end(recorder: _Recorder) -> None:
    """In a process that multiprocessing forked, which runs finalizers in place of atexit's."""
    if recorder.open:
        recorder.finalizer = multiprocessing.util.Finalize(
            recorder, recorder.write_or_warn, exitpriority=0
        )
