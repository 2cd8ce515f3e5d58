"""The parameter lists at reduced sizes, on the PTX of the CUDA kernels; targets take turns."""

from __future__ import annotations

import pytest
import torch

from flashattn_jit.jit.cuda_toolkit import find_toolkit
from tests.batch.lists import ENTRIES, Entry
from tests.batch.oracle import check
from tests.batch.runs import attend

pytest.importorskip("flashattn_jit._emulator")
pytestmark = pytest.mark.skipif(find_toolkit() is None, reason="needs nvcc")

TARGETS = tuple(f"emulated:sm_{n}" for n in (80, 75, 90, 100, 120))
EVERY = 2
"""One in so many entries is run; each list gives every one of its kinds of batch."""


@pytest.mark.parametrize("entry", ENTRIES[::EVERY], ids=lambda e: e.name)
def test_reduced(entry: Entry) -> None:
    target = TARGETS[ENTRIES.index(entry) // EVERY % len(TARGETS)]
    small = entry.reduced(torch.float16 if target.endswith("75") else torch.bfloat16)
    batch = small.batch()
    check(batch, small.what, *attend(batch, small.what.variant(batch.heads[0]), target=target))
