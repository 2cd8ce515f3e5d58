"""Every row of the opcode table against its test vector, on a whole warp and on a part of one."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from flashattn_jit.errors import EmulatorError
from flashattn_jit.jit.emulator import programs
from tests.emulator import test_instructions, test_mbarriers
from tests.emulator.harness import kernel, launch

# Names are read from the source text: collecting tests must not compile the emulator.
_TABLE = Path(__file__).resolve().parents[2] / "csrc" / "emulator" / "ptx" / "opcodes.cpp"
NAMES = re.findall(r'^      \{"(\w+)", ', _TABLE.read_text(), re.MULTILINE)
WIDTH = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "f16x2": 32, "bf16x2": 32, "bf16": 16}
ACTIVE = 0x0F00F0F1
"""Lanes that run the guarded copy of an instruction."""


def width(kind: str) -> int:
    return WIDTH.get(kind) or int(re.sub(r"\D", "", kind))


@dataclass(frozen=True)
class Value:
    """An operand: its type, its bits, and whether it stands in the instruction itself."""

    kind: str
    bits: int
    literal: bool = False


def value(text: str, kind: str) -> Value:
    if text.startswith("#"):
        return Value("b32", int(text[1:], 0), literal=True)
    if ":" in text:
        kind, text = text.split(":")
    if text.startswith("0x"):
        return Value(kind, int(text, 16))
    if kind in ("f32", "f64", "f16"):
        form = {"f32": "<fI", "f64": "<dQ", "f16": "<eH"}[kind]
        return Value(kind, struct.unpack("<" + form[2], struct.pack(form[:2], float(text)))[0])
    return Value(kind, int(text) & ((1 << width(kind)) - 1))


def values(text: str, kind: str) -> list[Value]:
    """One value, or the parts of `{a,b}`."""
    return [value(part, kind) for part in text.strip("{}").split(",")]


class Registers:
    """Hands out unused registers of the harness's kernel."""

    def __init__(self) -> None:
        self.used = dict.fromkeys("rwhp", 0)

    def __call__(self, kind: str) -> str:
        letter = "p" if kind == "pred" else {64: "w", 32: "r"}.get(width(kind), "h")
        self.used[letter] += 1
        return f"%{letter}{self.used[letter]}"


def load(register: str, kind: str, place: int) -> str:
    if kind == "pred":
        return f"ld.global.u32 %r63, [%a0+{place}]; setp.ne.u32 {register}, %r63, 0;"
    letter = {"w": "b64", "r": "b32", "h": "b16"}[register[1]]
    return f"ld.global.{letter} {register}, [%a0+{place}];"


def store(register: str, place: int) -> str:
    if register[1] == "p":
        return f"selp.u32 %r63, 1, 0, {register}; st.global.u32 [%w62+{place}], %r63;"
    letter = {"w": "b64", "r": "b32", "h": "b16"}[register[1]]
    return f"st.global.{letter} [%w62+{place}], {register};"


def run_case(case: str) -> tuple[list[Value], np.ndarray]:
    """Expected values, and each lane's results of 8 bytes: unguarded ones, then guarded ones."""
    left, right = (side.strip() for side in case.split("="))
    mnemonic, *operands = left.split()
    kinds = [m for m in mnemonic.split(".")[1:] if re.fullmatch(r"(pred|b?f?[busf]?\d+(x2)?)", m)]
    sources = [values(text, kinds[-1]) for text in operands]
    results = values(right, kinds[0])
    fresh = Registers()
    inputs: list[int] = []
    lines = [
        "mov.u32 %r60, %laneid; mul.wide.u32 %w61, %r60, 64; add.u64 %w62, %a1, %w61;",
        "ld.global.u32 %r61, [%a2]; shr.u32 %r62, %r61, %r60; and.b32 %r62, %r62, 1;",
        "setp.ne.u32 %p31, %r62, 0;",
    ]
    arguments = []
    for operand, text in zip(sources, operands, strict=True):
        names = []
        for part in operand:
            if part.literal:
                names.append(str(part.bits))
                continue
            names.append(fresh(part.kind))
            lines.append(load(names[-1], part.kind, 8 * len(inputs)))
            inputs.append(part.bits)
        arguments.append("{" + ", ".join(names) + "}" if text.startswith("{") else names[0])
    for guarded, base in (("", 0), ("@%p31 ", 32)):
        names = [fresh(part.kind) for part in results]
        for name in names:
            clear = "setp.ne.u32 {}, %r60, %r60;" if name[1] == "p" else "mov.b{1} {0}, 0x5555;"
            bits = {"w": 64, "r": 32, "h": 16}.get(name[1])
            lines.append(clear.format(name, bits))
        target = "{" + ", ".join(names) + "}" if right.startswith("{") else names[0]
        lines.append(f"{guarded}{mnemonic} {target}, {', '.join(arguments)};")
        lines += [store(name, base + 8 * i) for i, name in enumerate(names)]
    out = np.zeros((32, 8), np.uint64)
    data = np.array(inputs, np.uint64)
    launch(kernel("\n".join(lines), 3), [data, out, np.array([ACTIVE], np.uint32)])
    return results, out


def row(name: str) -> tuple[str, str]:
    """The semantics and the test vector of an opcode."""
    (found,) = [row for row in programs.opcodes() if row[0] == name]
    return found[2:]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_a_meaning_and_a_vector_that_holds(name: str) -> None:
    """A vector is a list of cases, or names a test of test_instructions.py or test_mbarriers.py."""
    semantics, vector = row(name)
    assert semantics
    if vector.startswith("test: "):
        name = "test_" + vector[6:].replace(" ", "_")
        assert name in vars(test_instructions) or name in vars(test_mbarriers)
        return
    for case in vector.split(";"):
        assert case.strip().split(".")[0] == name
        check(case.strip())


def check(case: str) -> None:
    expected, out = run_case(case)
    for i, want in enumerate(expected):
        kept = 0 if want.kind == "pred" else 0x5555
        mask = (1 << max(width(want.kind), 1)) - 1
        whole = [int(word) & mask for word in out[:, i]]
        assert whole == [want.bits] * 32, (case, [hex(word) for word in whole[:1]])
        part = [int(word) & mask for word in out[:, 4 + i]]
        guarded = [want.bits if ACTIVE >> lane & 1 else kept & mask for lane in range(32)]
        assert part == guarded, case


def test_the_table_is_bounded() -> None:
    assert len(NAMES) <= 120
    assert len(set(NAMES)) == len(NAMES)
    assert [row[0] for row in programs.opcodes()] == NAMES


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tex.2d.v4.f32.f32 %r1, %r2;", r"PTX line \d+, kernel k, instruction tex.2d.v4.f32.f32"),
        ("add.s32.fast %r1, %r2, %r3;", "unknown modifier '.fast'"),
        ("add.s32 %r1, %w2, %r3;", "'%w2' has another width"),
        ("add.s32 %r1, %r2;", "has 2 operands"),
        ("call.uni helper;", "a call: only kernels whose functions are all inlined"),
        ("fma.rn.sat.f16x2 %r1, %r1, %r1, %r1;", "not for this type"),
        ("mov.u32 %r1, nowhere;", "unknown name 'nowhere'"),
        ("bra nowhere;", "unknown label 'nowhere'"),
        ("shfl.up.b32 %r1, %r1, %r1, 0;", "expected .sync"),
    ],
)
def test_what_is_not_in_the_table_is_named(line: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        launch(kernel(line, 0), [])
