"""FlashAttention 2's and 3's own machine code: what the model says of it, and what was published.

The figures are those of FlashAttention 3's repository, its chart for an H100 SXM5: forward, fp16,
16384 tokens, hidden size 2048. The predictions are kept in benchmarks/results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.parts.call_clocks import call_clocks
from benchmarks.parts.measure import RESULTS
from flashattn_jit.codegen.budget import limits
from flashattn_jit.inspect.machine_code.disassembly import Instruction, disassemble
from flashattn_jit.inspect.machine_code.multiprocessor import Multiprocessor, multiprocessor
from flashattn_jit.inspect.machine_code.prediction import KernelModel, LoopCost
from flashattn_jit.inspect.machine_code.simulation import Ring
from flashattn_jit.inspect.table import table
from flashattn_jit.planner.devices import Device

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS, HIDDEN = 16384, 2048

Shape = tuple[int, bool]
"""head_dim, causal."""
Tile = tuple[int, int]
"""Rows and keys."""


@dataclass(frozen=True)
class Peer:
    """The prediction for one kernel: TFLOP/s by length, and of the loop."""

    head_dim: int
    causal: bool
    instructions: int
    cycles: float
    loop_tflops: float
    call_tflops: tuple[float, ...]


@dataclass(frozen=True)
class Library:
    """A library's kernels.

    published: TFLOP/s by `LENGTHS`. find: of a kernel's symbol, its shape and how well it fits (the
    published figures are of the kernel that fits best); None for others. model: of its code and
    tile. loop: that of full tiles. longest_first: the order of the row blocks of a causal call.
    """

    name: str
    results: Path
    published: Mapping[Shape, tuple[int, ...]]
    tiles: Mapping[Shape, Tile]
    find: Callable[[str], tuple[Shape, int] | None]
    model: Callable[[tuple[Instruction, ...], Multiprocessor, Shape, Tile, int], KernelModel]
    loop: Callable[[KernelModel], LoopCost]
    longest_first: bool

    def read(self) -> list[Peer]:
        """The committed predictions."""
        rows = json.loads(self.results.read_text())
        return [Peer(**row | {"call_tflops": tuple(row["call_tflops"])}) for row in rows]

    def write(self, found: list[Peer]) -> None:
        """Commits predictions."""
        self.results.write_text(json.dumps([asdict(p) for p in found], indent=1) + "\n")

    def predict(self, folder: Path, device: Device) -> Iterator[Peer]:
        """The predictions for the kernels in a folder of cubins."""
        machine = multiprocessor(device)
        assert machine is not None
        best: dict[Shape, tuple[int, tuple[Instruction, ...]]] = {}
        for path in sorted(folder.glob(f"*{device.target}*.cubin")):
            symbols = map(bytes.decode, re.findall(rb"\.text\.(\w+)", path.read_bytes()))
            if not any(map(self.find, symbols)):
                continue
            for symbol, code in disassemble(path.read_bytes()).items():
                if (found := self.find(symbol)) and found[1] > best.get(found[0], (0, ()))[0]:
                    best[found[0]] = (found[1], code)
        for shape, (fit, code) in sorted(best.items()):
            tile = self.tiles[shape]
            model = self.model(code, machine, shape, tile, fit)
            cost = self.loop(model)
            yield Peer(
                *shape, len(cost.loop.common), round(cost.common.cycles, 1),
                round(model.flops_per_s(cost) * device.num_sms / 1e12, 1),
                tuple(
                    round(call_tflops(model, device, tile, (n, *shape), self.longest_first), 1)
                    for n in LENGTHS
                ),
            )  # fmt: skip

    def compare(self, found: list[Peer]) -> str:
        """The table of predictions beside the published figures."""
        header = ["head_dim", "mask", *map(str, LENGTHS), "predicted / published"]
        rows = []
        for peer in sorted(found, key=lambda p: (p.head_dim, p.causal)):
            published = self.published[peer.head_dim, peer.causal]
            ratios = [p / q for p, q in zip(peer.call_tflops, published, strict=True)]
            rows.append(
                [str(peer.head_dim), "causal" if peer.causal else "none"]
                + [f"{p:.0f} ({q})" for p, q in zip(peer.call_tflops, published, strict=True)]
                + [f"{min(ratios):.2f} to {max(ratios):.2f}, {ratios[-1]:.2f} at {LENGTHS[-1]}"]
            )
        return f"{self.name} by length, TFLOP/s: predicted (published)\n{table(header, rows)}\n"


def call_tflops(
    model: KernelModel, device: Device, tile: Tile, shape: tuple[int, int, bool],
    longest_first: bool,
) -> float:  # fmt: skip
    """The predicted rate of a call with `TOKENS` tokens.

    shape: length, head_dim, causal. longest_first: the order in which items begin; else that of
    their rows.
    """
    (rows, keys), (length, head_dim, causal) = tile, shape
    heads = HIDDEN // head_dim * (TOKENS // length)
    ends = [min(length, r + rows) if causal else length for r in range(0, length, rows)]
    tiles = [-(-end // keys) for end in ends] * heads
    if longest_first:
        tiles.sort(reverse=True)
    clocks = call_clocks(
        model, tiles, device.num_sms, -(-rows // keys) if causal and longest_first else 0
    )
    flops = 4 * length * length * head_dim * heads / (2 if causal else 1)
    return flops / clocks * model.clock_hz / 1e12


# --- FlashAttention 2 ----------------------------------------------------------------------------

_SHAPES = [(d, causal) for d in (64, 128, 256) for causal in (False, True)]
_TILES_2 = {64: (128, 128), 128: (128, 64), 256: (64, 64)}  # 4 warps


def _symbol_2(head_dim: int, causal: bool) -> str:
    """The part of the symbol that is a kernel for bf16, lengths that fill tiles, no other option.

    In order: dropout, causal, local, ALiBi, even lengths, even head_dim, soft cap, return softmax.
    """
    rows, keys = _TILES_2[head_dim]
    traits = f"ILi{head_dim}ELi{rows}ELi{keys}ELi4E"
    even = int(head_dim <= 128)
    flags = "".join(f"ELb{f}" for f in (0, int(causal), 0, 0, even, 1, 0, 0))
    return (
        f"flash_fwd_kernelI23Flash_fwd_kernel_traits{traits}Lb0ELb0EN7cutlass10bfloat16_tE"
        f"19Flash_kernel_traits{traits}S3_E{flags}EEEv"
    )


def _find_2(symbol: str) -> tuple[Shape, int] | None:
    return next(((shape, 1) for shape in _SHAPES if _symbol_2(*shape) in symbol), None)


def _model_2(
    code: tuple[Instruction, ...], machine: Multiprocessor, shape: Shape, tile: Tile, fit: int
) -> KernelModel:
    arch = limits("sm_90")
    shared = (tile[0] + 2 * tile[1]) * shape[0] * 2 + arch.shared_reserved
    return KernelModel(code, machine, min(2, arch.shared_per_sm // shared), 4)  # 255 registers


FLASH_ATTENTION_2 = Library(
    "FlashAttention 2",
    RESULTS / "machine-code-flash-attention-2.json",
    {
        (64, False): (282, 306, 318, 321, 322, 324),
        (64, True): (180, 229, 262, 284, 295, 299),
        (128, False): (309, 350, 362, 368, 370, 370),
        (128, True): (191, 260, 298, 319, 333, 335),
        (256, False): (275, 313, 321, 323, 324, 326),
        (256, True): (208, 251, 278, 293, 297, 298),
    },
    {(d, causal): _TILES_2[d] for d, causal in _SHAPES},
    _find_2,
    _model_2,
    lambda model: model.costs[-1],
    longest_first=False,
)


# --- FlashAttention 3 ----------------------------------------------------------------------------

_TILES_3 = {
    (64, False): (192, 192), (64, True): (192, 128), (128, False): (128, 176),
    (128, True): (128, 128), (256, False): (128, 80), (256, True): (128, 80),
}  # fmt: skip
_SYMBOL_3 = re.compile(
    r"FlashAttnFwdSm90INS\w_25CollectiveMainloopFwdSm90ILi2E.*?1CILi(\d)E.*?ELi(\d+)ENS_10bfloat16_t"
    r"EfNS_4arch4Sm90E((?:Lb\dE){12})"
)


def _find_3(symbol: str) -> tuple[Shape, int] | None:
    """A kernel for bf16 without options; the better one shares loads among two blocks.

    In order: causal, local, soft cap, lengths that vary, pages without TMA, append, Qv, P in
    registers, overlap, packed heads, split, V by columns.
    """
    match = _SYMBOL_3.search(symbol)
    if match is None:
        return None
    flags = [int(f) for f in re.findall(r"Lb(\d)", match[3])]
    shape = int(match[2]), bool(flags[0])
    if shape not in _TILES_3 or any(flags[1:7]) or not flags[8] or any(flags[9:]):
        return None
    return shape, int(match[1])


def _model_3(
    code: tuple[Instruction, ...], machine: Multiprocessor, shape: Shape, tile: Tile, fit: int
) -> KernelModel:
    ring = Ring(4, tile[1] * shape[0] * 2 / fit)
    return KernelModel(code, machine, 1, tile[0] // 16, ring, item_start=0)


FLASH_ATTENTION_3 = Library(
    "FlashAttention 3",
    RESULTS / "machine-code-flash-attention-3.json",
    {
        (64, False): (333, 392, 460, 476, 496, 497),
        (64, True): (197, 265, 371, 420, 460, 473),
        (128, False): (467, 565, 625, 638, 646, 648),
        (128, True): (292, 423, 521, 579, 602, 616),
        (256, False): (482, 639, 707, 736, 746, 756),
        (256, True): (286, 427, 537, 612, 628, 642),
    },
    _TILES_3,
    _find_3,
    _model_3,
    lambda model: model.full,
    longest_first=True,
)
