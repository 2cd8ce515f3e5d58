"""The machine code in an artifact, disassembled: needs NVIDIA's nvdisasm (extra `test`)."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ELF = b"\x7fELF"
_CUDA_MACHINE = 190
_FUNCTION = re.compile(r"^\.text\.(\w+):$|^\.section\s+\.text\.(\w+),", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


@cache
def nvdisasm() -> str | None:
    """The disassembler: of a CUDA toolkit, or of the package nvidia-cuda-nvdisasm."""
    if found := shutil.which("nvdisasm"):
        return found
    site = Path(sysconfig.get_path("purelib"))
    return next((str(path) for path in sorted(site.glob("nvidia/*/bin/nvdisasm"))), None)


def cubins(artifact: bytes) -> Iterator[bytes]:
    """The device ELF files that an artifact holds, which nvcc does not compress."""
    start = artifact.find(ELF, 1)
    while start >= 0:
        machine = struct.unpack_from("<H", artifact, start + 18)[0]
        if machine == _CUDA_MACHINE:
            # A cubin ends with its section or its program headers, whichever lie later.
            program, section = struct.unpack_from("<QQ", artifact, start + 32)
            sizes = struct.unpack_from("<HHHH", artifact, start + 54)
            end = max(program + sizes[0] * sizes[1], section + sizes[2] * sizes[3])
            yield artifact[start : start + end]
        start = artifact.find(ELF, start + 4)


def instructions(artifact: Path) -> dict[str, list[str]]:
    """The opcodes of each kernel of an artifact, with their modifiers, in order."""
    tool = nvdisasm()
    assert tool is not None
    found: dict[str, list[str]] = {}
    for cubin in cubins(artifact.read_bytes()):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            text = subprocess.run(
                [tool, "-c", file.name], check=True, capture_output=True, text=True
            ).stdout
        starts = [(m.start(), m[1] or m[2]) for m in _FUNCTION.finditer(text)]
        for (start, name), (end, _) in zip(starts, [*starts[1:], (len(text), "")], strict=True):
            found.setdefault(name, []).extend(_INSTRUCTION.findall(text[start:end]))
    return found
