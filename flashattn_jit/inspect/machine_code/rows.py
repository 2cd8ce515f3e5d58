"""Turns of loops in which hooks change rows: by warps that multiply, or by those of a wgmma kernel
that only change rows (`wgmma/changer.h`).

A hook is run on row after row, in a loop inside of that over the tiles, which a turn repeats for
all rows of a warp.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...codegen.spec import CUDA_CODES, KernelSpec
from ...jit.compilation.loops import Flow, count
from ...variants.ir.ir import KV_HOOKS
from .disassembly import Instruction
from .simulation import Changers

_GROUP, _LANES = 4, 32
_Blocks = frozenset[int]


def changers_of(spec: KernelSpec, code: Sequence[Instruction]) -> Changers | None:
    """The warps of a wgmma kernel that change rows; None where it has none."""
    coded = spec.k_dtype in CUDA_CODES, spec.v_dtype in CUDA_CODES
    keys, values = (c or spec.variant.has(hook) for c, hook in zip(coded, KV_HOOKS, strict=True))
    if not keys and not values:
        return None
    flow = Flow(code)
    found = flow.changes()
    assert found is not None
    header, body = found
    instructions = with_rows(flow, header, body, -1, spec, _GROUP)
    return Changers(instructions, keys, values, coded)


def with_rows(
    flow: Flow[Instruction],
    header: int,
    body: _Blocks,
    sign: int,
    spec: KernelSpec,
    warps: int,
) -> tuple[Instruction, ...]:
    """A turn of a loop (`Flow.way`) of one of the warps that change a tile's rows, all of which
    exist: the way that copies and stores the most.

    Inner loops beside those over rows are for partial tiles, and for infinities among codes.
    """
    inner = [blocks for start, blocks in flow.loops() if start != header and start in body]
    dims = [
        dim
        for dim, hook in ((spec.head_dim, "key_mod"), (spec.head_dim_v, "value_mod"))
        if spec.variant.has(hook)
    ]
    # A hook may have two loops: over some rows at once, and over those that are left.
    most = max((_values(flow, blocks) for blocks in inner), default=0)
    turns: dict[int, int] = {}
    for blocks in inner:
        if 4 * _values(flow, blocks) > most:
            of_lane = spec.tile_kv // warps * -(-max(dims) // _LANES)
            turns |= dict.fromkeys(blocks, max(1, of_lane // _values(flow, blocks)))
    others = frozenset[int]().union(*inner) - turns.keys()
    wanted = {
        start: 0 if start in others else count(flow.part(start), "STS", "LDGSTS") for start in body
    }
    way = flow.blocks_of_way(header, body, sign, wanted)
    return tuple(i for start in way for i in flow.part(start) * turns.get(start, 1))


def _values(flow: Flow[Instruction], blocks: _Blocks) -> int:
    """Single values that a loop stores, as hooks do; others store 16 bytes a lane."""
    return sum(i.opcode == "STS.U16" for start in blocks for i in flow.part(start))
