"""The table of predicted clocks of kernels. `python -m tests.cuda.cycles` writes it: four minutes.

With names of variants or formats it updates only these.

cycles.json has, for some variants, targets and head dims, the tile of the prefill kernel and the
clocks that the model of machine code gives one turn of its loop (`flashattn_jit/inspect/
machine_code`). They depend on the compiler, whose release the table names. Rows of sm_90 are
kernels of mma.sync, which serve what TMA cannot copy; those of sm_90a are kernels of wgmma.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flashattn_jit as fa
from flashattn_jit.codegen.targets import architecture
from flashattn_jit.inspect.machine_code.report import machine_code
from flashattn_jit.planner.devices import typical_hardware
from flashattn_jit.planner.tiles import choose_rows
from tests.cuda.digests import nvcc_release
from tests.cuda.kernels import by_mma_sync, coded_spec, ir_of, specs

TABLE = Path(__file__).with_name("cycles.json")
VARIANTS = ("plain", "causal", "alibi", "sliding_window", "soft_cap", "soft_cap_approximate")
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a")
HEAD_DIMS = (64, 128, 256)
INT8, E4M3, INT4 = fa.kv.Format("int8"), fa.kv.Format("e4m3"), fa.kv.Format("int4", group=64)
MIXED = "rope, int8 values"
FORMATS = {
    "int8": (INT8, INT8), "e4m3": (E4M3, E4M3), "int4": (INT4, INT4),
    "int8 keys": (INT8, None), "int8 values": (None, INT8),
    "e4m3 keys, int4 values": (E4M3, INT4), MIXED: (None, INT8),
}  # fmt: skip
"""Of keys and of values, None: in bfloat16; without a mask."""

CHANGED = (*FORMATS, "rope")
"""What changes rows of keys and values, on Hopper."""

KERNELS = [(v, t, d) for d in HEAD_DIMS for t in TARGETS for v in VARIANTS]
KERNELS += [
    (v, t, d)
    for d in HEAD_DIMS
    for t in TARGETS[-2:]
    for v in CHANGED
    # Of mma.sync the model finds too few turns of a key_mod's loop over rows beside codes.
    if (v, t) != (MIXED, "sm_90")
]


def predicted(name: str, target: str, head_dim: int) -> dict[str, Any]:
    """The tile of a variant's kernel for many rows, and the clocks of its loops."""
    dims = (head_dim, head_dim)
    if formats := FORMATS.get(name):
        spec = coded_spec(formats, dims, fa.RoPE() if name == MIXED else None)
    elif name in CHANGED:
        spec = choose_rows(ir_of(name), dims, ("bfloat16",) * 3, architecture(target), 5000)
    else:
        spec = max(specs(name, architecture(target), dims), key=lambda s: s.tile_q)
    spec = spec if target == spec.target else by_mma_sync(spec)
    code = machine_code(spec, typical_hardware(target))
    taken = code.spec
    return {
        "tile": f"{taken.tile_q} x {taken.tile_kv}, {taken.num_stages} stages",
        "clocks": [round(cost.common.cycles, 1) for cost in code.loops],
    }


def row(name: str, target: str, head_dim: int) -> str:
    """The name of a kernel's row in the table."""
    return f"{name} {target} D{head_dim}"


def read() -> dict[str, Any]:
    """The committed table: "nvcc", and "kernels" by the names of their rows."""
    table: dict[str, Any] = json.loads(TABLE.read_text())
    return table


def main(names: Sequence[str]) -> None:
    """Writes the table, or the rows of variants or formats with these names."""
    table: dict[str, Any] = read()["kernels"] if names else {}
    kernels = [kernel for kernel in KERNELS if not names or kernel[0] in names]
    for done, kernel in enumerate(kernels, 1):
        table[row(*kernel)] = predicted(*kernel)
        sys.stderr.write(f"\r{done} of {len(kernels)}")
    TABLE.write_text(json.dumps({"nvcc": nvcc_release(), "kernels": table}, indent=1) + "\n")
    sys.stderr.write(f"\n{TABLE}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
