"""Batches beyond those of the default run: every registered variant in every format, more products
of the parameter lists, all lists on every CPU target, and at reduced sizes on emulated targets.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.batch.formats import FORMATS, run_format
from tests.batch.lists import ENTRIES, Entry
from tests.batch.oracle import Math, check
from tests.batch.runs import attend
from tests.batch.test_emulated import FEW, MANY, TARGETS, dtype_of
from tests.harness.toolkit import needs_nvcc
from tests.ops.cases import DECODE, HOST_TARGETS, SMALL, fitting
from tests.registry.case import Case
from tests.registry.cases import CASES

FEW_ROWS = DECODE._replace(q_len=3)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_variant_and_format(case: Case, dtype: torch.dtype) -> None:
    for name in FORMATS:
        run_format(case, fitting(case, SMALL), name, dtype)
        if case.fits(FEW_ROWS):
            run_format(case, FEW_ROWS, name, dtype)


PRODUCT = [
    Entry(
        f"b{count} q{q_len} kv{kv_len} p{page} h{q_heads} d{dim} {what.name}", what,
        (q_len,) * count, (kv_len,) * count, (q_heads, 4), dim, page,
    )
    for count, q_len, kv_len, page, q_heads, dim, what in itertools.product(
        (12, 17), (37, 17, 127, 577), (54, 97, 512, 2048), (1, 5, 16), (4, 32), (64, 128),
        (Math(), Math(causal=True), Math(causal=True, rope=True)),
    )
]  # fmt: skip


@pytest.mark.parametrize("entry", PRODUCT, ids=lambda e: e.name)
def test_product_of_the_prefill_list(entry: Entry) -> None:
    batch = entry.batch()
    check(batch, entry.what, *attend(batch, entry.what.variant(batch.heads[0])))


@pytest.mark.parametrize("target", HOST_TARGETS)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_lists_at_full_size(entry: Entry, target: str) -> None:
    batch = entry.batch()
    check(batch, entry.what, *attend(batch, entry.what.variant(batch.heads[0]), target=target))


@needs_nvcc
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_lists_at_reduced_sizes(entry: Entry, target: str) -> None:
    small = entry.reduced(dtype_of(target))
    batch = small.batch()
    check(batch, small.what, *attend(batch, small.what.variant(batch.heads[0]), target=target))


@needs_nvcc
@pytest.mark.parametrize("case", [c for c in CASES if "library" in c.tags], ids=lambda c: c.name)
def test_emulated_variant_and_format(case: Case) -> None:
    for i, name in enumerate(FORMATS):
        target = TARGETS[(CASES.index(case) + i) % len(TARGETS)]
        for shape in (FEW, MANY):
            if case.fits(shape):
                run_format(case, shape, name, dtype_of(target), target)
