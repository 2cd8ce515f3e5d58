"""Slots: how many thread blocks of a kernel a device runs at once.

Work is split for slots, not for multiprocessors: a device of 132 of them that holds three blocks
each is filled by 396 blocks, and 133 blocks of a kernel that fits once leave it idle half the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..codegen.budget import LIMITS, WARP, register_budget, shared_bytes
from ..codegen.spec import KernelSpec
from .devices import Device

_PARTITIONS = 4  # of a multiprocessor, each with a quarter of the registers
_REGISTER_UNIT = 8  # registers a thread come in multiples of this

_MIN_CHUNK = {"prefill": 256, "few_row": 128}
"""Keys. FlashInfer's and FlashAttention 3's least chunks, below which a partial state costs more to
write and merge than its keys cost to read."""


@dataclass(frozen=True, slots=True)
class Slots:
    """per_sm: blocks on one multiprocessor; total: on all, the number of workers to plan for.

    limit: what keeps it from holding more: "shared memory", "registers", "threads" or "blocks".
    """

    per_sm: int
    total: int
    limit: str


def slots(spec: KernelSpec, device: Device, registers: int | None = None) -> Slots:
    """The slots of a kernel on a device.

    registers: a thread's, from the kernel's resource report; its tile's budget when None.
    """
    threads = WARP * spec.num_warps
    taken = register_budget(spec) if registers is None else max(1, registers)
    per_warp = WARP * (-(-taken // _REGISTER_UNIT) * _REGISTER_UNIT)
    warps = _PARTITIONS * (device.registers_per_sm // _PARTITIONS // per_warp)
    shared, arch = shared_bytes(spec), LIMITS[device.target]
    held = device.shared_per_sm // (shared + arch.shared_reserved)
    by = {
        "shared memory": held if shared <= device.shared_per_block else 0,
        "registers": warps // spec.num_warps,
        "threads": device.threads_per_sm // threads,
        "blocks": arch.blocks_per_sm,
    }
    limit = min(by, key=lambda name: by[name])
    return Slots(by[limit], by[limit] * device.num_sms, limit)


def min_chunk(spec: KernelSpec) -> int:
    """The fewest keys that a split of a CUDA kernel's work gets."""
    return max(_MIN_CHUNK[spec.tile_kind], spec.tile_kv)


__all__ = ["Slots", "min_chunk", "slots"]
