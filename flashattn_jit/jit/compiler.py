"""Which C++ compiler compiles kernels, and its identity in the cache's paths.

The identity is the compiler's own version text. Asking for it costs a process, which a cache hit
must not start; so the cache remembers it by a fingerprint of the executable's content.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flashattn_jit import env

# An executable's first block holds its ELF build id, its last one the section table.
_BLOCK_BYTES = 64 * 1024
_VERSION_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler found on this machine: its command, and a fingerprint of its executable."""

    command: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class CompilerIdentity:
    """`id` is a folder name made from `version`, the compiler's own words about itself."""

    id: str
    version: str


def find_compiler() -> Compiler | None:
    """The compiler that the environment names, None where there is no such executable."""
    command = shlex.split(env.cxx())
    executable = shutil.which(command[0]) if command else None
    if executable is None:
        return None
    return Compiler((executable, *command[1:]), _fingerprint(executable, command[1:]))


def identify(
    compiler: Compiler, recall: Callable[[str], CompilerIdentity | None]
) -> CompilerIdentity:
    """The compiler's identity, from `recall(fingerprint)` or else by asking it."""
    return recall(compiler.fingerprint) or ask_version(compiler)


def ask_version(compiler: Compiler) -> CompilerIdentity:
    """Runs the compiler for its version. One that does not answer gets the id `unknown-*`."""
    answers = []
    for question in ("--version", "-dumpmachine"):
        try:
            answer = subprocess.run(
                [*compiler.command, question],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_VERSION_TIMEOUT_S,
                env={**os.environ, "LC_ALL": "C"},
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if answer.returncode == 0 and answer.stdout.strip():
            # gcc begins with the name it was called by: c++ and g++ are one compiler.
            answers.append(
                re.sub(r"^\S+ (?=\()", "", answer.stdout.strip().splitlines()[0].strip())
            )
    version = "\n".join(answers)
    suffix = hashlib.sha256((version or compiler.fingerprint).encode()).hexdigest()[:8]
    return CompilerIdentity(f"{_readable(version)}-{suffix}", version)


def _readable(version: str) -> str:
    number = re.search(r"\d+(?:\.\d+)+", version)
    name = "clang" if "clang" in version.lower() else "gcc" if number else "unknown"
    return f"{name}-{number.group()}" if number else name


def _fingerprint(executable: str, arguments: list[str]) -> str:
    digest = hashlib.sha256("\0".join(arguments).encode())
    with Path(executable).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "big"))
        digest.update(file.read(_BLOCK_BYTES))
        if size > _BLOCK_BYTES:
            file.seek(max(_BLOCK_BYTES, size - _BLOCK_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:32]
