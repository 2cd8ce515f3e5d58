"""The error of a miss: the kernel wanted, the nearest entry, how it differs, the build command."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.document import parse_line, spec_from_document
from flashattn_jit.codegen.spec import BuildRequest, host_targets
from flashattn_jit.errors import MissingKernelError
from flashattn_jit.jit.cache import misses
from flashattn_jit.jit.cache.entry import KernelKey, document_digest
from flashattn_jit.jit.cache.misses import build_command, differences, nearest
from flashattn_jit.jit.module import KernelCache
from flashattn_jit.ops.launching import launches

from .entries import document


def changed(**fields: str) -> dict[str, str]:
    return {**dict(document()), **fields}


def said(wanted: dict[str, str], found: dict[str, str]) -> dict[str, tuple[str, str]]:
    return {d.field: (d.wanted, d.found) for d in differences(wanted, found)}


def test_equal_documents_do_not_differ() -> None:
    assert differences(document(), dict(document())) == ()


def test_fields_of_the_spec_are_told_one_by_one() -> None:
    spec = {"head_dims": [64, 64], "dtypes": ["float16"], "target": "sm_80", "only": 1}
    other = {**spec, "head_dims": [128, 128], "new": True}
    del other["only"]
    first, second = changed(spec=json.dumps(spec)), changed(spec=json.dumps(other))
    assert said(first, second) == {
        "spec.head_dims": ("[64, 64]", "[128, 128]"),
        "spec.only": ("1", "absent"),
        "spec.new": ("absent", "true"),
    }
    assert str(differences(first, second)[0]) == "spec.head_dims: [64, 64] -> [128, 128]"


def graph(*operations: str, constant: int = 1) -> dict[str, object]:
    nodes = [["input", [], "float32", [], []], ["const", [], "float32", [], [["value", constant]]]]
    return {"nodes": nodes + [[name, [0, 1], "float32", [], []] for name in operations]}


def test_hooks_are_compared_as_wholes() -> None:
    def spec(**hooks: object) -> dict[str, str]:
        return changed(spec=json.dumps({"variant": {"hooks": hooks}}))

    assert said(spec(score_mod=graph("mul")), spec(score_mod=graph("mul", "tanh"))) == {
        "spec.variant.hooks.score_mod": (
            "3 operations: const mul",
            "4 operations: const mul tanh",
        )
    }
    one, two = spec(score_mod=graph("mul")), spec(score_mod=graph("mul", constant=2))
    ((field, (wanted, found)),) = said(one, two).items()
    assert field == "spec.variant.hooks.score_mod.nodes[1]"
    assert '["value", 1]' in wanted and '["value", 2]' in found
    assert said(spec(), spec(mask_mod=graph("ge")))["spec.variant.hooks.mask_mod"][0] == "absent"


def test_flags_and_sources_are_told_as_what_they_are() -> None:
    assert said(changed(flags="-O3\n-g"), changed(flags="-O3\n-O2")) == {"flags": ("-g", "-O2")}
    assert said(changed(flags="-a\n-b"), changed(flags="-b\n-a")) == {
        "flags": ("another order", "another order")
    }
    ((field, (_, found)),) = said(changed(sources="1"), changed(sources="2")).items()
    assert (field, found) == ("sources", "another version of them")


@pytest.mark.parametrize("spec", ["", "[]", "not json", "null", "{" * 50])
def test_specs_that_are_no_objects_are_shown_as_they_are(spec: str) -> None:
    assert [d.field for d in differences(changed(spec=spec), changed(spec='{"a":1}'))] == ["spec"]


def test_the_nearest_differs_least_and_a_variant_weighs_more_than_a_tile() -> None:
    spec = {"variant": {"hooks": {"score_mod": graph("mul")}}, "tile": [1, 2], "target": "sm_80"}

    def variation(**fields: object) -> dict[str, str]:
        return changed(spec=json.dumps({**spec, **fields}))

    wanted = variation()
    key = KernelKey(document_digest(wanted.items()), tuple(wanted.items()))
    others = [
        ("a", "one", variation(variant={"hooks": {"score_mod": graph("tanh")}})),
        ("b", "two", variation(tile=[1, 4])),
        ("c", "three", variation(target="sm_90", tile=[1, 4])),
        (key.hex, "itself", wanted),
    ]
    found = nearest(key, others)
    assert found is not None
    assert (found.key, found.location) == ("b", "two")
    assert [d.field for d in found.differences] == ["spec.tile"]
    assert nearest(key, []) is None
    assert nearest(key, others[3:]) is None


def test_a_spec_that_is_no_kernels_has_no_command() -> None:
    assert build_command("{}") == ""
    assert build_command("no json") == ""


_HEAD_DIMS = itertools.count(25)


@pytest.fixture
def q() -> torch.Tensor:
    """Of a head dim that no other test has: a process keeps its kernels."""
    return torch.randn(1, 1, 4, next(_HEAD_DIMS))


@pytest.fixture
def missing(q: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MissingKernelError:
    """The error of a real call whose kernel is nowhere."""
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    with pytest.raises(MissingKernelError) as error:
        fa.attention(q, q, q, fa.variant(score_mod=lambda s, b, h, i, j: s * 0.40625))
    return error.value


def test_the_error_holds_the_spec_the_layers_and_the_command(missing: MissingKernelError) -> None:
    spec = spec_from_document(missing.spec)
    assert spec.document() == missing.spec
    assert missing.target == spec.target
    assert len(missing.key) == 64
    assert [layer.layer for layer in missing.layers] == ["user"]
    assert missing.nearest is None
    assert missing.command in str(missing)
    head, line, end = missing.command.split("\n")
    assert head.endswith("flashattn-jit warm - <<'MANIFEST'")
    assert end == "MANIFEST"
    assert parse_line(line).spec == spec


def test_a_shell_gives_the_command_the_line_as_it_is(
    missing: MissingKernelError, tmp_path: Path
) -> None:
    """The shell interprets no quotes, dollars and backslashes of the line."""
    fake = tmp_path / "bin" / "flashattn-jit"
    fake.parent.mkdir()
    fake.write_text(
        f"#!/bin/sh\necho $* $FLASHATTN_JIT_COMPILE\ncat >{shlex.quote(str(tmp_path))}/in"
    )
    fake.chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", missing.command],
        env={**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "warm - missing\n"
    assert tmp_path.joinpath("in").read_text() == missing.command.split("\n")[1] + "\n"


def test_hooks_of_cpp_text_say_that_they_are_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    q = torch.randn(1, 1, 4, 24)
    with pytest.raises(MissingKernelError) as error:
        fa.attention(q, q, q, fa.variant(score_mod=fa.cpp("return score + '$x';")))
    assert "flashattn-jit warm --allow-cpp - <<'MANIFEST'" in error.value.command


def test_the_nearest_entry_is_named_with_what_differs(
    new_cache: Callable[[], KernelCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    def request(spec: str) -> BuildRequest:
        return BuildRequest(spec, "kernel.cpp.j2", "cpu:generic", lambda: "int x;")

    new_cache().load_stepping([request('{"head_dims":[64,64],"tile":["prefill",96,96]}')])
    new_cache().load_stepping([request('{"head_dims":[32,32],"tile":["few_row",16,96]}')])
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    with pytest.raises(MissingKernelError) as error:
        new_cache().load_stepping([request('{"head_dims":[64,64],"tile":["prefill",96,64]}')])
    assert error.value.nearest is not None
    assert [str(d) for d in error.value.nearest.differences] == [
        'spec.tile: ["prefill", 96, 64] -> ["prefill", 96, 96]'
    ]
    assert 'spec.tile: ["prefill", 96, 64] -> ["prefill", 96, 96]' in str(error.value)


@pytest.mark.parametrize("runs", [True, False])
def test_a_kernel_of_another_target_that_runs_here_is_named(
    runs: bool, new_cache: Callable[[], KernelCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    def request(target: str) -> BuildRequest:
        return BuildRequest('{"head_dims":[64,64]}', "kernel.cpp.j2", target, lambda: "int x;")

    other = host_targets()[-1]
    if other == "cpu:generic":
        pytest.skip("this machine runs one target")
    new_cache().load_stepping([request(other)])
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    monkeypatch.setattr(misses, "host_targets", lambda: (other,) if runs else ())
    with pytest.raises(MissingKernelError) as error:
        new_cache().load_stepping([request("cpu:generic")])
    assert (f"FLASHATTN_JIT_TARGET={other} runs that one here" in str(error.value)) == runs


def test_a_failed_call_leaves_nothing_and_a_later_one_works(
    missing: MissingKernelError, q: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not tmp_path.joinpath("empty").exists()
    assert not tmp_path.joinpath("locks").exists()
    launches.forget_launches()
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "missing")
    fa.attention(q, q, q, fa.variant(score_mod=lambda s, b, h, i, j: s * 0.40625))
    assert len(launches._launches) == 1
