"""From a rendered source to the files of a cache entry: compilers, flags, builds.

CPU targets take a C++ compiler, CUDA targets nvcc with that C++ compiler as its host compiler
(`nvcc.py`). The identity of a compiler in the cache's paths is made of its version text. Reading
that starts processes, which a cache hit must not, so the cache stores it under a fingerprint of the
executables' content.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashattn_jit import env
from flashattn_jit.codegen.spec import BuildRequest
from flashattn_jit.codegen.targets import (
    CPU_ROWS,
    CPU_TARGETS,
    compiled_here,
    cpu_flags,
    is_cuda,
    machine,
)
from flashattn_jit.errors import TargetError
from flashattn_jit.jit.cache.entry import ARTIFACT, CompilerIdentity, KernelKey, kernel_key
from flashattn_jit.jit.compilation import nvcc
from flashattn_jit.jit.compilation.compile_job import (
    BuildFailure,
    Compiler,
    Job,
    SpillError,
    drive,
    failure,
    quote,
    write_wrapper,
)

# --- compilers -----------------------------------------------------------------------------------

# An executable's first block holds its ELF build id, its last one the section table.
_BLOCK_BYTES = 64 * 1024
_VERSION_TIMEOUT_S = 60.0


def find_compiler(target: str = "cpu:generic") -> Compiler | None:
    """The compiler for a target, or None: `missing_compiler` says why."""
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
    toolkit = nvcc.find_toolkit()
    if toolkit is None:
        return None
    # The folder of the toolkit decides the headers.
    executable = str(toolkit.nvcc)
    fingerprint = _fingerprint(executable, [str(toolkit.home), host.fingerprint])
    return Compiler((executable,), fingerprint, host)


def missing_cxx() -> str:
    """Why there is no C++ compiler, with the variable that should name one, and the remedy."""
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
    """The compiler's identity, from `recall(fingerprint)` or else by running it."""
    return recall(compiler.fingerprint) or ask_version(compiler)


def ask_version(compiler: Compiler) -> CompilerIdentity:
    """Runs the compiler for its version. If that fails its id is `unknown-*`."""
    if compiler.host is None:
        version = _host_version(compiler)
        name = _readable(version.partition("\n")[0])
    else:
        # The last two lines are the release and the build; the others are a copyright notice.
        own = (_answer(compiler, "--version") or "").splitlines()[-2:]
        version = "\n".join([*own, _host_version(compiler.host)])
        release = re.search(r"\bV(\d+(?:\.\d+)+)", version)
        name = f"nvcc-{release[1]}" if release else "unknown"
    suffix = hashlib.sha256((version.strip() or compiler.fingerprint).encode()).hexdigest()[:8]
    return CompilerIdentity(f"{name}-{suffix}", version.strip())


def _host_version(compiler: Compiler) -> str:
    answers = [_answer(compiler, question) for question in ("--version", "-dumpmachine")]
    # gcc's text begins with the name of its command: c++ and g++ are one compiler.
    lines = [
        re.sub(r"^\S+ (?=\()", "", answer.splitlines()[0].strip()) for answer in answers if answer
    ]
    # The arguments change the code but not the version text. The first ones may be a compiler that
    # is run by a launcher such as ccache.
    arguments = list(compiler.command[1:])
    while arguments and not arguments[0].startswith(("-", "@")):
        arguments.pop(0)
    return "\n".join([*lines, *([shlex.join(arguments)] if arguments else [])])


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


# --- flags ---------------------------------------------------------------------------------------

_CPU_FLAGS = (
    "-std=c++17",
    # With -O2 compilation takes 0.82 of the time and prefill 1.02 of it; with -O1 0.58 and 1.04,
    # and few rows of codes up to 1.18 (cpu:avx512_fp16, by hand).
    "-O3",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fstack-usage",
    # Suppresses gcc's note on the changed calling convention of vector arguments.
    "-Wno-psabi",
)
_LINK_FLAGS = ("-fopenmp", "-Wl,--as-needed", "-Wl,-s", "-Wl,-z,defs")


def flags_for(target: str) -> tuple[str, ...]:
    """The compiler's flags for a target, in order; they are part of the key.

    Raises TargetError for an unknown target, and for one of machines of another architecture.
    """
    return nvcc.flags(target) if is_cuda(target) else (*_cpu_flags(target), *_LINK_FLAGS)


def key_of(request: BuildRequest) -> KernelKey:
    """The key of a kernel. Raises TargetError as `flags_for`, FileNotFoundError."""
    return kernel_key(request.spec, request.template, request.target, flags_for(request.target))


def _cpu_flags(target: str) -> tuple[str, ...]:
    if target not in CPU_TARGETS:
        raise TargetError(f"target {target!r} is unknown; known are {', '.join(CPU_TARGETS)}")
    if not compiled_here(target):
        raise TargetError(
            f"target {target!r} is compiled on {CPU_ROWS[target].machine} machines, and this one "
            f"is {machine()}; load its kernels from a pack, or compile for {CPU_TARGETS[0]!r}"
        )
    return (*_CPU_FLAGS, *cpu_flags(target))


# --- building ------------------------------------------------------------------------------------

LOG = "build.log"
COMMAND = "command"
RESOURCES = "resources.json"
SOURCE = "kernel.cpp"
_WHOLE_ADDRESSES = "FAJIT_WHOLE_ADDRESSES"  # see `copied_to` in fajit/cuda/ptx/copy.h

# file:line:column: in front of a function in a stack report; file and function may contain colons.
_LOCATION = re.compile(r"^.*?:\d+:\d+:")


def source_name(target: str) -> str:
    """The file name of the source in an entry: kernel.cpp or kernel.cu."""
    return nvcc.SOURCE if is_cuda(target) else SOURCE


def build(
    source: str,
    key: str,
    target: str,
    compiler: Compiler | None,
    staging: Path,
    defined: tuple[str, ...] = (),
) -> float:
    """Compiles `source` into `staging`, leaving exactly the files of a cache entry but meta.json.

    defined: macros; a CUDA kernel with `cubin.illegal_copies` is compiled once more, with another.
    Returns the seconds inside the driver. The GIL is released while the compiler runs. Raises
    BuildFailure, with the source and the log in `staging`; SpillError where a CUDA kernel spills
    registers, with all files in `staging`; OSError where `staging` cannot be written.
    """
    # The key is part of the source, so that the source in an entry is complete.
    staged = staging / source_name(target)
    defines = "".join(f"#define {name}\n" for name in (f'FAJIT_KEY "{key}"', *defined))
    staged.write_text(f'{defines}#line 1 "{staged.name}"\n{source}')
    log = staging / LOG
    log.write_bytes(b"")
    if compiler is None:
        missing = missing_compiler(target)
        log.write_text(missing + "\n")
        raise BuildFailure(missing, None)
    work = staging / "build"
    work.mkdir(mode=0o700)
    start = time.perf_counter()
    try:
        job = nvcc.job if is_cuda(target) else _cpu_job
        library = drive(job(staged, work, key, target, compiler, log, staging / COMMAND))
    except (RuntimeError, OSError) as error:
        output = nvcc.clean_names(log.read_text(errors="replace"))
        log.write_text(f"{output}\n{error}\n")
        raise failure(output, str(error)) from error
    compile_s = time.perf_counter() - start
    library.replace(staging / ARTIFACT)
    if is_cuda(target) and _has_illegal_copies(staging / ARTIFACT, target):
        if _WHOLE_ADDRESSES in defined:
            raise BuildFailure("ptxas wrote copies that a GPU cannot execute", None)
        shutil.rmtree(work)
        return compile_s + build(source, key, target, compiler, staging, (_WHOLE_ADDRESSES,))
    artifact_bytes = staging.joinpath(ARTIFACT).stat().st_size
    resources: dict[str, Any]
    complaints: list[str] = []
    spill_bytes: int | None = None
    if is_cuda(target):
        from flashattn_jit.jit.compilation.ptxas_report import read_report

        output = nvcc.clean_names(log.read_text(errors="replace"))
        log.write_text(output)
        ptx = nvcc.write_ptx(work, staging / nvcc.PTX, compiler)
        report = read_report(output, ptx, target, staging.joinpath(ARTIFACT).read_bytes())
        complaints, spill_bytes = report.complaints(), report.spill_bytes
        resources = {"artifact_bytes": artifact_bytes, **asdict(report)}
    else:
        resources = {"artifact_bytes": artifact_bytes, "stack_bytes": _stack_frames(work)}
    staging.joinpath(RESOURCES).write_text(json.dumps(resources, indent=1) + "\n")
    shutil.rmtree(work)
    if complaints:
        raise SpillError(complaints, compile_s, spill_bytes)
    return compile_s


def _has_illegal_copies(artifact: Path, target: str) -> bool:
    from flashattn_jit.jit.compilation.cubin import illegal_copies

    return illegal_copies(artifact.read_bytes(), target) > 0


def missing_compiler(target: str) -> str:
    """Why `find_compiler` found none for a target, and the remedy."""
    if is_cuda(target) and nvcc.find_toolkit() is None:
        return nvcc.MISSING
    return missing_cxx()


def _cpu_job(
    source: Path, work: Path, key: str, target: str, compiler: Compiler, log: Path, commands: Path
) -> Job:
    """The build of the staged `source` in the folder `work`, by g++ or clang++."""
    # The artifact must not depend on the path of the build, nor on random names.
    here = [
        f"-I{env.include_dir()}",
        f"-ffile-prefix-map={source.parent}/=",
        f"-ffile-prefix-map={env.include_dir()}/=",
        f"-frandom-seed={key}",
    ]
    cxx = write_wrapper(work / "cxx", compiler.command, log, commands)
    return Job(
        sources=(source,),
        work=work,
        compile_flags=[*_cpu_flags(target), *map(quote, here)],
        link_flags=_LINK_FLAGS,
        settings={"CXX": cxx},
    )


def _stack_frames(work: Path) -> list[tuple[str, int]]:
    """(name, bytes) of each function's stack frame, largest first: a large frame is a spill."""
    frames = []
    for usage in work.glob("*.su"):
        for line in usage.read_text(errors="replace").splitlines():
            function, size, *_ = line.split("\t")
            frames.append((int(size), _LOCATION.sub("", function)))
    return [(name, size) for size, name in sorted(frames, reverse=True)]
