"""The model of machine code, its comparison with published figures, and what it predicts.

    python -m benchmarks.sass [--device H100] [--save]
                              [--flash-attention-2 FOLDER] [--flash-attention-3 FOLDER]

Nothing here is measured. `flashattn_jit/inspect/machine_code` simulates a multiprocessor that runs
the compiled kernels. The first two tables give its predictions for FlashAttention 2's and 3's own
machine code beside the published figures (`parts/peer_code.py`), the third those for this project's
kernels: of wgmma, as multiples of FlashAttention 3's, and of mma.sync, which serves what TMA cannot
copy, as multiples of FlashAttention 2's.

The first two tables are kept in benchmarks/results/machine-code-flash-attention-{2,3}.json. The
options make them anew from a folder of cubins (with nvidia-cuda-cuobjdump, in the folder):

    2: that of torch 2.11's CUDA wheel     cuobjdump -arch sm_90 -xelf all libtorch_cuda.so
    3: that of xformers 0.0.32.post2       cuobjdump -xelf sm_90a xformers/flash_attn_3/_C.so

sgl-kernel 0.3.21 has FlashAttention 3 too, but compiled without CUTLASS's extended shapes: tiles of
176 and 80 keys are products of 16 columns there, which shared memory cannot feed. The published
figures are not of such kernels.
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
from benchmarks.parts.peer_code import (
    FLASH_ATTENTION_2,
    FLASH_ATTENTION_3,
    HIDDEN,
    LENGTHS,
    TOKENS,
    Peer,
    call_tflops,
)
from flashattn_jit.inspect.machine_code.report import MachineCode, machine_code
from flashattn_jit.inspect.table import table
from flashattn_jit.planner.cuda_tiles import with_tile
from flashattn_jit.planner.devices import Device, named_hardware
from flashattn_jit.variants.variant import Variant

_DOCUMENTS = (torch.arange(TOKENS, dtype=torch.int32) // 2048)[None]
_VARIANTS: dict[str, Variant] = {
    "plain": fa.Full(),
    "causal": fa.Causal(),
    "ALiBi": fa.ALiBi(),
    "window 4096": fa.SlidingWindow(4096),
    "soft cap 50": fa.SoftCap(50.0),
    "soft cap 50, approximate": fa.SoftCap(50.0, approximate=True),
    "documents": fa.DocumentMask(_DOCUMENTS),
}
_SPARSE = ("window 4096", "documents")
_PEERS = {"prefill_wgmma": FLASH_ATTENTION_3, "prefill": FLASH_ATTENTION_2}
_FAMILIES = {"prefill_wgmma": "wgmma", "prefill": "mma.sync"}
_MANY_ROWS = 128


@dataclass(frozen=True)
class Own:
    """The prediction for one of this project's kernels.

    partial_cycles: of a turn with a partial tile. loop_tflops: of full tiles. loop_ratio,
    call_ratio: over that of FlashAttention 3 (wgmma) or 2 (mma.sync); of the longest calls.
    over_mma_sync: of wgmma, the loop's rate over that of the kernel of mma.sync. call_tflops: by
    length; None where the mask leaves out tiles.
    """

    variant: str
    head_dim: int
    family: str
    tile: str
    per_key: float
    cycles: float
    partial_cycles: float
    binding: str
    loop_tflops: float
    loop_ratio: float
    over_mma_sync: float | None
    call_tflops: tuple[float, ...] | None
    call_ratio: float | None


def own(device: Device) -> Iterator[Own]:
    """The predictions for the kernels of some variants, at 16384 queries and keys."""
    for head_dim in (64, 128, 256):
        heads = HIDDEN // head_dim
        dims = {"batch": 1, "num_q_heads": heads, "q_len": TOKENS, "head_dim": head_dim}
        for name, variant in _VARIANTS.items():
            code = variant.explain(dims=dims, dtype=torch.bfloat16, device=device.name).cycles
            old = machine_code(with_tile(code.spec, _MANY_ROWS, tma=False), device)
            if code.spec != old.spec:
                yield _row(name, device, code, old)
            yield _row(name, device, old)


def _row(name: str, device: Device, code: MachineCode, old: MachineCode | None = None) -> Own:
    spec, model, head_dim, causal = code.spec, code.model, code.spec.head_dim, name == "causal"
    peers = {(p.head_dim, p.causal): p for p in _PEERS[spec.tile_kind].read()}
    peer = peers[head_dim, causal]
    cost, rate = model.full, code.flops_per_s(model.full) / 1e12
    call = None
    if name not in _SPARSE:
        tile = spec.tile_q, spec.tile_kv
        call = tuple(
            round(call_tflops(model, device, tile, (n, head_dim, causal), True), 1) for n in LENGTHS
        )
    compared = call if name in ("plain", "causal") else None
    return Own(
        name, head_dim, _FAMILIES[spec.tile_kind],
        f"{spec.tile_q} x {spec.tile_kv}, {spec.num_stages} stages",
        round(len(cost.loop.common) / spec.tile_kv, 2), round(cost.common.cycles, 1),
        round(model.partial.cycles, 1), cost.common.bound_by,
        round(rate, 1), round(rate / peer.loop_tflops, 3),
        old and round(rate * 1e12 / old.flops_per_s(old.model.full), 3), call,
        compared and round(compared[-1] / peer.call_tflops[-1], 3),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="H100", help="a device whose target is sm_90")
    parser.add_argument("--flash-attention-2", type=Path, metavar="FOLDER")
    parser.add_argument("--flash-attention-3", type=Path, metavar="FOLDER")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    device = named_hardware(options.device)
    if device.target != "sm_90":
        parser.error("the figures of FlashAttention are those of sm_90; name H100 or H200")
    folders = (options.flash_attention_2, options.flash_attention_3)
    for library, folder in zip((FLASH_ATTENTION_2, FLASH_ATTENTION_3), folders, strict=True):
        found: list[Peer] = list(library.predict(folder, device)) if folder else library.read()
        missing = set(library.published) - {(p.head_dim, p.causal) for p in found}
        if missing:
            parser.error(f"no cubin in {folder} has the kernels of {sorted(missing)}")
        if folder and options.save:
            library.write(found)
        print(library.compare(found))
    rows = list(own(device))
    header = [
        "variant", "head_dim", "family", "tile", "instructions per key and warp", "clocks",
        "partial tile", "bound by", "loop TFLOP/s", "over FlashAttention", "over mma.sync",
        "call TFLOP/s", "over FlashAttention",
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
