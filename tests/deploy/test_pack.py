"""Packs: deterministic, readable by any tool, and refused where they are not what they must be."""

from __future__ import annotations

import json
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashattn_jit.deploy.pack import pack
from flashattn_jit.deploy.unpack import unpack
from flashattn_jit.errors import PackError, TargetError
from flashattn_jit.jit import zip_frame
from flashattn_jit.jit.pack_file import PackFile
from flashattn_jit.jit.store import Store
from flashattn_jit.jit.zip_frame import Member
from tests import processes
from tests.deploy.caches import COMPILER, add_entry, contents


@pytest.fixture
def packed(store: Store, tmp_path: Path) -> Path:
    """A pack of three entries."""
    path = tmp_path / "kernels.pack"
    pack(path)
    return path


def opened(path: Path) -> list[dict[str, bytes]]:
    """All files of all entries, read and verified."""
    with PackFile(path) as opened:
        return [{n: e.read(n) for n in e.files} | {"": repr(e.meta).encode()}
                for e in opened.entries()]  # fmt: skip


def test_what_was_packed_is_unpacked(store: Store, packed: Path, tmp_path: Path) -> None:
    report = unpack(packed, tmp_path / "other")
    assert (report.added, report.present) == (3, 0)
    assert contents(tmp_path / "other") == contents(store.root)
    for entry in Store(tmp_path / "other").entries():
        Store(tmp_path / "other").verify(entry.path)
    again = unpack(packed, tmp_path / "other")
    assert (again.added, again.present, again.bytes) == (0, 3, 0)


def test_equal_entries_make_equal_files(store: Store, packed: Path, tmp_path: Path) -> None:
    unpack(packed, tmp_path / "other")
    for path in (tmp_path / "other").rglob("*"):
        os.utime(path, (1, 1))
    os.environ["FLASHATTN_JIT_CACHE_DIR"] = str(tmp_path / "other")
    pack(tmp_path / "again.pack")
    assert (tmp_path / "again.pack").read_bytes() == packed.read_bytes()


def test_any_tool_reads_it(store: Store, packed: Path) -> None:
    with zipfile.ZipFile(packed) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert names[0] == "pack.json"
        found = {name: archive.read(name) for name in names[1:]}
        assert {i.compress_type for i in archive.infolist()} == {zipfile.ZIP_STORED}
    assert found == contents(store.root)


def test_entries_are_found_by_key(store: Store, packed: Path) -> None:
    with PackFile(packed) as found:
        assert len(found) == 3
        for entry in store.entries():
            (one,) = found.find(entry.key, COMPILER)
            assert one.meta == entry.meta
            assert one.read("artifact.so") == entry.artifact.read_bytes()
            assert found.find(entry.key) == [one]
            assert found.find(entry.key, "gcc-1") == []
        assert found.find("0" * 64) == []


def test_targets_and_keys_choose(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "some.pack"
    assert pack(path, targets="sm_90").targets == (("sm_90", 1),)
    key = next(e.key for e in store.entries())
    assert pack(path, keys=[key[:12]]).entries == 1
    with pytest.raises(PackError, match="begins with 'xyz'"):
        pack(path, keys=["xyz"])
    with pytest.raises(PackError, match="nothing to pack"):
        pack(path, targets="sm_75")
    with pytest.raises(TargetError, match="unknown target 'sm_1'"):
        pack(path, targets="sm_1")
    assert len(opened(path)) == 1, "a refused call leaves the file that was there"


def test_the_newest_of_several_compilers_is_packed(store: Store, tmp_path: Path) -> None:
    newer = add_entry(store, "a", compiler="gcc-13.1-11111111", created="2026-06-01T00:00:00")
    pack(tmp_path / "p.pack")
    with PackFile(tmp_path / "p.pack") as found:
        assert [e.compiler_id for e in found.find(newer.key)] == ["gcc-13.1-11111111"]


def test_a_corrupt_entry_is_not_packed(store: Store, tmp_path: Path) -> None:
    entry = next(iter(store.entries()))
    entry.artifact.write_bytes(entry.artifact.read_bytes()[:-1] + b"?")
    with pytest.raises(PackError, match=r"artifact.so .*cache verify"):
        pack(tmp_path / "p.pack")
    assert list(tmp_path.glob("*p.pack*")) == []


def test_a_manifest_of_missing_kernels_says_what_to_build(tmp_path: Path) -> None:
    from flashattn_jit.codegen.document import line_of
    from flashattn_jit.codegen.spec import UtilitySpec

    line = line_of(UtilitySpec("merge_states", "sm_90"))
    with pytest.raises(PackError, match=r"1 of 1 kernels .*flashattn-jit warm(?s:.*)merge_states"):
        pack(tmp_path / "p.pack", manifest=[line])


def test_a_pack_is_written_whole_or_not_at_all(packed: Path, tmp_path: Path) -> None:
    before = packed.read_bytes()
    script = (
        "import os, sys, signal, flashattn_jit.deploy.pack_writer as w\n"
        "from flashattn_jit.deploy.pack import pack\n"
        "def index_text(entries, real=w.index_text):\n"
        "    if entries[0].files['artifact.so'].crc32:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(entries)\n"
        "w.index_text = index_text\n"
        "pack(sys.argv[1])\n"
    )
    process = processes.run(["-c", script, str(packed)])
    assert process.returncode == -9
    assert packed.read_bytes() == before


# --- what is refused -----------------------------------------------------------------------------


def members_of(path: Path) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        return [(i.filename, archive.read(i)) for i in archive.infolist()]


def rewritten(members: list[tuple[str, bytes]]) -> bytes:
    """An archive of the right frame for any members."""
    listed = [Member(name, len(text), zlib.crc32(text)) for name, text in members]
    body = b"".join(
        zip_frame.local_header(m) + t for m, (_, t) in zip(listed, members, strict=True)
    )
    return body + zip_frame.directory(listed)


def with_index(path: Path, change: Callable[[dict], object], *, sort: bool = True) -> bytes:
    members = members_of(path)
    index = json.loads(members[0][1])
    change(index)
    text = json.dumps(index, sort_keys=sort, separators=(",", ":")).encode()
    return rewritten([("pack.json", text), *members[1:]])


def entry_of(index: dict, place: int = 0) -> dict:
    return index["entries"][place]


def _rename(index: dict, name: str) -> None:
    entry_of(index)["files"][name] = entry_of(index)["files"].pop("kernel.cpp")


HOSTILE_INDEXES: dict[str, tuple[Callable[[dict], object], str]] = {
    "path escape in a file": (lambda i: _rename(i, "../../x"), r"'\.\./\.\./x' has no plain"),
    "absolute file": (lambda i: _rename(i, "/etc/passwd"), "'/etc/passwd' has no plain"),
    "hidden file": (lambda i: _rename(i, ".bashrc"), "'.bashrc' has no plain"),
    "file with a zero": (lambda i: _rename(i, "a\0b"), "no plain"),
    "path escape in the compiler": (
        lambda i: entry_of(i).update(compiler="../../../x"), "is no folder name"),
    "hidden compiler": (lambda i: entry_of(i).update(compiler=".staging"), "is no folder name"),
    "key that is none": (lambda i: entry_of(i).update(key="a/../b"), "is no digest"),
    "no meta.json": (lambda i: entry_of(i)["files"].pop("meta.json"), "must have meta.json"),
    "many files": (
        lambda i: entry_of(i)["files"].update({f"f{n}": [0, "0" * 64, "00000000"]
                                               for n in range(99)}), "at most"),
    "huge file": (
        lambda i: entry_of(i)["files"]["kernel.cpp"].__setitem__(0, 1 << 40), "below 1 GiB"),
    "negative size": (
        lambda i: entry_of(i)["files"]["kernel.cpp"].__setitem__(0, -1), "below 1 GiB"),
    "size that is true": (
        lambda i: entry_of(i)["files"]["kernel.cpp"].__setitem__(0, True), "no size"),
    "short digest": (
        lambda i: entry_of(i)["files"]["kernel.cpp"].__setitem__(1, "00"), "two digests"),
    "entry twice": (lambda i: i["entries"].append(entry_of(i, 2)), "there twice"),
    "out of order": (lambda i: i["entries"].reverse(), "out of order"),
    "no list": (lambda i: i.update(entries={}), "other fields"),
    "further field": (lambda i: i.update(more=1), "other fields"),
    "further field of an entry": (lambda i: entry_of(i).update(more=1), "other fields"),
    "other schema": (lambda i: i.update(pack_schema=2), "its schema is 2"),
    "entry that is not there": (
        lambda i: i["entries"].append(dict(entry_of(i, 2), key="f" * 64)), "member .*f{64}"),
    "file that is smaller than said": (
        lambda i: entry_of(i)["files"]["artifact.so"].__setitem__(0, 999999), "artifact.so"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE_INDEXES)
def test_hostile_indexes_are_refused(what: str, packed: Path, tmp_path: Path) -> None:
    change, words = HOSTILE_INDEXES[what]
    packed.write_bytes(with_index(packed, change))
    with pytest.raises(PackError, match=words):
        unpack(packed, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_index_is_canonical(packed: Path) -> None:
    members = members_of(packed)
    for text in (
        members[0][1].replace(b'"pack_schema":1', b'"pack_schema":1,"pack_schema":1'),
        members[0][1].replace(b"{", b"{ ", 1),
    ):
        packed.write_bytes(rewritten([("pack.json", text), *members[1:]]))
        with pytest.raises(PackError, match="canonical"):
            PackFile(packed)
    for text in (b"[" * 100_000, b"nonsense", b'{"a":' + b"9" * 5000 + b"}"):
        packed.write_bytes(rewritten([("pack.json", text), *members[1:]]))
        with pytest.raises(PackError, match=r"no JSON|canonical"):
            PackFile(packed)


def central_record(data: bytes, place: int) -> int:
    """Where a record of the directory begins."""
    at = data.index(b"PK\x01\x02")
    for _ in range(place):
        name, extra, comment = struct.unpack_from("<3H", data, at + 28)
        at += 46 + name + extra + comment
    return at


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (8, 1, r"member 'v1/.*' is encrypted"),
        (10, 8, "is compressed"),
        (38, 1, "another place .* or attribute"),
        (42, 7, "another place"),
    ],
)
def test_directories_that_lie_are_refused(
    packed: Path, offset: int, value: int, words: str
) -> None:
    data = bytearray(packed.read_bytes())
    struct.pack_into("<H", data, central_record(data, 3) + offset, value)
    packed.write_bytes(data)
    with pytest.raises(PackError, match=words):
        PackFile(packed)


def test_links_are_refused(packed: Path) -> None:
    data = bytearray(packed.read_bytes())
    struct.pack_into("<I", data, central_record(data, 2) + 38, (stat.S_IFLNK | 0o777) << 16)
    packed.write_bytes(data)
    with pytest.raises(PackError, match=r"member 'v1/.*' is no plain file, such as a link"):
        PackFile(packed)


def test_members_that_the_index_does_not_list_are_refused(packed: Path) -> None:
    members = members_of(packed)
    for extra, words in (
        (("../../../etc/evil", b"x"), r"member '../../../etc/evil' is not in its index"),
        (members[2], r"member 'v1/.*' is there twice"),
    ):
        packed.write_bytes(rewritten([*members, extra]))
        with pytest.raises(PackError, match=words):
            PackFile(packed)


def test_archives_of_other_tools_are_refused(packed: Path, tmp_path: Path) -> None:
    """Compressed, in another order, without an index, or no archive at all."""
    members = members_of(packed)
    for compression in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        with zipfile.ZipFile(packed, "w", compression) as archive:
            for name, text in members if compression else members[::-1]:
                archive.writestr(name, text)
        with pytest.raises(PackError):
            PackFile(packed)
    for data in (b"", b"PK", b"\x7fELF" * 100, os.urandom(1000)):
        packed.write_bytes(data)
        with pytest.raises(PackError, match="it is no pack, or cut short"):
            PackFile(packed)


def test_bombs_are_refused_before_they_are_read(packed: Path) -> None:
    """An index whose header states gigabytes is not allocated."""
    data = bytearray(packed.read_bytes())
    struct.pack_into("<2I", data, 18, 0xFFFFFFF0, 0xFFFFFFF0)
    packed.write_bytes(data)
    with pytest.raises(PackError, match="no pack, or cut short"):
        PackFile(packed)


def test_cut_short_anywhere(packed: Path, tmp_path: Path) -> None:
    data = packed.read_bytes()
    for size in [*range(0, len(data), 97), len(data) - 1]:
        packed.write_bytes(data[:size])
        with pytest.raises(PackError):
            PackFile(packed)
    packed.write_bytes(data + b"\0")
    with pytest.raises(PackError):
        PackFile(packed)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_changed_byte_gets_through(packed: Path, data: st.DataObject) -> None:
    whole = PACKED.setdefault(packed, packed.read_bytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda v: v != whole[place]))
    packed.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
    with pytest.raises(PackError):
        opened(packed)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_mixed_up_archives_never_give_other_content(packed: Path, data: st.DataObject) -> None:
    """Pieces copied, moved and cut: an error or the content that was packed, nothing else."""
    whole = PACKED.setdefault(packed, packed.read_bytes())
    packed.write_bytes(whole)
    good = opened(packed)
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(changed)))
        end = data.draw(st.integers(begin, min(len(changed), begin + 300)))
        piece = changed[begin:end]
        if data.draw(st.booleans()):
            del changed[begin:end]
        at = data.draw(st.integers(0, len(changed)))
        changed[at:at] = piece
    packed.write_bytes(changed)
    try:
        found = opened(packed)
    except PackError:
        return
    assert found == good


PACKED: dict[Path, bytes] = {}


# --- whom packs belong to ------------------------------------------------------------------------


def test_a_pack_that_others_may_write_is_refused(packed: Path) -> None:
    packed.chmod(0o664)
    with pytest.raises(PackError, match=r"mode 0664.*chmod go-w"):
        PackFile(packed)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give the file to another user")
def test_a_pack_of_another_user_is_refused(packed: Path) -> None:
    os.chown(packed, 12345, -1)
    with pytest.raises(PackError, match="belongs to user 12345"):
        PackFile(packed)


def test_a_folder_or_a_pipe_is_no_pack(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(PackError, match="is no file"):
            PackFile(path)


def test_it_stays_what_it_was_when_opened(packed: Path) -> None:
    with PackFile(packed) as found:
        entry = next(found.entries())
        content = entry.read("artifact.so")
        packed.unlink()
        packed.write_bytes(b"other")
        assert entry.read("artifact.so") == content
    with pytest.raises(PackError, match="cannot be read"):
        entry.read("artifact.so")


def test_places_beyond_4_gib_are_right(tmp_path: Path) -> None:
    """The frame of an archive of 6 GiB, in a file with a hole: another reader finds its members."""
    members = [Member(f"m{i}", (1 << 30) - 1, 0) for i in range(6)]
    last = Member("last", 4, zlib.crc32(b"last"))
    begins = list(zip_frame.places([*members, last]))
    with (tmp_path / "big.zip").open("wb") as file:
        for member, begin in zip(members, begins, strict=False):
            file.seek(begin)
            file.write(zip_frame.local_header(member))
        file.seek(begins[-2])
        file.write(zip_frame.local_header(last) + b"last")
        file.write(zip_frame.directory([*members, last]))
    with zipfile.ZipFile(tmp_path / "big.zip") as archive:
        assert archive.read("last") == b"last"
        assert [i.header_offset for i in archive.infolist()] == begins[:-1]
