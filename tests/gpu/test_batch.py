"""plan() and run() on the device: the parameter lists at full size, formats, graphs."""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from tests.batch.batches import Batch, level_of, share_prefix
from tests.batch.formats import FORMATS, run_format
from tests.batch.lists import ENTRIES, Entry
from tests.batch.oracle import Math, check
from tests.batch.runs import attend, engine
from tests.batch.sparse import blocks, tokens, trees
from tests.gpu.harness import Want
from tests.gpu.place import DEVICE, TARGET, needs_gpu
from tests.registry.case import Case, Shape
from tests.registry.cases import CASES

BF16 = torch.bfloat16
CAUSAL = Math(causal=True)
MOST_FEW_ROWS = 16
LIBRARY = [c for c in CASES if "library" in c.tags]
SHAPES = (Shape(2, 4, 2, 3, 130, 64, 64), Shape(2, 4, 2, 70, 130, 64, 64))


def _wants() -> dict[Want, None]:
    """The kernels of the lists, which are compiled in parallel before the tests."""
    wants = {}
    for entry in ENTRIES:
        group = entry.heads[0] // entry.heads[1]
        rows = {(1 if n * group <= MOST_FEW_ROWS else n * group) for n in entry.q_len if n}
        features = ("paged",) if entry.page_size else ()
        for packed in rows:
            shape = Shape(1, 1, 1, packed, 64, entry.dim, entry.dim)
            wants[Want(entry.what.name, shape, BF16, features)] = None
    for what in GRAPH:  # which run on a GPU alone
        for rows in (1, 128):
            wants[Want(what.name, Shape(1, 1, 1, rows, 64, 128, 128), BF16, ("paged",))] = None
    return wants


GRAPH = (CAUSAL, Math(window=200, sink=True))
WANTS = tuple(_wants())


def on_device(what: Math, heads: int) -> fa.Variant | None:
    return what.variant(heads, DEVICE)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_lists_at_full_size(entry: Entry) -> None:
    entry = entry.half()
    batch = entry.batch(DEVICE)
    out, lse = attend(batch, on_device(entry.what, batch.heads[0]), target=TARGET)
    check(batch, entry.what, out, lse)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=["few rows", "many rows"])
def test_formats(name: str, shape: Shape) -> None:
    """Each format with every ninth library variant, starting at different variants."""
    first = 2 * list(FORMATS).index(name) + SHAPES.index(shape)
    for case in LIBRARY[first % 9 :: 9]:
        if case.fits(shape):
            run_format(case, shape, name, BF16, TARGET, DEVICE)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("kind", ["blocks", "blocks of heads", "tokens", "tree"])
def test_sparsity(kind: str, page_size: int) -> None:
    batch = Batch((33, 1, 0, 7, 20), (700, 2000, 40, 7, 65), (16, 4), 128, BF16, page_size,
                  device=DEVICE)  # fmt: skip
    visited = {
        "blocks": lambda: blocks(batch, (16, 16), 0.3),
        "blocks of heads": lambda: blocks(batch, (4, 1), 0.3, per_head=True, bits=True),
        "tokens": lambda: tokens(batch, 64, per_head=True),
        "tree": lambda: trees(batch),
    }[kind]()
    out, lse = attend(batch, on_device(CAUSAL, 16), target=TARGET, sparsity=visited.on(DEVICE))
    check(batch, CAUSAL, out, lse, seen=visited.seen)


@pytest.mark.parametrize("q_len", [1, 17])
def test_cascades(q_len: int) -> None:
    batch = Batch((q_len,) * 12, (2048 + 37,) * 12, (32, 8), 128, BF16, 16, device=DEVICE)
    share_prefix(batch, 2048)
    made = fa.CascadeAttention(on_device(CAUSAL, 32), **batch.options(), target=TARGET)
    explicit = [
        fa.CascadeLevel(*level_of(batch, 0, 2048, [range(12)])),
        fa.CascadeLevel(*level_of(batch, 2048, -1, [[b] for b in range(12)])),
    ]
    for levels in (explicit, fa.cascade_levels(batch.q_indptr, batch.storage)):
        made.plan(levels)
        out, lse = made.run(batch.q, batch.k, batch.v, return_lse=True)
        check(batch, CAUSAL, out, lse)


def test_two_variants_share_a_workspace() -> None:
    space = torch.full((1 << 26,), 255, dtype=torch.uint8, device=DEVICE)
    batch = Batch((1, 40, 3), (9000, 700, 4000), (32, 8), 128, BF16, 16, device=DEVICE)
    maths = (CAUSAL, Math(window=300))
    made = [engine(batch, on_device(m, 32), workspace=space, target=TARGET) for m in maths]
    for each in made:
        each.plan(batch.q_indptr, batch.storage)
    for _ in range(2):
        for each, what in zip(made, maths, strict=True):
            check(batch, what, *each.run(batch.q, batch.k, batch.v, return_lse=True))


def test_batch_invariance() -> None:
    def results(members: list[int]) -> list[torch.Tensor]:
        lengths = [(1, 9000), (200, 300), (3, 8192), (1, 4095)]
        rows = [torch.randn(q, 32, 128, generator=torch.Generator().manual_seed(b))
                for b, (q, _) in enumerate(lengths)]  # fmt: skip
        part = Batch(*zip(*(lengths[b] for b in members), strict=True), (32, 8), 128, BF16, 16,
                     device=DEVICE)  # fmt: skip
        for i, b in enumerate(members):
            keys = torch.randn(2, lengths[b][1], 8, 128, generator=torch.Generator().manual_seed(9))
            at = part.slots[i].to(DEVICE)
            part.k[at // 16, at % 16], part.v[at // 16, at % 16] = keys.to(BF16).to(DEVICE)
            begin = part.q_start[i]
            part.q[begin : begin + part.q_len[i]] = rows[b].to(BF16).to(DEVICE)
        made = engine(part, fa.Causal(), batch_invariant=True, target=TARGET)
        made.plan(part.q_indptr, part.storage)
        return list(made.run(part.q, part.k, part.v).split(list(part.q_len)))

    whole = results([0, 1, 2, 3])
    for members in ([3, 1, 0, 2], [0], [2, 3]):
        for got, b in zip(results(members), members, strict=True):
            assert torch.equal(got, whole[b])


@needs_gpu
@pytest.mark.parametrize("what", GRAPH, ids=["causal", "window"])
def test_one_graph_replays_every_plan_within_the_limits(what: Math) -> None:
    """The graph is captured with one batch and replayed with other lengths and batch sizes."""
    limits = fa.Limits(max_requests=16, max_q_tokens=300, max_kv_len=6000, max_pages=2000)
    heads, dim = (32, 8), 128
    made = fa.BatchAttention(
        on_device(what, heads[0]), num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=dim,
        q_dtype=BF16, device=DEVICE, limits=limits, cuda_graph=True,
    )  # fmt: skip
    k = torch.full((2100, 16, heads[1], dim), torch.nan, dtype=BF16, device=DEVICE)
    v, q = k.clone(), torch.zeros(300, heads[0], dim, dtype=BF16, device=DEVICE)
    batches = [
        Batch(q_len, kv_len, heads, dim, BF16, 16, seed=i, device=DEVICE)
        for i, (q_len, kv_len) in enumerate((
            ((1,) * 4, (2500, 1, 700, 30)), ((1, 130, 5, 0), (1900, 130, 333, 12)),
            ((1,) * 16, (1500,) * 16), ((1,), (6000,)), ((300,), (300,)), ((), ()),
        ))
    ]  # fmt: skip

    def place(batch: Batch) -> None:
        k.fill_(torch.nan), v.fill_(torch.nan), q.zero_()
        k[: len(batch.k)], v[: len(batch.v)] = batch.k, batch.v
        q[: len(batch.q)] = batch.q
        # The captured call has as many rows as the limits allow; rows past the batch are unused.
        made.plan(batch.q_indptr, batch.storage)

    place(batches[0])
    made.run(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = made.run(q, k, v, return_lse=True)
    for batch in (*batches, *reversed(batches)):
        place(batch)
        graph.replay()
        torch.cuda.synchronize()
        rows = len(batch.q)
        check(batch, what, out[:rows], lse[:rows])


def test_case_names_are_known() -> None:
    """The prewarm step finds each kernel by its case's name."""
    from tests.gpu.harness import case_named

    assert all(isinstance(case_named(want.case), Case) for want in WANTS)
