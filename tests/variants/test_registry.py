"""The registry keeps its own promises: names, coverage, reproducible builds, interval forms."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import flashattn_jit.variants.library as lib
from flashattn_jit.variants.bounds import (
    EMPTY,
    FULL,
    PARTIAL,
    Grid,
    MaskParams,
    classify_grid,
)
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.spec import as_variant
from tests import registry_library
from tests.registry import CASES, SHAPES, Case, Shape, by_name, pairs, select
from tests.variants.bounds_oracle import evaluate

KINDS = {"mask", "score", "row", "normalizer"}


def test_names_are_unique() -> None:
    names = [c.name for c in CASES]
    assert len(set(names)) == len(names)
    assert by_name("causal").name == "causal"


def test_shapes_cover_groups_head_dims_and_the_empty_ones() -> None:
    groups = {s.num_q_heads // s.num_kv_heads for s in SHAPES}
    assert groups >= {1, 4, 5, 7, 8, 71}
    assert {s.head_dim for s in SHAPES} >= {1, 17, 40, 64, 80, 96, 121, 128, 192, 256}
    assert {0, 1} <= {s.q_len for s in SHAPES} and 0 in {s.kv_len for s in SHAPES}
    assert any(s.head_dim > s.head_dim_v for s in SHAPES)
    assert any(s.head_dim < s.head_dim_v for s in SHAPES)


def test_every_library_variant_has_a_case() -> None:
    source = inspect.getsource(registry_library)
    helpers = {"NoScaling", "RopeScaling", "alibi_slopes", "document_ids", "pack_bits", "rotate",
               "rope_scaling_from_config", "rope_tables", "t5_buckets"}  # fmt: skip
    used = set(re.findall(r"\blib\.(\w+)", source))
    assert set(lib.__all__) - helpers <= used
    assert all(set(c.tags) & KINDS or c.name == "full" for c in CASES)


def test_every_library_variant_says_who_uses_it_and_where_it_is_from() -> None:
    for name in lib.__all__:
        doc = inspect.getdoc(getattr(lib, name))
        assert doc and len(doc) > 40, name


def test_thinned_pairs_still_meet_every_shape_and_every_case() -> None:
    thin = list(pairs(every=5))
    assert {c.name for c, _ in thin} == {c.name for c in CASES}
    assert {s for _, s in thin} >= set(SHAPES)
    assert len(thin) < len(list(pairs())) / 3


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
    return a == b


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equal_seeds_build_equal_calls(case: Case) -> None:
    torch.manual_seed(1)  # the global generator plays no part
    first, first_params = case.build(seed=7)
    torch.manual_seed(2)
    second, second_params = case.build(seed=7)
    assert first_params.keys() == second_params.keys()
    assert all(same(v, second_params[k]) for k, v in first_params.items())
    one, two = (
        as_variant(v).bind(Dims(*case.shape), p)
        for v, p in ((first, first_params), (second, second_params))
    )
    assert one.ir == two.ir and one.handle == two.handle and one.scalars == two.scalars
    assert all(same(a, b) for a, b in zip(one.tensors, two.tensors, strict=True))


# --- interval forms -------------------------------------------------------------------------------


def tile_states(case: Case, shape: Shape, tile_q: int, tile_kv: int) -> tuple[Any, Any]:
    """(derived, true) states of every tile: uint8 [B, Hq, query tiles, key tiles]."""
    made, params = case.build(shape)
    bound = as_variant(made).bind(Dims(*shape), params)
    graph = bound.ir.hook("mask_mod")
    assert graph is not None
    batch, heads, _, q_len, kv_len, _, _ = shape
    offset = kv_len - q_len if case.q_offset == "end" else 0
    lengths: Mapping[str, Any] = {
        "q_len": [q_len] * batch, "kv_len": [kv_len] * batch, "q_offset": [offset] * batch,
        "q_token0": [b * q_len for b in range(batch)],
        "kv_token0": [b * kv_len for b in range(batch)],
    }  # fmt: skip
    mask = MaskParams(bound.tensors, bound.scalars, **lengths)
    grid = Grid(offset, offset + q_len, 0, kv_len, tile_q, tile_kv, 0, batch, 0, heads)
    derived = classify_grid(graph, mask, grid)
    kept = evaluate(
        graph, mask, b=np.arange(batch)[:, None, None, None], h=np.arange(heads)[:, None, None],
        q_idx=np.arange(offset, offset + q_len)[:, None], kv_idx=np.arange(kv_len),
    )[..., 0]  # fmt: skip
    kept = np.broadcast_to(kept, (batch, heads, q_len, kv_len)).astype(bool)
    rows, keys = range(0, q_len, tile_q), range(0, kv_len, tile_kv)
    true = np.full((batch, heads, len(rows), len(keys)), PARTIAL)
    for i, r in enumerate(rows):
        for j, c in enumerate(keys):
            tile = kept[:, :, r : r + tile_q, c : c + tile_kv]
            true[:, :, i, j][~tile.any((2, 3))] = EMPTY
            true[:, :, i, j][tile.all((2, 3))] = FULL
    return np.broadcast_to(derived, true.shape), true


MASKED_SHAPES = [s for s in SHAPES if s.q_len * s.kv_len and s.q_len <= s.kv_len]


@pytest.mark.parametrize("case", select("mask"), ids=lambda c: c.name)
def test_interval_forms_are_as_good_as_promised(case: Case) -> None:
    """Never wrong; and where a case says exact, as good as looking at every pair."""
    every = 2 + select("mask").index(case) % 2
    for _, shape in pairs([case], MASKED_SHAPES, every):
        for tile_q, tile_kv in ((16, 16), (32, 64), (17, 23)):
            derived, true = tile_states(case, shape, tile_q, tile_kv)
            decided = derived != PARTIAL
            assert (derived[decided] == true[decided]).all(), shape
            if case.interval == "exact":
                assert (derived == true).all(), (shape, tile_q, tile_kv)
