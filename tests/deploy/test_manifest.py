"""Manifests: sorted, merged, written atomically, and read as untrusted input."""

from __future__ import annotations

import fcntl
import json
import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import flashattn_jit as fa
from flashattn_jit.codegen.document import Line, has_cpp, line_of, line_text, parse_line
from flashattn_jit.codegen.spec import KernelSpec, UtilitySpec
from flashattn_jit.deploy.manifest import file as manifest
from flashattn_jit.deploy.manifest.file import (
    check_writable,
    manifest_text,
    merge_manifests,
    read_manifest,
    write_manifest,
)
from flashattn_jit.errors import ManifestError
from flashattn_jit.planner.reachable import reachable, utilities
from flashattn_jit.variants.params import Dims


def specs(variant: fa.Variant, target: str = "cpu:avx2") -> list[KernelSpec]:
    dtype = "float32" if target.startswith("cpu") else "float16"
    ir = variant.bind(Dims(1, 2, 2, 8, 8, 32, 32), {}).ir
    return [replace(s, name=variant.name) for s in
            reachable(ir, (32, 32), (dtype,) * 3, target)]  # fmt: skip


def some_lines() -> list[Line]:
    made = [*specs(fa.Causal()), *specs(fa.ALiBi(), "sm_80"), *specs(fa.SlidingWindow(9))]
    return [line_of(s) for s in (*made, *utilities((), "sm_90"))]


def with_text() -> Line:
    variant = fa.variant(score_mod=fa.cpp("return score * 2.0f;"), name="doubled")
    return line_of(specs(variant)[0])


def test_a_line_comes_back() -> None:
    for line in some_lines():
        text = line_text(line)
        assert "\n" not in text and text == json.dumps(
            json.loads(text), sort_keys=True, separators=(",", ":")
        )
        again = parse_line(text)
        assert (again.name, again.spec.document()) == (line.name, line.spec.document())
        assert line_text(again) == text


def test_lines_hold_neither_paths_nor_pickles() -> None:
    text = manifest_text(some_lines())
    assert text.isascii() and str(Path.cwd()) not in text
    assert "flashattn_jit" not in text and "tests" not in text


def test_the_order_of_lines_does_not_matter(tmp_path: Path) -> None:
    lines = some_lines()
    text = manifest_text(lines)
    random.Random(0).shuffle(lines)
    half = len(lines) // 2
    write_manifest(tmp_path / "a", lines[:half])
    write_manifest(tmp_path / "b", lines[half:])
    merge_manifests([tmp_path / "b", tmp_path / "a"], tmp_path / "both")
    write_manifest(tmp_path / "a", [*lines[half:], *lines[:3]])
    assert (tmp_path / "both").read_text() == (tmp_path / "a").read_text() == text
    assert [line.name for line in read_manifest(tmp_path / "a")] == sorted(
        line.name for line in lines
    )


def test_a_spec_is_listed_once_under_the_first_of_its_names() -> None:
    spec = specs(fa.Causal())[0]
    lines = [line_of(replace(spec, name=name)) for name in ("b", "a", "c")]
    assert manifest_text(lines) == manifest_text(lines[1:2])


def test_writing_without_merging_replaces(tmp_path: Path) -> None:
    lines = some_lines()
    write_manifest(tmp_path / "m", lines)
    write_manifest(tmp_path / "m", lines[:2], merge=False)
    assert (tmp_path / "m").read_text() == manifest_text(lines[:2])


def test_a_file_that_would_not_change_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_manifest(path, some_lines())
    path.chmod(0o640)
    before = path.stat()
    write_manifest(path, some_lines()[:4])
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    write_manifest(path, [line_of(UtilitySpec("merge_states", "sm_75"))])
    assert path.stat().st_ino != before.st_ino and path.stat().st_mode & 0o777 == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "m").symlink_to(tmp_path / "folder" / "real")
    write_manifest(tmp_path / "m", some_lines())
    assert (tmp_path / "m").is_symlink()
    assert (tmp_path / "folder" / "real").read_text() == manifest_text(some_lines())


def test_threads_and_processes_that_write_one_file_lose_nothing(tmp_path: Path) -> None:
    lines = some_lines()
    path = tmp_path / "m"
    children = []
    for part in range(2):
        pid = os.fork()
        if pid == 0:
            for line in lines[part::4]:
                write_manifest(path, [line])
            os._exit(0)
        children.append(pid)
    workers = [
        threading.Thread(target=lambda n=n: [write_manifest(path, [x]) for x in lines[n::4]])
        for n in (2, 3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
    assert path.read_text() == manifest_text(lines)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_lock_that_somebody_keeps_holds_nobody_up_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(manifest, "_LOCK_WAIT_S", 0.2)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        write_manifest(tmp_path / "m", some_lines())
    finally:
        os.close(folder)
    assert (tmp_path / "m").read_text() == manifest_text(some_lines())
    assert "without it" in caplog.text


def test_a_folder_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError("locks are not supported")

    monkeypatch.setattr(manifest.fcntl, "flock", refuse)
    caplog.set_level("DEBUG", logger="flashattn_jit")
    write_manifest(tmp_path / "m", some_lines())
    assert (tmp_path / "m").read_text() == manifest_text(some_lines())
    assert f"no lock on {tmp_path} (locks are not supported): writing m without it" in caplog.text


# --- what is refused ------------------------------------------------------------------------------


def test_cpp_text_is_code_and_is_asked_for(tmp_path: Path) -> None:
    line = with_text()
    assert has_cpp(line.spec)
    write_manifest(tmp_path / "m", [line, *some_lines()])
    with pytest.raises(ManifestError, match=r"m, line \d+: .*doubled has hooks given as C\+\+"):
        read_manifest(tmp_path / "m")
    found = read_manifest(tmp_path / "m", allow_cpp=True)
    assert len(found) == len(some_lines()) + 1
    # Merging compiles nothing: such lines are kept.
    merge_manifests([tmp_path / "m"], tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == (tmp_path / "m").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", r"line 2: line: is no JSON"),
        ("[]", "line 2: line: an object"),
        ('{"manifest_schema":1,"name":"a"}', "missing: spec"),
        ('{"manifest_schema":2,"name":"a","spec":{}}', "this version reads 1, got 2"),
        ('{"manifest_schema":1,"name":"a","spec":"x"}', "spec: an object"),
        ('{"manifest_schema":1,"name":7,"spec":{}}', "name: "),
        ('{"manifest_schema":1,"name":"a\\nb","spec":{}}', "name: "),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "m").write_text(f"{line_text(some_lines()[0])}\n{text}\n")
    with pytest.raises(ManifestError, match=message) as caught:
        read_manifest(tmp_path / "m")
    assert str(tmp_path / "m") in str(caught.value)
    # A file that is no manifest is not overwritten either.
    before = (tmp_path / "m").read_bytes()
    with pytest.raises(ManifestError):
        write_manifest(tmp_path / "m", some_lines())
    assert (tmp_path / "m").read_bytes() == before


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="cannot be read: No such file"):
        read_manifest(tmp_path / "missing")
    with pytest.raises(ManifestError, match="cannot be read: Is a directory"):
        read_manifest(tmp_path)
    (tmp_path / "m").write_bytes(b"\xff\xfe")
    with pytest.raises(ManifestError, match="is no text"):
        read_manifest(tmp_path / "m")
    (tmp_path / "empty").write_text("\n\n")
    assert read_manifest(tmp_path / "empty") == ()


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "no folder" / "m", tmp_path):
        for attempt in (check_writable, lambda p: write_manifest(p, [])):
            with pytest.raises(ManifestError):
                attempt(path)
    check_writable(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_names_that_lines_may_not_have_are_spelled_with_underscores() -> None:
    spec = replace(specs(fa.Causal())[0], name='my "mask"\n\\?')
    line = line_of(spec)
    assert line.name == "my _mask____" and parse_line(line_text(line)).name == line.name
