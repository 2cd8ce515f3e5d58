"""A damaged entry is never loaded: it is moved to quarantine and built again once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.fleet import Fleet, entries, tree

ARTIFACT, META = "artifact.so", "meta.json"
Damage = Callable[[Path], None]


def truncate(entry: Path) -> None:
    os.truncate(entry / ARTIFACT, 4096)


def cut_the_last_byte(entry: Path) -> None:
    os.truncate(entry / ARTIFACT, (entry / ARTIFACT).stat().st_size - 1)


def empty(entry: Path) -> None:
    os.truncate(entry / ARTIFACT, 0)


def flip_one_bit(entry: Path) -> None:
    content = bytearray((entry / ARTIFACT).read_bytes())
    content[len(content) // 2] ^= 1
    (entry / ARTIFACT).write_bytes(content)


def remove_artifact(entry: Path) -> None:
    (entry / ARTIFACT).unlink()


def make_the_artifact_a_folder(entry: Path) -> None:
    (entry / ARTIFACT).unlink()
    (entry / ARTIFACT).mkdir()


def make_the_artifact_a_link(entry: Path) -> None:
    (entry / ARTIFACT).rename(entry.parent.parent / "elsewhere.so")
    (entry / ARTIFACT).symlink_to(entry.parent.parent / "elsewhere.so")


def make_the_artifact_a_pipe(entry: Path) -> None:
    (entry / ARTIFACT).unlink()
    os.mkfifo(entry / ARTIFACT)


def remove_meta(entry: Path) -> None:
    (entry / META).unlink()


def put_meta(text: str | bytes) -> Damage:
    def damage(entry: Path) -> None:
        content = text if isinstance(text, bytes) else text.encode()
        (entry / META).write_bytes(content)

    return damage


def edit_meta(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(entry: Path) -> None:
        meta = json.loads((entry / META).read_text())
        change(meta)
        (entry / META).write_text(json.dumps(meta))

    return damage


def artifact(meta: dict[str, Any]) -> dict[str, Any]:
    return dict.__getitem__(meta["files"], ARTIFACT)


DAMAGES: dict[str, Damage] = {
    "artifact truncated": truncate,
    "artifact's last byte is gone": cut_the_last_byte,
    "artifact emptied": empty,
    "one bit of the artifact flipped": flip_one_bit,
    "artifact missing": remove_artifact,
    "artifact is a folder": make_the_artifact_a_folder,
    "artifact is a link": make_the_artifact_a_link,
    "artifact is a pipe": make_the_artifact_a_pipe,
    "meta.json missing": remove_meta,
    "meta.json emptied": put_meta(""),
    "meta.json is not JSON": put_meta('{"key": '),
    "meta.json is not text": put_meta(b"\xff\xfe\x00\x80"),
    "meta.json is a list": put_meta("[]"),
    "meta.json is nested without end": put_meta("[" * 200_000),
    "meta.json of another key": edit_meta(lambda m: m.update(key="ab" * 32)),
    "meta.json has no files": edit_meta(lambda m: m.pop("files")),
    "meta.json: files is a list": edit_meta(lambda m: m.update(files=[1, 2])),
    "meta.json: wrong digest": edit_meta(lambda m: artifact(m).update(sha256="0" * 64)),
    "meta.json: a digest that is no text": edit_meta(lambda m: artifact(m).update(sha256=None)),
    "meta.json: wrong size": edit_meta(lambda m: artifact(m).update(bytes=1)),
    "meta.json: huge size": edit_meta(lambda m: artifact(m).update(bytes=10**400)),
    "meta.json: size below nothing": edit_meta(lambda m: artifact(m).update(bytes=-1)),
    "meta.json: size that is no number": edit_meta(lambda m: artifact(m).update(bytes="many")),
    "meta.json: steps down to nothing": edit_meta(lambda m: m.update(stepped_down=[])
                                                  or m.update(stepped_down={"tile": 1})),
}  # fmt: skip


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_built_again_once(warm: Fleet, damage: Damage) -> None:
    (entry,) = entries(warm.cache)
    damage(entry)
    process = warm.start()
    result = process.good()
    assert result["source"] == "compiler"
    assert result["counters"]["corrupt"] == 1
    assert warm.compiler.compiles == 1
    assert str(entry) in process.log()  # a warning names it
    assert len(list(warm.cache.glob("v1/.quarantine/*"))) == 1
    assert entries(warm.cache) == [entry]
    assert warm.start().good()["source"] == "disk"


@pytest.mark.parametrize(
    "name", ["artifact emptied", "one bit of the artifact flipped", "meta.json missing"]
)
def test_where_compiling_is_forbidden_a_damaged_entry_is_a_miss(warm: Fleet, name: str) -> None:
    (entry,) = entries(warm.cache)
    DAMAGES[name](entry)
    before = tree(warm.cache)
    result = warm.start(env={"FLASHATTN_JIT_COMPILE": "never"}).result()
    assert result["error"] == "MissingKernelError"
    assert "corrupt" in result["message"]
    assert tree(warm.cache) == before
    assert warm.compiler.started == 0


@pytest.mark.parametrize(
    "lie",
    [
        edit_meta(lambda m: m.update(document=[["target", "cpu:mmx"]])),
        edit_meta(lambda m: m.update(document=[[n, v + " "] for n, v in m["document"]])),
        edit_meta(lambda m: m.update(document="x" * 1000)),
        edit_meta(lambda m: m.pop("document")),
        edit_meta(lambda m: m.update(compile_s=1e400, created=5)),
    ],
    ids=["another target's", "every field", "no list", "missing", "numbers"],
)
def test_what_meta_says_of_itself_is_not_believed(warm: Fleet, lie: Damage) -> None:
    """Key and digests decide what is loaded; the rest of a wrong meta.json is only displayed."""
    (entry,) = entries(warm.cache)
    lie(entry)
    assert warm.start().good()["source"] in ("disk", "compiler")
    assert warm.start(env={"FLASHATTN_JIT_COMPILE": "never"}).good()["source"] == "disk"


def test_sixteen_processes_that_find_a_damaged_entry_build_it_once(warm: Fleet) -> None:
    (entry,) = entries(warm.cache)
    flip_one_bit(entry)
    gate = warm.root / "gate"
    processes = [warm.start(arguments={"gate": str(gate)}) for _ in range(16)]
    gate.touch()
    sources = sorted(process.good()["source"] for process in processes)
    assert warm.compiler.compiles == 1
    assert sources == ["compiler", *["disk"] * 15]


def test_what_was_loaded_before_the_damage_goes_on(warm: Fleet) -> None:
    mark, gate = warm.root / "mark", warm.root / "gate"
    process = warm.start(
        "attend_twice", arguments={"dims": [8, 8], "mark": str(mark), "gate": str(gate)}
    )
    while not mark.exists():
        assert process.poll() is None
    (entry,) = entries(warm.cache)
    (entry / META).write_text("{")
    assert warm.start().good()["source"] == "compiler"  # moves it away and publishes another
    gate.touch()
    assert process.good()["again"]["source"] in ("disk", "memory")
