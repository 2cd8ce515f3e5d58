"""`cache ls | show | verify | gc | clear | explain | push`."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen import targets
from flashattn_jit.codegen.document import line_of, line_text
from flashattn_jit.codegen.spec import UtilitySpec
from flashattn_jit.deploy.manifest.file import write_manifest
from flashattn_jit.jit.cache.entry import ARTIFACT, META
from flashattn_jit.jit.cache.store import REMEDIES
from flashattn_jit.jit.module import default


def test_ls_names_each_kernel_on_a_line(run, entries) -> None:
    lines = run("cache", "ls").stdout.splitlines()
    assert len(lines) == 3
    assert {line.split()[0] for line in lines} == {e.key[:16] for e in entries}
    assert all("cpu:generic" in line and "prefill 96x96" in line for line in lines)


def test_ls_of_an_empty_cache_prints_nothing(run, cache: Path) -> None:
    assert run("cache", "ls").stdout == ""
    assert not cache.exists()


def test_ls_narrows_by_target_and_layer(run_json, entries) -> None:
    assert len(run_json("cache", "ls")["kernels"]) == 3
    assert not run_json("cache", "ls", "--target", "sm_90")["kernels"]
    assert not run_json("cache", "ls", "--layer", "read_only")["kernels"]


def test_targets_may_be_given_as_groups(run_json, entries, tmp_path: Path) -> None:
    assert len(run_json("cache", "ls", "--target", "cpu")["kernels"]) == 3
    assert not run_json("cache", "ls", "--target", "cuda")["kernels"]
    assert run_json("cache", "push", f"file://{tmp_path}/remote", "--target", "cuda")["sent"] == 0


def test_groups_of_targets_are_not_narrowed_to_what_is_compiled_here(
    run_json, cache: Path, spec_of, add_entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine of another architecture `cpu` and `all` find kernels for x86-64."""
    kept = {add_entry(cache, spec_of(64, f"cpu:{name}")).key for name in ("generic", "avx2")}
    monkeypatch.setattr(targets, "machine", lambda: "aarch64")
    pack, remote = tmp_path / "k.pack", f"file://{tmp_path}/remote"
    for group in ("cpu", "all"):
        chosen = ("--target", group)
        listed = run_json("cache", "ls", *chosen)["kernels"]
        assert {one["key"] for one in listed} == kept
        assert run_json("pack", pack, *chosen)["entries"] == 2
        assert run_json("unpack", pack, "--directory", tmp_path / group, *chosen)["added"] == 2
    assert run_json("cache", "push", remote, "--target", "cpu")["sent"] == 2


def test_utilities_are_named_by_their_kernel(run_json, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_manifest(path, [line_of(UtilitySpec("append_paged_kv", "sm_90", 4))])
    (line,) = run_json("manifest", "show", path)["lines"]
    assert (line["variant"], line["kernel"]) == ("append_paged_kv", "units of 4 bytes")


def test_ls_lists_read_only_folders_and_packs(
    run_json, run, entries, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, folder = cache.with_name("k.pack"), cache.with_name("folder")
    assert run("pack", pack).exit_code == 0
    assert run("unpack", pack, "--directory", folder).exit_code == 0
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_PATH", f"{pack}:{folder}")
    found = run_json("cache", "ls")["kernels"]
    places = [(one["layer"], one["location"]) for one in found]
    assert (
        places
        == [("user", str(cache))] * 3
        + [("read_only", str(pack))] * 3
        + [("read_only", str(folder))] * 3
    )
    assert {one["key"] for one in found} == {e.key for e in entries}


def test_ls_marks_an_entry_that_cannot_be_read(run, run_json, entries) -> None:
    entries[0].path.joinpath(META).write_text("{}")
    readable = {one["key"]: one["readable"] for one in run_json("cache", "ls")["kernels"]}
    assert readable == {e.key: e is not entries[0] for e in entries}
    listed = run("cache", "ls")
    (line,) = [line for line in listed.stdout.splitlines() if "corrupt" in line]
    assert re.split(" {2,}", line) == [
        entries[0].key[:16], "-", f"corrupt: its {META} is of another kernel", "-", "-", "-",
        "gcc-1.2.3-00000000", "user",
    ]  # fmt: skip
    assert listed.stderr.startswith("1 corrupt: flashattn-jit cache verify --repair ")
    assert not run("cache", "ls", "--layer", "read_only").stderr


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [(META, "{}", f"its {META} is of another kernel"), (META, "{", f"its {META} cannot be read"),
     (ARTIFACT, "", f"{ARTIFACT} is not what was published"),
     ("more", "", f"it holds 'more', which its {META} does not name")],
)  # fmt: skip
def test_show_says_why_an_entry_is_corrupt_and_what_to_do(
    run, run_json, entries, cache: Path, name: str, content: str, reason: str
) -> None:
    path, key = entries[0].path, entries[0].key
    path.joinpath(name).write_text(content)
    shown = run("cache", "show", key)
    assert shown.exit_code == 5
    fields = [tuple(re.split(" {2,}", line, maxsplit=1)) for line in shown.stdout.splitlines()]
    about = [("key", key), ("layer", f"user, {cache}"), ("corrupt", reason)]
    assert fields[:4] == [*about, ("remedy", REMEDIES["user"])]
    assert (("target", "cpu:generic") in fields) == (name != META) == (len(fields) > 4)
    (record,) = run_json("cache", "show", key, exit_code=5)["entries"]
    assert record["fault"] == reason
    if name in (META, ARTIFACT):
        refused = run("cache", "show", key, "--file", name)
        assert (refused.exit_code, refused.stdout) == (5, "")
        problem = f"cache entry {path} is corrupt: {reason}; {REMEDIES['user']}"
        assert refused.stderr == f"error: {problem}\n"
    if name != META:
        assert run("cache", "show", key, "--file", "kernel.cpp").stdout == "// source\n"
    assert run("cache", "show", entries[1].key).exit_code == 0


def test_show_of_a_corrupt_entry_takes_a_file_from_a_sound_one(
    run, entries, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, key = cache.with_name("k.pack"), entries[0].key
    assert run("pack", pack).exit_code == 0
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_PATH", str(pack))
    entries[0].path.joinpath("kernel.cpp").unlink()
    shown = run("cache", "show", key)
    assert shown.exit_code == 5
    assert "corrupt   it has no kernel.cpp" in shown.stdout
    assert f"layer     read_only, {pack}\ntarget    cpu:generic" in shown.stdout
    assert run("cache", "show", key, "--file", "kernel.cpp").stdout == "// source\n"


def test_a_damaged_member_of_a_pack_is_listed_as_corrupt(
    run, run_json, entries, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = cache.with_name("k.pack")
    assert run("pack", pack, "--key", entries[0].key).exit_code == 0
    content = pack.read_bytes()
    pack.write_bytes(content.replace(b'"compile_s": 1.5', b'"compile_s": 2.5'))
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_PATH", str(pack))
    found = run_json("cache", "ls")["kernels"]
    assert [one["readable"] for one in found] == [True, True, True, False]
    listed = run("cache", "ls")
    assert f"  corrupt: pack {pack}: member " in listed.stdout
    assert listed.stderr == f"1 corrupt: {REMEDIES['read_only']}\n"


def test_show_takes_a_unique_beginning(run, run_json, entries) -> None:
    key = entries[1].key
    length = next(n for n in range(1, 65) if sum(e.key.startswith(key[:n]) for e in entries) == 1)
    shown = run_json("cache", "show", key[:length].upper())
    assert shown["key"] == key
    assert shown["entries"][0]["spec"]["head_dims"] == [64, 64]
    assert key in run("cache", "show", key).stdout
    assert run("cache", "show", "").exit_code == 2


def test_a_beginning_of_several_keys_is_refused(run, cache: Path, spec_of, add_entry) -> None:
    first = [add_entry(cache, spec_of(head_dim)).key[0] for head_dim in range(1, 18)]
    digit = max(first, key=first.count)  # at least two of 17 keys begin with the same digit
    ambiguous = run("cache", "show", digit)
    assert ambiguous.exit_code == 2
    assert f"{first.count(digit)} kernels' keys begin with '{digit}'" in ambiguous.stderr


def test_show_prints_a_file_as_it_is(run, entries) -> None:
    assert run("cache", "show", entries[0].key, "--file", "kernel.cpp").stdout == "// source\n"
    missing = run("cache", "show", entries[0].key, "--file", "../../x")
    assert missing.exit_code == 2


def test_verify_is_content_with_what_was_published(run_json, entries) -> None:
    report = run_json("cache", "verify")
    assert report["verified"] == 3
    assert report["corrupt"] == []


@pytest.mark.parametrize("name", [ARTIFACT, "kernel.cpp", META])
def test_verify_finds_what_was_changed(run, run_json, entries, name: str) -> None:
    path = entries[1].path / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    report = run_json("cache", "verify", exit_code=5)
    assert [one["key"] for one in report["corrupt"]] == [entries[1].key]
    assert name in report["corrupt"][0]["reason"]
    text = run("cache", "verify").stdout
    assert text.splitlines()[-1] == "2 sound, 1 corrupt"
    assert run("cache", "verify", entries[0].key).exit_code == 0


def test_verify_repair_moves_corrupt_entries_aside(run, run_json, entries) -> None:
    entries[1].path.joinpath(ARTIFACT).write_text("")
    report = run_json("cache", "verify", "--repair")
    assert report["repaired"] == 1
    assert not entries[1].path.exists()
    assert run_json("cache", "verify")["verified"] == 2


def make_old(entries) -> None:
    """Sets atimes and mtimes 9, 6 and 3 days back: the first entry is the oldest."""
    for days, entry in zip((9, 6, 3), entries, strict=True):
        then = time.time() - days * 86400
        for path in [*entry.path.iterdir(), entry.path]:
            os.utime(path, (then, then))


def test_gc_removes_the_least_recently_used(run_json, entries) -> None:
    make_old(entries)
    dry = run_json("cache", "gc", "--max-bytes", "1K", "--dry-run")
    assert dry["dry_run"] is True
    assert all(e.path.exists() for e in entries)
    size = sum(p.stat().st_size for p in entries[2].path.iterdir())
    report = run_json("cache", "gc", "--max-bytes", size + 100)
    assert report["removed"] == 2
    assert [e.path.exists() for e in entries] == [False, False, True]


def test_gc_takes_the_limit_from_the_environment(
    run, run_json, entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_old(entries)
    assert run("cache", "gc").exit_code == 2
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_MAX_BYTES", "10M")
    assert run_json("cache", "gc")["kept"] == 3


def test_clear_asks_first(run, run_json, entries, cache, add_entry, spec_of) -> None:
    emulator = add_entry(cache / "emulator", spec_of())
    refused = run("cache", "clear")
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    assert all(e.path.exists() for e in [*entries, emulator])
    assert run_json("cache", "clear", "--yes")["removed"] == 3
    assert not emulator.path.exists()
    assert run_json("cache", "ls")["kernels"] == []


def test_explain_says_in_which_fields_two_kernels_differ(run, run_json, entries) -> None:
    report = run_json("cache", "explain", entries[0].key, entries[1].key)
    assert report["differences"] == [
        {"field": "spec.head_dims", "first": "[32, 32]", "second": "[64, 64]"}
    ]
    assert run("cache", "explain", entries[0].key, entries[1].key).stdout.split() == [
        "spec.head_dims", "[32,", "32]", "[64,", "64]",
    ]  # fmt: skip
    same = run("cache", "explain", entries[0].key, entries[0].key)
    assert same.stdout == f"both are kernel {entries[0].key}\n"


def test_explain_says_why_a_manifests_line_missed(
    run, run_json, entries, spec_of, cache: Path
) -> None:
    manifest = cache.with_name("m.jsonl")
    write_manifest(manifest, [line_of(spec_of(64)), line_of(spec_of(96))])
    found, missed = sorted(
        run_json("cache", "explain", manifest)["kernels"], key=lambda one: not one["found"]
    )
    if found["mode"] == "missing" and not found["found"]:
        # The entry is of another compiler than this machine's.
        assert "gcc-1.2.3-00000000" in found["searched"][0]["reason"]
    assert missed["searched"][0]["layer"] == "user"
    assert missed["command"].startswith("FLASHATTN_JIT_COMPILE=missing flashattn-jit warm -")
    text = run("cache", "explain", f"{manifest}:1").stdout
    assert "user" in text
    assert run("cache", "explain", f"{manifest}:3").exit_code == 2


def test_explain_in_never_mode_takes_any_compilers_kernel(
    run_json, entries, spec_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    (found,) = run_json("cache", "explain", spec_of(64).document())["kernels"]
    assert (found["layer"], found["key"]) == ("user", entries[1].key)
    (missed,) = run_json("cache", "explain", spec_of(96).document())["kernels"]
    assert (
        missed["nearest"]["differences"]
        == [{"field": "spec.head_dims", "wanted": "[96, 96]", "found": "[32, 32]"}]
        or missed["nearest"]["differences"][0]["field"] == "spec.head_dims"
    )


def test_what_a_miss_says_is_understood_by_warm(run_json, entries, spec_of) -> None:
    (missed,) = run_json("cache", "explain", spec_of(96).document())["kernels"]
    line = missed["command"].splitlines()[1]
    assert json.loads(line) == json.loads(line_text(line_of(spec_of(96))))


def test_push_copies_what_the_remote_lacks(run_json, entries, cache: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    report = run_json("cache", "push", url, "--key", entries[0].key[:20])
    assert (report["sent"], report["had"]) == (1, 0)
    report = run_json("cache", "push", url)
    assert (report["sent"], report["had"]) == (2, 1)
    assert len(list((tmp_path / "remote").glob(f"v1/*/??/*/{META}"))) == 3


def test_a_manifest_may_come_from_standard_input(run, entries, spec_of) -> None:
    lines = "".join(f"{line_text(line_of(spec_of(d)))}\n" for d in (32, 64))
    assert run("cache", "explain", "-", input=lines).stdout.count("kernel ") >= 2
    assert len(run("manifest", "show", "-", input=lines).stdout.splitlines()) == 2
    wrong = run("manifest", "show", "-", input=f"{lines}nonsense\n")
    assert wrong.exit_code == 8
    assert "standard input, line 3" in wrong.stderr


def _rename(entry, name: object) -> None:
    """Changes the variant's name in an entry's meta.json."""
    meta = json.loads(entry.path.joinpath(META).read_text())
    entry.path.joinpath(META).write_text(json.dumps({**meta, "name": name}))


def test_variants_are_named_as_they_were_when_they_were_built(run, run_json, entries) -> None:
    _rename(entries[0], "SlidingWindow & SoftCap")
    named = {one["key"]: one["name"] for one in run_json("cache", "ls")["kernels"]}
    assert named == {e.key: "SlidingWindow & SoftCap" if e is entries[0] else "" for e in entries}
    lines = {line.split()[0]: line for line in run("cache", "ls").stdout.splitlines()}
    assert "  SlidingWindow & SoftCap  " in lines[entries[0].key[:16]]
    assert "  no hooks " in lines[entries[1].key[:16]], "kept by an earlier version"
    explained = run("cache", "explain", entries[0].key).stdout
    assert explained.startswith("SlidingWindow & SoftCap for cpu:generic, kernel ")
    shown = run("cache", "show", entries[0].key).stdout
    assert "\nvariant   SlidingWindow & SoftCap\nhooks     no hooks " in shown


@pytest.mark.parametrize("name", ["\x1b[2Jgone", "a\nb", "\u202eback", "x" * 999, 3, ["x"]])
def test_an_entry_with_a_hostile_name_is_corrupt(run, entries, name: object) -> None:
    _rename(entries[0], name)
    listed = run("cache", "ls")
    assert f"corrupt: its {META} has a wrong name" in listed.stdout
    assert not any(not c.isprintable() for line in listed.stdout.splitlines() for c in line)
    assert "has a wrong name" in run("cache", "verify").stdout


def test_the_name_of_a_build_is_kept_and_part_of_no_key(
    run_json, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry has the name of the variant that it was built for; an equal variant finds it."""
    q = torch.randn(1, 1, 4, 8)

    # A mask that no other test uses: a process stores the name of a structure once.
    def never(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx + 12347

    def rarely(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx + 12347

    fa.attention(q, q, q, never, target="cpu:generic")
    (kept,) = run_json("cache", "ls")["kernels"]
    assert kept["name"] == "mask_mod(never)"
    calls = fa.cache_info().compiles
    default.forget()
    fa.attention(q, q, q, rarely, target="cpu:generic")
    assert fa.cache_info().compiles == calls
    (found,) = run_json("cache", "ls")["kernels"]
    assert found == kept


@pytest.mark.parametrize(
    ("width", "columns"),
    [(160, "key target kernel variant size compiled compiler layer"),
     (110, "key target kernel variant size layer"),
     (80, "key target kernel variant")],
)  # fmt: skip
def test_rows_of_ls_are_never_wrapped(on_terminal, entries, width: int, columns: str) -> None:
    for entry in entries:
        _rename(entry, "SlidingWindow & SoftCap")
    code, text = on_terminal("cache", "ls", COLUMNS=str(width), NO_COLOR="1")
    lines = [line.rstrip() for line in text.splitlines()]
    assert code == 0 and lines[0].split() == columns.split()
    assert max(map(len, lines[:5])) <= width
    assert sorted(line.split()[0][:12] for line in lines[2:5]) == sorted(
        e.key[:12] for e in entries
    )
    assert all("SlidingWindow & Soft" in line for line in lines[2:5])
