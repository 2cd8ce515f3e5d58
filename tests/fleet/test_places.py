"""Cache folders that are missing, read-only, full, unsafe or of other users."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.fleet import Fleet, entries, open_to_others, tree, until

NOBODY = 65534
NEEDS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root, to give a folder away or to become another user"
)


@pytest.fixture
def mounts(fleet: Fleet) -> Fleet:
    """Processes that may mount in their own namespace; skips the test where they may not."""
    mounted = fleet.root / "mounted"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mounted)]
    result = fleet.start("mounts", mounts=[command]).result()
    if "error" in result:
        pytest.skip(f"needs private mounts: {result['message']}")
    return fleet


def test_the_folder_is_deleted_under_a_running_process(fleet: Fleet) -> None:
    mark, gate = fleet.root / "mark", fleet.root / "gate"
    process = fleet.start(
        "attend_twice", arguments={"dims": [8, 12], "mark": str(mark), "gate": str(gate)}
    )
    until(mark.exists, "the first call")
    shutil.rmtree(fleet.cache)
    gate.touch()
    result = process.good()
    assert result["again"]["counters"]["compiles"] == 1  # what is loaded stays
    assert result["second"]["source"] == "compiler"
    assert len(entries(fleet.cache)) == 1  # made again, for the second kernel
    assert open_to_others(fleet.cache) == []


def test_the_folder_is_deleted_in_mid_compile(fleet: Fleet) -> None:
    fleet.compiler.hold()
    process = fleet.start()
    fleet.compiler.until_compiling()
    shutil.rmtree(fleet.cache)
    fleet.compiler.release()
    assert process.good()["source"] == "compiler"
    assert fleet.start().good()["source"] in ("compiler", "disk")


def read_only(folder: Path) -> list[list[str]]:
    return [
        ["mount", "--bind", str(folder), str(folder)],
        ["mount", "-o", "remount,bind,ro", str(folder)],
    ]


def test_a_read_only_folder_serves(mounts: Fleet, _warm_cache: Path) -> None:
    shutil.copytree(_warm_cache, mounts.cache)
    before = tree(mounts.cache)
    process = mounts.start(mounts=read_only(mounts.cache))
    assert process.good()["source"] == "disk"
    assert process.log() == ""
    assert tree(mounts.cache) == before
    assert mounts.compiler.started == 0


def test_what_a_read_only_folder_lacks_is_compiled_and_not_kept(
    mounts: Fleet, _warm_cache: Path
) -> None:
    shutil.copytree(_warm_cache, mounts.cache)
    before = tree(mounts.cache)
    process = mounts.start(arguments={"dim": 12}, mounts=read_only(mounts.cache))
    assert process.good()["source"] == "compiler"
    assert "Read-only file system" in process.log()
    assert str(mounts.cache) in process.log()
    assert tree(mounts.cache) == before


def test_a_damaged_entry_of_a_read_only_folder_is_passed_over(
    mounts: Fleet, _warm_cache: Path
) -> None:
    shutil.copytree(_warm_cache, mounts.cache)
    (entry,) = entries(mounts.cache)
    entry.joinpath("artifact.so").write_bytes(b"")
    assert mounts.start(mounts=read_only(mounts.cache)).good()["source"] == "compiler"


def test_another_read_only_folder_serves_without_a_folder_of_ones_own(
    mounts: Fleet, _warm_cache: Path
) -> None:
    site = mounts.root / "site"
    shutil.copytree(_warm_cache, site)
    env = {
        "FLASHATTN_JIT_CACHE_PATH": str(site),
        "FLASHATTN_JIT_CACHE_DIR": str(mounts.root / "none" / "cache"),
        "FLASHATTN_JIT_COMPILE": "never",
    }
    assert mounts.start(env=env, mounts=read_only(mounts.root / "site")).good()["mapped"]
    assert not mounts.root.joinpath("none").exists()


@pytest.mark.parametrize("size", ["4k", "16k", "48k", "96k", "160k"])
def test_a_full_file_system(mounts: Fleet, size: str) -> None:
    """A failed write of a folder, the source, the object or the entry does not fail the call."""
    mounts.cache.mkdir(mode=0o700)
    tmpfs = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(mounts.cache)]
    process = mounts.start(mounts=[tmpfs])
    result = process.good()
    assert result["source"] == "compiler"
    assert "No space left" in process.log() or size == "160k"


def test_a_file_system_without_inodes(mounts: Fleet) -> None:
    mounts.cache.mkdir(mode=0o700)
    tmpfs = ["mount", "-t", "tmpfs", "-o", "nr_inodes=3,mode=700", "tmpfs", str(mounts.cache)]
    process = mounts.start(mounts=[tmpfs])
    assert process.good()["source"] == "compiler"
    assert "No space left" in process.log()


def test_a_file_system_that_runs_no_code(mounts: Fleet, _warm_cache: Path) -> None:
    """An entry that verifies but cannot be loaded from there is not corrupt, and stays."""
    shutil.copytree(_warm_cache, mounts.cache)
    before = tree(mounts.cache)
    noexec = [
        ["mount", "--bind", str(mounts.cache), str(mounts.cache)],
        ["mount", "-o", "remount,bind,noexec", str(mounts.cache)],
    ]
    process = mounts.start(mounts=noexec)
    assert process.good()["source"] == "compiler"
    assert process.good()["counters"]["corrupt"] == 0
    assert entries(mounts.cache) == [Path(p) for p in before if Path(p, "meta.json").is_file()]


def test_no_home_folder(fleet: Fleet) -> None:
    """Without HOME the password database says where the cache is; a service may have neither."""
    env = {"HOME": None, "XDG_CACHE_HOME": None, "FLASHATTN_JIT_CACHE_DIR": None}
    elsewhere = {**env, "XDG_CACHE_HOME": str(fleet.root / "xdg")}
    assert fleet.start(env=elsewhere).good()["source"] == "compiler"
    (made,) = fleet.root.joinpath("xdg").iterdir()
    assert entries(made)
    assert made.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def public(fleet: Fleet) -> Iterator[Path]:
    """A folder below the temporary folder that every user can enter."""
    folder = Path(tempfile.mkdtemp(prefix="flashattn_jit-tests-"))
    folder.chmod(0o755)
    for name in ("work", "compiler"):
        folder.joinpath(name).mkdir()
        folder.joinpath(name).chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@NEEDS_ROOT
def test_a_user_without_name_or_home(fleet: Fleet, public: Path) -> None:
    """As in a container with an arbitrary user id: no folder named `~` is made."""
    unset = ("HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "USER", "LOGNAME",
             "FLASHATTN_JIT_CACHE_DIR", "FLASHATTN_JIT_LOCK_DIR", "FLASHATTN_JIT_CXX")  # fmt: skip
    work = public / "work"
    env = {**dict.fromkeys(unset), "TMPDIR": str(public / "compiler")}
    process = fleet.start(env=env, uid=54321, folder=str(work))
    result = process.result()
    library = Path(os.__file__)
    if "error" in result and not all(p.stat().st_mode & 0o001 for p in library.parents):
        pytest.skip("Python's library is in a folder that other users cannot enter")
    assert result.get("source") == "compiler", process.log()
    assert list(work.iterdir()) == []
    assert open_to_others(*public.joinpath("compiler").iterdir()) == []


def test_a_home_that_does_not_exist_and_cannot_be_made(fleet: Fleet) -> None:
    """As with `/nonexistent`, the home of services; here a file has the folder's path."""
    home = fleet.root / "home"
    home.write_text("")
    env = {"HOME": str(home), "XDG_CACHE_HOME": None, "FLASHATTN_JIT_CACHE_DIR": None}
    process = fleet.start(env=env)
    assert process.good()["source"] == "compiler"
    assert "not kept" in process.log()


def test_umask_0_opens_nothing_to_others(fleet: Fleet) -> None:
    fleet.start(umask=0).good()
    fleet.compiler.fail()
    assert fleet.start(arguments={"dim": 12}, umask=0).result()["error"] == "CompileError"
    (entry,) = entries(fleet.cache)
    entry.joinpath("artifact.so").write_bytes(b"")
    fleet.compiler.fail(False)
    assert fleet.start(umask=0).good()["counters"]["corrupt"] == 1
    assert fleet.locks.is_dir()
    assert open_to_others(fleet.cache, fleet.locks) == []


def test_umask_0_while_it_is_built(fleet: Fleet) -> None:
    """No other user may enter the folder of the staged files."""
    fleet.compiler.hold()
    process = fleet.start(umask=0)
    fleet.compiler.until_compiling()
    (staging,) = fleet.cache.glob("v1/.staging/*")
    assert staging.stat().st_mode & 0o777 == 0o700
    fleet.compiler.release()
    process.good()


def refused(fleet: Fleet, remedy: str, **request: Any) -> None:
    """A call is refused with the remedy, and neither loads, writes nor compiles anything."""
    before = tree(fleet.cache)
    for mode in ("missing", "never", "always"):
        request["env"] = {"FLASHATTN_JIT_COMPILE": mode}
        result = fleet.start(**request).result()
        assert result.get("error") in ("CacheError", "UnsafeCacheError"), result
        assert remedy in result["message"]
        assert str(fleet.cache) in result["message"]
    assert tree(fleet.cache) == before
    assert fleet.compiler.compiles == 0


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_may_write_is_refused(warm: Fleet, mode: int) -> None:
    warm.cache.chmod(mode)
    refused(warm, "chmod go-w")


@NEEDS_ROOT
def test_a_folder_of_another_user_is_refused(warm: Fleet) -> None:
    os.chown(warm.cache, NOBODY, NOBODY)
    refused(warm, "FLASHATTN_JIT_CACHE_DIR")


@NEEDS_ROOT
def test_an_entry_of_another_user_is_not_loaded(warm: Fleet) -> None:
    (entry,) = entries(warm.cache)
    for path in (entry, *entry.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    result = warm.start(env={"FLASHATTN_JIT_COMPILE": "never"}).result()
    assert result.get("error") in ("MissingKernelError", "CacheError", "UnsafeCacheError"), result


def test_a_link_to_a_folder_of_ones_own_is_followed(warm: Fleet) -> None:
    elsewhere = warm.root / "elsewhere"
    warm.cache.rename(elsewhere)
    warm.cache.symlink_to(elsewhere)
    assert warm.start().good()["source"] == "disk"
    assert warm.start(arguments={"dim": 12}).good()["source"] == "compiler"
    assert len(entries(elsewhere)) == 2


def test_a_link_to_a_folder_that_others_may_write_is_refused(warm: Fleet) -> None:
    elsewhere = warm.root / "elsewhere"
    warm.cache.rename(elsewhere)
    warm.cache.symlink_to(elsewhere)
    elsewhere.chmod(0o777)
    refused(warm, "chmod go-w")


def test_a_link_to_a_folder_that_others_may_replace_is_refused(warm: Fleet) -> None:
    """Others could move another folder of the same owner there."""
    shared = warm.root / "shared"
    shared.mkdir()
    warm.cache.rename(shared / "cache")
    warm.cache.symlink_to(shared / "cache")
    shared.chmod(0o777)
    result = warm.start().result()
    assert result.get("error") in ("CacheError", "UnsafeCacheError"), result
    assert str(shared) in result["message"]
    # As in /tmp: there only its owner may rename a folder.
    shared.chmod(0o1777)
    assert warm.start().good()["source"] == "disk"


def test_an_entry_that_is_a_link_is_not_loaded(warm: Fleet) -> None:
    (entry,) = entries(warm.cache)
    elsewhere = warm.root / "elsewhere"
    entry.rename(elsewhere)
    entry.symlink_to(elsewhere)
    before = tree(elsewhere)
    result = warm.start(env={"FLASHATTN_JIT_COMPILE": "never"}).result()
    assert result.get("error") in ("MissingKernelError", "CacheError", "UnsafeCacheError"), result
    assert warm.start().good()["source"] == "compiler"
    assert tree(elsewhere) == before


def test_an_interrupted_publish_shows_nothing(fleet: Fleet) -> None:
    """A builder that is killed at any moment leaves a complete entry or none."""
    for delay in range(6):
        fleet.compiler.hold()
        process = fleet.start(arguments={"dim": 8 + 4 * delay})
        fleet.compiler.until_compiling(delay + 1)
        fleet.compiler.release()
        until(lambda s=delay / 100: _slept(s), "a moment")
        process.signal(signal.SIGKILL)
        until(lambda p=process: p.poll() is not None, "its end")
        for entry in entries(fleet.cache):
            files = json.loads(entry.joinpath("meta.json").read_text())["files"]
            assert {p.name for p in entry.iterdir()} == {"meta.json", *files}
    assert fleet.start().good()["source"] in ("compiler", "disk")


def _slept(seconds: float) -> bool:
    import time

    time.sleep(seconds)
    return True
