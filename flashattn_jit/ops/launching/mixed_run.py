"""Runs of cascades whose levels lie in several storages: one plan a storage, then one finish.

Levels that are ragged and those that are paged are in two storages, as are levels of two formats.
Each part runs its own kernels on its own k and v and leaves an unfinalised state of every row. The
merge of a kernel's artifact joins them and finalises: sink, `output_mod` and rounding happen once.
Parts know the keys of the others by their number, so that hooks see logical positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ... import _C
from ...errors import InputError
from ...torch_modes import refuse_capture
from ...variants.binding import bind
from ...variants.variant import Variant
from ..arguments import checks
from ..arguments.calls import Call, bind_tensors, given_layouts, is_result_aligned, result_dtype
from ..planning.batch_params import Params
from ..planning.batch_plan import Variation
from .batch_run import KEPT_LAUNCHES, Pairs, Planned, level_params, only_pair
from .launches import Workspace, check_results, launch, make_launch

_ROWS = 64
"""Packed rows of an item of the finish."""


class MixedPlanned:
    """The plans in force of a cascade over several storages; like `Planned` for those who run it.

    parts: one plan a storage; the last one has the requests' own keys. of_level: the part of each
    level, outermost first.
    """

    __slots__ = ("_finishes", "of_level", "parts", "pointwise", "variant")

    def __init__(self, parts: Sequence[Planned], of_level: Sequence[int]) -> None:
        self.parts, self.of_level = tuple(parts), tuple(of_level)
        self.variant: Variant = parts[-1].variant
        self.pointwise = parts[-1].pointwise
        self._finishes: dict[int, Variation] = {}  # by the id of the variation that they finish
        self._finish_of(parts[-1].first)

    @property
    def finish_ns(self) -> float:
        """What merging the parts' states should take, in nanoseconds."""
        return self._finish_of(self.parts[-1].first).merge_ns

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        params: Params,
        scale: checks.Scale | None,
        return_lse: bool,
        partial: bool,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        more: Pairs = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse) of a batch; lse is None unless requested. more: k and v of further levels."""
        pairs = self._pairs(((k, v), *more))
        return_lse = return_lse or lse is not None
        checks.check_lse(return_lse, self.pointwise)
        scale = checks.check_scale(scale, self.parts[-1].batch.options.head_dim)
        states = States(self.parts[-1], len(self.parts), q)
        for i, (part, (keys, values)) in enumerate(zip(self.parts, pairs, strict=True)):
            of_part = None if self.pointwise else states.lses[i]
            own = level_params(params, self._levels(i))
            part.run(q, keys, values, own, scale, False, True, states.outs[i], of_part)
        params = level_params(params, self._levels(-1))
        return self.finish(
            q,
            pairs,
            params,
            scale,
            states,
            return_lse=return_lse,
            partial=partial,
            out=out,
            lse=lse,
        )

    def check_transforms(self, params: Params) -> None:
        """As `Planned.check_transforms`."""
        for i, part in enumerate(self.parts):
            part.check_transforms(level_params(params, self._levels(i)))

    def _levels(self, part: int) -> list[int]:
        """The levels of a part."""
        part %= len(self.parts)
        return [i for i, own in enumerate(self.of_level) if own == part]

    def _pairs(self, pairs: Pairs) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The k and v of each part. Raises InputError unless there is one pair a level."""
        if len(pairs) != len(self.of_level):
            raise InputError(
                f"run() got {len(pairs)} pairs of k and v, but {len(self.of_level)} levels are "
                f"planned, in {len(self.parts)} storages; pass a list of one (k, v) a level, the "
                "outermost first"
            )
        found = []
        for part in range(len(self.parts)):
            levels = self._levels(part)
            kind = "paged" if self.parts[part].batch.keys.page_size else "ragged"
            found.append(only_pair([pairs[i] for i in levels], levels, kind))
        return found

    def prepare(self, params: Params) -> None:
        """Plan the finish of a run with these params, where it needs other kernels than planned.

        Raises what binding and planning raise.
        """
        last = self.parts[-1]
        bound = bind(self.variant, last.batch.dims, {**last.params, **params})
        self._finish_of(last.variation_of(bound, params))

    def _finish_of(self, variation: Variation) -> Variation:
        """The plan of the finish, made of a variation of the last part; merges and nothing else."""
        found = self._finishes.get(id(variation))
        if found is not None:
            return found
        last = self.parts[-1]
        options = last.batch.options
        refuse_capture(
            options.device,
            "a run needs other kernels than planned",
            "make the same run once before the capture",
        )
        heads, q_len = options.num_q_heads, np.asarray(last.batch.lengths.q_len, np.int64)
        q_len = q_len[: last.batch.lengths.num_requests]
        total = int(q_len.sum()) * heads
        counts = -(-q_len * heads // _ROWS)
        request = np.repeat(np.arange(len(q_len)), counts)
        item = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        begin = item * _ROWS
        end = np.minimum(begin + _ROWS, (q_len * heads)[request])
        row = ((np.cumsum(q_len) - q_len) * heads)[request] + begin
        sources = row[:, None] + np.arange(len(self.parts)) * total
        if sources.size and sources.max() > checks.INT32_MAX:
            raise InputError(
                f"{total} rows of {len(self.parts)} states do not fit 32 bits; plan fewer query "
                "tokens at once"
            )
        work = np.zeros((len(item), 8), np.int32)
        for column, values in enumerate((
            request, 0, heads, begin, end, np.arange(len(item)) * len(self.parts), len(self.parts),
        )):  # fmt: skip
            work[:, column] = values
        native = _C.BatchPlan.of_work(
            b"", merge_work=work.tobytes(), merge_sources=sources.ravel().tolist(),
            partial_rows=len(self.parts) * total,
        )  # fmt: skip
        kernels = variation.kernels
        core = _C.BatchCall(
            native, last.batch.lengths, (kernels[0] and kernels[0].module,
                                         kernels[1] and kernels[1].module),
            num_q_heads=heads, num_kv_heads=1,  # the rows of an item are of all heads
            head_dim=options.head_dim, head_dim_v=options.head_dim_v,
        )  # fmt: skip
        made = replace(
            variation, native=native, core=core, page_indices=None, key_blocks=None, block=None,
            launches={}, pointers=(0, 0),
        )  # fmt: skip
        made.commit(last.state)
        self._finishes[id(variation)] = made
        return made

    def finish(
        self,
        q: torch.Tensor,
        pairs: Pairs,
        params: Params,
        scale: float,
        states: States,
        *,
        return_lse: bool,
        partial: bool = False,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse) of the parts' states, merged in order and finalised."""
        last, (k, v) = self.parts[-1], pairs[-1]
        batch = last.batch
        bound = bind(self.variant, batch.dims, {**last.params, **params})
        form = last.form(q, k, v, True)
        made = self._finish_of(last.variation_of(bound, params))
        tensors, scalars = made.values(bound)
        inputs = [q, *(t for pair in pairs for t in pair), *tensors]
        check_results(out, lse, form, partial, inputs)
        with_lse = return_lse or (partial and not self.pointwise)
        written = out if out is None or last.cpu or is_result_aligned(out) else None
        addresses, layouts, held = bind_tensors(made.known, tensors)
        call = Call(
            form, batch.lengths, bound.structure, layouts, given_layouts(written, lse), with_lse,
            partial, batch.options.target, int(last.cpu),
        )  # fmt: skip
        ready = made.launches.get(call)
        if ready is None:
            if len(made.launches) >= KEPT_LAUNCHES:
                made.launches.clear()
            ready = made.launches[call] = make_launch(made, call, written, lse, tensors)
        if not q.shape[0]:
            result = q.new_empty(form.result_shape, dtype=result_dtype(q.dtype, partial))
            rows = q.new_empty(q.shape[:-1], dtype=torch.float32) if with_lse else None
            return result if out is None else out, rows if lse is None else lse
        result, rows = launch(
            made, ready, q, k, v, written, lse, scale, held, addresses, scalars, states.memory
        )
        return (result if out is None or out is written else out.copy_(result)), rows


class States:
    """Memory of the parts' states, as a merge reads it: outs [parts, rows], then lses."""

    def __init__(self, part: Planned, count: int, q: torch.Tensor) -> None:
        options = part.batch.options
        shape = (count, part.batch.lengths.num_q_tokens, options.num_q_heads)
        entries = shape[0] * shape[1] * shape[2]
        lse_at = -(-entries * options.head_dim_v * 4 // 64) * 64
        space, _ = Workspace(None, options.device).take(lse_at + entries * 4)
        assert space is not None or not entries
        space = q.new_empty(0, dtype=torch.uint8) if space is None else space
        outs = space[: entries * options.head_dim_v * 4].view(torch.float32)
        self.outs = outs.view(*shape, options.head_dim_v)
        self.lses = space[lse_at : lse_at + entries * 4].view(torch.float32).view(shape)
        self.memory = _Given(space, options.device)


class _Given(Workspace):
    """The states as the workspace of the finish."""

    __slots__ = ("_states",)

    def __init__(self, states: torch.Tensor, device: torch.device) -> None:
        super().__init__(None, device)
        self._states = states

    def take(self, wanted: int) -> tuple[torch.Tensor | None, int]:
        """The states, whatever the plan asks for."""
        return self._states, self._states.data_ptr()
