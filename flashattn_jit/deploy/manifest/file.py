"""Manifests: files that list kernels, a line each, by what they are and not by where they lie.

A line is canonical JSON, ``{"manifest_schema":1,"name":"Causal","spec":{...}}``, where `spec` is
the document that keys are made of, with the variant's IR. So a manifest holds no pickles, no import
paths and no code (but see below), reads the same on any machine, and can be lowered again for
another target (`planner.reachable.retarget`). Lines are sorted; equal manifests are equal files.

Manifests are not trusted: reading one checks everything (`parse_line`). Hooks that were
given as C++ text are code, so lines with them are refused unless ``allow_cpp=True`` says that the
file is as trusted as the program that it was recorded from.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...codegen.document import Line, line_text, parse_line
from ...errors import ManifestError
from ..files import replacing

log = logging.getLogger(__name__)

STDIN = "-"
MAX_FILE = 1 << 28
"""Bytes of a manifest: some ten thousand lines."""


def read_manifest(path: str | os.PathLike[str], *, allow_cpp: bool = False) -> tuple[Line, ...]:
    """The lines of a manifest, sorted, equal specs once; "-" is standard input.

    Empty lines are skipped.

    Raises:
        ManifestError: a line is malformed or of another version; names the file and the line. Also
            where the file cannot be read.

    Example:
        >>> lines = read_manifest("service.jsonl")
    """
    is_stdin = path == STDIN
    where = "standard input" if is_stdin else str(path)
    lines = []
    for number, text in enumerate(sys.stdin if is_stdin else _read(Path(path)).split("\n"), 1):
        if text.strip():
            try:
                lines.append(parse_line(text, allow_cpp=allow_cpp))
            except ManifestError as error:
                raise ManifestError(f"{where}, line {number}: {error}") from None
    return merged(lines)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise ManifestError(f"{path}: more than {MAX_FILE} bytes are no manifest")
        return data.decode()
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: is no text: {error}") from None


def merged(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Lines sorted by name and spec, each spec once, under the first of its names."""
    found: dict[str, Line] = {}
    for line in lines:
        document = line.document
        other = found.get(document)
        if other is None or line.name < other.name:
            found[document] = line
    order = sorted(found.items(), key=lambda item: (item[1].name, item[0]))
    return tuple(line for _, line in order)


def manifest_text(lines: Iterable[Line]) -> str:
    """A whole manifest: equal sets of lines give equal text."""
    return "".join(f"{line_text(line)}\n" for line in merged(lines))


def write_manifest(
    path: str | os.PathLike[str], lines: Iterable[Line], *, merge: bool = True
) -> tuple[Line, ...]:
    """Write lines to a manifest, by default beside those that it has; returns what it has then.

    Under a lock, and by one rename: readers find the old file or the new one. A file that would not
    change is left alone. A symbolic link stays one: what it points to is written.

    Raises:
        ManifestError: the file that is there is no manifest, or nothing can be written there.
    """
    real_path = Path(os.path.realpath(path))
    try:
        with _locked(real_path):
            there = real_path.exists()
            before = _read(real_path) if there else ""
            old = read_manifest(real_path, allow_cpp=True) if merge and there else ()
            every = merged([*old, *lines])
            text = manifest_text(every)
            if not there or text != before:
                with replacing(
                    real_path, real_path.stat().st_mode & 0o777 if there else None
                ) as file:
                    file.write(text.encode())
            return every
    except OSError as error:
        raise ManifestError(f"{path}: cannot be written: {error.strerror or error}") from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises ManifestError where `write_manifest` would: leaves nothing behind.

    The file need not exist yet, its folder must.
    """
    real_path = Path(os.path.realpath(path))
    try:
        if real_path.exists():
            read_manifest(real_path, allow_cpp=True)
        with tempfile.NamedTemporaryFile(prefix=f".{real_path.name}.", dir=real_path.parent):
            pass
    except OSError as error:
        raise ManifestError(f"{path}: cannot be written: {error.strerror or error}") from error


def merge_manifests(
    paths: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str]
) -> tuple[Line, ...]:
    """Write the lines of several manifests to `out`, in place of what it has; returns them.

    Raises ManifestError as reading and writing do.
    """
    lines = [line for path in paths for line in read_manifest(path, allow_cpp=True)]
    return write_manifest(out, lines, merge=False)


_LOCK_WAIT_S = 10.0
_LOCK_POLL_S = 0.01


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process at a time change a manifest, where it can be had within a bounded wait.

    The lock is the folder's, so that nothing is left behind. Without it a file is still written as
    a whole; lines of somebody who writes at the same moment may be lost.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    end = time.monotonic() + _LOCK_WAIT_S
    try:
        while not _try_lock(folder, path):
            if time.monotonic() >= end:
                log.warning("waited %.0f s for the lock on %s: writing %s without it",
                            _LOCK_WAIT_S, path.parent, path.name)  # fmt: skip
                break
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        # Closing alone would leave it to a process that was forked meanwhile.
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_UN)
        os.close(folder)


def _try_lock(folder: int, path: Path) -> bool:
    """Whether waiting longer is of no use: the lock is held, or there are none."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # network file systems lock no folder that is open for reading
        log.debug("no lock on %s (%s): writing %s without it", path.parent, error, path.name)
    return True
