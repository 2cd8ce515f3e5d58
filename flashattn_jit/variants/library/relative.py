"""Biases by relative position: T5's buckets, and one value for each distance."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from flashattn_jit.errors import VariantError
from flashattn_jit.torch_modes import outside_modes
from flashattn_jit.variants.library.limits import limited
from flashattn_jit.variants.library.made_classes import made_class
from flashattn_jit.variants.variant import Variant, scalar, tensor


def t5_buckets(
    distances: Tensor, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> Tensor:
    """T5's bucket of each relative position ``j - i``: int32, in the shape of `distances`.

    Bidirectional: half of the buckets for keys behind (and i itself), half for keys ahead;
    else all for keys behind, and keys ahead fall in bucket 0. Of a side's n buckets the first
    n // 2 are one distance each, the others grow logarithmically up to `max_distance`; farther keys
    are in the last. float32 logarithms, as the published code: the boundaries are the same.
    Raffel et al. 2020, "Exploring the Limits of Transfer Learning", section 2.1.
    """
    behind = -distances.to(torch.int64)
    first = torch.zeros_like(behind)
    if bidirectional:
        num_buckets //= 2
        first = (behind < 0) * num_buckets
        behind = behind.abs()
    behind = behind.clamp(min=0)
    exact = num_buckets // 2
    growth = torch.log(behind.float() / exact) / math.log(max_distance / exact)
    # `where` drops the log of 0, but it is clamped before: inf has no integer.
    grown = exact + (growth.clamp(min=0) * (num_buckets - exact)).to(torch.int64)
    grown = grown.clamp(max=num_buckets - 1)
    return (first + torch.where(behind < exact, behind, grown)).to(torch.int32)


class BucketBias(Variant):
    """``s + table[bucket_of[clamp(j - i + reach, 0, 2 reach)], h]``; `RelativeBias` makes it.

    table: float tensor ``[num_buckets, num_q_heads]``. bucket_of: int tensor ``[distances]`` of
    ``2 * reach + 1`` entries, the bucket of distances -reach .. reach; reach: runtime int.
    """

    table: Tensor = tensor("num_buckets", "num_q_heads")
    bucket_of: Tensor = tensor("distances")
    reach: int = scalar()

    def score_mod(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        """The formula of the class."""
        # [num_q_heads, distances], contiguous per head. It depends on params alone, so the prelude
        # computes it once: a pair needs one read and no logarithm.
        by_distance = self.table[self.bucket_of].t().contiguous()
        distance = torch.clamp(kv_idx - q_idx, min=-self.reach, max=self.reach)
        return score + by_distance[h, distance + self.reach]


def RelativeBias(
    table: Tensor | None = None,
    *,
    bidirectional: bool = True,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> Variant:
    """T5's relative bias: ``s + table[bucket(j - i), h]``, see `t5_buckets`.

    table: float tensor ``[num_buckets, num_q_heads]`` (the weight of T5's
    `relative_attention_bias`), here or at the call as ``table=``. The other arguments are the
    checkpoint's. T5 does not scale its scores: pass ``scale=1.0``.
    T5, mT5, Flan-T5, UMT5, LongT5, Switch, UDOP (bidirectional=False in decoders).

    >>> fa.attention(q, k, v, fa.RelativeBias(), scale=1.0, table=weight)
    """
    per_side = num_buckets // 2 if bidirectional else num_buckets
    if per_side < 2 or num_buckets % 2 or max_distance <= per_side // 2:
        raise VariantError(
            "expected an even num_buckets with at least 2 a side and max_distance over a quarter "
            f"of them (half if not bidirectional), got num_buckets={num_buckets}, "
            f"max_distance={max_distance}, bidirectional={bidirectional}"
        )
    made = made_class("RelativeBias", _relative_bias, num_buckets, max_distance, bidirectional)
    return made() if table is None else made(table=table)


def _relative_bias(num_buckets: int, max_distance: int, bidirectional: bool) -> type[BucketBias]:
    return _bucket_bias(num_buckets, max_distance, bidirectional)


@functools.lru_cache(maxsize=64)
def _bucket_bias(num_buckets: int, max_distance: int, bidirectional: bool) -> type[BucketBias]:
    # At max_distance and beyond every distance is in the last bucket of its side.
    with outside_modes():  # kept with the class
        distances = torch.arange(-max_distance, max_distance + 1, device="cpu")
        buckets = t5_buckets(distances, num_buckets, max_distance, bidirectional)

    class RelativeBias(BucketBias):
        __doc__ = BucketBias.__doc__
        table: Tensor = tensor(num_buckets, "num_q_heads")
        bucket_of: Tensor = tensor("distances", default=lambda dims: buckets.to(dims.device))
        reach: int = scalar(max_distance)

    RelativeBias.__fajit_made_by__ = (_bucket_bias, num_buckets, max_distance, bidirectional)
    return RelativeBias


class RelativeTable(Variant):
    """``s + table[h, clamp(j - i, -reach, reach) + reach]``: one learned value for each distance.

    table: float tensor ``[num_q_heads, distances]`` with ``2 * reach + 1`` distances, from -reach
    (keys behind) to reach (keys ahead). reach: runtime int, at least 0; farther keys take the last
    value.
    Shaw et al. 2018 (as a bias), Transformer-XL's and BEiT's tables in one dimension, Music
    Transformer, Seamless.
    """

    table: Tensor = tensor("num_q_heads", "distances")
    reach: int = limited(0, "a table of n distances reaches (n - 1) // 2")

    def score_mod(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        """The formula of the class."""
        distance = torch.clamp(kv_idx - q_idx, min=-self.reach, max=self.reach)
        return score + self.table[h, distance + self.reach]
