"""`KernelCache` over a compiler that writes bytes: when it builds, how often, and what remains."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flashattn_jit.codegen.spec import BuildRequest
from flashattn_jit.errors import (
    AbiError,
    CompileError,
    EnvironmentVariableError,
    MissingKernelError,
)
from flashattn_jit.jit.compilation.compile_job import BuildFailure
from flashattn_jit.jit.module import KernelCache
from tests.jit.cache.entries import tree

TARGET = "cpu:avx2"
NewCache = Callable[[], KernelCache]


def load(cache: KernelCache, spec: str = "{}", render: Callable[[], str] = lambda: "int x;") -> str:
    """Loads a kernel; returns the path of its artifact."""
    return cache.load_stepping([BuildRequest(spec, "kernel.cpp.j2", TARGET, render)])[1].path


def never() -> str:
    raise AssertionError("a hit renders nothing")


def entries(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("v1/[!.]*/??/*/meta.json"))


def test_a_kernel_is_compiled_once_and_then_comes_from_memory(new_cache, fake_build) -> None:
    cache = new_cache()
    assert cache.find("{}") is None
    first = cache.load_stepping([BuildRequest("{}", "kernel.cpp.j2", TARGET, lambda: "int x;")])[1]
    assert cache.load_stepping([BuildRequest("{}", "kernel.cpp.j2", TARGET, never)])[1] is first
    assert cache.find("{}") is first
    assert len(fake_build.builds) == 1
    assert cache.counters.misses == cache.counters.compiles == 1


def test_another_process_finds_it_on_disk_and_writes_nothing(
    new_cache, fake_build, cache_root: Path
) -> None:
    path = load(new_cache())
    assert Path(path).parent in entries(cache_root)
    before = tree(cache_root)
    cache = new_cache()
    assert load(cache, render=never) == path
    assert tree(cache_root) == before
    assert not cache.counters.misses
    assert cache.counters.hits["user"] == 1


def test_a_hit_asks_the_compiler_nothing(new_cache, monkeypatch: pytest.MonkeyPatch) -> None:
    load(new_cache())
    monkeypatch.setattr(subprocess, "run", never)
    monkeypatch.setattr(subprocess, "Popen", never)
    load(new_cache(), render=never)


def test_a_change_of_a_header_or_a_spec_compiles_anew(new_cache, fake_build, sources) -> None:
    from flashattn_jit.jit.cache import entry

    load(new_cache())
    load(new_cache(), spec='{"head_dim":64}')
    (sources / "include/fajit/nested/b.h").write_text("int changed;")
    entry.sources_digest.cache_clear()
    load(new_cache())
    assert len(set(fake_build.builds)) == 3


@pytest.mark.parametrize("damage", ["truncate", "remove meta", "other kernel"])
def test_a_corrupt_entry_is_built_again_once(
    new_cache, fake_build, cache_root: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = Path(load(new_cache()))
    if damage == "truncate":
        artifact.write_bytes(b"arti")
    elif damage == "remove meta":
        artifact.with_name("meta.json").unlink()
    else:
        artifact.write_bytes(b"artifact of another")
    cache = new_cache()
    assert load(cache) == str(artifact)
    assert artifact.read_text().endswith(fake_build.builds[0])
    assert len(fake_build.builds) == 2
    assert cache.counters.corrupt == 1
    assert "moving it to quarantine" in caplog.text
    assert "not searched" not in caplog.text
    assert load(new_cache(), render=never) == str(artifact)


def test_an_artifact_that_says_it_is_another_kernel_is_never_published(
    new_cache, fake_build, cache_root: Path
) -> None:
    fake_build.content = "artifact of something else"
    with pytest.raises(AbiError, match="something else"):
        load(new_cache())
    assert len(fake_build.builds) == 1
    assert entries(cache_root) == []


def test_a_failed_compile_leaves_no_entry_and_tells_where_to_look(
    new_cache, fake_build, cache_root: Path
) -> None:
    def fail() -> None:
        raise BuildFailure("'x' was not declared", ("hook:Mine.score_mod", 3))

    fake_build.before = fail
    cache = new_cache()
    with pytest.raises(
        CompileError, match=r"hook:Mine\.score_mod:3: 'x' was not declared"
    ) as error:
        load(cache)
    assert error.value.first_error == "'x' was not declared"
    assert error.value.location == ("hook:Mine.score_mod", 3)
    assert Path(error.value.log_path).read_text() == "all is well\n"
    assert Path(error.value.source_path).read_text() == "int x;"
    assert error.value.log_path in str(error.value)
    assert error.value.source_path in str(error.value)
    assert entries(cache_root) == []
    assert list((cache_root / "v1" / ".staging").iterdir()) == []
    fake_build.before = lambda: None
    load(cache)


def test_an_error_in_rendering_passes_through(new_cache, cache_root: Path) -> None:
    def broken() -> str:
        raise ZeroDivisionError("in the template")

    with pytest.raises(ZeroDivisionError, match="in the template"):
        load(new_cache(), render=broken)
    assert entries(cache_root) == []


def test_threads_that_want_one_kernel_compile_it_once(new_cache, fake_build) -> None:
    cache = new_cache()
    everybody = threading.Barrier(8)
    fake_build.before = lambda: threading.Event().wait(0.2) and None
    modules: list[object] = []

    def want() -> None:
        everybody.wait()
        modules.append(
            cache.load_stepping([BuildRequest("{}", "kernel.cpp.j2", TARGET, lambda: "int x;")])[1]
        )

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake_build.builds) == 1
    assert len(modules) == 8
    assert len(set(map(id, modules))) == 1


def test_different_kernels_are_built_at_the_same_time(new_cache, fake_build) -> None:
    cache = new_cache()
    both_inside = threading.Barrier(2, timeout=20)
    fake_build.before = lambda: both_inside.wait() and None
    threads = [threading.Thread(target=load, args=(cache, spec)) for spec in ('{"a":1}', '{"a":2}')]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not both_inside.broken
    assert len(fake_build.builds) == 2


def test_one_threads_failure_is_not_anothers(new_cache, fake_build) -> None:
    cache = new_cache()

    def fail() -> None:
        raise BuildFailure("no", None)

    fake_build.before = fail
    with pytest.raises(CompileError):
        load(cache)
    fake_build.before = lambda: None
    assert load(cache)


PROCESS = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import conftest
from flashattn_jit import env
from flashattn_jit.codegen.spec import BuildRequest
from flashattn_jit.jit.module import KernelCache
root = Path(sys.argv[2])
env.templates_dir = lambda: root / "templates"
env.include_dir = lambda: root / "include"
env.PACKAGE_DIR = root / "package"
build = conftest.FakeBuild()
build.before = lambda: time.sleep(0.5)
cache = KernelCache(build=build, load=conftest.FakeModule)
print("ready", flush=True)
sys.stdin.readline()
cache.load_stepping([BuildRequest("{}", "kernel.cpp.j2", "cpu:avx2", lambda: "int x;")])
print(len(build.builds))
"""


def builds_of_processes(count: int, sources: Path) -> list[int]:
    """How many kernels each of `count` processes builds that ask for one kernel at once."""
    command = [sys.executable, "-c", PROCESS, str(Path(__file__).parent), str(sources)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(count)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    return [int(process.communicate(timeout=60)[0]) for process in processes]


def test_processes_that_want_one_kernel_compile_it_once(sources: Path, cache_root: Path) -> None:
    builds = builds_of_processes(4, sources)
    assert sum(builds) == 1
    assert len(entries(cache_root)) == 1


def test_racing_processes_without_locks_publish_one_whole_entry(
    sources: Path, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_LOCK_DIR", os.devnull + "/locks")
    builds = builds_of_processes(2, sources)
    assert builds == [1, 1]
    assert len(entries(cache_root)) == 1
    assert list((cache_root / "v1" / ".staging").iterdir()) == []


def test_where_nothing_can_be_written_kernels_still_load(
    new_cache, fake_build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", os.devnull + "/cache")
    cache = new_cache()
    load(cache)
    load(cache, render=never)
    assert "kernels are not kept" in caplog.text


def test_sources_edited_during_a_build_keep_it_out_of_the_cache(
    new_cache, fake_build, sources: Path, cache_root: Path
) -> None:
    fake_build.before = lambda: (sources / "include/fajit/a.h").write_text("int y;") and None
    load(new_cache())
    assert entries(cache_root) == []


def test_never_compiles_nothing_but_loads_what_is_there(
    new_cache, fake_build, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    with pytest.raises(MissingKernelError, match=r"cpu:avx2.*FLASHATTN_JIT_COMPILE"):
        load(new_cache(), render=never)
    assert not cache_root.exists()
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "missing")
    path = load(new_cache())
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    assert load(new_cache(), render=never) == path


def test_without_a_compiler_what_is_there_loads(new_cache, monkeypatch: pytest.MonkeyPatch) -> None:
    path = load(new_cache())
    monkeypatch.setenv("FLASHATTN_JIT_CXX", "no-such-compiler")
    assert load(new_cache(), render=never) == path


def test_always_compiles_what_is_there(
    new_cache, fake_build, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(new_cache())
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "always")
    cache = new_cache()
    load(cache)
    load(cache, render=never)
    assert len(fake_build.builds) == 2
    assert len(entries(cache_root)) == 1


def test_always_replaces_a_corrupt_entry(
    new_cache, fake_build, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(load(new_cache())).write_text("damaged")
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "always")
    load(new_cache())
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    assert load(new_cache(), render=never)
    (entry,) = entries(cache_root)
    files = json.loads(entry.joinpath("meta.json").read_text())["files"]
    assert set(files) == {"artifact.so", "kernel.cpp", "build.log"}


def test_an_unknown_mode_is_an_error(new_cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "sometimes")
    with pytest.raises(EnvironmentVariableError, match="missing, always, never"):
        load(new_cache())


def test_a_changed_cache_folder_takes_effect(
    new_cache, fake_build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(new_cache())
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path / "other"))
    load(new_cache())
    assert len(entries(tmp_path / "other")) == 1


def test_a_forked_child_waits_for_nobody(new_cache, fake_build) -> None:
    cache = new_cache()
    started, release = threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        release.wait()

    fake_build.before = hold
    thread = threading.Thread(target=load, args=(cache,))
    thread.start()
    started.wait()
    cache.reset_after_fork()  # what a child of fork() runs, with no thread left to release locks
    fake_build.before = lambda: None
    try:
        assert load(cache, spec='{"other":1}')
        assert cache._building == {}
    finally:
        release.set()
        thread.join()


@pytest.mark.parametrize("how", ["python", "compiler", "nobody", "removed"])
def test_where_there_is_no_room_a_private_build_serves(
    new_cache, fake_build, cache_root: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, how: str,
) -> None:  # fmt: skip
    class Disk:
        f_flag, f_frsize, f_bavail, f_files, f_favail = 0, 4096, 10, 0, 0

    def fail() -> None:
        (staging,) = (cache_root / "v1" / ".staging").iterdir()
        fake_build.before = lambda: None
        if how == "python":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if how == "compiler":
            staging.joinpath("build.log").write_text("x\nld: out.so: No space left on device\n")
        elif how == "nobody":
            monkeypatch.setattr(os, "statvfs", lambda path: Disk)
        else:
            shutil.rmtree(cache_root)
        raise BuildFailure("ld failed", None)

    fake_build.before = fail
    cache = new_cache()
    assert load(cache)
    assert load(cache, render=never)
    assert entries(cache_root) == []
    assert "kernels are not kept" in caplog.text
    assert how == "removed" or "No space left on device" in caplog.text
    monkeypatch.undo()


def test_an_error_of_the_compiler_is_no_lack_of_room(new_cache, fake_build) -> None:
    def fail() -> None:
        raise BuildFailure("'x' was not declared", None)

    fake_build.before = fail
    with pytest.raises(CompileError):
        load(new_cache())
    assert len(fake_build.builds) == 1


def test_a_folder_that_runs_no_code_is_not_built_in(
    new_cache, fake_build, cache_root: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    class NoExec:
        f_flag = os.ST_NOEXEC

    monkeypatch.setattr(os, "statvfs", lambda path: NoExec)
    assert load(new_cache())
    assert entries(cache_root) == []
    assert "noexec" in caplog.text


def test_a_wrong_limit_is_told_before_anything_is_built(
    new_cache, fake_build, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_MAX_BYTES", "much")
    with pytest.raises(EnvironmentVariableError, match="CACHE_MAX_BYTES='much'"):
        load(new_cache())
    assert fake_build.builds == []
    assert not cache_root.exists()


def test_an_entry_that_is_removed_while_it_is_read_is_a_miss(
    new_cache, fake_build, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may evict it: the entry is not corrupt."""
    from flashattn_jit.jit.cache import entry

    load(new_cache())
    parse = entry.parse_meta

    def remove_meanwhile(*arguments: object) -> object:
        monkeypatch.setattr(entry, "parse_meta", parse)
        meta = parse(*arguments)  # type: ignore[arg-type]
        shutil.rmtree(entries(cache_root)[0])
        return meta

    monkeypatch.setattr(entry, "parse_meta", remove_meanwhile)
    cache = new_cache()
    load(cache)
    assert cache.counters.corrupt == 0
    assert len(fake_build.builds) == 2
    assert len(entries(cache_root)) == 1
