"""Folders and packs behind the user's own folder: which one serves, and the others' reasons."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flashattn_jit import _C
from flashattn_jit.codegen.spec import BuildRequest
from flashattn_jit.deploy.pack.pack import members, replacing
from flashattn_jit.errors import MissingKernelError, TargetError, UnsafeCacheError
from flashattn_jit.jit.cache import layers as layers_module
from flashattn_jit.jit.cache import store as store_module
from flashattn_jit.jit.cache.layers import FolderLayer, PackLayer, found_in_folder
from flashattn_jit.jit.cache.pack_file import write_archive
from flashattn_jit.jit.cache.remote import layers
from flashattn_jit.jit.cache.store import Store
from flashattn_jit.jit.module import KernelCache

from .entries import CLANG, GCC, adopt, digest, key_of, make, tree

NewCache = Callable[[], KernelCache]
TARGET = "cpu:generic"
KEY = key_of()


def request(spec: str = "{}", target: str = TARGET) -> BuildRequest:
    """A kernel request that must be a hit: rendering it is an error."""

    def never() -> str:
        raise AssertionError("a hit renders nothing")

    return BuildRequest(spec, "kernel.cpp.j2", target, never)


def wanted(spec: str = "{}", target: str = TARGET) -> BuildRequest:
    """A kernel request that may be built."""
    return BuildRequest(spec, "kernel.cpp.j2", target, lambda: "int x;")


def use(monkeypatch: pytest.MonkeyPatch, *places: Path) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_PATH", os.pathsep.join(map(str, places)))


def pack_of(store: Store, path: Path) -> Path:
    """A pack of all that a store holds."""
    found = [found_in_folder(store.verify(e.path), "user") for e in store.entries()]
    with replacing(path) as file:
        write_archive(file, members(found))
    return path


@pytest.fixture
def site(new_cache: NewCache, cache_root: Path, tmp_path: Path) -> Path:
    """A folder with the kernel "{}", built by a cache of its own; the user's folder is gone."""
    new_cache().load_stepping([wanted()])
    cache_root.rename(tmp_path / "site")
    return tmp_path / "site"


def test_the_order_is_user_then_path_then_remote(
    tmp_path: Path, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopt(Store(tmp_path / "site"), make())
    pack = pack_of(Store(tmp_path / "site"), tmp_path / "kernels.pack")
    use(monkeypatch, tmp_path / "site", pack, tmp_path / "missing")
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_REMOTE", "memory://kernels/")
    found = [(layer.name, layer.location) for layer in layers()]
    assert found == [
        ("user", str(cache_root)),
        ("read_only", str(tmp_path / "site")),
        ("read_only", str(pack)),
        ("read_only", str(tmp_path / "missing")),
        ("remote", "memory://kernels"),
    ]


@pytest.mark.parametrize("kind", ["folder", "pack"])
@pytest.mark.parametrize("mode", ["missing", "never"])
def test_a_read_only_layer_serves_and_nothing_is_written(
    new_cache, fake_build, site: Path, cache_root: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, kind: str, mode: str,
) -> None:  # fmt: skip
    place = site if kind == "folder" else pack_of(Store(site), tmp_path / "kernels.pack")
    use(monkeypatch, place)
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", mode)
    before = tree(tmp_path)
    cache = new_cache()
    _, module = cache.load_stepping([request()])
    assert module.key == fake_build.builds[0]
    assert len(fake_build.builds) == 1
    assert tree(tmp_path) == before
    assert not cache_root.exists()
    assert cache.counters.hits == {"memory": 0, "user": 0, "read_only": 1, "remote": 0}
    assert cache.last_source == "disk"


def test_a_module_of_a_pack_can_be_asked_for_its_other_files(
    new_cache, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, pack_of(Store(site), tmp_path / "kernels.pack"))
    cache = new_cache()
    _, module = cache.load_stepping([request()])
    origin = cache.origin(module)
    assert origin is not None
    assert origin.path == tmp_path / "kernels.pack"
    assert origin.read("kernel.cpp") == b"int x;"


def test_the_first_layer_that_can_serve_does(
    new_cache, fake_build, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "damaged"
    for entry in Store(site).entries():
        files = {name: (entry.path / name).read_bytes for name in entry.meta["files"]}
        Store(damaged).adopt(entry.key, entry.compiler_id, files, entry.meta)
    for artifact in damaged.rglob("artifact.so"):
        artifact.write_bytes(b"damaged")
    use(monkeypatch, tmp_path / "missing", damaged, site)
    before = tree(tmp_path)
    cache = new_cache()
    cache.load_stepping([request()])
    assert (cache.counters.corrupt, cache.counters.misses) == (1, 0)
    assert tree(tmp_path) == before


def test_a_miss_tells_of_every_layer_why(
    new_cache, site: Path, cache_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsafe, text = tmp_path / "unsafe", tmp_path / "text"
    unsafe.mkdir()
    unsafe.chmod(0o777)
    text.write_text("no pack")
    use(monkeypatch, site, tmp_path / "missing", unsafe, text)
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    with pytest.raises(MissingKernelError) as error:
        new_cache().load_stepping([request('{"head_dims":[64]}')])
    said = {Path(layer.location).name: layer.reason for layer in error.value.layers}
    assert said["cache"] == said["missing"] == "there is no such folder"
    assert said["site"] == "it has no such kernel"
    assert "chmod go-w" in said["unsafe"]
    assert "no pack" in said["text"]
    assert [layer.layer for layer in error.value.layers] == ["user"] + 4 * ["read_only"]
    for layer in error.value.layers:
        assert f"{layer.layer} {layer.location}: {layer.reason}" in str(error.value)
    assert not cache_root.exists()


def test_a_corrupt_entry_in_never_mode_is_told_and_left_where_it_is(
    new_cache, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module = new_cache().load_stepping([wanted()])
    Path(module.path).write_bytes(b"damaged")
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    before = tree(cache_root)
    with pytest.raises(MissingKernelError, match=r"corrupt: artifact\.so is not what"):
        new_cache().load_stepping([request()])
    assert tree(cache_root) == before


def test_never_takes_the_newest_sound_build_of_any_compiler(
    new_cache, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = Store(site).entries()
    files = {name: (entry.path / name).read_bytes for name in entry.meta["files"]}
    for compiler, created in ((CLANG, "9999"), (GCC, "0001")):
        meta = {
            **entry.meta, "created": created,
            "compiler": {"id": compiler.id, "version": compiler.version},
        }  # fmt: skip
        Store(site).adopt(entry.key, compiler.id, files, meta)
    use(monkeypatch, site)
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    _, module = new_cache().load_stepping([request()])
    assert CLANG.id in module.path
    Path(module.path).write_bytes(b"damaged")
    _, module = new_cache().load_stepping([request()])
    assert entry.compiler_id in module.path


def test_what_cannot_be_read_is_a_miss_with_its_reason_and_hides_nothing(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = Store(site).entries()
    files = {name: (entry.path / name).read_bytes for name in entry.meta["files"]}
    meta = {**entry.meta, "compiler": {"id": CLANG.id, "version": ""}, "created": "9999"}
    newest = Store(site).adopt(entry.key, CLANG.id, files, meta)
    read = store_module.read_entry

    def broken_disk(path: Path, *rest: object, **options: object) -> object:
        if path == newest.path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(store_module, "read_entry", broken_disk)
    layer = FolderLayer("user", Store(site))
    assert [found.path for found in layer.search(entry.key, None).found] == [entry.path]
    answer = layer.search(entry.key, CLANG.id)
    assert (answer.found, answer.corrupt) == ((), ())
    assert "cannot be read" in answer.reason and "Input/output error" in answer.reason


def test_another_compilers_build_does_not_serve_where_there_is_a_compiler(
    new_cache, fake_build, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = Store(site).entries()
    files = {name: (entry.path / name).read_bytes for name in entry.meta["files"]}
    meta = {**entry.meta, "compiler": {"id": CLANG.id, "version": ""}}
    other = Store(tmp_path / "other")
    other.adopt(entry.key, CLANG.id, files, meta)
    layer = FolderLayer("read_only", Store(other.root, read_only=True))
    reason = layer.search(entry.key, entry.compiler_id).reason
    assert CLANG.id in reason and entry.compiler_id in reason and "never" in reason
    pack = PackLayer(pack_of(other, tmp_path / "kernels.pack"))
    assert pack.search(entry.key, entry.compiler_id).reason == reason
    use(monkeypatch, other.root)
    new_cache().load_stepping([wanted()])
    assert len(fake_build.builds) == 2


def test_an_unsafe_user_folder_is_an_error_before_anything_is_built(
    new_cache, fake_build, cache_root: Path
) -> None:
    cache_root.mkdir()
    cache_root.chmod(0o777)
    with pytest.raises(UnsafeCacheError, match="chmod go-w"):
        new_cache().load_stepping([wanted()])
    assert fake_build.builds == []


def open_and_deleted(path: Path) -> int:
    """Descriptors of this process whose file was at `path`."""
    links = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return links.count(f"{path} (deleted)")


def test_a_pack_that_was_replaced_is_opened_anew(tmp_path: Path) -> None:
    adopt(Store(tmp_path / "one"), make('{"a":1}'))
    adopt(Store(tmp_path / "two"), make('{"a":2}'))
    path = pack_of(Store(tmp_path / "one"), tmp_path / "kernels.pack")
    layer = PackLayer(path)
    (before,) = layer.search(key_of('{"a":1}'), None).found
    assert not layer.search(key_of('{"a":2}'), None).found
    pack_of(Store(tmp_path / "two"), tmp_path / "new.pack").replace(path)
    assert layer.search(key_of('{"a":2}'), None).found
    assert not layer.search(key_of('{"a":1}'), None).found
    assert before.read("kernel.cpp") == b"int x;"
    assert open_and_deleted(path) == 1
    del before
    gc.collect()
    assert open_and_deleted(path) == 0


def test_packs_stay_open_however_many_there_are(tmp_path: Path) -> None:
    adopt(Store(tmp_path / "one"), make())
    content = pack_of(Store(tmp_path / "one"), tmp_path / "kernels.pack").read_bytes()
    some = [PackLayer(tmp_path / f"{i}.pack") for i in range(100)]
    for layer in some:
        layer.path.write_bytes(content)
        layer.path.chmod(0o600)
    first = [layer.pack() for layer in some]
    assert all(layer.pack() is pack for layer, pack in zip(some, first, strict=True))


@pytest.mark.parametrize("loose", ["parent", "v1", "compiler", "digits"])
def test_below_a_folder_that_others_write_what_was_verified_is_loaded(
    new_cache, fake_build, cache_root: Path, tmp_path: Path, loose: str
) -> None:
    """Others could replace our folder between the check and the loading of the artifact."""
    _, module = new_cache().load_stepping([wanted()])
    artifact = Path(module.path)
    assert artifact.is_relative_to(cache_root)
    place = {
        "parent": tmp_path,
        "v1": cache_root / "v1",
        "compiler": artifact.parents[2],
        "digits": artifact.parents[1],
    }[loose]
    place.chmod(0o777)
    try:
        _, module = new_cache().load_stepping([request()])
        assert module.path.startswith("/proc/self/fd/")
        _, module = new_cache().load_stepping([wanted('{"other":1}')])
        assert module.path.startswith("/proc/self/fd/") or loose in ("compiler", "digits")
        tmp_path.chmod(0o1777) if loose == "parent" else place.chmod(0o700)
        _, module = new_cache().load_stepping([request()])
        assert module.path == str(artifact)
    finally:
        tmp_path.chmod(0o700)


def test_names_that_cannot_be_are_reasons(
    new_cache, fake_build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tmp_path / ("a" * 300))
    new_cache().load_stepping([wanted()])
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path / ("b" * 300)))
    new_cache().load_stepping([wanted()])
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    with pytest.raises(MissingKernelError) as error:
        new_cache().load_stepping([request()])
    assert [layer.reason for layer in error.value.layers] == 2 * ["there is no such folder"]
    assert len(fake_build.builds) == 2


# --- what this machine cannot run ----------------------------------------------------------------


def test_a_cpu_without_the_instructions_gets_a_reason_and_no_code(
    new_cache, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_cache().load_stepping([wanted(target="cpu:avx2")])
    monkeypatch.setattr(layers_module, "host_targets", lambda: ("cpu:generic",))
    loads: list[str] = []
    cache = KernelCache(build=never_built, load=loads.append)  # type: ignore[arg-type]
    with pytest.raises(TargetError, match=r"instructions of cpu:avx2.*at most cpu:generic"):
        cache.load_stepping([request(target="cpu:avx2")])
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    with pytest.raises(MissingKernelError, match=r"instructions of cpu:avx2.*at most cpu:generic"):
        cache.load_stepping([request(target="cpu:avx2")])
    assert loads == []


def never_built(*_: object) -> None:
    raise AssertionError("nothing is to be built")


def elf(machine: int) -> bytes:
    """The first bytes of a 64-bit little-endian ELF file for a machine."""
    return b"\x7fELF\2\1\1" + bytes(11) + machine.to_bytes(2, "little") + bytes(44)


def test_code_for_another_machine_is_a_miss_and_stays(
    new_cache, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = Store(site).entries()
    content = elf(0x2A) + entry.key.encode()  # SuperH
    files = {"artifact.so": content}
    meta = {**entry.meta, "files": {"artifact.so": digest(content)}}
    Store(site).quarantine(entry.path)
    Store(site).adopt(entry.key, entry.compiler_id, files, meta)
    use(monkeypatch, site)
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    cache = new_cache()
    with pytest.raises(MissingKernelError, match="it is code for machine 42"):
        cache.load_stepping([request()])
    assert cache.counters.corrupt == 0
    assert Store(site).find(entry.key, None) is not None


def test_heads_of_this_machine_and_of_no_elf_file_are_fit() -> None:
    assert layers_module.unfit_machine(Path("/proc/self/exe").read_bytes()[:64]) == ""
    assert layers_module.unfit_machine(b"artifact of something") == ""
    assert layers_module.unfit_machine(b"") == ""


@pytest.mark.parametrize(
    ("driver", "needed", "is_fit"),
    [
        (12040, 525, True),
        (12040, 580, False),
        (13000, 580, True),
        (11080, 525, False),
        (10020, 450, False),
        (0, 580, True),  # no driver: emulated, or only looked at
    ],
)
def test_drivers_that_are_too_old_are_named_with_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, driver: int, needed: int, is_fit: bool
) -> None:
    monkeypatch.setattr(layers_module, "driver_version", lambda: driver)
    reason = layers_module.unfit_driver("sm_90", needed)
    assert (reason == "") is is_fit
    if not is_fit:
        assert str(needed) in reason and f"CUDA {driver // 1000}" in reason
    assert layers_module.unfit_driver("cpu:generic", needed) == ""


def test_where_the_driver_is_too_old_an_older_toolkits_build_serves(
    new_cache, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = Store(site).entries()
    files = {name: (entry.path / name).read_bytes for name in entry.meta["files"]}
    for compiler, driver in ((CLANG, 525), (GCC, 580)):
        meta = {
            **entry.meta, "min_driver": driver, "created": f"9{driver}",
            "compiler": {"id": compiler.id, "version": ""},
        }  # fmt: skip
        Store(site).adopt(entry.key, compiler.id, files, meta)
    use(monkeypatch, site)
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    monkeypatch.setattr(layers_module, "is_cuda", lambda target: True)
    monkeypatch.setattr(layers_module, "driver_version", lambda: 12040)
    _, module = new_cache().load_stepping([request()])
    assert CLANG.id in module.path


def test_an_artifact_that_cannot_be_loaded_is_a_miss_never_quarantined(
    new_cache, fake_build, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_cache().load_stepping([wanted()])
    before = tree(cache_root)

    def newer_libc(path: str) -> _C.Module:
        raise OSError(f"{path}: version `GLIBC_2.99' not found")

    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    cache = KernelCache(build=fake_build, load=newer_libc)
    with pytest.raises(MissingKernelError, match=r"cannot be loaded here.*GLIBC_2\.99"):
        cache.load_stepping([request()])
    assert tree(cache_root) == before
    assert cache.counters.corrupt == 0


def test_a_build_that_cannot_be_loaded_from_its_folder_is_loaded_from_memory(
    new_cache, fake_build, cache_root: Path
) -> None:
    """As where the cache lies on a file system that is mounted noexec."""
    from tests.jit.conftest import FakeModule

    def noexec(path: str) -> FakeModule:
        if path.startswith(str(cache_root)):
            raise OSError(f"{path}: failed to map segment from shared object")
        return FakeModule(path)

    for _ in range(2):
        cache = KernelCache(build=fake_build, load=noexec)  # type: ignore[arg-type]
        _, module = cache.load_stepping([wanted()])
        assert module.path.startswith("/proc/self/fd/")
    assert len(fake_build.builds) == 2
    assert len(list(Store(cache_root).entries())) == 1
