"""The model of machine code, its comparison with published figures, and what it predicts.

    python -m benchmarks.sass [--device H100] [--flash-attention FOLDER] [--save]

Nothing here is measured. `flashattn_jit/inspect/machine_code` simulates a multiprocessor that runs
the compiled kernels; one figure of it, the clock of sm_90, is fitted to one published figure. The
first table gives its predictions for FlashAttention 2's own machine code beside the published
figures (FlashAttention 3's repository, its chart for an H100 SXM5, fp16, 16384 tokens, hidden size
2048). The second gives those for this project's kernels, as multiples of the first.

The first table is kept in benchmarks/results/machine-code-flash-attention-2.json.
`--flash-attention` makes it anew from a folder of cubins, that of torch 2.11's CUDA wheel:

    cuobjdump -arch sm_90 -xelf all libtorch_cuda.so      (nvidia-cuda-cuobjdump, in the folder)
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import flashattn_jit as fa
from benchmarks.parts.measure import RESULTS
from flashattn_jit.codegen.budget import limits
from flashattn_jit.inspect.machine_code.disassembly import disassemble
from flashattn_jit.inspect.machine_code.multiprocessor import multiprocessor
from flashattn_jit.inspect.machine_code.prediction import KernelModel
from flashattn_jit.inspect.table import table
from flashattn_jit.planner.devices import Device, named_hardware
from flashattn_jit.variants.variant import Variant

_PEER = RESULTS / "machine-code-flash-attention-2.json"
_TOKENS, _HIDDEN = 16384, 2048
PUBLISHED = {
    # head_dim, causal: TFLOP/s at 512, 1k, 2k, 4k, 8k, 16k queries and keys
    (64, False): (282, 306, 318, 321, 322, 324),
    (64, True): (180, 229, 262, 284, 295, 299),
    (128, False): (309, 350, 362, 368, 370, 370),
    (128, True): (191, 260, 298, 319, 333, 335),
    (256, False): (275, 313, 321, 323, 324, 326),
    (256, True): (208, 251, 278, 293, 297, 298),
}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_PEER_TILES = {64: (128, 128), 128: (128, 64), 256: (64, 64)}  # rows and keys; 4 warps
_VARIANTS: dict[str, Variant] = {
    "plain": fa.Full(),
    "causal": fa.Causal(),
    "ALiBi": fa.ALiBi(),
    "window 4096": fa.SlidingWindow(4096),
    "soft cap 50": fa.SoftCap(50.0),
    "soft cap 50, approximate": fa.SoftCap(50.0, approximate=True),
}


@dataclass(frozen=True)
class Peer:
    """The prediction for one of FlashAttention 2's kernels: TFLOP/s by length, and of the loop."""

    head_dim: int
    causal: bool
    instructions: int
    cycles: float
    loop_tflops: float
    call_tflops: tuple[float, ...]


def call_tflops(
    model: KernelModel, device: Device, tile: tuple[int, int], shape: tuple[int, int, bool],
    longest_first: bool,
) -> float:  # fmt: skip
    """The predicted rate of a call with `_TOKENS` tokens.

    tile: rows and keys. shape: length, head_dim, causal. longest_first: the order in which blocks
    are launched; else that of their rows.
    """
    (rows, keys), (length, head_dim, causal) = tile, shape
    heads = _HIDDEN // head_dim * (_TOKENS // length)
    ends = [min(length, r + rows) if causal else length for r in range(0, length, rows)]
    tiles = [-(-end // keys) for end in ends] * heads
    if longest_first:
        tiles.sort(reverse=True)
    clocks = model.call_clocks(
        tiles, device.num_sms, -(-rows // keys) if causal and longest_first else 0
    )
    flops = 4 * length * length * head_dim * heads / (2 if causal else 1)
    return flops / clocks * model.clock_hz / 1e12


def peers(folder: Path, device: Device) -> Iterator[Peer]:
    """The predictions for the kernels in a folder of cubins."""
    machine = multiprocessor(device)
    assert machine is not None
    wanted = {_peer_name(d, causal): (d, causal) for d, causal in PUBLISHED}
    for path in sorted(folder.glob(f"*{device.target}.cubin")):
        binary = path.read_bytes()
        if not any(name.encode() in binary for name in wanted):
            continue
        for symbol, code in disassemble(binary).items():
            found = next((shape for name, shape in wanted.items() if name in symbol), None)
            if found is None:
                continue
            head_dim, causal = found
            tile = _PEER_TILES[head_dim]
            shared = (tile[0] + 2 * tile[1]) * head_dim * 2 + limits(device.target).shared_reserved
            blocks = min(2, limits(device.target).shared_per_sm // shared)  # 255 registers
            model = KernelModel(code, machine, blocks, 4)
            cost = model.costs[-1]
            yield Peer(
                head_dim, causal, len(cost.loop.common), round(cost.common.cycles, 1),
                round(model.flops_per_s(cost) * device.num_sms / 1e12, 1),
                tuple(
                    round(call_tflops(model, device, tile, (n, head_dim, causal), False), 1)
                    for n in LENGTHS
                ),
            )  # fmt: skip


def _peer_name(head_dim: int, causal: bool) -> str:
    """The part of the symbol that is a kernel for bf16, lengths that fill tiles, no other option.

    In order: dropout, causal, local, ALiBi, even lengths, even head_dim, soft cap, return softmax.
    """
    rows, keys = _PEER_TILES[head_dim]
    traits = f"ILi{head_dim}ELi{rows}ELi{keys}ELi4E"
    even = int(head_dim <= 128)
    flags = "".join(f"ELb{f}" for f in (0, int(causal), 0, 0, even, 1, 0, 0))
    return (
        f"flash_fwd_kernelI23Flash_fwd_kernel_traits{traits}Lb0ELb0EN7cutlass10bfloat16_tE"
        f"19Flash_kernel_traits{traits}S3_E{flags}EEEv"
    )


def read_peers() -> list[Peer]:
    """The committed predictions for FlashAttention 2's machine code."""
    rows = json.loads(_PEER.read_text())
    return [Peer(**row | {"call_tflops": tuple(row["call_tflops"])}) for row in rows]


def compare(found: list[Peer]) -> str:
    """The table of predictions beside the published figures."""
    header = ["head_dim", "mask", *map(str, LENGTHS), "predicted / published"]
    rows = []
    for peer in sorted(found, key=lambda p: (p.head_dim, p.causal)):
        published = PUBLISHED[peer.head_dim, peer.causal]
        ratios = [p / q for p, q in zip(peer.call_tflops, published, strict=True)]
        rows.append(
            [str(peer.head_dim), "causal" if peer.causal else "none"]
            + [f"{p:.0f} ({q})" for p, q in zip(peer.call_tflops, published, strict=True)]
            + [f"{min(ratios):.2f} to {max(ratios):.2f}"]
        )
    return table(header, rows)


@dataclass(frozen=True)
class Own:
    """The prediction for one of this project's kernels; ratios over that of FlashAttention 2.

    call_tflops: by length; None for windows. call_ratio: of the longest calls.
    """

    variant: str
    head_dim: int
    tile: str
    per_key: float
    cycles: float
    binding: str
    loop_tflops: float
    loop_ratio: float
    call_tflops: tuple[float, ...] | None
    call_ratio: float | None


def own(device: Device, found: list[Peer]) -> Iterator[Own]:
    """The predictions for the kernels of some variants, at 16384 queries and keys."""
    peer = {(p.head_dim, p.causal): p for p in found}
    for head_dim in (64, 128, 256):
        dims = {"num_q_heads": _HIDDEN // head_dim, "q_len": _TOKENS, "head_dim": head_dim}
        for name, variant in _VARIANTS.items():
            code = variant.explain(dims=dims, dtype=torch.bfloat16, device=device.name).cycles
            spec, cost = code.spec, max(code.loops, key=lambda c: c.loop.products)
            rate = code.flops_per_s(cost) / 1e12
            causal = name == "causal"
            call = ratio = None
            if not name.startswith("window"):
                tile = spec.tile_q, spec.tile_kv
                call = tuple(
                    round(call_tflops(code.model, device, tile, (n, head_dim, causal), True), 1)
                    for n in LENGTHS
                )
            if call and name in ("plain", "causal"):
                ratio = round(call[-1] / peer[head_dim, causal].call_tflops[-1], 3)
            yield Own(
                name, head_dim, f"{spec.tile_q} x {spec.tile_kv}, {spec.num_stages} stages",
                round(len(cost.loop.common) / spec.tile_kv, 2), round(cost.common.cycles, 1),
                f"{cost.common.binding} {cost.common.pipes[cost.common.binding]:.0%}",
                round(rate, 1), round(rate / peer[head_dim, causal].loop_tflops, 3), call, ratio,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="H100", help="a device whose target is sm_90")
    parser.add_argument("--flash-attention", type=Path, metavar="FOLDER")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    device = named_hardware(options.device)
    if device.target != "sm_90":
        parser.error("the figures of FlashAttention 2 are those of sm_90; name H100 or H200")
    if options.flash_attention is not None:
        found = list(peers(options.flash_attention, device))
        missing = set(PUBLISHED) - {(p.head_dim, p.causal) for p in found}
        if missing:
            parser.error(f"no cubin in the folder has the kernels of {sorted(missing)}")
        if options.save:
            _PEER.write_text(json.dumps([asdict(p) for p in found], indent=1) + "\n")
    else:
        found = read_peers()
    print("FlashAttention 2 by length, TFLOP/s: predicted (published)\n" + compare(found) + "\n")
    rows = list(own(device, found))
    header = [
        "variant", "head_dim", "tile", "instructions per key and warp", "clocks", "bound by",
        "loop TFLOP/s", "over FlashAttention 2", "call TFLOP/s", "over FlashAttention 2",
    ]  # fmt: skip
    shown = [asdict(row) | {"call_tflops": row.call_tflops and row.call_tflops[-1]} for row in rows]
    print("this project's kernels, predicted\n" + table(header, [
        ["" if x is None else str(x) for x in row.values()] for row in shown
    ]))  # fmt: skip
    if options.save:
        path = RESULTS / f"machine-code-{re.sub(r'[^a-z0-9]', '', device.name.lower())}.json"
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
