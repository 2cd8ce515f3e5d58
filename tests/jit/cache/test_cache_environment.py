"""Environment variables of the cache: sizes, search paths, URLs, times; missing home folders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashattn_jit import env
from flashattn_jit.errors import EnvironmentVariableError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("1k", 1 << 10),
        ("500M", 500 << 20),
        ("2GiB", 2 << 30),
        ("1 TB", 1 << 40),
    ],
)
def test_sizes_have_units(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    assert env.cache_max_bytes() is None
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_MAX_BYTES", text)
    assert env.cache_max_bytes() == size


@pytest.mark.parametrize("text", ["much", "-1", "1.5G", "1X", "١٢", "1e9", "9" * 30])
def test_other_sizes_are_told(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_MAX_BYTES", text)
    with pytest.raises(EnvironmentVariableError, match=r"CACHE_MAX_BYTES=.*number of bytes"):
        env.cache_max_bytes()


def test_the_search_path_is_in_order_and_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert env.cache_path() == ()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_PATH", "/a::b:~/c:")
    assert env.cache_path() == (Path("/a"), tmp_path / "b", Path.home() / "c")


def test_the_remote_is_off_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.cache_remote() is None
    assert env.cache_remote_timeout_s() == 20
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_REMOTE", "s3://bucket/kernels/")
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_REMOTE_TIMEOUT_S", "2.5")
    assert env.cache_remote() == "s3://bucket/kernels"
    assert env.cache_remote_timeout_s() == 2.5
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_REMOTE_TIMEOUT_S", "soon")
    with pytest.raises(EnvironmentVariableError, match="CACHE_REMOTE_TIMEOUT_S='soon'"):
        env.cache_remote_timeout_s()


def test_manifests_are_recorded_where_a_file_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert env.record_path() is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHATTN_JIT_RECORD", "m.jsonl")
    assert env.record_path() == tmp_path / "m.jsonl"


def test_every_variable_has_an_entry_in_the_list() -> None:
    assert env.__doc__ is not None
    documented = re.findall(r"^\* `(FLASHATTN_JIT_\w+)`: ", env.__doc__, re.MULTILINE)
    assert documented == list(env.VARIABLES)


def test_without_a_home_the_folder_is_one_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FLASHATTN_JIT_CACHE_DIR")
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    import pwd

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    folder = env.cache_dir()
    assert folder.is_absolute()
    with pytest.raises(OSError):
        folder.mkdir(parents=True)
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", "~/kernels")
    with pytest.raises(EnvironmentVariableError, match="has no home"):
        env.cache_dir()
