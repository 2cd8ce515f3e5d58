"""CUDA targets: the toolkit of this machine, flags, and the build of one source by nvcc.

A source is built for exactly one architecture. nvcc writes absolute paths of sources into the
artifact and its PTX, and their modification times into the artifact. To make both independent of
the build folder, the compilers run inside it and get every path below /proc/self/cwd, and the
headers are copied there with a fixed time. torch need not have CUDA.
"""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashattn_jit import env
from flashattn_jit.codegen.targets import CODE_TARGETS, architecture, sm_version
from flashattn_jit.errors import TargetError
from flashattn_jit.jit.compilation.compile_job import Compiler, Job, quote, write_wrapper

# --- the toolkit ---------------------------------------------------------------------------------

MISSING = (
    "no CUDA compiler was found: install a CUDA toolkit (12.8 or later compiles for every target; "
    "https://developer.nvidia.com/cuda-downloads, or pip install nvidia-cuda-nvcc "
    "nvidia-cuda-runtime), or set FLASHATTN_JIT_CUDA_HOME to the folder that holds bin/nvcc; no "
    "GPU and no driver are needed to compile"
)

# The values of CUDART_VERSION for which fajit/cuda/lean/cuda_runtime.h may replace the toolkit's
# header: tested with every minor release (.ci/toolkits).
_LEAN = range(13000, 13060)

_HEADER = "cuda_runtime_api.h"
_INCLUDES = ("include", "targets/x86_64-linux/include", "targets/sbsa-linux/include")
_VERSION = re.compile(rb"^#define\s+CUDART_VERSION\s+(\d+)", re.MULTILINE)
_RELEASE = re.compile(r"release (\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A folder that holds bin/nvcc and the runtime's headers."""

    home: Path

    @property
    def nvcc(self) -> Path:
        """The compiler."""
        return self.home / "bin" / "nvcc"

    def runtime_version(self) -> int:
        """CUDART_VERSION of its headers, such as 13000; 0 where it cannot be read."""
        for name in _INCLUDES:
            header = self.home / name / _HEADER
            if header.is_file() and (found := _VERSION.search(header.read_bytes())):
                return int(found[1])
        return 0

    def takes_lean_header(self) -> bool:
        """Whether fajit/cuda/lean/cuda_runtime.h may replace the toolkit's header."""
        return self.runtime_version() in _LEAN


def find_toolkit() -> Toolkit | None:
    """The toolkit set by the environment, else of the nvcc on PATH, /usr/local/cuda, or wheels."""
    chosen = env.cuda_home()
    for home in [chosen] if chosen else _candidates():
        toolkit = Toolkit(home)
        # nvcc on PATH may be a script without headers beside it.
        if toolkit.nvcc.is_file() and any((home / i / _HEADER).is_file() for i in _INCLUDES):
            return toolkit
    return None


def cuda_version(compiler_version: str) -> tuple[int, int] | None:
    """The release in nvcc's version text, such as (13, 0)."""
    found = _RELEASE.search(compiler_version)
    return (int(found[1]), int(found[2])) if found else None


def _candidates() -> Iterator[Path]:
    yield from env.cuda_homes()
    if on_path := shutil.which("nvcc"):
        yield Path(on_path).resolve().parent.parent
    yield Path("/usr/local/cuda")
    yield from sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*"), reverse=True)


# --- building ------------------------------------------------------------------------------------

SOURCE = "kernel.cu"
PTX = "kernel.ptx"

_COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-lineinfo",
    "--expt-relaxed-constexpr",
    "--ptxas-options=-v",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-ffp-contract=off,-Wno-psabi",
    # The host functions of kernels call what fajit/cuda/registration.h defines.
    "-Xcompiler=-D__NV_LEGACY_LAUNCH",
)
_LINK_FLAGS = (
    "-Wl,--as-needed",
    # Calls must bind to fajit/cuda/registration.h, not to a cudart in the process, such as torch's.
    "-Wl,-Bsymbolic",
    "-Wl,--gc-sections",
    "-Wl,-s",
    "-Wl,-z,defs",
)
# With the lean header the host code is compiled without the toolkit's mathematical functions.
_LEAN_FLAGS = ("-Xcompiler=-D__COMMON_FUNCTIONS_H__",)
_LEAN_FOLDER = "fajit/cuda/lean"

_HERE = "/proc/self/cwd"
_INCLUDE = "include"
_LINE = re.compile(r'^([ \t]*#[ \t]*line[ \t]+\d+[ \t]+")(?!/)', re.MULTILINE)


def flags(target: str) -> tuple[str, ...]:
    """All flags that decide the code, in order. Raises TargetError for an unknown target."""
    return (*_compile_flags(target), *_LINK_FLAGS)


def _compile_flags(target: str) -> tuple[str, ...]:
    if target not in CODE_TARGETS:
        raise TargetError(f"target {target!r} is unknown; known are {', '.join(CODE_TARGETS)}")
    arch = target.removeprefix("sm_")
    return (*_COMMON_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}")


def job(
    source: Path, work: Path, key: str, target: str, compiler: Compiler, log: Path, commands: Path
) -> Job:
    """The build of the staged `source` in the folder `work`."""
    assert compiler.host is not None
    toolkit = Toolkit(Path(compiler.command[0]).parent.parent)
    compiled = work / SOURCE
    # nvcc would make relative paths in #line absolute.
    compiled.write_text(_LINE.sub(rf"\1{_HERE}/", source.read_text()))
    os.utime(compiled, (0, 0))
    _copy_headers(work / _INCLUDE)
    host, *host_arguments = compiler.host.command
    lean = toolkit.takes_lean_header()
    here = [
        *([f"-I{_HERE}/{_INCLUDE}/{_LEAN_FOLDER}"] if lean else []),
        f"-I{_HERE}/{_INCLUDE}",
        *(_LEAN_FLAGS if lean else ()),
        f"-ccbin={host}",
        *(f"-Xcompiler={argument}" for argument in host_arguments),
        f"-frandom-seed={key}",
        "--keep",
    ]
    rename = (str(compiled), f"{_HERE}/{SOURCE}")
    nvcc = write_wrapper(work / "nvcc", compiler.command, log, commands, rename)
    cxx = write_wrapper(work / "cxx", compiler.host.command, log, commands)
    return Job(
        sources=(compiled,),
        work=work,
        compile_flags=[*_compile_flags(target), *map(quote, here)],
        link_flags=_LINK_FLAGS,
        settings={
            "CXX": cxx,
            "CC": None,  # `load` would pass it as a second -ccbin
            "PYTORCH_NVCC": quote(nvcc),
            "TORCH_CUDA_ARCH_LIST": _torch_name(target),
            "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES": "1",
            # nvcc reads more flags from these.
            "NVCC_PREPEND_FLAGS": None,
            "NVCC_APPEND_FLAGS": None,
        },
        cuda_home=toolkit.home,
    )


def _torch_name(target: str) -> str:
    """``9.0a`` for ``sm_90a``."""
    major, minor = divmod(sm_version(target), 10)
    return f"{major}.{minor}{target.removeprefix(architecture(target))}"


def clean_names(text: str) -> str:
    """Compilers' output or PTX with the paths of files as in `#include`, without the folder."""
    return text.replace(f"{_HERE}/{_INCLUDE}/", "").replace(f"{_HERE}/", "")


def write_ptx(work: Path, ptx: Path, compiler: Compiler) -> str:
    """Writes the PTX of the artifact's machine code without paths of this machine; returns it."""
    home = str(Path(compiler.command[0]).parent.parent.resolve())
    text = clean_names(work.joinpath(PTX).read_text()).replace(f'"{home}/', '"cuda/')
    ptx.write_text(text)
    return text


def _copy_headers(folder: Path) -> None:
    root = env.include_dir()
    for path in root.rglob("*.h"):
        name = path.relative_to(root)
        if name.parts[:2] == ("fajit", "cpu"):
            continue
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        os.utime(copy, (0, 0))
