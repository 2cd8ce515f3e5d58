"""`torch.utils.cpp_extension.load` as the driver of compilers, and the errors of a build.

Its lock waits for ever on a dead builder and its freshness check considers neither compiler nor
headers, so each build gets a new private folder. It runs ninja, which runs the compilers through
wrapper scripts that log their output.
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

# `load` links against these. Empty archives of these names save the linker from reading the symbols
# of libtorch_cpu, 0.3 s, none of which an artifact needs; and let a torch without CUDA build CUDA
# kernels.
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python", "c10_cuda", "torch_cuda", "cudart")
_EMPTY_ARCHIVE = b"!<arch>\n"

# Environment variables that compilers and linkers read: folders of headers and libraries, and paths
# that would end up in the artifact. They are unset, as only arguments are part of a key.
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
    # The child does not have the thread that held it.
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
    """The sources and compiler options of a build of `work`/kernel.so.

    `settings` are environment variables, None for one that must not be set. With `cuda_home` the
    sources are CUDA code.
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
    stubs = job.work / "stubs"
    stubs.mkdir()
    for name in _LIBRARIES:
        stubs.joinpath(f"lib{name}.a").write_bytes(_EMPTY_ARCHIVE)
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
    """Writes a script that runs `command` and logs its command line and its stderr.

    An argument that equals `rename[0]` is replaced by `rename[1]`. Returns the script's path.
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
        "# Runs the compiler, and logs its command line and its stderr.\n"
        f"{renaming if rename[0] else ''}"
        f'set -- {shlex.join(command)} "$@"\n'
        f"printf '%s\\n' \"$*\" >>{shlex.quote(str(commands))}\n"
        f'LC_ALL=C "$@" 2>>{shlex.quote(str(log))}\n'
    )
    path.chmod(0o700)
    return str(path)


def quote(flag: str) -> str:
    """A flag with a path in it, quoted for the shell and for ninja."""
    return shlex.quote(flag).replace("$", "$$")


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
    # Not set in the environment, where `load` looks: other threads read their compiler from it.
    cxx = settings.pop("CXX")
    # A new versioner: `load` would give the second library of one name another name.
    module_globals: dict[str, object] = {
        "JIT_EXTENSION_VERSIONER": ExtensionVersioner(),
        # Nothing is loaded: this machine may not have the instructions of the target.
        "_import_module_from_library": lambda name, path, is_python_module: None,
        "get_cxx_compiler": lambda: cxx,
    }
    if job.cuda_home is not None:
        # A torch without CUDA has no toolkit set.
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
    """The folder of the ninja package's executable, which may not be on PATH; empty if missing."""
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
    """The compiler failed; its output is in the staged build log."""

    def __init__(self, first_error: str, location: tuple[str, int] | None) -> None:
        super().__init__(first_error)
        self.first_error = first_error
        self.location = location


class SpillError(BuildFailure):
    """The kernel compiled, but spills registers, which a smaller tile may not.

    The staging folder holds a complete entry; `complaints` says what exceeds the budget.
    spill_bytes: what a request must allow a thread to spill for the kernel to be used; None if that
    does not suffice.
    """

    def __init__(
        self, complaints: Sequence[str], compile_s: float, spill_bytes: int | None = None
    ) -> None:
        super().__init__("; ".join(complaints), None)
        self.complaints = tuple(complaints)
        self.compile_s = compile_s
        self.spill_bytes = spill_bytes


def failure(output: str, driver_error: str) -> BuildFailure:
    """The first error in the compiler's output, else the error of the driver."""
    if found := _FIRST_ERROR.search(output):
        file, line = found["file"] or found["file2"], found["line"] or found["line2"]
        text = found["text"] or found["text2"] or found["text3"]
        return BuildFailure(text.strip(), (file, int(line)) if file else None)
    if found := _LINK_ERROR.search(output):
        return BuildFailure(found.group().strip(), None)
    if not output.strip() and driver_error.startswith(_DRIVER_ERROR):
        return BuildFailure("the compiler failed and said nothing", None)
    return BuildFailure((output.strip() or driver_error).splitlines()[0], None)
