"""A smaller tile replaces a kernel that spills registers, and the cache records which one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flashattn_jit.codegen.spec import BuildRequest
from flashattn_jit.errors import CompileError, MissingKernelError
from flashattn_jit.jit.compilation.compile_job import BuildFailure
from flashattn_jit.jit.module import KernelCache

TARGET = "cpu:avx2"


def request(tile: int, source: str) -> BuildRequest:
    """A kernel request for a tile; `source` has the word SPILLS where the kernel is to spill."""
    return BuildRequest(f'{{"tile":{tile}}}', "kernel.cpp.j2", TARGET, lambda: source)


def found(tile: int) -> BuildRequest:
    """The request of a tile that must be found: rendering it is an error."""

    def never() -> str:
        raise AssertionError("a hit renders nothing")

    return BuildRequest(f'{{"tile":{tile}}}', "kernel.cpp.j2", TARGET, never)


def metas(root: Path) -> dict[str, dict[str, object]]:
    """The meta.json of every entry, by kernel spec."""
    read = [json.loads(path.read_text()) for path in root.glob("v1/[!.]*/??/*/meta.json")]
    return {dict(meta["document"])["spec"]: meta for meta in read}


@pytest.fixture
def tiles() -> list[BuildRequest]:
    return [request(128, "SPILLS"), request(64, "SPILLS too"), request(32, "fits")]


def test_the_first_tile_that_does_not_spill_is_taken(
    new_cache: Callable[[], KernelCache], fake_build, cache_root: Path, tiles: list[BuildRequest]
) -> None:
    cache = new_cache()
    place, module = cache.load_stepping(tiles)
    assert place == 2
    assert len(fake_build.builds) == 3
    assert module.key == fake_build.builds[2]
    assert cache.find(tiles[0].spec) is module
    assert cache.find(tiles[2].spec) is module
    assert cache.load_stepping(tiles) == (2, module)
    assert cache.counters.compiles == 3


def test_entries_record_the_step_and_hold_no_artifact(
    new_cache, fake_build, cache_root: Path, tiles: list[BuildRequest]
) -> None:
    new_cache().load_stepping(tiles)
    entries = metas(cache_root)
    assert entries[tiles[0].spec]["stepped_down"] == {"key": fake_build.builds[1]}
    assert entries[tiles[1].spec]["stepped_down"] == {"key": fake_build.builds[2]}
    assert entries[tiles[0].spec]["complaints"] == ["the kernel spills"]
    assert "stepped_down" not in entries[tiles[2].spec]
    assert len(list(cache_root.rglob("artifact.so"))) == 1


def test_another_process_goes_straight_there(
    new_cache,
    fake_build,
    cache_root: Path,
    tiles: list[BuildRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, module = new_cache().load_stepping(tiles)
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    cache = new_cache()
    place, again = cache.load_stepping([found(128), found(64), found(32)])
    assert (place, again.path) == (2, module.path)
    assert len(fake_build.builds) == 3
    assert cache.counters.misses == 0
    assert cache.counters.hits["user"] == 1


def test_a_smaller_tile_that_exists_already_is_not_compiled_again(
    new_cache, fake_build, tiles: list[BuildRequest]
) -> None:
    new_cache().load_stepping(
        [BuildRequest(tiles[2].spec, "kernel.cpp.j2", TARGET, tiles[2].render)]
    )[1]
    place, _ = new_cache().load_stepping(tiles)
    assert place == 2
    assert len(fake_build.builds) == 3


def test_a_tile_that_does_not_spill_leaves_the_fallbacks_alone(new_cache, fake_build) -> None:
    cache = new_cache()
    place, _ = cache.load_stepping([request(128, "fits"), found(64)])
    assert place == 0
    assert len(fake_build.builds) == 1


@pytest.mark.parametrize(("allowed", "place"), [(64, 0), (24, 0), (23, 1), (0, 1)])
def test_a_spill_that_the_request_allows_keeps_its_tile(
    new_cache, cache_root: Path, allowed: int, place: int
) -> None:
    tile = replace(request(128, "SPILLS 24 BYTES"), spill_bytes=allowed)
    assert new_cache().load_stepping([tile, request(64, "fits")])[0] == place
    meta = metas(cache_root)[tile.spec]
    assert ("complaints" in meta) == ("stepped_down" in meta) == (place == 1)


def test_where_every_tile_spills_the_last_is_kept(
    new_cache, fake_build, cache_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiles = [request(128, "SPILLS"), request(64, "SPILLS")]
    place, module = new_cache().load_stepping(tiles)
    assert place == 1
    assert "will be slow" in caplog.text
    assert metas(cache_root)[tiles[1].spec]["complaints"] == ["the kernel spills"]
    assert new_cache().load_stepping([found(128), found(64)])[1].path == module.path
    assert len(fake_build.builds) == 2


def test_tiles_that_changed_since_are_tried_in_their_new_order(new_cache, fake_build) -> None:
    new_cache().load_stepping([request(128, "SPILLS"), request(64, "fits")])
    place, module = new_cache().load_stepping([found(128), request(48, "fits"), found(64)])
    assert place == 2
    assert module.key == fake_build.builds[1]
    place, _ = new_cache().load_stepping([found(128), request(32, "fits")])
    assert place == 1
    assert len(fake_build.builds) == 3


def test_asked_for_without_fallbacks_it_is_built_as_it_is(
    new_cache, fake_build, cache_root: Path
) -> None:
    tile = request(128, "SPILLS")
    new_cache().load_stepping([tile, request(64, "fits")])
    cache = new_cache()
    module = cache.load_stepping([BuildRequest(tile.spec, "kernel.cpp.j2", TARGET, tile.render)])[1]
    assert module.key == fake_build.builds[0] == fake_build.builds[2]
    assert "stepped_down" in metas(cache_root)[tile.spec]


def test_an_error_in_a_smaller_tile_is_told(new_cache, fake_build) -> None:
    def broken() -> None:
        if len(fake_build.builds) == 2:
            raise BuildFailure("'x' was not declared", None)

    fake_build.before = broken
    with pytest.raises(CompileError, match="'x' was not declared"):
        new_cache().load_stepping([request(128, "SPILLS"), request(64, "fits")])
    assert new_cache().load_stepping([found(128), request(64, "fits")])[0] == 1


def test_never_says_which_smaller_tile_is_missing(
    new_cache, cache_root: Path, tiles: list[BuildRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_cache().load_stepping(tiles)
    for meta in cache_root.glob("v1/[!.]*/??/*/meta.json"):
        if "stepped_down" not in json.loads(meta.read_text()):
            for path in sorted(meta.parent.iterdir()):
                path.unlink()
            meta.parent.rmdir()
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    with pytest.raises(MissingKernelError):
        new_cache().load_stepping(tiles)


def test_a_damaged_record_is_built_again(
    new_cache, fake_build, cache_root: Path, tiles: list[BuildRequest]
) -> None:
    new_cache().load_stepping(tiles)
    for path in cache_root.glob("v1/[!.]*/??/*/meta.json"):
        meta = json.loads(path.read_text())
        if "stepped_down" in meta:
            path.write_text(json.dumps({**meta, "stepped_down": "nonsense"}))
    cache = new_cache()
    assert cache.load_stepping(tiles)[0] == 2
    assert cache.counters.corrupt == 2
    assert len(fake_build.builds) == 5
