"""Turns a rendered source into the files of a cache entry: g++ for CPU targets, nvcc for CUDA."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from flashattn_jit.codegen.target import is_cuda
from flashattn_jit.jit import cpp, cuda_toolkit, nvcc
from flashattn_jit.jit.compiler import Compiler, missing_cxx
from flashattn_jit.jit.failure import BuildFailure, SpillError, failure
from flashattn_jit.jit.store import ARTIFACT

LOG = "build.log"
COMMAND = "command"
RESOURCES = "resources.json"
PTX = nvcc.PTX


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build took: `compile_s` seconds inside the driver."""

    compile_s: float


def flags_for(target: str) -> tuple[str, ...]:
    """The compiler's flags for a target, in order; they are part of the key.

    Raises TargetError for a target that no compiler flag is known for on this kind of machine.
    """
    return nvcc.flags(target) if is_cuda(target) else cpp.flags(target)


def source_name(target: str) -> str:
    """What an entry calls its source: kernel.cpp or kernel.cu."""
    return nvcc.SOURCE if is_cuda(target) else cpp.SOURCE


def build(
    source: str, key: str, target: str, compiler: Compiler | None, staging: Path
) -> BuildReport:
    """Compiles `source` into `staging`, leaving exactly the files of a cache entry but meta.json.

    The GIL is released while the compiler runs. Raises BuildFailure, with the source and the log in
    `staging`; SpillError where a CUDA kernel needs more registers than its tile leaves it, with all
    files in `staging`; OSError where `staging` cannot be written.
    """
    from flashattn_jit.jit.driver import drive

    toolkit = nvcc if is_cuda(target) else cpp
    # The key goes into the source, so that the source in an entry is all that was compiled.
    staged = staging / source_name(target)
    staged.write_text(f'#define FAJIT_KEY "{key}"\n#line 1 "{staged.name}"\n{source}')
    log = staging / LOG
    log.touch()
    if compiler is None:
        missing = missing_compiler(target)
        log.write_text(missing + "\n")
        raise BuildFailure(missing, None)
    work = staging / "build"
    work.mkdir(mode=0o700)
    start = time.perf_counter()
    try:
        job = toolkit.job(staged, work, key, target, compiler, log, staging / COMMAND)
        library = drive(job)
    except (RuntimeError, OSError) as error:
        words = nvcc.clean_names(log.read_text(errors="replace"))
        log.write_text(f"{words}\n{error}\n")
        raise failure(words, str(error)) from error
    compile_s = time.perf_counter() - start
    library.replace(staging / ARTIFACT)
    artifact_bytes = staging.joinpath(ARTIFACT).stat().st_size
    if is_cuda(target):
        complaints = _finish_cuda(work, staging, target, compiler, artifact_bytes)
    else:
        complaints = []
        cpp.write_resources(work, artifact_bytes, staging / RESOURCES)
    shutil.rmtree(work)
    if complaints:
        raise SpillError(complaints, compile_s)
    return BuildReport(compile_s)


def missing_compiler(target: str) -> str:
    """Why `find_compiler` found none for a target, and what to do."""
    if is_cuda(target) and cuda_toolkit.find_toolkit() is None:
        return cuda_toolkit.MISSING
    return missing_cxx()


def _finish_cuda(
    work: Path, staging: Path, target: str, compiler: Compiler, artifact_bytes: int
) -> list[str]:
    """Writes the PTX, the log and the resource report. Returns what exceeds the budget."""
    log = staging / LOG
    words = nvcc.clean_names(log.read_text(errors="replace"))
    log.write_text(words)
    nvcc.write_ptx(work, staging / PTX, compiler)
    report = nvcc.write_resources(
        words, staging.joinpath(PTX).read_text(), target, artifact_bytes, staging / RESOURCES
    )
    return report.complaints()
