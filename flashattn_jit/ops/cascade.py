"""`fa.CascadeAttention`: keys that requests share are read once for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import InputError, VariantError
from ..formats import Formats, Stored, read_formats
from ..stored_hooks import Decodings, check_partial, codes_of
from ..torch_modes import on_host
from ..variants.binding import Bound
from ..variants.ir.ir import keys_read_request
from .arguments import checks
from .arguments.by_name import by_name
from .arguments.calls import Offset, host_array
from .batch_base import BatchBase, Level, Params
from .keys.level_pages import CascadeLevel, in_cache_pages
from .keys.paged import Paged
from .keys.prefixes import shared_prefixes
from .keys.storage import read_storage
from .launching.batch_run import level_param
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

    merges_states = False
    """Whether runs leave states for others to merge: then rotated values are rotated back first."""

    plan_state = ("_planned", "_levels", "_rotate_back")

    _levels: tuple[tuple[Formats, Decodings], ...] = ()
    _rotate_back = False

    @by_name("{}.plan()", "of page tables pass fa.cascade_levels(q_indptr, paged)")
    @on_host
    def plan(
        self, levels: Sequence[CascadeLevel], /, *, q_offset: Offset = "end", **mask_params: object
    ) -> Plan:
        """Distribute the work of a batch with shared keys over workers.

        Args:
            levels: outermost (shared by most) first; the last one holds the requests' own keys, and
                is the only one if nothing is shared.
            q_offset: as for `BatchAttention.plan`; kv_len counts the keys of all levels.
            **mask_params: as for `BatchAttention.plan`.

        Returns:
            The plan, which is in force for the runs that follow.

        Raises:
            InputError: a level is wrong; the message names level and group. The previous plan
                stays in force.
            VariantError: key_mod or value_mod reads the request, which shared keys do not have.
            ParamError, CompileError, LaunchError, DistributedError: as for `BatchAttention.plan`.
        """
        if self._mesh is None:
            return self._plan_levels(levels, q_offset, mask_params)
        return self._mesh.plan(  # type: ignore[no-any-return]
            lambda: _checked(levels), None, q_offset, mask_params,
            lambda: self._plan_levels(levels, q_offset, mask_params),
        )  # fmt: skip

    def _plan_levels(
        self, levels: Sequence[CascadeLevel], q_offset: Offset, mask_params: Params
    ) -> Plan:
        """Plan levels and put the plan in force."""
        levels = _checked(levels)
        *shared, own = levels
        device = self._kernels.options.device
        formats = [self._formats_of(i, level) for i, level in enumerate(levels)]
        storages = in_cache_pages([level.storage for level in levels], formats, device)
        read = [
            _read(i, replace(level, storage=storage), device)
            for i, (level, storage) in enumerate(zip(shared, storages, strict=False))
        ]
        self.check_plan(None, mask_params)
        stored = read_storage(storages[-1], device)
        # Levels of one part have k and v in common; the last part has the requests' own keys.
        paged = (bool(s.page_size) for s in (*(x.stored for x in read), stored))
        of_level = [*zip(paged, formats, strict=True)]
        parts = [*dict.fromkeys(x for x in of_level if x != of_level[-1]), of_level[-1]]
        if len(parts) > 1 and self._kernels.options.cuda_graph:
            raise InputError(
                "levels are ragged and paged, or of several formats, which cuda_graph=True does "
                "not support; put all keys into pages of one cache"
            )
        # States of parts are merged before an output is rotated back.
        rotated = {bool(values and values.rotate) for _, values in formats}
        rotate_back = len(rotated) > 1 or (self.merges_states and True in rotated)
        planned = []
        for part in parts:
            of_part = [
                x if p == part else _elsewhere(x) for x, p in zip(read, of_level, strict=False)
            ]
            keys = stored if part == of_level[-1] else stored.elsewhere()
            over = self._over(part[1], rotate_back)
            planned.append(
                self._planned_now(own.q_indptr, keys, of_part, None, q_offset, mask_params, over)
            )
        # Equal values stay the same object, so that code compiled for one plan fits the next one.
        known = tuple((one, self._over(one).decodings) for one in formats)
        if known != self._levels:
            self._levels = known
        self._rotate_back = rotate_back
        if len(planned) == 1:
            return self._put_in_force(planned[0])
        return self._put_in_force(MixedPlanned(planned, [parts.index(p) for p in of_level]))

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

        Where some levels are ragged and others paged, or have other formats, k is a sequence of one
        (k, v) a level, the outermost first, without v: equal ones for levels of one kind. Each kind
        has a launch, or two, of its own, whose fp32 states of all rows are then merged and
        finalised by another one.

        Args:
            q, scale, return_lse, partial, out, lse, **params: as for `BatchAttention.run`.
            k: the keys of all levels, or a sequence of (k, v).
            v: the values of all levels; None with a sequence. With v_in_k there are none: k is the
                keys of all levels, or a sequence of one k a level.

        k and v of levels with a kv_format are `fa.kv.Stored`.

        Returns:
            As `BatchAttention.run`.

        Raises:
            InputError: there is not one (k, v) a level, levels of one kind have different ones, or
                one is not of its level's format.
            ParamError, CompileError, LaunchError, GradError: as `BatchAttention.run`.

        Example:
            >>> out = cascade.run(q, [(k_prefix, v_prefix), (k_pages, v_pages)])
        """
        if self._mesh is not None:
            return self._mesh.run(q, k, v, scale, return_lse, partial, out, lse, params)  # type: ignore[no-any-return]
        return self.run_own(q, k, v, scale, return_lse, partial, out, lse, params)

    def run_own(
        self, q: torch.Tensor, k: Any, v: Any, scale: checks.Scale | None, return_lse: bool,
        partial: bool, out: torch.Tensor | None, lse: torch.Tensor | None,
        params: dict[str, object],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """`run` over what this process holds, whether there is a mesh or not."""
        if self._kernels.options.v_in_k:
            if isinstance(k, Sequence):
                if not all(isinstance(x, torch.Tensor | Stored) for x in k):
                    raise InputError("with v_in_k pass k, or a list of one k a level, without v")
                k, v = [self._values(x, v, scale) for x in k], None
            else:
                k, v = self._values(k, v, scale)
        pairs = [(k, v)] if v is not None else []
        if v is None or not isinstance(k, torch.Tensor | Stored):
            pairs = _pairs(k, v)
        (k, v), *more = self._level_codes(pairs, partial, params)
        return self._run(q, k, v, more, params, scale, return_lse, partial, out, lse)

    def _formats_of(self, number: int, level: CascadeLevel) -> Formats:
        """The formats of a level's keys and values. Raises InputError."""
        if level.kv_format is None:
            return self._formats
        try:
            formats = read_formats(level.kv_format)
            self._over(formats)
        except InputError as error:
            raise InputError(f"levels[{number}]: {error}") from None
        return formats

    def _level_codes(
        self, pairs: list[tuple[Any, Any]], partial: bool, params: dict[str, object]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """k and v of levels as tensors: codes, whose numbers are added to params, those of several
        levels by `level_param`. Raises InputError."""
        plain = all(isinstance(x, torch.Tensor) for pair in pairs for x in pair)
        levels = self._levels or ((self._formats, self._decodings),)
        if plain and all(formats == (None, None) for formats, _ in levels):
            return pairs
        if any(level != levels[0] for level in levels):
            if len(pairs) != len(levels):
                raise InputError(
                    f"run() got {len(pairs)} pairs of k and v, but {len(levels)} levels are "
                    "planned, of several formats; pass a list of one (k, v) a level, the outermost "
                    "first"
                )
        else:
            levels = (levels[0],) * len(pairs)
        found = []
        for i, ((k, v), ((own_k, own_v), (of_k, of_v))) in enumerate(
            zip(pairs, levels, strict=True)
        ):
            numbers: dict[str, object] = {}
            try:
                if not self._rotate_back:
                    check_partial(of_v, self.given, partial)
                k = codes_of("k", k, own_k, of_k, numbers)
                v = codes_of("v", v, own_v, of_v, numbers)
            except InputError as error:
                raise InputError(f"level {i}: {error}" if len(pairs) > 1 else str(error)) from None
            for name, value in numbers.items():
                if name in params:
                    raise InputError(
                        f"{name} is given, but {name[0]} is an fa.kv.Stored, which has its own"
                    )
                params[level_param(i, name) if len(pairs) > 1 else name] = value
            found.append((k, v))
        return found

    def _check_variant(self, batch: Batch, bound: Bound) -> None:
        if batch.num_levels and keys_read_request(bound.ir):
            raise VariantError(
                f"key_mod or value_mod of {batch.name} reads the request b, but the keys "
                "of a cascade are of several requests; use fa.BatchAttention, or hooks that take b "
                "for fa.kv_slot(b, kv_idx) alone"
            )


def _pairs(k: object, v: object) -> list[tuple[Any, Any]]:
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


def _checked(levels: object) -> list[CascadeLevel]:
    """The levels of plan(), the requests' own last. Raises InputError."""
    if isinstance(levels, torch.Tensor) or not isinstance(levels, Iterable):
        levels = []
    levels = list(levels)
    if not levels:
        raise InputError(
            "levels must be a sequence of at least one fa.CascadeLevel, the requests' own last; "
            "fa.cascade_levels(q_indptr, paged) makes them of page tables"
        )
    for i, level in enumerate(levels):
        if not isinstance(level, CascadeLevel):
            raise InputError(f"levels[{i}] must be an fa.CascadeLevel, got {type(level).__name__}")
    if levels[-1].tokens is not None:
        raise InputError(
            "the last level is the requests' own: its groups are the requests, and tokens must "
            "be None"
        )
    return levels


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
