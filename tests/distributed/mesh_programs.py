"""What ranks do in the tests of batches with a mesh: see `ranks.on_ranks`.

Every rank makes the whole batch, to compare, but its caches have its own pages alone.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import flashattn_jit as fa
from tests.batch.batches import Batch
from tests.distributed.programs import DECODE_KV, DECODE_Q, _variants, in_pages

SIZE = 16
"""Of a page."""


def own_cache(mesh: DeviceMesh, paged: fa.Paged, pages: list[torch.Tensor], first: torch.Tensor):
    """The tables and pages of this rank: its pages in random order, -1 for those of others.

    first: of each request, the number of its first page among all of its pages.
    """
    rank, ranks = mesh.get_local_rank(), mesh.size()
    counts = paged.page_indptr.diff()
    number = torch.cat([torch.arange(int(n)) for n in counts] or [torch.zeros(0, dtype=int)])
    own = (number + first.repeat_interleave(counts)) % ranks == rank
    used, places = paged.page_indices[own].unique(return_inverse=True)
    order = torch.randperm(len(used), generator=torch.Generator().manual_seed(rank))
    indices = torch.full_like(paged.page_indices, -1)
    indices[own] = order[places].int()
    made = []
    for x in pages:
        cache = x.new_full((max(1, len(used)), *x.shape[1:]), 0)
        cache[order] = x[used.long()]
        made.append(cache)
    return fa.Paged(paged.page_indptr, indices, paged.last_page_len, paged.page_size), made


def heads_of(mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    """This rank's share of the heads."""
    return x.chunk(mesh.size(), 1)[mesh.get_local_rank()]


def pages(mesh: DeviceMesh, names: list[str], divided: str, prefill: bool = False) -> None:
    """Pages divided among ranks give what one process gives."""
    torch.use_deterministic_algorithms(True)
    q_len, kv_len = ((70, 3, 0, 130), (200, 3, 5, 400)) if prefill else (DECODE_Q, DECODE_KV)
    batch = Batch(q_len, kv_len, (12, 2), 64)
    paged, *whole = in_pages(batch, SIZE)
    own, cache = own_cache(mesh, paged, whole, torch.zeros(len(q_len), dtype=int))
    for name in names:
        variant, mask_params, params = _variants(q_len, kv_len)[name]
        if name == "sink":
            params = {"sink": torch.randn(12, generator=torch.Generator().manual_seed(1))}
        options = batch.options()
        one = fa.BatchAttention(variant, **options)
        one.plan(batch.q_indptr, paged, **mask_params)
        lse = name != "sigmoid"
        want = one.run(batch.q, *whole, return_lse=lse, **params)
        many = fa.BatchAttention(variant, **options, mesh=mesh, divided=divided)
        for _ in range(2):  # plans and runs may be repeated
            many.plan(batch.q_indptr, own, **mask_params)
            part = divided == "pages_heads"
            q = heads_of(mesh, batch.q) if part else batch.q
            got = many.run(q, *cache, return_lse=lse, **params)
            for mine, other in zip(got if lse else (got,), want if lse else (want,), strict=True):
                other = heads_of(mesh, other) if part else other
                assert mine.dtype == other.dtype
                torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-5)


def cascade(mesh: DeviceMesh, divided: str, name: str = "alibi") -> None:
    """Levels of shared pages, each of which is read once for its group."""
    made = torch.Generator().manual_seed(2)
    prefix, q_len = 37, (1, 2, 0, 1, 30)
    own_pages = (3, 1, 2, 5, 9)
    tables = []
    for b, count in enumerate(own_pages):
        shared = list(range(prefix)) + (list(range(prefix, prefix + 4)) if b in (1, 3) else [])
        tables.append(shared + [100 + 10 * b + i for i in range(count)])
    indptr = torch.tensor([0, *(len(t) for t in tables)]).cumsum(0)
    indices = torch.tensor([p for t in tables for p in t], dtype=torch.int32)
    paged = fa.Paged(indptr, indices, torch.tensor([5, 16, 1, 8, 3]), SIZE)
    whole = [torch.randn(160, SIZE, 2, 64, generator=made) for _ in range(2)]
    q = torch.randn(sum(q_len), 12, 64, generator=made)
    q_indptr = torch.tensor([0, *q_len]).cumsum(0)
    options = {"num_q_heads": 12, "num_kv_heads": 2, "head_dim": 64, "q_dtype": torch.float32}
    variant = _variants(q_len, (9,) * len(q_len))[name][0]
    levels = fa.cascade_levels(q_indptr, paged)
    assert len(levels) == 3
    one = fa.CascadeAttention(variant, **options)
    one.plan(levels)
    want, want_lse = one.run(q, *whole, return_lse=True)
    # One cache for all levels: the ranks' pages keep their numbers, the others are NaN.
    rank, ranks = mesh.get_local_rank(), mesh.size()
    held = torch.zeros(160, dtype=torch.bool)
    for table in tables:
        held[[page for i, page in enumerate(table) if i % ranks == rank]] = True
    cache = [x.clone() for x in whole]
    for x in cache:
        x[~held] = float("nan")
    many = fa.CascadeAttention(variant, **options, mesh=mesh, divided=divided)
    many.plan(levels)
    part = divided == "pages_heads"
    got, lse = many.run(heads_of(mesh, q) if part else q, *cache, return_lse=True)
    for mine, other in ((got, want), (lse, want_lse)):
        torch.testing.assert_close(mine, heads_of(mesh, other) if part else other)


def latents(mesh: DeviceMesh, divided: str) -> None:
    """Latent rows: one KV head for all ranks, which have pages of it, or requests."""
    made = torch.Generator().manual_seed(3)
    rank, ranks = mesh.get_local_rank(), mesh.size()
    q_len, kv_len = (1, 3, 1, 1, 2, 1), (100, 40, 0, 257, 3, 64)
    options = {
        "num_q_heads": 12, "num_kv_heads": 1, "head_dim": 96, "head_dim_v": 64, "v_in_k": True,
        "q_dtype": torch.float32,
    }  # fmt: skip
    batch = Batch(q_len, kv_len, (12, 1), 96)
    paged, latent, _ = in_pages(batch, SIZE)
    q = torch.randn(sum(q_len), 12, 96, generator=made)
    one = fa.BatchAttention(fa.Causal(), **options)
    one.plan(batch.q_indptr, paged)
    want, want_lse = one.run(q, latent, scale=0.1, return_lse=True)
    many = fa.BatchAttention(fa.Causal(), **options, mesh=mesh, divided=divided)
    if divided == "requests_heads":
        # The last rank has no request where there are four.
        edges = [round(i * 6 / min(ranks, 3)) for i in range(4)] + [6]
        begin, end = edges[rank], edges[rank + 1]
        rows, pages = batch.q_indptr, paged.page_indptr
        own = fa.Paged(
            pages[begin : end + 1] - pages[begin],
            paged.page_indices[int(pages[begin]) : int(pages[end])],
            paged.last_page_len[begin:end], SIZE,
        )  # fmt: skip
        many.plan(rows[begin : end + 1] - rows[begin], own)
        cache = latent
    else:
        own, (cache,) = own_cache(mesh, paged, [latent], torch.zeros(6, dtype=int))
        many.plan(batch.q_indptr, own)
    out = torch.full((sum(q_len), 12 // ranks, 64), float("nan"))
    got, lse = many.run(heads_of(mesh, q), cache, scale=0.1, return_lse=True, out=out)
    assert got is out
    torch.testing.assert_close(got, heads_of(mesh, want))
    torch.testing.assert_close(lse, heads_of(mesh, want_lse))


def emulated(mesh: DeviceMesh, divided: str) -> None:
    """CUDA kernels in the emulator, a device a rank."""
    batch = Batch((1, 2), (70, 33), (4, 2), 64, torch.bfloat16)
    paged, *whole = in_pages(batch, SIZE)
    own, cache = own_cache(mesh, paged, whole, torch.zeros(2, dtype=int))
    options = {**batch.options(), "target": "emulated:sm_80"}
    one = fa.BatchAttention(fa.Causal(), **options)
    one.plan(batch.q_indptr, paged)
    want = one.run(batch.q, *whole)
    many = fa.BatchAttention(fa.Causal(), **options, mesh=mesh, divided=divided)
    many.plan(batch.q_indptr, own)
    part = divided == "pages_heads"
    got = many.run(heads_of(mesh, batch.q) if part else batch.q, *cache)
    torch.testing.assert_close(got, heads_of(mesh, want) if part else want, rtol=1e-2, atol=1e-2)


def codes(mesh: DeviceMesh, rotate: bool) -> None:
    """Quantised pages, with scales in pages of their own; rotated values."""
    batch = Batch(DECODE_Q, DECODE_KV, (4, 2), 64)
    paged, *whole = in_pages(batch, SIZE)
    form = fa.kv.Format("int8", rotate=rotate)
    options = {**batch.options(), "kv_format": form}
    options.pop("kv_dtype", None)
    one = fa.BatchAttention(fa.ALiBi() & fa.Causal(), **options)
    one.plan(batch.q_indptr, paged)
    want = one.run(batch.q, *(form.quantize(x) for x in whole))
    own, cache = own_cache(mesh, paged, whole, torch.zeros(len(DECODE_Q), dtype=int))
    many = fa.BatchAttention(fa.ALiBi() & fa.Causal(), **options, mesh=mesh)
    many.plan(batch.q_indptr, own)
    got = many.run(batch.q, *(form.quantize(x) for x in cache))
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def slots(mesh: DeviceMesh) -> None:
    """Hooks find data beside the keys of their rank; lengths are those of whole requests."""
    kv_len = (300, 40)
    batch = Batch((1, 2), kv_len, (4, 2), 64)
    paged, *whole = in_pages(batch, SIZE)
    bias = torch.randn(whole[0].shape[0] * SIZE, generator=torch.Generator().manual_seed(4))
    own, cache = own_cache(mesh, paged, [*whole, bias.view(-1, SIZE)], torch.zeros(2, dtype=int))

    class Beside(fa.Variant):
        """Reads all that can be different on a rank."""

        bias: torch.Tensor = fa.tensor("slots")

        def score_mod(self, score, b, h, q_idx, kv_idx):
            """The number beside the key, the position and the length."""
            return score + self.bias[fa.kv_slot(b, kv_idx)] + 0.01 * kv_idx - 0.02 * fa.kv_len(b)

        def mask_mod(self, b, h, q_idx, kv_idx):
            """All but the last keys, and those of a pattern."""
            return (kv_idx < fa.kv_len(b) - 2 * b) & ((kv_idx % 7 != 3) | (q_idx % 2 == 0))

    one = fa.BatchAttention(Beside(), **batch.options())
    one.plan(batch.q_indptr, paged)
    want = one.run(batch.q, *whole, bias=bias)
    many = fa.BatchAttention(Beside(), **batch.options(), mesh=mesh)
    many.plan(batch.q_indptr, own)
    got = many.run(batch.q, *cache[:2], bias=cache[2].view(-1))
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def refused(mesh: DeviceMesh, name: str, words: str) -> None:
    """A typed error on every rank."""
    batch = Batch((1, 1), (40, 50), (4, 2), 64)
    options: dict[str, Any] = batch.options()
    paged, *cache = in_pages(batch, SIZE)
    other = fa.variant(score_mod=lambda s, b, h, q, k: s + 0.0 * fa.kv_slot(b, k - 1))
    rank = mesh.get_local_rank()
    try:
        if name == "divided":
            fa.BatchAttention(None, **options, mesh=mesh, divided="keys")
        elif name == "heads":
            three = {**options, "num_q_heads": 3, "num_kv_heads": 1}
            fa.BatchAttention(None, **three, mesh=mesh, divided="pages_heads")
        elif name == "limits":
            fa.BatchAttention(None, **options, mesh=mesh, limits=fa.Limits(2, 8, 64))
        elif name == "slots":
            fa.BatchAttention(other, **options, mesh=mesh).plan(batch.q_indptr, paged)
        elif name == "ragged":
            fa.BatchAttention(None, **options, mesh=mesh).plan(batch.q_indptr, batch.storage)
        elif name == "sparsity":
            tree = fa.Tree([torch.ones(1, 1, dtype=torch.bool)] * 2)
            many = fa.BatchAttention(None, **options, mesh=mesh)
            many.plan(batch.q_indptr, paged, sparsity=tree)
        elif name == "lengths":
            last = paged.last_page_len - rank
            other_table = fa.Paged(paged.page_indptr, paged.page_indices, last, SIZE)
            fa.BatchAttention(None, **options, mesh=mesh).plan(batch.q_indptr, other_table)
        elif name == "levels":
            ends = torch.tensor([0, 2]), torch.tensor([0, 3]), torch.tensor([7])
            level = fa.CascadeLevel(ends[0], fa.Paged(ends[1], paged.page_indices, ends[2], SIZE))
            many = fa.CascadeAttention(None, **options, mesh=mesh)
            many.plan([level, fa.CascadeLevel(batch.q_indptr, paged)])
        else:
            many = fa.BatchAttention(None, **options, mesh=mesh)
            if name != "plan":
                many.plan(batch.q_indptr, paged)
            q = batch.q[:, :2] if name == "q" else batch.q
            many.run(q, *cache, partial=name == "partial")
    except fa.FlashAttnJitError as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError("nothing was raised")


def _cascade_on(mesh: DeviceMesh, divided: str) -> tuple[Any, Any, torch.Tensor, list]:
    """A cascade without a plan, a level for it, and the rank's q and cache."""
    rank, batch = mesh.get_local_rank(), Batch((1, 2), (40, 70), (4, 2), 64)
    paged, *cache = in_pages(batch, SIZE)
    rows = batch.q_indptr
    if divided == "requests_heads":
        first = int(paged.page_indptr[rank])
        indices = paged.page_indices[first : int(paged.page_indptr[rank + 1])]
        paged = fa.Paged(
            paged.page_indptr[rank : rank + 2] - first, indices, paged.last_page_len[[rank]], SIZE
        )
        rows = rows[rank : rank + 2] - rows[rank]
    else:
        paged, cache = own_cache(mesh, paged, cache, torch.zeros(2, dtype=int))
    level = fa.CascadeLevel(rows, paged)
    many = fa.CascadeAttention(fa.Causal(), **batch.options(), mesh=mesh, divided=divided)
    q = batch.q if divided == "pages" else heads_of(mesh, batch.q)
    return many, level, q, cache


def one_wrong(mesh: DeviceMesh, divided: str) -> None:
    """What one rank does wrong is an error of every rank, and changes nothing."""
    last = mesh.get_local_rank() == mesh.size() - 1
    many, level, q, cache = _cascade_on(mesh, divided)
    many.plan([level])
    want = many.run(q, *cache)
    heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(many.run(heads_first, *cache), want)

    def wrong(own: type[Exception], words: str, call: Any) -> None:
        try:
            call()
        except fa.FlashAttnJitError as error:
            assert type(error) is (own if last else fa.DistributedError), repr(error)
            assert words in str(error) or not last, str(error)
        else:
            raise AssertionError(f"nothing was raised: {words}")
        assert torch.equal(many.run(q, *cache), want)

    def given(good: Any, bad: Any) -> Any:
        return bad if last else good

    rows, paged = level.q_indptr, level.storage
    tokens = torch.arange(int(rows[-1]))
    kept = fa.CascadeLevel(rows, paged, kv_format=fa.kv.Format("int8"))
    empty = fa.Paged(paged.page_indptr, paged.page_indices, paged.last_page_len, 0)
    for words, levels in (
        ("levels must be", []),
        ("levels[0]", [3]),
        ("tokens must be None", [fa.CascadeLevel(rows, paged, tokens)]),
        ("page_size=0", [fa.CascadeLevel(rows, empty)]),
    ):
        wrong(fa.InputError, words, lambda x=levels: many.plan(given([level], x)))
    if divided == "requests_heads":  # the other rank plans levels of another format, in vain
        levels = given([kept], [])
        wrong(fa.InputError, "levels must be", lambda: many.plan(levels))
    else:
        levels = given([level], [kept])
        wrong(fa.DistributedError, "something else than rank 0", lambda: many.plan(levels))
    wrong(fa.ParamError, "window", lambda: many.plan([level], **given({}, {"window": 3})))
    part = torch.zeros_like(want)
    overlap = torch.zeros(len(want) * 4 * 64 + 64)
    both = {
        "out": overlap[: want.numel()].view(want.shape),
        "lse": overlap[: want[..., 0].numel()].view(want.shape[:2]),
    }
    for own, words, options in (
        (fa.InputError, "partial=True does not go", {"partial": True}),
        (fa.InputError, "out must be", {"out": torch.zeros(3)}),
        (fa.InputError, "out must be", {"out": 3}),
        (fa.InputError, "out shares memory", {"out": q}),
        (fa.InputError, "lse must be", {"lse": torch.zeros(3)}),
        (fa.InputError, "shares memory", both),
        (fa.GradError, "out requires grad", {"out": part.requires_grad_()}),
        (fa.DistributedError, "something else than rank 0", {"return_lse": True}),
        (fa.DistributedError, "something else than rank 0", {"scale": 0.5}),
        (fa.InputError, "scale", {"scale": "x"}),
        (fa.ParamError, "has no param 'cap'; it has no params", {"cap": 1.0}),
    ):
        wrong(own, words, lambda x=options: many.run(q, *cache, **given({}, x)))
    for copies in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(fa.InputError, match="cannot be copied or pickled"):
            copies(many)


def differing_ways(mesh: DeviceMesh) -> None:
    """Ranks that divide in other ways learn of it from plan()."""
    _, level, _, _ = _cascade_on(mesh, "pages")
    options = Batch((1, 2), (40, 70), (4, 2), 64).options()
    divided = "pages_heads" if mesh.get_local_rank() else "pages"
    many = fa.BatchAttention(fa.Causal(), **options, mesh=mesh, divided=divided)
    try:
        many.plan(level.q_indptr, level.storage)
    except fa.DistributedError as error:
        assert "something else than rank 0" in str(error)
    else:
        raise AssertionError("nothing was raised")


def text(mesh: DeviceMesh) -> None:
    """Hooks in C++ text see the heads and requests of the whole batch."""
    batch = Batch((1, 2), (40, 70), (4, 2), 64)
    paged, *whole = in_pages(batch, SIZE)
    own, cache = own_cache(mesh, paged, whole, torch.zeros(2, dtype=int))
    variant = fa.variant(score_mod=fa.cpp("return score * (1.0f + h) + 0.1f * b;"))
    one = fa.BatchAttention(variant, **batch.options())
    one.plan(batch.q_indptr, paged)
    many = fa.BatchAttention(variant, **batch.options(), mesh=mesh, divided="pages_heads")
    many.plan(batch.q_indptr, own)
    got, lse = many.run(heads_of(mesh, batch.q), *cache, return_lse=True)
    want, want_lse = one.run(batch.q, *whole, return_lse=True)
    torch.testing.assert_close(got, heads_of(mesh, want))
    torch.testing.assert_close(lse, heads_of(mesh, want_lse))
    position = fa.variant(score_mod=fa.cpp("return score + 0.1f * kv_idx;"))
    try:
        fa.BatchAttention(position, **batch.options(), mesh=mesh).plan(batch.q_indptr, own)
    except fa.VariantError as error:
        assert "C++ text that reads kv_idx" in str(error)
    else:
        raise AssertionError("nothing was raised")


class OfRequests(fa.Variant):
    """Has sizes of its own, which are named as the engine might name them."""

    factor: torch.Tensor = fa.tensor("requests")
    part: torch.Tensor = fa.tensor("parts")

    def query_mod(self, row, b, h, q_idx):
        """Reads a request and a length."""
        return row * self.factor[b] + 0.001 * fa.kv_len(b)

    def key_mod(self, row, b, kv_h, kv_idx):
        """Reads a position."""
        return row + self.part[kv_idx % 2]

    def sink(self, b, h):
        """Reads a request and a head."""
        return self.factor[b] + h


def named_dims(mesh: DeviceMesh) -> None:
    """Params whose dims have any name."""
    batch = Batch((1, 2, 1), (40, 70, 200), (4, 2), 64)
    paged, *whole = in_pages(batch, SIZE)
    own, cache = own_cache(mesh, paged, whole, torch.zeros(3, dtype=int))
    params = {"factor": torch.tensor([0.5, 1.0, 2.0]), "part": torch.tensor([0.1, -0.2])}
    one = fa.BatchAttention(OfRequests(), **batch.options())
    one.plan(batch.q_indptr, paged)
    want = one.run(batch.q, *whole, **params)
    many = fa.BatchAttention(OfRequests(), **batch.options(), mesh=mesh)
    many.plan(batch.q_indptr, own)
    torch.testing.assert_close(many.run(batch.q, *cache, **params), want)
    options = batch.options()
    options.pop("device")
    for way in ("keys", "states"):
        parallel = fa.ContextParallel(OfRequests(), mesh, way=way, **options)
        parallel.plan(batch.q_indptr, batch.storage.kv_indptr)
        shards = (x.chunk(mesh.size())[mesh.get_local_rank()] for x in (batch.q, batch.k, batch.v))
        got = parallel.run(*shards, **params)
        torch.testing.assert_close(got, want.chunk(mesh.size())[mesh.get_local_rank()])


class KeyTable(fa.Variant):
    """Adds a table of keys that runs give, in any dtype."""

    table: torch.Tensor = fa.tensor("entries")

    def score_mod(self, score, b, h, q_idx, kv_idx):
        """Reads the table."""
        return score + self.table[kv_idx]


def _changing() -> list[tuple[Any, list[Any], dict[str, list[torch.Tensor]]]]:
    """Variants, the values that a captured cell takes one after another, and params of the runs."""
    table = torch.randn(70, generator=torch.Generator().manual_seed(4))
    kinds = [table, table.bfloat16(), table.double(), table[:1].expand(70)]
    captured: list[Any] = [table]
    number: list[Any] = [0.5]
    sums = fa.variant(output_mod=lambda row, lse, b, h, q_idx: row + number[0] * captured[0][q_idx])
    return [
        (KeyTable(), captured, {"table": kinds}),
        (fa.variant(score_mod=lambda s, b, h, q, k: s + captured[0][k]), captured, {"": kinds}),
        (sums, number, {"": [0.5, 2, True]}),  # type: ignore[dict-item]
    ]


def kinds(mesh: DeviceMesh, way: str) -> None:
    """Runs whose params and captured values change in dtype or strides after the plan.

    way: of `ContextParallel`, or what a mesh of `BatchAttention` divides.
    """
    batch = Batch((1, 2), (40, 70), (4, 2), 64)
    paged, *whole = in_pages(batch, SIZE)
    own, cache = own_cache(mesh, paged, whole, torch.zeros(2, dtype=int))
    rank, ranks = mesh.get_local_rank(), mesh.size()
    options = batch.options()
    for variant, cell, values in _changing():
        first = cell[0]
        one = fa.BatchAttention(variant, **options)
        one.plan(batch.q_indptr, paged)
        if way.startswith("pages"):
            many = fa.BatchAttention(variant, **options, mesh=mesh, divided=way)
            many.plan(batch.q_indptr, own)
            q = heads_of(mesh, batch.q) if way == "pages_heads" else batch.q
            given = (q, *cache)
        else:
            made = {name: value for name, value in options.items() if name != "device"}
            many = fa.ContextParallel(variant, mesh, way=way, **made)
            many.plan(batch.q_indptr, batch.storage.kv_indptr)
            given = tuple(x.chunk(ranks)[rank] for x in (batch.q, batch.k, batch.v))
        for name, kind in [(n, x) for n, several in values.items() for x in several]:
            cell[0] = first if name else kind
            params = {name: kind} if name else {}
            want = one.run(batch.q, *whole, **params)
            if way == "pages_heads":
                want = heads_of(mesh, want)
            elif way != "pages":
                want = want.chunk(ranks)[rank]
            got = many.run(*given, **params)
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
        cell[0] = first
