"""CPU kernels with feature `indirect`: any combination of pages, key lists and rows of several
requests, against the eager reference in fp64. Memory that must not be read holds NaN.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.spec import host_target
from flashattn_jit.variants.ir.ir import keys_read_request
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.reference import attention_reference
from tests.codegen import cpu_artifact
from tests.codegen.cpu_artifact import Batch
from tests.harness import rotation

NAN = float("nan")
TARGETS = tuple(dict.fromkeys((host_target(), "cpu:generic")))
TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MAX_KV, MAX_Q, MAX_B, MAX_H = 512, 64, 8, 16


# --- variants -------------------------------------------------------------------------------------
# Hooks read tensors by b, h, q and k, so that a row or key taken for another one changes results.

_seeded = torch.Generator().manual_seed(5)
BIAS = torch.randn(MAX_B, MAX_H, MAX_Q, MAX_KV, generator=_seeded)
DOCUMENT = torch.randint(0, 3, (MAX_B, MAX_KV), generator=_seeded, dtype=torch.int32).sort().values
KEY_GAIN = 1 + torch.rand(MAX_H, MAX_KV, generator=_seeded)
ROW_GAIN = 1 + torch.rand(MAX_B, MAX_H, MAX_Q, generator=_seeded)
SINK = torch.randn(MAX_H, generator=_seeded)


def all_hooks() -> fa.Variant:
    """Every hook. Key hooks read no request, so that groups may share keys."""

    class Everything(fa.Variant):
        normalizer = fa.Softmax(sink=lambda b, h: SINK[h] + 0.1 * b)

        def query_mod(self, row, b, h, q_idx):
            return row * ROW_GAIN[b, h, q_idx % MAX_Q]

        def key_mod(self, row, b, kv_h, kv_idx):
            return row * KEY_GAIN[kv_h, kv_idx]

        def value_mod(self, row, b, kv_h, kv_idx):
            return row + 0.25 * KEY_GAIN[kv_h, kv_idx]

        def score_mod(self, score, b, h, q_idx, kv_idx):
            return score + BIAS[b, h, q_idx % MAX_Q, kv_idx]

        def mask_mod(self, b, h, q_idx, kv_idx):
            return (kv_idx <= q_idx) & (kv_idx < fa.kv_len(b))

        def output_mod(self, row, lse, b, h, q_idx):
            return row * ROW_GAIN[b, h, q_idx % MAX_Q] + torch.tanh(lse)

    return Everything()


def documents() -> fa.Variant:
    """A mask whose key part reads b, so that it has a value for each row."""
    return fa.variant(mask_mod=lambda b, h, q, k: DOCUMENT[b, q] == DOCUMENT[b, k])


def pointwise() -> fa.Variant:
    return fa.variant(
        mask_mod=lambda b, h, q, k: k <= q,
        normalizer=fa.Pointwise(
            lambda s: torch.relu(s) ** 2, scale=lambda b, h, q: 1.0 / (1.0 + b + q)
        ),
    )


def text() -> fa.Variant:
    return fa.variant(
        score_mod=fa.cpp("return score + 0.25f * b - 0.01f * (q_idx - kv_idx) * h;"),
        mask_mod=fa.cpp("return (kv_idx + b) % 3 != 0;"),
    )


def text_in_python() -> fa.Variant:
    return fa.variant(
        score_mod=lambda s, b, h, q, k: s + 0.25 * b - 0.01 * (q - k) * h,
        mask_mod=lambda b, h, q, k: (k + b) % 3 != 0,
    )


VARIANTS = {
    "full": fa.Full, "causal": fa.Causal, "window": lambda: fa.SlidingWindow(40),
    "everything": all_hooks, "documents": documents, "pointwise": pointwise, "text": text,
}  # fmt: skip


# --- batches --------------------------------------------------------------------------------------


@dataclass
class World:
    """Requests with dense keys, and the storage and work with which the kernel reads them."""

    q_lens: list[int]
    kv_lens: list[int]
    kv_heads: int = 2
    group: int = 2
    dim: int = 32
    dim_v: int = 32
    dtype: torch.dtype = torch.float32
    page_size: int = 0  # 0: ragged
    key_block: int = 0  # 0: no lists
    shared: int = 0  # first keys that all requests share, read by one group of all rows
    splits: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        g = torch.Generator().manual_seed(self.seed)
        batch, longest = len(self.q_lens), max(self.kv_lens)
        heads = self.kv_heads * self.group
        self.q_dense = torch.randn(batch, heads, max(self.q_lens), self.dim, generator=g)
        self.k_dense = torch.randn(batch, self.kv_heads, longest, self.dim, generator=g)
        self.v_dense = torch.randn(batch, self.kv_heads, longest, self.dim_v, generator=g)
        if self.shared:
            for t in (self.k_dense, self.v_dense):
                t[:, :, : self.shared] = t[:1, :, : self.shared]
        for name in ("q_dense", "k_dense", "v_dense"):
            setattr(self, name, getattr(self, name).to(self.dtype))
        self.offsets = [max(k - q, 0) for q, k in zip(self.q_lens, self.kv_lens, strict=True)]
        # keep[b, kv_h, key]: what lists leave of the keys.
        self.keep = torch.ones(batch, self.kv_heads, longest, dtype=torch.bool)

    # --- storage

    def sources(self) -> list[tuple[int, int, int]]:
        """(first position, end, request that has these dense keys) of each source of keys."""
        own = [(min(self.shared, n), n, b) for b, n in enumerate(self.kv_lens)]
        return own + ([(0, self.shared, 0)] if self.shared else [])

    def store(self) -> dict[str, Any]:
        if self.page_size:
            return self._pages()
        sizes = [end - first for first, end, _ in self.sources()]
        starts, at = [], 3  # unused tokens lie around every request
        for n in sizes:
            starts.append(at)
            at += n + 2
        k = torch.full((at, self.kv_heads, self.dim), NAN, dtype=self.dtype)
        v = torch.full((at, self.kv_heads, self.dim_v), NAN, dtype=self.dtype)
        for (first, end, b), start in zip(self.sources(), starts, strict=True):
            k[start : start + end - first] = self.k_dense[b, :, first:end].transpose(0, 1)
            v[start : start + end - first] = self.v_dense[b, :, first:end].transpose(0, 1)
        slots = [s - f for s, (f, _, _) in zip(starts, self.sources(), strict=True)]
        return {"k": k, "v": v, "kv_row0": starts, "kv_token0": slots}

    def _pages(self) -> dict[str, Any]:
        size = self.page_size
        counts = [-(-(end - first) // size) for first, end, _ in self.sources()]
        total = sum(counts) + 3
        pages = self.random.sample(range(total), sum(counts))
        # K and V are halves of one tensor with heads before slots: layouts are strides only.
        both = torch.full((total, 2, self.kv_heads, size, max(self.dim, self.dim_v)), NAN,
                          dtype=self.dtype)  # fmt: skip
        k = both[:, 0].transpose(1, 2)[..., : self.dim]
        v = both[:, 1].transpose(1, 2)[..., : self.dim_v]
        indptr = [0]
        for (first, end, b), n in zip(self.sources(), counts, strict=True):
            for i in range(end - first):
                page = pages[indptr[-1] + i // size]
                k[page, i % size] = self.k_dense[b, :, first + i]
                v[page, i % size] = self.v_dense[b, :, first + i]
            indptr.append(indptr[-1] + n)
        return {"k": k, "v": v, "page_size": size, "page_indptr": indptr, "page_indices": pages}

    # --- work

    def batch(self) -> Batch:
        store = self.store()
        row0 = [sum(self.q_lens[:b]) for b in range(len(self.q_lens))]
        q = torch.cat([self.q_dense[b, :, :n].transpose(0, 1) for b, n in enumerate(self.q_lens)])
        longest = max(self.q_lens)
        batch = Batch(
            q=q.contiguous(), q_len=[*self.q_lens], kv_len=[end for _, end, _ in self.sources()],
            q_row0=row0, q_offset=[*self.offsets],
            q_token0=[b * longest for b in range(len(self.q_lens))], **store,
        )  # fmt: skip
        if self.shared:
            self._add_group(batch)
        if self.key_block:
            batch.key_blocks, batch.key_block = [], self.key_block
        self._plan(batch)
        return batch

    def _add_group(self, batch: Batch) -> None:
        """Adds a group of the rows of all requests, in random order, which share the first keys."""
        tokens = batch.q.shape[0]
        owner = [b for b, n in enumerate(self.q_lens) for _ in range(n)]
        rows = self.random.sample(range(tokens), tokens)
        batch.row_request = owner
        batch.row_token = [*range(tokens), *rows]
        batch.q_row0 = [*batch.q_row0, tokens]
        batch.q_len = [*batch.q_len, tokens]
        batch.q_offset = [*batch.q_offset, 0]
        batch.q_token0 = [*batch.q_token0, 0]
        batch.kv_first = [first for first, _, _ in self.sources()]

    def _plan(self, batch: Batch) -> None:
        """Adds an item for each source, KV head and split, and the merges of their states."""
        states: dict[tuple[int, int], list[int]] = {}  # (token, kv head) -> partial rows
        split = self.splits > 1 or self.shared > 0
        for i, (first, end, _) in enumerate(self.sources()):
            group_of_rows = i >= len(self.q_lens)
            rows = batch.q_len[i]
            for kv_h in range(self.kv_heads):
                lo, hi = (first, end) if not self.key_block else self._list(batch, i, kv_h)
                cuts = sorted({lo, hi, *(lo + (hi - lo) * s // self.splits
                                         for s in range(1, self.splits))})  # fmt: skip
                cuts = cuts if len(cuts) > 1 else [lo, hi]
                for a, z in itertools.pairwise(cuts):
                    partial = batch.partial_rows if split else -1
                    batch.work.append((i, kv_h * self.group, self.group, 0, rows * self.group,
                                       a, z, partial))  # fmt: skip
                    if not split:
                        continue
                    batch.partial_rows += rows * self.group
                    for r in range(rows):
                        entry = batch.q_row0[i] + r
                        token = batch.row_token[entry] if group_of_rows else entry
                        states.setdefault((token, kv_h), []).append(partial + r * self.group)
        if split:
            batch.merge_sources = []
            for b, n in enumerate(self.q_lens):
                for r in range(n):
                    for kv_h in range(self.kv_heads):
                        from_rows = states[batch.q_row0[b] + r, kv_h]
                        begin = r * self.group
                        batch.merge_work.append(
                            (b, kv_h * self.group, self.group, begin, begin + self.group,
                             len(batch.merge_sources), len(from_rows)))  # fmt: skip
                        batch.merge_sources += from_rows
            batch.merge_work.append((-1, 0, 1, 0, 1, 0, 1))  # padding of either kind
            batch.merge_work.append((0, 0, 1, 0, 1, 0, 0))
        batch.work.insert(1, (-1, 0, 1, 0, 5, 0, 7, -1))

    def _list(self, batch: Batch, i: int, kv_h: int) -> tuple[int, int]:
        """Lists half of a source's blocks in random order, among invalid entries.

        Returns the list's begin and end in positions.
        """
        first, end, b = self.sources()[i]
        block = self.key_block
        blocks = range(first // block, -(-end // block))
        chosen = self.random.sample(blocks, (len(blocks) + 1) // 2)
        owners = range(len(self.q_lens)) if i >= len(self.q_lens) else [b]
        gone = torch.ones(end, dtype=torch.bool)
        for n in chosen:
            gone[n * block : (n + 1) * block] = False
        for owner in owners:
            self.keep[owner, kv_h, first:end] &= ~gone[first:end]
        entries = list(chosen)
        for wrong in (-1, -7, -(-end // block) + 1, 2**31 - 1):
            entries.insert(self.random.randrange(len(entries) + 1), wrong)
        begin = len(batch.key_blocks)
        batch.key_blocks += entries
        return begin * block, (begin + len(entries)) * block

    # --- the answer

    def reference(self, variant: fa.Variant) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out [tokens, Hq, Dv], lse [tokens, Hq]); call it after `batch`, which makes lists."""
        keep, group = self.keep, self.group
        kept = variant & fa.variant(mask_mod=lambda b, h, q, k: keep[b, h // group, k])
        out, lse = attention_reference(
            self.q_dense, self.k_dense, self.v_dense, kept if self.key_block else variant,
            q_offset=torch.tensor(self.offsets), kv_len=torch.tensor(self.kv_lens),
        )  # fmt: skip
        rows = [(b, r) for b, n in enumerate(self.q_lens) for r in range(n)]

        def packed(t: torch.Tensor) -> torch.Tensor:
            return torch.stack([t[b, :, r] for b, r in rows])

        return packed(out), None if lse is None else packed(lse)

    def dims(self) -> Dims:
        heads = self.kv_heads * self.group
        return Dims(len(self.q_lens), heads, self.kv_heads, -1, -1, self.dim, self.dim_v)


def kind_of(world: World) -> str:
    rows = sum(world.q_lens) if world.shared else max(world.q_lens)
    return "few_row" if rows * world.group <= 8 else "prefill"


def check(world: World, variant: fa.Variant, target: str = TARGETS[0], kernel: Any = None,
          kind: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Runs a world and compares its results. kernel: the compiled variant, if not `variant`."""
    bound = (kernel or variant).bind(world.dims())
    lib = cpu_artifact.library(
        bound.ir, kind or kind_of(world), str(world.dtype).removeprefix("torch."),
        (world.dim, world.dim_v), target, ("indirect",),
    )  # fmt: skip
    batch = world.batch()
    if bound.ir.has("pointwise"):
        batch.flags = 0
    out, lse = cpu_artifact.run(lib, batch, bound, num_threads=2)
    expected, expected_lse = world.reference(variant)
    tolerance = TOLERANCE[world.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    if batch.flags:
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=tolerance)
    return out, lse


# --- tests ----------------------------------------------------------------------------------------

FEW = {"q_lens": [1, 2, 1, 4], "kv_lens": [33, 7, 150, 260]}
MANY = {"q_lens": [19, 33, 1, 40], "kv_lens": [200, 33, 150, 61]}
FORMATS = {
    "pages": {"page_size": 16},
    "pages_of_one": {"page_size": 1},
    "lists_1": {"key_block": 1},
    "lists_4": {"key_block": 4, "page_size": 5},
    "lists_64": {"key_block": 64, "page_size": 16},
    "splits": {"page_size": 3, "splits": 3},
    "shared": {"shared": 7},
    "shared_pages": {"shared": 6, "page_size": 4, "splits": 2},
    "shared_lists": {"shared": 5, "page_size": 8, "key_block": 4},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("shapes", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_format_and_variant(name, form, shapes):
    seed = 10 * list(FORMATS).index(form) + list(VARIANTS).index(name)
    world = World(**shapes, **FORMATS[form], seed=seed)
    if name == "text":  # C++ text cannot be composed with the reference's mask of lists
        check(world, text_in_python(), kernel=text())
    else:
        check(world, VARIANTS[name]())


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("target", "dtype"),
    [(t, d) for i, t in enumerate(TARGETS) for d in rotation.turn(i, DTYPES)],
    ids=str,
)
@pytest.mark.parametrize("shapes", [FEW, MANY], ids=["few", "many"])
def test_every_target_and_some_dtype(shapes, dtype, target):
    for i, form in enumerate(("pages", "lists_4", "shared_pages")):
        world = World(**shapes, **FORMATS[form], dtype=dtype, seed=i)
        check(world, fa.Causal(), target)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("dims", [(64, 64), (40, 24), (128, 7)])
@pytest.mark.parametrize("kind", ["few_row", "prefill"])
def test_head_dims(kind, dims):
    shapes = FEW if kind == "few_row" else MANY
    for form in ("pages", "shared_lists"):
        world = World(**shapes, **FORMATS[form], dim=dims[0], dim_v=dims[1], group=3, seed=3)
        check(world, fa.Causal(), kind=kind)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_eight_rows_of_eight_requests_share_keys(group):
    world = World(
        q_lens=[1] * (8 // group), kv_lens=[300 + 9 * i for i in range(8 // group)], group=group,
        shared=280, page_size=16, seed=group,
    )  # fmt: skip
    assert kind_of(world) == "few_row"
    check(world, documents())
    check(replace(world), all_hooks())


@pytest.mark.parametrize("kind", ["few_row", "prefill"])
def test_pages_are_bit_for_bit_ragged(kind):
    shapes = FEW if kind == "few_row" else MANY
    results = []
    for page_size in (0, 1, 16, 64):
        world = World(**shapes, dim=64, dim_v=64, page_size=page_size, seed=4)
        bound = fa.SlidingWindow(70).bind(world.dims())
        features = ((), ("indirect",)) if page_size == 0 else (("indirect",),)
        for feature in features:
            lib = cpu_artifact.library(bound.ir, kind, "float32", (64, 64), TARGETS[0], feature)
            results.append(cpu_artifact.run(lib, world.batch(), bound))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def by_slot(slot: Any, gain: torch.Tensor) -> fa.Variant:
    return fa.variant(
        score_mod=lambda s, b, h, q, k: s * gain[slot(b, k)],
        mask_mod=lambda b, h, q, k: gain[slot(b, k)] > 1.3,
        key_mod=lambda row, b, h, k: row * gain[slot(b, k)],
    )


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("form", [{"page_size": 5}, {"page_size": 5, "shared": 6}, {"shared": 6}],
                         ids=["pages", "shared_pages", "shared"])  # fmt: skip
def test_slots(form):
    """`fa.kv_slot` is the slot of a key in scores, masks and key hooks, per lane and uniform."""
    for shapes, kind in ((FEW, "few_row"), (MANY, "prefill")):
        world = World(**shapes, **form, seed=8)
        slots = torch.zeros(len(world.q_lens), max(world.kv_lens), dtype=torch.int64)
        batch = World(**shapes, **form, seed=8).batch()
        for i, (first, end, b) in enumerate(world.sources()):
            owners = [b] if i < len(world.q_lens) else range(len(world.q_lens))
            for j in range(first, end):
                if world.page_size:
                    page = batch.page_indices[batch.page_indptr[i] + (j - first) // 5]
                    slot = page * 5 + (j - first) % 5
                else:
                    slot = batch.kv_row0[i] + j - first
                for owner in owners:
                    slots[owner, j] = slot
        gain = 1 + torch.rand(int(slots.max()) + 1, generator=torch.Generator().manual_seed(1))
        kernel = by_slot(fa.kv_slot, gain)
        check(world, by_slot(lambda b, k, t=slots: t[b, k], gain), kernel=kernel, kind=kind)


def test_page_numbers_out_of_range_are_no_addresses():
    """An invalid page number reads no memory outside of the cache; the mask hides its keys here."""
    for shapes, kind in ((FEW, "few_row"), (MANY, "prefill")):
        world = World(**shapes, page_size=4, seed=2)
        hidden = fa.variant(mask_mod=lambda b, h, q, k: k >= 8)
        bound = hidden.bind(world.dims())
        lib = cpu_artifact.library(bound.ir, kind, "float32", (32, 32), TARGETS[0], ("indirect",))
        batch = world.batch()
        expected, _ = world.reference(hidden)
        batch.v = batch.v.nan_to_num(0.0)  # weights of 0 times what page 0 holds
        for b, wrong in enumerate((-1, 2**31 - 1, -(2**31), batch.k.shape[0])):
            batch.page_indices[batch.page_indptr[b]] = wrong
        out, _ = cpu_artifact.run(lib, batch, bound)
        torch.testing.assert_close(out.double(), expected, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("features", [(), ("indirect",)], ids=["direct", "indirect"])
def test_lists_of_workers(features):
    """Every item is computed once, whatever the number of threads and calls for a list."""
    world = World(q_lens=[3] * 8, kv_lens=[40 + 13 * i for i in range(8)], splits=3, seed=6)
    bound = fa.Causal().bind(world.dims())
    lib = cpu_artifact.library(bound.ir, "few_row", "float32", (32, 32), TARGETS[0], features)
    batch = world.batch()
    n = len(batch.work)
    batch.worker_indptr = [0, 0, n // 2, n // 2 + 1, n]

    out, lse = cpu_artifact.run(lib, batch, bound, num_threads=2)
    expected, expected_lse = world.reference(fa.Causal())
    torch.testing.assert_close(out.double(), expected, rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=3e-5, atol=3e-5)
    plain = replace(batch, worker_indptr=None)
    again, _ = cpu_artifact.run(lib, plain, bound)
    assert torch.equal(out, again)


def test_unfinished_states():
    """FAJIT_PARTIAL with rows of several requests gives fp32 states, before sink and output_mod."""
    world = World(**FEW, shared=5, page_size=4, seed=9)
    bound = all_hooks().bind(world.dims())
    lib = cpu_artifact.library(bound.ir, "few_row", "float32", (32, 32), TARGETS[0], ("indirect",))
    batch = world.batch()
    batch.flags |= cpu_artifact.PARTIAL
    out, lse = cpu_artifact.run(lib, batch, bound)
    expected, expected_lse = attention_reference(
        world.q_dense, world.k_dense, world.v_dense, all_hooks(), partial=True,
        q_offset=torch.tensor(world.offsets), kv_len=torch.tensor(world.kv_lens),
    )  # fmt: skip
    at = 0
    for b, n in enumerate(world.q_lens):
        for r in range(n):
            torch.testing.assert_close(out[at].double(), expected[b, :, r], rtol=3e-5, atol=3e-5)
            torch.testing.assert_close(
                lse[at].double(), expected_lse[b, :, r], rtol=3e-5, atol=3e-5
            )
            at += 1


def test_what_keys_read_can_be_asked():
    dims = Dims(4, 4, 2, -1, -1, 32, 32)
    assert not keys_read_request(all_hooks().bind(dims).ir)
    by_request = fa.variant(key_mod=lambda row, b, h, k: row * DOCUMENT[b, k])
    by_length = fa.variant(value_mod=lambda row, b, h, k: row * fa.kv_len(b))
    assert keys_read_request(by_request.bind(dims).ir)
    assert keys_read_request(by_length.bind(dims).ir)
