"""Packs: deterministic, readable by any zip tool, and refused where they are not valid."""

from __future__ import annotations

import io
import os
import resource
import stat
import struct
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashattn_jit.deploy.pack.pack import pack
from flashattn_jit.deploy.pack.unpack import unpack
from flashattn_jit.errors import PackError, TargetError
from flashattn_jit.jit.cache.entry import sha256
from flashattn_jit.jit.cache.pack_file import PackFile, write_archive
from flashattn_jit.jit.cache.store import Store
from tests.deploy.caches import COMPILER, add_entry, contents
from tests.harness import processes


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
        found = {name: archive.read(name) for name in archive.namelist()}
        assert {i.compress_type for i in archive.infolist()} == {zipfile.ZIP_STORED}
        assert {i.date_time for i in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {(i.create_system, i.external_attr >> 16) for i in archive.infolist()} == {
            (3, stat.S_IFREG | 0o600)
        }
        assert [i.comment.decode() for i in archive.infolist()] == [*map(sha256, found.values())]
    assert found == contents(store.root)


@pytest.mark.parametrize(("umask", "mode"), [(0, 0o644), (0o002, 0o644), (0o077, 0o600)])
def test_nobody_else_may_write_to_it(store: Store, tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        pack(tmp_path / "p.pack")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "p.pack").stat().st_mode) == mode


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
        "import os, sys, signal, flashattn_jit.deploy.pack.pack as p\n"
        "def progress(done, total):\n"
        "    if done == total:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "p.pack(sys.argv[1], progress=progress)\n"
    )
    process = processes.run(["-c", script, str(packed)])
    assert process.returncode == -9
    assert packed.read_bytes() == before


def test_a_full_disk_leaves_what_was_there(packed: Path, tmp_path: Path) -> None:
    before = packed.read_bytes()
    script = (
        "import errno, resource, sys, flashattn_jit as fa\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        "try:\n"
        "    fa.pack(sys.argv[1])\n"
        "except OSError as error:\n"
        "    assert error.errno == errno.EFBIG, error\n"
        "    print('refused')\n"
    )
    process = processes.run(["-c", script, str(packed)])
    assert process.stdout.strip() == "refused", process.stderr
    assert packed.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "kernels.pack"}


# --- what is refused -----------------------------------------------------------------------------


Members = list[tuple[str, str, bytes]]
"""Name, digest and content of each member."""


def members_of(path: Path) -> Members:
    with zipfile.ZipFile(path) as archive:
        return [(i.filename, i.comment.decode(), archive.read(i)) for i in archive.infolist()]


def rewritten(members: Members) -> bytes:
    """A pack with the right directory and comment for any members."""
    file = io.BytesIO()
    write_archive(file, members)
    return file.getvalue()


def signed(data: bytes, start: int) -> bytes:
    """The archive with the comment that matches its directory."""
    return data[:-64] + sha256(data[start:-64]).encode()


def start_of(path: Path) -> int:
    """The offset of the directory."""
    with zipfile.ZipFile(path) as archive:
        return archive.start_dir


def renamed(index: int, change: Callable[[str], str]) -> Callable[[Members], Members]:
    """A change that gives the member `index` another name."""

    def of(members: Members) -> Members:
        name, digest, content = members[index]
        return [*members[:index], (change(name), digest, content), *members[index + 1 :]]

    return of


# Of the first entry's four members the second is a log, the last its meta.json.
HOSTILE_MEMBERS: dict[str, tuple[Callable[[Members], Members], str]] = {
    "path escape in a file": (renamed(1, lambda n: f"{n}/../../x"), r"no folder of an entry"),
    "path escape as a file": (renamed(1, lambda n: n.replace("build.log", "..")), "has no plain"),
    "absolute file": (renamed(1, lambda n: "/etc/passwd"), "'/etc' is no folder of an entry"),
    "hidden file": (renamed(1, lambda n: n.replace("build", ".build")), "has no plain file name"),
    "no file": (renamed(1, lambda n: n.replace("build.log", "")), "has no plain file name"),
    "file of other letters": (renamed(1, lambda n: n + "\xe4"), "has no plain file name"),
    "file in the top folder": (renamed(0, lambda n: "x"), "'' is no folder of an entry"),
    "file beside the entries": (renamed(0, lambda n: "v1/x"), "is no folder of an entry"),
    "path escape in the compiler": (
        renamed(0, lambda n: n.replace(COMPILER, "../../../x")), "is no folder of an entry"),
    "hidden compiler": (
        renamed(0, lambda n: n.replace(COMPILER, ".staging")), "is no folder of an entry"),
    "other layout": (renamed(0, lambda n: n.replace("v1/", "v0/")), "is no folder of an entry"),
    "key that is none": (
        renamed(0, lambda n: n.replace(n.split("/")[3], "a")), "is no folder of an entry"),
    "key in the folder of others": (
        renamed(0, lambda n: n.replace(n.split("/")[2], "zz", 1)), "is no folder of an entry"),
    "no meta.json": (lambda m: [*m[:3], *m[4:]], "has no meta.json"),
    "file that is missing": (lambda m: m[1:], "lists other files"),
    "many files": (
        lambda m: [*m[:3], m[3], *((m[3][0] + str(i), sha256(b""), b"") for i in range(10, 99)),
                   *m[4:]], "lists other files"),
    "other content": (lambda m: [(m[0][0], sha256(b"x"), b"x"), *m[1:]], "lists other files"),
    "short digest": (lambda m: [(m[0][0], "00", m[0][2]), *m[1:]], "has no digest"),
    "wrong digest of meta.json": (
        lambda m: [*m[:3], (m[3][0], "0" * 64, m[3][2]), *m[4:]], "not what its digest says"),
    "entry twice": (lambda m: [*m, *m[-4:]], "there twice"),
    "member twice": (lambda m: [*m[:2], *m[1:]], "there twice"),
    "entries out of order": (lambda m: [*m[4:], *m[:4]], "out of order"),
    "members out of order": (lambda m: [m[1], m[0], *m[2:]], "out of order"),
    "file that no entry lists": (
        lambda m: [*m, (m[-1][0] + "x", sha256(b"x"), b"x")], "lists other files"),
    "no entry's file": (
        lambda m: [*m, ("w/evil", sha256(b"x"), b"x")], "'w' is no folder of an entry"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize("what", HOSTILE_MEMBERS)
def test_hostile_members_are_refused(what: str, packed: Path, tmp_path: Path) -> None:
    change, words = HOSTILE_MEMBERS[what]
    packed.write_bytes(rewritten(change(members_of(packed))))
    with pytest.raises(PackError, match=rf"^pack {packed}: .*({words}).*; pack it again"):
        unpack(packed, tmp_path / "other")
    # Entries in front of the hostile member may have been unpacked.
    assert {path.parts[-5] for path in (tmp_path / "other").rglob("*.so")} <= {"v1"}
    assert {path.name for path in tmp_path.iterdir()} <= {"cache", "kernels.pack", "other"}


def test_a_zero_in_a_name_is_refused(packed: Path) -> None:
    """Readers that end the name at the NUL see another name, such as that of another member."""
    start, data = start_of(packed), packed.read_bytes().replace(b"kernel.cpp", b"build.log\0")
    packed.write_bytes(signed(data, start))
    with pytest.raises(PackError, match=r"member .*build.log.x00' has no plain file name"):
        PackFile(packed)


@pytest.mark.parametrize(
    "comment",
    [b"", b"flashattn_jit pack of schema 1, sha256 of the directory: " + b"0" * 64, b"x" * 60000],
    ids=["none, as before schemas were stated", "another", "long"],
)
def test_a_pack_of_another_schema_is_to_be_made_again(packed: Path, comment: bytes) -> None:
    with zipfile.ZipFile(packed, "a") as archive:
        archive.comment = comment
    with pytest.raises(PackError, match=r"schema is not 2, .* this version reads; pack it again"):
        PackFile(packed)


def central_record(data: bytes, index: int) -> int:
    """The offset of a record of the directory."""
    at = data.index(b"PK\x01\x02")
    for _ in range(index):
        name, extra, comment = struct.unpack_from("<3H", data, at + 28)
        at += 46 + name + extra + comment
    return at


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (6, 99, "cut short, or no pack"),
        (8, 1, r"member 'v1/.*' is encrypted"),
        (8, 8, "not plainly stored"),
        (10, 8, "is compressed"),
        (10, 99, "is compressed"),
        (20, 1, "is compressed"),
        (24, 1, "is compressed"),
        (38, 1, "is no plain file"),
        (42, 7, "does not begin where the one before it ends"),
    ],
)
@pytest.mark.parametrize("again", [True, False], ids=["signed", "unsigned"])
def test_directories_that_lie_are_refused(
    packed: Path, offset: int, value: int, words: str, again: bool
) -> None:
    start, data = start_of(packed), bytearray(packed.read_bytes())
    struct.pack_into("<H", data, central_record(data, 3) + offset, value)
    packed.write_bytes(signed(data, start) if again else data)
    with pytest.raises(PackError, match=words if again else "not what its digest says|cut short"):
        PackFile(packed)


def test_links_are_refused(packed: Path) -> None:
    start, data = start_of(packed), bytearray(packed.read_bytes())
    struct.pack_into("<I", data, central_record(data, 2) + 38, (stat.S_IFLNK | 0o777) << 16)
    packed.write_bytes(signed(data, start))
    with pytest.raises(PackError, match=r"member 'v1/.*' is no plain file, such as a link"):
        PackFile(packed)


@pytest.mark.parametrize("place", [0, 3])
def test_huge_members_are_refused(packed: Path, place: int) -> None:
    """A sparse file may have such a size without the space on disk."""
    start, data = start_of(packed), bytearray(packed.read_bytes())
    size = (1 << 30) + 1 if place == 0 else (16 << 20) + 1
    struct.pack_into("<2I", data, central_record(data, place) + 20, size, size)
    packed.write_bytes(signed(data, start))
    with pytest.raises(PackError, match=r"member 'v1/.*' is too large"):
        PackFile(packed)


@pytest.mark.parametrize("size", [0, 999, 1001, 1 << 20])
@pytest.mark.parametrize("place", [0, 6, 11])
def test_sizes_that_lie_are_refused(packed: Path, size: int, place: int) -> None:
    """A member that ends early, or overlaps other members or the end."""
    start, data = start_of(packed), bytearray(packed.read_bytes())
    struct.pack_into("<2I", data, central_record(data, place) + 20, size, size)
    packed.write_bytes(signed(data, start))
    with pytest.raises(PackError, match=r"does not (begin where the one|end where the)"):
        PackFile(packed)


def test_bytes_between_and_behind_members_are_refused(packed: Path) -> None:
    start, data = start_of(packed), packed.read_bytes()
    with zipfile.ZipFile(packed) as archive:
        second = archive.infolist()[1].header_offset
    for place in (0, second, start, len(data)):
        packed.write_bytes(data[:place] + b"more" + data[place:])
        with pytest.raises(PackError, match=r"does not|digest"):
            PackFile(packed)


def test_archives_of_other_tools_are_refused(packed: Path, tmp_path: Path) -> None:
    """Compressed archives, archives in another order or without a schema, and other files."""
    members, comment = members_of(packed), zipfile.ZipFile(packed).comment
    for compression in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        with zipfile.ZipFile(packed, "w", compression) as archive:
            archive.comment = comment
            for name, _, text in members if compression else members[::-1]:
                archive.writestr(name, text)
        with pytest.raises(PackError):
            PackFile(packed)
        packed.write_bytes(signed(packed.read_bytes(), start_of(packed)))
        with pytest.raises(PackError, match="member"):
            PackFile(packed)
    for data in (b"", b"PK", b"\x7fELF" * 100, os.urandom(1000), b"PK\5\6" + bytes(18)):
        packed.write_bytes(data)
        with pytest.raises(PackError, match=r"no pack|its schema"):
            PackFile(packed)


def test_bombs_are_refused_before_they_are_read(packed: Path) -> None:
    """A directory of 200 GB, in a sparse file, is neither allocated nor read."""
    end = packed.read_bytes()[-200:]
    end = bytearray(end[end.index(b"PK\5\6") :])
    struct.pack_into("<2I", end, 12, 0xFFFFFFFF, 0xFFFFFFFF)
    size = 200_000_000_000
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, size, 0)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, size, 1)
    with packed.open("wb") as file:
        file.truncate(size)
        file.seek(size)
        file.write(end64 + locator + end)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(PackError, match="its directory is too large"):
        PackFile(packed)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_a_pack_has_a_most(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = packed.read_bytes()
    monkeypatch.setattr("flashattn_jit.jit.cache.pack_file._MOST_DIRECTORY_BYTES", 1000)
    with pytest.raises(PackError, match="too many for one pack; choose fewer"):
        pack(packed)
    assert packed.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "kernels.pack"}
    with pytest.raises(PackError, match="too large"):
        PackFile(packed)


def test_cut_short_anywhere(packed: Path, tmp_path: Path) -> None:
    data = packed.read_bytes()
    for size in [*range(0, len(data), 97), *range(len(data) - 200, len(data))]:
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
    """Copied, moved and cut pieces give an error or the content that was packed."""
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


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_signed_directories_never_give_other_content(packed: Path, data: st.DataObject) -> None:
    """A changed directory with the right digest gives an error or the content that was packed."""
    whole = PACKED.setdefault(packed, packed.read_bytes())
    packed.write_bytes(whole)
    good, start = opened(packed), start_of(packed)
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(start, len(whole) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=8))
        changed[place : place + len(piece)] = piece
    packed.write_bytes(signed(changed, start))
    try:
        found = opened(packed)
    except PackError as error:
        assert str(packed) in str(error)
        assert "again" in str(error)
        return
    assert found == good


PACKED: dict[Path, bytes] = {}


# --- owners and modes of packs -------------------------------------------------------------------


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


def test_it_is_read_in_threads_and_after_a_fork(packed: Path) -> None:
    """Reads do not use the file offset, which forked processes share."""
    with PackFile(packed) as found:
        entries = list(found.entries())
        child = os.fork()
        right = all(
            found.find(e.key) == [e] and e.read("artifact.so").startswith(e.key.encode())
            for _ in range(300)
            for e in entries
        )
        if child == 0:
            os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert right
        with ThreadPoolExecutor(4) as threads:
            pairs = [(e, n) for _ in range(50) for e in entries for n in e.files]
            for (entry, name), content in zip(
                pairs, threads.map(lambda p: p[0].read(p[1]), pairs), strict=True
            ):
                assert sha256(content).encode() == entry.files[name].comment


def test_places_beyond_a_zip_files_32_bits_are_right(
    store: Store, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zip64 fields, as in an archive of more than 4 GiB; here from 4 KiB on."""
    good = opened(packed)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 4096)
    pack(tmp_path / "big.pack")
    monkeypatch.undo()
    data = (tmp_path / "big.pack").read_bytes()
    assert b"PK\6\6" in data
    assert data != packed.read_bytes()
    with zipfile.ZipFile(tmp_path / "big.pack") as archive:
        assert archive.testzip() is None
    assert opened(tmp_path / "big.pack") == good
