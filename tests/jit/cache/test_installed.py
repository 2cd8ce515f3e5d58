"""Packs of installed wheels: found by metadata, without an import, and checked as any pack."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import flashattn_jit as fa
from flashattn_jit import _C
from flashattn_jit.cli.kernels import listed
from flashattn_jit.inspect.doctor import cache as cache_checks
from flashattn_jit.inspect.doctor.check import Check
from flashattn_jit.jit.cache import installed_packs
from flashattn_jit.jit.cache.layers import Answer, PackLayer
from flashattn_jit.jit.cache.remote import layers
from flashattn_jit.jit.cache.store import Store
from flashattn_jit.jit.module import KernelCache
from tests.deploy.caches import COMPILER, add_entry

from .test_layers import pack_of, request, wanted

KERNELS = "flashattn_jit.kernels"


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_INSTALLED", "1")


def install(
    site: Path, name: str, kernel: str | None, *, version: str = "1.0", value: str = ""
) -> Path:
    """Writes the files that pip installs of a wheel with a pack of one kernel.

    Returns the path of the pack. kernel: None for a wheel whose pack is missing.
    """
    package = name.replace("-", "_").lower()
    info = site / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    info.joinpath("entry_points.txt").write_text(f"[{KERNELS}]\nkernels = {value or package}\n")
    path = site / package / "kernels.pack"
    path.parent.mkdir()
    if kernel is not None:
        store = Store(site.parent / f"store-{name}-{version}")
        add_entry(store, kernel)
        pack_of(store, path)
    return path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on `sys.path`."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    installed_packs._installed.cache_clear()
    return folder


def locations() -> list[str]:
    return [layer.location for layer in layers()][1:]


def key_of(name: str, store: Store) -> str:
    return add_entry(store, name).key


def answer(path: Path, key: str) -> Answer:
    (layer,) = [layer for layer in layers() if layer.location == str(path)]
    return layer.search(key, COMPILER)


def check_of_doctor() -> Check:
    (check,) = [c for c in cache_checks.layers() if c.name == "cache, installed"]
    return check


def test_a_pack_is_a_layer_by_being_installed(site: Path, tmp_path: Path) -> None:
    path = install(site, "Acme-Kernels", "a")
    key = key_of("a", Store(tmp_path / "elsewhere"))
    assert locations() == [str(path)]
    (found,) = answer(path, key).found
    assert (found.layer, found.path, found.key) == ("read_only", path, key)
    assert fa.cache_info().layers[1:] == (("read_only", str(path)),)
    assert [(one.layer, one.location, one.key) for one in listed()] == [("read_only", path, key)]


def test_layers_come_by_name_behind_those_that_a_variable_names(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, first = install(site, "b-kernels", "b"), install(site, "a-kernels", "a")
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_PATH", str(tmp_path))
    assert locations() == [str(tmp_path), str(first), str(second)]


def test_of_one_name_the_first_on_the_path_counts(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "a-kernels", "a")
    front = tmp_path / "front"
    path = install(front, "A_kernels", "b", version="2.0")
    monkeypatch.syspath_prepend(str(front))
    assert locations() == [str(path)]


def test_a_variable_switches_them_off(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "a-kernels", "a")
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_INSTALLED", "0")
    assert locations() == []
    assert "a-kernels" in check_of_doctor().detail
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_INSTALLED", "no")
    with pytest.raises(fa.FlashAttnJitError, match="FLASHATTN_JIT_CACHE_INSTALLED='no' must be"):
        layers()


def test_nothing_of_a_distribution_is_imported(site: Path, tmp_path: Path) -> None:
    path = install(site, "a-kernels", "a")
    path.with_name("__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert answer(path, key_of("a", Store(tmp_path / "elsewhere"))).found
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", ["../elsewhere", "/etc", "a..b", ".a", "a/b", "a:b", "a [b]"])
def test_a_value_that_names_no_package_is_no_layer(
    site: Path, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, "a-kernels", "a", value=value)
    install(site, "b-kernels", "b")
    assert [Path(place).parent.name for place in locations()] == ["b_kernels"]
    assert "a-kernels announces kernels in" in caplog.text


def test_metadata_that_cannot_be_read_hides_no_other(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = install(site, "a-kernels", "a").parents[1] / "a_kernels-1.0.dist-info"
    (broken / "entry_points.txt").write_bytes(f"[{KERNELS}]\nno value\n\xff".encode("latin-1"))
    path = install(site, "b-kernels", "b")
    assert locations() == [str(path)]
    assert "cannot be read" in caplog.text


def world_writable(path: Path) -> None:
    path.chmod(0o666)


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def elsewhere(path: Path) -> None:
    """Replaces the pack by a symlink to a folder that others may write to."""
    place = path.parents[2] / "open" / "kernels.pack"
    place.parent.mkdir(mode=0o777)
    place.parent.chmod(0o777)
    path.rename(place)
    path.symlink_to(place)


def of_a_group(path: Path) -> None:
    path.chmod(0o664)


def removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (world_writable, "others may write to it"),
        (of_a_group, "others may write to it"),
        (torn, "cut short"),
        (elsewhere, "others may write to"),
        (removed, "No such file"),
    ],
)
def test_a_pack_that_is_unsafe_or_damaged_is_refused(
    site: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    path = install(site, "a-kernels", "a")
    damage(path)
    refused = answer(path, key_of("a", Store(tmp_path / "elsewhere")))
    assert not refused.found
    assert refused.fault
    assert words in refused.reason


def test_a_pack_may_be_writable_to_the_group_that_may_write_to_this_package(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = install(site, "a-kernels", "a")
    key = key_of("a", Store(tmp_path / "elsewhere"))
    own = tmp_path / "_C.so"
    own.touch()
    monkeypatch.setattr(_C, "__file__", str(own))
    for mode, of_package, is_taken in (
        (0o664, 0o664, True),
        (0o664, 0o644, False),
        (0o666, 0o666, False),
    ):
        own.chmod(of_package)
        path.chmod(mode)
        os.utime(path, ns=(mode * 10**9 + of_package,) * 2)  # another mtime: it is opened again
        assert bool(answer(path, key).found) == is_taken
        assert (check_of_doctor().status == "error") != is_taken


def test_a_kernel_that_is_not_what_its_digest_says_is_refused(site: Path, tmp_path: Path) -> None:
    path = install(site, "a-kernels", "a")
    key = key_of("a", Store(tmp_path / "elsewhere"))
    content = bytearray(path.read_bytes())
    content[content.index(f"{key}/artifact.so".encode()) + 300] ^= 1
    path.write_bytes(content)
    refused = answer(path, key)
    assert not refused.found
    assert "artifact.so" in str(refused.corrupt[0])


@pytest.mark.parametrize("damage", [world_writable, torn, removed])
def test_doctor_says_what_is_wrong_with_one(site: Path, damage: Callable[[Path], None]) -> None:
    path = install(site, "a-kernels", "a")
    damage(path)
    check = check_of_doctor()
    assert check.status == "error"
    assert str(path) in check.detail
    assert check.remedy


def test_doctor_says_that_kernels_are_of_another_version(site: Path) -> None:
    install(site, "a-kernels", "a", version="0.9")
    check = check_of_doctor()
    assert check.status == "warning"
    assert "a-kernels 0.9 are of another version of flashattn_jit" in check.detail


def test_a_pack_inside_an_archive_on_the_path_is_refused(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "a-kernels", "a")
    archive = tmp_path / "site.zip"
    with zipfile.ZipFile(archive, "w") as made:
        for path in site.rglob("*"):
            made.write(path, path.relative_to(site))
    monkeypatch.syspath_prepend(str(archive))
    path = archive / "a_kernels" / "kernels.pack"
    assert locations() == [str(path)]
    refused = answer(path, key_of("a", Store(tmp_path / "elsewhere")))
    assert refused.fault
    assert "Not a directory" in refused.reason


def test_a_kernel_that_the_users_folder_has_asks_for_no_distribution(
    new_cache: Callable[[], KernelCache], site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_cache().load_stepping([wanted()])

    def looked() -> None:
        raise AssertionError("a hit looks at no distribution")

    monkeypatch.setattr(installed_packs, "installed_packs", looked)
    cache = new_cache()
    cache.load_stepping([request()])
    assert cache.counters.hits["user"] == 1


def test_a_refused_pack_is_warned_of_and_the_kernel_is_compiled(
    new_cache: Callable[[], KernelCache], site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = install(site, "a-kernels", "a")
    world_writable(path)
    with caplog.at_level(logging.WARNING):
        new_cache().load_stepping([wanted()])
    assert f"{path} is not searched for kernels" in caplog.text


def test_a_broken_one_is_named_and_left_by_lists(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = install(site, "acme-kernels", "k")
    missing = install(site, "broken-kernels", None)
    assert [str(one.location) for one in listed() if one.layer != "user"] == [str(sound)]
    assert f"left: the installed kernels {missing}" in capsys.readouterr().err


def test_trust_of_a_pack_does_not_depend_on_who_opened_it_first(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = install(site, "acme-kernels", "k")
    opened = []
    monkeypatch.setattr(
        "flashattn_jit.jit.cache.layers.check_file",
        lambda path, *, installed=False: opened.append(installed),
    )
    PackLayer(path, installed=True).pack()
    PackLayer(path).pack()
    assert opened == [True, False]
