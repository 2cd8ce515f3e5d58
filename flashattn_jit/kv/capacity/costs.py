"""What it takes to compute a page of keys and values again, for eviction by cost.

The planner's costs (`planner/tiles.py`) are those of an attention kernel, traced and chosen, on one
machine, and know nothing of the linear layers, which are most of the work up to six times the
model's width in keys; so multiply-adds of both are counted here.
"""

from __future__ import annotations

from ..spec import Group

_FLOPS_PER_NS = 100.0
"""A machine's rate. Only ratios of costs decide, so that it need not be this machine's."""

_MODEL_WIDTH_PER_HEAD_DIM = 1.0
_LINEAR_FLOPS_PER_WEIGHT = 2.0
_WEIGHTS_PER_WIDTH_SQUARED = 12.0
"""Weights of a decoder layer over the square of its width: 4 of attention, 8 of the MLP."""


def recompute_ns(group: Group, page_size: int, position: int) -> float:
    """Nanoseconds to compute the last page before `position` again, with all its layers.

    The linear layers cost the same at every position; attention costs 2 * (head_dim + head_dim_v)
    a key and head, for all keys before the page.
    """
    assert group.num_q_heads is not None and group.head_dim_v is not None
    # Absorbed rows are wider than the heads of the model, which its rotary part is about half of.
    head_dim = 2 * group.part_dims[1] if group.v_in_k else group.head_dim
    width = group.num_q_heads * head_dim * _MODEL_WIDTH_PER_HEAD_DIM
    linear = _LINEAR_FLOPS_PER_WEIGHT * _WEIGHTS_PER_WIDTH_SQUARED * width * width
    attention = 2.0 * group.num_q_heads * (group.head_dim + group.head_dim_v) * position
    return len(group.layers) * page_size * (linear + attention) / _FLOPS_PER_NS
