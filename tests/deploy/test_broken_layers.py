"""The error of a kernel that is missing begins with the pack that could not be used."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flashattn_jit.codegen.spec import BuildRequest
from flashattn_jit.deploy.pack.pack import pack
from flashattn_jit.deploy.pack.unpack import unpack
from flashattn_jit.errors import CompileError, InputError, MissingKernelError, PackError
from flashattn_jit.inspect.doctor import cache as cache_checks
from flashattn_jit.jit.module import KernelCache
from tests.harness import processes

SOURCE = (Path(__file__).parents[1] / "jit" / "minimal_artifact.cpp").read_text()


def torn(path: Path) -> str:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return f"pack {path}: it is cut short"


def empty(path: Path) -> str:
    path.write_bytes(b"")
    return f"pack {path}: it is cut short, or no pack: "


def writable(path: Path) -> str:
    path.chmod(0o666)
    return f"pack {path} has mode 0666: others may write to it"


def absent(path: Path) -> str:
    path.unlink()
    return f"{path}: there is no such folder"


@pytest.fixture
def packed(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack that is a layer behind an empty cache."""
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_PATH", str(packed))
    return packed


def load() -> object:
    return KernelCache().load_stepping(
        [BuildRequest("{}", "cpu/attention.cpp.j2", "cpu:generic", lambda: SOURCE)]
    )[1]


@pytest.mark.parametrize("damage", [torn, empty, writable, absent])
def test_a_kernel_that_may_not_be_compiled(damage, packed, monkeypatch):
    cause = damage(packed)
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    with pytest.raises(MissingKernelError) as caught:
        load()
    headline, second, *_ = str(caught.value).splitlines()
    assert cause in headline
    assert "is in no layer of the cache" in second
    assert [layer.fault for layer in caught.value.layers] == [False, True]


@pytest.mark.parametrize("damage", [torn, empty, writable, absent])
def test_a_kernel_that_cannot_be_compiled(damage, packed, monkeypatch):
    cause = damage(packed)
    monkeypatch.setenv("FLASHATTN_JIT_CXX", "no-such-compiler")
    with pytest.raises(CompileError) as caught:
        load()
    headline, second, *_ = str(caught.value).splitlines()
    assert cause in headline
    assert "no-such-compiler" in second
    assert caught.value.log_path


def test_a_kernel_that_is_compiled_warns_once(packed, caplog):
    cause = torn(packed)
    with caplog.at_level(logging.WARNING, "flashattn_jit"):
        load()
        load()
    told = [r.getMessage() for r in caplog.records if cause in r.getMessage()]
    assert len(told) == 1, caplog.text
    assert told[0].startswith(f"{packed} is not searched for kernels: ")


def test_a_sound_pack_without_the_kernel_is_no_cause(packed, monkeypatch):
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    with pytest.raises(MissingKernelError, match=r"^kernel \w+ of variant for cpu:generic is in"):
        load()


@pytest.mark.parametrize("damage", [torn, empty, writable, absent])
def test_unpack_says_the_same(damage, packed, tmp_path):
    cause = damage(packed)
    with pytest.raises(PackError) as caught:
        unpack(packed, tmp_path / "out")
    headline = str(caught.value).splitlines()[0]
    assert str(packed) in headline
    if damage is absent:
        assert "No such file or directory" in headline
        return
    assert cause in headline
    done = processes.run(
        ["-m", "flashattn_jit", "unpack", str(packed), "-d", str(tmp_path / "o")], timeout=60
    )
    assert done.returncode == 9
    assert cause in done.stderr.splitlines()[0]


def test_doctor_says_what_to_do(packed):
    cause = writable(packed)
    (check,) = [c for c in cache_checks.layers() if c.name == "cache, read-only"]
    assert check.status == "error"
    assert check.detail.startswith(cause)
    assert f"chmod go-w {packed}" in check.remedy
    packed.chmod(0o644)
    cause = torn(packed)
    (check,) = [c for c in cache_checks.layers() if c.name == "cache, read-only"]
    assert check.detail.startswith(cause)
    assert "pack it again" in check.remedy


# --- where a pack is written ---------------------------------------------------------------------


def test_pack_makes_no_missing_folders(store, tmp_path):
    path = tmp_path / "missing" / "too" / "kernels.pack"
    with pytest.raises(PackError) as caught:
        pack(path)
    words = str(caught.value)
    assert f"its folder {path.parent} does not exist" in words
    assert f"mkdir -p {path.parent}" in words
    done = processes.run(["-m", "flashattn_jit", "pack", str(path)], timeout=60)
    assert done.returncode == 9, done.stderr
    assert "does not exist" in done.stderr.splitlines()[0]
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("below", ["kernels.pack", "a/kernels.pack", "a/b/kernels.pack"])
def test_no_folder_is_proposed_that_cannot_be_made(store, tmp_path, below):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name in ("file", "link"):
        with pytest.raises(PackError, match=rf"{name} is no folder; correct the path") as caught:
            pack(tmp_path / name / below)
        assert "mkdir" not in str(caught.value)


@pytest.mark.parametrize("path", [None, 3, b"kernels.pack", ["kernels.pack"]], ids=repr)
def test_what_is_no_path_is_refused(store, tmp_path, path):
    packed = tmp_path / "kernels.pack"
    pack(packed)
    with pytest.raises(InputError, match=r"^path must be a str or an os\.PathLike, got "):
        pack(path)
    with pytest.raises(InputError, match=r"^path must be a str or an os\.PathLike, got "):
        unpack(path)
    if path is not None:
        with pytest.raises(InputError, match=r"^directory must be a str or an os\.PathLike, got "):
            unpack(packed, path)


@pytest.mark.parametrize(
    ("path", "words"), [("", "empty"), ("x\0y", "no file name"), ("x\ud800", "no file name")]
)
def test_what_no_file_can_be_called_is_refused(store, tmp_path, path, words):
    packed = tmp_path / "kernels.pack"
    pack(packed)
    with pytest.raises(PackError, match=f"^path .*{words}"):
        pack(path)
    with pytest.raises(PackError, match=f"^path .*{words}"):
        unpack(path)
    with pytest.raises(PackError, match=f"^directory .*{words}"):
        unpack(packed, path)


def test_a_home_that_is_not_known_is_refused(store, tmp_path):
    packed = tmp_path / "kernels.pack"
    pack(packed)
    with pytest.raises(PackError, match="home folder"):
        unpack(packed, "~no-such-user-here/kernels")


def test_pack_into_what_is_no_folder(store, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PackError, match=r"its folder .*file is no folder"):
        pack(tmp_path / "file" / "kernels.pack")
    with pytest.raises(PackError, match="it is a folder; name a file in it"):
        pack(tmp_path)
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
