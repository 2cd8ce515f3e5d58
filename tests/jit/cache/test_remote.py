"""A store below a URL: pushed to, searched and verified; a slow one does not block a process."""

from __future__ import annotations

import functools
import http.server
import json
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashattn_jit.errors import MissingKernelError
from flashattn_jit.jit.cache import remote
from flashattn_jit.jit.cache.entry import CorruptEntryError
from flashattn_jit.jit.cache.remote import RemoteError, RemoteLayer, public_url, push
from flashattn_jit.jit.cache.store import Store
from flashattn_jit.jit.module import KernelCache
from tests.harness import processes

from .entries import CLANG, GCC, adopt, key_of, make, tree
from .test_layers import wanted

NewCache = Callable[[], KernelCache]
KEY = key_of()


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """Forgets which remotes failed in earlier tests."""
    remote._left_alone.clear()
    remote._warned.clear()
    yield
    remote._left_alone.clear()


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty remote folder."""
    fsspec = pytest.importorskip("fsspec")
    if request.param == "file":
        yield f"file://{tmp_path}/remote"
        return
    fsspec.filesystem("memory").store.clear()
    yield "memory://kernels"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def filled(new_cache: NewCache, cache_root: Path, tmp_path: Path, url: str) -> str:
    """The remote folder with the kernel "{}"; the folder that it was built in is moved away."""
    new_cache().load_stepping([wanted()])
    assert push(Store(cache_root), url) == (1, 0)
    cache_root.rename(tmp_path / "builder")
    return url


def test_a_miss_is_fetched_adopted_and_found_in_the_folder_from_then_on(
    new_cache, fake_build, filled: str, cache_root: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_REMOTE", filled)
    cache = new_cache()
    _, module = cache.load_stepping([wanted()])
    assert len(fake_build.builds) == 1
    assert cache.counters.hits["remote"] == 1
    assert cache.counters.compiles == 0
    assert cache.last_source == "remote"
    (entry,) = Store(cache_root).entries()
    (built,) = Store(tmp_path / "builder").entries()
    assert module.path == str(entry.artifact)
    assert {p.name: p.read_bytes() for p in entry.path.iterdir()} == {
        p.name: p.read_bytes() for p in built.path.iterdir()
    }
    monkeypatch.delenv("FLASHATTN_JIT_CACHE_REMOTE")
    again = new_cache()
    again.load_stepping([wanted()])
    assert again.counters.hits["user"] == 1


def test_in_never_mode_it_is_loaded_from_memory_and_nothing_is_written(
    new_cache, fake_build, filled: str, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_REMOTE", filled)
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    locks = cache_root.with_name("locks")
    shutil.rmtree(locks)
    cache = new_cache()
    _, module = cache.load_stepping([wanted()])
    assert module.key == fake_build.builds[0]
    assert cache.counters.hits["remote"] == 1
    assert not cache_root.exists()
    assert not locks.exists()


def test_where_the_folder_cannot_be_written_it_is_loaded_from_memory(
    new_cache, fake_build, filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_REMOTE", filled)
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", os.devnull + "/cache")
    cache = new_cache()
    cache.load_stepping([wanted()])
    assert len(fake_build.builds) == 1
    assert cache.counters.hits["remote"] == 1


def test_a_prepared_kernel_is_fetched_into_the_folder(
    new_cache, filled: str, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_REMOTE", filled)
    prepared = new_cache().prepare([wanted()]).found
    assert prepared.layer == "remote"
    assert [entry.path for entry in Store(cache_root).entries()] == [prepared.path]


def test_what_it_lacks_is_compiled(
    new_cache, fake_build, filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_REMOTE", filled)
    new_cache().load_stepping([wanted('{"other":1}')])
    assert len(fake_build.builds) == 2


def test_pushing_sends_what_is_missing_and_only_what_is_sound(url: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    first, second = adopt(store, make('{"a":1}')), adopt(store, make('{"a":2}', compiler=CLANG))
    assert push(store, url, keys=(first.key,)) == (1, 0)
    assert push(store, url) == (1, 1)
    assert push(store, url) == (0, 2)
    for entry in (first, second):
        answer = RemoteLayer(url).search(entry.key, None)
        assert [found.meta for found in answer.found] == [entry.meta]
    third = adopt(store, make('{"a":3}'))
    third.path.joinpath("build.log").write_text("damaged")
    with pytest.raises(CorruptEntryError):
        push(store, url)
    assert not RemoteLayer(url).search(third.key, None).found


def test_an_entry_without_its_meta_is_not_there_yet(url: str, tmp_path: Path) -> None:
    import fsspec

    store = Store(tmp_path / "store")
    adopt(store, make())
    push(store, url)
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.rm(f"{root}/v1/{GCC.id}/{KEY[:2]}/{KEY}/meta.json")
    answer = RemoteLayer(url).search(KEY, GCC.id)
    assert (answer.found, answer.corrupt, answer.reason) == ((), (), "it has no such kernel")


@pytest.mark.parametrize("name", ["artifact.so", "kernel.cpp", "meta.json"])
@pytest.mark.parametrize("change", ["flip", "cut", "grow", "other"])
def test_wrong_bytes_are_refused_and_leave_nothing(
    new_cache, fake_build, filled: str, cache_root: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, change: str,
) -> None:  # fmt: skip
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(filled)
    (path,) = [p for p in filesystem.find(root) if p.endswith(name)]
    content = filesystem.cat_file(path)
    other = {"artifact.so": b"evil", "kernel.cpp": b"evil", "meta.json": b'{"key":[]}'}
    changed = {
        "flip": bytes([content[0] ^ 1]) + content[1:],
        "cut": content[:-3],
        "grow": content + b"more",
        "other": other[name],
    }
    filesystem.pipe_file(path, changed[change])
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_REMOTE", filled)
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    cache = new_cache()
    with pytest.raises(MissingKernelError, match=r"remote .*corrupt"):
        cache.load_stepping([wanted()])
    assert not cache_root.exists()
    assert cache.counters.corrupt == 1
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "missing")
    new_cache().load_stepping([wanted()])
    assert len(fake_build.builds) == 2


def test_names_that_escape_are_refused(url: str, tmp_path: Path) -> None:
    import fsspec

    made = make()
    files = {**made.meta["files"], "../../../x": made.meta["files"]["build.log"]}
    filesystem, root = fsspec.core.url_to_fs(url)
    folder = f"{root}/v1/{GCC.id}/{KEY[:2]}/{KEY}"
    filesystem.makedirs(folder, exist_ok=True)
    filesystem.pipe_file(f"{folder}/meta.json", json.dumps({**made.meta, "files": files}).encode())
    answer = RemoteLayer(url).search(KEY, None)
    assert not answer.found
    assert "no plain name" in answer.reason


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:secret@bucket/a/b?token=1", "s3://bucket/a/b"),
        ("memory://kernels", "memory://kernels"),
        ("/a/b", "/a/b"),
        ("https://host?token=secret", "https://host"),
        ("https://host/x#secret", "https://host/x"),
        ("https://user:p@ss@host/x", "https://host/x"),
        ("filecache::s3://b/x::https://u:p@h/y?t=1", "filecache::s3://b/x::https://h/y"),
        ("got 403, url='https://u:p@h/y?t=1' for 'x'", "got 403, url='https://h/y' for 'x'"),
    ],
)
def test_urls_are_shown_without_secrets(url: str, shown: str) -> None:
    assert public_url(url) == shown
    assert RemoteLayer(url).location == shown


def test_what_a_library_says_of_a_failure_tells_no_secrets(
    new_cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(url: str) -> None:
        raise PermissionError(f"403, url={url!r}")

    monkeypatch.setattr(remote, "_connect", refuse)
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_REMOTE", "https://me:secret@host/x?token=secret")
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    with caplog.at_level(logging.WARNING), pytest.raises(MissingKernelError) as error:
        new_cache().load_stepping([wanted()])
    assert "403, url='https://host/x'" in str(error.value)
    assert "secret" not in str(error.value) + caplog.text


def test_a_url_that_nothing_reads_is_warned_of_once(
    new_cache, fake_build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_REMOTE", "nosuchprotocol://x")
    with caplog.at_level(logging.WARNING):
        new_cache().load_stepping([wanted()])
        new_cache().load_stepping([wanted('{"other":1}')])
    assert len(fake_build.builds) == 2
    assert caplog.text.count("does not serve") == 1


def test_pushing_where_nothing_can_be_written_is_told(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    adopt(store, make())
    with pytest.raises(RemoteError, match="cannot push to file:///dev/null"):
        push(store, "file:///dev/null/x")


# --- servers ------------------------------------------------------------------------------------


@pytest.fixture
def served(new_cache: NewCache, cache_root: Path, tmp_path: Path) -> Iterator[str]:
    """The URL of a web server over the folder that has the kernel "{}"."""
    pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp")
    new_cache().load_stepping([wanted()])
    cache_root.rename(tmp_path / "builder")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    handler = functools.partial(Handler, directory=str(tmp_path / "builder"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("mode", ["missing", "never"])
def test_a_web_server_serves(
    new_cache, fake_build, served: str, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_REMOTE", served)
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", mode)
    cache = new_cache()
    cache.load_stepping([wanted()])
    assert cache.counters.hits["remote"] == 1


def test_a_look_up_that_hangs_ends_is_told_and_is_not_repeated(
    new_cache, fake_build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hung: list[str] = []
    release = threading.Event()

    def hang(url: str) -> None:
        hung.append(url)
        release.wait(30)

    monkeypatch.setattr(remote, "_connect", hang)
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_REMOTE", "https://hangs.example/kernels")
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_REMOTE_TIMEOUT_S", "0.3")
    start = time.monotonic()
    try:
        with caplog.at_level(logging.WARNING):
            new_cache().load_stepping([wanted()])
            new_cache().load_stepping([wanted('{"other":1}')])
    finally:
        release.set()
    assert time.monotonic() - start < 10
    assert len(hung) == 1
    assert len(fake_build.builds) == 2
    assert caplog.text.count("did not answer within 0.3 s") == 1
    assert "hangs.example" in caplog.text


SILENT = """
import os, sys, time
import flashattn_jit as fa
from flashattn_jit.codegen.spec import BuildRequest
from flashattn_jit.errors import MissingKernelError
from flashattn_jit.jit.module import load_stepping
start = time.monotonic()
try:
    load_stepping([BuildRequest("{}", "cpu/attention.cpp.j2", "cpu:generic", str)])
except MissingKernelError as error:
    print(error.layers[-1].reason)
print(time.monotonic() - start < 20)
"""


def test_a_server_that_never_answers_keeps_no_process_from_ending(cache_root: Path) -> None:
    pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp")
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = processes.run(
            ["-c", SILENT],
            env={
                **os.environ,
                "FLASHATTN_JIT_COMPILE": "never",
                "FLASHATTN_JIT_CACHE_REMOTE": f"http://127.0.0.1:{server.getsockname()[1]}",
                "FLASHATTN_JIT_CACHE_REMOTE_TIMEOUT_S": "1",
            },
            timeout=100,
            check=True,
        )
    assert "did not answer within 1 s" in done.stdout
    assert done.stdout.endswith("True\n")
    assert not cache_root.exists()


def test_hits_import_no_fsspec(new_cache, cache_root: Path, monkeypatch) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_REMOTE", "memory://kernels")
    adopt(Store(cache_root), make())
    before = tree(cache_root)
    program = (
        "import sys; from flashattn_jit.jit.cache.remote import layers\n"
        f"assert layers()[0].search({KEY!r}, None).found\n"
        "print([name for name in ('fsspec', 'aiohttp', 'jinja2') if name in sys.modules])"
    )
    done = processes.run(["-c", program], check=True)
    assert done.stdout == "[]\n"
    assert tree(cache_root) == before
