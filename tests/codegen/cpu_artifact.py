"""CPU artifacts called through their C interface, with batches as plain data: kernels are tested
without the planner and the runtime.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from flashattn_jit import _C
from flashattn_jit.codegen.spec import KernelSpec, TileKind
from flashattn_jit.jit.module import default
from flashattn_jit.planner import tiles
from flashattn_jit.planner.tiles import build_request
from flashattn_jit.variants.interval.range_tables import build_tables
from flashattn_jit.variants.interval.simplify import range_tables
from flashattn_jit.variants.ir.ir import VariantIR
from tests.harness.abi import Args, TensorParam

WRITE_LSE, PARTIAL = 1, 2


@cache
def library(
    ir: VariantIR, kind: TileKind, dtype: str, dims: tuple[int, int], target: str,
    features: tuple[str, ...],
) -> ctypes.CDLL:  # fmt: skip
    """The loaded artifact of a spec with the planner's tile; compiled where the cache lacks it."""
    blank = KernelSpec(ir, dtype, dtype, dtype, *dims, target, kind, 0, 0, features)
    spec = tiles.with_cpu_tile(blank, kind)
    module = default.load_stepping([build_request(spec)])[1]
    return ctypes.CDLL(str(module.path))


def pack(values: Sequence[int] | None) -> torch.Tensor | None:
    """An int32 array; a caller that passes its address keeps it alive."""
    return None if values is None else torch.tensor(list(values), dtype=torch.int32)


@dataclass
class Batch:
    """The arguments of one launch, per request; groups of shared keys come last.

    q is [tokens, Hq, D]; k and v as stored: [pages, page_size, Hkv, D] or [tokens, Hkv, D].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_len: list[int]
    kv_len: list[int]
    q_row0: list[int]
    q_offset: list[int]
    kv_row0: list[int] | None = None
    q_token0: list[int] | None = None
    kv_token0: list[int] | None = None
    page_indptr: list[int] | None = None
    page_indices: list[int] | None = None
    page_size: int = 0
    kv_first: list[int] | None = None
    row_request: list[int] | None = None
    row_token: list[int] | None = None
    key_blocks: list[int] | None = None
    key_block: int = 0
    work: list[tuple[int, ...]] = field(default_factory=list)
    merge_work: list[tuple[int, ...]] = field(default_factory=list)
    merge_sources: list[int] | None = None
    worker_indptr: list[int] | None = None
    partial_rows: int = 0
    flags: int = WRITE_LSE

    @property
    def group_size(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.k.shape[-2]


def run(lib: ctypes.CDLL, batch: Batch, bound: Any, *, num_threads: int = 1):
    """(out [tokens, Hq, Dv], lse [tokens, Hq]) of `fajit_attention`, then of `fajit_merge`.

    With several threads, each thread visits every work list of the batch, every second thread in
    reverse order; a batch without lists then becomes one list.
    """
    tokens, heads, dim = batch.q.shape
    dim_v = batch.v.shape[-1]
    dtype = torch.float32 if batch.flags & PARTIAL else batch.q.dtype
    out = torch.full((tokens, heads, dim_v), float("nan"), dtype=dtype)
    lse = torch.full((tokens, heads), float("nan"))
    partial_out = torch.full((max(batch.partial_rows, 1), dim_v), float("nan"))
    partial_lse = torch.full((max(batch.partial_rows, 1),), float("nan"))
    requests = len(batch.kv_len)
    mask = bound.ir.hook("mask_mod")
    tensors = [*bound.tensors]
    if mask is not None:
        tensors += build_tables(range_tables(mask), tensors)
    c_tensors = (TensorParam * max(len(tensors), 1))()
    for at, t in zip(c_tensors, tensors, strict=False):
        at.describe(t)
    scalars = (ctypes.c_uint64 * max(len(bound.scalars), 1))()
    for i, (value, param) in enumerate(zip(bound.scalars, bound.ir.scalars, strict=True)):
        number = ctypes.c_int64(int(value)) if param.dtype == "int64" else ctypes.c_double(value)
        scalars[i] = ctypes.c_uint64.from_buffer(number).value

    a, keep = Args(), []

    def address(values: Any) -> int | None:
        array = pack(values) if isinstance(values, list) else values
        keep.append(array)
        return None if array is None else array.data_ptr()

    def flat(rows: list[tuple[int, ...]]) -> list[int]:
        return [x for row in rows for x in (*row, *(0,) * (8 - len(row)))]

    strides = ctypes.c_int64 * 3

    def rows(t: torch.Tensor) -> Any:
        *outer, row, head = t.stride()[:-1]
        return strides(outer[0] if outer else 0, head, row)

    zeros = [0] * requests
    a.abi_version, a.args_bytes = _C.ABI_VERSION, ctypes.sizeof(Args)
    a.q, a.k, a.v = batch.q.data_ptr(), batch.k.data_ptr(), batch.v.data_ptr()
    a.out, a.lse = out.data_ptr(), lse.data_ptr()
    a.q_stride, a.k_stride, a.v_stride = rows(batch.q), rows(batch.k), rows(batch.v)
    a.out_stride, a.lse_stride = rows(out), strides(0, 1, heads)
    a.num_requests, a.num_q_heads, a.num_kv_heads = requests, heads, batch.k.shape[-2]
    a.head_dim, a.head_dim_v, a.flags = dim, dim_v, batch.flags
    a.scale, a.num_threads = dim**-0.5, num_threads
    a.q_len, a.kv_len = address(batch.q_len), address(batch.kv_len)
    a.q_row0, a.kv_row0 = address(batch.q_row0), address(batch.kv_row0 or zeros)
    a.q_offset = address(batch.q_offset)
    a.q_token0, a.kv_token0 = address(batch.q_token0 or zeros), address(batch.kv_token0 or zeros)
    a.tensors, a.num_tensors = ctypes.addressof(c_tensors), len(tensors)
    a.scalars, a.num_scalars = ctypes.addressof(scalars), len(bound.scalars)
    a.work, a.num_work = address(flat(batch.work)), len(batch.work)
    a.merge_work, a.num_merge_work = address(flat(batch.merge_work)), len(batch.merge_work)
    a.partial_out, a.partial_lse = partial_out.data_ptr(), partial_lse.data_ptr()
    a.page_indptr, a.page_indices = address(batch.page_indptr), address(batch.page_indices)
    a.page_size = batch.page_size
    a.num_pages = batch.k.shape[0] if batch.page_size else 0
    a.kv_requests, a.kv_rows = a.num_pages or 1, batch.k.shape[-3]
    a.row_request, a.row_token = address(batch.row_request), address(batch.row_token)
    a.merge_sources, a.kv_first = address(batch.merge_sources), address(batch.kv_first)
    a.key_blocks, a.key_block = address(batch.key_blocks), batch.key_block
    a.num_key_blocks = len(batch.key_blocks or ())
    lists = batch.worker_indptr or ([0, len(batch.work)] if num_threads > 1 else None)
    if lists is not None:
        a.worker_indptr, a.num_workers = address(lists), len(lists) - 1
        a.cursors = address([0] * a.num_workers)

    def visit(number: int) -> list[int]:
        mine, statuses = Args.from_buffer_copy(a), []
        for worker in range(max(a.num_workers, 1))[:: -1 if number % 2 else 1]:
            mine.worker = worker
            statuses.append(lib.fajit_attention(ctypes.byref(mine)))
        return statuses

    with ThreadPoolExecutor(num_threads) as pool:
        assert not any(status for s in pool.map(visit, range(num_threads)) for status in s)
    assert lib.fajit_merge(ctypes.byref(a)) == 0
    return out, lse
