"""The resources that a CUDA kernel uses, from ptxas' report, and the budget that its tile declares.

A kernel declares its budget by `__launch_bounds__(threads, blocks per multiprocessor)`, from which
the registers of a thread follow for each target. ptxas keeps within them by spilling; so a kernel
beyond its budget shows as spills and stack frames.

A kernel that multiplies matrices may spill a little where that buys a larger tile (`spill_bytes` of
its request): the stores and loads cost a few issue slots of a loop's turn, if none of them lies
among the products, where warps wait for each other's results, and few among the changes of tiles
(`cubin.spills_in_loops`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from flashattn_jit.codegen.budget import (
    CHANGE_SPILLS,
    MAX_REGISTERS,
    WARP,
    limits,
    register_limit,
)
from flashattn_jit.jit.compilation.cubin import spills_in_loops

_ENTRY = re.compile(r"^ptxas info\s*: Compiling entry function '(\S+)' for")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"^ptxas info\s*: Used (\d+) registers(.*)$")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SHARED = re.compile(r"(\d+)(?:\+(\d+))? bytes smem")
_CONSTANT = re.compile(r"(\d+)(?:\+(\d+))? bytes cmem\[\d+\]")
_SERIALISED = re.compile(r"^.*(?:\(C75\d\d\)|\bwgmma\b.*serializ).*$", re.MULTILINE)

_PTX_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(.*?^\{", re.MULTILINE | re.DOTALL)
_MAX_THREADS = re.compile(r"\.maxntid (\d+)(?:, (\d+), (\d+))?")
_MIN_BLOCKS = re.compile(r"\.minnctapersm (\d+)")


@dataclass(frozen=True, slots=True)
class KernelResources:
    """ptxas' report on one kernel. Bytes of stack and spills are a thread's, of shared a block's.

    stack_bytes: local memory of the kernel and of every function that it calls. shared_bytes:
    static shared memory; the launch adds the dynamic part. spills_among_products: loads and stores
    of local memory between the products of a loop; None without local memory or without products.
    spills_of_changes: those of a turn of the loop that changes rows for wgmma.
    """

    name: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    constant_bytes: int
    barriers: int
    spills_among_products: int | None = None
    spills_of_changes: int = 0

    @property
    def spills_outside_loops(self) -> bool:
        """Whether its local memory is spilled registers alone, none used among products and few
        where rows are changed."""
        # ptxas rounds stack frames up to 8 bytes; every spilled register is stored at least once.
        # An array shows, unless registers are stored several times; kernels have no arrays that
        # are indexed at run time.
        spilled = -(-self.spill_store_bytes // 8) * 8
        seldom = self.spills_among_products == 0 and self.spills_of_changes <= CHANGE_SPILLS
        return seldom and self.stack_bytes <= spilled


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of a kernel: registers per thread, shared bytes per block, static and dynamic."""

    threads: int
    registers: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """The kernels of one artifact, in ptxas' order, their budgets by name, and warnings.

    An entry's resources.json has these fields, and the artifact's size.
    """

    kernels: tuple[KernelResources, ...]
    budgets: dict[str, Budget]
    warnings: tuple[str, ...] = ()

    def kernel(self, name: str) -> KernelResources:
        """The kernel of that name. Raises KeyError."""
        return {k.name: k for k in self.kernels}[name]

    def complaints(self, spill_bytes: int = 0) -> list[str]:
        """What the kernels use beyond their budgets, and the warnings; empty if nothing.

        spill_bytes: what a thread may spill outside of products.
        """
        checked = (check(k, self.budgets[k.name], spill_bytes) for k in self.kernels)
        return [*(text for found in checked for text in found), *self.warnings]

    @property
    def spill_bytes(self) -> int | None:
        """The `spill_bytes` with which there are no complaints; None if there are others."""
        spilled = max((k.stack_bytes for k in self.kernels), default=0)
        return None if self.complaints(spilled) else spilled


def check(report: KernelResources, budget: Budget, spill_bytes: int = 0) -> list[str]:
    """What a kernel uses beyond its budget, which has no local memory but that for spills."""
    complaints = []
    allowed = report.spills_outside_loops and report.stack_bytes <= spill_bytes
    if not allowed and (report.spill_store_bytes or report.spill_load_bytes):
        among, changes = report.spills_among_products, report.spills_of_changes
        complaints.append(
            f"{report.name} spills registers: {report.spill_store_bytes} bytes stored, "
            f"{report.spill_load_bytes} bytes loaded"
            + (f", {among} loads and stores among the products of a loop" if among else "")
            + (f", {changes} where rows are changed" if changes > CHANGE_SPILLS else "")
        )
    if not allowed and report.stack_bytes:
        complaints.append(f"{report.name} uses {report.stack_bytes} bytes of local memory")
    if report.registers > budget.registers:
        complaints.append(
            f"{report.name} uses {report.registers} registers; {budget.registers} are its budget"
        )
    if report.shared_bytes > budget.shared_bytes:
        complaints.append(
            f"{report.name} uses {report.shared_bytes} bytes of shared memory; "
            f"{budget.shared_bytes} are its budget"
        )
    return complaints


def read_report(output: str, ptx: str, target: str, artifact: bytes) -> Report:
    """The report in what nvcc said with `--ptxas-options=-v`, budgets from the kernels' PTX."""
    kernels = parse_ptxas(output)
    if any(k.stack_bytes for k in kernels):
        found = spills_in_loops(artifact, target)
        kernels = tuple(
            replace(k, spills_among_products=found[k.name][0], spills_of_changes=found[k.name][1])
            if k.stack_bytes and k.name in found
            else k
            for k in kernels
        )
    return Report(
        kernels,
        declared_budgets(ptx, target),
        tuple(line.strip() for line in _SERIALISED.findall(output)),
    )


def load_report(path: Path) -> Report:
    """The report in a CUDA entry's resources.json. Raises OSError, ValueError, KeyError."""
    return parse_report(path.read_bytes())


def parse_report(content: bytes) -> Report:
    """The report in the content of a resources.json. Raises ValueError, KeyError, TypeError."""
    stored = json.loads(content)
    names = [f.name for f in fields(KernelResources)]
    return Report(
        tuple(KernelResources(**{name: k[name] for name in names}) for k in stored["kernels"]),
        {name: Budget(**budget) for name, budget in stored["budgets"].items()},
        tuple(stored["warnings"]),
    )


def parse_ptxas(output: str) -> tuple[KernelResources, ...]:
    """One entry for each `Compiling entry function` in ptxas' output; other lines are passed over.

    Functions that were not inlined count with the kernel in whose report they stand.
    """
    kernels: list[KernelResources] = []
    name, frames = "", [(0, 0, 0)]
    for line in output.splitlines():
        if found := _ENTRY.match(line):
            name, frames = found[1], [(0, 0, 0)]
        elif found := _STACK.search(line):
            frames.append((int(found[1]), int(found[2]), int(found[3])))
        elif name and (found := _USED.match(line)):
            uses = found[2]
            stack, stores, loads = (sum(frame[i] for frame in frames) for i in range(3))
            barriers = _BARRIERS.search(uses)
            kernels.append(
                KernelResources(
                    name=name,
                    registers=int(found[1]),
                    stack_bytes=stack,
                    spill_store_bytes=stores,
                    spill_load_bytes=loads,
                    shared_bytes=_sum(_SHARED.findall(uses)),
                    constant_bytes=_sum(_CONSTANT.findall(uses)),
                    barriers=int(barriers[1]) if barriers else 0,
                )
            )
            name = ""
    return tuple(kernels)


def declared_budgets(ptx: str, target: str) -> dict[str, Budget]:
    """The budget of each kernel of a PTX text, from its `.maxntid` and `.minnctapersm`."""
    budgets = {}
    arch = limits(target)
    for entry in _PTX_ENTRY.finditer(ptx):
        threads, blocks = _MAX_THREADS.search(entry[0]), _MIN_BLOCKS.search(entry[0])
        if threads is None:
            budgets[entry[1]] = Budget(0, MAX_REGISTERS, arch.shared_per_block)
            continue
        count = int(threads[1]) * int(threads[2] or 1) * int(threads[3] or 1)
        resident = int(blocks[1]) if blocks else 1
        budgets[entry[1]] = Budget(
            threads=count,
            registers=register_limit(target, -(-count // WARP), resident),
            shared_bytes=min(
                arch.shared_per_block, arch.shared_per_sm // resident - arch.shared_reserved
            ),
        )
    return budgets


def _sum(pairs: Iterable[tuple[str, str]]) -> int:
    # Older ptxas write a kernel's own bytes and the system's as a+b.
    return sum(int(a) + int(b or 0) for a, b in pairs)
