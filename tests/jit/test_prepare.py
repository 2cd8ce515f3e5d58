"""`prepare` puts kernels into the cache without loading them; `loaded` lists the loaded ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashattn_jit.codegen.spec import BuildRequest
from flashattn_jit.errors import AbiError, CacheError, CompileError, MissingKernelError
from flashattn_jit.jit import module
from flashattn_jit.jit.cache import layers, locks
from flashattn_jit.jit.cache.store import Store
from flashattn_jit.jit.compilation import toolchain
from flashattn_jit.jit.compilation.compile_job import BuildFailure
from flashattn_jit.jit.module import KernelCache, Loaded
from tests.harness import processes
from tests.jit.cache.entries import tree

NewCache = Callable[[], KernelCache]


def request(spec: str = "{}", source: str = "int x;", target: str = "cpu:avx2") -> BuildRequest:
    return BuildRequest(spec, "kernel.cpp.j2", target, lambda: source)


def never_loaded(path: str) -> None:
    raise AssertionError(f"{path} is not to be loaded")


@pytest.fixture
def new_cache(sources: Path, fake_build) -> NewCache:
    """Caches that cannot load anything."""
    return lambda: KernelCache(build=fake_build, load=never_loaded)  # type: ignore[arg-type]


def test_a_prepared_kernel_is_in_the_folder_and_not_in_memory(
    new_cache, fake_build, cache_root: Path
) -> None:
    cache = new_cache()
    assert cache.find_prepared([request()]) is None
    assert not cache_root.exists()
    prepared = cache.prepare([request()])
    found = prepared.found
    (entry,) = Store(cache_root).entries()
    assert found.path == entry.path
    assert found.key == entry.key == fake_build.builds[0]
    assert (found.layer, prepared.tile, prepared.compile_s) == ("compiler", 0, 0.25)
    assert found.artifact_bytes == entry.artifact.stat().st_size
    assert cache.find("{}") is None
    assert list(cache.loaded()) == []


def test_one_that_is_there_is_found_and_not_built(new_cache, fake_build, cache_root) -> None:
    first = new_cache().prepare([request()]).found
    before = tree(cache_root)
    for prepared in (new_cache().prepare([request()]), new_cache().find_prepared([request()])):
        assert prepared is not None
        found = prepared.found
        assert (found.layer, found.key, found.path) == ("user", first.key, first.path)
        assert prepared.compile_s == 0.0
    assert len(fake_build.builds) == 1
    assert tree(cache_root) == before


def test_a_target_that_this_machine_cannot_run_is_prepared(
    new_cache, fake_build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "host_targets", lambda: ("cpu:generic",))
    assert new_cache().prepare([request(target="cpu:avx512_bf16")]).found.layer == "compiler"
    assert new_cache().prepare([request(target="cpu:avx512_bf16")]).found.layer == "user"


def test_steps_down_are_followed(new_cache, fake_build) -> None:
    tiles = [request('{"t":2}', "SPILLS"), request('{"t":1}', "fits")]
    prepared = new_cache().prepare(tiles)
    assert (prepared.tile, prepared.found.key) == (1, fake_build.builds[1])
    again = new_cache().find_prepared(tiles)
    assert again is not None
    assert (again.tile, again.found.key) == (1, prepared.found.key)
    assert new_cache().find_prepared([tiles[0], request('{"t":0}')]) is None


def test_always_builds_and_finds_nothing_prepared(
    new_cache, fake_build, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_cache().prepare([request()])
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "always")
    assert new_cache().find_prepared([request()]) is None
    new_cache().prepare([request()])
    assert len(fake_build.builds) == 2


def test_never_prepares_nothing(new_cache, cache_root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    with pytest.raises(MissingKernelError):
        new_cache().prepare([request()])
    assert not cache_root.exists()


def test_what_cannot_be_kept_is_an_error(
    new_cache, fake_build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", os.devnull + "/cache")
    with pytest.raises(CacheError, match=r"cannot be kept in /dev/null/cache.*CACHE_DIR"):
        new_cache().prepare([request()])
    assert fake_build.builds == []


def test_an_artifact_of_another_kernel_is_never_published(
    new_cache, fake_build, cache_root: Path
) -> None:
    fake_build.content = "artifact of something else"
    with pytest.raises(AbiError, match="another kernel"):
        new_cache().prepare([request()])
    assert list(Store(cache_root).entries()) == []


def test_a_failed_build_is_told_as_ever(new_cache, fake_build) -> None:
    def fail() -> None:
        raise BuildFailure("no", ("hook:Mine", 3))

    fake_build.before = fail
    with pytest.raises(CompileError, match="hook:Mine:3: no"):
        new_cache().prepare([request()])


def test_loaded_tells_what_was_asked_for(sources: Path, fake_build) -> None:
    from .conftest import FakeModule

    cache = KernelCache(build=fake_build, load=FakeModule)  # type: ignore[arg-type]
    tiles = [request('{"t":2}', "SPILLS"), request('{"t":1}', "fits")]
    other = request('{"other":1}')
    for _ in range(2):
        _, module = cache.load_stepping(tiles)
        _, second = cache.load_stepping([other])
    assert list(cache.loaded()) == [Loaded(tiles[0], module), Loaded(other, second)]
    cache.forget()
    assert list(cache.loaded()) == []


def test_hits_are_counted_by_layer(sources: Path, fake_build) -> None:
    from .conftest import FakeModule

    def new() -> KernelCache:
        return KernelCache(build=fake_build, load=FakeModule)  # type: ignore[arg-type]

    cache = new()
    for _ in range(3):
        cache.load_stepping([request()])
        cache.load_stepping([BuildRequest("{}", "kernel.cpp.j2", "cpu:avx2", lambda: "int x;")])[1]
    assert cache.counters.hits == {"memory": 5, "user": 0, "read_only": 0, "remote": 0}
    assert (cache.counters.misses, cache.counters.compiles, cache.counters.waits) == (1, 1, 0)
    again = new()
    again.load_stepping([request()])
    assert again.counters.hits["user"] == 1
    assert again.counters.misses == 0


def test_waits_for_other_builders_are_counted(
    sources: Path, fake_build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from .conftest import FakeModule

    monkeypatch.setenv("FLASHATTN_JIT_LOCK_WAIT_S", "0.05")
    cache = KernelCache(build=fake_build, load=FakeModule)  # type: ignore[arg-type]

    def ask_again() -> None:
        # A second cache of this process asks while the first one holds the lock.
        fake_build.before = lambda: None
        other = KernelCache(build=fake_build, load=FakeModule)  # type: ignore[arg-type]
        other.load_stepping([request()])
        assert other.counters.waits == 1
        assert other.counters.lock_wait_s >= 0.05

    fake_build.before = ask_again
    cache.load_stepping([request()])
    assert (cache.counters.waits, cache.counters.lock_wait_s) == (0, 0.0)
    assert locks.folder(make=False) is not None


def test_looking_for_the_lock_folder_makes_none(tmp_path: Path) -> None:
    assert locks.folder(make=False) is None
    assert not tmp_path.joinpath("locks").exists()
    assert locks.folder() == tmp_path / "locks"


def test_building_for_a_target_loads_nothing_into_the_process(tmp_path: Path) -> None:
    """A real build: the artifact is not mapped, and torch's loader has not loaded it."""
    program = (
        "from pathlib import Path\n"
        "from flashattn_jit.jit.compilation import toolchain\n"
        "from flashattn_jit.jit.compilation.toolchain import find_compiler\n"
        "import sys, torch\n"
        "source = Path(sys.argv[1]).read_text()\n"
        "loaded = set(torch.ops.loaded_libraries)\n"
        "toolchain.build(source, '0' * 64, 'cpu:generic', find_compiler(), Path(sys.argv[2]))\n"
        "assert (Path(sys.argv[2]) / 'artifact.so').is_file()\n"
        "assert set(torch.ops.loaded_libraries) == loaded\n"
        "print('kernel.so' in Path('/proc/self/maps').read_text(), sys.argv[2] in "
        "Path('/proc/self/maps').read_text())\n"
    )
    staging = tmp_path / "staging"
    staging.mkdir()
    source = Path(__file__).with_name("minimal_artifact.cpp")
    done = processes.run(["-c", program, str(source), str(staging)], check=True)
    assert done.stdout == "False False\n"


def test_on_an_empty_cache_the_compiler_is_asked_by_the_one_process_that_builds(
    new_cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that wait for the lock read the compiler's identity from the cache afterwards."""
    events: list[str] = []
    lock, identify = module.build_lock, toolchain.identify

    @contextlib.contextmanager
    def noted_lock(*arguments: object) -> Iterator[float]:
        events.append("lock")
        with lock(*arguments) as waited:  # type: ignore[arg-type]
            yield waited

    def noted_identify(*arguments: object) -> object:
        events.append("ask")
        return identify(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "build_lock", noted_lock)
    monkeypatch.setattr(toolchain, "identify", noted_identify)
    new_cache().prepare([request()])
    assert events == ["lock", "ask"]
    events.clear()
    new_cache().prepare([request()])
    new_cache().prepare([request('{"other":1}')])
    assert events == ["lock"]
