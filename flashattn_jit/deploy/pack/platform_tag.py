"""The platform tag of a wheel of kernels: what the shared objects in it ask of a machine."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...errors import PackError
from ...jit.layers import machine_name

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
