"""Kernels of one wgmma product, written by hand: operands in each layout of the PTX ISA.

The layouts are computed here from their description, element by element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.emulator.harness import kernel, launch

MODES = {16: 0, 128: 1, 64: 2, 32: 3}
"""Swizzle modes of descriptors, by the bytes of a row of the pattern; 16: no swizzle."""


@dataclass(frozen=True)
class Operand:
    """A [rows, k] operand of 16-bit elements in shared memory, MN-major or K-major."""

    rows: int
    k: int
    mn_major: bool = False
    width: int = 128

    @property
    def panel(self) -> int:
        """Bytes between panels, which are `width` bytes wide: of columns, or of rows."""
        return (self.k if self.mn_major else self.rows) * self.width

    @property
    def num_bytes(self) -> int:
        along = self.rows if self.mn_major else self.k
        return -(-2 * along // self.width) * self.panel

    def addresses(self) -> np.ndarray[Any, Any]:
        """Byte offsets of the elements."""
        row, column = np.meshgrid(np.arange(self.rows), np.arange(self.k), indexing="ij")
        along, across = (row, column) if self.mn_major else (column, row)
        elements = self.width // 2
        at = along // elements * self.panel + across * self.width + along % elements * 2
        return at ^ (at >> 7 & self.width // 16 - 1) << 4

    def descriptor(self, step: int) -> int:
        """Of columns 16 * step to 16 * step + 15, without the address of the operand."""
        rows_apart = 8 * self.width  # of groups of eight rows of the pattern
        if self.mn_major:
            begin = 16 * step * self.width
        else:
            column = 32 * step
            begin = column // self.width * self.panel + column % self.width
        leading, stride = self.panel, rows_apart
        if self.mn_major and self.width == 16:
            leading, stride = rows_apart, self.panel
        if not self.mn_major and self.width > 16:
            leading = 16  # not used
        return begin >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | MODES[self.width] << 62


@dataclass(frozen=True)
class Product:
    """D = A B^T + D of A [64, k] and B [n, k], by one warpgroup in steps of 16 columns."""

    n: int = 64
    k: int = 64
    kind: str = "bf16"
    width: int = 128
    a_mn_major: bool = False
    b_mn_major: bool = False
    in_registers: bool = False
    accumulate: bool = True
    signs: tuple[int, int] = (1, 1)
    edit_b: Callable[[int], int] = int
    """Changes the descriptors of B, for mistakes."""

    @property
    def a(self) -> Operand:
        return Operand(64, self.k, self.a_mn_major, self.width)

    @property
    def b(self) -> Operand:
        return Operand(self.n, self.k, self.b_mn_major, self.width)

    @property
    def b_begin(self) -> int:
        return -(-self.a.num_bytes // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        return -(-(self.b_begin + self.b.num_bytes) // 2048) * 2048

    def accumulators(self, prefix: str = "%acc") -> list[str]:
        return [f"{prefix}{i}" for i in range(self.n // 2)]

    def mma(self, step: int, d: str = "%acc", registers: str = "%pa") -> str:
        """The wgmma of one step; %w5 is the address of the operands, divided by 16."""
        descriptor = self.edit_b(self.b.descriptor(step) + (self.b_begin >> 4))
        parts = [f"add.s64 %w7, %w5, {descriptor};"]
        a, transposed = "%w6", f"{self.a_mn_major:d}, {self.b_mn_major:d}"
        if self.in_registers:
            a = "{" + ", ".join(f"{registers}{4 * step + i}" for i in range(4)) + "}"
            transposed = f"{self.b_mn_major:d}"
        else:
            parts.append(f"add.s64 %w6, %w5, {self.a.descriptor(step)};")
        parts.append(
            f"wgmma.mma_async.sync.aligned.m64n{self.n}k16.f32.{self.kind}.{self.kind} "
            f"{{{', '.join(self.accumulators(d))}}}, {a}, %w7, {'%p3' if step == 0 else '1'}, "
            f"{self.signs[0]}, {self.signs[1]}, {transposed};"
        )
        return "\n".join(parts)

    def setup(self, threads: int = 128) -> str:
        """Copies the operands to shared memory, and loads A's fragments and D."""
        words = self.n // 2
        loads = [f"ld.global.f32 {name}, [%w9+{4 * i}];"
                 for i, name in enumerate(self.accumulators())]  # fmt: skip
        if self.in_registers:
            loads += [f"ld.global.b32 %pa{i}, [%w8+{4 * i}];" for i in range(self.k // 4)]
        return f"""
        .shared .align 1024 .b8 tile[{self.shared_bytes}];
        .reg .f32 %acc<128>; .reg .b32 %pa<{max(self.k // 4, 1)}>;
        mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 4; mov.u32 %r3, tile; add.u32 %r4, %r3, %r2;
        mul.wide.u32 %w1, %r1, 16; add.u64 %w2, %a0, %w1; shr.u32 %r9, %r1, 5;
        NEXT:
        ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%w2];
        st.shared.v4.u32 [%r4], {{%r10, %r11, %r12, %r13}};
        add.u32 %r4, %r4, {16 * threads}; add.u64 %w2, %w2, {16 * threads};
        add.u32 %r2, %r2, {16 * threads}; setp.lt.u32 %p1, %r2, {self.shared_bytes};
        @%p1 bra NEXT;
        fence.proxy.async;
        bar.sync 0;
        shr.u32 %r6, %r3, 4; cvt.u64.u32 %w5, %r6; setp.eq.u32 %p3, 1, {self.accumulate:d};
        mul.wide.u32 %w8, %r1, {self.k}; add.u64 %w8, %a1, %w8;
        mul.wide.u32 %w1, %r1, {4 * words}; add.u64 %w9, %a2, %w1;
        """ + "\n".join(loads)

    def store(self) -> str:
        stores = [f"st.global.f32 [%w9+{4 * i}], {name};"
                  for i, name in enumerate(self.accumulators())]  # fmt: skip
        return "\n".join(["STORE:", *stores])

    def body(self) -> str:
        steps = "\n".join(self.mma(step) for step in range(self.k // 16))
        return f"""{self.setup()}
        wgmma.fence.sync.aligned;
        {steps}
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
        {self.store()}"""


def bits(values: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """The bits of small multiples of powers of two, which both formats hold exactly."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def accumulator_places(n: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rows and columns of the accumulators, by thread of the warpgroup and register."""
    thread, i = np.meshgrid(np.arange(128), np.arange(n // 2), indexing="ij")
    warp, lane = thread // 32, thread % 32
    return 16 * warp + lane // 4 + 8 * (i % 4 >= 2), i // 4 * 8 + lane % 4 * 2 + i % 2


def fragments(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[64, k] of 16-bit elements as the words of each thread, four for 16 columns."""
    thread, i = np.meshgrid(np.arange(128), np.arange(a.shape[1] // 4), indexing="ij")
    lane = thread % 32
    row = thread // 32 * 16 + lane // 4 + 8 * (i % 2)
    column = i // 4 * 16 + lane % 4 * 2 + 8 * (i // 2 % 2)
    return a[row, column].astype(np.uint32) | a[row, column + 1].astype(np.uint32) << 16


def run(product: Product, body: str = "", threads: int = 128, **options: Any) -> None:
    """Runs the kernel, or another body, on random operands; the result must be exact."""
    generator = np.random.default_rng(product.n + product.width)
    a, b, d = (generator.integers(-8, 8, shape) / 4.0
               for shape in ((64, product.k), (product.n, product.k), (64, product.n)))  # fmt: skip
    image = np.zeros(product.shared_bytes, np.uint8)
    words = image.view(np.uint16)
    words[product.a.addresses() // 2] = bits(a, product.kind)
    words[(product.b_begin + product.b.addresses()) // 2] = bits(b, product.kind)
    places = accumulator_places(product.n)
    out = d[places].astype(np.float32)
    data = [image, fragments(bits(a, product.kind)), out]
    launch(kernel(body or product.body(), 3, "sm_90a"), data, block=(threads, 1, 1), **options)
    exact = product.signs[0] * product.signs[1] * (a @ b.T) + product.accumulate * d
    np.testing.assert_array_equal(out, exact[places].astype(np.float32))
