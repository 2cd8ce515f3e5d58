"""A store below a URL, read and filled through fsspec.

The tree is a store's, `<url>/v1/<compiler id>/<two digits>/<key>/<file>`, so any tool that copies
folders fills it; `push` does, meta.json last. An entry is fetched whole, checked as any entry from
elsewhere is (every digest, and the key by its document), and then adopted into the user's folder.
Digests protect from damage, not from malice: whoever can write there decides which code runs.

Nothing here may keep a process waiting: a look-up has a time limit, and after one that failed the
remote is left alone for a while.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flashattn_jit import env
from flashattn_jit.errors import CacheError
from flashattn_jit.jit.cache.entry import (
    META,
    MOST_META_BYTES,
    CorruptEntryError,
    Document,
    Entry,
    is_compiler_id,
    parse_meta,
    read_file,
)
from flashattn_jit.jit.cache.layers import (
    Answer,
    Found,
    Layer,
    LayerName,
    found_in_memory,
    local_layers,
)
from flashattn_jit.jit.cache.store import LAYOUT, Store

log = logging.getLogger(__name__)

T = TypeVar("T")

_LEFT_ALONE_S = 60.0
_BLOCK_BYTES = 1 << 20

# protocol://user:password@host/path?token#fragment; URLs of several protocols have :: between them.
_URL = re.compile(
    r"""([\w+.-]+://)(?:[^/?#\s'"]*@)?((?:(?!::)[^?#\s'"])*)(?:[?#](?:(?!::)[^\s'"])*)?"""
)

_left_alone: dict[str, tuple[float, str]] = {}
_warned: set[str] = set()


class RemoteError(CacheError):
    """A remote folder cannot be reached or written. Names it and the reason."""


@dataclass(frozen=True, slots=True)
class RemoteLayer:
    """The remote folder as a layer."""

    url: str
    name: LayerName = "remote"

    @property
    def location(self) -> str:
        """The URL, without what may be secret in it."""
        return public_url(self.url)

    def search(self, key: str, compiler_id: str | None) -> Answer:
        """See `Layer`. What fails is a reason; it is warned of once."""
        since, why = _left_alone.get(self.url, (0.0, ""))
        if why and time.monotonic() - since < _LEFT_ALONE_S:
            return Answer(reason=f"it is left alone for a while: {why}")
        try:
            return _within(
                env.cache_remote_timeout_s(), lambda: _search(self.url, key, compiler_id)
            )
        except Exception as error:
            # fsspec's file systems raise whatever their libraries do.
            why = public_url(f"{type(error).__name__}: {error}")
            _left_alone[self.url] = time.monotonic(), why
            if self.url not in _warned:
                _warned.add(self.url)
                log.warning("the remote kernel cache %s does not serve: %s", self.location, why)
            return Answer(reason=why)

    def documents(self) -> Iterator[tuple[str, str, Document]]:
        """None: listing a remote folder would take too long."""
        return iter(())


def remote_layers() -> tuple[RemoteLayer, ...]:
    """The remote layer, where it is set."""
    url = env.cache_remote()
    return () if url is None else (RemoteLayer(url),)


def layers() -> tuple[Layer, ...]:
    """All layers, in the order in which they are searched."""
    return (*local_layers(), *remote_layers())


def push(
    store: Store,
    url: str,
    *,
    keys: tuple[str, ...] | None = None,
    progress: Callable[[int], object] | None = None,
) -> tuple[int, int]:
    """Copies the entries of a store that a remote folder lacks, all or those of `keys`.

    Each is verified before it is sent, and its meta.json is sent last: it makes an entry whole.
    progress: called with the number of entries that are done, before each.
    Returns how many were sent and how many it had. Raises CorruptEntryError, RemoteError.
    """
    sent = had = 0
    try:
        filesystem, root = _connect(url)
        for listed in store.entries():
            if keys is not None and listed.key not in keys:
                continue
            if progress is not None:
                progress(sent + had)
            entry = store.verify(listed.path)
            folder = _entry_folder(root, entry.compiler_id, entry.key)
            if filesystem.exists(f"{folder}/{META}"):
                had += 1
                continue
            _send(filesystem, folder, entry, store.read_only)
            sent += 1
    except CacheError:
        raise
    except Exception as error:
        words = f"cannot push to {url}: {type(error).__name__}: {error}"
        raise RemoteError(public_url(words)) from error
    return sent, had


def unreadable(url: str) -> str:
    """Why fsspec cannot read URLs of this kind; empty where it can. Connects to nothing."""
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(url.partition("://")[0] if "://" in url else "file")
    except (ImportError, ValueError) as error:
        return str(error)
    return ""


def public_url(text: str) -> str:
    """A URL, or words with URLs in them, without user names, passwords and tokens."""
    return _URL.sub(r"\1\2", text)


def _send(filesystem: Any, folder: str, entry: Entry, read_only: bool) -> None:
    filesystem.makedirs(folder, exist_ok=True)
    for name in (*sorted(entry.meta["files"]), META):
        most = MOST_META_BYTES if name == META else entry.meta["files"][name]["bytes"]
        content = read_file(entry.path / name, most, read_only=read_only)
        filesystem.pipe_file(f"{folder}/{name}", content)


def _search(url: str, key: str, compiler_id: str | None) -> Answer:
    filesystem, root = _connect(url)
    filesystem.invalidate_cache()  # another machine may have filled it since
    found: list[Found] = []
    wrong: list[CorruptEntryError] = []
    for compiler in [compiler_id] if compiler_id else _compilers(filesystem, root):
        folder = _entry_folder(root, compiler, key)
        place = Path(f"{public_url(url)}/{LAYOUT}/{compiler}/{key[:2]}/{key}")
        try:
            text = _read(filesystem, f"{folder}/{META}", MOST_META_BYTES)
            meta = parse_meta(text, key, compiler)
            files = {
                name: _read(filesystem, f"{folder}/{name}", expected["bytes"])
                for name, expected in meta["files"].items()
            }
            one = found_in_memory(key, compiler, "remote", place, meta, files.__getitem__)
            for name in files:
                one.read(name)
            found.append(one)
        except FileNotFoundError:
            continue
        except ValueError as error:
            wrong.append(CorruptEntryError(place, str(error)))
    found.sort(key=lambda one: str(one.meta.get("created", "")), reverse=True)
    if found:
        return Answer(tuple(found), tuple(wrong))
    reason = f"its entry is corrupt: {wrong[0].reason}" if wrong else "it has no such kernel"
    return Answer((), tuple(wrong), reason)


def _connect(url: str) -> tuple[Any, str]:
    # Takes 0.1 s: only where a remote is asked.
    from fsspec.core import url_to_fs

    filesystem, root = url_to_fs(url)
    return filesystem, str(root).rstrip("/")


def _entry_folder(root: str, compiler_id: str, key: str) -> str:
    return f"{root}/{LAYOUT}/{compiler_id}/{key[:2]}/{key}"


def _compilers(filesystem: Any, root: str) -> list[str]:
    try:
        listed = filesystem.ls(f"{root}/{LAYOUT}", detail=False, refresh=True)
    except FileNotFoundError:
        return []
    names = (str(path).rstrip("/").rpartition("/")[2] for path in listed)
    return sorted(name for name in names if is_compiler_id(name))


def _read(filesystem: Any, path: str, most_bytes: int) -> bytes:
    """A remote file's content. Raises ValueError where it is longer than it may be."""
    parts, size = [], 0
    with filesystem.open(path, "rb") as file:
        while block := file.read(min(_BLOCK_BYTES, most_bytes + 1 - size)):
            parts.append(block)
            size += len(block)
            if size > most_bytes:
                raise ValueError(f"{path.rpartition('/')[2]} is not what was published")
    return b"".join(parts)


def _within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns, in a thread that is given up after a while. Raises as `work` does."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    # No executor's: those are waited for when the process ends.
    threading.Thread(target=run, name="flashattn_jit-remote", daemon=True).start()
    if not wait([outcome], seconds).done:
        raise TimeoutError(f"it did not answer within {seconds:g} s")
    return outcome.result()


def _reset_after_fork() -> None:
    _left_alone.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
