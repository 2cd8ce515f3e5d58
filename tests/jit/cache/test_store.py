"""Entries are complete or absent, verified when read, and refused where others may write."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from flashattn_jit.errors import CacheError
from flashattn_jit.jit.cache.entry import CorruptEntryError
from flashattn_jit.jit.cache.store import Store

from .entries import CLANG, GCC, adopt, digest, key_of, make, publish, tree

KEY = key_of()


def test_a_published_entry_is_found_and_whole(cache_root: Path) -> None:
    entry = publish(Store(cache_root))
    found = Store(cache_root).find(KEY, GCC.id)
    assert found is not None
    assert found.path == entry.path == cache_root / "v1" / GCC.id / KEY[:2] / KEY
    assert found.artifact.read_text() == f"artifact of {KEY}"
    assert (found.key, found.compiler_id) == (KEY, GCC.id)
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
    assert Store(cache_root).find("ff" * 32, GCC.id) is None
    assert tree(cache_root) == before


def test_the_first_of_two_publishers_wins(cache_root: Path) -> None:
    first = publish(Store(cache_root), content="first")
    second = publish(Store(cache_root), content="second")
    assert second.path == first.path
    assert second.artifact.read_text().endswith("first")
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
    assert entry.artifact.read_text().endswith("newer")
    newest.artifact.write_text("damaged")
    entry = store.find(KEY, None)
    assert entry is not None
    assert entry.artifact.read_text().endswith("older")


def truncate(entry: Path) -> None:
    entry.joinpath("artifact.so").write_bytes(b"co")


def empty(entry: Path) -> None:
    entry.joinpath("artifact.so").write_bytes(b"")


def flip_bit(entry: Path) -> None:
    content = bytearray(entry.joinpath("artifact.so").read_bytes())
    content[3] ^= 4
    entry.joinpath("artifact.so").write_bytes(content)


def remove_artifact(entry: Path) -> None:
    entry.joinpath("artifact.so").unlink()


def remove_meta(entry: Path) -> None:
    entry.joinpath("meta.json").unlink()


def break_meta(entry: Path) -> None:
    entry.joinpath("meta.json").write_text("{")


def strip_meta(entry: Path) -> None:
    entry.joinpath("meta.json").write_text("[]")


def change_meta(entry: Path, **fields: object) -> None:
    meta = json.loads(entry.joinpath("meta.json").read_text())
    entry.joinpath("meta.json").write_text(json.dumps({**meta, **fields}))


def lie_about_key(entry: Path) -> None:
    change_meta(entry, key="cd" * 32)


def lie_about_document(entry: Path) -> None:
    change_meta(entry, document=make('{"other":1}').meta["document"])


def lie_about_compiler(entry: Path) -> None:
    change_meta(entry, compiler={"id": CLANG.id, "version": ""})


def lie_about_artifact(entry: Path) -> None:
    """The artifact of another kernel, with its digest: only the key in the artifact shows it."""
    other = make('{"other":1}').files["artifact.so"]
    entry.joinpath("artifact.so").write_bytes(other)
    meta = json.loads(entry.joinpath("meta.json").read_text())
    change_meta(entry, files={**meta["files"], "artifact.so": digest(other)})


def name_a_file_outside(entry: Path) -> None:
    meta = json.loads(entry.joinpath("meta.json").read_text())
    change_meta(entry, files={**meta["files"], "../x": digest(b"")})


def link_the_artifact(entry: Path) -> None:
    artifact = entry / "artifact.so"
    artifact.rename(entry.parent / "elsewhere.so")
    artifact.symlink_to(entry.parent / "elsewhere.so")


def pipe_for_meta(entry: Path) -> None:
    entry.joinpath("meta.json").unlink()
    os.mkfifo(entry / "meta.json", 0o600)


def folder_for_artifact(entry: Path) -> None:
    entry.joinpath("artifact.so").unlink()
    entry.joinpath("artifact.so").mkdir()


def let_others_write(entry: Path) -> None:
    entry.joinpath("artifact.so").chmod(0o722)


def let_others_write_the_folder(entry: Path) -> None:
    entry.chmod(0o777)


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
        lie_about_document,
        lie_about_compiler,
        lie_about_artifact,
        name_a_file_outside,
        link_the_artifact,
        pipe_for_meta,
        folder_for_artifact,
        let_others_write,
        let_others_write_the_folder,
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
    assert publish(store, content="anew").artifact.read_text().endswith("anew")


def test_moving_away_what_is_gone_does_nothing(cache_root: Path) -> None:
    store = Store(cache_root)
    path = publish(store).path
    store.quarantine(path)
    store.quarantine(path)


def test_a_sound_entry_that_took_a_corrupt_ones_place_is_not_moved_away(cache_root: Path) -> None:
    """Two processes find the corrupt entry; the first one moves it away and builds it again."""
    store = Store(cache_root)
    path = publish(store).path
    flip_bit(path)
    with pytest.raises(CorruptEntryError) as error:
        store.find(KEY, GCC.id)
    store.quarantine(path, error.value.inode)
    publish(store)
    store.quarantine(path, error.value.inode)
    assert store.find(KEY, GCC.id) is not None


@pytest.mark.parametrize(
    "facts",
    [
        {"complaints": 5},
        {"complaints": [5]},
        {"created": "a\x1b]0;x\x07"},
        {"created": 5},
        {"compile_s": float("nan")},
        {"compile_s": float("inf")},
        {"compile_s": 10**400},
        {"compile_s": "1"},
        {"min_driver": -1},
        {"min_driver": "580"},
        {"compiler": {"id": GCC.id, "version": {}}},
    ],
)
def test_facts_that_are_told_to_people_are_of_their_kind(
    cache_root: Path, facts: dict[str, object]
) -> None:
    made = make()
    with pytest.raises(CorruptEntryError):
        Store(cache_root).adopt(made.key, GCC.id, made.files, {**made.meta, **facts})
    assert not cache_root.exists()


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


def test_entries_lists_all_and_the_unreadable_with_no_meta(cache_root: Path) -> None:
    store = Store(cache_root)
    assert list(store.entries()) == []
    sound = adopt(store, make('{"a":1}'))
    broken = adopt(store, make('{"a":2}', compiler=CLANG))
    broken.path.joinpath("meta.json").write_text("{")
    store.base.joinpath(GCC.id, "ab", "notes").mkdir(parents=True)
    found = {entry.path: entry.meta for entry in store.entries()}
    assert found == {sound.path: sound.meta, broken.path: {}}


def change_log(entry: Path) -> None:
    entry.joinpath("build.log").write_text("changed")


def add_file(entry: Path) -> None:
    entry.joinpath("more.so").write_text("more")


@pytest.mark.parametrize("damage", [change_log, add_file, flip_bit])
def test_verify_reads_every_file(cache_root: Path, damage: Callable[[Path], None]) -> None:
    store = Store(cache_root)
    entry = adopt(store, make())
    assert store.verify(entry.path).meta == entry.meta
    damage(entry.path)
    with pytest.raises(CorruptEntryError):
        store.verify(entry.path)


def test_an_entry_that_is_a_link_is_refused_and_moved_away_as_a_link(cache_root: Path) -> None:
    store = Store(cache_root)
    path = publish(store).path
    elsewhere = cache_root / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(CorruptEntryError, match="no folder"):
        store.find(KEY, GCC.id)
    store.quarantine(path)
    assert store.find(KEY, GCC.id) is None
    assert elsewhere.joinpath("artifact.so").is_file()


def test_what_is_adopted_equals_what_was_published(cache_root: Path, tmp_path: Path) -> None:
    original = publish(Store(tmp_path / "other"))
    files = {name: (original.path / name).read_bytes for name in original.meta["files"]}
    entry = Store(cache_root).adopt(KEY, GCC.id, files, original.meta)
    assert {p.name: p.read_bytes() for p in entry.path.iterdir()} == {
        p.name: p.read_bytes() for p in original.path.iterdir()
    }
    assert Store(cache_root).find(KEY, GCC.id) == entry
    assert list(Store(cache_root).base.joinpath(".staging").iterdir()) == []


def test_files_are_adopted_one_after_another(cache_root: Path) -> None:
    """An entry of many files needs the memory of one; a wrong one leaves no entry."""
    made, store = make(), Store(cache_root)
    staging = store.base / ".staging"
    seen: list[set[str]] = []

    def read(name: str) -> bytes:
        seen.append({path.name for path in staging.rglob("*") if path.is_file()})
        return made.files[name] if name != wrong else b"another"

    names = list(made.files)
    files = {name: partial(read, name) for name in names}
    for wrong in (names[-1], ""):
        seen.clear()
        if wrong:
            with pytest.raises(CorruptEntryError, match="not what was published"):
                store.adopt(made.key, GCC.id, files, made.meta)
            assert store.find(made.key, GCC.id) is None
        else:
            assert store.adopt(made.key, GCC.id, files, made.meta) == store.find(made.key, GCC.id)
        assert seen == [set(names[:i]) for i in range(len(names))]
        assert list(staging.iterdir()) == []


def test_adopting_keeps_a_sound_entry_and_replaces_a_corrupt_one(cache_root: Path) -> None:
    store = Store(cache_root)
    adopt(store, make(content=b"first"))
    entry = adopt(store, make(content=b"second"))
    assert entry.artifact.read_bytes().endswith(b"first")
    entry.artifact.write_bytes(b"damaged")
    assert adopt(store, make(content=b"third")).artifact.read_bytes().endswith(b"third")


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/x",
        "a/b",
        "..",
        ".",
        "",
        "meta.json",
        ".hidden",
        "a\0b",
        "a\nb",
        "x" * 200,
        "é",
    ],
)
def test_names_that_are_no_plain_names_are_not_adopted(cache_root: Path, name: str) -> None:
    made = make()
    meta = {**made.meta, "files": {**made.meta["files"], name: digest(b"x")}}
    with pytest.raises(CorruptEntryError):
        Store(cache_root).adopt(made.key, GCC.id, {**made.files, name: b"x"}, meta)
    assert not cache_root.exists()


@pytest.mark.parametrize("compiler_id", ["../gcc", "/gcc", ".staging", "", "gcc/12", "g" * 200])
def test_names_of_compilers_are_folder_names(cache_root: Path, compiler_id: str) -> None:
    made = make()
    meta = {**made.meta, "compiler": {"id": compiler_id, "version": ""}}
    with pytest.raises(CorruptEntryError):
        Store(cache_root).adopt(made.key, compiler_id, made.files, meta)
    assert not cache_root.exists()


@pytest.mark.parametrize("key", ["", "../x", "AB" * 32, "ab" * 31, "ab" * 33, "zz" * 32])
def test_keys_are_digests(cache_root: Path, key: str) -> None:
    made = make()
    with pytest.raises(CorruptEntryError):
        Store(cache_root).adopt(key, GCC.id, made.files, {**made.meta, "key": key})
    assert not cache_root.exists()


def test_a_read_only_store_is_never_written(cache_root: Path) -> None:
    made = make()
    with pytest.raises(OSError, match="read-only"):
        adopt(Store(cache_root, read_only=True), made)
    assert not cache_root.exists()


def test_folders_above_the_root_are_made_for_us_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        adopt(Store(tmp_path / "a" / "b" / "cache"), make())
    finally:
        os.umask(previous)
    assert stat.S_IMODE(tmp_path.joinpath("a").stat().st_mode) == 0o700
    assert stat.S_IMODE(tmp_path.joinpath("a", "b").stat().st_mode) == 0o700


def test_roots_folder_serves_a_read_only_layer_and_nobody_elses(
    cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(Store(cache_root))
    owner = cache_root.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        assert Store(cache_root, read_only=True).find(KEY, None)
    else:
        with pytest.raises(CacheError, match="owned by you or by root"):
            Store(cache_root, read_only=True).find(KEY, None)
    with pytest.raises(CacheError, match="belongs to user"):
        Store(cache_root).find(KEY, None)


def test_a_link_of_ours_to_the_root_is_followed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    publish(Store(tmp_path / "cache"))
    tmp_path.joinpath("link").symlink_to(tmp_path / "cache")
    tmp_path.joinpath("folder").symlink_to(".")
    assert Store(tmp_path / "link").find(KEY, GCC.id)
    assert Store(tmp_path / "folder" / "link").find(KEY, GCC.id)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_link_that_others_could_replace_is_not(tmp_path: Path, mode: int) -> None:
    publish(Store(tmp_path / "cache"))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.joinpath("link").symlink_to(tmp_path / "cache")
    assert Store(shared / "link").find(KEY, GCC.id)
    shared.chmod(mode)
    with pytest.raises(CacheError, match="behind a link"):
        Store(shared / "link").find(KEY, GCC.id)
    shared.chmod(0o1777)  # sticky: others can add links there, but not replace ours
    assert Store(shared / "link").find(KEY, GCC.id)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a link to another user, which root alone may")
def test_another_users_link_is_not_followed(tmp_path: Path) -> None:
    publish(Store(tmp_path / "cache"))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "cache")
    os.lchown(link, 1234, 1234)
    with pytest.raises(CacheError, match="of user 1234"):
        Store(link).find(KEY, GCC.id)


def test_links_in_a_circle_are_no_folder(tmp_path: Path) -> None:
    tmp_path.joinpath("a").symlink_to(tmp_path / "b")
    tmp_path.joinpath("b").symlink_to(tmp_path / "a")
    assert Store(tmp_path / "a").find(KEY, None) is None
