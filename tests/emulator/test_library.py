"""The emulator's library is compiled once and cached. A small library stands in for it here."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flashattn_jit import env
from flashattn_jit.errors import CompileError, MissingKernelError, UnsafeCacheError
from flashattn_jit.jit.emulator import library
from tests.harness.private_cache import private_environment

__all__ = ["private_environment"]

SMALL = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of sources in place of the emulator's."""
    folder = tmp_path / "sources"
    folder.mkdir()
    folder.joinpath("small.cpp").write_text(SMALL)
    monkeypatch.setattr(env, "emulator_dir", lambda: folder)
    library._document.cache_clear()
    yield folder
    library._document.cache_clear()
    library._not_kept.clear()


def obtain() -> int:
    return int(library._obtain().answer())


def artifacts(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("cache/emulator/v1/[!.]*/??/*/artifact.so"))


def test_it_is_compiled_once_and_found_by_its_sources(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert obtain() == 42
    (artifact,) = artifacts(tmp_path)
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    monkeypatch.setenv("FLASHATTN_JIT_CXX", "/nowhere/c++")
    assert obtain() == 42
    sources.joinpath("small.cpp").write_text(SMALL.replace("42", "43"))
    library._document.cache_clear()
    with pytest.raises(MissingKernelError, match=r"emulator is not in .*COMPILE=never"):
        obtain()
    monkeypatch.delenv("FLASHATTN_JIT_COMPILE")
    with pytest.raises(CompileError, match=r"emulator is compiled.*no C\+\+ compiler was found"):
        obtain()
    monkeypatch.delenv("FLASHATTN_JIT_CXX")
    assert obtain() == 43
    assert artifact in artifacts(tmp_path) and len(artifacts(tmp_path)) == 2


def test_one_that_was_damaged_is_compiled_again(sources: Path, tmp_path: Path) -> None:
    assert obtain() == 42
    (artifact,) = artifacts(tmp_path)
    sound = artifact.read_bytes()
    artifact.unlink()  # the file that is mapped stays as it is
    artifact.write_bytes(sound[:-1] + b"x")
    artifact.chmod(0o700)
    assert obtain() == 42
    assert artifact.read_bytes() == sound


def test_a_cache_that_cannot_be_written_is_no_error(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(blocked / "cache"))
    assert obtain() == 42
    assert "the emulator is not kept" in caplog.text


def test_a_mistake_in_it_is_named_with_its_place(sources: Path, tmp_path: Path) -> None:
    sources.joinpath("small.cpp").write_text("int f() { return undeclared; }\n")
    with pytest.raises(CompileError, match="'undeclared' was not declared") as caught:
        obtain()
    assert caught.value.location == (str(sources / "small.cpp"), 1)
    assert "undeclared" in Path(caught.value.log_path).read_text()
    assert not artifacts(tmp_path)


@pytest.mark.parametrize("writable", [True, False])
def test_two_that_ask_at_once_compile_one(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    """The lock between processes excludes threads as well."""
    if not writable:
        blocked = tmp_path / "file"
        blocked.touch()
        monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(blocked / "cache"))
    wrapper, calls = tmp_path / "c++", tmp_path / "calls"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec c++ "$@"\n')
    wrapper.chmod(0o700)
    monkeypatch.setenv("FLASHATTN_JIT_CXX", str(wrapper))
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: obtain(), range(2))) == [42, 42]
    assert sum("unit_0.cpp" in line for line in calls.read_text().splitlines()) == 1


def test_one_that_cannot_be_loaded_is_compiled_again(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self: object, path: str, *more: object) -> None:
        raise OSError("libstdc++.so.9: cannot open shared object file")

    assert obtain() == 42
    with monkeypatch.context() as patch:
        patch.setenv("FLASHATTN_JIT_COMPILE", "never")
        patch.setattr(library.ctypes.CDLL, "__init__", refuses)
        with pytest.raises(MissingKernelError, match="cannot be loaded from there"):
            obtain()
    assert obtain() == 42


def test_a_cache_that_others_can_write_to_is_refused(sources: Path, tmp_path: Path) -> None:
    assert obtain() == 42
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(UnsafeCacheError):
        obtain()


def test_a_library_that_may_be_swapped_is_loaded_from_memory(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert obtain() == 42
    loaded: list[str] = []
    real = library.ctypes.CDLL
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: loaded.append(path) or real(path))
    tmp_path.chmod(0o777)
    try:
        assert obtain() == 42
    finally:
        tmp_path.chmod(0o700)
    assert not loaded[-1].startswith(str(tmp_path))
