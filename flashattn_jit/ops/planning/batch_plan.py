"""Planning: the kernels that a batch needs and the distribution of its work, for every call.

`Kernels` chooses, loads and costs kernels for `Options` and a variant's structure. A `Batch` is
the input of planning: requests, the storage of their keys, which keys are visited. A `Variation` is
that batch planned for one structure of its variant and one alignment of its tensors: the first one
is made by plan(), or by the first dense or packed call of its kind; others by runs whose params or
tensors need other kernels. Making one has no effect on a device before `commit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ... import _C
from ...codegen.spec import KernelSpec, has_whole_rows, on_cpu
from ...codegen.targets import CPU_ROWS
from ...errors import InputError
from ...jit.module import default, load_stepping
from ...planner.cuda_tiles import row_class
from ...planner.tiles import (
    ALL_ROWS,
    build_requests,
    choose_rows,
    coefficients,
    fallbacks,
    few_rows,
    item_rows,
    least_part,
    merge_cost,
    partial_rows_cost,
)
from ...variants.binding import Bound, Structure
from ...variants.ir.dtypes import KV_NAMES
from ...variants.ir.ir import VariantIR
from ...variants.params import Dims
from ..arguments.calls import BlockMaskLayout, Call, address_of, bind_tensors
from ..arguments.limits import Limits, memory_bytes
from ..keys.key_lists import KeyLists

if TYPE_CHECKING:
    from ...planner.devices import Device
    from ..device.plan_memory import DeviceState

# --- kernels --------------------------------------------------------------------------------------

KINDS = ("prefill", "few_row")

_SPLIT_KEYS = (4096, 2048)
"""Keys per split of batch-invariant plans, by kind: FlashInfer's fixed split for few-row kernels,
and twice that for prefill, where many rows share a key."""

_L2_BYTES = _C.cache_sizes()[1]
_KEPT_PAIRS = 256


@dataclass(frozen=True, slots=True)
class Options:
    """The properties that kernels are chosen by, of a `BatchAttention` or of a call.

    kv_bytes: of a token's keys and of its values, with scales and zero points of their own; (0, 0)
    where nobody asks. v_in_k: values are the first columns of keys.
    """

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
    kv_bytes: tuple[int, int] = (0, 0)
    v_in_k: bool = False

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def query_bounds(self) -> tuple[int, int]:
        """group_size, and the rows of q that the memory of the device can hold."""
        row_bytes = self.num_q_heads * self.head_dim * self.q_dtype.itemsize
        return self.group_size, memory_bytes(self.device) // row_bytes

    @property
    def cpu(self) -> bool:
        """Whether kernels are CPU code."""
        return on_cpu(self.target)

    @property
    def dtypes(self) -> tuple[str, str, str]:
        """The names of the dtypes of q, k and v."""
        return KV_NAMES[self.q_dtype], KV_NAMES[self.k_dtype], KV_NAMES[self.v_dtype]

    @property
    def whole_rows(self) -> bool:
        """Whether rows are multiples of 16 bytes long."""
        return has_whole_rows((self.head_dim, self.head_dim_v), self.dtypes)


class Kernel(NamedTuple):
    """A kernel of one tile kind. native: its tile and costs. module: None for workspace bounds."""

    spec: KernelSpec
    module: _C.Module | None
    native: _C.Kind
    workers: int


Pair = tuple[Kernel | None, Kernel | None]
"""Prefill and few-row; None if the batch has no such work."""


class Needs(NamedTuple):
    """The properties of a batch that decide its kernels. prefill_rows: packed rows of the longest
    prefill request. few: whether there are few-row requests. tma: whether TMA can copy the keys:
    pages have a multiple of 8 slots, and the driver encodes tensor maps."""

    prefill_rows: int
    few: bool
    paged: bool = False
    sparse: bool = False
    mixed: bool = False
    block_mask: bool = False
    unaligned: bool = False
    tma: bool = True

    def features(self, cpu: bool) -> tuple[str, ...]:
        """The features of the kernels."""
        if cpu and (self.paged or self.sparse or self.mixed):
            return ("indirect",)
        wanted = {
            "block_mask": self.block_mask, "paged": self.paged, "mixed_rows": self.mixed,
            "sparse": self.sparse, "unaligned": self.unaligned and not cpu,
        }  # fmt: skip
        return tuple(name for name, needed in wanted.items() if needed)


@dataclass(slots=True)
class Kernels:
    """The kernels of one object, or of all calls with equal options, by variant structure."""

    options: Options
    _known: dict[tuple[object, ...], Kernel] = field(default_factory=dict)
    _pairs: dict[tuple[object, ...], Pair] = field(default_factory=dict)
    _plan_options: dict[tuple[object, ...], _C.PlanOptions] = field(default_factory=dict)

    @property
    def few_rows(self) -> int:
        """Most packed rows of a few-row request."""
        return few_rows(self.options.target, KV_NAMES[self.options.q_dtype])

    def needs(
        self,
        lengths: _C.BatchLengths,
        group_size: int,
        q_block: int,
        page_size: int,
        mixed: bool,
        block_mask: bool,
        unaligned: bool,
    ) -> Needs:
        """The needs of a batch; with limits, of every batch.

        group_size: query heads that share a tile.
        """
        prefill, few, rows = lengths.tile_kinds(group_size, self.few_rows, q_block)
        always = self.options.limits is not None
        if always or self.options.batch_invariant or self.options.cpu:
            rows = ALL_ROWS
        elif prefill:
            rows = row_class(rows)
        return Needs(
            rows if prefill or always else 0, bool(few) or always, page_size > 0, q_block > 0,
            mixed, block_mask, unaligned,
            page_size % 8 == 0 and (self.options.device.type == "cpu" or _encodes_maps()),
        )  # fmt: skip

    def pair(self, known: Structure, needs: Needs, name: str) -> Pair:
        """The kernels, from memory or loaded now. name: of the variant, for messages.

        Raises CompileError if no cache has a kernel and the compiler fails, InputError if the
        variant has more params than a kernel takes.
        """
        found = self._pairs.get((known, needs))
        if found is not None:
            if any(found):
                default.last_source = "memory"
            return found
        if not self.options.cpu:
            from ..device.cuda import check_params  # only processes that use a device import it

            check_params(known)
        features = needs.features(self.options.cpu)
        prefill = few = None
        if needs.prefill_rows:
            prefill = self._kernel(known, needs.prefill_rows, features, name, needs.tma)
        if needs.few:
            few = self._kernel(known, 1, features, name)
        if len(self._pairs) >= _KEPT_PAIRS:
            self._pairs.clear()
        self._pairs[known, needs] = prefill, few
        return prefill, few

    def unloaded(self, known: Structure, needs: Needs, name: str) -> Pair:
        """The kernels of a CPU target for `_C.BatchPlan.workspace_bound`, without modules."""
        features = needs.features(self.options.cpu)
        specs = (self.spec(known.ir, rows, features, name) for rows in (needs.prefill_rows, 1))
        prefill, few = (Kernel(s, None, native_kind(s, self.options.target), 0) for s in specs)
        return prefill, few

    def spec(
        self,
        ir: VariantIR,
        packed_rows: int,
        features: tuple[str, ...],
        name: str,
        tma: bool = True,
    ) -> KernelSpec:
        """The first choice for a number of packed rows."""
        o = self.options
        if o.v_in_k:
            features = (*features, "values_in_keys")
        return choose_rows(
            ir, (o.head_dim, o.head_dim_v), o.dtypes, o.target, packed_rows, features, name, tma
        )

    def _kernel(
        self,
        known: Structure,
        packed_rows: int,
        features: tuple[str, ...],
        name: str,
        tma: bool = True,
    ) -> Kernel:
        rows = packed_rows if self.options.cpu else row_class(packed_rows)
        key = (known, rows, features, tma)
        kernel = self._known.get(key)
        if kernel is None:
            spec = self.spec(known.ir, packed_rows, features, name, tma)
            kernel = self._known[key] = self._load(spec)
        return kernel

    def _load(self, spec: KernelSpec) -> Kernel:
        index, module = load_stepping(build_requests(spec))
        spec = (spec, *fallbacks(spec))[index]  # of a smaller tile where its kernel would spill
        workers, hardware = 0, None
        if not self.options.cpu:
            from ..device import cuda  # only processes that use a device import it

            workers = cuda.workers(spec, self.options.device, module)
            hardware = cuda.hardware(self.options.device)
        native = native_kind(spec, self.options.target, module, hardware)
        return Kernel(spec, module, native, workers)

    def plan_options(
        self,
        kernels: Pair,
        num_kv_heads: int,
        num_levels: int,
        row_block: int = 0,
        heads_apart: bool = False,
    ) -> _C.PlanOptions:
        """The options of plans for these kernels on this machine."""
        threads = torch.get_num_threads()
        key = (
            threads,
            num_kv_heads,
            num_levels,
            row_block,
            heads_apart,
            *(k and (k.workers, k.spec.tile_kv) for k in kernels),
        )
        found = self._plan_options.get(key)
        if found is not None:
            return found
        if len(self._plan_options) >= _KEPT_PAIRS:
            self._plan_options.clear()
        o = self.options
        prefill, few = (
            (threads if o.cpu else k.workers if k else 1,
             -(-keys // k.spec.tile_kv) * k.spec.tile_kv if k else keys)
            for keys, k in zip(_SPLIT_KEYS, kernels, strict=True)
        )  # fmt: skip
        found = self._plan_options[key] = _C.PlanOptions(
            num_q_heads=o.num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim_v=o.head_dim_v,
            few_rows=self.few_rows,
            num_workers=(prefill[0], few[0]),
            share_workers=o.cpu,
            batch_invariant=o.batch_invariant,
            split_keys=(prefill[1], few[1]) if o.batch_invariant else (0, 0),
            merge_ns=merge_cost(o.target),
            limits=None if o.limits is None else o.limits.native(),
            num_levels=num_levels,
            row_block=row_block,
            heads_apart=heads_apart,
        )
        return found


@cache
def _encodes_maps() -> bool:
    return _C.driver_encodes_tensor_maps()


def native_kind(
    spec: KernelSpec,
    target: str,
    module: _C.Module | None = None,
    hardware: Device | None = None,
) -> _C.Kind:
    """A kernel for the planner: its tile and the costs of its work.

    hardware: the device that runs it, if it is known.
    """
    rows = granule = spec.tile_q  # on devices a partial tile takes as long as a full one
    if on_cpu(target):
        rows = item_rows(spec, _L2_BYTES)
        granule = CPU_ROWS[spec.target].lanes if spec.tile_kind == "prefill" else 1
    return _C.Kind(
        module, tile_q=rows, row_granule=granule, tile_kv=spec.tile_kv, min_chunk=least_part(spec),
        **coefficients(spec, target, hardware)._asdict(),
    )  # fmt: skip


def native_kinds(kernels: Pair) -> tuple[_C.Kind | None, _C.Kind | None]:
    """The kernels for the planner."""
    prefill, few = kernels
    return prefill and prefill.native, few and few.native


# --- batches --------------------------------------------------------------------------------------


class Keys(NamedTuple):
    """The storage of a batch's keys.

    page_size: 0 if ragged. page_indices: of all levels, int32, on the device of the keys. pages:
    (smallest, largest) page in use, None if unknown. page_indptrs: of the requests, then of each
    level, for messages.
    """

    page_size: int
    page_indices: torch.Tensor | None
    pages: tuple[int, int] | None
    page_indptrs: Sequence[torch.Tensor] = ()


_RAGGED = Keys(0, None, None)


class Batch(NamedTuple):
    """The input of planning.

    name: of the variant. num_levels: of shared keys. keeps_mask: every run uses the mask params of
    the plan; otherwise runs may have others, and the work of a mask that reads tensors is estimated
    from lengths. heads_apart: the rows of a key-value head are adjacent in memory, not those of a
    token.
    """

    kernels: Kernels
    name: str
    lengths: _C.BatchLengths
    dims: Dims
    keys: Keys = _RAGGED
    lists: KeyLists | None = None
    num_levels: int = 0
    block_mask: BlockMaskLayout | None = None
    keeps_mask: bool = True
    heads_apart: bool = False

    @property
    def options(self) -> Options:
        """The options of the object that plans it."""
        return self.kernels.options


@dataclass(slots=True, eq=False)
class Variation:
    """A batch planned for one structure and one alignment.

    mask_tensors, mask_scalars: (slot, value) of the mask's params, the same in all runs. block: the
    plan in device memory. launches: the `Launch` of each kind of run.
    """

    batch: Batch
    known: Structure
    kernels: Pair
    native: _C.BatchPlan
    core: _C.BatchCall
    mask_params: frozenset[str]
    mask_tensors: tuple[tuple[int, torch.Tensor], ...]
    mask_scalars: tuple[tuple[int, int | float], ...]
    page_indices: torch.Tensor | None
    key_blocks: torch.Tensor | None
    classified: bool
    block: Any = None
    launches: dict[Call, Any] = field(default_factory=dict)
    pointers: tuple[int, int] = (0, 0)  # of page_indices and key_blocks

    @property
    def merge_ns(self) -> float:
        """What merging partial states should take, in nanoseconds."""
        native, options = self.native, self.batch.options
        if not native.num_merges:
            return 0.0
        workers = round(native.total_ns / native.critical_ns) if native.critical_ns else 1
        rows = partial_rows_cost(options.target, native.partial_rows, options.head_dim_v, workers)
        return merge_cost(options.target) + rows

    def commit(self, state: DeviceState | None) -> None:
        """Copy the plan to its device. state: the object's `DeviceState`, None on CPUs."""
        note_planned(self.kernels)
        if state is not None:
            for kernel in self.kernels:
                if kernel is not None and kernel.module is not None:
                    state.prepare(kernel.module, kernel.workers)
            self._stage(state)
            self.block = state.upload(self.core)
        if self.page_indices is not None and not self.page_indices.numel():
            # Kernels need a valid address even if they read no entry.
            entry = torch.zeros(1, dtype=self.page_indices.dtype, device="cpu")
            self.page_indices = entry if state is None else state.moved(entry)
        self.pointers = (address_of(self.page_indices), address_of(self.key_blocks))

    def _stage(self, state: DeviceState) -> None:
        limits = self.batch.options.limits
        if self.page_indices is not None:
            indices, most = self.page_indices, self.page_indices.numel()
            if limits is not None:
                most = limits.max_pages
            if self.batch.options.cuda_graph:
                # Entries past the batch's own are unused, and may exceed the limits.
                indices = indices[: self.batch.lengths.num_page_indices]
            self.page_indices = state.stage("page_indices", indices, most)
        if self.key_blocks is not None:
            lists = self.batch.lists
            assert lists is not None
            self.key_blocks = state.stage("key_blocks", self.key_blocks, lists.entries)
        if self.batch.options.cuda_graph:
            names = self.known.ir.tensors
            self.mask_tensors = tuple(
                (slot, state.stage(names[slot].name, tensor, tensor.numel()))
                for slot, tensor in self.mask_tensors
            )

    def values(self, bound: Bound) -> tuple[Sequence[torch.Tensor], Sequence[int | float]]:
        """The tensors and numbers of a run: those of `bound`, but the plan's for the mask."""
        tensors: Sequence[torch.Tensor] = bound.tensors
        scalars: Sequence[int | float] = bound.scalars
        if self.mask_tensors:
            tensors = list(tensors)
            for slot, tensor in self.mask_tensors:
                tensors[slot] = tensor
        if self.mask_scalars:
            scalars = list(scalars)
            for slot, value in self.mask_scalars:
                scalars[slot] = value
        return tensors, scalars


def note_planned(kernels: Pair) -> None:
    """Marks planned kernels as run, for `fa.record_manifest`.

    A later process plans with them again, even if its runs then need others.
    """
    for kernel in kernels:
        if kernel is not None and kernel.module is not None:
            kernel.module.note_run()


# --- planning -------------------------------------------------------------------------------------


def vary(
    batch: Batch,
    bound: Bound,
    unaligned: bool,
    mask_values: Mapping[str, torch.Tensor | int | float] | None = None,
) -> Variation:
    """Plan a batch for a bound variant.

    mask_values: values of the mask's params by name, if the batch was planned before.

    Raises:
        InputError: the batch is beyond the limits.
        CompileError: a kernel was needed that no cache has, and the compiler failed.
    """
    options, kernels, lists = batch.options, batch.kernels, batch.lists
    known = bound.structure
    mask = known.ir.hook("mask_mod")
    slots = known.mask_slots
    tensors, scalars = list(bound.tensors), list(bound.scalars)
    if mask_values is not None:
        for params, values, which in (
            (known.ir.tensors, tensors, slots[0]), (known.ir.scalars, scalars, slots[1]),
        ):  # fmt: skip
            for slot in which:
                values[slot] = mask_values.get(params[slot].name, values[slot])  # type: ignore
    blocks = batch.block_mask
    num_kv_heads = options.num_kv_heads
    if blocks is not None and blocks.strides[1] != 0:
        num_kv_heads = options.num_q_heads  # heads that visit different blocks cannot share a tile
    needs = kernels.needs(
        batch.lengths, options.num_q_heads // num_kv_heads, 0 if lists is None else lists.q_block,
        batch.keys.page_size, batch.num_levels > 0, blocks is not None, unaligned,
    )  # fmt: skip
    pair = kernels.pair(known, needs, batch.name)
    classify = mask is not None and lists is None and _can_be_costed(batch, known, tensors)
    costed = None
    if classify:
        costed, _held = costed_mask(known, tensors, scalars)
    row_block = 0 if blocks is None else blocks.q_block
    try:
        native = _C.BatchPlan(
            batch.lengths,
            native_kinds(pair),
            kernels.plan_options(
                pair,
                num_kv_heads,
                batch.num_levels,
                row_block,
                batch.heads_apart or blocks is not None,  # kernels of blocks take head by head
            ),
            None if lists is None else lists.native(),
            costed,
        )
    except ValueError as error:
        raise InputError(str(error)) from None
    core = _C.BatchCall(
        native,
        batch.lengths,
        (pair[0] and pair[0].module, pair[1] and pair[1].module),
        num_q_heads=options.num_q_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        head_dim_v=options.head_dim_v,
        key_block=lists.key_block if lists else 0,
        num_key_blocks=lists.entries if lists else 0,
    )
    kept = slots if batch.keeps_mask else ((), ())
    return Variation(
        batch, known, pair, native, core, bound.mask_params,
        tuple((slot, tensors[slot]) for slot in kept[0]),
        tuple((slot, scalars[slot]) for slot in kept[1]),
        batch.keys.page_indices, lists.key_blocks if lists else None, classify,
    )  # fmt: skip


def costed_mask(
    known: Structure, tensors: Sequence[torch.Tensor], scalars: Sequence[int | float]
) -> tuple[Any, object]:
    """A mask as `_C.BatchPlan` and `_C.row_tiles` take it; and the owners of its memory."""
    addresses, layouts, held = bind_tensors(known, tensors)
    mask = (
        addresses, layouts, scalars, known.scalar_kinds, known.mask_is_contiguous,
        known.mask_reads_request,
    )  # fmt: skip
    return mask, held


def _can_be_costed(batch: Batch, known: Structure, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the interval form of the mask can estimate the work.

    It cannot with a block mask, whose full blocks are visited whatever the mask is, nor if the mask
    reads tensors on a device.
    """
    if batch.block_mask is not None:
        return False
    if not batch.keeps_mask:
        return known.costed_by_mask
    return all(tensors[slot].is_cpu for slot in known.mask_slots[0])


def mask_values(planned: Variation) -> dict[str, torch.Tensor | int | float]:
    """Values of the params that the mask of a planned batch reads, by name."""
    ir = planned.known.ir
    found: dict[str, torch.Tensor | int | float] = {
        ir.tensors[slot].name: tensor for slot, tensor in planned.mask_tensors
    }
    found.update((ir.scalars[slot].name, value) for slot, value in planned.mask_scalars)
    return found
