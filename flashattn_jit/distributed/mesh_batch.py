"""`BatchAttention` and `CascadeAttention` over a mesh: what `mesh=` and `divided=` make of them.

`ByPages`: ranks hold pages of every request; each computes all rows with its own keys, and partial
states are merged in the order of the ranks. Decode context parallelism. `ByRequests`: ranks hold
whole requests, and heads are exchanged for them: data-parallel attention between tensor-parallel
layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import _C
from ..errors import InputError
from ..ops.arguments import checks
from ..ops.arguments.calls import Offset
from ..ops.batch_base import BatchBase
from ..ops.cascade import CascadeAttention
from ..ops.keys.level_pages import CascadeLevel
from ..ops.launching.batch_run import Planned, check_device
from ..ops.launching.launches import check_given
from ..ops.launching.mixed_run import MixedPlanned, States
from ..ops.plan import Plan
from ..ops.planning.batch_params import bind_plan
from ..torch_modes import need_values, on_host
from ..variants.params import Dims
from ..variants.placed import (
    HeadPlaces,
    KeyPlaces,
    check_key_text,
    placed,
    placed_heads,
    placed_keys,
)
from ..variants.variant import Variant
from .dealt_batch import DealtBatch, Whole, held, places
from .digests import digest, run_digest
from .group import Ranks
from .key_pages import OwnPages, own_pages
from .shares import Requests, even_shards

_UNPLANNED = "run() before plan(): nothing is planned; call plan() first"
DIVIDED = ("pages", "pages_heads", "requests_heads")
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Read = Callable[[], Sequence[CascadeLevel]]
"""Checks the levels that plan() got: what it raises is the error of one rank."""


class _Call(NamedTuple):
    """What run() got."""

    q: torch.Tensor
    k: Any
    v: Any
    scale: checks.Scale | None
    return_lse: bool
    partial: bool
    out: torch.Tensor | None
    lse: torch.Tensor | None
    params: Mapping[str, Any]


def over_mesh(owner: BatchBase, mesh: object, divided: object) -> ByPages | ByRequests:
    """What plans and runs an object with a mesh. Raises InputError."""
    if divided not in DIVIDED:
        raise InputError(f"divided={divided!r:.60} must be one of {', '.join(map(repr, DIVIDED))}")
    ranks, options = Ranks(mesh), owner.options
    if options.device.type != ranks.device_type:
        raise InputError(
            f"device={str(options.device)!r}, but the mesh is of {ranks.device_type!r}: ranks "
            "exchange tensors on their own devices"
        )
    if options.limits is not None:
        raise InputError(
            "limits and cuda_graph do not go with a mesh: a run exchanges messages with other "
            "ranks, which a captured graph cannot repeat"
        )
    share = divided != "pages"
    if share and options.num_q_heads % ranks.size:
        raise InputError(
            f"num_q_heads={options.num_q_heads} is not divisible by the {ranks.size} ranks, among "
            f'which divided="{divided}" divides the heads of q'
        )
    if divided == "requests_heads":
        return ByRequests(owner, ranks)
    return ByPages(owner, ranks, share)


class _Divided:
    """What both kinds have in common: checks of q, and heads on their way."""

    def __init__(self, owner: BatchBase, ranks: Ranks, share: bool) -> None:
        self._owner, self._ranks, self._share = owner, ranks, share
        heads = owner.options.num_q_heads
        self._heads = heads // ranks.size if share else heads

    def _said(self) -> dict[str, Any]:
        """The options that must be equal on all ranks."""
        own = ("device", "target", "workspace")
        return {k: v for k, v in self._owner.made().items() if k not in own}

    def _check(self, call: _Call, tokens: int, of: str) -> bytes:
        """What the ranks compare before they exchange rows. Raises InputError, GradError.

        tokens: rows of q. of: whose rows these are.
        """
        if call.partial:
            raise InputError(
                "partial=True does not go with a mesh, which merges and finalises the states of "
                "all ranks; make an object without a mesh for the state of one rank"
            )
        options, q = self._owner.options, call.q
        check_device("q", q, options.device)
        need_values("q", "run() exchanges values with other ranks", (q,))
        shape = (tokens, self._heads, options.head_dim)
        if tuple(q.shape) != shape or q.dtype != options.q_dtype:
            part = (
                f", the heads of this rank of {options.num_q_heads}" if self._share else
                "; a rank's share of the heads is for divided=\"pages_heads\""
            )  # fmt: skip
            raise InputError(
                f"q is {list(q.shape)} of {q.dtype}, but must be [tokens of {of}, num_q_heads, "
                f"head_dim] = {list(shape)} of {options.q_dtype}{part}"
            )
        checks.check_grad((q,), checks.QKV)
        checks.check_lse(call.return_lse, self._owner.pointwise)
        inputs = [x for x in (q, call.k, call.v) if isinstance(x, torch.Tensor)]
        shape = (tokens, self._heads, options.head_dim_v)
        check_given(call.out, call.lse, shape, options.q_dtype, options.device, inputs)
        return run_digest(call.return_lse, checks.check_scale(call.scale, options.head_dim))

    def run(
        self, q: torch.Tensor, k: Any, v: Any, scale: checks.Scale | None, return_lse: bool,
        partial: bool, out: torch.Tensor | None, lse: torch.Tensor | None,
        params: Mapping[str, Any],
    ) -> Result:  # fmt: skip
        """As `BatchBase.run`, over the keys of all ranks."""
        with_lse = return_lse or lse is not None
        call = _Call(q, k, v, scale, with_lse, partial, out, lse, params)
        found, found_lse = self.results(call)
        if out is not None:
            found = out.copy_(found)
        if lse is not None and found_lse is not None:
            found_lse = lse.copy_(found_lse)
        return found if found_lse is None else (found, found_lse)

    def results(self, call: _Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse); lse is None unless requested."""
        raise NotImplementedError

    def _of_rank(self, rank: int) -> slice:
        return slice(rank * self._heads, (rank + 1) * self._heads)

    def _all_heads(self, q: torch.Tensor, sent: Sequence[slice], own: slice) -> torch.Tensor:
        """Rows with the heads of every rank. sent: the rows for each rank; own: those for this."""
        ranks = self._ranks
        parts = [q.new_empty(q[own].shape) for _ in range(ranks.size)]
        exchange = ranks.begin([[q[rows].contiguous()] for rows in sent], [[x] for x in parts])
        parts[ranks.rank] = q[own]
        exchange.wait()
        return torch.cat(parts, 1)


# --- pages ----------------------------------------------------------------------------------------


class _OwnKeys(CascadeAttention):
    """All rows with the keys of one rank: their states are merged with those of other ranks."""

    merges_states = True

    def __init__(self, variant: Variant, dims: Dims, **made: Any) -> None:
        super().__init__(variant, **made)
        self._whole_dims = dims

    def _dims(self, lengths: _C.BatchLengths) -> Dims:
        return self._whole_dims


class _Planned(NamedTuple):
    """own: the rank's keys. finish: merges the states of the rows or heads of the rank; None for
    none of them. rows: bounds of the rows that each rank finishes."""

    own: _OwnKeys
    finish: MixedPlanned | None
    rows: list[int]


class ByPages(_Divided):
    """Page i of each request is with rank i % num_ranks. share: each rank has part of q's heads."""

    _planned: _Planned | None = None
    _finisher: DealtBatch | None = None

    @on_host
    def plan(
        self, read: Read, sparsity: object, q_offset: Offset,
        params: Mapping[str, object], plan_own: Callable[[], Plan],
    ) -> Plan:  # fmt: skip
        """Plan the pages of the rank; q_indptr and tables of pages are equal on every rank."""
        ranks, owner = self._ranks, self._owner

        def work() -> tuple[_Planned, bytes]:
            if sparsity is not None:
                raise InputError(
                    f"{type(sparsity).__name__} does not go with a mesh that divides pages: give "
                    'sparsity=None, or divide requests (divided="requests_heads")'
                )
            owner.check_plan(None, params)
            own = own_pages(read(), q_offset, ranks.rank, ranks.size, owner.options)
            return self._plan(own, params)

        self._planned = planned = ranks.agree("plan()", work)
        return Plan(planned.own.in_force())

    def _plan(self, own: OwnPages, params: Mapping[str, object]) -> tuple[_Planned, bytes]:
        owner, ranks, lengths = self._owner, self._ranks, own.lengths
        count = lengths.num_requests
        dims = owner._dims(lengths)
        bound = bind_plan(owner.given, dims, params, {})
        check_key_text(bound.ir, owner.given.name)
        kv_len = torch.tensor(lengths.kv_len[:count], dtype=torch.int32, device="cpu")
        at = KeyPlaces(
            placed_first_key=ranks.rank * own.page_size,
            placed_kv_len=kv_len.to(owner.options.device),
        )
        variant = placed_keys(owner.given, at, own.page_size, ranks.size)
        local = _OwnKeys(variant, dims, **owner.made())
        if self._planned is not None:
            local.share_kernels(self._planned.own)
        offset = torch.tensor(lengths.q_offset[:count], dtype=torch.int64, device="cpu")
        local.plan(own.levels, q_offset=offset, **params)
        # Which rows or heads this rank finishes.
        tokens = lengths.num_q_tokens
        rows = [0] * (ranks.rank + 1) + [tokens] * (ranks.size - ranks.rank)
        if not self._share:
            rows = even_shards(tokens, ranks.size).tolist()
        q_indptr = own.tables[-4]
        requests = Requests(
            q_indptr, np.append(0, np.cumsum(kv_len.numpy(), dtype=np.int64)),
            np.array(rows, np.int64), np.zeros(ranks.size + 1, np.int64), offset.numpy(),
        )  # fmt: skip
        finish = None
        if rows[ranks.rank + 1] > rows[ranks.rank]:
            # No hook in C++ text takes part in finalising.
            is_placed = any(graph.uses("b") for _, graph in bound.ir.hooks)
            finish = self._finish(is_placed, Whole(lengths, dims), requests, params)
        return _Planned(local, finish, rows), digest(
            (self._said(), self._share, own.page_size, [level.kv_format for level in own.levels]),
            (*own.tables, requests.q_offset), bound,
        )  # fmt: skip

    def _finish(
        self, is_placed: bool, whole: Whole, requests: Requests, params: Mapping[str, object]
    ) -> MixedPlanned:
        """Merges states of the rows of this rank, and finalises them."""
        options, ranks = self._owner.options, self._ranks
        variant = self._owner.given
        if is_placed:
            part = held(requests.q_shards, requests.q_indptr, ranks.rank)[0]
            variant = placed(variant, places(part, requests, options.device))
        if self._share:
            variant = placed_heads(variant, HeadPlaces(placed_head=ranks.rank * self._heads))
        batch = DealtBatch(
            variant, num_q_heads=self._heads, num_kv_heads=1 if self._share else
            options.num_kv_heads, head_dim=options.head_dim, head_dim_v=options.head_dim_v,
            q_dtype=options.q_dtype, device=options.device, target=options.target,
            batch_invariant=options.batch_invariant,
        )  # fmt: skip
        if self._finisher is not None:
            batch.share_kernels(self._finisher)
        self._finisher = batch
        batch.plan_finish(whole, requests, ranks.rank, params)
        planned = batch.in_force()
        assert isinstance(planned, Planned)
        return MixedPlanned([planned] * ranks.size, ())

    @on_host
    def results(self, call: _Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse) of q's rows and heads."""
        ranks = self._ranks

        def states() -> tuple[tuple[_Planned, tuple[torch.Tensor, ...]], bytes]:
            planned, said = ready()
            found = planned.own.run(
                every, call.k, call.v, scale=call.scale, partial=True, **call.params
            )
            return (planned, found if isinstance(found, tuple) else (found,)), said

        def ready() -> tuple[_Planned, bytes]:
            planned = self._planned
            if planned is None:
                raise InputError(_UNPLANNED)
            return planned, self._check(call, planned.rows[-1], "the batch")

        every = call.q
        if self._share:
            ranks.agree("run()", ready)
            rows = [slice(None)] * ranks.size
            every = self._all_heads(call.q, rows, slice(None))
        planned, found = ranks.agree("run()", states)
        out, lse = self._merged(planned, found, call)
        if not self._share:
            out, lse = self._spread(planned, call.q, out, lse)
        return out, lse

    def _merged(
        self, planned: _Planned, found: Sequence[torch.Tensor], call: _Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The results that this rank finishes, of the states of all ranks. found: its own."""
        q, return_lse = call.q, call.return_lse
        ranks, finish = self._ranks, planned.finish
        begin, end = planned.rows[ranks.rank : ranks.rank + 2]
        options = self._owner.options
        if self._share:
            sent = [[x[:, self._of_rank(r)].contiguous() for x in found] for r in range(ranks.size)]
        else:
            bounds = itertools.pairwise(planned.rows)
            sent = [[x[low:high] for x in found] for low, high in bounds]
        if finish is None:
            ranks.begin(sent, [[] for _ in range(ranks.size)]).wait()
            empty = q.new_empty((0, self._heads, options.head_dim_v))
            none = q.new_empty((0, self._heads), dtype=torch.float32) if return_lse else None
            return ranks.computed(lambda: (empty, none))
        own_q = q[begin:end]
        merged = States(finish.parts[-1], ranks.size, own_q)
        places = [merged.outs] if self._owner.pointwise else [merged.outs, merged.lses]
        exchange = ranks.begin(sent, [[x[r] for x in places] for r in range(ranks.size)])
        for place, own in zip(places, sent[ranks.rank], strict=True):
            place[ranks.rank] = own
        exchange.wait()
        kv_heads = finish.parts[-1].batch.options.num_kv_heads
        no_keys = tuple(
            q.new_empty((0, kv_heads, d)) for d in (options.head_dim, options.head_dim_v)
        )
        return ranks.computed(
            lambda: finish.finish(
                own_q, [no_keys], call.params, checks.check_scale(call.scale, options.head_dim),  # type: ignore[list-item]
                merged, return_lse=return_lse,
            )
        )  # fmt: skip

    def _spread(
        self, planned: _Planned, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The results of all ranks."""
        ranks, bounds = self._ranks, planned.rows
        own = [x.contiguous() for x in (out, lse) if x is not None]
        every = [q.new_empty((bounds[-1], *x.shape[1:]), dtype=x.dtype) for x in own]
        parts = [[x[low:high] for x in every] for low, high in itertools.pairwise(bounds)]
        exchange = ranks.begin([own] * ranks.size, parts)
        for part, x in zip(parts[ranks.rank], own, strict=True):
            part.copy_(x)
        exchange.wait()
        return every[0], every[1] if lse is not None else None


# --- requests -------------------------------------------------------------------------------------


class ByRequests(_Divided):
    """Each rank has requests of its own, and part of the heads of all ranks' rows."""

    def __init__(self, owner: BatchBase, ranks: Ranks) -> None:
        super().__init__(owner, ranks, True)
        self._rows: list[int] | None = None

    @on_host
    def plan(
        self, read: Read, sparsity: object, q_offset: Offset,
        params: Mapping[str, object], plan_own: Callable[[], Plan],
    ) -> Plan:  # fmt: skip
        """Plan the rank's own requests, by plan_own."""
        ranks, owner = self._ranks, self._owner
        before = {name: getattr(owner, name) for name in owner.plan_state}
        said = self._said()

        def work() -> tuple[Plan, bytes]:
            return plan_own(), digest((said, owner.given.name), (), None)

        try:
            plan = ranks.agree("plan()", work)
            planned = owner.in_force()
            last = planned.parts[-1] if isinstance(planned, MixedPlanned) else planned
            counts = ranks.gathered([last.batch.lengths.num_q_tokens])
        except BaseException:
            for name, value in before.items():
                setattr(owner, name, value)
            raise
        self._rows = [0, *np.cumsum([int(x[0]) for x in counts]).tolist()]
        return plan

    @on_host
    def results(self, call: _Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse) of the rows of all ranks, of this rank's heads."""
        ranks = self._ranks

        def ready() -> tuple[list[int], bytes]:
            if self._rows is None:
                raise InputError(_UNPLANNED)
            return self._rows, self._check(call, self._rows[-1], "all ranks")

        bounds = ranks.agree("run()", ready)
        rows = [slice(low, high) for low, high in itertools.pairwise(bounds)]
        own_q = self._all_heads(call.q, rows, rows[ranks.rank])
        k, v, scale, with_lse, params = call.k, call.v, call.scale, call.return_lse, call.params
        found: Any = ranks.computed(
            lambda: self._owner.run_own(
                own_q, k, v, scale, with_lse, False, None, None, dict(params)
            )
        )
        own = found if isinstance(found, tuple) else (found,)
        shapes = [(bounds[-1], self._heads, *x.shape[2:]) for x in own]
        every = [x.new_empty(shape) for x, shape in zip(own, shapes, strict=True)]
        sent = [[x[:, self._of_rank(r)].contiguous() for x in own] for r in range(ranks.size)]
        exchange = ranks.begin(sent, [[x[part] for x in every] for part in rows])
        for x, part in zip(every, sent[ranks.rank], strict=True):
            x[rows[ranks.rank]] = part
        exchange.wait()
        return every[0], every[1] if with_lse else None
