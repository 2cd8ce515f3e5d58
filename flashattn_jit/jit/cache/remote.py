"""The remote layer: a store below a URL, read and written through fsspec.

The tree is that of a store, `<url>/v1/<compiler id>/<two digits>/<key>/<file>`, so any tool that
copies folders can fill it; `push` does, meta.json last. An entry is fetched whole, verified (every
digest, and the key by its document), and then copied into the user's folder. Digests protect from
damage, not from malice: anyone who can write to the URL decides which code runs.

A look-up has a time limit. After one that failed, the remote is not asked again for a while.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
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
    answer_of,
    found_in_memory,
    local_layers,
)
from flashattn_jit.jit.cache.store import LAYOUT, Store, entry_folder

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
    """The layer of a remote folder."""

    url: str
    name: LayerName = "remote"

    @property
    def location(self) -> str:
        """The URL without its user name, password and token."""
        return public_url(self.url)

    def search(self, key: str, compiler_id: str | None) -> Answer:
        """See `Layer`. A failure becomes the reason of the answer; the first one logs a warning."""
        since, why = _left_alone.get(self.url, (0.0, ""))
        if why and time.monotonic() - since < _LEFT_ALONE_S:
            return Answer(reason=f"it is left alone for a while: {why}")
        try:
            return _within(
                env.cache_remote_timeout_s(), lambda: _search(self.url, key, compiler_id)
            )
        except Exception as error:
            # fsspec's file systems raise the exceptions of the libraries beneath them.
            why = public_url(f"{type(error).__name__}: {error}")
            _left_alone[self.url] = time.monotonic(), why
            if self.url not in _warned:
                _warned.add(self.url)
                log.warning("the remote kernel cache %s does not serve: %s", self.location, why)
            return Answer(reason=why)

    def documents(self) -> Iterator[tuple[str, str, Document]]:
        """Nothing: listing a remote folder would take too long."""
        return iter(())


def remote_layers() -> tuple[RemoteLayer, ...]:
    """The remote layer, if FLASHATTN_JIT_CACHE_REMOTE is set."""
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

    Each entry is verified before it is sent; its meta.json is sent last, as it completes the entry.
    progress: called before each entry with the number of entries done.
    Returns how many were sent and how many were there. Raises CorruptEntryError, RemoteError.
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
            folder = f"{root}/{entry_folder(entry.compiler_id, entry.key)}"
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
    """Why fsspec cannot read URLs of this protocol; empty where it can. Does not connect."""
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(url.partition("://")[0] if "://" in url else "file")
    except (ImportError, ValueError) as error:
        return str(error)
    return ""


def public_url(text: str) -> str:
    """A URL, or text with URLs in it, without user names, passwords and tokens."""
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
        folder = f"{root}/{entry_folder(compiler, key)}"
        shown = Path(public_url(url), entry_folder(compiler, key))
        try:
            text = _read(filesystem, f"{folder}/{META}", MOST_META_BYTES)
            meta = parse_meta(text, key, compiler)
            files = {
                name: _read(filesystem, f"{folder}/{name}", expected["bytes"])
                for name, expected in meta["files"].items()
            }
            one = found_in_memory(key, compiler, "remote", shown, meta, files.__getitem__)
            for name in files:
                one.read(name)
            found.append(one)
        except FileNotFoundError:
            continue
        except ValueError as error:
            wrong.append(CorruptEntryError(shown, str(error)))
    return replace(answer_of(found, wrong), fault=False)  # nothing that this machine could repair


def _connect(url: str) -> tuple[Any, str]:
    # The import takes 0.1 s.
    from fsspec.core import url_to_fs

    filesystem, root = url_to_fs(url)
    return filesystem, str(root).rstrip("/")


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
    """The result of `work`, run in a thread. Raises what `work` raises, or TimeoutError."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    # Not a thread of an executor: the interpreter waits for those when it exits.
    threading.Thread(target=run, name="flashattn_jit-remote", daemon=True).start()
    if not wait([outcome], seconds).done:
        raise TimeoutError(f"it did not answer within {seconds:g} s")
    return outcome.result()


os.register_at_fork(after_in_child=_left_alone.clear)
