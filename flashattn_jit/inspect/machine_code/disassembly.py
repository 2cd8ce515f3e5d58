"""The machine code (SASS) of cubins and artifacts, decoded: needs NVIDIA's nvdisasm.

An instruction has 128 bits. From bit 105 on they hold what the compiler decided about its issue:
the clocks until the next instruction of the warp (4 bits), the yield hint (1), the scoreboard that
is raised until the result is written (3) and until the operands are read (3), where 7 means none,
and the scoreboards that must be down before it issues (a mask of 6).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...errors import InputError
from ...jit.compilation.cubin import cubins
from ...jit.compilation.loops import JUMPS

_NO_SCOREBOARD = 7
_FUNCTION = re.compile(r"^\.text\.([\w$.]+):$")
_LABEL = re.compile(r"^(\.L_\w+):")
_FIRST = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(\S.*?)\s*;?\s*/\* 0x([0-9a-f]{16}) \*/")
_SECOND = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/\s*$")
_TEXT = re.compile(r"(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*)")
_TARGET = re.compile(r"`\((\.L_\w+)\)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction and its control bits.

    predicate: such as ``!P0``, empty if none. opcode: with its modifiers. stall: clocks until the
    warp's next instruction. write, read: the scoreboard raised until the result is written, until
    the operands are read; None without. waits: the scoreboards that must be down first. target:
    the index of the instruction that a branch jumps to.
    """

    address: int
    predicate: str
    opcode: str
    operands: str
    stall: int
    write: int | None
    read: int | None
    waits: tuple[int, ...]
    target: int | None = None

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".", 1)[0]

    @property
    def always(self) -> bool:
        """Of a jump: no predicate before it or among its operands."""
        if self.predicate or self.name not in JUMPS:
            return False
        return self.name != "BRA" or self.operands.startswith(("`", "("))


@cache
def nvdisasm() -> str | None:
    """The disassembler: of a CUDA toolkit, or of the package nvidia-cuda-nvdisasm."""
    if found := shutil.which("nvdisasm"):
        return found
    site = Path(sysconfig.get_path("purelib"))
    return next((str(path) for path in sorted(site.glob("nvidia/*/bin/nvdisasm"))), None)


def disassemble(binary: bytes) -> dict[str, tuple[Instruction, ...]]:
    """The kernels of an artifact or of a cubin by name, each in the order of its addresses.

    Raises:
        InputError: there is no nvdisasm, or it cannot read the binary.
    """
    tool = nvdisasm()
    if tool is None:
        raise InputError(
            "machine code is read with nvdisasm: pip install nvidia-cuda-nvdisasm, or put a CUDA "
            "toolkit's bin on PATH"
        )
    found: dict[str, tuple[Instruction, ...]] = {}
    for cubin in cubins(binary):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            run = subprocess.run([tool, "-c", "-hex", file.name], capture_output=True, text=True)
        if run.returncode:
            raise InputError(f"nvdisasm cannot read the machine code: {run.stderr.strip()}")
        found |= parse(run.stdout)
    return found


def parse(text: str) -> dict[str, tuple[Instruction, ...]]:
    """The kernels in the output of ``nvdisasm -c -hex``."""
    kernels: dict[str, tuple[Instruction, ...]] = {}
    lines: list[tuple[int, str, int]] = []
    labels: dict[str, int] = {}
    name = ""

    def close() -> None:
        if name and lines:
            kernels[name] = tuple(_decode(*line, labels) for line in lines)

    for line in text.splitlines():
        if match := _FUNCTION.match(line):
            close()
            name, lines, labels = match[1], [], {}
        elif match := _LABEL.match(line):
            labels[match[1]] = len(lines)
        elif match := _FIRST.match(line):
            lines.append((int(match[1], 16), match[2], 0))
        elif (match := _SECOND.match(line)) and lines:
            lines[-1] = (*lines[-1][:2], int(match[1], 16))
    close()
    return kernels


def _decode(address: int, text: str, high: int, labels: dict[str, int]) -> Instruction:
    control = high >> 41
    match = _TEXT.match(text)
    if match is None:
        raise InputError(f"nvdisasm wrote an instruction of unknown form: {text!r}")
    write, read, mask = control >> 5 & 7, control >> 8 & 7, control >> 11 & 63
    jump = _TARGET.search(match[3])
    return Instruction(
        address,
        match[1] or "",
        match[2],
        match[3],
        control & 15,
        None if write == _NO_SCOREBOARD else write,
        None if read == _NO_SCOREBOARD else read,
        tuple(i for i in range(6) if mask >> i & 1),
        labels.get(jump[1]) if jump else None,
    )
