"""Every error ends a command with its code from the table, in one block without a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flashattn_jit as fa
from flashattn_jit import errors
from flashattn_jit.cli.exit_codes import TABLE, exit_code
from flashattn_jit.jit.cache.entry import CorruptEntryError


def test_codes_and_names_are_unique() -> None:
    assert len({row.code for row in TABLE}) == len(TABLE) == len({row.name for row in TABLE})


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (errors.InputError("x"), "usage"),
        (errors.ParamError("x"), "usage"),
        (errors.EnvironmentVariableError("x"), "usage"),
        (errors.MissingKernelError("x"), "missing"),
        (errors.CompileError("x"), "compile"),
        (errors.WarmError("x"), "compile"),
        (CorruptEntryError(Path("x"), "y"), "corrupt"),
        (errors.UnsafeCacheError("x"), "unsafe"),
        (errors.CacheError("x"), "cache"),
        (errors.ManifestError("x"), "manifest"),
        (errors.PackError("x"), "pack"),
        (errors.TraceError("x"), "variant"),
        (errors.TargetError("x"), "target"),
        (FileNotFoundError("x"), "files"),
        (KeyboardInterrupt(), "interrupted"),
        (ZeroDivisionError("x"), "failed"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, BaseException) else x,
)
def test_errors_have_the_code_of_their_nearest_class(error: BaseException, name: str) -> None:
    assert exit_code(error).name == name


def test_every_public_error_has_a_code() -> None:
    for name in fa.__all__:
        found = getattr(fa, name)
        if isinstance(found, type) and issubclass(found, BaseException):
            assert exit_code(found("x")).code > 0


def test_the_documents_have_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
    for row in TABLE:
        assert f"| {row.code} | {row.name} | {row.meaning}" in text


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["nonsense"], 2, "No such command"),
        (["cache", "ls", "--nonsense"], 2, "No such option"),
        (["explain", "Causual"], 2, "did you mean Causal?"),
        (["explain", "Causal", "--q-len", "0"], 2, "q-len"),
        (["cache", "show", "abc"], 2, "no kernel's key begins with 'abc'"),
        (["cache", "gc", "--max-bytes", "much"], 2, "number of bytes"),
        (["manifest", "show", "-"], 8, "line 1"),
        *(
            ([*command, "no folder/x.png"], 13, "make it (mkdir -p 'no folder')")
            for command in (
                ["explain", "Causal", "--plot"],
                ["kv", "estimate", "llama", "--plot"],
                ["manifest", "merge", __file__, "--output"],
                ["manifest", "library", "--output"],
            )
        ),
        (["unpack", __file__], 9, ""),
    ],
    ids=lambda x: " ".join(x)[:30] if isinstance(x, list) else "",
)
def test_errors_are_one_block_on_stderr(
    args: list[str], code: int, words: str, run, cache: Path
) -> None:
    result = run(*args, input="no manifest\n")
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert not result.stdout


def test_a_miss_that_must_not_compile_names_layers_spec_and_command(process, cache: Path) -> None:
    done = process("explain", "Causal", FLASHATTN_JIT_COMPILE="never")
    assert done.returncode == 3
    assert done.stderr.startswith("error: kernel ")
    assert str(cache) in done.stderr
    assert '"head_dims":[64,64]' in done.stderr
    assert "flashattn-jit warm -" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_compiler_that_fails_is_code_4(process, cache: Path) -> None:
    done = process(
        "warm", "Full", "--head-dim", 16, "--dtype", "fp32", "--target", "cpu:generic", "--jobs", 1,
        FLASHATTN_JIT_CXX="/bin/false",
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert "failed" in done.stdout


def test_a_folder_that_others_may_write_is_code_6(run, entries, cache: Path) -> None:
    cache.chmod(0o777)
    result = run("cache", "ls")
    assert result.exit_code == 6
    assert "chmod go-w" in result.stderr


def test_json_errors_say_kind_code_and_message(run, cache: Path) -> None:
    result = run("cache", "show", "abc", "--json")
    error = json.loads(result.stdout)["error"]
    assert (error["kind"], error["exit"], error["code"]) == ("InputError", "usage", 2)
    assert "abc" in error["message"]
    assert result.exit_code == 2


def test_debug_shows_the_traceback(run, cache: Path) -> None:
    result = run("cache", "show", "abc", "--debug")
    assert "Traceback" in result.stderr
    assert result.exit_code == 2
