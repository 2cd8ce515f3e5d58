"""The interval form finds exactly the empty and the full tiles of the usual masks, tails included,
and never a wrong one of any mask.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.variants.interval.simplify import simplify
from flashattn_jit.variants.interval.tile_runs import Grid, tile_runs
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.variant import as_variant
from tests.registry.cases import CASES, Case, Shape

from .bounds_oracle import bound, brute_force, classify_grid, format_program, traced
from .tile_states import dense_states, runs_of_row

SHAPES = (
    Shape(2, 4, 2, 100, 100, 64, 64),
    Shape(2, 4, 2, 256, 256, 64, 64),
    Shape(1, 2, 1, 67, 131, 64, 64),
    Shape(1, 2, 2, 130, 61, 64, 64),
    Shape(3, 5, 1, 1, 77, 64, 64),
)
TILES = ((16, 16), (32, 64), (128, 128), (48, 20))
MASKS = [c for c in CASES if "mask" in c.tags and c.interval != "none"]


def check(mask, grid: Grid, exact: bool) -> None:
    """Compare with brute force; both forms of the answer are equal."""
    expected = brute_force(mask, grid)
    dense = classify_grid(mask.graph, mask.params, grid)
    got = np.broadcast_to(dense, expected.shape)
    wrong = (got != 1) & (got != expected)
    text = "\n".join(format_program(simplify(mask.graph)))
    assert not wrong.any(), f"unsound at {np.argwhere(wrong)[:3]} of {grid}\n{text}"
    if exact:
        loose = got != expected
        assert not loose.any(), f"not exact at {np.argwhere(loose)[:3]} of {grid}\n{text}"
    runs = tile_runs(mask.graph, mask.params, grid)
    assert (dense_states(runs) == dense).all()
    values, counts = np.unique(got, return_counts=True)
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == {
        s: n for s, n in enumerate(runs.counts()) if n
    }


def grid_of(shape: Shape, tile: tuple[int, int], q_begin: int = 0) -> Grid:
    return Grid(
        q_begin, q_begin + shape.q_len, 0, shape.kv_len, *tile, 0, shape.batch, 0, shape.num_q_heads
    )


@pytest.mark.parametrize("case", MASKS, ids=lambda c: c.name)
def test_registry(case: Case) -> None:
    for i, shape in enumerate(s for s in SHAPES if case.fits(s)):
        variant, params = case.build(shape, seed=i)
        q_begin = shape.kv_len - shape.q_len if case.q_offset == "end" else case.q_offset
        lengths = {
            "q_len": [shape.q_len] * shape.batch,
            "kv_len": [shape.kv_len] * shape.batch,
            "q_offset": [q_begin] * shape.batch,
            "q_token0": [b * shape.q_len for b in range(shape.batch)],
            "kv_token0": [b * shape.kv_len for b in range(shape.batch)],
        }
        mask = bound(as_variant(variant), Dims(*shape), params, **lengths)
        # Cases promise exact states from 16 rows on.
        exact = case.interval == "exact" and shape.q_len >= 16
        for tile in TILES:
            check(mask, grid_of(shape, tile, q_begin), exact)


# --- masks that need their terms cancelled, split or read as bits ---------------------------------

GENERATOR = torch.Generator().manual_seed(7)
LENGTHS = torch.tensor([40, 1, 130, 17, 29, 83])
OFFSETS = torch.tensor([0, *LENGTHS.cumsum(0)]).to(torch.int32)
DOC = torch.arange(6, dtype=torch.int32).repeat_interleave(LENGTHS)
TOTAL = 300


def one_sided(b, h, q, k):
    d = DOC[q]
    return (DOC[k] == d) & (q - OFFSETS[d] >= k - OFFSETS[d])


def two_sided(b, h, q, k):
    """attention-gym's generate_doc_mask_mod around a causal mask."""
    same = DOC[q] == DOC[k]
    return same & (q - OFFSETS[DOC[q]] >= k - OFFSETS[DOC[k]])


def two_sided_window(b, h, q, k):
    same = DOC[q] == DOC[k]
    inner = (q - OFFSETS[DOC[q]]) - (k - OFFSETS[DOC[k]])
    return same & (inner >= 0) & (inner < 20)


def document_of_batch(b, h, q, k):
    return (DOCS[b, q] == DOCS[b, k]) & (DOCS[b, k] >= 0) & (q >= k)


DOCS = torch.stack([DOC, torch.where(torch.arange(TOTAL) < 50, -1, DOC // 2)])  # left padding


def left_padding(b, h, q, k):
    """Keys and queries of padding carry -1; it comes first, so ids ascend."""
    return (DOCS[b, q] >= 0) & (DOCS[b, k] >= 0)


def distance_by_comparison_of_abs(b, h, q, k):
    return torch.abs(q - k) < 33


def scaled_positions(b, h, q, k):
    return 2 * q - 2 * k >= 7


def negated(b, h, q, k):
    return ~((q < k) | (q - k > 25))


def reversed_order(b, h, q, k):
    return (TOTAL - 1 - q) <= (TOTAL - 1 - k)


def clamped(b, h, q, k):
    """NATTEN in one dimension."""
    return (torch.clamp(q, 12, TOTAL - 13) - k).abs() <= 12


def minimum_of_bounds(b, h, q, k):
    return k <= torch.minimum(q, PREFIX[b])


def maximum_of_bounds(b, h, q, k):
    return k <= torch.maximum(q, PREFIX[b])


PREFIX = torch.tensor([70, 201])


def exactly_one(b, h, q, k):
    return (q >= k) ^ (k < PREFIX[b])


def by_number(b, h, q, k):
    """Conditions as numbers, as Hugging Face writes some."""
    return (q >= k).to(torch.int32) + (k < PREFIX[b]).to(torch.int32) == 2


def nested_where(b, h, q, k):
    limit = torch.where(h == 0, q, torch.where(h == 1, q // 2, 40))
    return k <= limit


def shifted_bits(b, h, q, k):
    return (q >> 5) == (k >> 5)


def masked_bits(b, h, q, k):
    """Strided: the last key of each 64, or the own block."""
    return ((k & 63) == 63) | (q // 64 == k // 64)


def flags(b, h, q, k):
    return ((FLAGS[k] >> 2) & 1) == 1


FLAGS = torch.where(torch.arange(TOTAL) < 150, 5, 3).to(torch.uint8)


def any_document(b, h, q, k):
    """Documents by their edges, as a short vector."""
    inside = (EDGES[:-1] <= q) & (q < EDGES[1:]) & (EDGES[:-1] <= k) & (k < EDGES[1:])
    return inside.any()


EDGES = torch.tensor([0, 33, 34, 120, 250, TOTAL])


def all_limits(b, h, q, k):
    return (k < LIMITS[b]).all() & (q >= LIMITS[b].amin() // 4)


LIMITS = torch.tensor([[200, 150, 290], [70, 290, 111]])


def late_keys_far_back(b, h, q, k):
    """Only the keys of a tile that are far back matter, and none of those may be late."""
    return (q - k >= 100) & LATE[k]


LATE = torch.arange(TOTAL) >= 160


def diagonal(b, h, q, k):
    return q == k


def no_diagonal(b, h, q, k):
    return q != k


def length_limits(b, h, q, k):
    return (q >= k) & (k < fa.kv_len(b) - 20) & (q < fa.q_len(b) - 7)


def by_slot(b, h, q, k):
    """Per-token documents of packed tensors."""
    return PACKED[fa.q_row(b, q)] == PACKED[fa.kv_slot(b, k)]


PACKED = torch.cat([DOC, DOC + 10])


EXACT = [one_sided, two_sided, two_sided_window, document_of_batch, left_padding,
         distance_by_comparison_of_abs, scaled_positions, negated, reversed_order, clamped,
         minimum_of_bounds, maximum_of_bounds, exactly_one, by_number, nested_where, shifted_bits,
         masked_bits, flags, any_document, all_limits, late_keys_far_back, diagonal, no_diagonal,
         length_limits, by_slot]  # fmt: skip


@pytest.mark.parametrize("fn", EXACT, ids=lambda f: f.__name__)
def test_exact(fn) -> None:
    lengths = {
        "q_len": [TOTAL] * 2,
        "kv_len": [TOTAL] * 2,
        "q_offset": [0, 0],
        "q_token0": [0, TOTAL],
        "kv_token0": [0, TOTAL],
    }
    mask = traced(fn, **lengths)
    for tile in ((16, 16), (128, 128), (64, 48), (100, 7)):
        check(mask, Grid(0, TOTAL, 0, TOTAL, *tile, 0, 2, 0, 3), exact=True)


@pytest.mark.parametrize(("height", "width"), [(16, 16), (14, 19), (3, 90), (90, 3)])
def test_natten_is_exact_on_any_tile(height: int, width: int) -> None:
    """Tiles cut rows of the image: row and column of a pixel are not independent there."""
    kernel, total = 3, height * width

    def natten(b, h, q, k):
        q_y, q_x = q // width, q % width
        k_y, k_x = k // width, k % width
        center_y = q_y.clamp(kernel, height - 1 - kernel)
        center_x = q_x.clamp(kernel, width - 1 - kernel)
        return ((center_y - k_y).abs() <= kernel) & ((center_x - k_x).abs() <= kernel)

    mask = traced(natten)
    for tile in ((16, 16), (32, 16), (128, 128), (50, 37)):
        check(mask, Grid(0, total, 0, total, *tile), exact=True)


@pytest.mark.parametrize("words", [False, True])
def test_tree_of_draft_tokens_is_exact(words: bool) -> None:
    """Bit rows: one 64-bit word a query, or several."""
    n, prefix = 60 if not words else 150, 90
    parents = [-1, *(int(torch.randint(0, i, (), generator=GENERATOR)) for i in range(1, n))]
    seen = torch.eye(n, dtype=torch.bool)
    for i in range(1, n):
        seen[i] |= seen[parents[i]]
    width = -(-n // 64)
    padded = torch.zeros(n, width * 64, dtype=torch.bool)
    padded[:, :n] = seen
    weights = torch.tensor([2**i if i < 63 else -(2**63) for i in range(64)])
    rows = (padded.view(n, width, 64) * weights).sum(-1)

    def tree(b, h, q, k):
        at = k - prefix
        word = rows[q - prefix, at // 64] if words else rows[q - prefix, 0]
        return (at < 0) | (((word >> (at % 64)) & 1) == 1)

    mask = traced(tree)
    # Keys of one word at a time are exact, whatever the queries.
    for tile in ((n, 30), (7, 30), (1, 15), (16, 10)):
        check(mask, Grid(prefix, prefix + n, 0, prefix + min(n, 60), *tile), exact=not words)


def test_block_diffusion_with_odd_sizes_is_exact() -> None:
    n, block = 77, 10

    def mask_mod(b, h, q, k):
        clean_q, clean_k = q >= n, k >= n
        block_q = torch.where(clean_q, (q - n) // block, q // block)
        block_k = torch.where(clean_k, (k - n) // block, k // block)
        diagonal = (block_q == block_k) & (clean_q == clean_k)
        offset = (block_q > block_k) & clean_k & ~clean_q
        return diagonal | offset | ((block_q >= block_k) & clean_k & clean_q)

    for tile in ((16, 16), (64, 48), (30, 50)):
        check(traced(mask_mod), Grid(0, 2 * n, 0, 2 * n, *tile), exact=True)


def test_negative_query_positions() -> None:
    """More queries than keys, aligned at the end: the first queries have no key."""
    mask = traced(lambda b, h, q, k: q >= k)
    check(mask, Grid(-40, 33, 0, 33, 16, 16), exact=True)


def test_no_keys_and_no_queries() -> None:
    mask = traced(lambda b, h, q, k: q >= k)
    for grid in (Grid(0, 0, 0, 10, 16, 16), Grid(0, 10, 0, 0, 16, 16), Grid(5, 5, 3, 3, 8, 8)):
        runs = tile_runs(mask.graph, mask.params, grid)
        assert dense_states(runs).shape == (1, 1, grid.num_q_tiles, grid.num_kv_tiles)
        assert runs.counts() == (0, 0, 0)


def test_wrapping_integers_make_tiles_partial_not_wrong() -> None:
    """``q * 100000`` leaves int32 beyond q = 21474, where hooks compute something else."""
    factor = 100000
    mask = traced(lambda b, h, q, k: q * factor + k >= 0)
    check(mask, Grid(21400, 21600, 0, 40, 16, 16), exact=False)
    assert tile_runs(mask.graph, mask.params, Grid(0, 100, 0, 40, 16, 16)).counts() == (0, 0, 21)


def test_a_mask_that_ignores_batch_and_heads_is_classified_once() -> None:
    grid = Grid(0, 64, 0, 64, 16, 16, 0, 5, 0, 7)
    mask = traced(lambda b, h, q, k: q >= k)
    assert classify_grid(mask.graph, mask.params, grid).shape == (1, 1, 4, 4)
    runs = tile_runs(mask.graph, mask.params, grid)
    assert sum(runs.counts()) == 16 * 35
    assert list(runs_of_row(runs, 3, 6, 2)) == [(0, 2, 2), (2, 3, 1)]
    mask = traced(lambda b, h, q, k: q + b >= k)
    assert classify_grid(mask.graph, mask.params, grid).shape == (5, 1, 4, 4)


LOW, HIGH = torch.full((256,), -(2**63)), torch.full((256,), 2**63 - 1)
SENTINELS = {
    "floordiv of the least": lambda b, h, q, k: LOW[q] // 64 <= k // 64,
    "shift of the least": lambda b, h, q, k: (LOW[k] >> 6) >= q,
    "trunc of the least": lambda b, h, q, k: torch.div(LOW[q], 3, rounding_mode="trunc") + q < k,
    "floordiv of the largest": lambda b, h, q, k: HIGH[q] // 64 + k >= 0,
    "by a negative": lambda b, h, q, k: HIGH[q] // -64 + k < 0,
    "the least by a negative": lambda b, h, q, k: LOW[q] // -64 - k > q,
}


@pytest.mark.parametrize("name", SENTINELS)
def test_quotients_of_the_ends_of_int64(name: str) -> None:
    """They mean "no limit" in users' tables; no tile is decided wrongly, it may be partial."""
    mask = traced(SENTINELS[name])
    for tile in ((16, 16), (1, 64)):
        check(mask, grid_of(Shape(1, 1, 1, 256, 256, 16, 16), tile), exact=False)
