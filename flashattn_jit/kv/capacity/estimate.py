"""`fa.kv.estimate`: what a cache holds and what a decode step reads, in bytes and in FLOP."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from typing import Any

import torch

from ...errors import InputError, ParamError
from ...formats import KvFormat
from ...late_binding import upper
from ...ops.arguments.checks import INT32_MAX, check_int
from ..reclaim import MaskPages
from ..spec import Group, Spec
from .families import Expanded, has_encoder, read_expanded
from .pages_left import pages_left

MOST_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class GroupEstimate:
    """A group's share of an `Estimate`, for one sequence unless it says otherwise.

    kind: "MHA", "GQA", "MQA" or "MLA", and the variant; or "tail". row_bytes: of a token in one
    layer, with scales. pages: the most that it names on the way to kv_len. keys: that the newest
    query reads, in one layer. decode_flops: of these keys, in all layers: multiply-adds of scores
    and values.
    """

    kind: str
    num_layers: int
    row_bytes: int
    page_bytes: int
    pages: int
    keys: int
    decode_flops: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers of the group."""
        return self.num_layers * self.row_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages."""
        return self.pages * self.page_bytes

    @property
    def decode_bytes(self) -> int:
        """Bytes of the keys and values that one new token reads; of latent rows once."""
        return self.keys * self.token_bytes


@dataclass(frozen=True, slots=True)
class Absorption:
    """What latent attention costs in one layer in its two forms, in FLOP.

    Expanded, a call multiplies kv_len latents by the weights of all heads' keys and values, and
    attends with narrow heads. Absorbed, it multiplies its queries and outputs by the same weights,
    and attends with rows as wide as the latent.

    break_even_q_len: the fewest new tokens of a sequence of kv_len for which the expanded form
    takes no more FLOP; None where it never does. expanded_token_bytes: of a token's expanded keys
    and values, in one layer and the cache's dtype.
    """

    sizes: Expanded
    kv_len: int
    break_even_q_len: int | None
    expanded_token_bytes: int

    def flops(self, q_len: int, absorbed: bool) -> int:
        """FLOP of the newest q_len tokens of a causal sequence."""
        return _mla_flops(self.sizes, q_len, self.kv_len, absorbed)


@dataclass(frozen=True)
class Estimate:
    """What sequences of one length need; `estimate` makes it.

    groups: of the `stores` of `spec` first, which are its groups and their tails, then of `cross`:
    an encoder's tokens, of which a sequence has cross_len. batch: sequences. dtype, page_size: of
    the cache. max_batch: the most sequences that budget_bytes hold; None without a budget.
    absorption: of latent attention.
    """

    spec: Spec
    cross: Spec | None
    groups: tuple[GroupEstimate, ...]
    kv_len: int
    cross_len: int
    batch: int
    budget_bytes: int | None
    absorption: Absorption | None
    config: Any = field(repr=False)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers that store the sequence's own keys."""
        return sum(g.token_bytes for g in self.groups[: len(self.spec.groups)])

    @property
    def sequence_bytes(self) -> int:
        """Bytes of one sequence, whole pages."""
        return sum(g.held_bytes for g in self.groups)

    @property
    def held_bytes(self) -> int:
        """Bytes of all sequences."""
        return self.batch * self.sequence_bytes

    @property
    def cache_bytes(self) -> int:
        """What caches that hold just these sequences allocate: with a null page for each group."""
        return self.held_bytes + sum(g.page_bytes for g in self.groups)

    @property
    def num_pages(self) -> tuple[int, ...]:
        """The pages of each of the `stores` of `spec` in such a cache, as for `fa.kv.Cache`."""
        return tuple(self.batch * g.pages for g in self.groups[: len(self.spec.stores)])

    @property
    def rounding_bytes(self) -> int:
        """Bytes of `held_bytes` in slots behind the last token of a sequence."""
        specs = [(self.spec, self.kv_len)]
        specs += [] if self.cross is None else [(self.cross, self.cross_len)]
        slots = [_unused_slots(s, n, length) for s, length in specs for n in range(len(s.stores))]
        size = self.spec.page_size
        return self.batch * sum(
            n * g.page_bytes // size for n, g in zip(slots, self.groups, strict=True)
        )

    @property
    def decode_bytes(self) -> int:
        """Bytes of keys and values that a step reads: one new token of each sequence."""
        return self.batch * sum(g.decode_bytes for g in self.groups)

    @property
    def decode_flops(self) -> int:
        """Multiply-adds of attention in such a step, two FLOP each; without linear layers."""
        return self.batch * sum(g.decode_flops for g in self.groups)

    @property
    def intensity(self) -> float:
        """FLOP per byte of keys and values of a step, which no batch changes; 0.0 for kv_len 0."""
        return self.decode_flops / self.decode_bytes if self.decode_bytes else 0.0

    @cached_property
    def max_batch(self) -> int | None:
        """The most sequences whose pages, with the null pages, fit budget_bytes."""
        if self.budget_bytes is None:
            return None
        left = self.budget_bytes - sum(g.page_bytes for g in self.groups)
        return max(0, left // self.sequence_bytes) if self.sequence_bytes else 0

    def at(self, kv_len: int) -> Estimate:
        """The estimate of another length. Raises InputError as `estimate`."""
        return _estimate(
            self.config, self.spec, self.cross, kv_len, self.cross_len, self.batch,
            self.budget_bytes,
        )  # fmt: skip

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw bytes and decode bytes by length, to twice kv_len; the suffix decides the format.

        Raises InputError if matplotlib is missing or cannot write this format.
        """
        upper("plot_estimate")(self, path)

    def __str__(self) -> str:
        text: str = upper("show_estimate")(self)
        return text


def estimate(
    config: Any,
    kv_len: int,
    batch: int = 1,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kv_format: KvFormat | None = None,
    page_size: int = 16,
    cross_len: int = 0,
    budget_bytes: int | None = None,
) -> Estimate:
    """What a cache holds for sequences of one length, and what decoding them reads.

    Bytes are those that an `fa.kv.Cache` of the same spec allocates. Where a mask gives up pages, a
    sequence counts with the most that it names while it grows to kv_len token by token; a prompt
    that is appended in one step holds all of its pages until the commit. Masks are judged for a
    cache with room for twice the keys, rounded up, as long as its positions end by 2**30; from
    longer sequences, and from caches for them, no mask gives up pages.

    Args:
        config: as for `fa.kv.Spec.from_config`; or an `fa.kv.Spec`, which has its own dtype, format
            and page size.
        kv_len: tokens of each sequence, 0 or more.
        batch: sequences. They share no pages.
        dtype, kv_format, page_size: as for `fa.kv.Spec.from_config`.
        cross_len: tokens of the encoder's output, for a model whose layers read it.
        budget_bytes: memory for pages, for `Estimate.max_batch`.

    Raises:
        InputError: a number is out of range, the config has no spec, or cross_len is given for a
            model without an encoder.

    Example:
        >>> found = fa.kv.estimate(DeepseekV3Config(), 131072, budget_bytes=80 << 30)
        >>> found.token_bytes, found.max_batch  # 70272, 9
    """
    if isinstance(config, Spec):
        if kv_format is not None:
            raise InputError("kv_format goes with a config; an fa.kv.Spec has its groups' formats")
        spec, cross = config, None
    else:
        spec = Spec.from_config(config, page_size=page_size, dtype=dtype, kv_format=kv_format)
        cross = None
        if has_encoder(config):
            cross = Spec.from_config(
                config, page_size=page_size, dtype=dtype, kv_format=kv_format, cross=True
            )
    return _estimate(config, spec, cross, kv_len, cross_len, batch, budget_bytes)


def _estimate(
    config: Any, spec: Spec, cross: Spec | None, kv_len: int, cross_len: int, batch: int,
    budget_bytes: int | None,
) -> Estimate:  # fmt: skip
    kv_len = check_int("kv_len", kv_len, 0, INT32_MAX - spec.page_size)
    batch = check_int("batch", batch, 1)
    cross_len = check_int("cross_len", cross_len, 0, INT32_MAX - spec.page_size)
    if cross_len and cross is None:
        raise InputError(f"cross_len={cross_len}, but the model's layers read no encoder")
    if budget_bytes is not None:
        budget_bytes = check_int("budget_bytes", budget_bytes, 1, MOST_BYTES)
    groups = [_group(spec, g, kv_len) for g in range(len(spec.stores))]
    if cross is not None:
        groups += [_group(cross, g, cross_len) for g in range(len(cross.stores))]
    sizes = None if isinstance(config, Spec) else read_expanded(config)
    absorption = None
    if sizes is not None and kv_len:
        wide = sizes.nope_dim + sizes.rope_dim + sizes.head_dim_v
        absorption = Absorption(
            sizes, kv_len, _break_even(sizes, kv_len),
            sizes.num_q_heads * wide * spec.dtype.itemsize,
        )  # fmt: skip
    return Estimate(
        spec, cross, tuple(groups), kv_len, cross_len, batch, budget_bytes, absorption, config
    )


def held_pages(spec: Spec, group: int, kv_len: int) -> int:
    """The most pages that a sequence names while it grows to kv_len token by token."""
    size = spec.page_size
    whole = kv_len // size
    left = pages_left(spec.stores[group], size, whole)
    if left is None:
        return -(-kv_len // size)
    return max(left.most(whole) + 1, left.at(whole) + (kv_len % size > 0))


def _unused_slots(spec: Spec, number: int, length: int) -> int:
    """Slots behind the last token in the pages of one of `stores`."""
    slots = -length % spec.page_size
    if number < len(spec.groups) and spec.groups[number].has_tail:
        return spec.page_size if slots else 0  # the last rows are in the tail
    is_empty = number >= len(spec.groups) and not slots
    return min(length, spec.page_size) if is_empty else slots


def _group(spec: Spec, group: int, kv_len: int) -> GroupEstimate:
    g, kind = spec.stores[group], ""
    assert g.num_q_heads is not None and g.head_dim_v is not None
    full = kv_len // spec.page_size * spec.page_size
    if group in spec.tails:
        keys, kind = _keys_read(spec.groups[spec.tails.index(group)], spec, kv_len, full), "tail"
    else:
        keys = _keys_read(g, spec, kv_len) - (
            _keys_read(g, spec, kv_len, full) if g.has_tail else 0
        )
    flops = 2 * g.num_q_heads * (g.head_dim + g.head_dim_v) * keys * len(g.layers)
    return GroupEstimate(
        kind or _kind(g), len(g.layers), sum(g.row_bytes(spec.dtype)), spec.page_bytes(group),
        held_pages(spec, group, kv_len), keys, flops,
    )  # fmt: skip


def _keys_read(group: Group, spec: Spec, kv_len: int, first: int = 0) -> int:
    """The keys from `first` on that the query at kv_len - 1 reads, in any head; all where a mask is
    not judged."""
    size = spec.page_size
    left = pages_left(group, size, kv_len // size) if group.reclaim == "compact" else None
    if left is not None:
        kv_len = left.at(kv_len // size) * size + kv_len % size
    if not kv_len or group.variant is None:
        return kv_len - first
    try:
        mask = MaskPages(replace(group, reclaim="holes"), 1, kv_len)
    except (InputError, ParamError):  # it depends on the request, which reclaim="never" allows
        return kv_len - first
    return mask.count_read(kv_len - 1, kv_len, first)


def _kind(group: Group) -> str:
    """Such as "GQA 4, SlidingWindow": 4 query heads a KV head."""
    assert group.num_q_heads is not None
    shared = group.num_q_heads // group.num_kv_heads
    kind = "MHA" if shared == 1 else f"GQA {shared}" if group.num_kv_heads > 1 else "MQA"
    kind = "MLA" if group.v_in_k else kind
    return kind if group.variant is None else f"{kind}, {group.variant.name}"


# --- latent attention ---------------------------------------------------------------------------


def _mla_flops(sizes: Expanded, q_len: int, kv_len: int, absorbed: bool) -> int:
    heads, latent, nope, rope, v = sizes
    pairs = q_len * kv_len - q_len * (q_len - 1) // 2
    projected, width = (q_len, 2 * latent + rope) if absorbed else (kv_len, nope + rope + v)
    return 2 * heads * (latent * (nope + v) * projected + width * pairs)


def _break_even(sizes: Expanded, kv_len: int) -> int | None:
    """The least q_len at which expanding costs no more.

    With rows that absorbing makes wider, the difference falls with q_len, and a call of all kv_len
    tokens is not cheaper absorbed. With narrower ones absorbing is always cheaper.
    """

    def expands(q_len: int) -> bool:
        return _mla_flops(sizes, q_len, kv_len, False) <= _mla_flops(sizes, q_len, kv_len, True)

    if not expands(kv_len):
        return None
    return 1 + bisect.bisect_left(range(1, kv_len), True, key=expands)
