"""Files that callers name: their paths, and writing one in the place of another at once."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import InputError, PackError
from ..jit.cache.store import fsync


@contextlib.contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once it was written whole, and else leaves nothing.

    mode: the file's; by default all may read it whom the umask lets.
    """
    name = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        # A file that others may write to is no pack, whatever the umask allows.
        with open(name, "x+b", opener=lambda p, flags: os.open(p, flags, 0o644)) as file:
            yield file
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        name.replace(path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def fault_of_output(path: Path) -> str:
    """Why no file can be written to `path`, with the remedy: its folder is missing, or it is a
    folder itself. Empty if a file can be written as far as these are concerned."""
    folder = path.parent
    if folder.is_dir():
        return "it is a folder; name a file in it" if path.is_dir() else ""
    nearest = next(p for p in (folder, *folder.parents) if os.path.lexists(p))
    if nearest == folder:
        return f"its folder {folder} is no folder; correct the path"
    if nearest.is_dir():
        made = f"mkdir -p {shlex.quote(str(folder))}"
        return f"its folder {folder} does not exist; make it ({made}), or correct the path"
    return f"its folder {folder} does not exist, and {nearest} is no folder; correct the path"


def checked_path(name: str, value: object) -> Path:
    """A path that the caller gave, as a `Path`; name: of the argument.

    Raises InputError where it is no text, PackError where no file can have that name.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InputError(f"{name} must be a str or an os.PathLike, got {type(value).__name__}")
    if not text:
        raise PackError(f"{name} is empty; give the name of a file or folder")
    with contextlib.suppress(UnicodeEncodeError):
        if b"\0" not in os.fsencode(text):
            return Path(text)
    raise PackError(f"{name} {text!r} holds a character that no file name can have")
