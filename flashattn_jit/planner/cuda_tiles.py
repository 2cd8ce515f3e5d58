"""Tiles of the CUDA kernels: the candidates for a class of rows, head dims and target, in order.

There are three classes of packed rows. Up to 16 rows get the few-row kernel, whose warps share one
block of rows and split the keys. Up to 64 rows get a prefill tile of 64; more get one of 128 if it
fits registers and shared memory. The lists are those of FlashAttention 2 and of FlashInfer, in
order of preference. The first tile with enough resident warps is chosen; the tiles after it are
fallbacks for hooks that need more registers than the tile leaves.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from ..codegen.budget import (
    MAX_WARPS,
    MOST_NARROW,
    SPILL_BYTES,
    WARP,
    WGMMA_SPILL_BYTES,
    accumulator_registers,
    changes_rows,
    ctas_per_sm,
    fits,
    hook_over_codes,
    limits,
    loaded_bytes,
    padded,
    register_budget,
    row_temps,
    shared_bytes,
    warpgroup_registers,
)
from ..codegen.spec import MAX_HEAD_DIM, KernelSpec, TileKind
from ..codegen.targets import architecture, called_target, compiled_target, is_cuda
from ..errors import InputError
from ..variants.ir.ir import FLOAT_FUNCTIONS, REDUCTIONS, Graph

ROW_CLASSES = (16, 64, 128)
"""The largest number of packed rows of each class; the last class has no upper bound. Also the
tile_q of each class, unless registers allow only a smaller tile."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, keys and warps of a thread block; shared memory decides the number of stages."""

    tile_q: int
    tile_kv: int
    num_warps: int


_PREFILL: tuple[tuple[int, tuple[Tile, ...]], ...] = (
    (64, (Tile(128, 128, 4), Tile(128, 64, 4), Tile(128, 32, 4), Tile(64, 64, 4), Tile(64, 32, 4))),
    (128, (Tile(128, 64, 4), Tile(128, 32, 4), Tile(64, 64, 4), Tile(64, 32, 4))),
    (256, (Tile(128, 64, 8), Tile(64, 64, 4), Tile(64, 32, 4), Tile(64, 16, 4))),
)
"""By the larger head dim, the tiles in order of preference.

They are FlashAttention 2's. At head_dim 128 a multiprocessor of sm_86 and sm_89 holds two blocks
with 32 keys or one with 64. For these the model of machine code (`inspect/machine_code`) predicts
108 and 93 TFLOP/s on an A10, 280 and 264 on an L40S (without a mask, nvcc 13.0).

At head_dim 64 a loop over 64 keys, with the first product of the next tile before the softmax of
this one, was tried and is not kept: it was predicted to be slower than one over 128 keys, and left
no register for score hooks."""

_MANY_KEYS, _FEW_KEYS = 64, 32
_REGISTER_FEATURES = frozenset({"block_mask", "sparse", "unaligned"})
_SHORT_FUNCTIONS = {"exp", "exp2", "sqrt", "rsqrt", "tanh", "tanh_approx", "sigmoid"}
_LONG_FUNCTIONS = {"pow", "atan2", *FLOAT_FUNCTIONS, *REDUCTIONS} - _SHORT_FUNCTIONS


def _most_keys(spec: KernelSpec, widest: int) -> int:
    """Keys of a prefill tile at most: with more, kernels spill among the products (nvcc 13.0).

    Block masks, key lists and mixed rows keep values of each row or key in registers, loads of
    unaligned rows the values themselves. For sm_100 the compiler keeps more values of loops. Score
    hooks with a function of twenty instructions or more spill too or gain nothing, by the model of
    machine code, and with 128 keys take 4 s to compile. Reductions of vectors count as such: the
    registry's flex_long_reductions, six of 40 entries, took 78 s of a core on sm_80 with 128 keys,
    of which it spilled, and takes 25 s (by hand).
    """
    if "mixed_rows" in spec.features:
        return _MANY_KEYS if widest <= _MANY_KEYS else _FEW_KEYS
    if (
        widest > _MANY_KEYS  # no tile has more keys
        or not _REGISTER_FEATURES.isdisjoint(spec.features)
        or architecture(spec.target) == "sm_100"
    ):
        return _MANY_KEYS
    return _MANY_KEYS if _has_long_functions(spec) else 2 * _MANY_KEYS


def _has_long_functions(spec: KernelSpec) -> bool:
    graphs = filter(None, map(spec.variant.hook, ("score_mod", "pointwise")))
    return any(map(_long, graphs))


def _long(graph: Graph) -> bool:
    """Whether a function of many instructions is computed for each pair of a query and a key."""
    of_row: set[int] = set()
    of_key: set[int] = set()
    for index, node in enumerate(graph.nodes):
        name = node.attr("name") if node.op == "input" else None
        if name in ("score", "q_idx", "h") or not of_row.isdisjoint(node.args):
            of_row.add(index)
        if name in ("score", "kv_idx") or not of_key.isdisjoint(node.args):
            of_key.add(index)
    return any(graph.nodes[index].op in _LONG_FUNCTIONS for index in of_row & of_key)


_FEW_ROW = (Tile(16, 64, 4), Tile(16, 32, 2), Tile(16, 16, 1))
_FEW_ROW_CODES = (Tile(16, 128, 4), *_FEW_ROW)
"""Twice the keys, in as many bytes: a turn's walk and look-ups serve more of them."""

MOST_VALUES = 512
"""The largest head_dim_v: with 576 each lane would have 144 accumulators, and kernels spill."""

_WIDE = tuple(Tile(q, kv, q // 8) for q in (64, 32) for kv in (32, 16))
"""Tiles of larger head dims. A multiprocessor of 163 KiB or more has room for 64 rows of 576 dims
and two tiles of 32 keys whose values are their first columns, one of 99 KiB for one of 16 keys; or
for 32 rows and one of 32 keys."""

_WGMMA: tuple[tuple[int, tuple[Tile, ...]], ...] = (
    (64, (*(Tile(128, n, 12) for n in (192, 128, 64)), Tile(64, 128, 8), Tile(64, 64, 8))),
    (128, (*(Tile(128, n, 12) for n in (128, 64)), Tile(64, 80, 8), Tile(64, 64, 8))),
    (192, (*(Tile(128, n, 12) for n in (112, 96, 64)), Tile(64, 48, 8))),
    (256, (Tile(128, 64, 12), Tile(64, 64, 8))),
)
"""Tiles of wgmma kernels by the larger head dim, in order of preference: two groups of 64 rows and
a producer, or one.

Shared memory has room for two stages of 192, 160, 112 and 80 keys. On an H100 fewer were as fast or
faster in the mean over 1k to 16k keys, as less of the last tiles is wasted and masked: 128 at head
dim 128 (full and causal, 0.99 to 1.12 times the rate of 160), 64 at 256 (causal, 1.01 to 1.03 times
that of 80), and at 64 under a mask 128 (0.95 to 1.09 times that of 192)."""

_WGMMA_CHANGED: tuple[tuple[int, tuple[Tile, ...]], ...] = (
    (64, (Tile(128, 128, 16), Tile(128, 64, 16))),
    (192, (Tile(128, 64, 16), Tile(128, 32, 16))),
    (256, (Tile(64, 64, 12), Tile(64, 32, 12))),
)
"""The same where codes, key_mod or value_mod change rows, which takes a warpgroup more. Its
registers leave two groups of consumers half the keys, and above head dim 192 one group.

Up to 64 rows kernels of mma.sync are taken below that, of which two blocks share a multiprocessor:
each row would be changed for one group. The model of machine code gives tiles of 128 rows 1.3 to
1.9 times the rate of mma.sync's (`tests/cuda/cycles.json`), but 0.8 times where RoPE is run over
codes, byte by byte (`hook_over_codes`)."""

WGMMA_TARGET = {"sm_90": "sm_90a"}
"""What wgmma kernels are compiled for, by the architecture that has them."""

_NOT_BY_WGMMA = frozenset({"unaligned", "sparse", "mixed_rows"})


def against_wgmma(spec: KernelSpec, tma: bool = True, rows: int = ROW_CLASSES[-1]) -> str:
    """Why a kernel for a class of rows cannot be one of wgmma; empty if it can.

    Unaligned rows, key lists, keys that rows of several requests share and pages of a few slots are
    not what TMA copies.
    """
    if architecture(spec.target) not in WGMMA_TARGET:
        return f"{architecture(spec.target)} has no wgmma"
    for feature in sorted(_NOT_BY_WGMMA.intersection(spec.features)):
        return f"TMA copies no tiles with feature {feature}"
    if not tma:
        return "TMA copies no pages whose size is not a multiple of 8"
    if max(spec.head_dim, spec.head_dim_v) > MOST_NARROW:
        return f"a head dim is above {MOST_NARROW}"
    dims = (spec.head_dim, spec.head_dim_v)
    if min(dims) < 64 or any(n % 8 for n in dims):
        return "a head dim is below 64, or not a multiple of 8"
    if hook := hook_over_codes(spec):
        return f"{hook} does more than decode: it is run on each row of codes"
    if changes_rows(spec) and not _rows_of(_WGMMA_CHANGED, rows, max(dims)):
        return f"with codes, key_mod or value_mod it has no tiles of {rows} rows"
    return ""


def _rows_of(
    table: tuple[tuple[int, tuple[Tile, ...]], ...], rows: int, widest: int
) -> tuple[Tile, ...]:
    """The tiles of a table for a class of rows: of as many rows, or else of fewer."""
    tiles = next(tiles for bound, tiles in table if widest <= bound)
    most = max((t.tile_q for t in tiles if t.tile_q <= rows), default=0)
    return tuple(t for t in tiles if t.tile_q == most)


def shares_rows(spec: KernelSpec) -> bool:
    """Whether a kernel has one buffer for rows that are keys and values: `values_in_keys`.

    CPU kernels find such rows in cache when they are values; without prefetching them then, 16
    heads of 576 took 0.98 to 1.07 of the time. Tiles of rows up to `MOST_NARROW` have two buffers.
    Codes and rows that key_mod or value_mod changes differ between keys and values.
    """
    if not is_cuda(spec.target):
        return False
    wide = max(padded(spec.head_dim), padded(spec.head_dim_v)) > MOST_NARROW
    return wide and not changes_rows(spec)


def has_tiles(head_dims: tuple[int, int], target: str) -> bool:
    """Whether a target, of any kind, has kernels of these head dims."""
    if max(map(padded, head_dims)) <= MOST_NARROW or not is_cuda(compiled_target(target)):
        return True
    return head_dims[1] <= MOST_VALUES and compiled_target(target) != "sm_75"


def against_wide(spec: KernelSpec) -> str:
    """Why a target has no kernel for a spec's head dims; empty if it has one."""
    widest = max(padded(spec.head_dim), padded(spec.head_dim_v))
    if widest <= MOST_NARROW:
        return ""
    of = f"{architecture(spec.target)} has no kernel of head dims above {MOST_NARROW}"
    if spec.head_dim_v > MOST_VALUES:
        return f"its kernels have values of up to {MOST_VALUES} columns, as registers allow"
    if not has_tiles((spec.head_dim, spec.head_dim_v), spec.target):
        return f"{of}: they are built for asynchronous copies and more than 64 KiB of shared memory"
    if not ladder(spec, ROW_CLASSES[0]):
        what = "hooks of whole rows" if row_temps(spec.variant) else "these codes"
        return f"{of} with {what}: the smallest tile does not fit its shared memory"
    return ""


_LAST_RESORT_KV = 16  # few keys between two barriers: only if registers allow no larger tile


def row_class(packed_rows: int) -> int:
    """The class of a number of packed rows: 16, 64 or 128."""
    return ROW_CLASSES[min(bisect_left(ROW_CLASSES, packed_rows), len(ROW_CLASSES) - 1)]


def preferences(rows: int, widest: int, target: str) -> tuple[Tile, ...]:
    """The tiles of a row class in order of preference, including those that do not fit.

    widest: the larger of the padded head dims.
    """
    if widest > MOST_NARROW:
        return tuple(t for t in _WIDE if t.tile_q <= max(rows, 32))
    if rows == ROW_CLASSES[0]:
        return _FEW_ROW
    tiles = next(tiles for bound, tiles in _PREFILL if widest <= bound)
    # Without cp.async the next tile is held in registers, so a warp has one block of 16 rows.
    if architecture(target) == "sm_75":
        rows = 64
        if widest > 64:
            tiles = (*(t for t in tiles if t.tile_kv > _LAST_RESORT_KV), Tile(64, 16, 4))
    # Two buffers of 128 keys, of two blocks, fit no smaller shared memory; with one buffer kernels
    # spill among the products.
    if limits(target).shared_per_sm < 160 << 10:
        tiles = tuple(t for t in tiles if t.tile_kv <= 64)
    # Two blocks of 64 rows fit a multiprocessor on which one of 128 would be alone.
    if widest > 192 and architecture(target) != "sm_80":
        tiles = tuple(t for t in tiles if t.num_warps == 4)
    return tuple(t for t in tiles if t.tile_q <= rows)


def ladder(spec: KernelSpec, rows: int, tma: bool = True) -> tuple[KernelSpec, ...]:
    """`spec` with each tile of a row class that fits its target, in order of preference.

    tma: whether TMA can copy the keys, if nothing in the spec is against it.
    """
    kind: TileKind = "few_row" if rows == ROW_CLASSES[0] else "prefill"
    widest = max(padded(spec.head_dim), padded(spec.head_dim_v))
    if widest > MOST_NARROW:
        kind = "prefill_wide"
    spec = replace(spec, target=called_target(spec.target))
    tiles = preferences(rows, widest, spec.target)
    if kind == "few_row" and spec.has_codes:
        tiles = _FEW_ROW_CODES
    if kind == "prefill":
        tiles = tuple(t for t in tiles if t.tile_kv <= _most_keys(spec, widest))
    tiled = [_with(spec, t, kind) for t in tiles]
    if kind == "prefill" and not against_wgmma(spec, tma, rows):
        tiled = [*_wgmma_tiles(spec, rows), *tiled]
    return tuple(s for p in tiled if fits(s := with_stages(p)))


def _with(spec: KernelSpec, tile: Tile, kind: TileKind) -> KernelSpec:
    return replace(
        spec, tile_kind=kind, tile_q=tile.tile_q, tile_kv=tile.tile_kv, num_warps=tile.num_warps,
        num_stages=1,
    )  # fmt: skip


def _wgmma_tiles(spec: KernelSpec, rows: int) -> list[KernelSpec]:
    """The wgmma tiles of a row class."""
    table = _WGMMA_CHANGED if changes_rows(spec) else _WGMMA
    tiles = _rows_of(table, rows, max(spec.head_dim, spec.head_dim_v))
    most = 256
    if _has_long_functions(spec):
        most = _MANY_KEYS
    elif spec.variant.has("mask_mod"):
        most = 2 * _MANY_KEYS
    on = replace(spec, target=WGMMA_TARGET[architecture(spec.target)])
    return [_with(on, t, "prefill_wgmma") for t in tiles if t.tile_kv <= most]


def with_stages(spec: KernelSpec) -> KernelSpec:
    """`spec` with its number of stages: buffers of keys and values.

    Prefill: two if as many thread blocks fit a multiprocessor as with one, else one. Few rows: the
    smallest number, from two on, with which enough bytes are in flight while one buffer is
    computed with; else the number with the most bytes in flight. On sm_75 loads go through
    registers and none are in flight.
    """
    if spec.tile_kind == "prefill_wgmma":
        return replace(spec, num_stages=2)
    if spec.tile_kind in ("prefill", "prefill_wide") and spec.has_codes:
        return spec  # the next tile is loaded beside the one that was widened
    if spec.tile_kind == "prefill_wide":
        ring = replace(spec, num_stages=2)
        return ring if fits(ring) else spec
    if spec.tile_kind == "prefill":
        ring = replace(spec, num_stages=2)
        without = architecture(spec.target) == "sm_75" or not fits(ring)
        return spec if without or ctas_per_sm(ring) < ctas_per_sm(spec) else ring
    wanted = limits(spec.target).in_flight_bytes
    rings = [replace(spec, num_stages=n) for n in (2, 3, 4)]
    enough = [r for r in rings if in_flight_bytes(r) >= wanted]
    return enough[0] if enough else max(rings, key=in_flight_bytes)


def in_flight_bytes(spec: KernelSpec) -> int:
    """Bytes of K and V in flight to one multiprocessor while its blocks compute."""
    stage = spec.tile_kv * (padded(spec.head_dim) + padded(spec.head_dim_v)) * 2
    if spec.has_codes:
        stage = spec.tile_kv * loaded_bytes(spec)
    return (spec.num_stages - 1) * stage * ctas_per_sm(spec) if fits(spec) else 0


_HELD_BYTES = 4 * 16
"""In flight to a lane without asynchronous copies: the batch of `tile/load_rows.h`."""


def block_bytes_in_flight(spec: KernelSpec) -> int:
    """Bytes of K and V in flight to one thread block of a few-row kernel."""
    if architecture(spec.target) == "sm_75" or "unaligned" in spec.features:
        return WARP * spec.num_warps * _HELD_BYTES
    return in_flight_bytes(spec) // ctas_per_sm(spec)


def with_tile(spec: KernelSpec, rows: int, tma: bool = True) -> KernelSpec:
    """`spec` with the tile of a row class: the first of `ladder` with enough resident warps
    (`shares_well`), else the first. Raises InputError where there is none (`against_wide`)."""
    tiles = ladder(spec, rows, tma)
    if not tiles or (tiles[0].tile_kind == "prefill_wide" and against_wide(spec)):
        raise InputError(
            f"head_dim={spec.head_dim}, head_dim_v={spec.head_dim_v}: {against_wide(spec)}; call "
            f"on CPU tensors without a CUDA target, where head dims up to {MAX_HEAD_DIM} are "
            "supported"
        )
    return next((t for t in tiles if shares_well(t)), tiles[0])


def shares_well(spec: KernelSpec) -> bool:
    """Whether a multiprocessor has enough warps to hide the latency of a tile's loads.

    Few rows: two blocks, so that the start of one overlaps with the end of another. Prefill: two
    warps per scheduler.
    """
    if spec.tile_kind == "few_row":
        return ctas_per_sm(spec) >= 2
    if spec.tile_kind in ("prefill_wgmma", "prefill_wide"):
        return True
    return (
        ctas_per_sm(spec) * spec.num_warps >= MAX_WARPS["prefill"]
        and spec.tile_kv > _LAST_RESORT_KV
    )


def step_down(spec: KernelSpec) -> tuple[KernelSpec, ...]:
    """The tiles that replace `spec`, in order, if its hooks make it spill.

    They have at most its rows, so plans need no other change. Each leaves hooks more registers than
    the previous one. Those of wgmma are followed by the tile that calls take which TMA cannot copy,
    and what replaces that: its warps do everything, so its registers are not compared.
    """
    rows, wgmma = row_class(spec.tile_q), spec.tile_kind == "prefill_wgmma"
    tiles = [t for t in ladder(spec, rows, wgmma) if t.tile_kind == spec.tile_kind]
    shapes = [(t.tile_q, t.tile_kv, t.num_warps) for t in tiles]
    here = (spec.tile_q, spec.tile_kv, spec.num_warps)
    if here not in shapes:
        return ()
    steps: list[KernelSpec] = []
    for tile in tiles[shapes.index(here) + 1 :]:
        if spare_registers(tile) > spare_registers(steps[-1] if steps else spec):
            steps.append(tile)
    if not wgmma:
        return tuple(steps)
    other = with_tile(spec, rows, tma=False)
    return (*steps, other, *step_down(other))


def spill_bytes(spec: KernelSpec) -> int:
    """What a thread may spill outside of products: `SPILL_BYTES` where the tile that would replace
    `spec` has at most half its keys, else 0.

    Twice the keys halve the barriers, the running maxima and the loads of Q's fragments for a key.
    Kernels of wgmma have a bound of their own.
    """
    if spec.tile_kind == "prefill_wgmma":
        return WGMMA_SPILL_BYTES
    smaller = step_down(spec)[:1]
    return SPILL_BYTES if smaller and 2 * smaller[0].tile_kv <= spec.tile_kv else 0


def spare_registers(spec: KernelSpec) -> int:
    """Registers of the budget that are no accumulators."""
    budget = register_budget(spec)
    if spec.tile_kind == "prefill_wgmma":
        budget = warpgroup_registers(spec)[1] or budget
    return budget - accumulator_registers(spec)


def considered(
    chosen: KernelSpec, packed_rows: int, tma: bool
) -> list[tuple[KernelSpec, int, bool, str]]:
    """(spec, shared bytes, chosen, reason) of the choice and of the other candidates."""
    rows = row_class(packed_rows)
    others = [n for n in ROW_CLASSES if n != rows]
    why = {}
    for n in others:
        tile = with_tile(chosen, n, tma)
        most = tile.tile_q if tile.tile_kind == "prefill_wide" else n
        why[tile] = _against_class(most, packed_rows)
    why |= {s: for_or_against(s, chosen, packed_rows) for s in ladder(chosen, rows, tma)}
    order = sorted(why, key=lambda s: (s != chosen, -s.tile_q, -s.tile_kv))
    return [(s, shared_bytes(s), s == chosen, why[s]) for s in order]


def _against_class(rows: int, packed_rows: int) -> str:
    if rows < packed_rows:
        return f"serves {rows} packed rows a pass, so {packed_rows} rows would load K and V again"
    return f"{packed_rows} packed rows fill {100 * packed_rows / rows:.0f} % of a tile of {rows}"


def for_or_against(spec: KernelSpec, chosen: KernelSpec, packed_rows: int) -> str:
    """The reason for or against a tile of the problem's row class."""
    ctas = ctas_per_sm(spec)
    holds = f"{ctas} x {spec.num_warps} warps a multiprocessor"
    if spec != chosen:
        if not shares_well(spec):
            return f"{holds} leave its schedulers waiting"
        return f"{holds}; for hooks that need more registers"
    if spec.tile_kind == "few_row":
        flying = in_flight_bytes(spec) >> 10
        loads = f"{flying} KiB of K and V in flight" if flying else "loads through registers"
        return f"{packed_rows} packed rows share each key; {holds}, {loads}"
    filled = 100 * min(1.0, packed_rows / spec.tile_q)
    reason = (
        f"{filled:.0f} % of a tile filled; {holds}, {accumulator_registers(spec)} of "
        f"{accumulator_registers(spec) + spare_registers(spec)} registers accumulate"
    )
    if spec.tile_kind == "prefill" and architecture(spec.target) in WGMMA_TARGET:
        pages = "TMA copies no such pages, or " if "paged" in spec.features else ""
        against = against_wgmma(spec, rows=row_class(packed_rows))
        reason += f"; not wgmma: {against or pages + 'its kernels spill'}"
    return reason
