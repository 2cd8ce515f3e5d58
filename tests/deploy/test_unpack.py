"""Unpacking writes complete entries into a folder that only the user may write to."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import pytest

from flashattn_jit.deploy.pack.pack import pack
from flashattn_jit.deploy.pack.unpack import unpack
from flashattn_jit.errors import PackError, UnsafeCacheError
from flashattn_jit.jit.cache.remote import layers
from flashattn_jit.jit.cache.store import Store
from tests.deploy.caches import COMPILER, add_entry, contents


def test_into_the_users_folder_by_default(store: Store, packed: Path) -> None:
    before = contents(store.root)
    shutil.rmtree(store.root)
    report = unpack(packed)
    assert report.directory == str(store.root)
    assert contents(store.root) == before
    assert "3 kernels added" in str(report)


def test_what_is_there_is_left_alone_and_what_is_corrupt_replaced(
    store: Store, packed: Path, tmp_path: Path
) -> None:
    first, second, _ = store.entries()
    before = contents(store.root)
    first.artifact.write_bytes(b"broken")
    stamp = second.artifact.stat().st_mtime_ns
    report = unpack(packed)
    assert (report.added, report.present) == (1, 2)
    assert contents(store.root) == before
    assert second.artifact.stat().st_mtime_ns == stamp


def test_targets_choose(packed: Path, tmp_path: Path) -> None:
    assert unpack(packed, tmp_path / "other", targets=["sm_90"]).added == 1
    (entry,) = Store(tmp_path / "other").entries()
    assert entry.document["target"] == "sm_90"


def test_another_folder_and_the_pack_itself_are_layers(
    store: Store, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [entry.key for entry in store.entries()]
    unpack(packed, tmp_path / "other")
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path / "none"))
    for place in (tmp_path / "other", packed):
        monkeypatch.setenv("FLASHATTN_JIT_CACHE_PATH", str(place))
        _, layer = layers()
        for key in keys:
            (found,) = layer.search(key, None).found
            assert found.read("artifact.so").startswith(key.encode())
    assert not (tmp_path / "none").exists()


def test_folders_and_files_are_ours_alone_whatever_the_umask(packed: Path, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        unpack(packed, tmp_path / "deep" / "other")
    finally:
        os.umask(old)
    paths = list((tmp_path / "deep" / "other").rglob("*"))
    assert paths
    assert [p for p in paths if p.stat().st_mode & 0o077] == []


def test_a_folder_that_others_may_write_is_refused(packed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    other.chmod(0o777)
    with pytest.raises(UnsafeCacheError):
        unpack(packed, other)
    assert list(other.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give the folder to another user")
def test_a_folder_of_another_user_is_refused(packed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    os.chown(other, 12345, -1)
    with pytest.raises(UnsafeCacheError):
        unpack(packed, other)
    assert list(other.iterdir()) == []


def test_an_entry_whose_key_is_not_its_documents_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consistent pack may still give an artifact the key of another kernel."""
    from flashattn_jit.deploy.pack import pack as packing

    a, b, _ = store.entries()
    monkeypatch.setattr(
        packing, "_meta_text", lambda source, real=packing._meta_text: real(source).replace(
            b'"a"' if a.document["spec"] == "a" else b'"b"', b'"z"'
        )
    )  # fmt: skip
    pack(tmp_path / "p.pack", keys=[a.key])
    with pytest.raises(PackError, match="not that of its key"):
        unpack(tmp_path / "p.pack", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert b.key != a.key


def test_what_came_before_a_wrong_member_stays(packed: Path, tmp_path: Path) -> None:
    data = bytearray(packed.read_bytes())
    with zipfile.ZipFile(packed) as archive:
        info = archive.infolist()[2 * 4]  # the third entry's artifact
    data[info.header_offset + 30 + len(info.filename) + 10] ^= 1
    packed.write_bytes(data)
    with pytest.raises(PackError, match=r"entry gcc.*: artifact.so is not what was published"):
        unpack(packed, tmp_path / "other")
    other = Store(tmp_path / "other")
    assert len([other.verify(entry.path) for entry in other.entries()]) == 2
    assert list((tmp_path / "other" / "v1" / ".staging").iterdir()) == []


def test_many_entries_cost_no_sync_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Store(tmp_path / "cache")
    for i in range(20):
        add_entry(made, str(i))
    pack(tmp_path / "p.pack")
    syncs: list[int] = []
    monkeypatch.setattr(os, "fsync", syncs.append)
    assert unpack(tmp_path / "p.pack", tmp_path / "other").added == 20
    assert syncs == []
    assert (tmp_path / "other" / "v1" / COMPILER).is_dir()
