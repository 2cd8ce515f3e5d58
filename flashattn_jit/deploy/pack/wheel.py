"""`fa.pack_wheel`: a pack as a wheel of data, which pip installs and the cache finds by itself.

    NAME/kernels.pack                          the pack
    NAME-VERSION.dist-info/entry_points.txt    announces it: see `jit.cache.installed_packs`
    NAME-VERSION.dist-info/METADATA, WHEEL, RECORD

There is no Python in it: nothing of it is imported or run but the kernels.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

from ..._version import __version__
from ...errors import InputError, PackError
from ...jit.cache.entry import ARTIFACT
from ...jit.cache.installed_packs import GROUP, PACK
from ...jit.cache.layers import machine_name
from ...jit.cache.pack_file import EARLIEST, write_archive
from ...jit.compilation import nvcc, toolchain
from ..files import checked_path, replacing
from .pack import (
    PackReport,
    check_output_path,
    chosen_entries,
    members,
    read_file,
    report_of,
    target_of,
    without_files,
)

_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?", re.ASCII)
_OWN = "flashattn_jit"
FOR_PEOPLE = frozenset({toolchain.SOURCE, nvcc.SOURCE, toolchain.LOG, toolchain.COMMAND})
"""Files of an entry that only people read, a sixth of a wheel."""

_CHUNK_BYTES = 1 << 20

# What every manylinux policy allows, and libgomp.so.1, which torch brings under that name.
_ALLOWED = frozenset(
    b"libc.so.6 libm.so.6 libpthread.so.0 libdl.so.2 librt.so.1 libgcc_s.so.1 libgomp.so.1 "
    b"ld-linux-x86-64.so.2 ld-linux-aarch64.so.1".split()
)
_OLDEST = 17  # manylinux2014, the oldest that installers and PyPI still speak of

# Names in an object's string table. What only looks like one, such as the driver's library in CUDA
# kernels, which open it themselves, makes the tag stricter, never laxer.
_LIBRARY = re.compile(rb"([A-Za-z0-9_.+-]+\.so(?:\.\d+)*)\0")
_SYMBOLS = re.compile(rb"GLIBC_([A-Za-z0-9_.]+)\0")
_RELEASE = re.compile(rb"2\.(\d+)(?:\.\d+)?")


def pack_wheel(
    name: str,
    directory: str | os.PathLike[str] = ".",
    *,
    version: str = __version__,
    manifest: Any = None,
    targets: str | Sequence[str] = (),
    keys: Sequence[str] = (),
    allow_cpp: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> PackReport:
    """Writes kernels of the cache to a wheel, ``NAME-VERSION-py3-none-PLATFORM.whl``.

    Where it is installed with pip, its pack is a read-only layer of the cache. It holds no code but
    the kernels, without their sources and build logs, and requires this version of flashattn_jit,
    as others ask for other kernels. The platform is manylinux with the glibc that the kernels need,
    or linux where they need more than that and OpenMP. Equal entries make equal wheels, byte for
    byte.

    Args:
        name: of the distribution: letters, digits, ``-``, ``_`` and ``.``, a letter first.
        directory: where the wheel is written, a folder that is there.
        version: of the distribution, such as 1.2 or 1.2rc1; by default flashattn_jit's.
        manifest, targets, keys, allow_cpp: what goes in, as for `pack`.
        progress: as for `pack`.

    Raises:
        InputError: the name or the version is none.
        PackError: as for `pack`; also where kernels are for several kinds of machine.
        ManifestError, TargetError, CacheError, OSError: nothing was written.

    Example:
        >>> fa.pack_wheel("acme-kernels", "dist", version="1.2", manifest="service.jsonl")
    """
    begin = time.perf_counter()
    package = _package(name)
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise InputError(
            f"version {version!r} of a wheel must be numbers with dots between them, such as 1.2, "
            "1.2rc1, 1.2.post1 or 1.2.dev3"
        )
    folder = checked_path("directory", directory)
    check_output_path(folder / f"{package}-{version}.whl")
    found = chosen_entries(manifest, targets, keys, allow_cpp)
    chosen = [without_files(one, FOR_PEOPLE) for one in found]
    platform = platform_tag(
        read_file(one, ARTIFACT) for one in chosen if ARTIFACT in one.meta["files"]
    )
    path = folder / f"{package}-{version}-py3-none-{platform}.whl"
    targeted = ", ".join(sorted({target_of(one.meta) for one in chosen}))
    info = f"{package}-{version}.dist-info"
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        f"Summary: Kernels of {_OWN} {__version__} for {targeted}\n"
        f"Requires-Dist: {_OWN}=={__version__}\n",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: {_OWN} {__version__}\n"
        f"Root-Is-Purelib: false\nTag: py3-none-{platform}\n",
        "entry_points.txt": f"[{GROUP}]\nkernels = {package}\n",
    }
    with (
        replacing(path) as file,
        tempfile.TemporaryFile() as packed,
        zipfile.ZipFile(file, "w", compresslevel=9) as archive,
    ):
        write_archive(packed, members(chosen, progress))
        record = _add(archive, f"{package}/{PACK}", packed)
        for member, text in texts.items():
            record += _add(archive, f"{info}/{member}", io.BytesIO(text.encode()))
        record += f"{info}/RECORD,,\n"
        _add(archive, f"{info}/RECORD", io.BytesIO(record.encode()))
    return report_of(path, chosen, begin)


def _package(name: object) -> str:
    """The folder of a distribution's data, and its name in file names. Raises InputError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(
            f"{name!r} is no name of a wheel: letters, digits, -, _ and . are allowed, a letter "
            "first, a letter or digit last"
        )
    package = re.sub(r"[-_.]+", "_", name).lower()
    if package == _OWN:
        raise InputError(
            f"a wheel named {name} would replace this package; choose another name, such as "
            f"{name}-kernels"
        )
    return package


def _add(archive: zipfile.ZipFile, name: str, content: IO[bytes]) -> str:
    """Adds a file to a wheel. Returns what its RECORD must say of it."""
    info = zipfile.ZipInfo(name, EARLIEST)
    info.file_size = content.seek(0, os.SEEK_END)  # from 2 GiB on the header has 64 bits for it
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = 0o100644 << 16
    content.seek(0)
    digest = hashlib.sha256()
    with archive.open(info, "w") as member:
        while part := content.read(_CHUNK_BYTES):
            digest.update(part)
            member.write(part)
    text = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    return f"{name},sha256={text},{info.file_size}\n"


def platform_tag(artifacts: Iterable[bytes]) -> str:
    """The tag of shared objects: ``manylinux_2_N_x86_64`` where nothing but glibc 2.N and OpenMP's
    runtime is asked for, else ``linux_x86_64``.

    Raises PackError where they are for several kinds of machine, or for an unknown one.
    """
    machines: set[str] = set()
    newest, is_portable = _OLDEST, True
    for content in artifacts:
        machines.add(machine_name(content[:64]))
        is_portable &= _ALLOWED.issuperset(_LIBRARY.findall(content))
        for version in set(_SYMBOLS.findall(content)):
            release = _RELEASE.fullmatch(version)
            is_portable &= release is not None
            newest = max(newest, int(release[1]) if release else 0)
    if len(machines) != 1:
        raise PackError(
            f"a wheel is for one kind of machine, and these kernels are for {len(machines)}: "
            f"{', '.join(sorted(machines)) or 'none has an artifact'}; choose by target or key"
        )
    (machine,) = machines
    if machine not in ("x86_64", "aarch64"):
        raise PackError(f"there is no wheel tag for kernels of {machine}; pack them without one")
    return f"manylinux_2_{newest}_{machine}" if is_portable else f"linux_{machine}"
