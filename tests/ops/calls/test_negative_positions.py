"""Queries before the first key: every library variant at negative positions.

`MEANINGS` writes each variant a second time, for single numbers in plain Python and float64, and
states its behaviour at negative q_idx. Expected values are computed without the reference and the
tracer. Variants that read no position of a query are named in `ANYWHERE`.
"""

from __future__ import annotations

import cmath
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import flashattn_jit as fa
import flashattn_jit.variants.library as lib
from flashattn_jit.variants.interval.terms import EMPTY, FULL
from flashattn_jit.variants.interval.tile_runs import Grid
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.reference import attention_reference, varlen_reference
from tests.batch.batches import indptr
from tests.harness import rotation
from tests.ops.cases import normal
from tests.variants.interval.bounds_oracle import bound, classify_grid

HEADS = (4, 2)
DIM = 32
TOKENS = 25  # keys of the longest request
Q_LENS, KV_LENS = (40, 3, 1, 20), (TOKENS, 30, 8, 1)
REACH = 12
FREQ = [10000.0 ** (-p / (DIM // 2)) for p in range(DIM // 2)]

DOCUMENTS = [[0] * 9 + [1] * 6 + [2] * 20, [5] * 20 + [4] * 15, [0, 1] * 17 + [1], [3] * 35]
KEEP = [[j >= 3 * (b % 3) for j in range(35)] for b in range(4)]
PREFIX = [6, 0, 3, 9]
PARENTS = [-1, 0, 0, 1, 3]
SEES = {0: {0}, 1: {0, 1}, 2: {0, 2}, 3: {0, 1, 3}, 4: {0, 1, 3, 4}}


T5_TABLE, DISTANCE_TABLE = normal(1, 32, HEADS[0]), normal(2, HEADS[0], 2 * REACH + 1)
BIAS, GATE = normal(3, 4, HEADS[0], 64, 35), normal(4, 4, HEADS[0], 64, DIM)


@dataclass(frozen=True)
class At:
    """One pair: request, query head, positions, row of the query in its request."""

    b: int
    h: int
    i: int
    j: int
    row: int


Row = list[float]


@dataclass(frozen=True)
class Meaning:
    """A variant's formula. behaviour: of a row with q_idx < 0, in words.

    make: () -> the variant. tensors: (requests, longest q_len, longest kv_len) -> its params; those
    of the mask are in `mask_params`. dense: only dense calls take its tensors.
    """

    behaviour: str
    make: Callable[[], fa.Variant]
    keep: Callable[[At], bool] = lambda at: True
    bias: Callable[[At], float] = lambda at: 0.0
    query: Callable[[Row, int], Row] = lambda row, i: row
    key: Callable[[Row, int], Row] = lambda row, j: row
    gate: Callable[[At, int], float] = lambda at, d: 1.0
    tensors: Callable[[int, int, int], dict[str, Any]] = lambda n, q, k: {}
    mask_params: tuple[str, ...] = ()
    dense: bool = False


def rotated(row: Row, position: int, interleaved: bool = False, dim: int = DIM) -> Row:
    """Pairs as complex numbers, turned by position * frequency; the angle of -p is minus p's."""
    out = list(row)
    for p in range(dim // 2):
        x, y = (2 * p, 2 * p + 1) if interleaved else (p, p + dim // 2)
        z = complex(row[x], row[y]) * cmath.exp(1j * position * 10000.0 ** (-2 * p / dim))
        out[x], out[y] = z.real, z.imag
    return out


def t5_bucket(distance: int, bidirectional: bool) -> int:
    side, first, behind = (16, 16 * (distance > 0), abs(distance)) if bidirectional else (
        32, 0, max(0, -distance))  # fmt: skip
    exact = side // 2
    if behind < exact:
        return first + behind
    grown = exact + int(math.log(behind / exact) / math.log(128 / exact) * (side - exact))
    return first + min(grown, side - 1)


def natten(i: int, j: int, length: int, radius: int) -> bool:
    return abs(min(max(i, radius), length - 1 - radius) - j) <= radius


def block_diffusion(at: At) -> bool:
    if at.i < 0:
        return False
    length, block = 20, 4
    q, k = ((x if x < length else x - length) // block for x in (at.i, at.j))
    if at.i < length:
        return q == k if at.j < length else q > k
    return at.j >= length and q >= k


def tree(at: At) -> bool:
    prefix = PREFIX[at.b]
    return at.j < prefix or at.j - prefix in SEES.get(at.i - prefix, set())


def packed_gate(layout: str) -> Callable[[int, int, int], dict[str, Any]]:
    def tensors(requests: int, q_len: int, kv_len: int) -> dict[str, Any]:
        if layout == "dense":
            return {"gate": GATE[:requests, :, :q_len]}
        lens = Q_LENS if requests == len(Q_LENS) else (q_len,) * requests
        gate = torch.cat([GATE[b, :, :n].transpose(0, 1) for b, n in enumerate(lens)])
        return {"gate": gate if layout == "packed" else gate[..., 0].contiguous()}

    return tensors


def ids(values: Sequence[Sequence[int]], dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    return lambda n, length: torch.tensor([row[:length] for row in values[:n]], dtype=dtype)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


SAME = "the formula holds for every integer"
MEANINGS: dict[str, Meaning] = {
    "Causal": Meaning("no key is at or before it", fa.Causal, lambda a: a.j <= a.i),
    "SlidingWindow": Meaning(
        "no key is at or before it", lambda: fa.SlidingWindow(7), lambda a: 0 <= a.i - a.j < 7
    ),
    "SlidingWindow bidirectional": Meaning(
        SAME, lambda: fa.SlidingWindow(7, causal=False), lambda a: abs(a.i - a.j) <= 7
    ),
    "Chunked": Meaning(
        "no key is at or before it", lambda: fa.Chunked(6),
        lambda a: math.floor(a.i / 6) == math.floor(a.j / 6) and a.j <= a.i,
    ),
    "Dilated": Meaning(
        "no key is at or before it", lambda: fa.Dilated(9, 3),
        lambda a: a.i - a.j in (0, 3, 6, 9),
    ),
    "Dilated bidirectional": Meaning(
        SAME, lambda: fa.Dilated(9, 3, causal=False), lambda a: abs(a.i - a.j) in (0, 3, 6, 9)
    ),
    "PrefixLM": Meaning(
        "sees the prefix", fa.PrefixLM, lambda a: a.j <= a.i or a.j < PREFIX[a.b],
        tensors=lambda n, q, k: {"prefix_len": torch.tensor(PREFIX[:n])},
        mask_params=("prefix_len",),
    ),
    "StreamingLLM": Meaning(
        "no key is at or before it", lambda: fa.StreamingLLM(5, 2),
        lambda a: a.j <= a.i and (a.i - a.j < 5 or a.j < 2),
    ),
    "BlockCausal": Meaning(
        "its block is before all keys", lambda: fa.BlockCausal(4),
        lambda a: math.floor(a.j / 4) <= math.floor(a.i / 4),
    ),
    "BlockDiffusion": Meaning("sees no key", lambda: fa.BlockDiffusion(20, 4), block_diffusion),
    "Natten 1D": Meaning(
        "as position 0", lambda: fa.Natten(TOKENS, 7), lambda a: natten(a.i, a.j, TOKENS, 3)
    ),
    "Natten 2D": Meaning(
        "a pixel of the rows above the image, whose window is shifted into it",
        lambda: fa.Natten((7, 5), (5, 3)),
        lambda a: natten(math.floor(a.i / 5), a.j // 5, 7, 2)
        and natten(a.i - 5 * math.floor(a.i / 5), a.j % 5, 5, 1),
    ),
    "DocumentMask": Meaning(
        "in no document: sees no key", fa.DocumentMask,
        lambda a: a.i >= 0 and DOCUMENTS[a.b][min(a.i, 34)] == DOCUMENTS[a.b][a.j],
        tensors=lambda n, q, k: {"documents": ids(DOCUMENTS, torch.int32)(n, 35)},
        mask_params=("documents",),
    ),
    "PaddingMask": Meaning(
        "sees every key that is kept", fa.PaddingMask, lambda a: KEEP[a.b][a.j],
        tensors=lambda n, q, k: {"keep": ids(KEEP, torch.bool)(n, k)}, mask_params=("keep",),
    ),
    "TreeMask": Meaning(
        "before the tree: sees the context alone", fa.TreeMask, tree,
        tensors=lambda n, q, k: {
            "prefix_len": torch.tensor(PREFIX[:n]),
            "bits": fa.tree_bits(PARENTS).expand(n, -1, -1).contiguous(),
        },
        mask_params=("prefix_len", "bits"),
    ),
    "ALiBi": Meaning(
        SAME, fa.ALiBi, bias=lambda a: 2.0 ** (-2 * (a.h + 1)) * (a.j - a.i)
    ),
    "ALiBi symmetric": Meaning(
        SAME, lambda: fa.ALiBi(symmetric=True),
        bias=lambda a: -(2.0 ** (-2 * (a.h + 1))) * abs(a.j - a.i),
    ),
    "AdditiveBias": Meaning(
        "read by row, not by position", fa.AdditiveBias,
        bias=lambda a: float(BIAS[a.b, a.h, a.row, a.j]),
        tensors=lambda n, q, k: {"bias": BIAS[:n, :, :q, :k]}, dense=True,
    ),
    "RelativeBias": Meaning(
        SAME, fa.RelativeBias, bias=lambda a: float(T5_TABLE[t5_bucket(a.j - a.i, True), a.h]),
        tensors=lambda n, q, k: {"table": T5_TABLE},
    ),
    "RelativeBias causal": Meaning(
        SAME, lambda: fa.RelativeBias(bidirectional=False),
        bias=lambda a: float(T5_TABLE[t5_bucket(a.j - a.i, False), a.h]),
        tensors=lambda n, q, k: {"table": T5_TABLE},
    ),
    "RelativeTable": Meaning(
        SAME, lambda: fa.RelativeTable(reach=REACH),
        bias=lambda a: float(DISTANCE_TABLE[a.h, min(max(a.j - a.i, -REACH), REACH) + REACH]),
        tensors=lambda n, q, k: {"table": DISTANCE_TABLE},
    ),
    "GatedOutput": Meaning(
        "read by row, not by position", fa.GatedOutput,
        gate=lambda a, d: sigmoid(float(GATE[a.b, a.h, a.row, d])),
        tensors=packed_gate("dense"), dense=True,
    ),
    "GatedOutput packed": Meaning(
        "read by row, not by position", lambda: fa.GatedOutput("packed"),
        gate=lambda a, d: sigmoid(float(GATE[a.b, a.h, a.row, d])), tensors=packed_gate("packed"),
    ),
    "GatedOutput head": Meaning(
        "read by row, not by position", lambda: fa.GatedOutput("head"),
        gate=lambda a, d: sigmoid(float(GATE[a.b, a.h, a.row, 0])), tensors=packed_gate("head"),
    ),
    "TemperatureTuning": Meaning(
        "not scaled", lambda: fa.TemperatureTuning(floor_scale=4.0),
        query=lambda x, i: [
            y * (1 + 0.1 * math.log(1 + max(0, math.floor((i + 1) / 4)))) for y in x
        ],
    ),
    "LogN": Meaning(
        "not scaled", lambda: fa.LogN(8),
        query=lambda x, i: [y * max(1.0, math.log(max(i, 0) + 1) / math.log(8)) for y in x],
    ),
    "RoPE": Meaning(SAME, fa.RoPE, query=rotated, key=rotated),
    "RoPE interleaved": Meaning(
        SAME, lambda: fa.RoPE(interleaved=True), query=lambda x, i: rotated(x, i, True),
        key=lambda x, j: rotated(x, j, True),
    ),
    "RoPE partial": Meaning(
        SAME, lambda: fa.RoPE(partial=0.5), query=lambda x, i: rotated(x, i, dim=DIM // 2),
        key=lambda x, j: rotated(x, j, dim=DIM // 2),
    ),
    "RoPE computed": Meaning(SAME, lambda: fa.RoPE(tables=False), query=rotated, key=rotated),
}  # fmt: skip

ANYWHERE = {"Full", "QKNorm", "ReluSquared", "Sigmoid", "Sink", "SoftCap", "SoftmaxOffByOne"}
"""Variants that read no position of a query."""

HELPERS = {"NoScaling", "RopeScaling", "alibi_slopes", "document_ids", "pack_bits", "rotate",
           "rope_scaling_from_config", "rope_tables", "t5_buckets", "tree_bits"}  # fmt: skip
SCALINGS = {n for n in lib.__all__ if n.endswith("Scaling")}  # of the frequencies of RoPE

BY_TENSOR = ("RoPE", "RoPE interleaved", "DocumentMask", "PaddingMask", "TreeMask", "RelativeBias",
             "RelativeTable", "GatedOutput packed", "GatedOutput head")  # fmt: skip
"""Variants that index a tensor by a position or a row: checked in batches and on few rows too."""


def test_every_library_variant_is_named() -> None:
    named = {name.split()[0] for name in MEANINGS}
    assert set(lib.__all__) - HELPERS - SCALINGS == named | ANYWHERE
    assert all(m.behaviour for m in MEANINGS.values())


def expected(
    meaning: Meaning, b: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int
) -> torch.Tensor:
    """q [Hq, Sq, D], k and v [Hkv, Skv, D] of one request at positions from `offset` on; fp64."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    group = q.shape[0] // k.shape[0]
    keys = [
        [meaning.key([float(x) for x in k[g, j]], j) for j in range(k.shape[1])]
        for g in range(k.shape[0])
    ]
    for h, row in itertools.product(range(q.shape[0]), range(q.shape[1])):
        i = offset + row
        turned = np.array(meaning.query([float(x) for x in q[h, row]], i))
        seen = [j for j in range(k.shape[1]) if meaning.keep(At(b, h, i, j, row))]
        scores = np.array([
            turned @ np.array(keys[h // group][j]) / math.sqrt(q.shape[2])
            + meaning.bias(At(b, h, i, j, row))
            for j in seen
        ])  # fmt: skip
        if not seen:
            continue
        weights = np.exp(scores - scores.max())
        mixed = (weights / weights.sum()) @ v[h // group, seen].double().numpy()
        gates = [meaning.gate(At(b, h, i, 0, row), d) for d in range(v.shape[2])]
        out[h, row] = torch.from_numpy(mixed * gates)
    return out


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=5e-6)


def dense_inputs(q_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = normal(5, 2, HEADS[0], q_len, DIM)
    return q, normal(6, 2, HEADS[1], TOKENS, DIM), normal(7, 2, HEADS[1], TOKENS, DIM)


DENSE_OFFSETS: dict[str, tuple[int, Any, tuple[int, int]]] = {
    "int": (40, -13, (-13, -13)),
    "end": (40, "end", (TOKENS - 40, TOKENS - 40)),
    "tensor": (40, torch.tensor([-50, 4]), (-50, 4)),
}
FEW_ROWS = {"few rows": (3, -2, (-2, -2)), "one row": (1, torch.tensor([-1, -7]), (-1, -7))}


def check_dense(name: str, q_len: int, q_offset: Any, offsets: tuple[int, int]) -> None:
    meaning = MEANINGS[name]
    q, k, v = dense_inputs(q_len)
    params = meaning.tensors(2, q_len, TOKENS)
    wanted = torch.stack([expected(meaning, b, q[b], k[b], v[b], offsets[b]) for b in range(2)])
    variant = meaning.make()
    close(fa.attention(q, k, v, variant, q_offset=q_offset, **params), wanted)
    reference, _ = attention_reference(q, k, v, variant, q_offset=q_offset, params=params)
    close(reference, wanted)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("how", DENSE_OFFSETS)
@pytest.mark.parametrize("name", rotation.chosen(list(MEANINGS), 5))
def test_dense(name: str, how: str) -> None:
    check_dense(name, *DENSE_OFFSETS[how])


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("how", FEW_ROWS)
@pytest.mark.parametrize("name", rotation.chosen(list(BY_TENSOR), 2))
def test_few_rows(name: str, how: str) -> None:
    check_dense(name, *FEW_ROWS[how])


def packed_wanted(meaning: Meaning, parts: Any, offsets: Sequence[int]) -> torch.Tensor:
    return torch.cat([
        expected(meaning, b, *(x.transpose(0, 1) for x in part), offsets[b]).transpose(0, 1)
        for b, part in enumerate(parts)
    ])  # fmt: skip


PACKED_OFFSETS: dict[str, tuple[Any, Sequence[int]]] = {
    "end": ("end", [k - q for q, k in zip(Q_LENS, KV_LENS, strict=True)]),
    "tensor": (torch.tensor([-3, -40, 2, -20]), (-3, -40, 2, -20)),
}
PACKED = [name for name, m in MEANINGS.items() if not m.dense]


def packed_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = normal(8, sum(Q_LENS), HEADS[0], DIM)
    return q, normal(9, sum(KV_LENS), HEADS[1], DIM), normal(10, sum(KV_LENS), HEADS[1], DIM)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("how", PACKED_OFFSETS)
@pytest.mark.parametrize("name", rotation.chosen(list(PACKED), 4))
def test_packed(name: str, how: str) -> None:
    meaning, (q_offset, offsets) = MEANINGS[name], PACKED_OFFSETS[how]
    q, k, v = packed_inputs()
    parts = list(zip(q.split(Q_LENS), k.split(KV_LENS), v.split(KV_LENS), strict=True))
    wanted = packed_wanted(meaning, parts, offsets)
    params = meaning.tensors(len(Q_LENS), max(Q_LENS), max(KV_LENS))
    call = (q, k, v, indptr(Q_LENS), indptr(KV_LENS), meaning.make())
    close(fa.varlen_attention(*call, q_offset=q_offset, **params), wanted)
    close(varlen_reference(*call, q_offset=q_offset, params=params)[0], wanted)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("how", PACKED_OFFSETS)
@pytest.mark.parametrize("name", rotation.chosen(list(BY_TENSOR), 4))
def test_batches_over_pages(name: str, how: str) -> None:
    meaning, (q_offset, offsets) = MEANINGS[name], PACKED_OFFSETS[how]
    q, k, v = packed_inputs()
    page_size, counts = 8, [-(-n // 8) for n in KV_LENS]
    pages = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    k_pages, v_pages = (normal(s, sum(counts), page_size, HEADS[1], DIM) for s in (11, 12))
    for own, keys, values in zip(
        pages.split(counts), k.split(KV_LENS), v.split(KV_LENS), strict=True
    ):
        for j in range(len(keys)):
            k_pages[own[j // page_size], j % page_size] = keys[j]
            v_pages[own[j // page_size], j % page_size] = values[j]
    parts = list(zip(q.split(Q_LENS), k.split(KV_LENS), v.split(KV_LENS), strict=True))
    params = meaning.tensors(len(Q_LENS), max(Q_LENS), max(KV_LENS))
    mask = {n: t for n, t in params.items() if n in meaning.mask_params}
    batch = fa.BatchAttention(
        meaning.make(), num_q_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=DIM,
        q_dtype=torch.float32, device="cpu",
    )  # fmt: skip
    last = torch.tensor([(n - 1) % page_size + 1 for n in KV_LENS], dtype=torch.int32)
    paged = fa.Paged(indptr(counts).int(), pages.int(), last, page_size)
    batch.plan(indptr(Q_LENS), paged, q_offset=q_offset, **mask)
    rest = {n: t for n, t in params.items() if n not in mask}
    close(batch.run(q, k_pages, v_pages, **rest), packed_wanted(meaning, parts, offsets))


@pytest.mark.parametrize("name", [n for n, m in MEANINGS.items() if n != "AdditiveBias"
                                  and m.keep is not Meaning.keep])  # fmt: skip
@pytest.mark.parametrize("tile", [(1, 1), (5, 7), (16, 16)])
def test_interval_form(name: str, tile: tuple[int, int]) -> None:
    """Tiles from position -30 on are classified soundly, and single pairs exactly."""
    meaning, kv_len = MEANINGS[name], TOKENS
    dims = Dims(2, HEADS[0], HEADS[1], 40, kv_len, DIM, DIM)
    params = meaning.tensors(2, 40, kv_len)
    mask = bound(meaning.make(), dims, params)
    grid = Grid(-30, 10, 0, kv_len, *tile, b_end=2)
    states = np.broadcast_to(
        classify_grid(mask.graph, mask.params, grid),
        (2, 1, grid.num_q_tiles, grid.num_kv_tiles),
    )
    for b, x, y in itertools.product(range(2), range(grid.num_q_tiles), range(grid.num_kv_tiles)):
        rows = range(-30 + x * tile[0], min(-30 + (x + 1) * tile[0], 10))
        keys = range(y * tile[1], min((y + 1) * tile[1], kv_len))
        kept = {meaning.keep(At(b, 0, i, j, 0)) for i in rows for j in keys}
        state = states[b, 0, x, y]
        assert state != EMPTY or kept == {False}
        assert state != FULL or kept == {True}
        if tile == (1, 1):
            assert state == (FULL if kept == {True} else EMPTY), (b, rows, keys)


def test_rope_past_either_end_of_its_tables_is_nan() -> None:
    q, k, v = dense_inputs(3)
    variant = fa.RoPE(max_position=TOKENS)
    for offset, bad in ((TOKENS - 2, [2]), (-TOKENS, [0]), (1 - TOKENS, []), (-1000, [0, 1, 2])):
        for out in (
            fa.attention(q, k, v, variant, q_offset=offset),
            attention_reference(q, k, v, variant, q_offset=offset)[0],
        ):
            lost = out.isnan()
            assert lost[:, :, bad].all() and lost.sum() == lost[:, :, bad].numel()
