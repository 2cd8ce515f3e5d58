"""CPU targets: their flags, and how g++ or clang++ builds one source."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

from flashattn_jit import _paths
from flashattn_jit.errors import TargetError
from flashattn_jit.jit.compiler import Compiler

if TYPE_CHECKING:  # imported where a build starts
    from flashattn_jit.jit.driver import Job

SOURCE = "kernel.cpp"

_COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fstack-usage",
    # gcc notes at each function with a vector argument that older gccs passed it otherwise.
    "-Wno-psabi",
)
_X86_FLAGS = {
    "cpu:generic": ("-march=x86-64",),
    "cpu:avx2": ("-march=x86-64-v3",),
    "cpu:avx512": ("-march=x86-64-v4",),
    "cpu:avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    # AMX is written as asm: compilers without its flags build it too.
    "cpu:amx_bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
}
_LINK_FLAGS = ("-fopenmp", "-Wl,--as-needed", "-Wl,-s", "-Wl,-z,defs")

# file:line:column: in front of a function in a stack report; either may hold colons.
_PLACE = re.compile(r"^.*?:\d+:\d+:")


def flags(target: str) -> tuple[str, ...]:
    """All flags that decide the code, in order. Raises TargetError for an unknown target."""
    return (*_compile_flags(target), *_LINK_FLAGS)


def _compile_flags(target: str) -> tuple[str, ...]:
    if target == "cpu:generic" and platform.machine() not in ("x86_64", "AMD64"):
        return _COMMON_FLAGS
    if target not in _X86_FLAGS:
        raise TargetError(f"target {target!r} is unknown; known are {', '.join(_X86_FLAGS)}")
    return (*_COMMON_FLAGS, *_X86_FLAGS[target])


def job(
    source: Path, work: Path, key: str, target: str, compiler: Compiler, log: Path, commands: Path
) -> Job:
    """The build of the staged `source` in the folder `work`."""
    from flashattn_jit.jit.driver import Job, quote, write_wrapper

    # Where the build lies must not reach the artifact, nor anything random.
    here = [
        f"-I{_paths.include_dir()}",
        f"-ffile-prefix-map={source.parent}/=",
        f"-ffile-prefix-map={_paths.include_dir()}/=",
        f"-frandom-seed={key}",
    ]
    cxx = write_wrapper(work / "cxx", compiler.command, log, commands)
    return Job(
        sources=(source,),
        work=work,
        compile_flags=[*_compile_flags(target), *map(quote, here)],
        link_flags=_LINK_FLAGS,
        settings={"CXX": cxx},
    )


def write_resources(work: Path, artifact_bytes: int, report: Path) -> None:
    """The stack frame of each function, largest first: a frame of many vectors is a spill."""
    frames = []
    for usage in work.glob("*.su"):
        for line in usage.read_text(errors="replace").splitlines():
            place, size, *_ = line.split("\t")
            frames.append((int(size), _PLACE.sub("", place)))
    resources = {
        "artifact_bytes": artifact_bytes,
        "stack_bytes": [[name, size] for size, name in sorted(frames, reverse=True)],
    }
    report.write_text(json.dumps(resources, indent=1) + "\n")
