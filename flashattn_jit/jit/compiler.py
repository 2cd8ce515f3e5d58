"""Which compilers compile kernels, and their identity in the cache's paths.

CPU targets take a C++ compiler, CUDA targets nvcc with that C++ compiler beneath it. The identity
is made of the compilers' own version texts. Asking for it costs processes, which a cache hit must
not start; so the cache remembers it by a fingerprint of the executables' content.
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
from flashattn_jit.codegen.target import is_cuda
from flashattn_jit.jit.cuda_toolkit import find_toolkit

# An executable's first block holds its ELF build id, its last one the section table.
_BLOCK_BYTES = 64 * 1024
_VERSION_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler found on this machine: its command, and a fingerprint of its executable.

    `host` is the C++ compiler that nvcc calls, and None for one that compiles by itself.
    """

    command: tuple[str, ...]
    fingerprint: str
    host: Compiler | None = None


@dataclass(frozen=True, slots=True)
class CompilerIdentity:
    """`id` is a folder name made from `version`, the compiler's own words about itself."""

    id: str
    version: str


def find_compiler(target: str = "cpu:generic") -> Compiler | None:
    """The compiler for a target, None where this machine has none: `missing_cxx` says why."""
    try:
        command = shlex.split(env.cxx())
    except ValueError:
        return None
    executable = shutil.which(command[0]) if command else None
    if executable is None:
        return None
    try:
        fingerprint = _fingerprint(executable, command[1:])
    except OSError:
        return None
    host = Compiler((executable, *command[1:]), fingerprint)
    if not is_cuda(target):
        return host
    toolkit = find_toolkit()
    if toolkit is None:
        return None
    # The toolkit's folder decides headers and libraries, beside the executable's content.
    nvcc = str(toolkit.nvcc)
    return Compiler((nvcc,), _fingerprint(nvcc, [str(toolkit.home), host.fingerprint]), host)


def missing_cxx() -> str:
    """Why there is no C++ compiler, with the variable that should name one, and what to do."""
    variable, value = env.cxx_variable(), env.cxx()
    remedy = "install g++, or set FLASHATTN_JIT_CXX to one"
    if variable == "CXX":
        remedy = f"correct or unset CXX, {remedy}"
    if not variable:
        return f"no C++ compiler was found, because {value} is not on PATH; {remedy}"
    try:
        program = (shlex.split(value) or [""])[0]
    except ValueError as error:
        why = f"is no command line ({str(error).lower()})"
    else:
        found = shutil.which(program)
        if found is not None:
            why = f"names {found}, which cannot be read"
        elif os.sep in program and Path(program).exists():
            why = f"names {program}, which is no program that this user can execute"
        else:
            where = "does not exist" if os.sep in program else "is not on PATH"
            why = f"names {program}, which {where}"
    return f"no C++ compiler was found, because {variable}={value!r} {why}; {remedy}"


def cxx_words() -> str:
    """The compiler that a variable names, such as `CXX='clang++'`; empty for the default."""
    variable = env.cxx_variable()
    return f"{variable}={env.cxx()!r}" if variable else ""


def identify(
    compiler: Compiler, recall: Callable[[str], CompilerIdentity | None]
) -> CompilerIdentity:
    """The compiler's identity, from `recall(fingerprint)` or else by asking it."""
    return recall(compiler.fingerprint) or ask_version(compiler)


def ask_version(compiler: Compiler) -> CompilerIdentity:
    """Runs the compiler for its version. One that does not answer gets the id `unknown-*`."""
    if compiler.host is None:
        version = _host_version(compiler)
        name = _readable(version.partition("\n")[0])
    else:
        # Its last two lines are the release and the build; the others a copyright.
        own = (_answer(compiler, "--version") or "").splitlines()[-2:]
        version = "\n".join([*own, _host_version(compiler.host)])
        release = re.search(r"\bV(\d+(?:\.\d+)+)", version)
        name = f"nvcc-{release[1]}" if release else "unknown"
    suffix = hashlib.sha256((version.strip() or compiler.fingerprint).encode()).hexdigest()[:8]
    return CompilerIdentity(f"{name}-{suffix}", version.strip())


def _host_version(compiler: Compiler) -> str:
    answers = [_answer(compiler, question) for question in ("--version", "-dumpmachine")]
    # gcc begins with the name it was called by: c++ and g++ are one compiler.
    words = [
        re.sub(r"^\S+ (?=\()", "", answer.splitlines()[0].strip()) for answer in answers if answer
    ]
    # Arguments change what it makes, but not what it says of itself. A launcher such as ccache is
    # named in front of the compiler.
    arguments = list(compiler.command[1:])
    while arguments and not arguments[0].startswith(("-", "@")):
        arguments.pop(0)
    return "\n".join([*words, *([shlex.join(arguments)] if arguments else [])])


def _answer(compiler: Compiler, question: str) -> str | None:
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
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None


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
