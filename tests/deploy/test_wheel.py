"""Wheels of kernels: their files, installation by pip, and platform tags."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flashattn_jit as fa
from flashattn_jit.deploy.pack.wheel import pack_wheel, platform_tag
from flashattn_jit.errors import InputError, PackError
from flashattn_jit.jit.cache.pack_file import PackFile
from flashattn_jit.jit.cache.store import Store
from tests.deploy.caches import COMPILER, add_entry, contents

X86, ARM = 0x3E, 0xB7


def elf(machine: int = X86, *names: str) -> bytes:
    """The beginning of an ELF file and a table of strings."""
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00" + machine.to_bytes(2, "little")
    return head.ljust(64, b"\0") + b"\0" + b"".join(name.encode() + b"\0" for name in names)


def add(store: Store, name: str, target: str, artifact: bytes) -> None:
    """Adds a kernel with files that a wheel takes, and others that it leaves out."""
    more = {"kernel.ptx": b"// for an emulator", "resources.json": b"{}", "command": b"c++"}
    add_entry(store, name, target, artifact=artifact, more_files=more)


def artifacts(store: Store) -> dict[str, bytes]:
    return {name: content for name, content in contents(store.root).items() if ".so" in name}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The cache of this test, with two kernels whose artifacts begin like ELF files."""
    made = Store(tmp_path / "cache")
    add(made, "a", "cpu:avx2", elf(X86, "libc.so.6", "GLIBC_2.2.5"))
    add(made, "b", "cpu:avx512", elf(X86, "libgomp.so.1", "GLIBC_2.27"))
    return made


def test_a_wheel_is_what_pip_and_its_record_say(store: Store, tmp_path: Path) -> None:
    report = pack_wheel("Acme.Kernels", tmp_path, version="1.2rc1")
    path = tmp_path / "acme_kernels-1.2rc1-py3-none-manylinux_2_27_x86_64.whl"
    assert (report.path, report.entries, report.bytes) == (str(path), 2, path.stat().st_size)
    assert report.targets == (("cpu:avx2", 1), ("cpu:avx512", 1))
    with zipfile.ZipFile(path) as wheel:
        assert wheel.testzip() is None
        files = {name: wheel.read(name) for name in wheel.namelist()}
    info = "acme_kernels-1.2rc1.dist-info"
    assert list(files) == ["acme_kernels/kernels.pack", *(
        f"{info}/{name}" for name in ("METADATA", "WHEEL", "entry_points.txt", "RECORD")
    )]  # fmt: skip
    for name, digest, size in csv.reader(io.StringIO(files[f"{info}/RECORD"].decode())):
        if name == f"{info}/RECORD":
            assert (digest, size) == ("", "")
            continue
        made = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=")
        assert (digest, size) == (f"sha256={made.decode()}", str(len(files[name])))
    metadata = files[f"{info}/METADATA"].decode().splitlines()
    assert {"Name: Acme.Kernels", "Version: 1.2rc1",
            f"Requires-Dist: flashattn_jit=={fa.__version__}"} <= set(metadata)  # fmt: skip
    assert "Tag: py3-none-manylinux_2_27_x86_64" in files[f"{info}/WHEEL"].decode().splitlines()


def test_pip_installs_and_removes_it(store: Store, tmp_path: Path) -> None:
    path = pack_wheel("acme-kernels", tmp_path).path
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (site,) = home.glob("lib/python*/site-packages")

    def pip(*arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(home), *arguments]
        subprocess.run(command, check=True, capture_output=True)

    before = set(site.rglob("*"))
    pip("install", "--no-index", "--no-deps", path)
    with PackFile(site / "acme_kernels" / "kernels.pack") as pack:
        assert {f"v1/{COMPILER}/{e.key[:2]}/{e.key}/artifact.so": e.read("artifact.so")
                for e in pack.entries()} == artifacts(store)  # fmt: skip
    pip("uninstall", "--yes", "acme-kernels")
    assert set(site.rglob("*")) == before


def test_equal_kernels_make_equal_wheels(store: Store, tmp_path: Path) -> None:
    first = Path(pack_wheel("acme-kernels", tmp_path).path)
    content = first.read_bytes()
    first.unlink()
    assert Path(pack_wheel("acme-kernels", tmp_path).path).read_bytes() == content


def test_what_goes_in_is_chosen_as_for_a_pack(store: Store, tmp_path: Path) -> None:
    report = pack_wheel("acme-kernels", tmp_path, targets="cpu:avx512")
    assert report.targets == (("cpu:avx512", 1),)
    with pytest.raises(PackError, match="there is nothing to pack"):
        pack_wheel("acme-kernels", tmp_path, targets="sm_90")


@pytest.mark.parametrize("name", ["", "-a", "a-", "a b", "1a", "a/b", "ä", "../a", None])
def test_what_is_no_name_of_a_wheel_is_refused(store: Store, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="no name of a wheel"):
        pack_wheel(name, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize("name", ["flashattn_jit", "FlashAttn-JIT", "flashattn.jit"])
def test_the_packages_own_name_is_refused(store: Store, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="would replace this package"):
        pack_wheel(name, tmp_path)


@pytest.mark.parametrize("version", ["", "v1", "1.", "1-2", "1.0/x", "latest", 1])
def test_what_is_no_version_is_refused(store: Store, tmp_path: Path, version: str) -> None:
    with pytest.raises(InputError, match=r"must be numbers with dots"):
        pack_wheel("acme-kernels", tmp_path, version=version)


def test_a_folder_that_is_missing_is_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"mkdir -p .*/dist"):
        pack_wheel("acme-kernels", tmp_path / "dist")


def test_a_failure_leaves_nothing(store: Store, tmp_path: Path) -> None:
    next(store.root.rglob("artifact.so")).write_bytes(elf() + b"damaged")
    with pytest.raises(PackError, match="flashattn-jit cache verify"):
        pack_wheel("acme-kernels", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize(
    ("names", "tag"),
    [
        ((), "manylinux_2_17_x86_64"),
        (("libc.so.6", "libm.so.6", "libgomp.so.1", "GLIBC_2.2.5"), "manylinux_2_17_x86_64"),
        (("GLIBC_2.14", "GLIBC_2.34", "GLIBC_2.3.4"), "manylinux_2_34_x86_64"),
        (("libstdc++.so.6",), "linux_x86_64"),
        (("libcuda.so.1",), "linux_x86_64"),
        (("libomp.so",), "linux_x86_64"),
        (("GLIBC_PRIVATE",), "linux_x86_64"),
        (("GLIBC_ABI_DT_RELR",), "linux_x86_64"),
    ],
)
def test_the_platform_is_what_the_kernels_ask_for(names: tuple[str, ...], tag: str) -> None:
    assert platform_tag([elf(), elf(X86, *names)]) == tag


def test_a_wheel_is_for_one_kind_of_machine() -> None:
    assert platform_tag([elf(ARM)]) == "manylinux_2_17_aarch64"
    with pytest.raises(PackError, match="these kernels are for 2: aarch64, x86_64"):
        platform_tag([elf(ARM), elf(X86)])
    with pytest.raises(PackError, match="no wheel tag for kernels of riscv"):
        platform_tag([elf(0xF3)])
    with pytest.raises(PackError, match="none has an artifact"):
        platform_tag([])


def test_sources_and_logs_stay_behind(store: Store, tmp_path: Path) -> None:
    with zipfile.ZipFile(pack_wheel("acme-kernels", tmp_path).path) as wheel:
        wheel.extract("acme_kernels/kernels.pack", tmp_path)
    path = tmp_path / "acme_kernels" / "kernels.pack"
    with PackFile(path) as pack:
        for entry in pack.entries():
            assert set(entry.files) == {"artifact.so", "kernel.ptx", "resources.json", "meta.json"}
            assert set(entry.meta["files"]) == set(entry.files) - {"meta.json"}
    fa.unpack(path, tmp_path / "layer")
    for entry in Store(tmp_path / "layer").entries():
        Store(tmp_path / "layer").verify(entry.path)
