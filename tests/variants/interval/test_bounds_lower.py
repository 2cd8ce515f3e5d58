"""The compiled interval form gives the states that `_C` does: tiles, tails, large and odd boxes."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from flashattn_jit.variants.interval.cpp import lower_classify
from flashattn_jit.variants.interval.range_tables import build_tables
from flashattn_jit.variants.interval.simplify import range_tables
from flashattn_jit.variants.interval.tile_runs import Grid
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.variant import as_variant
from tests.registry.cases import CASES, Shape

from .bounds_oracle import Compiled, Mask, bound, classify_grid, traced
from .bounds_random import RandomMask
from .tile_states import classify_boxes

# Above 1024 keys, so that long ranges are read through tables.
SHAPE = Shape(2, 4, 2, 1500, 1500, 64, 64)
UNDEFINED = ("-O1", "-fsanitize=undefined", "-fno-sanitize-recover=undefined")


def states(mask: Mask, boxes) -> np.ndarray:
    """The states that `_C` gives boxes, int64 [N, 8]."""
    return classify_boxes(mask.graph, mask.params, boxes)


def random_boxes(n: int, limits, seed: int) -> np.ndarray:
    """Boxes of b, h, q and k; limits: (first, last, longest) of each."""
    rng = np.random.default_rng(seed)
    columns = []
    for first, last, longest in limits:
        low = rng.integers(first, last + 1, n)
        columns += [low, np.minimum(low + rng.integers(0, longest, n), last)]
    return np.stack(columns, 1)


def registry_masks() -> tuple[list[str], list[Mask]]:
    names, masks = [], []
    for case in CASES:
        if "mask" not in case.tags or case.interval == "none" or not case.fits(SHAPE):
            continue
        variant, params = case.build(SHAPE)
        tokens = [0, SHAPE.q_len]
        lengths = {"q_len": [SHAPE.q_len, 700], "kv_len": [SHAPE.kv_len, 900], "q_offset": [0, 9],
                   "q_token0": tokens, "kv_token0": tokens}  # fmt: skip
        names.append(case.name)
        masks.append(bound(as_variant(variant), Dims(*SHAPE), params, **lengths))
    return names, masks


def assert_agree(compiled: Compiled, which: int, mask: Mask, boxes, name: str) -> None:
    got, expected = compiled.states(which, mask, boxes), states(mask, boxes)
    differ = np.flatnonzero(got != expected)
    assert not len(differ), (name, boxes[differ[:3]], got[differ[:3]], expected[differ[:3]])


def test_registry_masks_on_tiles_and_large_boxes(tmp_path: Path) -> None:
    names, masks = registry_masks()
    assert len(masks) > 50
    compiled = Compiled(masks, tmp_path)
    end = SHAPE.q_len - 1
    tiles = random_boxes(400, ((0, 1, 1), (0, 3, 1), (0, end, 129), (0, end, 129)), 1)
    large = random_boxes(200, ((0, 1, 2), (0, 3, 4), (-40, end, 1500), (0, end, 1500)), 2)
    odd = random_boxes(100, ((0, 1, 1), (0, 3, 1), (-50, 5000, 3000), (0, 5000, 3000)), 3)
    odd[:5, 5] = odd[:5, 4] - 1  # no query
    odd[5:10, 6:8] += 2**31  # beyond any position
    for i, (name, mask) in enumerate(zip(names, masks, strict=True)):
        assert_agree(compiled, i, mask, np.concatenate([tiles, large, odd]), name)


@pytest.mark.parametrize(("depth", "count"), [(2, 60), (3, 60), (5, 40)])
def test_random_masks(tmp_path: Path, depth: int, count: int) -> None:
    seeds = range(1000 * depth, 1000 * depth + count)
    masks = [RandomMask(random.Random(s).randrange, s).finish(depth) for s in seeds]
    compiled = Compiled(masks, tmp_path, UNDEFINED)
    near = random_boxes(200, ((0, 2, 2), (0, 4, 3), (-30, 80, 40), (0, 80, 40)), depth)
    far = random_boxes(40, ((0, 2, 2), (0, 4, 3), (-(2**31), 2**31, 2**31), (0, 2**31, 99)), depth)
    for i, (seed, mask) in enumerate(zip(seeds, masks, strict=True)):
        assert_agree(compiled, i, mask, np.concatenate([near, far]), f"seed {seed}")


def captured_masks():
    """Every storage dtype, rank and stride pattern that a mask may capture."""
    n = 1500
    base = torch.randint(-3, 4, (2, n), generator=torch.Generator().manual_seed(3))
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
                  torch.bfloat16, torch.float32, torch.float64):  # fmt: skip
        row = base[0].abs().sort().values.to(dtype)
        yield f"{dtype}", lambda b, h, q, k, t=row: t[q] >= t[k]
    values = torch.randn(n)
    values[::97] = float("nan")
    turned, first = base.t().contiguous().t(), base.t().contiguous()
    every_second, expanded, row, start = (
        base.repeat(1, 2)[:, ::2],
        base[:1].expand(2, n),
        base[0],
        100,
    )
    positive, dense = base > 0, torch.rand(2, 300, n) < 0.01
    of_heads, points = torch.rand(4, 2 * n) < 0.7, torch.arange(3 * n).view(n, 3)
    window, flags, short = torch.tensor(40), base[0].to(torch.int16), base[0, :start]
    eighth = base[0].float().to(torch.float8_e4m3fn)
    yield "fp8", lambda b, h, q, k: eighth[q] >= eighth[k]
    yield "nan", lambda b, h, q, k: values[q] < values[k]
    yield "strided", lambda b, h, q, k: turned[b, q] == turned[b, k]
    yield "every second", lambda b, h, q, k: every_second[b, q] > every_second[b, k]
    yield "expanded", lambda b, h, q, k: expanded[b, q] == expanded[b, k]
    yield "first dim", lambda b, h, q, k: first[q, b] == first[k, b]
    yield "negative index", lambda b, h, q, k: row[q - n // 2] == row[k - n]
    yield "beyond the end", lambda b, h, q, k: short[q] == short[k]
    yield "bool", lambda b, h, q, k: positive[b, k] & ~positive[b, q]
    yield "dense", lambda b, h, q, k: dense[b, q, k]
    yield "table of heads", lambda b, h, q, k: of_heads[h, q - k + n]
    yield "row", lambda b, h, q, k: (points[q] - points[k]).sum() >= 0
    yield "any", lambda b, h, q, k: (points[q] > k).any()
    yield "number", lambda b, h, q, k: q - k < window
    yield "flags", lambda b, h, q, k: (flags[k] & (1 << b)) != 0
    yield "words", lambda b, h, q, k: ((base[b, q] >> (k % 64)) & 1) == 1


def test_captured_tensors(tmp_path: Path) -> None:
    names, functions = zip(*captured_masks(), strict=True)
    masks = [traced(f) for f in functions]
    compiled = Compiled(masks, tmp_path, UNDEFINED)
    boxes = np.concatenate([
        random_boxes(200, ((0, 1, 1), (0, 3, 1), (0, 1499, 129), (0, 1499, 129)), 5),
        random_boxes(100, ((0, 1, 2), (0, 3, 2), (0, 1499, 1500), (0, 1499, 1500)), 6),
        random_boxes(100, ((0, 1, 1), (0, 3, 1), (0, 1499, 9), (0, 1499, 700)), 7),
    ])  # fmt: skip
    for i, (name, mask) in enumerate(zip(names, masks, strict=True)):
        assert_agree(compiled, i, mask, boxes, name)


def test_a_missing_table_changes_nothing(tmp_path: Path) -> None:
    """Tables only save time: without them the same boxes are read whole."""
    docs = torch.arange(3000) // 70
    mask = traced(lambda b, h, q, k: docs[q] == docs[k])
    compiled = Compiled([mask], tmp_path)
    boxes = random_boxes(300, ((0, 0, 1), (0, 0, 1), (0, 2999, 3000), (0, 2999, 3000)), 1)
    with_tables = compiled.states(0, mask, boxes)
    assert (with_tables == compiled.states(0, mask, boxes, tables=False)).all()
    assert (with_tables == states(mask, boxes)).all()


def test_only_tensors_that_indices_move_along_have_tables() -> None:
    docs, offsets, lengths = torch.arange(2000), torch.arange(30), torch.tensor([5, 6])
    mask = traced(lambda b, h, q, k: (docs[q] >= offsets[h]) & (k < lengths[b]))
    (spec,) = range_tables(mask.graph)
    tables = build_tables([spec], mask.params.tensors)
    assert [tuple(t.shape) for t in tables] == [(32,), (32,)]
    again = build_tables([spec], mask.params.tensors)
    assert all(a is b for a, b in zip(tables, again, strict=True))
    docs[0] = 7
    assert build_tables([spec], mask.params.tensors)[0][0] == 1
    short = traced(lambda b, h, q, k: offsets[q] >= k)
    assert all(not t.numel() for t in build_tables(range_tables(short.graph), [offsets]))
    causal = traced(lambda b, h, q, k: q >= k)
    assert range_tables(causal.graph) == ()


def test_the_text_is_deterministic_and_says_what_it_decides() -> None:
    def texts() -> str:
        mask = traced(lambda b, h, q, k: (q >= k) & (q - k < 100))
        return lower_classify(mask.graph, mask.tensors)

    assert texts() == texts()
    assert "// keep if 0 <= q_idx - kv_idx <= scalar0 - 1" in texts() or "<= 99" in texts()


def test_the_text_is_the_same_in_every_process() -> None:
    script = (
        "from tests.variants.interval.test_bounds_lower import registry_masks\n"
        "from flashattn_jit.variants.interval.cpp import lower_classify\n"
        "for mask in registry_masks()[1]: print(lower_classify(mask.graph, mask.tensors))"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", script], check=True, capture_output=True, text=True,
            cwd=Path(__file__).parents[3], env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert texts[0] == texts[1] and "return drop" in texts[0]


def test_a_tail_tile_whose_real_pairs_are_kept_is_full() -> None:
    mask = traced(lambda b, h, q, k: q >= k)
    tiles = classify_grid(mask.graph, mask.params, Grid(96, 100, 0, 100, 16, 32))[0, 0]
    assert tiles.tolist() == [[2, 2, 2, 1]]
    assert classify_grid(mask.graph, mask.params, Grid(96, 97, 0, 97, 16, 32))[0, 0, 0, 3] == 2
