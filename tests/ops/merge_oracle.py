"""The merge of partial states, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_reference(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) of partial softmax states over disjoint keys: weights exp(lse_i - lse)."""
    all_lses = torch.stack(list(lses))
    lse = all_lses.logsumexp(0)
    weights = (all_lses - lse).exp().nan_to_num(0.0)
    return (weights[..., None] * torch.stack(list(outs))).sum(0), lse
