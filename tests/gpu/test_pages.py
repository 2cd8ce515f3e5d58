"""Appends, caches and merges on the device: pages hold what was written, attention reads it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from tests.batch.batches import Batch
from tests.gpu.place import DEVICE, TARGET, needs_gpu
from tests.kv.engine import Engine
from tests.kv.test_decoder import recompute
from tests.kv.test_step_plan import DIM, HEADS, attention, cache_of, decode, shared
from tests.ops.batches.test_append_transform import EPS, normed, rotated
from tests.ops.calls.test_merge import expected, states

BF16, FP16 = torch.bfloat16, torch.float16
NEW, KV_LEN = (3, 70, 0, 1), (40, 70, 12, 131)
LAYOUTS = {1: "pages", 16: "layers", 64: "heads first"}  # by page size


class Appended:
    """New rows of a batch, its pages on the device, and where the rows go.

    keys: [tokens], the key that each new token becomes: the last ones, or any where `scattered`.
    """

    def __init__(self, page_size: int, dtype: torch.dtype, scattered: bool = False) -> None:
        layout = LAYOUTS[page_size]
        self.batch = batch = Batch(NEW, KV_LEN, (4, 2), 64, dtype, page_size, layout, device=DEVICE)
        generator = torch.Generator().manual_seed(1)
        self.k, self.v = torch.randn(2, sum(NEW), 2, 64, generator=generator).to(dtype)
        self.weight = torch.rand(64, generator=generator) + 0.5
        pairs = list(zip(NEW, KV_LEN, strict=True))
        if scattered:
            parts = [torch.randperm(total, generator=generator)[:new] for new, total in pairs]
        else:
            parts = [torch.arange(total - new, total) for new, total in pairs]
        self.keys = torch.cat(parts)
        self.slots = torch.cat([s[own] for s, own in zip(batch.slots, parts, strict=True)])

    def check(self, before: list[torch.Tensor], changed: torch.Tensor | None) -> None:
        """Keys are `changed`, rounded, or k; values are v; all else is as before, NaN included."""
        size = self.batch.page_size
        at = self.slots // size, self.slots % size
        new = (self.k if changed is None else changed, self.v)
        for got, old, rows in zip((self.batch.k, self.batch.v), before, new, strict=True):
            wanted = old.double()
            wanted[at] = rows.double()
            close = EPS[self.batch.dtype] if rows is changed else 0.0
            torch.testing.assert_close(
                got.cpu().double(), wanted, rtol=close, atol=close, equal_nan=True
            )


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("page_size", LAYOUTS)
@pytest.mark.parametrize("scattered", [False, True], ids=["last keys", "positions"])
@pytest.mark.parametrize("change", ["copy", "rope", "norm and rope"])
def test_appends(change: str, scattered: bool, page_size: int, dtype: torch.dtype) -> None:
    made = Appended(page_size, dtype, scattered)
    batch, k, v = made.batch, made.k.to(DEVICE), made.v.to(DEVICE)
    before = [batch.k.cpu().clone(), batch.v.cpu().clone()]
    where: Any = batch.q_indptr, batch.storage
    options: dict[str, Any] = {"positions": made.keys if scattered else None, "target": TARGET}
    if change == "copy":
        fa.plan_append(*where, **options).run(k, v, batch.k, batch.v)
        made.check(before, None)
    elif change == "rope":
        fa.append_paged_kv(k, v, batch.k, batch.v, *where, transform=fa.RoPE(), **options)
        made.check(before, rotated(made.k.double(), made.keys))
    else:
        append = fa.plan_append(*where, transform=fa.QKNorm() & fa.RoPE(), **options)
        append.run(k, v, batch.k, batch.v, k_weight=made.weight.to(DEVICE))
        made.check(before, rotated(normed(made.k, made.weight), made.keys))


@needs_gpu
@pytest.mark.parametrize("transform", [None, fa.RoPE()], ids=["copy", "rope"])
def test_a_graph_appends_the_rows_of_its_replay(transform: fa.Variant | None) -> None:
    made = Appended(16, BF16)
    pages = made.batch.k, made.batch.v
    before = [x.cpu() for x in pages]
    where: Any = made.batch.q_indptr, made.batch.storage
    append = fa.plan_append(*where, transform=transform)
    k, v = torch.zeros(2, *made.k.shape, dtype=BF16, device=DEVICE)
    append.run(k, v, *pages)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append.run(k, v, *pages)
    k.copy_(made.k), v.copy_(made.v)
    graph.replay()
    torch.cuda.synchronize()
    made.check(before, None if transform is None else rotated(made.k.double(), made.keys))


@pytest.mark.parametrize("layout", ["page", "layer"])
def test_pages_hold_what_was_written(layout: str) -> None:
    """Shared prefixes, forks, trims, reclaimed windows, suspended sequences, evicted pages."""
    window = 9
    groups = (
        fa.kv.Group((0, 2), 2, 8, num_q_heads=4, variant=fa.Causal()),
        fa.kv.Group((1,), 1, 16, num_q_heads=4, variant=fa.SlidingWindow(window)),
    )
    spec = fa.kv.Spec(groups, 4, torch.float32)
    cache = fa.kv.Cache(spec, (24, 16), max_kv_len=64, layout=layout, device=DEVICE)
    engine = Engine(cache, [None, lambda q, k: k <= q and q - k < window])
    prompt = list(range(14))
    seqs = []
    for own in ([50], [60, 61, 62, 63, 64], [70]):
        seq = engine.open([*prompt, *own])
        engine.step([(seq, [*prompt, *own][seq.num_cached :])])
        seqs.append(seq)
    assert [seq.num_cached for seq in seqs] == [0, 12, 12]
    child = engine.fork(seqs[0])  # whose last page is not full
    engine.step([(seqs[0], [1]), (child, [2, 3]), (seqs[1], [4] * 9)])
    engine.verify_all()
    assert cache.stats().groups[0].copied and cache.stats().groups[1].reclaimed
    seqs[1].suspend()
    seqs[2].close()
    cache.clear()
    engine.step([(child, list(range(30)))])  # over the pages that were given back
    child.close()
    seqs[1].resume()
    engine.step([(seqs[1], [5, 6]), (seqs[0], [7])])
    engine.verify_all()


@pytest.mark.parametrize("kind", [fa.BatchAttention, fa.CascadeAttention])
@pytest.mark.parametrize("layout", ["page", "layer"])
def test_a_decoder_gives_what_recomputation_gives(layout: str, kind: type) -> None:
    recompute(kind, layout, FP16, DEVICE, TARGET, turns=8)


@pytest.mark.parametrize("variant", [fa.Causal(), fa.SlidingWindow(100)], ids=["causal", "window"])
def test_cascades_over_the_levels_of_a_step(variant: fa.Variant) -> None:
    """As the planner takes them, as levels, and flat; with results in given tensors."""
    cache = cache_of(variant, 100, dtype=FP16, device=DEVICE)
    seqs = shared(cache, 5, 256, own=5)
    options: dict[str, Any] = {"dtype": FP16, "device": DEVICE, "target": TARGET}
    cascade, flat = (
        attention(kind, variant, **options) for kind in (fa.CascadeAttention, fa.BatchAttention)
    )
    for _ in range(2):
        with decode(cache, seqs) as step:
            q = torch.randn(step.num_tokens, HEADS[0], DIM).to(DEVICE, FP16)
            step.plan(flat)
            wanted = flat.run(q, *cache.tensors(0), return_lse=True)
            assert len(step.levels()) > 1
            for plan in (partial(step.plan, cascade), partial(cascade.plan, step.levels())):
                plan()
                out, lse = torch.empty_like(wanted[0]), torch.empty_like(wanted[1])
                cascade.run(q, *cache.tensors(0), out=out, lse=lse)
                torch.testing.assert_close(out, wanted[0], rtol=2e-3, atol=2e-3)
                torch.testing.assert_close(lse, wanted[1], rtol=1e-4, atol=1e-4)
            step.commit()


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16], ids=str)
@pytest.mark.parametrize("count", [2, 40])
def test_merged_states(count: int, dtype: torch.dtype) -> None:
    """Rounded once, and in place for the rows of a mask."""
    outs, lses = ([x.to(DEVICE) for x in part] for part in states((6, 3, 40), count))
    wanted, wanted_lse = expected([x.cpu() for x in outs], [x.cpu() for x in lses])
    merge = partial(fa.merge_states, target=TARGET)
    exact, exact_lse = merge(outs, lses)
    assert exact_lse is not None
    torch.testing.assert_close(exact.cpu().double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(exact_lse.cpu().double(), wanted_lse, rtol=1e-5, atol=1e-5)
    rounded, _ = merge(outs, lses, dtype=dtype)
    torch.testing.assert_close(rounded, exact.to(dtype), rtol=0, atol=0)
    mask = torch.tensor([True, False, True, False, False, True], device=DEVICE)
    kept, given = outs[0].clone(), torch.zeros_like(outs[0], dtype=dtype)
    out, lse = merge(outs, lses, out=given, lse=lses[0], mask=mask)
    assert out is given and lse is not None and lse is lses[0]
    torch.testing.assert_close(out[mask], rounded[mask], rtol=0, atol=0)
    torch.testing.assert_close(lse[mask], exact_lse[mask], rtol=0, atol=0)
    torch.testing.assert_close(out[~mask], kept[~mask].to(dtype), rtol=0, atol=0, equal_nan=True)
