"""`torch.utils.cpp_extension.load` as the driver of compilers.

It is a driver only. Its lock waits for ever on a dead builder and its freshness check knows neither
compiler nor headers, so it always gets a fresh private folder. It runs ninja, which runs the
compilers through scripts of ours that keep what they say. Last: how a build fails, and which of a
compiler's words say why.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# `load` names these on every link line. Empty archives of their names keep the linker from reading
# libtorch_cpu's symbols, 0.3 s, for an artifact that needs none of them; and let a torch without
# CUDA build CUDA kernels.
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python", "c10_cuda", "torch_cuda", "cudart")
_EMPTY_ARCHIVE = b"!<arch>\n"

# What compilers and linkers read beside their arguments, which alone are in a key: folders of
# headers and libraries, and paths that would end up in the artifact.
_UNSET = (
    "CCC_OVERRIDE_OPTIONS",
    "COMPILER_PATH",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "C_INCLUDE_PATH",
    "DEPENDENCIES_OUTPUT",
    "GCC_EXEC_PREFIX",
    "LD_RUN_PATH",
    "LIBRARY_PATH",
    "SUNPRO_DEPENDENCIES",
)

# `load` reads os.environ and its module's globals, so one build at a time may set them.
_load_lock = threading.Lock()


def _reset_after_fork() -> None:
    # The thread that held it is not in the child.
    global _load_lock
    _load_lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler found on this machine: its command, and a fingerprint of its executable.

    `host` is the C++ compiler that nvcc calls, and None for one that compiles by itself.
    """

    command: tuple[str, ...]
    fingerprint: str
    host: Compiler | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """Sources to build into `work`/kernel.so, and what the compilers are told.

    `settings` are environment variables, None for one that must not be set. `cuda_home` makes it a
    build of CUDA code.
    """

    sources: Sequence[Path]
    work: Path
    compile_flags: Sequence[str]
    link_flags: Sequence[str]
    settings: Mapping[str, str | None] = field(default_factory=dict)
    cuda_home: Path | None = None


def drive(job: Job) -> Path:
    """Builds a job's shared object, without loading it, and returns its path.

    Raises RuntimeError where a compiler fails, OSError where `work` cannot be written.
    """
    import torch.utils.cpp_extension as cpp_extension

    is_cuda = job.cuda_home is not None
    stubs = _write_stubs(job.work)
    flags = [*job.compile_flags]
    with _load_lock, _driver_state(cpp_extension, job):
        cpp_extension.load(
            name="kernel",
            sources=[str(source) for source in job.sources],
            extra_cflags=[] if is_cuda else flags,
            extra_cuda_cflags=flags if is_cuda else [],
            extra_ldflags=[quote(f"-L{stubs}"), *job.link_flags],
            build_directory=str(job.work),
            with_cuda=is_cuda,
            is_python_module=False,
        )
    return job.work / "kernel.so"


def write_wrapper(
    path: Path,
    command: Sequence[str],
    log: Path,
    commands: Path,
    rename: tuple[str, str] = ("", ""),
) -> str:
    """Writes a script that runs `command`, keeping its command line and what it says.

    An argument that equals `rename[0]` becomes `rename[1]`. Returns the script's path.
    """
    renaming = (
        "for argument do\n"
        "  shift\n"
        f'  [ "$argument" = {shlex.quote(rename[0])} ] && argument={shlex.quote(rename[1])}\n'
        '  set -- "$@" "$argument"\n'
        "done\n"
    )
    path.write_text(
        "#!/bin/sh\n"
        "# Runs the compiler, keeping its command line and what it says.\n"
        f"{renaming if rename[0] else ''}"
        f'set -- {shlex.join(command)} "$@"\n'
        f"printf '%s\\n' \"$*\" >>{shlex.quote(str(commands))}\n"
        f'LC_ALL=C "$@" 2>>{shlex.quote(str(log))}\n'
    )
    path.chmod(0o700)
    return str(path)


def quote(flag: str) -> str:
    """A flag with a path in it, once for the shell, once for ninja."""
    return shlex.quote(flag).replace("$", "$$")


def _write_stubs(work: Path) -> Path:
    folder = work / "stubs"
    folder.mkdir()
    for name in _LIBRARIES:
        folder.joinpath(f"lib{name}.a").write_bytes(_EMPTY_ARCHIVE)
    return folder


@contextlib.contextmanager
def _driver_state(cpp_extension: Any, job: Job) -> Iterator[None]:
    """The environment and module globals that `load` needs, restored at the end."""
    from torch.utils._cpp_extension_versioner import ExtensionVersioner

    settings: dict[str, str | None] = {
        **dict.fromkeys(_UNSET),
        "TORCH_NO_COMPILER_WRAPPER": "1",
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",
        "PATH": os.pathsep.join(filter(None, (ninja_dir(), os.environ.get("PATH", "")))),
        **job.settings,
    }
    # Not by the environment, as `load` has it: other threads look for their compiler there.
    cxx = settings.pop("CXX")
    # It remembers what it built by name, and would rename our second kernel.
    module_globals: dict[str, object] = {
        "JIT_EXTENSION_VERSIONER": ExtensionVersioner(),
        # Nothing is loaded: this machine may not have the instructions that were compiled for.
        "_import_module_from_library": lambda name, path, is_python_module: None,
        "get_cxx_compiler": lambda: cxx,
    }
    if job.cuda_home is not None:
        # A torch without CUDA has found no toolkit.
        module_globals |= {"CUDA_HOME": str(job.cuda_home), "CUDNN_HOME": None}
    previous = {name: os.environ.get(name) for name in settings}
    previous_globals = {name: getattr(cpp_extension, name) for name in module_globals}
    try:
        _set_environment(settings)
        for name, value in module_globals.items():
            setattr(cpp_extension, name, value)
        yield
    finally:
        for name, value in previous_globals.items():
            setattr(cpp_extension, name, value)
        _set_environment(previous)


def _set_environment(settings: Mapping[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def ninja_dir() -> str:
    """The folder of the ninja package's executable: an unactivated environment's is not on PATH."""
    try:
        import ninja
    except ImportError:
        return ""
    return str(ninja.BIN_DIR)


# --- failures ------------------------------------------------------------------------------------

# gcc:   file:line:column: error: text
# nvcc:  file(line): error: text, error #20: text; ptxas file, line n; error : text
_FIRST_ERROR = re.compile(
    r"^(?:(?P<file>[^\n]*?):(?P<line>\d+)(?::\d+)?: )?[^\n:()]*?(?:fatal )?error: (?P<text>[^\n]*)$"
    r"|^(?P<file2>[^\n(]*?)\((?P<line2>\d+)\): [^\n:]*?error(?: #[\w-]+)?: (?P<text2>[^\n]*)$"
    r"|^(?:nvcc|ptxas|cicc|nvlink|fatbinary)[^\n]*?(?:fatal|error)\s*: (?P<text3>[^\n]*)$",
    re.MULTILINE,
)
_LINK_ERROR = re.compile(r"^[^\n]*(?:undefined reference|cannot find)[^\n]*$", re.MULTILINE)
_DRIVER_ERROR = "Error building extension"


class BuildFailure(Exception):
    """The compiler failed; its words are in the staged build log."""

    def __init__(self, first_error: str, location: tuple[str, int] | None) -> None:
        super().__init__(first_error)
        self.first_error = first_error
        self.location = location


class SpillError(BuildFailure):
    """The kernel compiled, but keeps registers in memory: a smaller tile may not.

    The staging folder holds a whole entry; `complaints` says what exceeds what.
    """

    def __init__(self, complaints: Sequence[str], compile_s: float) -> None:
        super().__init__("; ".join(complaints), None)
        self.complaints = tuple(complaints)
        self.compile_s = compile_s


def failure(words: str, driver_error: str) -> BuildFailure:
    """The first error in the compiler's words; in the driver's, where it did not get that far."""
    if found := _FIRST_ERROR.search(words):
        file, line = found["file"] or found["file2"], found["line"] or found["line2"]
        text = found["text"] or found["text2"] or found["text3"]
        return BuildFailure(text.strip(), (file, int(line)) if file else None)
    if found := _LINK_ERROR.search(words):
        return BuildFailure(found.group().strip(), None)
    if not words.strip() and driver_error.startswith(_DRIVER_ERROR):
        return BuildFailure("the compiler failed and said nothing", None)
    return BuildFailure((words.strip() or driver_error).splitlines()[0], None)
