"""One batch through `fa.BatchAttention`, as the tests of this folder call it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import flashattn_jit as fa
from tests.batch.batches import Batch


def engine(batch: Batch, variant: Any, **options: Any) -> fa.BatchAttention:
    """A BatchAttention for batches of these heads, head dims and dtype."""
    return fa.BatchAttention(variant, **{**batch.options(), **options})


def attend(
    batch: Batch, variant: Any, *, target: str | None = None, params: Any = None, **planned: Any
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one plan and run; `planned` goes to plan(), `params` to run()."""
    made = engine(batch, variant, target=target)
    made.plan(batch.q_indptr, batch.storage, **planned)
    result: tuple[Tensor, Tensor] = made.run(
        batch.q, batch.k, batch.v, return_lse=True, **(params or {})
    )
    return result
