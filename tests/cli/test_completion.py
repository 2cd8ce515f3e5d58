"""The completion scripts and their completions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashattn_jit.codegen.targets import CUDA_TARGETS


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(run, run_json, shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert "_FLASHATTN_JIT_COMPLETE" in result.stdout
    assert run_json("completion", shell)["script"].strip() == result.stdout.strip()


def complete(process, *words: str) -> list[str]:
    """The completions of the last word."""
    done = process(
        _FLASHATTN_JIT_COMPLETE="bash_complete",
        COMP_WORDS=" ".join(("flashattn-jit", *words)),
        COMP_CWORD=str(len(words)),
    )
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_names_of_variants_targets_dtypes_and_keys_are_completed(process, entries) -> None:
    assert complete(process, "explain", "sli") == ["SlidingWindow"]
    assert complete(process, "warm", "Causal", "--target", "sm_9") == [
        name for name in CUDA_TARGETS if name.startswith("sm_9")
    ]
    assert complete(process, "bench", "Causal", "--dtype", "bf") == ["bf16", "bfloat16"]
    key = entries[0].key
    assert key[:16] in complete(process, "cache", "show", key[:2])
    assert complete(process, "cache", "pu") == ["push"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_by_the_script(run, tmp_path: Path, cache: Path) -> None:
    program = tmp_path / "flashattn-jit"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flashattn_jit "$@"\n')
    program.chmod(0o755)
    script = tmp_path / "script.bash"
    script.write_text(run("completion", "bash").stdout)
    done = subprocess.run(
        ["bash", "-c",
         f'source "{script}"; COMP_WORDS=(flashattn-jit ca); COMP_CWORD=1; '
         '_flashattn_jit_completion flashattn-jit; echo "${COMPREPLY[@]}"'],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["cache"], done.stderr
