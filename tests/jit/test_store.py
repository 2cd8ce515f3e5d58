"""Entries are whole or absent, verified when read, never read from where others can write."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from flashattn_jit.errors import CacheError
from flashattn_jit.jit.compiler import CompilerIdentity
from flashattn_jit.jit.store import CorruptEntryError, Entry, Store

KEY = "ab" + "0" * 62
GCC = CompilerIdentity("gcc-12.2.0-00000000", "gcc 12.2.0")
CLANG = CompilerIdentity("clang-19.1.0-00000000", "clang 19.1.0")


def publish(
    store: Store, compiler: CompilerIdentity = GCC, content: str = "code", created: str = "2026"
) -> Entry:
    with store.staging() as staging:
        staging.joinpath("artifact.so").write_text(content)
        staging.joinpath("kernel.cpp").write_text("int x;")
        staging.joinpath("build.log").write_text("")
        return store.publish(staging, KEY, compiler, {"created": created})


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every path below `root` with its change time and content."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(root.rglob("*"))
    }


def test_a_published_entry_is_found_and_whole(cache_root: Path) -> None:
    entry = publish(Store(cache_root))
    found = Store(cache_root).find(KEY, GCC.id)
    assert found is not None
    assert found.path == entry.path == cache_root / "v1" / GCC.id / "ab" / KEY
    assert found.artifact.read_text() == "code"
    assert {path.name for path in found.path.iterdir()} == {
        "artifact.so",
        "kernel.cpp",
        "build.log",
        "meta.json",
    }
    assert found.meta["compiler"] == {"id": GCC.id, "version": GCC.version}
    assert found.meta["files"]["kernel.cpp"]["bytes"] == 6


def test_looking_up_makes_nothing(cache_root: Path) -> None:
    assert Store(cache_root).find(KEY, GCC.id) is None
    assert Store(cache_root).find(KEY, None) is None
    assert not cache_root.exists()
    publish(Store(cache_root))
    before = tree(cache_root)
    assert Store(cache_root).find(KEY, GCC.id)
    assert Store(cache_root).find("ff" + KEY[2:], GCC.id) is None
    assert tree(cache_root) == before


def test_the_first_of_two_publishers_wins(cache_root: Path) -> None:
    first = publish(Store(cache_root), content="first")
    second = publish(Store(cache_root), content="second")
    assert second.path == first.path
    assert second.artifact.read_text() == "first"
    assert list((cache_root / "v1" / ".staging").iterdir()) == []


def test_a_build_that_fails_leaves_nothing_staged(cache_root: Path) -> None:
    store = Store(cache_root)
    with pytest.raises(RuntimeError, match="broke"), store.staging() as staging:
        staging.joinpath("artifact.so").write_text("half")
        raise RuntimeError("broke")
    assert list((cache_root / "v1" / ".staging").iterdir()) == []
    assert store.find(KEY, None) is None


def test_the_exact_compiler_is_asked_for_where_one_is_named(cache_root: Path) -> None:
    store = Store(cache_root)
    publish(store, GCC)
    assert store.find(KEY, CLANG.id) is None


def test_without_a_compiler_the_newest_sound_build_is_taken(cache_root: Path) -> None:
    store = Store(cache_root)
    publish(store, CLANG, "older", created="2026-01-01")
    newest = publish(store, GCC, "newer", created="2026-02-01")
    entry = store.find(KEY, None)
    assert entry is not None
    assert entry.artifact.read_text() == "newer"
    newest.artifact.write_text("damaged")
    entry = store.find(KEY, None)
    assert entry is not None
    assert entry.artifact.read_text() == "older"


def truncate(entry: Path) -> None:
    entry.joinpath("artifact.so").write_bytes(b"co")


def empty(entry: Path) -> None:
    entry.joinpath("artifact.so").write_bytes(b"")


def flip_bit(entry: Path) -> None:
    entry.joinpath("artifact.so").write_bytes(b"bode")


def remove_artifact(entry: Path) -> None:
    entry.joinpath("artifact.so").unlink()


def remove_meta(entry: Path) -> None:
    entry.joinpath("meta.json").unlink()


def break_meta(entry: Path) -> None:
    entry.joinpath("meta.json").write_text("{")


def strip_meta(entry: Path) -> None:
    entry.joinpath("meta.json").write_text("[]")


def lie_about_key(entry: Path) -> None:
    meta = json.loads(entry.joinpath("meta.json").read_text())
    entry.joinpath("meta.json").write_text(json.dumps({**meta, "key": "cd" * 32}))


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        empty,
        flip_bit,
        remove_artifact,
        remove_meta,
        break_meta,
        strip_meta,
        lie_about_key,
    ],
)
def test_a_damaged_entry_is_told_and_can_be_moved_away(
    cache_root: Path, damage: Callable[[Path], None]
) -> None:
    store = Store(cache_root)
    path = publish(store).path
    damage(path)
    with pytest.raises(CorruptEntryError) as error:
        store.find(KEY, GCC.id)
    assert error.value.path == path
    store.quarantine(path)
    assert store.find(KEY, GCC.id) is None
    assert len(list((cache_root / "v1" / ".quarantine").iterdir())) == 1
    assert publish(store, content="anew").artifact.read_text() == "anew"


def test_moving_away_what_is_gone_does_nothing(cache_root: Path) -> None:
    store = Store(cache_root)
    path = publish(store).path
    store.quarantine(path)
    store.quarantine(path)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_a_folder_that_others_can_write_is_refused(cache_root: Path, mode: int) -> None:
    publish(Store(cache_root))
    cache_root.chmod(mode)
    with pytest.raises(CacheError, match=r"chmod go-w"):
        Store(cache_root).find(KEY, GCC.id)
    with pytest.raises(CacheError, match=r"chmod go-w"), Store(cache_root).staging():
        pass


def test_a_folder_of_another_user_is_refused(
    cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(Store(cache_root))
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(CacheError, match="belongs to user"):
        Store(cache_root).find(KEY, GCC.id)


def test_a_root_that_is_a_file_is_refused(cache_root: Path) -> None:
    cache_root.write_text("")
    with pytest.raises(CacheError, match="FLASHATTN_JIT_CACHE_DIR"):
        Store(cache_root).find(KEY, GCC.id)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_what_is_made_is_ours_alone_whatever_the_umask(cache_root: Path, mask: int) -> None:
    previous = os.umask(mask)
    try:
        publish(Store(cache_root))
        Store(cache_root).remember_compiler("f" * 32, GCC)
    finally:
        os.umask(previous)
    for path in (cache_root, *cache_root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_failed_builds_files_are_kept_and_replaced(cache_root: Path) -> None:
    store = Store(cache_root)
    for text in ("first", "second"):
        with store.staging() as staging:
            staging.joinpath("kernel.cpp").write_text(text)
            staging.joinpath("build.log").write_text("error")
            folder = store.keep_failure(staging, KEY)
    assert folder.joinpath("kernel.cpp").read_text() == "second"
    assert store.find(KEY, None) is None


def test_a_compiler_is_remembered(cache_root: Path) -> None:
    store = Store(cache_root)
    assert store.recall_compiler("f" * 32) is None
    store.remember_compiler("f" * 32, GCC)
    assert store.recall_compiler("f" * 32) == GCC
    store.remember_compiler("f" * 32, CLANG)
    assert store.recall_compiler("f" * 32) == CLANG
