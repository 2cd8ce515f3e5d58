"""A cache whose groups are quantised: contents, copies, sizes, attention over them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import InputError
from tests.harness.rotation import chosen

SIZE, HEADS, DIM, DIM_V = 4, 2, 24, 16
INT8, E4M3 = fa.kv.Format("int8"), fa.kv.Format("e4m3", scale_dtype=torch.bfloat16)
INT4 = fa.kv.Format("int4", scale_dtype=torch.float16, group=8, rotate=True)
ZERO = fa.kv.Format("int4", group=8, zero=True)
PAIRS: list[tuple[Any, Any]] = [
    (INT8, INT8), (E4M3, None), (None, INT8), (INT8, E4M3), (INT4, INT4), (ZERO, INT8),
    (fa.kv.Format("nf4", rotate=True), ZERO), (E4M3, fa.kv.Format("e2m1")), (None, INT4),
]  # fmt: skip


def spec(formats: Any, transform: fa.Variant | None = None) -> fa.kv.Spec:
    causal, window = fa.Causal(), fa.SlidingWindow(9)
    return fa.kv.Spec(
        (
            fa.kv.Group((0, 2), HEADS, DIM, DIM_V, 2 * HEADS, causal, kv_format=formats,
                        transform=transform),
            fa.kv.Group((1,), HEADS, DIM, DIM_V, 2 * HEADS, window, kv_format=formats),
        ),
        SIZE, torch.float32,
    )  # fmt: skip


def rows(layer: int, part: int, tokens: list[int]) -> torch.Tensor:
    """The keys or values of tokens: equal tokens have equal ones."""
    dim = (DIM, DIM_V)[part]
    table = torch.randn(64, HEADS, dim, generator=torch.Generator().manual_seed(10 * layer + part))
    return table[tokens]


def stored(x: torch.Tensor, kv_format: fa.kv.Format | None) -> torch.Tensor:
    return x if kv_format is None else kv_format.quantize(x).dequantize()


def advance(cache: fa.kv.Cache, new: list[tuple[fa.kv.Sequence, list[int]]]) -> None:
    with cache.step(new) as step:
        tokens = [t for _, own in new for t in own]
        for layer in range(3):
            step.append(layer, rows(layer, 0, tokens), rows(layer, 1, tokens))
        step.commit()


def check(cache: fa.kv.Cache, formats: Any, sequences: list[fa.kv.Sequence]) -> None:
    """Every key that a layer may read is what the quantiser makes of its row."""
    cache.check()
    for seq in sequences:
        tokens = [int(t) for t in seq.tokens.view]
        for layer in range(3):
            table = torch.from_numpy(seq.tables[cache.group_of(layer)].view.copy()).long()
            for part, (pages, form) in enumerate(zip(cache.tensors(layer), formats, strict=True)):
                values = pages if form is None else pages.dequantize()
                assert (form is None) == isinstance(pages, torch.Tensor)
                there = (table != 0).repeat_interleave(SIZE)[: len(tokens)]
                found = values[table].flatten(0, 1)[: len(tokens)]
                wanted = stored(rows(layer, part, tokens), form)
                torch.testing.assert_close(found[there], wanted[there], rtol=0, atol=0)
                if layer != 1:
                    assert there.all()


@pytest.mark.parametrize(
    ("formats", "layout"), chosen(list(itertools.product(PAIRS, ("page", "layer"))), 2)
)
def test_pages_keep_their_codes_and_scales(formats, layout) -> None:
    cache = fa.kv.Cache(spec(formats), 40, max_kv_len=64, layout=layout, lookback=4)
    first = cache.open([1, 2, 3])
    advance(cache, [(first, list(range(1, 15)))])
    second = first.fork()
    third = cache.open(list(range(1, 15)))  # finds whole pages of the first
    assert third.num_cached == 12
    advance(cache, [(first, [20]), (second, [21, 22]), (third, [13, 14, 30])])
    check(cache, formats, [first, second, third])
    second.trim(15)
    first.suspend()
    advance(cache, [(second, [40, 41, 42, 43, 44, 45]), (third, [50])])
    first.resume()
    check(cache, formats, [first, second, third])
    for pool, group in zip(cache.pools, range(2), strict=True):
        held = sum(t[0].numel() * t.itemsize for t in pool.memory)
        assert 0 <= held - cache.spec.page_bytes(group) < 16 * 2 * len(pool.views)


@pytest.mark.parametrize(
    ("formats", "transform"), chosen(list(itertools.product(PAIRS, (None, fa.RoPE()))), 3)
)
def test_attention_over_a_step(formats, transform) -> None:
    cache = fa.kv.Cache(spec(formats, transform), 40, max_kv_len=64)
    seq = cache.open([1])
    engines = [
        fa.CascadeAttention(
            g.variant, num_q_heads=2 * HEADS, num_kv_heads=HEADS, head_dim=DIM, head_dim_v=DIM_V,
            q_dtype=torch.float32, kv_format=formats,
            kv_dtype=None if all(formats) else torch.float32,
        )
        for g in cache.spec.groups
    ]  # fmt: skip
    tokens = list(range(1, 20))
    got: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    q = torch.randn(len(tokens), 2 * HEADS, DIM, generator=torch.Generator().manual_seed(1))
    for begin, end in ((0, 11), (11, 12), (12, 19)):
        with cache.step([(seq, tokens[begin:end])]) as step:
            for group, engine in enumerate(engines):
                step.plan(engine, group)
            for layer in range(3):
                step.append(
                    layer, rows(layer, 0, tokens[begin:end]), rows(layer, 1, tokens[begin:end])
                )
                engine = engines[cache.group_of(layer)]
                got[layer].append(engine.run(q[begin:end], *cache.tensors(layer)))
            step.commit()
    ends = torch.tensor([0, len(tokens)]).int()
    for layer, outs in got.items():
        k, v = (rows(layer, part, tokens) for part in (0, 1))
        if transform is not None and layer != 1:
            pages = torch.zeros(1, 32, HEADS, DIM)
            paged = fa.Paged(torch.tensor([0, 1]).int(), torch.zeros(1).int(), ends[1:], 32)
            fa.append_paged_kv(
                k, v, pages, torch.zeros(1, 32, HEADS, DIM_V), ends, paged, transform=transform
            )
            k = pages[0, : len(tokens)]
        variant = cache.spec.groups[cache.group_of(layer)].variant
        k, v = (stored(x, f) for x, f in zip((k, v), formats, strict=True))
        wanted = fa.varlen_attention(q, k, v, ends, ends, variant)
        torch.testing.assert_close(torch.cat(outs), wanted, rtol=1e-5, atol=1e-5)


def test_fingerprints_differ_by_format() -> None:
    made = [spec(pair).fingerprint for pair in (*PAIRS, (None, None))]
    assert len({*made}) == len(made) and spec(PAIRS[0]).fingerprint == made[0]
    assert spec(INT8).fingerprint == made[0]


def test_compaction_moves_scales() -> None:
    group = fa.kv.Group(
        (0,), HEADS, DIM, variant=fa.StreamingLLM(window=8, num_sinks=4), reclaim="compact",
        kv_format=INT8,
    )  # fmt: skip
    cache = fa.kv.Cache(fa.kv.Spec(group, SIZE, torch.float32), 40, max_kv_len=64)
    seq = cache.open([1])
    for token in range(1, 40):
        with cache.step([(seq, [token])]) as step:
            step.append(0, rows(0, 0, [token]), rows(0, 0, [token]))
            step.commit()
        cache.check()
    table = torch.from_numpy(seq.tables[0].view.copy()).long()
    found = cache.tensors(0)[0].dequantize()[table].flatten(0, 1)
    wanted = stored(rows(0, 0, list(range(1, 40))), INT8)
    live = 39 - int(seq.removed[0])
    assert live < 20
    torch.testing.assert_close(found[:SIZE], wanted[:SIZE], rtol=0, atol=0)
    torch.testing.assert_close(found[SIZE:live], wanted[39 - live + SIZE :], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fa.kv.Group((0,), 2, 8, kv_format=fa.kv.Format("int8", "head")),
         "kv_format has scale='head', but a cache stores scales of each token"),
        (lambda: fa.kv.Group((0,), 2, 9, 8, kv_format=INT4), "head_dim=9 is odd, but int4 stores"),
        (
            lambda: fa.kv.Group((0,), 2, 8, 12, kv_format=INT4),
            "group=8 does not divide head_dim_v=12",
        ),
        (lambda: fa.kv.Group((0,), 2, 8, kv_format="int8"), "kv_format must be an fa.kv.Format"),
        (lambda: fa.kv.Spec(fa.kv.Group((0,), 2, 8, kv_format=INT8), 4, torch.int8),
         "dtype=torch.int8, but a group has a transform or a format"),
    ],
)  # fmt: skip
def test_what_cannot_be_stored(make, message) -> None:
    with pytest.raises(InputError, match=message):
        make()
