"""Plans of batches made from plain lists, and which keys each row gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from flashattn_jit import _C
from flashattn_jit.ops.planning.batch_plan import native_kind
from flashattn_jit.planner.tiles import choose_rows, few_rows, merge_cost
from flashattn_jit.variants.ir.ir import VariantIR

WORK = ("request", "head_begin", "head_count", "row_begin", "row_end", "kv_begin", "kv_end",
        "partial")  # fmt: skip
MERGE = ("request", "head_begin", "head_count", "row_begin", "row_end", "first_partial",
         "num_splits", "reserved")  # fmt: skip


SMALL_KINDS: tuple[dict[str, Any], ...] = (
    {"tile_q": 32, "row_granule": 8, "tile_kv": 16, "min_chunk": 32, "item_ns": 50.0,
     "load_ns": 4.0, "pair_ns": 0.5, "state_ns": 5.0, "cached_keys": 200.0},
    {"tile_q": 8, "row_granule": 1, "tile_kv": 16, "min_chunk": 32, "item_ns": 20.0,
     "load_ns": 4.0, "pair_ns": 0.25, "state_ns": 5.0},
)  # fmt: skip
"""Prefill and few-row, so small that small batches have many tiles and cuts."""


def small_kinds(module: _C.Module | None = None) -> tuple[_C.Kind, _C.Kind]:
    prefill, few_row = (_C.Kind(module, **fields) for fields in SMALL_KINDS)
    return prefill, few_row


def small_cost(kind: int, item: dict[str, int]) -> float:
    """The cost of an item by `SMALL_KINDS`, in ns; its rows see all keys."""
    of = SMALL_KINDS[kind]
    rows, keys = item["row_end"] - item["row_begin"], item["kv_end"] - item["kv_begin"]
    computed = -(-rows // of["row_granule"]) * of["row_granule"]
    state = rows * of["state_ns"] if item["partial"] >= 0 else 0.0
    return of["item_ns"] + keys * max(of["load_ns"], computed * of["pair_ns"]) + state


PREFILL, FEW_ROW = small_kinds()


CPU_KINDS = (
    _C.Kind(None, tile_q=96, row_granule=16, tile_kv=96, min_chunk=256, item_ns=1000.0,
            load_ns=25.0, pair_ns=5.4, state_ns=52.0),
    _C.Kind(None, tile_q=8, row_granule=1, tile_kv=64, min_chunk=256, item_ns=1000.0, load_ns=25.0,
            pair_ns=10.9, state_ns=52.0),
)  # fmt: skip
CPU_MERGE_NS = 2000.0
"""Costs of one machine: planner/tiles.py measures each."""


def device_options(target: str, packed_rows: int, workers: int, head_dim: int = 128) -> dict:
    """Kinds and options of a device for `make`, those of bf16 calls without a mask."""
    dtypes = ("bfloat16",) * 3
    specs = [
        choose_rows(VariantIR(()), (head_dim, head_dim), dtypes, target, rows)
        for rows in (max(packed_rows, few_rows(target, dtypes[0]) + 1), 1)
    ]
    return {
        "kinds": tuple(native_kind(spec, target) for spec in specs), "workers": workers,
        "few_rows": few_rows(target, dtypes[0]), "head_dim_v": head_dim,
        "merge_ns": merge_cost(target),
    }  # fmt: skip


def array(values: Sequence[int] | np.ndarray, dtype: type = np.int32) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(values, dtype))


def span(a: np.ndarray | None) -> tuple[int, int, int] | None:
    """(address, size, itemsize): how the extension takes an array, which must outlive the call."""
    return None if a is None else (a.ctypes.data, a.size, a.itemsize)


def indptr(lengths: Sequence[int], dtype: type = np.int32) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)


@dataclass
class Ragged:
    """Keys of requests or groups, one after another."""

    kv_len: Sequence[int]

    def native(self, keep: list) -> tuple:
        keep.append(indptr(self.kv_len))
        return (span(keep[-1]), None, None, 0, 0)


@dataclass
class Paged:
    kv_len: Sequence[int]
    page_size: int

    def native(self, keep: list) -> tuple:
        pages = [-(-n // self.page_size) for n in self.kv_len]
        last = [n - max(p - 1, 0) * self.page_size for n, p in zip(self.kv_len, pages, strict=True)]
        keep += [indptr(pages), array(last)]
        return (None, span(keep[-2]), span(keep[-1]), self.page_size, sum(pages))


@dataclass
class Dense:
    """Keys of requests in one dim of `rows` slots, of which each request uses its `kv_len`; `rows`
    is the longest of them by default."""

    kv_len: Sequence[int]
    rows: int | None = None

    def lengths(self, q_len: Sequence[int], q_offset: Sequence[int] | None) -> _C.BatchLengths:
        (rows,) = {*q_len} or {0}
        most = max(self.kv_len, default=0) if self.rows is None else self.rows
        offset = 0 if q_offset is None else tuple(q_offset)
        return _C.BatchLengths.dense(len(q_len), rows, most, tuple(self.kv_len), offset)


@dataclass
class Level:
    """Shared keys: `groups` are lists of packed tokens; `consecutive`: entry e is token e, so
    that no list of tokens is passed."""

    groups: Sequence[Sequence[int]]
    storage: Ragged | Paged
    consecutive: bool = False

    def native(self, keep: list) -> tuple:
        keep.append(indptr([len(g) for g in self.groups]))
        entries = keep[-1]
        tokens = None
        if not self.consecutive:
            tokens = array([t for g in self.groups for t in g])
            keep.append(tokens)
        return (span(entries), span(tokens), self.storage.native(keep))


def lengths(
    q_len: Sequence[int],
    storage: Ragged | Paged | Dense,
    q_offset: Sequence[int] | None = None,
    levels: Sequence[Level] = (),
) -> _C.BatchLengths:
    if isinstance(storage, Dense):
        assert not levels
        return storage.lengths(q_len, q_offset)
    keep: list = [indptr(q_len)]
    if q_offset is not None:
        keep.append(array(q_offset))
    return _C.BatchLengths(
        span(keep[0]),
        storage.native(keep),
        None if q_offset is None else span(keep[1]),
        [level.native(keep) for level in levels],
    )


@dataclass
class Planned:
    """A plan as lists, with its batch."""

    plan: _C.BatchPlan
    batch: _C.BatchLengths
    heads: tuple[int, int]
    q_len: Sequence[int]
    levels: Sequence[Level] = ()
    work: tuple[list[dict[str, int]], ...] = field(init=False)
    merges: list[dict[str, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.work = tuple(items_of(self.plan.work(k), WORK) for k in (0, 1))
        self.merges = items_of(self.plan.merge_work, MERGE)

    @property
    def items(self) -> list[dict[str, int]]:
        return [*self.work[0], *self.work[1]]

    def tokens(self, entity: int) -> list[int]:
        """Packed tokens that are the rows of a request or group."""
        if entity < len(self.q_len):
            first = sum(self.q_len[:entity])
            return list(range(first, first + self.q_len[entity]))
        groups = [g for level in self.levels for g in level.groups]
        return list(groups[entity - len(self.q_len)])

    def rows(self, item: dict[str, int]) -> list[tuple[int, int]]:
        """(packed token, q head) of every packed row of a work or merge item."""
        tokens, count = self.tokens(item["request"]), item["head_count"]
        return [
            (tokens[p // count], item["head_begin"] + p % count)
            for p in range(item["row_begin"], item["row_end"])
        ]

    def results(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """By (packed token, q head), the key ranges that its output is made of, in merge order.

        Fails where an output or a partial state is written twice, or read without being written.
        """
        states: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        out: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for item in self.items:
            keys = (item["kv_begin"], item["kv_end"])
            for i, row in enumerate(self.rows(item)):
                if item["partial"] < 0:
                    assert row not in out, f"{row} is written twice"
                    out[row] = [keys]
                else:
                    assert item["partial"] + i not in states, "a partial row is written twice"
                    states[item["partial"] + i] = (row, keys)
        assert sorted(states) == list(range(self.plan.partial_rows))
        sources, used = self.plan.merge_sources, []
        for merge in self.merges:
            rows, first = self.rows(merge), merge["first_partial"]
            assert merge["num_splits"] > 0
            for i in range(merge["num_splits"]):
                start = sources[first + i] if sources else first + i * len(rows)
                for r, row in enumerate(rows):
                    assert states[start + r][0] == row, "a merge reads another row's state"
                    used.append(start + r)
            for r, row in enumerate(rows):
                assert row not in out, f"{row} is written twice"
                out[row] = [
                    states[(sources[first + i] if sources else first + i * len(rows)) + r][1]
                    for i in range(merge["num_splits"])
                ]
        assert sorted(used) == sorted(states), "a state is merged twice, or never"
        return out

    def lists(self, kind: int) -> list[list[dict[str, int]]]:
        """The items of a kind, one list for each worker."""
        return [self.work[kind][a:b] for a, b in pairwise(self.plan.worker_indptr(kind))]

    def loads(self) -> list[float]:
        """The load of each worker, where both kinds share the workers."""
        return [a + b for a, b in zip(self.plan.load_ns(0), self.plan.load_ns(1), strict=True)]


def items_of(data: bytes, names: tuple[str, ...]) -> list[dict[str, int]]:
    """Work or merge items by the names of their fields."""
    rows = np.frombuffer(data, np.int32).reshape(-1, 8)
    return [dict(zip(names, map(int, row), strict=True)) for row in rows]


def make(
    q_len: Sequence[int],
    storage: Ragged | Paged | Dense,
    *,
    heads: tuple[int, int] = (4, 2),
    workers: int | tuple[int, int] = 4,
    levels: Sequence[Level] = (),
    q_offset: Sequence[int] | None = None,
    kinds: tuple = (PREFILL, FEW_ROW),
    lists: tuple | None = None,
    mask: tuple | None = None,
    **options: object,
) -> Planned:
    """A plan of requests; lists and mask as BatchPlan has them, options as PlanOptions."""
    batch = lengths(q_len, storage, q_offset, levels)
    both = (workers, workers) if isinstance(workers, int) else workers
    settings = {"head_dim_v": 8, "few_rows": 8, "num_workers": both, **options}
    settings = _C.PlanOptions(num_q_heads=heads[0], num_kv_heads=heads[1], **settings)
    plan = _C.BatchPlan(batch, kinds, settings, lists, mask)
    return Planned(plan, batch, heads, q_len, levels)


def check_whole(planned: Planned, kv_len: Sequence[int]) -> None:
    """Asserts that every row gets every key of its request once, in ascending order. kv_len: of
    each request, shared levels included."""
    results = planned.results()
    for b, length in enumerate(kv_len):
        for token in planned.tokens(b):
            for head in range(planned.heads[0]):
                at = 0
                for begin, end in results.pop((token, head)):
                    assert begin in (at, end), "keys out of order, seen twice or left out"
                    at = max(at, end)
                assert at == length
    assert not results


def device_block(core: _C.BatchCall) -> bytes:
    """The block that a call writes for its device."""
    memory = np.zeros(core.block_bytes, np.uint8)
    core.write_block(memory.ctypes.data, memory.nbytes)
    return memory.tobytes()
