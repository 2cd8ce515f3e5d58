"""Compilers, ninja and the CUDA toolkit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path

import torch

from ... import env
from ...errors import EnvironmentVariableError
from ...jit.cache.layers import driver_version, oldest_driver, too_old
from ...jit.compilation import compile_job, nvcc
from ...jit.compilation.toolchain import ask_version, cxx_words, find_compiler, missing_cxx
from .check import Check, error, ok, warning
from .machine import driver_words

_TIMEOUT_S = 10.0
_LEAST_GCC = 11
_FULL_CUDA = (12, 8)  # compiles for every target
_PROBE = '#include <stdint.h>\nextern "C" int32_t probe() { return 1; }\n'

_UNCOMPILED = "kernels that no cache layer holds cannot be compiled"
_WITHOUT = (
    "install one, or compile elsewhere: `flashattn-jit warm --target ...` and `pack` on a machine "
    "with a toolkit, `unpack` here"
)


def _unless_never(section: Callable[[], Check]) -> Callable[[], Check]:
    """The section; where nothing may be compiled, what it finds is no fault."""

    @wraps(section)
    def check() -> Check:
        found = section()
        with suppress(EnvironmentVariableError):  # a check of its own says so
            if env.compile_mode() == "never" and (found.status != "ok" or found.remedy):
                detail = found.detail.removesuffix(f", so {_UNCOMPILED}")
                return ok(f"{detail}; FLASHATTN_JIT_COMPILE=never asks for none")
        return found

    return check


@_unless_never
def cxx() -> Check:
    """The C++ compiler: found, runs, links OpenMP."""
    compiler = find_compiler()
    if compiler is None:
        why, _, remedy = missing_cxx().partition("; ")
        return error(f"{why}, so {_UNCOMPILED}", remedy)
    identity = ask_version(compiler)
    words = f"{' '.join(compiler.command)} ({identity.id})"
    if named := cxx_words():
        words = f"{words}, of {named},"
    # The variable to set for another compiler: the one that names this one.
    variable = env.cxx_variable() or "FLASHATTN_JIT_CXX"
    if identity.id.startswith("unknown"):
        return error(
            f"{words} does not say its version",
            f"run it with --version; set {variable} to a compiler that works",
        )
    if failure := _probe(compiler.command):
        return error(
            f"{words} does not compile a line of C++ with OpenMP: {failure}",
            "install g++ whole (Debian, Ubuntu: apt install g++; Fedora: dnf install "
            f"gcc-c++), or set {variable} to a compiler that works",
        )
    found = re.match(r"gcc-(\d+)", identity.id)
    if found and int(found[1]) < _LEAST_GCC:
        return warning(
            f"{words} is older than g++ {_LEAST_GCC}",
            f"install g++ {_LEAST_GCC} or later, or set {variable} to one",
        )
    return ok(words.rstrip(","))


@_unless_never
def ninja() -> Check:
    """Ninja, which torch's extension builder runs."""
    path = os.pathsep.join(filter(None, (compile_job.ninja_dir(), os.environ.get("PATH", ""))))
    found = shutil.which("ninja", path=path)
    if found is None:
        return error("not found", "pip install ninja")
    version, problem = _run([found, "--version"])
    if problem:
        return error(f"{found} does not run: {problem}", "pip install --force-reinstall ninja")
    return ok(f"{version}, {found}")


@_unless_never
def cuda() -> Check:
    """The CUDA toolkit: found, whole, runs, new enough, and not too new for the driver."""
    toolkit = nvcc.find_toolkit()
    if toolkit is None:
        if torch.version.cuda is None:
            return ok(
                "none: kernels for GPUs cannot be compiled here",
                f"only to compile for GPUs: {nvcc.MISSING}",
            )
        return warning(
            f"torch is built for CUDA {torch.version.cuda} and brings no compiler: CUDA kernels "
            "that no cache layer holds cannot be compiled",
            f"{_WITHOUT}. {nvcc.MISSING}",
        )
    compiler = find_compiler("sm_80")
    if compiler is None:
        return error(f"{toolkit.home} needs a C++ compiler beside nvcc", missing_cxx())
    identity = ask_version(compiler)
    words = f"{toolkit.home} ({identity.id})"
    version = nvcc.cuda_version(identity.version)
    if version is None:
        return error(
            f"{toolkit.nvcc} does not say its version",
            f"run {toolkit.nvcc} --version; reinstall the toolkit, or set "
            "FLASHATTN_JIT_CUDA_HOME to one that works",
        )
    needed, present = oldest_driver(version[0]), driver_version()
    if present and too_old(present, needed):
        return error(
            f"{words} compiles for driver {needed} or newer; this machine has a {driver_words()}",
            "update the driver, or set FLASHATTN_JIT_CUDA_HOME to an older toolkit",
        )
    if version < _FULL_CUDA:
        return warning(
            f"{words} does not know every target",
            "install CUDA {}.{} or later to compile for all of them".format(*_FULL_CUDA),
        )
    return ok(f"{words}, for drivers from {needed} on")


def _probe(command: Sequence[str]) -> str:
    """What goes wrong when one line is compiled with OpenMP; empty where nothing does."""
    with tempfile.TemporaryDirectory(prefix="flashattn_jit-") as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(_PROBE)
        made = f"{folder}/probe.so"
        return _run([*command, "-shared", "-fPIC", "-fopenmp", "-o", made, str(source)])[1]


def _run(command: Sequence[str]) -> tuple[str, str]:
    """What a program prints, and what goes wrong: empty where nothing does."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_TIMEOUT_S:.0f} s"
    except OSError as failure:
        return "", str(failure)
    if done.returncode == 0:
        return done.stdout.strip(), ""
    words = done.stderr.strip().splitlines() or [f"it exits with {done.returncode}"]
    return "", next((line for line in words if "error" in line or "cannot" in line), words[0])
