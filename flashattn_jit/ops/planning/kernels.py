"""Which kernels a batch needs.

`Options` say what kernels are chosen for; `Kernels` choose, load and cost them, by structure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ... import _C
from ...codegen.spec import CPU_TARGETS, LANES, KernelSpec
from ...jit.module import default, load_stepping
from ...planner.cuda_tiles import row_class
from ...planner.tiles import (
    ALL_ROWS,
    choose_rows,
    coefficients,
    few_rows,
    item_rows,
    least_part,
    merge_cost,
    requests_of,
)
from ...variants.binding import Structure
from ...variants.ir.dtypes import DTYPE_NAMES
from ...variants.ir.ir import VariantIR
from ..arguments.limits import Limits

PREFILL, FEW_ROW = 0, 1
KINDS = ("prefill", "few_row")
_SPLIT_KEYS = (4096, 2048)
"""Keys between cuts of batch-invariant plans, by kind: FlashInfer's fixed split, and twice that
where many rows share a key."""

_L2_BYTES = _C.cache_sizes()[1]
_KEPT_PAIRS = 256


@dataclass(frozen=True, slots=True)
class Options:
    """What kernels are chosen for: of a `BatchAttention`, or of dense and packed calls alike."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    q_dtype: torch.dtype
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    device: torch.device
    target: str
    limits: Limits | None = None
    cuda_graph: bool = False
    batch_invariant: bool = False

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def cpu(self) -> bool:
        """Whether kernels are CPU code."""
        return self.target in CPU_TARGETS


class Kernel(NamedTuple):
    """A kernel of one tile kind. native: as the planner sees it. module: None in bounds."""

    spec: KernelSpec
    module: _C.Module | None
    native: _C.Kind
    workers: int


Pair = tuple[Kernel | None, Kernel | None]
"""Prefill and few-row; None where the batch has no such work."""


class Needs(NamedTuple):
    """What of a batch decides its kernels: storage and rows. `prefill_rows`: of the longest."""

    prefill_rows: int
    few: bool
    paged: bool = False
    sparse: bool = False
    mixed: bool = False
    block_mask: bool = False
    unaligned: bool = False

    def features(self, cpu: bool) -> tuple[str, ...]:
        """Of the kernels."""
        if cpu and (self.paged or self.sparse or self.mixed):
            return ("indirect",)
        wanted = {
            "block_mask": self.block_mask, "paged": self.paged, "mixed_rows": self.mixed,
            "sparse": self.sparse, "unaligned": self.unaligned and not cpu,
        }  # fmt: skip
        return tuple(name for name, needed in wanted.items() if needed)


@dataclass(slots=True)
class Kernels:
    """The kernels of one object, or of calls of one kind, by structure."""

    options: Options
    _known: dict[tuple[object, ...], Kernel] = field(default_factory=dict)
    _pairs: dict[tuple[object, ...], Pair] = field(default_factory=dict)
    _told: dict[tuple[object, ...], dict[str, Any]] = field(default_factory=dict)

    @property
    def few_rows(self) -> int:
        """Most packed rows of a few-row request."""
        return few_rows(self.options.target, DTYPE_NAMES[self.options.q_dtype])

    def needs(
        self,
        lengths: _C.BatchLengths,
        group_size: int,
        q_block: int,
        paged: bool,
        mixed: bool,
        block_mask: bool,
        unaligned: bool,
    ) -> Needs:
        """The needs of a batch; under limits, of every batch.

        group_size: query heads that share a tile.
        """
        prefill, few, rows = lengths.tile_kinds(group_size, self.few_rows, q_block)
        always = self.options.limits is not None
        if always or self.options.batch_invariant or self.options.cpu:
            rows = ALL_ROWS
        elif prefill:
            rows = row_class(rows)
        return Needs(
            rows if prefill or always else 0, bool(few) or always, paged, q_block > 0, mixed,
            block_mask, unaligned,
        )  # fmt: skip

    def pair(self, known: Structure, needs: Needs, name: str) -> Pair:
        """The kernels, from memory or loaded now. name: of the variant, for messages.

        Raises:
            CompileError: a kernel was needed that no cache has, and the compiler failed.
        """
        found = self._pairs.get((known, needs))
        if found is not None:
            if any(found):
                default.last_source = "memory"
            return found
        features = needs.features(self.options.cpu)
        prefill = few = None
        if needs.prefill_rows:
            prefill = self._kernel(known, needs.prefill_rows, features, name)
        if needs.few:
            few = self._kernel(known, 1, features, name)
        if len(self._pairs) >= _KEPT_PAIRS:
            self._pairs.clear()
        self._pairs[known, needs] = prefill, few
        return prefill, few

    def unloaded(self, known: Structure, needs: Needs, name: str) -> Pair:
        """The kernels of a CPU target as `_C.BatchPlan.workspace_bound` takes them: no modules."""
        features = needs.features(self.options.cpu)
        specs = (self.spec(known.ir, rows, features, name) for rows in (needs.prefill_rows, 1))
        prefill, few = (Kernel(s, None, native_kind(s, self.options.target), 0) for s in specs)
        return prefill, few

    def spec(
        self, ir: VariantIR, packed_rows: int, features: tuple[str, ...], name: str
    ) -> KernelSpec:
        """The first choice for some rows."""
        o = self.options
        dtypes = DTYPE_NAMES[o.q_dtype], DTYPE_NAMES[o.k_dtype], DTYPE_NAMES[o.v_dtype]
        return choose_rows(
            ir, (o.head_dim, o.head_dim_v), dtypes, o.target, packed_rows, features, name
        )

    def _kernel(
        self, known: Structure, packed_rows: int, features: tuple[str, ...], name: str
    ) -> Kernel:
        rows = packed_rows if self.options.cpu else row_class(packed_rows)
        key = (known, rows, features)
        kernel = self._known.get(key)
        if kernel is None:
            spec = self.spec(known.ir, packed_rows, features, name)
            kernel = self._known[key] = self._load(spec)
        return kernel

    def _load(self, spec: KernelSpec) -> Kernel:
        if self.options.cpu:
            module = load_stepping(requests_of(spec))[1]
            return Kernel(spec, module, native_kind(spec, self.options.target, module), 0)
        from ..device import cuda  # a process without a device need not have it

        spec, module = cuda.load_spec(spec)
        workers = cuda.workers(spec, self.options.device, module)
        return Kernel(spec, module, native_kind(spec, self.options.target, module), workers)

    def plan_options(self, kernels: Pair) -> dict[str, Any]:
        """What `_C.BatchPlan` and its `workspace_bound` are told of the machine and the object."""
        threads = torch.get_num_threads()
        key = (threads, *(k and id(k) for k in kernels))
        found = self._told.get(key)
        if found is None:
            found = self._told[key] = self._plan_options(kernels, threads)
        return found

    def _plan_options(self, kernels: Pair, threads: int) -> dict[str, Any]:
        o = self.options
        workers = tuple(threads if o.cpu else k.workers if k else 1 for k in kernels)
        splits = tuple(
            -(-keys // k.spec.tile_kv) * k.spec.tile_kv if k else keys
            for keys, k in zip(_SPLIT_KEYS, kernels, strict=True)
        )
        return {
            "num_q_heads": o.num_q_heads,
            "head_dim_v": o.head_dim_v,
            "few_rows": self.few_rows,
            "num_workers": workers,
            "share_workers": o.cpu,
            "batch_invariant": o.batch_invariant,
            "split_keys": splits if o.batch_invariant else (0, 0),
            "merge_ns": merge_cost(o.target),
        }


def native_kind(spec: KernelSpec, target: str, module: _C.Module | None = None) -> _C.Kind:
    """A kernel as the planner sees it: its tile and what its work costs."""
    rows = granule = spec.tile_q  # on devices a tile that is not full takes as long as a full one
    if target in CPU_TARGETS:
        rows = item_rows(spec, _L2_BYTES)
        granule = LANES[spec.target] if spec.tile_kind == "prefill" else 1
    return _C.Kind(
        module, tile_q=rows, row_granule=granule, tile_kv=spec.tile_kv, min_chunk=least_part(spec),
        **coefficients(spec, target)._asdict(),
    )  # fmt: skip


def native_kinds(kernels: Pair) -> tuple[_C.Kind | None, _C.Kind | None]:
    """As the planner sees them."""
    prefill, few = kernels
    return prefill and prefill.native, few and few.native
