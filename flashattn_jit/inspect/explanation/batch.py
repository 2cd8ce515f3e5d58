"""The decisions of a batch's plan and their reasons, as text: `Plan.explain` forwards here."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...codegen.spec import SHORT_DTYPES
from ...env import format_bytes
from ...ops.launching.batch_run import Planned
from ...ops.planning.batch_plan import KINDS, Kernel, Variation
from ...planner.tiles import Problem, candidates
from ...variants.ir.dtypes import KV_NAMES
from ..table import si, table
from .tiles import OPAQUE_MASK

Work = NDArray[np.int32]
_REQUEST, _ROWS, _KEYS = 0, slice(3, 5), slice(5, 7)
_PARTIAL = 7


class LaunchWork(NamedTuple):
    """The work of one tile kind. work: [items, 8] as `fajit_work`; indptr: items of each worker;
    load_ns: predicted load of each worker."""

    kind: str
    kernel: Kernel
    work: Work
    indptr: NDArray[np.int64]
    load_ns: NDArray[np.float64]


def launches_of(planned: Variation) -> list[LaunchWork]:
    """The launches of a plan that have work, prefill first."""
    found = []
    for i, kernel in enumerate(planned.kernels):
        if kernel is None:
            continue
        work = np.frombuffer(planned.native.work(i), np.int32).reshape(-1, 8)
        valid = work[:, _REQUEST] >= 0  # the lists of a CUDA graph are padded
        before = np.concatenate([[0], np.cumsum(valid)])
        indptr, work = before[planned.native.worker_indptr(i)], work[valid]
        load = np.asarray(planned.native.load_ns(i), np.float64)
        if len(work):
            found.append(LaunchWork(KINDS[i], kernel, work, indptr, load))
    return found


def explain_plan(planned: Planned) -> str:
    """Tile kinds, splits, workers, loads, workspace and predicted time of a plan, with reasons."""
    first, batch = planned.first, planned.batch
    launches = launches_of(first)
    lines = [_head(planned), "", *_kernels(first, launches), "", *_balance(first, launches), ""]
    lines += [f"  {line}" for line in _why(first, launches)]
    if batch.options.limits is not None:
        lines.append(f"  limits: {batch.options.limits}; every plan within them has this workspace")
    return "\n".join(lines)


def _head(planned: Planned) -> str:
    batch = planned.batch
    lengths, keys = batch.lengths, batch.keys
    where = f"pages of {keys.page_size}" if keys.page_size else "ragged keys"
    parts = [
        f"{lengths.num_requests} requests, {lengths.num_q_tokens} query tokens (up to "
        f"{lengths.max_q_len} a request), {sum(lengths.kv_len[: lengths.num_requests])} keys (up "
        f"to {lengths.max_kv_len}), {where}"
    ]
    if batch.num_levels:
        parts.append(f"{lengths.num_groups} groups in {batch.num_levels} levels of shared keys")
    if batch.lists is not None:
        lists = batch.lists
        parts.append(
            f"{lists.counts.numel()} key lists of {lists.q_block} x {lists.key_block} blocks, "
            f"{lists.key_blocks.numel()} entries"
        )
    o = batch.options
    text = (
        f"plan of {batch.name} on {o.target}: {o.num_q_heads} query heads over "
        f"{o.num_kv_heads} kv heads, head_dim {o.head_dim}, {KV_NAMES[o.q_dtype]}"
    )
    if any(o.kv_bytes):
        keys_bytes, values_bytes = o.kv_bytes
        values = f" and {values_bytes} of values ({_short(o.v_dtype)})"
        two_bytes = 2 * (o.head_dim + o.head_dim_v)
        if o.v_in_k:
            values = f", whose first {o.head_dim_v} columns are the values"
            values_bytes, two_bytes = 0, 2 * o.head_dim
        share = (keys_bytes + values_bytes) / (two_bytes * o.num_kv_heads)
        parts.append(
            f"a token has {keys_bytes} bytes of keys ({_short(o.k_dtype)}){values}, {share:.2f} of "
            "bfloat16's"
        )
    return "\n  ".join([text, *parts])


def _short(dtype: torch.dtype) -> str:
    name = KV_NAMES[dtype]
    return SHORT_DTYPES.get(name, name)


def _kernels(planned: Variation, launches: list[LaunchWork]) -> list[str]:
    group = planned.batch.options.group_size
    rows = []
    for launch in launches:
        spec, work = launch.kernel.spec, launch.work
        spans = work[:, _KEYS]
        rows.append([
            spec.tile_kind if spec.tile_kind == "prefill_wide" else launch.kind,
            f"{spec.tile_q} x {spec.tile_kv}",
            ", ".join(spec.features) or "-",
            str(len(np.unique(work[:, _REQUEST]))),
            str(len(work)),
            str(int((work[:, _PARTIAL] >= 0).sum())),
            f"{np.diff(work[:, _ROWS]).mean():.1f}",
            f"{np.diff(spans).mean():.0f}",
        ])  # fmt: skip
    header = ["tile kind", "tile", "features", "requests", "items", "partial", "rows", "keys"]
    if not rows:
        return ["  no work: no request has query tokens and keys"]
    few = planned.batch.kernels.few_rows
    return [
        table(header, rows, "  "),
        f"  few_row serves requests of up to {few} packed rows (q_len x {group} heads of a group)",
    ]


def _balance(planned: Variation, launches: list[LaunchWork]) -> list[str]:
    native, options = planned.native, planned.batch.options
    rows = []
    for launch in launches:
        load = launch.load_ns
        mean = float(load.mean()) if load.size else 0.0
        busy = int((load > 0).sum())
        rows.append([
            launch.kind, str(load.size), str(busy), _time(mean), _time(float(load.max(initial=0))),
            f"{float(load.max(initial=0)) / mean:.3f}" if mean else "-",
        ])  # fmt: skip
    lines = []
    if rows:
        header = ["tile kind", "workers", "busy", "mean load", "longest", "longest / mean"]
        lines.append(table(header, rows, "  "))
    workers = max((launch.load_ns.size for launch in launches), default=1)
    mean = native.total_ns / max(1, workers)
    ratio = f"{native.critical_ns / mean:.3f} of the mean" if mean else "no work"
    shared = ", threads share the lists of both kinds" if options.cpu else ""
    merge_ns = planned.merge_ns
    lines += [
        f"  critical path {_time(native.critical_ns)}, {ratio}{shared}",
        f"  splits: a row's keys in at most {native.most_splits} parts, {native.num_merges} "
        f"merges, {native.partial_rows} partial rows",
        f"  workspace: {format_bytes(native.workspace_bytes)} ({native.workspace_bytes} bytes)",
        f"  predicted time: {_time(native.critical_ns + merge_ns)}"
        + (f", of which the merge {_time(merge_ns)}" if merge_ns else ""),
    ]
    return lines


def _time(ns: float) -> str:
    return si(ns * 1e-9, "s")


def _why(planned: Variation, launches: list[LaunchWork]) -> list[str]:
    lines = []
    for launch in launches:
        lines.append(f"why {launch.kind}:")
        taken = launch.kernel.spec
        for choice in candidates(
            _problem(planned, launch), planned.batch.options.target, planned.known.ir,
            taken.features, taken.tile_kind != "prefill",
        ):  # fmt: skip
            spec = choice.spec
            mark = "->" if spec.tile_kind == taken.tile_kind and choice.chosen else "  "
            lines.append(
                f"  {mark} {spec.tile_kind} {spec.tile_q} x {spec.tile_kv}: {choice.reason}"
            )
    if planned.batch.options.batch_invariant:
        lines.append("cuts at fixed positions, so that a request's bits do not depend on its batch")
    elif planned.native.most_splits > 1:
        lines.append("keys are split where a worker's share is full; the next one continues")
    if planned.classified:
        what = "bounds of each row's keys" if planned.known.mask_is_contiguous else "tiles"
        lines.append(f"the mask's {what} are costed: masked-out keys cost nothing")
    elif planned.known.ir.cpp_hook("mask_mod") is not None:
        lines.append(OPAQUE_MASK)
    elif planned.known.ir.has("mask_mod"):
        lines.append("the mask is not costed, only lengths; kernels still skip masked-out tiles")
    return lines


def _problem(planned: Variation, launch: LaunchWork) -> Problem:
    """The requests of one launch as a problem of the tile planner."""
    lengths, o = planned.batch.lengths, planned.batch.options
    count = lengths.num_requests
    members = [int(b) for b in np.unique(launch.work[:, _REQUEST]) if b < count] or [0]
    q_len, kv_len = lengths.q_len, lengths.kv_len
    # The longest request decides the tile kind.
    longest = max(members, key=q_len.__getitem__)
    names = o.dtypes
    return Problem(
        (q_len[longest],), (kv_len[longest],), o.num_q_heads, o.num_kv_heads, o.head_dim,
        o.head_dim_v, *names,
    )  # fmt: skip
