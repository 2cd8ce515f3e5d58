"""The emulator's shared library: compiled at first use, and kept in the cache.

It is a developer's tool, so installing the package does not compile it. It is kept in a separate
store, <cache>/emulator, under a digest of its sources and flags: it does not depend on the versions
of Python and torch. The build of any compiler is used.
"""

from __future__ import annotations

import ctypes
import logging
import shutil
import tempfile
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

from flashattn_jit import env
from flashattn_jit.errors import CompileError, EmulatorError, MissingKernelError
from flashattn_jit.jit.cache.entry import ARTIFACT, document_digest
from flashattn_jit.jit.cache.layers import found_in_folder
from flashattn_jit.jit.cache.locks import build_lock
from flashattn_jit.jit.cache.store import Store, is_safe_root
from flashattn_jit.jit.compilation.compile_job import (
    Compiler,
    Job,
    drive,
    failure,
    quote,
    write_wrapper,
)
from flashattn_jit.jit.compilation.toolchain import (
    COMMAND,
    LOG,
    ask_version,
    find_compiler,
    missing_cxx,
)

log = logging.getLogger(__name__)

FOLDER = "emulator"
_KEY_SOURCE = "key.cpp"
_TENSOR_MAP = "fajit/tensor_map.h"
"""A header that the emulator shares with kernels and the host."""
_UNITS = 3
"""Translation units; each includes several files, which saves parsing their common headers."""
_COMPILE_FLAGS = (
    "-std=c++17",
    "-O3",
    # Arithmetic must follow the PTX instructions: no contraction to fused operations.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-pthread",
)
_LINK_FLAGS = ("-pthread", "-Wl,--as-needed", "-Wl,-s")

_not_kept: dict[str, ctypes.CDLL] = {}
"""Libraries that could not be published, by key: other threads that wait for a build take them."""


class Allocation(ctypes.Structure):
    """`fajit_emulator_allocation` of csrc/emulator/c_api.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_int32),
        ("initialised", ctypes.c_int32),
        ("pending", ctypes.c_int32),
    )


class Launch(ctypes.Structure):
    """`fajit_emulator_launch` of csrc/emulator/c_api.h."""

    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("num_threads", ctypes.c_int32),
        ("params", ctypes.c_char_p),
        ("param_bytes", ctypes.c_int64),
        ("allocations", ctypes.POINTER(Allocation)),
        ("num_allocations", ctypes.c_int64),
        ("step_limit", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("completion", ctypes.c_int32),
        ("check_races", ctypes.c_int32),
        ("check_uninitialised", ctypes.c_int32),
        ("overlaps", ctypes.c_int32),
    )


@cache
def library() -> ctypes.CDLL:
    """The emulator's library, loaded once a process; compiling it takes 20 s of one core.

    Raises CompileError without a compiler or where it fails, EmulatorError where the build cannot
    be loaded, MissingKernelError where there is none and FLASHATTN_JIT_COMPILE=never,
    UnsafeCacheError.
    """
    return _declare(_obtain())


@cache
def _document() -> tuple[tuple[str, str], ...]:
    """The fields of the library's key."""
    sources = {name: env.emulator_dir() / name for name in _sources((".cpp", ".h"))}
    sources[_TENSOR_MAP] = env.include_dir() / _TENSOR_MAP
    return (
        ("library", "emulator"),
        ("flags", "\n".join((*_COMPILE_FLAGS, *_LINK_FLAGS))),
        ("units", str(_UNITS)),
        ("sources", document_digest((name, path.read_text()) for name, path in sources.items())),
    )


def _obtain() -> ctypes.CDLL:
    is_safe_root(env.cache_dir())
    store = Store(env.cache_dir() / FOLDER)
    key = document_digest(_document())
    loaded = _kept(store, key)
    if loaded is None:
        if env.compile_mode() == "never":
            raise MissingKernelError(
                f"the emulator is not in {store.root}, or cannot be loaded from there, and "
                "FLASHATTN_JIT_COMPILE=never forbids to compile it; run a call with "
                "target='emulated:...' once without that variable",
                key=key,
            )
        with build_lock(key, env.lock_wait_s()):  # other threads wait here as well
            loaded = _kept(store, key) or _not_kept.get(key) or _build(store, key)
    return loaded


def _kept(store: Store, key: str) -> ctypes.CDLL | None:
    """The library in the store, if it is there and can be loaded."""
    entry = store.find(key, None)
    if entry is None:
        return None
    try:
        with found_in_folder(entry, "user").loadable() as path:
            return ctypes.CDLL(str(path))
    except (OSError, ValueError) as error:
        log.warning("the emulator in %s cannot be loaded: %s", entry.path, error)
        return None


def _build(store: Store, key: str) -> ctypes.CDLL:
    """Compiles and loads the library, and publishes it in `store` if that can be written."""
    compiler = find_compiler()
    if compiler is None:
        raise CompileError(f"the emulator is compiled when it is first used: {missing_cxx()}")
    with tempfile.TemporaryDirectory(prefix="flashattn_jit-") as name:
        folder = Path(name)
        _compile(folder, key, compiler)
        try:
            loaded = ctypes.CDLL(str(folder / ARTIFACT))
        except OSError as error:
            raise EmulatorError(
                f"the emulator cannot be loaded from {folder}: {error}; set TMPDIR to a folder "
                "whose files may be executed"
            ) from error
        try:
            with store.staging() as staging:
                for path in folder.iterdir():
                    shutil.copyfile(path, staging / path.name)
                created = datetime.now(timezone.utc).isoformat(timespec="microseconds")
                meta = {"document": _document(), "created": created}
                store.publish(staging, key, ask_version(compiler), meta)
        except OSError as error:
            log.warning("the emulator is not kept: cannot write to %s: %s", store.root, error)
            _not_kept[key] = loaded
        return loaded


def _compile(staging: Path, key: str, compiler: Compiler) -> None:
    """Leaves the library, the log and the commands in `staging`. Raises CompileError, OSError."""
    sources = env.emulator_dir()
    output = staging / LOG
    output.touch()
    work = staging / "build"
    work.mkdir(mode=0o700)
    named = work / _KEY_SOURCE  # an artifact holds its key
    named.write_text(f'extern "C" __attribute__((used)) const char fajit_key[] = "{key}";\n')
    log.info("compiling the emulator")
    job = Job(
        sources=(*_write_units(work), named),
        work=work,
        compile_flags=[
            *_COMPILE_FLAGS,
            quote(f"-I{sources}"),
            quote(f"-I{env.include_dir()}"),
            quote(f"-ffile-prefix-map={sources}/="),
            quote(f"-ffile-prefix-map={work}/="),
        ],
        link_flags=_LINK_FLAGS,
        settings={"CXX": write_wrapper(work / "cxx", compiler.command, output, staging / COMMAND)},
    )
    try:
        made = drive(job)
    except RuntimeError as error:
        kept = Path(tempfile.mkdtemp(prefix="flashattn_jit-failed-")) / LOG
        shutil.copyfile(output, kept)
        failed = failure(output.read_text(errors="replace"), str(error))
        raise CompileError(
            f"the emulator does not compile: {failed.first_error}\n"
            f"  compiler: {' '.join(compiler.command)}\n  log:      {kept}",
            first_error=failed.first_error,
            location=failed.location,
            log_path=str(kept),
        ) from error
    made.replace(staging / ARTIFACT)
    shutil.rmtree(work)


def _sources(suffixes: tuple[str, ...]) -> list[str]:
    """The emulator's files with these suffixes, as paths below its folder."""
    root = env.emulator_dir()
    files = (path for path in root.rglob("*") if path.suffix in suffixes)
    return sorted(path.relative_to(root).as_posix() for path in files)


def _write_units(work: Path) -> list[Path]:
    files = _sources((".cpp",))
    units = []
    for i in range(min(_UNITS, len(files))):
        unit = work / f"unit_{i}.cpp"
        unit.write_text("".join(f'#include "{name}"\n' for name in files[i::_UNITS]))
        units.append(unit)
    return units


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the functions of c_api.h. They return texts as addresses, which must be freed."""
    handle, text, out = ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER
    functions = {
        "open": (handle, text, out(handle)),
        "close": (None, handle),
        "free": (None, handle),
        "run": (handle, handle, out(Launch)),
        "opcodes": (handle,),
    }
    for name, (result, *arguments) in functions.items():
        function = getattr(loaded, f"fajit_emulator_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded
