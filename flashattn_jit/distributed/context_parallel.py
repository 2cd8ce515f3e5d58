"""`fa.ContextParallel`: one batch over the ranks of a process group, balanced by its mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from ..errors import InputError, VariantError
from ..ops.arguments import checks
from ..ops.arguments.calls import Offset, host_array
from ..ops.planning.batch_params import bind_plan
from ..torch_modes import need_values, on_host
from ..variants.binding import Bound
from ..variants.params import declared_params, refuse_unknown
from ..variants.placed import HeadPlaces, placed, placed_heads, reads_head, reads_request
from ..variants.variant import Variant
from .costs import (
    Rates,
    Way,
    cheapest,
    measured_rates,
    way_of_heads,
    way_of_keys,
    way_of_ring,
    way_of_states,
)
from .dealt_batch import DealtBatch, Whole, held, places
from .digests import digest, run_digest
from .group import NO_DIGEST, Ranks
from .heads import ByHeads, Heads, all_rows, heads_of
from .needs import Pages
from .parallel_plan import ParallelPlan
from .ring import Ring, plan_ring
from .shares import Ints, Requests, Shares, even_shards
from .states import MOST_STATE_ROWS, AtKeys, plan_states, rows_at_keys
from .together import Together, plan_together


class _Planned(NamedTuple):
    """A plan in force. part: of the own rank. ways: all that were considered."""

    requests: Requests
    shares: Shares
    pages: Pages
    part: Together | AtKeys | ByHeads | Ring
    way: Way
    ways: tuple[Way, ...]


class ContextParallel:
    """Attention over a batch whose tokens are divided among the ranks of a mesh.

    `plan` deals the query rows out to ranks by what the mask keeps, for any mask, and finds which
    keys each rank needs. `run` moves those rows and keys, computes, and brings the results back:
    every rank passes its tokens and gets the results of its tokens.

    Args:
        variant: a `Variant`, a bare ``score_mod`` or ``mask_mod``, or None for plain attention.
        mesh: a `torch.distributed.DeviceMesh` of one dim, such as one dim of a larger mesh, over
            gloo on CPUs or NCCL on GPUs.
        num_q_heads, num_kv_heads, head_dim, head_dim_v, q_dtype, kv_dtype, batch_invariant, target:
            as for `BatchAttention`. With batch_invariant the results have the same bits for any
            number of ranks, one included, as those of a `BatchAttention`.
        way: "keys": query rows and the keys that they need come together at one rank; "ring":
            likewise, but keys come from one rank after another, and the states of rows are merged
            meanwhile, so that a rank holds the keys of few ranks at a time; "states":
            rows go to all keys, and their states are merged, which suits few rows over many keys;
            "heads": each rank gets all tokens of some q heads and of their kv heads; there must be
            as many q heads as ranks. By default each plan takes the one of the least predicted
            time.

    Raises:
        InputError: torch.distributed is not initialised, or the mesh has more than one dim, another
            backend, or another device than the target; or as `BatchAttention`.
        TargetError, VariantError: as `BatchAttention`.

    All ranks make the same calls in the same order; `plan` compares what they were given. A rank
    that fails or is gone makes the others raise DistributedError, at the latest after the timeout
    of the process group. One thread uses an object at a time.

    Source: context parallelism, Liu et al. 2023, arXiv 2310.01889 (ring attention) and Dubey et al.
    2024, arXiv 2407.21783, section 3.3.2 (all-gathered keys); here keys that no row of a rank sees
    are not sent.

    Example:
        >>> mesh = init_device_mesh("cpu", (4,))
        >>> parallel = fa.ContextParallel(fa.Causal(), mesh, num_q_heads=32, num_kv_heads=8,
        ...                               head_dim=128, q_dtype=torch.bfloat16)
        >>> parallel.plan(torch.tensor([0, 131072]))
        >>> out = parallel.run(q, k, v)     # 32768 tokens each
    """

    def __init__(
        self,
        variant: Variant | Callable[..., object] | None,
        mesh: object,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
        target: str | None = None,
        way: str | None = None,
    ) -> None:
        self._ranks = Ranks(mesh)
        if way not in (None, "keys", "ring", "states", "heads"):
            raise InputError(
                f'way={way!r:.60} must be "keys", "ring", "states", "heads" or None, the cheapest '
                "of them"
            )
        if way in ("ring", "states") and batch_invariant:
            raise InputError(
                f'way="{way}" merges a state a rank, so that its bits depend on the number of '
                'ranks; use way="keys" with batch_invariant=True'
            )
        self._way = way
        self._rates: Rates | None = None
        self._made: dict[str, Any] = {
            "num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
            "head_dim_v": head_dim_v, "q_dtype": q_dtype, "kv_dtype": kv_dtype,
            "batch_invariant": batch_invariant, "target": target, "device": self._ranks.device,
        }  # fmt: skip
        self._batch = DealtBatch(variant, **self._made)
        self._planned: _Planned | None = None

    @property
    def variant(self) -> Variant:
        """What is computed."""
        return self._batch.variant

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a ContextParallel belongs to the process group of its rank and cannot be copied or "
            "pickled; make one on each rank"
        )

    # --- planning ---------------------------------------------------------------------------------

    @on_host
    def plan(
        self,
        q_indptr: torch.Tensor,
        kv_indptr: torch.Tensor | None = None,
        *,
        q_offset: Offset = "end",
        q_shards: Sequence[int] | None = None,
        kv_shards: Sequence[int] | None = None,
        **mask_params: object,
    ) -> ParallelPlan:
        """Deal the rows of a batch out to the ranks, on the host; the same on every rank.

        Args:
            q_indptr: int32 or int64 cpu tensor [num_requests + 1] of the whole batch: request b has
                the packed query tokens q_indptr[b] to q_indptr[b + 1].
            kv_indptr: likewise of the key tokens; by default q_indptr.
            q_offset: position of each request's first query token, as for `BatchAttention.plan`.
            q_shards: [num_ranks + 1] ints from 0 to the number of query tokens: rank r passes the
                packed query tokens q_shards[r] to q_shards[r + 1] to `run`. By default the tokens
                are divided as by `torch.chunk`, which is how ``Shard(0)`` divides a DTensor.
            kv_shards: likewise of the key tokens.
            **mask_params: the variant's params that its mask reads, of the whole batch. On devices
                other than the CPU tensors among them are not read: every key counts as needed.

        Returns:
            The plan, in force for the runs that follow.

        Raises:
            InputError, ParamError, CompileError: as `BatchAttention.plan`; also for shards that do
                not ascend to the number of tokens.
            VariantError: a hook is C++ text that reads b.
            DistributedError: another rank failed, or was given something else. The previous plan
                stays in force on every rank.

        Example:
            >>> print(parallel.plan(q_indptr).explain())
        """

        given = q_indptr if kv_indptr is None else kv_indptr

        def work() -> tuple[_Planned, bytes]:
            return self._plan(q_indptr, given, q_offset, q_shards, kv_shards, mask_params)

        def rate() -> tuple[float, bytes]:
            whole = self._batch.whole(q_indptr, given, q_offset)
            return self._batch.pair_s(whole, mask_params), NO_DIGEST

        if self._rates is None:
            self._rates = measured_rates(self._ranks, self._ranks.agree("plan()", rate))

        self._planned = planned = self._ranks.agree("plan()", work)
        options = self._batch.options
        return ParallelPlan(
            planned.requests, planned.shares, planned.pages, options, planned.way, planned.ways,
            planned.part.overlap if isinstance(planned.part, Together) else 0.0,
        )  # fmt: skip

    def _plan(
        self, q_indptr: torch.Tensor, kv_indptr: torch.Tensor, q_offset: Offset,
        q_shards: Sequence[int] | None, kv_shards: Sequence[int] | None, params: Mapping[str, Any],
    ) -> tuple[_Planned, bytes]:  # fmt: skip
        for name, value in params.items():
            need_values(name, "batches are planned from them", (value,))
        ranks, batch = self._ranks, self._batch
        whole = batch.whole(q_indptr, kv_indptr, q_offset)
        requests = read_requests(whole, q_indptr, kv_indptr, q_shards, kv_shards, ranks.size)
        bound = bind_plan(batch.variant, whole.dims, params, {})
        is_placed = reads_request(bound.ir, batch.variant.name)
        if is_placed:
            batch = self._placed(np.arange(whole.lengths.num_requests), requests)
        tiles = batch.tiles(whole, params)
        assert self._rates is not None
        options = self._batch.options
        shares, pages = batch.dealt(tiles, whole, params, requests)
        ways = [way_of_keys(requests, shares, pages, options, self._rates)]
        if self._way == "ring" or (not options.batch_invariant and ranks.size > 1):
            ways.append(way_of_ring(requests, shares, pages, ways[0], options, self._rates))
        at_keys: Shares | None = None
        most = int(np.diff(requests.q_shards).max())
        if self._way == "states" or (not options.batch_invariant and most <= MOST_STATE_ROWS):
            at_keys = rows_at_keys(tiles, requests)
            ways.append(way_of_states(requests, at_keys, options, self._rates))
        heads = heads_of(options.num_q_heads, options.num_kv_heads, ranks.size)
        every = all_rows(tiles, requests, heads)
        if self._divides_heads(bound):
            ways.append(way_of_heads(requests, every, heads, options, self._rates))
        if self._way is not None:
            ways = [way for way in ways if way.name == self._way]
        way = cheapest(ways)
        rank = ranks.rank

        def made(request: Ints) -> DealtBatch:
            return self._placed(request, requests) if is_placed else self._another()

        part: Together | AtKeys | ByHeads | Ring
        if way.name == "heads":
            by_heads = self._by_heads(heads, bound)
            by_heads.plan_heads(whole, requests, params)
            part = ByHeads(by_heads, heads, requests)
            shares = every
        elif way.name == "states":
            assert at_keys is not None
            part = plan_states(
                made(held(requests.kv_shards, requests.kv_indptr, rank)[0]),
                made(held(requests.q_shards, requests.q_indptr, rank)[0]),
                whole, requests, at_keys, ranks, params,
            )  # fmt: skip
            shares = at_keys
        elif way.name == "ring":
            part = plan_ring(made, whole, requests, shares, pages, ranks, params, batch.pointwise)
        else:
            # With batch_invariant rows may be cut between the tiles of one process only.
            part = plan_together(
                made, tiles, whole, requests, shares, pages, ranks, params,
                not options.batch_invariant,
            )  # fmt: skip
        planned = _Planned(requests, shares, pages, part, way, tuple(ways))
        return planned, self._digest(planned, bound)

    def _divides_heads(self, bound: Bound) -> bool:
        """Whether heads can be divided. Raises where way="heads" was asked for."""
        options, size = self._batch.options, self._ranks.size
        count, kv_count = options.num_q_heads, options.num_kv_heads
        try:
            if count < size:
                raise InputError(
                    f'way="heads" divides the q heads, but num_q_heads={count} is less than the '
                    f"{size} ranks; use another way"
                )
            if options.batch_invariant and kv_count < size:
                raise InputError(
                    f"num_kv_heads={kv_count} is less than the {size} ranks: ranks with parts of a "
                    "group of q heads would take other tiles, and results would have other bits; "
                    'use way="keys" with batch_invariant=True'
                )
            reads_head(bound.ir, self._batch.variant.name)
        except (InputError, VariantError):
            if self._way == "heads":
                raise
            return False
        return True

    def _by_heads(self, heads: Heads, bound: Bound) -> DealtBatch:
        """An object for the heads of the rank."""
        rank, variant = self._ranks.rank, self._batch.variant
        q, kv = heads.of_q(rank), heads.of_kv(rank)
        if reads_head(bound.ir, variant.name):
            variant = placed_heads(
                variant, HeadPlaces(placed_head=q.start, placed_kv_head=kv.start)
            )
        made = {**self._made, "num_kv_heads": kv.stop - kv.start, "num_q_heads": q.stop - q.start}
        return DealtBatch(variant, **made)

    def _another(self) -> DealtBatch:
        return DealtBatch(self._batch.variant, **self._made).sharing(self._batch)

    def _placed(self, request: Ints, requests: Requests) -> DealtBatch:
        of = places(request, requests, self._batch.options.device)
        return DealtBatch(placed(self._batch.variant, of), **self._made).sharing(self._batch)

    def _digest(self, planned: _Planned, bound: Bound) -> bytes:
        """Equal on all ranks that plan the same."""
        made = {k: v for k, v in self._made.items() if k not in ("device", "target")}
        return digest(
            (made, planned.way.name),
            (*planned.requests, *planned.shares[:3], *planned.pages[1:]),
            bound,
        )

    # --- running ----------------------------------------------------------------------------------

    @on_host
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: checks.Scale | None = None,
        return_lse: bool = False,
        **params: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention over the planned batch; every rank calls it with its own tokens.

        Args:
            q: [num_q_tokens of the rank, num_q_heads, head_dim] in q_dtype, the rank's shard of the
                packed query tokens; or a DTensor of all of them with ``Shard(0)`` on the mesh.
            k, v: likewise [num_kv_tokens of the rank, num_kv_heads, head_dim or head_dim_v].
            scale: multiplies q . k; 1/sqrt(head_dim) by default.
            return_lse: also return the natural-log log-sum-exp, fp32.
            **params: the variant's params that its mask does not read, of the whole batch.

        Returns:
            out [num_q_tokens of the rank, num_q_heads, head_dim_v] in q_dtype, or (out, lse) with
            lse [num_q_tokens of the rank, num_q_heads]; DTensors where q is one.

        Raises:
            InputError: nothing is planned, or a tensor does not fit the shard or is on another
                device than the mesh.
            ParamError, CompileError, LaunchError, GradError: as `BatchAttention.run`.
            DistributedError: another rank failed, is gone, did not come in time, or was given
                another scale or return_lse.

        Example:
            >>> out = parallel.run(q, k, v)
        """
        sharded = any(_is_dtensor(x) for x in (q, k, v))

        def work() -> tuple[tuple[_Planned, Any, Any, Any], bytes]:
            parts: tuple[Any, Any, Any] = self._local(q, k, v) if sharded else (q, k, v)
            planned = self._ready(*parts, return_lse)
            refuse_unknown(declared_params(self.variant), params, self.variant.name)
            number = checks.check_scale(scale, self._batch.options.head_dim)
            return (planned, *parts), run_digest(return_lse, number)

        planned, q, k, v = self._ranks.agree("run()", work)
        out, lse = planned.part.run(self._ranks, q, k, v, scale, return_lse, params)
        if sharded:
            out = self._spread(out, planned)
            lse = None if lse is None else self._spread(lse, planned)
        return out if lse is None else (out, lse)

    def _ready(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool
    ) -> _Planned:
        """The plan in force, for tensors that fit it."""
        planned = self._planned
        if planned is None:
            raise InputError("run() before plan(): nothing is planned; call plan(q_indptr) first")
        for name, x in (("q", q), ("k", k), ("v", v)):
            need_values(name, "run() exchanges values with other ranks", (x,))
        self._batch.check_placed(q, k, v, None, None, ())
        o = self._batch.options
        rank = self._ranks.rank
        rows, tokens = (
            int(s[rank + 1] - s[rank])
            for s in (planned.requests.q_shards, planned.requests.kv_shards)
        )
        for name, x, dtype, what in (
            ("q", q, o.q_dtype, (rows, o.num_q_heads, o.head_dim)),
            ("k", k, o.k_dtype, (tokens, o.num_kv_heads, o.head_dim)),
            ("v", v, o.v_dtype, (tokens, o.num_kv_heads, o.head_dim_v)),
        ):
            dims = "num_q_tokens, num_q_heads" if name == "q" else "num_kv_tokens, num_kv_heads"
            if x.dim() != 3 or tuple(x.shape) != what:
                raise InputError(
                    f"{name} is {list(x.shape)}, but the shard of rank {rank} is "
                    f"[{dims}, head_dim{'_v' if name == 'v' else ''}] = {list(what)}; plan with "
                    f"{'q' if name == 'q' else 'kv'}_shards that say which tokens each rank passes"
                )
            if x.dtype != dtype:
                raise InputError(f"{name} is {x.dtype}, but the object was made for {dtype}")
        checks.check_grad((q, k, v), checks.QKV)
        if return_lse:
            checks.check_lse(True, self._batch.pointwise)
        return planned

    def _local(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """The shards of DTensors."""
        from torch.distributed.tensor import Shard

        for name, x in (("q", q), ("k", k), ("v", v)):
            fits = _is_dtensor(x) and x.device_mesh == self._ranks.mesh
            if not fits or tuple(x.placements) != (Shard(0),):
                raise InputError(
                    f"{name} must be a DTensor with placements (Shard(0),) on the mesh of the "
                    "ContextParallel where another argument is; redistribute it"
                )
        return q.to_local(), k.to_local(), v.to_local()

    def _spread(self, x: torch.Tensor, planned: _Planned) -> Any:
        """The results of all rows as a DTensor."""
        from torch.distributed.tensor import DTensor, Shard

        shape = torch.Size((int(planned.requests.q_shards[-1]), *x.shape[1:]))
        return DTensor.from_local(
            x, self._ranks.mesh, (Shard(0),), run_check=False, shape=shape, stride=x.stride()
        )


# --- parts ----------------------------------------------------------------------------------------


def read_requests(
    whole: Whole, q_indptr: torch.Tensor, kv_indptr: torch.Tensor,
    q_shards: Sequence[int] | None, kv_shards: Sequence[int] | None, num_ranks: int,
) -> Requests:  # fmt: skip
    """The batch and its shards. Raises InputError."""
    arrays = []
    for name, tensor in (("q_indptr", q_indptr), ("kv_indptr", kv_indptr)):
        arrays.append(host_array(name, tensor)[1].numpy().astype(np.int64))
    shards = []
    for name, given, tokens in (
        ("q_shards", q_shards, int(arrays[0][-1])), ("kv_shards", kv_shards, int(arrays[1][-1])),
    ):  # fmt: skip
        shards.append(_shards(name, given, tokens, num_ranks))
    offset = np.asarray(whole.lengths.q_offset, np.int64)
    return Requests(arrays[0], arrays[1], shards[0], shards[1], offset)


def _shards(name: str, given: Sequence[int] | None, tokens: int, num_ranks: int) -> Ints:
    if given is None:
        return even_shards(tokens, num_ranks)
    if not isinstance(given, Sequence) and not (isinstance(given, np.ndarray) and given.ndim):
        hint = "; pass its tolist()" if hasattr(given, "tolist") else ""
        raise InputError(
            f"{name} must be a sequence of {num_ranks + 1} ints, got {checks.shown(given)}{hint}"
        )
    values = [checks.check_int(f"{name}[{i}]", x, 0) for i, x in enumerate(given)]
    if len(values) != num_ranks + 1 or values[0] != 0 or values[-1] != tokens:
        raise InputError(
            f"{name} must be {num_ranks + 1} ints from 0 to the {tokens} tokens of the batch, one "
            f"more than there are ranks, got {checks.shown(values)}"
        )
    for rank, (low, high) in enumerate(itertools.pairwise(values)):
        if high < low:
            raise InputError(f"{name} must not descend; rank {rank} has [{low}, {high}]")
    return np.asarray(values, np.int64)


def _is_dtensor(x: object) -> bool:
    return type(x).__name__ == "DTensor" and type(x).__module__.startswith("torch.distributed")
