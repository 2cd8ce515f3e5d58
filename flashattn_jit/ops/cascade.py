"""`fa.CascadeAttention`: keys that requests share are read once for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import InputError, VariantError
from ..torch_modes import on_host
from ..variants.binding import Bound
from ..variants.ir.ir import keys_read_request
from .arguments.calls import host_array
from .attention import Offset
from .batch_base import BatchBase, Level
from .keys.level_pages import in_cache_pages
from .keys.paged import Paged
from .keys.prefixes import shared_prefixes
from .keys.storage import Storage, read_storage
from .plan import Plan
from .planning.batch_plan import Batch


@dataclass(frozen=True, slots=True, eq=False)
class CascadeLevel:
    """Keys of groups of requests, or in the last level the requests' own keys.

    Args:
        q_indptr: int32 or int64 cpu tensor [groups + 1]: group g has the entries q_indptr[g] to
            q_indptr[g + 1] of `tokens`. In the last level a group is a request.
        storage: the keys of each group, `fa.Ragged` or `fa.Paged`, the same kind in all levels.
            Ragged k and v hold the keys of the outermost level first, then those of the next one,
            the requests' own last, and each kv_indptr starts at 0. Pages may be larger in some
            levels: the smallest page_size is that of k and v, and page p of a level with m times
            that is the pages p * m to p * m + m - 1 of k and v.
        tokens: int32 or int64 cpu tensor of packed query tokens, each at most once a level, those
            of a request one after another; by default entry e is token e. None in the last level.

    The keys of a request are those of its groups, from the outermost level on, then its own. All
    tokens of a group have equally many keys in the levels before it.
    """

    q_indptr: torch.Tensor
    storage: Storage
    tokens: torch.Tensor | None = None


class CascadeAttention(BatchBase):
    """Attention over requests that share prefixes, each prefix read once for its whole group.

    Takes what `BatchAttention` takes. The tokens of a group pass over the group's keys together;
    their partial states merge with those of the requests' own keys. Hooks see each token's own
    request and logical positions, so any variant works whose keys do not depend on the request:
    `key_mod` and `value_mod` may read b for ``fa.kv_slot(b, kv_idx)`` alone, the slot of the key,
    such as that of its scale in a quantised cache.

    Source: composable formats, Ye et al. 2025, arXiv 2501.01005, section 3.1.2; Hydragen, Juravsky
    et al. 2024, arXiv 2402.05099.

    Example:
        >>> cascade = fa.CascadeAttention(fa.Causal(), num_q_heads=32, num_kv_heads=8,
        ...                               head_dim=128, q_dtype=torch.bfloat16)
        >>> cascade.plan(fa.cascade_levels(q_indptr, paged))
        >>> out = cascade.run(q, k_pages, v_pages)
    """

    @on_host
    def plan(
        self, levels: Sequence[CascadeLevel], *, q_offset: Offset = "end", **mask_params: object
    ) -> Plan:
        """Decide who computes what of a batch with shared keys.

        Args:
            levels: outermost (shared by most) first; the last one holds the requests' own keys, and
                is all there is where nothing is shared.
            q_offset: as for `BatchAttention.plan`; kv_len counts the keys of all levels.
            **mask_params: the variant's params that its mask reads, by name.

        Returns:
            The plan, which is in force for the runs that follow.

        Raises:
            InputError: a level is wrong; the message names level and group. The plan before it
                stays in force.
            VariantError: a hook needs what shared keys do not have: the request they are of.
            ParamError, CompileError, LaunchError: as for `BatchAttention.plan`.
        """
        if isinstance(levels, torch.Tensor) or not isinstance(levels, Iterable):
            levels = []
        levels = list(levels)
        if not levels:
            raise InputError(
                "levels must be a sequence of at least one fa.CascadeLevel, the requests' own last"
            )
        for i, level in enumerate(levels):
            if not isinstance(level, CascadeLevel):
                raise InputError(
                    f"levels[{i}] must be an fa.CascadeLevel, got {type(level).__name__}"
                )
        *shared, own = levels
        if own.tokens is not None:
            raise InputError(
                "the last level is the requests' own: its groups are the requests, and tokens must "
                "be None"
            )
        device = self._kernels.options.device
        *stores, own_storage = in_cache_pages([level.storage for level in levels], device)
        read = [
            _read(i, replace(level, storage=storage), device)
            for i, (level, storage) in enumerate(zip(shared, stores, strict=True))
        ]
        return self._plan(own.q_indptr, own_storage, read, None, q_offset, mask_params)

    def _check_variant(self, batch: Batch, bound: Bound) -> None:
        if batch.num_levels and keys_read_request(bound.ir):
            raise VariantError(
                f"key_mod or value_mod of {batch.name} reads the request b, but the keys "
                "of a cascade are of several requests; use fa.BatchAttention, or hooks that take b "
                "for fa.kv_slot(b, kv_idx) alone"
            )


def _read(number: int, level: CascadeLevel, device: torch.device) -> Level:
    where = f"level {number}: "
    rows, held = host_array(f"{where}q_indptr", level.q_indptr)
    tokens, held_tokens = None, held
    if level.tokens is not None:
        tokens, held_tokens = host_array(f"{where}tokens", level.tokens)
    return Level(rows, tokens, read_storage(level.storage, device, where), (held, held_tokens))


@on_host
def cascade_levels(
    q_indptr: torch.Tensor, paged: Paged, min_shared_pages: int = 1
) -> list[CascadeLevel]:
    """The levels of a batch whose page tables begin alike, for `CascadeAttention.plan`.

    Requests in any order whose page_indices begin with the same pages form a group; groups nest as
    their heads do. Only whole pages are shared, and each request keeps the page of its last key to
    itself. Where nothing is shared there is one level, the batch as it is.

    Args:
        q_indptr: int32 or int64 cpu tensor [num_requests + 1].
        paged: the batch's pages. page_indices on a device are copied to the host, which waits for
            it; keep a copy there where that matters.
        min_shared_pages: pages that a group must have beyond those of the group around it; others
            stay with the groups inside it, or with the requests.

    Returns:
        Levels, the outermost first. Their page_indices are on the device of `paged`'s.

    Raises:
        InputError: an array is wrong; the message names the request.

    Example:
        >>> cascade.plan(fa.cascade_levels(q_indptr, paged, min_shared_pages=4))
    """
    return [
        CascadeLevel(level.q_indptr, level.paged, level.tokens)
        for level in shared_prefixes(q_indptr, paged, min_shared_pages)
    ]


__all__ = ["CascadeAttention", "CascadeLevel", "cascade_levels"]
