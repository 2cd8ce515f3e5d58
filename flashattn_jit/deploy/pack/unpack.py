"""`fa.unpack`: the entries of a pack, into the cache or a folder that serves as a layer."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ... import env
from ...errors import PackError
from ...jit.cache.entry import META, CorruptEntryError
from ...jit.cache.pack_file import PackedEntry, PackFile
from ...jit.cache.store import Store
from ..files import checked_path
from ..wanted.arguments import parse_targets
from .pack import target_of

_THREADS = 2


@dataclass(frozen=True, slots=True)
class UnpackReport:
    """What `unpack` did. present: entries that were there before. bytes: of those added."""

    path: str
    directory: str
    added: int
    present: int
    bytes: int
    wall_s: float

    def __str__(self) -> str:
        return (
            f"{self.directory}: {self.added} kernels added ({self.bytes / 1e6:.1f} MB), "
            f"{self.present} there before, in {self.wall_s:.2f} s"
        )


def unpack(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str] | None = None,
    *,
    targets: str | Sequence[str] = (),
    progress: Callable[[int, int], object] | None = None,
) -> UnpackReport:
    """Puts the kernels of a pack into a folder, each whole or not at all.

    Kernels are code: whoever wrote the pack decides what runs in the processes that load them. Its
    digests show that it is whole, not who wrote it. So the pack and the folder must belong to this
    user (the pack may be root's) and nobody else may write to them.

    Args:
        path: a file that `pack` wrote.
        directory: the user's cache folder by default. Another one is made where it is missing, and
            can be named in FLASHATTN_JIT_CACHE_PATH: a read-only layer.
        targets: only kernels of these; all by default.
        progress: called with the number of entries that are done, and of all, after each.

    Raises:
        PackError: the pack is missing, damaged or unsafe; names the member. What came before it
            stays. Or no file can have one of the names.
        UnsafeCacheError: the folder is not this user's own.
        InputError: `path` or `directory` is no path.
        TargetError: a target is unknown.
        OSError: a file cannot be read or written.

    Example:
        >>> fa.unpack("kernels.pack", "/srv/kernels")
    """
    begin = time.perf_counter()
    chosen = parse_targets(targets)
    path = checked_path("path", path)
    root = env.cache_dir() if directory is None else _folder(directory)
    store = Store(root)
    sizes: list[int] = []
    with PackFile(path) as pack:
        wanted = [e for e in pack.entries() if not chosen or target_of(e.meta) in chosen]
        # Digests and writes leave the interpreter to another thread.
        with ThreadPoolExecutor(_THREADS) as threads:
            try:
                for one in threads.map(partial(_unpack_one, store), wanted):
                    sizes.append(one)
                    if progress is not None:
                        progress(len(sizes), len(wanted))
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
    added = [size for size in sizes if size]
    if added:
        _sync(root)
    return UnpackReport(
        os.fspath(path), str(root), len(added), len(sizes) - len(added), sum(added),
        time.perf_counter() - begin,
    )  # fmt: skip


def _folder(directory: str | os.PathLike[str]) -> Path:
    path = checked_path("directory", directory)
    try:
        return path.expanduser().absolute()
    except RuntimeError:  # ~ of no user, or of one without a home
        raise PackError(
            f"directory {path} begins with a home folder that is not known; write it out"
        ) from None


def _unpack_one(store: Store, packed: PackedEntry) -> int:
    """Publishes an entry. Returns the bytes of its files, 0 where it was there before."""
    with suppress(CorruptEntryError):  # adopting replaces it
        if store.find(packed.key, packed.compiler_id) is not None:
            return 0
    meta = packed.meta
    # Adopting compares each file with the digest in its meta.json, which is that of the index.
    files = {n: partial(packed.read_unverified, n) for n in packed.files if n != META}
    try:
        store.adopt(packed.key, packed.compiler_id, files, meta, durable=False)
    except CorruptEntryError as error:
        raise packed.pack.error(
            f"entry {packed.compiler_id}/{packed.key}: {error.reason}"
        ) from error
    return sum(packed.files[name].file_size for name in files)


def _sync(folder: Path) -> None:
    """Makes everything in the folder's file system survive a power failure.

    Once for all entries: a sync for each of their files takes most of the time. Until then a power
    failure may leave an entry whose files are short. It fails its verification, which every look-up
    makes before any code is loaded, and is a miss as if it had not been unpacked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)
