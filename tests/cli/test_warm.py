"""`warm`, `pack`, `unpack` and `manifest`: from a variant to another machine's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flashattn_jit as fa
from flashattn_jit.codegen.document import line_of
from flashattn_jit.deploy.manifest.file import write_manifest

WARM = ("warm", "Full", "--head-dim", "16", "--dtype", "fp32", "--target", "cpu:generic",
        "--format", "dense")  # fmt: skip


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two kernels of full attention for head dim 16."""
    folder = tmp_path_factory.mktemp("warmed") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHATTN_JIT_CACHE_DIR", str(folder))
        patch.delenv("FLASHATTN_JIT_CACHE_PATH", raising=False)
        fa.warm(fa.Full(), head_dims=16, dtypes="fp32", targets="cpu:generic", formats=["dense"],
                progress=False, jobs=1)  # fmt: skip
    return folder


@pytest.fixture
def built(warmed: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `warmed` as the user's folder."""
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(warmed))
    return warmed


def test_warm_compiles_what_is_missing_and_names_it(process, cache: Path) -> None:
    done = process(*WARM, "--jobs", 2)
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stderr.splitlines() if "compiled in" in line]) == 2
    assert "2 compiled" in done.stdout
    again = process(*WARM, "--json")
    report = json.loads(again.stdout)
    assert (report["compiled"], report["failed"], len(report["kernels"])) == (0, 0, 2)
    assert {kernel["layer"] for kernel in report["kernels"]} == {"user"}
    assert again.stderr == ""


def test_under_never_warm_checks_a_cache(run, built: Path, monkeypatch) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    assert run(*WARM).exit_code == 0
    missing = run(*WARM, "--head-dim", "24")
    assert missing.exit_code == 3
    assert "in no layer" in missing.stdout


def test_a_bar_on_a_terminal_names_what_is_compiling(on_terminal, cache: Path) -> None:
    code, text = on_terminal(*WARM, "--jobs", 1)
    assert code == 0
    assert "Full" in text
    assert "0/2" in text
    assert "2/2" in text


def test_a_pack_goes_to_another_folder_and_serves_there(
    run, run_json, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, layer = tmp_path / "k.pack", tmp_path / "layer"
    packed = run_json("pack", pack)
    assert (packed["entries"], packed["targets"]) == (2, [["cpu:generic", 2]])
    unpacked = run_json("unpack", pack, "--directory", layer)
    assert (unpacked["added"], unpacked["present"]) == (2, 0)
    assert run_json("unpack", pack, "--directory", layer)["present"] == 2
    monkeypatch.setenv("FLASHATTN_JIT_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    for place in (pack, layer):
        monkeypatch.setenv("FLASHATTN_JIT_CACHE_PATH", str(place))
        assert run(*WARM).exit_code == 0
    assert not (tmp_path / "none").exists()


def test_a_pack_of_a_key_that_is_not_there_is_refused(run, built: Path, tmp_path: Path) -> None:
    assert run("pack", tmp_path / "k.pack", "--key", "").exit_code == 2
    assert run("pack", tmp_path / "k.pack", "--target", "sm_90").exit_code == 9
    assert not (tmp_path / "k.pack").exists()


def test_manifests_are_shown_and_merged(run_json, tmp_path: Path, spec_of, cache: Path) -> None:
    a, b, out = (tmp_path / f"{name}.jsonl" for name in "abc")
    write_manifest(a, [line_of(spec_of(32)), line_of(spec_of(64))])
    write_manifest(b, [line_of(spec_of(64)), line_of(spec_of(128))])
    assert run_json("manifest", "merge", a, b, "--output", out)["lines"] == 3
    kernels = [line["kernel"] for line in run_json("manifest", "show", out)["lines"]]
    assert sorted(kernels) == sorted(f"prefill 96x96 d{d} fp32" for d in (32, 64, 128))


def test_hooks_given_as_text_are_refused_unless_they_are_trusted(
    run, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashattn_jit.deploy.wanted.specs import wanted_specs

    monkeypatch.setenv("FLASHATTN_JIT_COMPILE", "never")
    variant = fa.variant(score_mod=fa.cpp("return score * 2.0f;"))
    path = tmp_path / "m.jsonl"
    specs = wanted_specs(variant, head_dims=16, dtypes="fp32", targets="cpu:generic")
    write_manifest(path, map(line_of, specs))
    refused = run("warm", path)
    assert refused.exit_code == 8
    assert "C++" in refused.stderr
    assert run("warm", path, "--allow-cpp").exit_code == 3  # taken, but not in the cache


def test_a_manifest_without_kernels_is_an_error(run, tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.touch()
    for what, given in ((path, None), ("-", "\n")):
        result = run("warm", what, input=given)
        assert result.exit_code == 8, result.output
        assert f"{what}: has no kernels; record" in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("warm", "absent.jsonl"), "there is no manifest"),
        (("warm", "Full"), "--head-dim and --dtype"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_usage_errors_name_what_is_wrong(run, cache: Path, args: tuple, words: str) -> None:
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert words in result.stderr


HEAD_DIM = "is no head dim such as 64, nor two as 576/512"
LIBRARY = ("manifest", "library", "--output", "m.jsonl")


@pytest.mark.parametrize(
    ("command", "option", "value", "words"),
    [
        (WARM, "--format", "odd", "is not one of dense"),
        (WARM, "--target", "sm_12", "is not one of host"),
        (WARM, "--dtype", "fp12", "is not supported: q takes fp32, bf16, fp16, not 'fp12'"),
        (WARM, "--dtype", "int8", "is not supported: q takes fp32"),
        (
            WARM,
            "--dtype",
            "bf16/fp12",
            "is not supported: k and v take fp32, bf16, fp16, int8, fp8, e5m2, int4, fp8_ds_mla, "
            "not 'fp12'",
        ),
        (WARM, "--dtype", "bf16/bf16/bf16/bf16", "is not one dtype, q/kv or q/k/v"),
        *(
            (WARM, "--head-dim", one, "is not supported: head dims are 1 to 576")
            for one in ("577", "64/577")
        ),
        *(
            (("bench", "Causal"), "--seconds", one, "is not a number of seconds, 0 or more")
            for one in ("nan", "inf", "-1", "x")
        ),
        *((WARM, "--head-dim", one, HEAD_DIM) for one in ("16/x", "1/2/3", "0", "-8", "", "1.5")),
        *((WARM, "--heads", one, "is not 32 or 32:8") for one in ("a:b", "0", "8:0", "8:", ":8")),
        (WARM, "--param", "x", "is not name=value"),
        (LIBRARY, "--head-dim", "16/x", HEAD_DIM),
        (LIBRARY, "--dtype", "int8", "is not supported: q takes fp32"),
        (("explain", "Causal"), "--q-offset", "x", "is not a number or end"),
        (("explain", "Causal"), "--q-offset", "1.5", "is not a number or end"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_values_of_options_are_refused_with_the_usage(
    run, cache: Path, command: tuple, option: str, value: str, words: str
) -> None:
    result = run(*command, f"{option}={value}")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"Usage: flashattn-jit {command[0]} ")
    assert f"Invalid value for '{option}': {value!r} {words}" in result.stderr


def test_a_wheel_is_written_to_a_folder_with_its_version(
    run, run_json, built: Path, tmp_path: Path
) -> None:
    packed = run_json("pack", tmp_path, "--wheel", "Acme-Kernels", "--wheel-version", "1.2")
    assert packed["entries"] == 2
    path = Path(packed["path"])
    assert path.parent == tmp_path
    assert path.name.startswith("acme_kernels-1.2-py3-none-")
    assert path.stat().st_size == packed["bytes"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give the PATH of the file, or --wheel NAME"),
        (["k.pack", "--wheel-version", "1.2"], "--wheel-version is for --wheel NAME"),
        (["--wheel", "a b"], "'a b' is no name of a wheel"),
        (["--wheel", "a", "--wheel-version", "x"], "version 'x' of a wheel"),
    ],
)
def test_wrong_options_of_a_wheel_are_named(run, built: Path, options, words: str) -> None:
    done = run("pack", *options)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())


def test_the_librarys_manifest_is_narrowed(run_json, tmp_path: Path) -> None:
    path = tmp_path / "library.jsonl"
    written = run_json(
        "manifest", "library", "--output", path, "--head-dim", "80", "--dtype", "fp16",
        "--target", "cpu:avx2",
    )  # fmt: skip
    shown = run_json("manifest", "show", path)["lines"]
    assert written["lines"] == len(shown) == 80
    assert {(one["target"], *one["kernel"].split()[2:]) for one in shown} == {
        ("cpu:avx2", "d80", "fp16")
    }
