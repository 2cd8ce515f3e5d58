"""Plans that replay one captured run: shared capacities, and checks that a new plan fits.

A captured launch has fixed addresses, grids and tensor sizes. With ``cuda_graph=True`` lists and
bits of a sparsity are therefore padded to a common capacity, and a plan that needs other kernels or
more room is refused before any of it is copied to memory that the captured run reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...errors import InputError
from ..arguments.checks import INT32_MAX
from ..keys.key_lists import KeyLists
from ..keys.sparsity import Sparsity, TokenSparse
from .batch_plan import Options, Variation

_MOST_ENTRIES = 2**24
"""Capacity of lists, unless the first plan has more: 64 MiB."""


def with_room(
    lists: KeyLists | None, sparsity: Sparsity | None, options: Options, before: KeyLists | None
) -> KeyLists | None:
    """`lists` with the capacity of the previous plan's, or of the largest batch for the first plan.

    The latter is a list of every key block, or of `topk` tokens, for each block row within limits.
    """
    if lists is None:
        return None
    if before is not None:
        return lists._replace(room=before.entries)
    limits = options.limits
    assert limits is not None
    blocks = -(-limits.max_kv_len // lists.key_block)
    per_row = sparsity.indices.shape[-1] if isinstance(sparsity, TokenSparse) else blocks
    rows = min(limits.max_q_tokens, limits.max_q_tokens // lists.q_block + limits.max_requests)
    heads = options.num_kv_heads if lists.per_head else 1
    return lists._replace(
        room=min(rows * heads * per_row, _MOST_ENTRIES, INT32_MAX // lists.key_block)
    )


def padded(bits: dict[str, Any], before: Mapping[str, object]) -> dict[str, Any]:
    """The params of a sparsity's bits, zero-padded to the sizes that the previous plan had."""
    made = dict(bits)
    for name, tensor in bits.items():
        room = before.get(name)
        if not isinstance(tensor, torch.Tensor) or not isinstance(room, torch.Tensor):
            continue
        more = [new - own for own, new in zip(tensor.shape, room.shape, strict=True)]
        if any(more) and min(more) >= 0:
            made[name] = torch.nn.functional.pad(
                tensor, [side for n in reversed(more) for side in (0, n)]
            )
    return made


def check_replayable(before: Variation, now: Variation) -> None:
    """Raises InputError if a captured run of the plan `before` cannot replay the plan `now`.

    Called before any of `now` is copied to memory that the captured run reads.
    """
    was, new = before.batch, now.batch
    shapes = [[(slot, t.shape, t.stride()) for slot, t in v.mask_tensors] for v in (before, now)]
    lists = [
        None if b.lists is None else (
            f"blocks of {b.lists.q_block} x {b.lists.key_block}, room for {b.lists.entries} "
            f"indices, lists for {'each kv head' if b.lists.per_head else 'all kv heads'}"
        )
        for b in (was, new)
    ]  # fmt: skip
    modules = [[k and k.spec for k in v.kernels] for v in (before, now)]
    for what, first, second, remedy in (
        ("the storage's page_size", was.keys.page_size, new.keys.page_size, ""),
        ("the kind of sparsity", was.name, new.name, ""),
        ("the form of the key lists", *lists, ", or plan the longest lists first"),
        (
            "the number of shared levels", was.num_levels, new.num_levels,
            ", or plan the most levels first",
        ),
        ("the structure of the variant", before.known, now.known, ""),
        (
            "the shapes of tensors that the mask reads", *shapes,
            ", plan a sparsity's largest bits first, and give every batch as many requests (empty "
            "ones behind the others)",
        ),
    ):  # fmt: skip
        if first != second:
            raise InputError(
                f"with cuda_graph=True the first plan fixes {what}: it has {first}, this plan has "
                f"{second}; make another object for it{remedy}"
            )
    if before.mask_scalars != now.mask_scalars:
        changed = ", ".join(
            f"{now.known.ir.scalars[slot].name} was {first}, is now {second}"
            for (slot, first), (_, second) in zip(
                before.mask_scalars, now.mask_scalars, strict=True
            )
            if first != second
        )
        raise InputError(
            "with cuda_graph=True the first plan fixes the numbers that the mask reads: "
            f"{changed}; make another object for it"
        )
    if modules[0] != modules[1] or before.core.block_bytes != now.core.block_bytes:
        raise InputError(
            f"with cuda_graph=True the first plan fixes kernels and the size of plans: it has "
            f"{before.core.block_bytes} bytes, this plan has {now.core.block_bytes}; make another "
            "object for it"
        )
