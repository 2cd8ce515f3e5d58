"""Turns rendered C++ into an artifact: flags, and `torch.utils.cpp_extension.load` as the driver.

`load` is used as a driver only. Its lock waits for ever on a dead builder and its freshness check
knows neither compiler nor headers, so it always gets a fresh private folder. It runs ninja, which
runs the compiler through a script of ours that keeps what the compiler says.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashattn_jit import _paths
from flashattn_jit.errors import TargetError
from flashattn_jit.jit.compiler import Compiler
from flashattn_jit.jit.store import ARTIFACT

SOURCE = "kernel.cpp"
LOG = "build.log"
COMMAND = "command"
RESOURCES = "resources.json"

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
}
_LINK_FLAGS = ("-fopenmp", "-Wl,--as-needed", "-Wl,-s", "-Wl,-z,defs")

# `load` names these on every link line. Empty archives of their names keep the linker from reading
# libtorch_cpu's symbols, 0.3 s, for an artifact that needs none of them.
_TORCH_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
_EMPTY_ARCHIVE = b"!<arch>\n"

_FIRST_ERROR = re.compile(
    r"^(?:(?P<file>[^\n]*?):(?P<line>\d+)(?::\d+)?: )?[^\n:]*?(?:fatal )?error: (?P<text>[^\n]*)$",
    re.MULTILINE,
)
_LINK_ERROR = re.compile(r"^[^\n]*(?:undefined reference|cannot find)[^\n]*$", re.MULTILINE)
# file:line:column: in front of a function in a stack report; either may hold colons.
_PLACE = re.compile(r"^.*?:\d+:\d+:")
_DRIVER_ERROR = "Error building extension"

# `load` reads os.environ and its module's globals, so one build at a time may set them.
_load_lock = threading.Lock()


def _reset_after_fork() -> None:
    # The thread that held it is not in the child.
    global _load_lock
    _load_lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build took: `compile_s` seconds inside the driver."""

    compile_s: float


class BuildFailure(Exception):
    """The compiler failed; its words are in the staged build log."""

    def __init__(self, first_error: str, location: tuple[str, int] | None) -> None:
        super().__init__(first_error)
        self.first_error = first_error
        self.location = location


def flags_for(target: str) -> tuple[str, ...]:
    """The compiler's flags for a target, in order; they are part of the key.

    Raises TargetError for a target that no compiler flag is known for on this kind of machine.
    """
    return (*_compile_flags(target), *_LINK_FLAGS)


def _compile_flags(target: str) -> tuple[str, ...]:
    if target == "cpu:generic" and platform.machine() not in ("x86_64", "AMD64"):
        return _COMMON_FLAGS
    if target not in _X86_FLAGS:
        raise TargetError(f"target {target!r} is unknown; known are {', '.join(_X86_FLAGS)}")
    return (*_COMMON_FLAGS, *_X86_FLAGS[target])


def build(
    source: str, key: str, target: str, compiler: Compiler | None, staging: Path
) -> BuildReport:
    """Compiles `source` into `staging`, leaving exactly the files of a cache entry but meta.json.

    The GIL is released while the compiler runs. Raises BuildFailure, with the source and the log in
    `staging`; OSError where `staging` cannot be written.
    """
    # The key goes into the source, so that the source in an entry is all that was compiled.
    staging.joinpath(SOURCE).write_text(f'#define FAJIT_KEY "{key}"\n#line 1 "{SOURCE}"\n{source}')
    log = staging / LOG
    log.touch()
    if compiler is None:
        message = "no C++ compiler was found: install g++, or set FLASHATTN_JIT_CXX to one"
        log.write_text(message + "\n")
        raise BuildFailure(message, None)
    work = staging / "build"
    work.mkdir(mode=0o700)
    start = time.perf_counter()
    try:
        _drive(staging, work, key, target, _write_wrapper(work, compiler, log, staging / COMMAND))
    except (RuntimeError, OSError) as error:
        words = log.read_text(errors="replace")
        with log.open("a") as file:
            file.write(f"\n{error}\n")
        raise _failure(words, str(error)) from error
    compile_s = time.perf_counter() - start
    work.joinpath("kernel.so").replace(staging / ARTIFACT)
    _write_resources(work, staging)
    shutil.rmtree(work)
    return BuildReport(compile_s)


def _drive(staging: Path, work: Path, key: str, target: str, wrapper: Path) -> None:
    import torch
    import torch.utils.cpp_extension as cpp_extension

    # Where the build lies must not reach the artifact, nor anything random.
    here = [
        f"-ffile-prefix-map={staging}/=",
        f"-ffile-prefix-map={_paths.include_dir()}/=",
        f"-frandom-seed={key}",
    ]
    with _load_lock, _driver_state(cpp_extension, wrapper):
        library = cpp_extension.load(
            name="kernel",
            sources=[str(staging / SOURCE)],
            extra_cflags=[*_compile_flags(target), *map(_quote, here)],
            extra_ldflags=[*_LINK_FLAGS, _quote(f"-L{_write_stubs(work)}")],
            extra_include_paths=[str(_paths.include_dir())],
            build_directory=str(work),
            with_cuda=False,
            is_python_module=False,
        )
        # Loaded under its staging name; the same file is loaded again once it is published.
        torch.ops.loaded_libraries.discard(str(library))


@contextlib.contextmanager
def _driver_state(cpp_extension: object, wrapper: Path) -> Iterator[None]:
    """The environment and module globals that `load` needs, restored at the end."""
    from torch.utils._cpp_extension_versioner import ExtensionVersioner

    settings = {
        "CXX": str(wrapper),
        "TORCH_NO_COMPILER_WRAPPER": "1",
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",
        "PATH": os.pathsep.join(filter(None, (_ninja_dir(), os.environ.get("PATH", "")))),
    }
    previous = {name: os.environ.get(name) for name in settings}
    versioner = cpp_extension.JIT_EXTENSION_VERSIONER  # type: ignore[attr-defined]
    # It remembers what it built by name, and would rename our second kernel.
    cpp_extension.JIT_EXTENSION_VERSIONER = ExtensionVersioner()  # type: ignore[attr-defined]
    os.environ.update(settings)
    try:
        yield
    finally:
        cpp_extension.JIT_EXTENSION_VERSIONER = versioner  # type: ignore[attr-defined]
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _ninja_dir() -> str:
    """The folder of the ninja package's executable: an unactivated environment's is not on PATH."""
    try:
        import ninja
    except ImportError:
        return ""
    return str(ninja.BIN_DIR)


def _write_wrapper(work: Path, compiler: Compiler, log: Path, command: Path) -> Path:
    wrapper = work / "cxx"
    wrapper.write_text(
        "#!/bin/sh\n"
        "# Runs the compiler, keeping its command line and what it says.\n"
        f'set -- {shlex.join(compiler.command)} "$@"\n'
        f"printf '%s\\n' \"$*\" >>{shlex.quote(str(command))}\n"
        f'LC_ALL=C "$@" 2>>{shlex.quote(str(log))}\n'
    )
    wrapper.chmod(0o700)
    return wrapper


def _write_stubs(work: Path) -> Path:
    folder = work / "stubs"
    folder.mkdir()
    for name in _TORCH_LIBRARIES:
        folder.joinpath(f"lib{name}.a").write_bytes(_EMPTY_ARCHIVE)
    return folder


def _write_resources(work: Path, staging: Path) -> None:
    """The stack frame of each function, largest first: a frame of many vectors is a spill."""
    frames = []
    for report in work.glob("*.su"):
        for line in report.read_text(errors="replace").splitlines():
            place, size, *_ = line.split("\t")
            frames.append((int(size), _PLACE.sub("", place)))
    resources = {
        "artifact_bytes": staging.joinpath(ARTIFACT).stat().st_size,
        "stack_bytes": [[name, size] for size, name in sorted(frames, reverse=True)],
    }
    staging.joinpath(RESOURCES).write_text(json.dumps(resources, indent=1) + "\n")


def _failure(words: str, driver_error: str) -> BuildFailure:
    """The first error in the compiler's words; in the driver's, where it did not get that far."""
    if found := _FIRST_ERROR.search(words):
        location = (found["file"], int(found["line"])) if found["file"] else None
        return BuildFailure(found["text"], location)
    if found := _LINK_ERROR.search(words):
        return BuildFailure(found.group().strip(), None)
    if not words.strip() and driver_error.startswith(_DRIVER_ERROR):
        return BuildFailure("the compiler failed and said nothing", None)
    return BuildFailure((words.strip() or driver_error).splitlines()[0], None)


def _quote(flag: str) -> str:
    # Once for the shell, once for ninja.
    return shlex.quote(flag).replace("$", "$$")
