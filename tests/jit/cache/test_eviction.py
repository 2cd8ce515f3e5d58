"""A store is kept below a size: the least recently used kernels are evicted, none in use."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashattn_jit.codegen.spec import BuildRequest
from flashattn_jit.errors import InputError, UnsafeCacheError
from flashattn_jit.jit.cache import eviction
from flashattn_jit.jit.cache.entry import Entry
from flashattn_jit.jit.cache.eviction import collect, remove
from flashattn_jit.jit.cache.store import Store
from flashattn_jit.jit.module import KernelCache

from .entries import GCC, adopt, key_of, make, tree

NOW = time.time()
DAY_S = 86400.0


def add(store: Store, name: int, *, used_days_ago: float, content: bytes = b"") -> Entry:
    """An entry that was made 100 days ago and last used `used_days_ago`."""
    entry = adopt(store, make(f'{{"name":{name}}}', content=content))
    used = NOW - used_days_ago * DAY_S
    for path in (*entry.path.iterdir(), entry.path):
        os.utime(path, (used, NOW - 100 * DAY_S))
    return entry


def size(entry: Entry) -> int:
    return sum(path.stat().st_size for path in entry.path.iterdir())


def names(store: Store) -> list[str]:
    return sorted(entry.document["spec"] for entry in store.entries())


@pytest.fixture
def store(cache_root: Path) -> Store:
    return Store(cache_root)


def test_the_least_recently_used_go_first_and_only_as_many_as_needed(store: Store) -> None:
    entries = [add(store, i, used_days_ago=days) for i, days in enumerate((3, 9, 1, 7))]
    total = sum(map(size, entries))
    done = collect(store, total - 1)
    assert done.keys == (entries[1].key,)
    assert (done.removed, done.kept) == (1, 3)
    assert (done.removed_bytes, done.kept_bytes) == (size(entries[0]), total - size(entries[0]))
    done = collect(store, size(entries[0]))
    assert done.keys == (entries[3].key, entries[0].key)
    assert names(store) == ['{"name":2}']
    assert collect(store, 0).keys == (entries[2].key,)
    assert names(store) == []
    assert not any(store.base.joinpath(".evicted").iterdir())


def test_what_fits_stays(store: Store) -> None:
    entries = [add(store, i, used_days_ago=5) for i in range(3)]
    before = tree(store.root)
    done = collect(store, sum(map(size, entries)))
    assert (done.removed, done.kept) == (0, 3)
    assert tree(store.root) == before


def test_a_dry_run_tells_the_same_and_does_nothing(store: Store) -> None:
    entries = [add(store, i, used_days_ago=i) for i in range(4)]
    stale = store.base / ".staging" / "build-dead"
    stale.mkdir(parents=True)
    stale.joinpath("kernel.cpp").write_text("int x;")
    os.utime(stale, (NOW - DAY_S, NOW - DAY_S))
    before = tree(store.root)
    would = collect(store, size(entries[0]), dry_run=True)
    assert tree(store.root) == before
    did = collect(store, size(entries[0]))
    assert would.keys == did.keys
    assert would.removed_bytes == did.removed_bytes > 0
    assert would.leftover_bytes == did.leftover_bytes == 6
    assert "would remove 3 kernels" in str(would)
    assert str(did).startswith("removed 3 kernels")
    assert not stale.exists()


def test_an_entry_that_was_made_a_moment_ago_stays(store: Store) -> None:
    adopt(store, make())
    old = add(store, 1, used_days_ago=0)
    done = collect(store, 0)
    assert done.keys == (old.key,)
    assert (done.young, done.kept) == (1, 1)
    assert collect(store, 0, grace_s=0).removed == 1


def test_corrupt_entries_count_and_go_too(store: Store) -> None:
    entry = add(store, 1, used_days_ago=5)
    entry.path.joinpath("meta.json").unlink()
    assert collect(store, 0).keys == (entry.key,)


@pytest.fixture
def library(tmp_path: Path) -> bytes:
    """A shared object that can be loaded."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    source, out = tmp_path / "x.c", tmp_path / "x.so"
    source.write_text("int answer(void) { return 42; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(out), str(source)], check=True)
    return out.read_bytes()


def add_library(store: Store, library: bytes, name: int) -> Entry:
    made = make(f'{{"name":{name}}}')
    key = made.key.encode()
    content = library + key
    from .entries import digest

    files = {**made.files, "artifact.so": content}
    meta = {**made.meta, "files": {**made.meta["files"], "artifact.so": digest(content)}}
    entry = store.adopt(made.key, GCC.id, files, meta, durable=False)
    for path in (*entry.path.iterdir(), entry.path):
        os.utime(path, (NOW - 50 * DAY_S, NOW - 100 * DAY_S))
    return entry


HOLD = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
print("held", flush=True)
sys.stdin.readline()
print(library.answer(), flush=True)
"""


@pytest.fixture
def hold() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Starts processes that have a library loaded until they get a line."""
    started: list[subprocess.Popen[str]] = []

    def start(path: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_what_another_process_has_loaded_stays(store: Store, library: bytes, hold) -> None:
    used, unused = add_library(store, library, 1), add_library(store, library, 2)
    process = hold(used.artifact)
    done = collect(store, 0)
    assert (done.keys, done.in_use) == ((unused.key,), 1)
    assert remove(store, used.path) is False
    assert store.verify(used.path).key == used.key
    assert process.communicate("\n", timeout=30)[0] == "42\n"
    assert collect(store, 0).keys == (used.key,)


def test_what_this_process_has_loaded_stays(store: Store, library: bytes) -> None:
    entry = add_library(store, library, 1)
    loaded = ctypes.CDLL(str(entry.artifact))
    assert collect(store, 0).in_use == 1
    assert remove(store, entry.path) is False
    assert loaded.answer() == 42


def test_one_that_comes_into_use_while_it_is_removed_is_put_back(
    store: Store, library: bytes, hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = add_library(store, library, 1)
    move = Store.move_aside

    def use_first(self: Store, path: Path, place: str) -> Path | None:
        # The artifact is mapped after the first look at the maps and before the entry is moved.
        hold(path / "artifact.so")
        return move(self, path, place)

    monkeypatch.setattr(Store, "move_aside", use_first)
    done = collect(store, 0)
    assert (done.removed, done.in_use) == (0, 1)
    assert store.verify(entry.path).key == entry.key
    assert not any(store.base.joinpath(".evicted").iterdir())


def test_two_collectors_at_once_remove_an_entry_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = add(store, 1, used_days_ago=5)
    look = eviction.mapped_inodes

    def other_was_first() -> set[int]:
        if entry.path.exists():
            shutil.rmtree(entry.path)
        return look()

    monkeypatch.setattr(eviction, "mapped_inodes", other_was_first)
    assert collect(store, 0).kept == 0


def test_leftovers_go_when_they_are_old(store: Store) -> None:
    now = time.time()  # NOW, when this file was imported, may be half an hour ago
    ages = {".staging": 1, ".evicted": 1, ".quarantine": 24 * 7, ".failed": 24 * 30}
    for place, hours in ages.items():
        for name, age in (("old", hours + 1), ("new", hours - 0.5)):
            folder = store.base / place / name
            store.make_folder(folder)
            folder.joinpath("x").write_text("12345")
            os.utime(folder, (now, now - age * 3600))
    assert collect(store, 1 << 40).leftover_bytes == 5 * len(ages)
    for place in ages:
        assert [path.name for path in store.base.joinpath(place).iterdir()] == ["new"]


def test_a_folder_that_is_not_there_or_not_ours_alone(store: Store) -> None:
    done = collect(store, 0)
    assert (done.removed, done.kept) == (0, 0)
    assert not store.root.exists()
    with pytest.raises(InputError, match="0 or more"):
        collect(store, -1)
    add(store, 1, used_days_ago=5)
    store.root.chmod(0o777)
    with pytest.raises(UnsafeCacheError):
        collect(store, 0)


def test_a_build_makes_room_for_itself_where_there_is_a_limit(
    new_cache: Callable[[], KernelCache], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [add(store, i, used_days_ago=5 + i) for i in range(3)]
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_MAX_BYTES", str(size(old[0]) + 1500))
    request = BuildRequest("{}", "kernel.cpp.j2", "cpu:generic", lambda: "int x;")
    _, module = new_cache().load_stepping([request])
    kept = {entry.path for entry in store.entries()}
    assert Path(module.path).parent in kept
    assert old[2].path not in kept
    assert sum(f.stat().st_size for p in kept for f in p.iterdir()) <= size(old[0]) + 1500


def test_a_hit_makes_a_kernel_recently_used(store: Store) -> None:
    """By its atime, where the file system updates it: most do so once a day (relatime)."""
    entry = add(store, 1, used_days_ago=30)
    before = entry.artifact.stat().st_atime
    assert store.find(key_of('{"name":1}'), GCC.id)
    if entry.artifact.stat().st_atime == before:
        pytest.skip("this file system keeps no access times (noatime)")
    other = add(store, 2, used_days_ago=20)
    store.verify(other.path)
    list(store.entries())
    assert collect(store, size(entry)).keys == (other.key,)


def test_a_reader_that_may_not_build_waits_for_an_entry_that_is_put_back(
    new_cache: Callable[[], KernelCache], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = BuildRequest("{}", "kernel.cpp.j2", "cpu:generic", lambda: "int x;")
    _, module = new_cache().load_stepping([request])
    path = Path(module.path).parent
    aside = store.move_aside(path, ".evicted")
    assert aside is not None
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    timer = threading.Timer(0.1, lambda: aside.rename(path))
    timer.start()
    try:
        cache = new_cache()
        assert cache.load_stepping([request])[1].path == module.path
        assert cache.counters.hits["user"] == 1
        assert cache.counters.misses == 0
    finally:
        timer.join()
