"""`fa.CascadeAttention`: keys that requests share are read once for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ..errors import InputError, VariantError
from ..formats import Stored
from ..torch_modes import on_host
from ..variants.binding import Bound
from ..variants.ir.ir import keys_read_request
from .arguments import checks
from .arguments.calls import Offset, host_array
from .batch_base import BatchBase, Level
from .keys.level_pages import CascadeLevel, in_cache_pages
from .keys.paged import Paged
from .keys.prefixes import shared_prefixes
from .keys.storage import read_storage
from .launching.mixed_run import MixedPlanned
from .plan import Plan
from .planning.batch_plan import Batch


class CascadeAttention(BatchBase):
    """Attention over requests that share prefixes, each prefix read once for its whole group.

    Takes the arguments of `BatchAttention`. All tokens of a group are computed with the group's
    keys in one pass; the partial states are merged with those of the requests' own keys. Hooks get
    each token's own request and logical positions, so any variant works whose keys do not depend on
    the request: `key_mod` and `value_mod` may use b only in ``fa.kv_slot(b, kv_idx)``, the slot of
    the key in the tensors of its level, for example to find its scale in a quantised cache.

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
        self, levels: Sequence[CascadeLevel], /, *, q_offset: Offset = "end", **mask_params: object
    ) -> Plan:
        """Distribute the work of a batch with shared keys over workers.

        Args:
            levels: outermost (shared by most) first; the last one holds the requests' own keys, and
                is the only one if nothing is shared.
            q_offset: as for `BatchAttention.plan`; kv_len counts the keys of all levels.
            **mask_params: the variant's params that its mask reads, by name.

        Returns:
            The plan, which is in force for the runs that follow.

        Raises:
            InputError: a level is wrong; the message names level and group. The previous plan
                stays in force.
            VariantError: key_mod or value_mod reads the request, which shared keys do not have.
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
        storages = in_cache_pages([level.storage for level in levels], device)
        read = [
            _read(i, replace(level, storage=storage), device)
            for i, (level, storage) in enumerate(zip(shared, storages, strict=False))
        ]
        self._check_plan(None, mask_params)
        stored = read_storage(storages[-1], device)
        paged = [bool(s.page_size) for s in (*(x.stored for x in read), stored)]
        if len({*paged}) == 1:
            planned = self._planned_now(own.q_indptr, stored, read, None, q_offset, mask_params)
            return self._put_in_force(planned)
        if self._kernels.options.cuda_graph:
            raise InputError(
                "levels are ragged and paged, which cuda_graph=True does not support; put all keys "
                "into pages of one cache"
            )
        parts = []
        for kind in (not paged[-1], paged[-1]):
            of_part = [x if p == kind else _elsewhere(x) for x, p in zip(read, paged, strict=False)]
            keys = stored if kind == paged[-1] else stored.elsewhere()
            parts.append(
                self._planned_now(own.q_indptr, keys, of_part, None, q_offset, mask_params)
            )
        return self._put_in_force(MixedPlanned(parts, [int(p == paged[-1]) for p in paged]))

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | Stored | Sequence[tuple[torch.Tensor, torch.Tensor]],
        v: torch.Tensor | Stored | None = None,
        *,
        scale: checks.Scale | None = None,
        return_lse: bool = False,
        partial: bool = False,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        **params: object,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention over the planned batch, as `BatchAttention.run`.

        Where some levels are ragged and others paged, k is a sequence of one (k, v) a level, the
        outermost first, without v: equal ones for levels of one kind. Each kind has a launch, or
        two, of its own, whose fp32 states of all rows are then merged and finalised by another one.

        Args:
            q, scale, return_lse, partial, out, lse, **params: as for `BatchAttention.run`.
            k: the keys of all levels, or a sequence of (k, v).
            v: the values of all levels; None with a sequence. With v_in_k there are none: k is the
                keys of all levels, or a sequence of one k a level.

        With a kv_format k and v are `fa.kv.Stored`, and all levels have one k and v.

        Returns:
            As `BatchAttention.run`.

        Raises:
            InputError: there is not one (k, v) a level, or levels of one kind have different ones.
            ParamError, CompileError, LaunchError, GradError: as `BatchAttention.run`.

        Example:
            >>> out = cascade.run(q, [(k_prefix, v_prefix), (k_pages, v_pages)])
        """
        more: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self._kernels.options.v_in_k:
            if isinstance(k, Sequence):
                k, v = [self._values(x, v, scale) for x in k], None  # type: ignore[misc,arg-type]
            else:
                k, v = self._values(k, v, scale)
        if v is None or not isinstance(k, torch.Tensor | Stored):
            (k, v), *more = _pairs(k, v)
            if more and any(isinstance(x, Stored) for pair in ((k, v), *more) for x in pair):
                raise InputError(
                    "levels with keys and values of their own cannot be quantised; put all keys "
                    "into one k and v"
                )
        k, v = self._codes(k, v, partial, params)
        return self._run(q, k, v, more, params, scale, return_lse, partial, out, lse)

    def _check_variant(self, batch: Batch, bound: Bound) -> None:
        if batch.num_levels and keys_read_request(bound.ir):
            raise VariantError(
                f"key_mod or value_mod of {batch.name} reads the request b, but the keys "
                "of a cascade are of several requests; use fa.BatchAttention, or hooks that take b "
                "for fa.kv_slot(b, kv_idx) alone"
            )


def _pairs(k: object, v: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A sequence of (k, v). Raises InputError for anything else."""
    pairs = [] if isinstance(k, torch.Tensor | Stored) or not isinstance(k, Sequence) else list(k)
    fit = all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs)
    if not pairs or not fit or v is not None:
        raise InputError(
            "pass k and v, the keys and values of all levels, or instead of both a list of one "
            "(k, v) a level, the outermost first"
        )
    return [(one, other) for one, other in pairs]


def _elsewhere(level: Level) -> Level:
    return level._replace(stored=level.stored.elsewhere())


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

    Requests, in any order, whose page_indices begin with the same pages form a group; a group whose
    prefix continues that of another one is nested in it. Only whole pages are shared, and the page
    of a request's last key stays its own. If nothing is shared there is one level, the batch.

    Args:
        q_indptr: int32 or int64 cpu tensor [num_requests + 1].
        paged: the batch's pages. page_indices on a device are copied to the host, which waits for
            it; pass host tensors to avoid the wait.
        min_shared_pages: pages that a group must have beyond those of the group around it; the
            pages of smaller groups stay with the groups inside them, or with the requests.

    Returns:
        Levels, the outermost first. Their page_indices are on the device of `paged`'s.

    Raises:
        InputError: an array is wrong; the message names the request.

    Example:
        >>> cascade.plan(fa.cascade_levels(q_indptr, paged, min_shared_pages=4))
    """
    return shared_prefixes(q_indptr, paged, min_shared_pages)
