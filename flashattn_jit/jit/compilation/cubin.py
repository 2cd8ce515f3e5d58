"""The machine code in artifacts, as far as the rules about it need it: no disassembler.

An instruction has 128 bits: the opcode in the lowest 12, the predicate in the next 4, and in a
branch the distance to its target, from the end of the instruction, in units of 4 bytes: 48 bits
from bit 34 on; from sm_90 on these are the upper ones, and 8 lower ones are in bits 16 to 23.
`tests/cuda/test_sass.py` compares this with NVIDIA's disassembler on every target.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ...codegen.targets import sm_version
from .loops import JUMPS, loops, spills_of_changes

ELF = b"\x7fELF"
_CUDA_MACHINE = 190
_CODE = b".text."
_NO_PREDICATE = 7
_SIZE = 16
_UNIFORM_BRANCH = 0x547  # on a uniform predicate
_UNIFORM_COPY = 0xDAE  # LDGSTS to the sum of a register and a uniform register
_IF_DIVERGENT = 2  # in bits 32 and 33 of a branch: BRA.DIV, for warps that have diverged

_NAMES = {
    0x23C: "HMMA", 0x9F0: "HGMMA", 0xDF0: "HGMMA", 0x9C5: "WARPGROUP",
    0x3C6: "FENCE", 0x5B4: "UTMALDG",
    0x983: "LDL", 0x387: "STL", 0xFAE: "LDGSTS", _UNIFORM_COPY: "LDGSTS",
    0x947: "BRA", _UNIFORM_BRANCH: "BRA", 0x94D: "EXIT", 0x950: "RET", 0x949: "BRX",
    0x95C: "BPT",
}  # fmt: skip
"""The instructions that matter, by opcode."""

KNOWN = frozenset(_NAMES.values())
"""Their names."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """An instruction: see `loops.Operation`. name: empty for those that do not matter."""

    name: str
    target: int | None = None
    always: bool = False


def cubins(artifact: bytes) -> Iterator[bytes]:
    """The device ELF files that an artifact holds, which nvcc does not compress; or the one that
    it is."""
    start = artifact.find(ELF)
    while start >= 0:
        machine = struct.unpack_from("<H", artifact, start + 18)[0]
        if machine == _CUDA_MACHINE:
            # A cubin ends with its section or its program headers, whichever lie later.
            program, section = struct.unpack_from("<QQ", artifact, start + 32)
            sizes = struct.unpack_from("<HHHH", artifact, start + 54)
            end = max(program + sizes[0] * sizes[1], section + sizes[2] * sizes[3])
            yield artifact[start : start + end]
        start = artifact.find(ELF, start + 4)


def decode(artifact: bytes, target: str) -> dict[str, tuple[Decoded, ...]]:
    """The kernels of an artifact by name, each in the order of its addresses."""
    return {
        name: tuple(
            _decode(code[at : at + _SIZE], at // _SIZE, target) for at in range(0, len(code), _SIZE)
        )
        for cubin in cubins(artifact)
        for name, code in _kernels(cubin)
    }


def spills_in_loops(artifact: bytes, target: str) -> dict[str, tuple[int, int]]:
    """Loads and stores of local memory between the first and the last matrix instruction of a loop,
    and in the loop of those who change tiles for it (`spills_of_changes`).

    By the name of each kernel that multiplies in loops: of the loop that has most, on any way.
    """
    return {
        name: (max(loop.spills_among_products for loop in found), spills_of_changes(code))
        for name, code in decode(artifact, target).items()
        if (found := loops(code))
    }


def illegal_copies(artifact: bytes, target: str) -> int:
    """Copies to shared memory that ptxas miscompiled: their address has a uniform register.

    On sm_90 and later the field of that register is taken, by the descriptor of global memory.
    ptxas of CUDA 13.0 writes such copies all the same, in one kernel of 200, with register 0 for
    both; a GPU stops at them (an illegal instruction).
    """
    if sm_version(target) < 90:
        return 0
    return sum(
        (code[at] | (code[at + 1] & 15) << 8) == _UNIFORM_COPY
        for cubin in cubins(artifact)
        for _, code in _kernels(cubin)
        for at in range(0, len(code), _SIZE)
    )


def _kernels(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """The sections of code, by the names of their kernels."""
    table = struct.unpack_from("<Q", cubin, 40)[0]
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    texts = sections[names][4]
    for section in sections:
        start = texts + section[0]
        name = cubin[start : cubin.index(b"\0", start)]
        if name.startswith(_CODE):
            yield name[len(_CODE) :].decode(), cubin[section[4] : section[4] + section[5]]


def _decode(code: bytes, index: int, target: str) -> Decoded:
    word = int.from_bytes(code, "little")
    opcode = word & 0xFFF
    name = _NAMES.get(opcode, "")
    if name not in JUMPS:
        return Decoded(name)
    predicates = word >> 12 & 15, word >> 87 & 15
    always = opcode != _UNIFORM_BRANCH and predicates == (_NO_PREDICATE, _NO_PREDICATE)
    always = always and (word >> 32 & 3) != _IF_DIVERGENT
    if name != "BRA":
        return Decoded(name, always=always)
    distance = int.from_bytes((word >> 34).to_bytes(12, "little")[:6], "little", signed=True)
    if sm_version(target) >= 90:
        distance = distance << 8 | word >> 16 & 0xFF
    return Decoded(name, index + 1 + distance * 4 // _SIZE, always)
