"""The multiprocessor of each target as the model sees it: pipes, rates and latencies, in clocks.

Four schedulers each issue one warp instruction per clock, to pipes of their own (tensor, FMA, ALU,
MUFU) and to the load and store unit that they share. Rates are those of the CUDA programming guide
(arithmetic throughput by compute capability); that of mma.sync on Hopper is 62.9 % of wgmma's
(arXiv 2501.12084). Latencies are those of published micro-benchmarks, rounded (arXiv 1804.06826,
2402.13499).

One figure is fitted: the clock of sm_90 under mma.sync, with which the model gives the published
370 TFLOP/s of FlashAttention 2 on an H100 (head_dim 128, no mask, 16384 queries and keys) for its
machine code. For other targets nothing is fitted and nothing was compared.

Of wgmma, m64nNk16 takes N / 2 clocks of a multiprocessor (4096 FLOP per clock), or more where its
operands do: shared memory gives 128 bytes a clock. ptxas keeps 12 to 18 clocks between two of
128 to 192 columns, fewer than they take, and NVIDIA names WARPGROUP.ARRIVE and DEPBAR as where
warps wait (forums.developer.nvidia.com/t/318492): so they are queued, at least a step's. With a
queue of one instead, FlashAttention 3's loops are 0 to 11 % slower in the model. The clock under
wgmma is published: an H800 SXM5, whose multiprocessors are an H100's, throttles to about 1.6 GHz
(FlashMLA's "new kernel deep dive" of April 2025).

`wgmma_delay` is an assumption. A product reads and writes accumulators of a register a clock, and
each instruction that uses the same registers' ports is taken to delay it by one clock. Without it
the model would give 1.14 to 1.53 times the published rates of FlashAttention 3, most at head_dim
64; with it, and no figure fitted, 0.87 to 1.04 (`benchmarks/sass.py`). It was assumed in sight of
these figures, and has no other evidence than that FP8 kernels gain from where their additions
yield to products (DeepGEMM's README, "FFMA SASS interleaving").
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...codegen.targets import architecture
from ...jit.compilation.loops import PRODUCTS
from ...planner.devices import Device, typical_hardware
from .disassembly import Instruction

SCHEDULERS = 4
SHARED_BYTES = 128
"""What shared memory delivers in a clock."""


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Clocks of one multiprocessor.

    hmma: from one matrix instruction of a scheduler to its next one (16816 with fp32 accumulation;
    sm_75: 1688). wgmma: the same of a warpgroup's instruction, for each of its columns of B (16
    deep). wgmma_latency: from there to the wait's end. wgmma_delay: by each instruction that issues
    meanwhile and has operands in registers. fma_pipes: FMA pipes of a scheduler, of 16 lanes each.
    l2_bytes: bytes per clock that it gets of the L2's bandwidth while all others read too.
    copy_latency: of a copy from the L2. tma_latency: from a buffer's release to the arrival of the
    copy into it, without the time of its bytes. clock_hz: under load. wgmma_clock_hz: under that
    of wgmma.
    """

    hmma: float
    fma_pipes: int
    l2_bytes: float
    copy_latency: int
    clock_hz: float
    shared_latency: int = 30
    mufu: int = 8
    mufu_latency: int = 24
    barrier: int = 24
    branch: int = 8
    wgmma: float = 0.5
    wgmma_latency: int = 32
    wgmma_delay: int = 1
    tma_latency: int = 600
    wgmma_clock_hz: float = 0.0


_MULTIPROCESSORS = {
    "sm_75": Multiprocessor(8, 1, 16, 300, 1.35e9),
    "sm_80": Multiprocessor(8, 1, 30, 300, 1.35e9),
    "sm_86": Multiprocessor(16, 2, 16, 300, 1.6e9),
    "sm_89": Multiprocessor(16, 2, 20, 350, 2.3e9),
    "sm_90": Multiprocessor(6.36, 2, 28, 320, 1.747e9, wgmma_clock_hz=1.6e9),
}


def multiprocessor(device: Device) -> Multiprocessor | None:
    """The multiprocessor of a device; None where the model does not know its architecture.

    GeForce parts have half the matrix rate of the others of their target.
    """
    found = _MULTIPROCESSORS.get(architecture(device.target))
    if found is None:
        return None
    typical = typical_hardware(device.target)
    rates = typical.matrix_flops / typical.num_sms, device.matrix_flops / device.num_sms
    return replace(found, hmma=2 * found.hmma) if rates[1] < 0.7 * rates[0] else found


_FMA = frozenset("FFMA FMUL FADD FFMA2 FMUL2 FADD2 HFMA2 HMUL2 HADD2".split())
_HEAVY = frozenset("IMAD IDP".split())
_MUFU = frozenset("MUFU I2F F2I F2F POPC FLO BREV".split())
_LSU = frozenset("LDSM LDS STS SHFL LDL STL ATOMS LDG STG LD ST RED ATOM ATOMG SYNCS".split())
_UNIFORM = frozenset("S2R S2UR R2UR LDC CS2R VOTEU".split())
_CONTROL = frozenset(
    "BRA EXIT NOP BSSY BSYNC WARPSYNC BAR DEPBAR LDGDEPBAR CALL RET YIELD BMOV BREAK ERRBAR "
    "MEMBAR CCTL NANOSLEEP ACQBULK PREEXIT WARPGROUP USETMAXREG FENCE".split()
)


def pipe_of(instruction: Instruction) -> str:
    """tensor, fma, heavy (the FMA pipe that multiplies integers), mufu, lsu, copy, uniform,
    control; else alu."""
    name = instruction.name
    for pipe, names in _PIPES.items():
        if name in names:
            return pipe
    return "uniform" if name.startswith("U") else "alu"


_PIPES = {
    "tensor": frozenset(PRODUCTS), "fma": _FMA, "heavy": _HEAVY, "mufu": _MUFU, "lsu": _LSU,
    "copy": frozenset(("LDGSTS",)), "control": _CONTROL, "uniform": _UNIFORM,
}  # fmt: skip


def wgmma_columns(instruction: Instruction) -> int:
    """Columns of B of a warpgroup's product, ``HGMMA.64x128x16``; 0 for other instructions."""
    if instruction.name != "HGMMA":
        return 0
    return int(instruction.opcode.split(".")[1].split("x")[1])


def flops_of(instruction: Instruction) -> int:
    """Floating-point operations of one warp's matrix instruction, 0 for other instructions."""
    if columns := wgmma_columns(instruction):
        return 2 * 16 * columns * 16
    if instruction.name != "HMMA":
        return 0
    return 2 * 16 * 8 * (8 if ".1688." in instruction.opcode else 16)


def wavefronts(instruction: Instruction) -> int:
    """Clocks that it occupies the load and store unit: one for 128 bytes, without bank
    conflicts."""
    if instruction.name == "LDSM":
        return 4 if ".4" in instruction.opcode else 2 if ".2" in instruction.opcode else 1
    return 4 if ".128" in instruction.opcode else 2 if ".64" in instruction.opcode else 1
