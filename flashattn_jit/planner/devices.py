"""NVIDIA GPUs as data, for the planner and `explain`, also on machines without the device.

Figures are from the vendor's data sheets (of the SXM part if there are several); matrix rates are
dense, with fp32 accumulate. They place a problem on the roofline and count slots. Kernels depend
on the target alone, not on these figures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..codegen.budget import LIMITS
from ..codegen.spec import cuda_target
from ..codegen.targets import architecture
from ..errors import InputError

_MMA_SYNC_SHARE = {"sm_90": 0.63}  # arXiv 2501.12084: what mma.sync reaches of wgmma's rate


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. Units are bytes, bytes/s and FLOP/s; names with `_per_sm` are per multiprocessor.

    shared_per_block: the most that one block may request. matrix_flops: dense fp16 or bf16 products
    with fp32 accumulate. read_bytes_per_s: of device memory.
    """

    name: str
    target: str
    num_sms: int
    l2_bytes: int
    read_bytes_per_s: float
    matrix_flops: float
    shared_per_sm: int
    shared_per_block: int
    registers_per_sm: int
    threads_per_sm: int

    def flops(self, matrix_dtype: str) -> float:
        """Peak rate (FLOP/s) of the matrix units, which is the same for fp16 and bf16."""
        return self.matrix_flops

    @property
    def rates(self) -> str:
        """Where the rates come from, in words."""
        return f"{self.name}'s rated"

    @property
    def note(self) -> str:
        """A caveat about the rates, in words; may be empty."""
        share = _MMA_SYNC_SHARE.get(self.target)
        if share is None:
            return ""
        return f"kernels of mma.sync, not those of wgmma, reach at most {share:.0%} of that rate"


def _device(name: str, target: str, sms: int, l2_mib: float, gb_s: float, tflops: float) -> Device:
    arch = LIMITS[target]
    return Device(
        name, target, sms, int(l2_mib * 2**20), gb_s * 1e9, tflops * 1e12,
        arch.shared_per_sm, arch.shared_per_block, arch.registers_per_sm, arch.threads_per_sm,
    )  # fmt: skip


DEVICES = (
    #       name        target    SMs  L2    GB/s  TFLOP/s
    _device("T4",       "sm_75",  40,  4,    320,  65),
    _device("A100",     "sm_80",  108, 40,   2039, 312),
    _device("A10",      "sm_86",  72,  6,    600,  125),
    _device("L40S",     "sm_89",  142, 96,   864,  362),
    _device("L4",       "sm_89",  58,  48,   300,  121),
    _device("RTX 4090", "sm_89",  128, 72,   1008, 165),
    _device("H100",     "sm_90",  132, 50,   3350, 989.5),
    _device("H200",     "sm_90",  132, 60,   4800, 989.5),
    _device("B200",     "sm_100", 148, 126,  8000, 2250),
    _device("RTX 5090", "sm_120", 170, 96,   1792, 209.5),
)  # fmt: skip
"""Ascending by target, the one that stands for it first."""


def named_hardware(name: str) -> Device:
    """The listed device of a name such as ``"H100"``, ``"rtx 4090"``, ``"NVIDIA A100-SXM4-80GB"``.

    Raises:
        InputError: no listed device has that name.
    """
    words = [w for w in _words(name) if w not in _MAKERS]
    found = [d for d in DEVICES if _fits(words, _words(d.name))]
    if not found:
        known = ", ".join(d.name for d in DEVICES)
        raise InputError(f"no description of a device {name!r}; there are {known}")
    return max(found, key=lambda d: len(d.name))


_MAKERS = ("nvidia", "geforce", "tesla")
_OTHER_PARTS = frozenset(("pcie", "nvl", "40gb", "ti", "super", "laptop", "max", "d"))
"""Words in a name that make it another device than the listed one, with other rates."""


def _words(name: str) -> list[str]:
    return re.sub(r"[^a-z0-9]+", " ", name.lower()).split()


def _fits(words: list[str], listed: list[str]) -> bool:
    """Whether `words` name the listed device, with or without "RTX"; words such as "SXM4" or "80GB"
    may follow."""
    name, short = "".join(listed), "".join(w for w in listed if w != "rtx")
    for n in range(1, len(words) + 1):
        if "".join(words[:n]) in (name, short):
            return not _OTHER_PARTS & set(words[n:])
    return False


def typical_hardware(target: str) -> Device:
    """The device that is assumed for a CUDA target if none is named."""
    return next(d for d in DEVICES if d.target == architecture(target))


def device_hardware(index: int = 0) -> Device:
    """The CUDA device of that ordinal, from torch's properties.

    Rates are those of the listed device, or computed from the clocks if torch reports them.

    Raises:
        InputError: torch has no such device.
        TargetError: no kernels exist for it.
    """
    import torch

    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise InputError(f"torch sees no CUDA device {index}; name one: device='H100'")
    return described(torch.cuda.get_device_properties(index))


def described(properties: Any) -> Device:
    """A device, from torch's properties of it."""
    target = cuda_target(properties.major, properties.minor)
    arch = LIMITS[target]
    try:
        listed: Device | None = named_hardware(properties.name)
    except InputError:
        listed = None
    if listed is not None and listed.target != target:
        listed = None
    sms = int(properties.multi_processor_count)
    like = listed or typical_hardware(target)

    def reported(name: str, otherwise: int) -> int:
        return int(getattr(properties, name, 0) or otherwise)

    return Device(
        name=properties.name,
        target=target,
        num_sms=sms,
        l2_bytes=reported("L2_cache_size", like.l2_bytes),
        read_bytes_per_s=_bandwidth(properties) or like.read_bytes_per_s,
        matrix_flops=(
            listed.matrix_flops * sms / listed.num_sms
            if listed is not None
            else _matrix_rate(properties, target, sms) or like.matrix_flops * sms / like.num_sms
        ),
        shared_per_sm=reported("shared_memory_per_multiprocessor", arch.shared_per_sm),
        shared_per_block=reported("shared_memory_per_block_optin", arch.shared_per_block),
        registers_per_sm=reported("regs_per_multiprocessor", arch.registers_per_sm),
        threads_per_sm=reported("max_threads_per_multi_processor", arch.threads_per_sm),
    )


def _bandwidth(properties: Any) -> float:
    """Two transfers per clock (in kHz) on the bus; 0 if torch does not report clock and width."""
    clock = getattr(properties, "memory_clock_rate", 0) or 0
    width = getattr(properties, "memory_bus_width", 0) or 0
    return 2.0 * clock * 1e3 * width / 8


def _matrix_rate(properties: Any, target: str, sms: int) -> float:
    clock = getattr(properties, "clock_rate", 0) or 0
    return float(sms * clock * 1e3 * LIMITS[target].matrix_flops_per_clock)
