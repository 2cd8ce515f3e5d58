"""The PTX of CUDA kernels in the emulator: lists at reduced sizes, formats with some variants.

Each variant has one target, so that few kernels are compiled; tests/full has all combinations.
"""

from __future__ import annotations

import zlib

import pytest
import torch

import flashattn_jit as fa
from tests.batch.batches import Batch, share_prefix
from tests.batch.formats import FORMATS, run_format
from tests.batch.lists import ENTRIES, Entry
from tests.batch.oracle import Math, check
from tests.batch.runs import attend, engine
from tests.harness import rotation
from tests.harness.toolkit import needs_nvcc
from tests.registry.case import Shape
from tests.registry.cases import by_name

pytestmark = needs_nvcc

TARGETS = tuple(f"emulated:sm_{n}" for n in (80, 75, 90, 100, 120))
SM80 = TARGETS[0]
FEW = Shape(2, 4, 2, 3, 90, 64, 64)
MANY = Shape(2, 4, 2, 21, 90, 64, 64)


def target_of(name: str) -> str:
    """The target of all batches of a variant."""
    return TARGETS[zlib.crc32(name.encode()) % len(TARGETS)]


def dtype_of(target: str) -> torch.dtype:
    return torch.float16 if target.endswith("75") else torch.bfloat16


def reduced(entry: Entry) -> None:
    """Runs a list's entry at reduced size and compares."""
    target = target_of(entry.what.name)
    small = entry.reduced(dtype_of(target))
    batch = small.batch()
    check(batch, small.what, *attend(batch, small.what.variant(batch.heads[0]), target=target))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("entry", rotation.chosen(ENTRIES, 12), ids=lambda e: e.name)
def test_lists_at_reduced_sizes(entry: Entry) -> None:
    reduced(entry)


CASES = {
    "ragged": "qk_norm", "paged": "document", "block_sparse": "alibi",
    "block_sparse_bits": "soft_cap", "token_sparse": "rope", "tree": "gated_output_packed",
    "cascade": "sink", "bits": "sigmoid",
}  # fmt: skip
"""A library variant for each format; together they have every hook."""


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", rotation.chosen(list(FORMATS), 2))
def test_formats(name: str) -> None:
    case, target = by_name(CASES[name]), TARGETS[list(FORMATS).index(name) % len(TARGETS)]
    shape = FEW if name == "token_sparse" or list(FORMATS).index(name) % 2 else MANY
    run_format(case, shape, name, dtype_of(target), target)


@pytest.mark.parametrize("page_size", [1, 3, 7, 64, 4099])
def test_pages_of_any_size(page_size: int) -> None:
    what = Math(causal=True)
    batch = Batch((1, 2, 1), (200, 67, 5000), (4, 2), 64, torch.bfloat16, page_size)
    check(batch, what, *attend(batch, what.variant(4), target=SM80))


def test_pointwise_states_merge_on_the_target_with_its_own_ptx_for_it() -> None:
    """The merge of pointwise states is the one PTX that sm_89 does not share: see
    `tests.cuda.kernels.twin`."""
    run_format(by_name("sigmoid"), FEW, "cascade", torch.bfloat16, "emulated:sm_89")


@pytest.mark.parametrize("q_len", [1, 20])
def test_a_cascade_is_the_flat_batch(q_len: int) -> None:
    what = Math(causal=True)
    batch = Batch((q_len, 1, q_len), (96, 70, 85), (4, 2), 64, torch.bfloat16, 16)
    flat = check(batch, what, *attend(batch, what.variant(4), target=SM80))
    share_prefix(batch, 64)
    made = fa.CascadeAttention(what.variant(4), **batch.options(), target=SM80)
    made.plan(fa.cascade_levels(batch.q_indptr, batch.storage))
    composed = check(batch, what, *made.run(batch.q, batch.k, batch.v, return_lse=True))
    assert composed.ours <= 1.5 * max(flat.ours, flat.eager)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("q_len", "kv_len"), [((), ()), ((0,), (5,)), ((3,), (0,))], ids=str)
@pytest.mark.parametrize("page_size", [0, 16])
def test_batches_of_nothing_within_limits(q_len, kv_len, page_size: int) -> None:
    """All of the plan's work is padding, and tensors may have no address."""
    limits = fa.Limits(max_requests=2, max_q_tokens=8, max_kv_len=64, max_pages=8)
    batch = Batch(q_len, kv_len, (4, 2), 64, torch.bfloat16, page_size)
    made = engine(batch, fa.Causal(), limits=limits, target=SM80)
    nothing = fa.TokenSparse(torch.full((sum(q_len), 5), -1, dtype=torch.int32))
    for sparsity in (None, nothing):
        made.plan(batch.q_indptr, batch.storage, sparsity=sparsity)
        out, lse = made.run(batch.q, batch.k, batch.v, return_lse=True)
        assert (out == 0).all() and (lse == -torch.inf).all() and len(lse) == sum(q_len)


def test_bits_do_not_depend_on_the_batch() -> None:
    """Requests longer than a split of batch-invariant plans, alone and among others."""

    def outs(members: tuple[int, ...]) -> list[torch.Tensor]:
        lengths = [(1, 2500), (3, 70), (1, 2049)]
        batch = Batch(*zip(*(lengths[b] for b in members), strict=True), (2, 1), 64,
                      torch.bfloat16, 16)  # fmt: skip
        for i, b in enumerate(members):
            generator = torch.Generator().manual_seed(b)
            q_len, kv_len = lengths[b]
            for cache in (batch.k, batch.v):
                rows = torch.randn(kv_len, 1, 64, generator=generator)
                cache[batch.index(i)] = rows.bfloat16()
            begin = batch.q_start[i]
            batch.q[begin : begin + q_len] = torch.randn(q_len, 2, 64, generator=generator)
        made = engine(batch, fa.Causal(), batch_invariant=True, target=SM80)
        made.plan(batch.q_indptr, batch.storage)
        return list(made.run(batch.q, batch.k, batch.v).split(list(batch.q_len)))

    whole = outs((0, 1, 2))
    for members in ((2, 0, 1), (2,), (0,)):
        for got, b in zip(outs(members), members, strict=True):
            assert torch.equal(got, whole[b])
