"""Types of the runtime extension: loading and launching artifacts, hardware facts, merging states.

Addresses are ints from `Tensor.data_ptr()`; 0 is null. Strides are in elements. Arguments with
which a kernel could access memory outside its tensors raise `ValueError` (`TypeError` for a wrong
type).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Buffer

ABI_VERSION: Final[int]
WRITE_LSE: Final[int]
PARTIAL: Final[int]
RELAXED_CAPTURES: Final[int]
"""CU_STREAM_CAPTURE_MODE_RELAXED, for `exchange_capture_mode`."""

_Addresses = NDArray[np.int64]
_Strides = tuple[int, int, int] | list[int]
_Layout = tuple[Sequence[int], Sequence[int]]
_TensorLayout = tuple[Sequence[int], Sequence[int], torch.Tensor]
_BlockMaskLayout = tuple[Sequence[int], Sequence[int], int, int]

Launch = tuple[str, tuple[int, int, int], tuple[int, int, int], int, bytes, bool]
"""Kernel, grid, block, dynamic shared bytes, parameter bytes; may it overlap the one before?

Tensor maps are descriptions (`fajit_tensor_map`) in the parameter bytes."""

def cpu_features() -> list[str]:
    """Features of this CPU and system beyond the baseline, by the names of `codegen.targets`."""

def refuse_stranded() -> None: ...
def learn_quiet(keys: Sequence[int]) -> None:
    """Dispatch keys (`DispatchKeySet.raw_repr()`) of threads without modes and transforms."""

def learn_plain(keys: Sequence[int]) -> None:
    """Dispatch keys of tensors that have an address and no lazy values."""

def is_quiet(functions: bool = False) -> bool:
    """Whether this thread has the keys of one without modes and transforms.

    functions: torch-function modes do not count.
    """

def are_plain(*tensors: object) -> bool:
    """Whether all are tensors of torch's own classes with keys that were learned."""

def is_profiling() -> bool: ...
def is_direct(*tensors: object) -> bool:
    """`are_plain`, in a thread that `is_quiet` and does not profile."""

def target_variable() -> str | None:
    """FLASHATTN_JIT_TARGET of the process environment, which `os.environ` writes through to."""

def begin_run_epoch() -> int:
    """Begins a new epoch and returns its number. Later runs have at least this epoch."""

def cache_sizes() -> tuple[int, int, int]:
    """Bytes of one core's L1 data, L2 and L3 cache; 0 if unknown."""

def merge_states(
    outs: Sequence[int],
    out_strides: Sequence[_Strides],
    lses: Sequence[int],
    lse_strides: Sequence[_Strides],
    shape: _Strides,
    head_dim_v: int,
    out: int,
    out_stride: _Strides,
    lse: int,
    lse_stride: _Strides,
    dtype: str,
    mask: int,
    mask_stride: _Strides,
    num_threads: int,
) -> None:
    """Merges fp32 states (out [*shape, head_dim_v], natural-log lse [*shape]) into `out` and `lse`.

    Empty `lses` and `lse_strides` mean that the states are sums: they are added, `lse` is unused.
    dtype: of `out`: float32, bfloat16 or float16. mask: bytes [*shape], 0 for rows that get the
    first state; the address 0 if all rows are merged.
    """

def copy_pieces(
    sources: _Addresses, destinations: _Addresses, piece_bytes: int, num_threads: int
) -> None:
    """Copies pieces of memory: `piece_bytes` from each address in `sources` to its destination.

    Both are contiguous int64 arrays. No destination may overlap another piece.
    """

def copy_rows(
    pages: NDArray[np.int32],
    slots: NDArray[np.int32],
    num_kv_heads: int,
    copies: Sequence[tuple[int, int, int, int, int, int, int, int]],
    num_threads: int,
) -> None:
    """Copies rows of new tokens into pages: token t to slot slots[t] of page pages[t].

    Each copy is (source address, destination address, bytes between tokens and heads of the source,
    bytes between pages, slots and heads of the destination, bytes of a row).
    """

class Module:
    """An artifact, loaded with RTLD_NOW | RTLD_LOCAL and never closed.

    Raises `OSError` if it cannot be loaded, `AbiError` if it has another ABI version.
    """

    def __init__(self, path: str) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def description(self) -> str:
        """JSON of `fajit_describe()`: abi_version, key, layout."""

    @property
    def is_cuda(self) -> bool:
        """Whether it holds CUDA kernels. Opening it needs no driver; `load` and launches do."""

    @property
    def last_run(self) -> int:
        """The epoch (`begin_run_epoch`) of its last run, or launch as data; 0 before the first.

        `note_run` counts as a run; planning calls it.
        """

    def note_run(self) -> None:
        """Marks it as run in the current epoch, at the cost of a compare."""

    def load(self, device: int) -> None:
        """Loads its kernels into the primary context of a CUDA device, once.

        Harmless beside another thread's capture. Raises `LaunchError`.
        """

    def residency(self, device: int) -> list[tuple[str, int, int]]:
        """(kernel, planned blocks, blocks) on a device that has loaded them; else empty.

        Blocks that a multiprocessor holds at once; the second number is the driver's.
        """

    def probe(self, device: int) -> list[tuple[str, int, int]]:
        """As `residency`, on any device: kernels that it has not loaded are loaded, and unloaded.

        Raises `LaunchError`.
        """

def use_driver(library: str) -> str:
    """For tests: the library that is opened as the CUDA driver from now on, "" for libcuda.so.1.

    Returns the previous one. Kernels that are loaded stay with the driver that loaded them.
    """

def driver_version() -> int:
    """The CUDA version that the driver supports, 12040 for 12.4; 0 without a driver.

    The driver is not initialised.
    """

def driver_encodes_tensor_maps() -> bool:
    """Whether launches may have tensor maps: with drivers for CUDA 12.0 and later.

    False without a driver.
    """

def exchange_capture_mode(mode: int) -> int:
    """Sets this thread's CUstreamCaptureMode and returns the previous one. Raises `LaunchError`."""

_Array = tuple[int, int, int]
"""A contiguous CPU integer array: address, entries, bytes of an entry (4 or 8)."""
_Storage = (
    tuple[_Array | None, _Array | None, _Array | None, int, int]
    | tuple[_Array | None, _Array | None, _Array | None, int, int, bool]
)
"""kv_indptr (ragged), page_indptr, last_page_len (paged), page_size (0: ragged), number of page
indices; whether another plan visits the keys, which then count in lengths and positions alone."""
_Level = tuple[_Array, _Array | None, _Storage]
"""q_indptr of groups, tokens of their entries, storage of the groups' keys."""

def page_range(indices: _Array, page_indptr: _Array) -> tuple[int, int]:
    """Of the entries that page_indptr covers: 0 or the smallest negative one, and the largest one;
    (0, -1) if there are none."""

class BatchLengths:
    """The requests of a batch, read and checked: see csrc/scheduler/batch_plan.h, read_lengths.

    whole_q_len: where requests are parts of longer ones, the q_len of those, by which kinds and row
    tiles are chosen. group_size, max_q_tokens: bounds of the packed rows of a request and of the
    packed tokens; 0: none of a request. Raises ValueError, which names the array and the request.
    """

    def __init__(
        self,
        q_indptr: _Array,
        storage: _Storage,
        q_offset: _Array | None = None,
        levels: Sequence[_Level] = (),
        whole_q_len: _Array | None = None,
        group_size: int = 0,
        max_q_tokens: int = 2**31 - 1,
    ) -> None: ...
    @staticmethod
    def dense(
        num_requests: int,
        q_len: int,
        kv_rows: int,
        kv_len: tuple[int, ...] | None = None,
        q_offset: int | tuple[int, ...] = 0,
    ) -> BatchLengths:
        """Requests that are a dim of dense tensors; request b has kv_len[b] of kv_rows keys."""

    @property
    def num_requests(self) -> int: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def num_q_tokens(self) -> int: ...
    @property
    def num_kv_tokens(self) -> int: ...
    @property
    def num_page_indices(self) -> int: ...
    @property
    def max_q_len(self) -> int: ...
    @property
    def max_kv_len(self) -> int: ...
    @property
    def q_len(self) -> list[int]: ...
    @property
    def kv_len(self) -> list[int]: ...
    @property
    def q_offset(self) -> list[int]: ...
    @property
    def kv_first(self) -> list[int]:
        """Keys of outer levels, of every request and then of every group."""

    def tile_kinds(self, group_size: int, few_rows: int, q_block: int = 0) -> tuple[int, int, int]:
        """(prefill requests, few-row requests, most packed rows of one), groups included."""

class Kind:
    """A kernel for the planner: its tile and the costs of its work (`Kind` of
    csrc/scheduler/batch_plan.h). module may be None if masks are not classified. alone_ns: load_ns
    by default, for workers that do not share a bandwidth. cached_keys: 0: not known."""

    def __init__(
        self,
        module: Module | None,
        tile_q: int,
        row_granule: int,
        tile_kv: int,
        min_chunk: int,
        item_ns: float,
        load_ns: float,
        pair_ns: float,
        state_ns: float,
        alone_ns: float | None = None,
        cached_keys: float = 0.0,
    ) -> None: ...
    @property
    def tile_q(self) -> int: ...
    @property
    def tile_kv(self) -> int: ...
    @property
    def min_chunk(self) -> int: ...
    def rows_of_tile(self, span: int) -> int:
        """Packed rows of each row tile, but the last one, of a request of `span` packed rows."""

class PlanOptions:
    """What plans of one object have in common: see `PlanOptions` of csrc/scheduler/batch_plan.h.

    split_keys: keys per split in batch-invariant plans; 0: no splits. merge_ns: cost of a merge's
    launch. limits: (max_requests, max_q_tokens, max_kv_len, max_pages) or None. num_levels: levels
    of shared keys that plans within the limits may have. row_block: items do not cross multiples of
    this many query rows.
    """

    def __init__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim_v: int,
        few_rows: int,
        num_workers: tuple[int, int],
        share_workers: bool = False,
        batch_invariant: bool = False,
        split_keys: tuple[int, int] = (0, 0),
        merge_ns: float = 0.0,
        limits: tuple[int, int, int, int] | None = None,
        num_levels: int = 0,
        row_block: int = 0,
        heads_apart: bool = False,
    ) -> None: ...

_Mask = tuple[Sequence[int], Sequence[_Layout], Sequence[int | float], str, bool, bool]
"""Of a mask whose interval form estimates costs: addresses and layouts of its tensors, its scalars
and their kinds, whether its keys are one run, whether it reads the request."""

def row_tiles(
    lengths: BatchLengths,
    module: Module | None,
    options: PlanOptions,
    *,
    tile_q: int,
    tile_kv: int,
    mask: _Mask | None = None,
) -> bytes:
    """Tiles of query rows with the keys that they visit: `RowTile` of csrc/scheduler/units.h,
    40 bytes each. module: evaluates the mask. Raises ValueError."""

class BatchPlan:
    """The distribution of a batch's work: see csrc/scheduler/batch_plan.h. Immutable.

    kinds: prefill and few-row, None if a batch has no such work. lists: (q_block, key_block,
    per_head, begin, count, num_key_blocks) or None. Raises ValueError for a batch beyond the
    limits.
    """

    def __init__(
        self,
        lengths: BatchLengths,
        kinds: tuple[Kind | None, Kind | None],
        options: PlanOptions,
        lists: tuple[int, int, bool, _Array, _Array, int] | None = None,
        mask: _Mask | None = None,
    ) -> None: ...
    @staticmethod
    def of_work(
        work: Buffer,
        *,
        kind: int = 0,
        merge_work: Buffer = b"",
        merge_sources: Sequence[int] = (),
        partial_rows: int = 0,
    ) -> BatchPlan:
        """A plan of given work: buffers of packed `fajit_work` and `fajit_merge_work`, 8 int32
        each. `BatchCall` checks it."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes that runs need for partial states; with limits, for any batch within them."""

    @property
    def partial_rows(self) -> int: ...
    @property
    def most_splits(self) -> int: ...
    @property
    def num_work(self) -> int: ...
    @property
    def num_merges(self) -> int: ...
    @property
    def total_ns(self) -> float: ...
    @property
    def critical_ns(self) -> float: ...
    def work(self, kind: int) -> bytes:
        """fajit_work items of a kind (0 prefill, 1 few-row), by worker, 8 int32 each."""

    def worker_indptr(self, kind: int) -> list[int]: ...
    def load_ns(self, kind: int) -> list[float]:
        """Predicted time of every worker of a kind."""

    @property
    def merge_work(self) -> bytes:
        """fajit_merge_work items, 8 int32 each."""

    @property
    def merge_sources(self) -> list[int]: ...
    @property
    def capacity(self) -> dict[str, int | tuple[int, int]]:
        """Capacity of every plan within the limits; without limits, the size of this plan."""

    @staticmethod
    def workspace_bound(
        kinds: tuple[Kind | None, Kind | None], options: PlanOptions, q_block: int = 0
    ) -> int:
        """workspace_bytes of any plan within the limits; options as for the constructor, q_block as
        in its lists."""

class BatchCall:
    """A plan with the modules that run it. Immutable: threads may share it.

    modules: of prefill and few-row work, None if the plan has no such work. With limits, all given
    modules are launched, even if this plan has no work for them. The plan is checked against the
    lengths. `bind` returns the call that launches. Unused addresses are 0. On CPUs one team of
    threads processes the lists of both kinds; a thread that has finished its list takes items from
    the others' (work stealing).
    """

    def __init__(
        self,
        plan: BatchPlan,
        lengths: BatchLengths,
        modules: tuple[Module | None, Module | None],
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int,
        key_block: int = 0,
        num_key_blocks: int = 0,
    ) -> None: ...
    def bind(
        self,
        *,
        strides: tuple[_Strides, _Strides, _Strides, _Strides, _Strides],
        layouts: Sequence[_Layout] = (),
        scalar_kinds: str = "",
        num_pages: int = 0,
        flags: int = 0,
        block_mask: _BlockMaskLayout | None = None,
        kv_requests: int = 0,
        kv_rows: int = 0,
    ) -> BatchCall:
        """The same work on tensors with these strides: q, k, v, out, lse, each (request, head, row)
        in elements, with pages (page, head, slot). block_mask: (sizes, strides, q_block, kv_block)
        with 4 sizes and strides: request, head, q block, kv block. kv_requests, kv_rows: extents of
        k and v along these dims, 1 and all rows for packed ones; with pages num_pages and the page
        size are taken."""

    @property
    def is_cuda(self) -> bool: ...
    @property
    def block_bytes(self) -> int:
        """Bytes of the device block: the plan in the layout of `launch(device_block=)`, whose
        address must be a multiple of 16. With limits, the size and the offsets of its sections are
        the same for every plan."""

    def write_block(self, address: int, bytes: int) -> None:
        """Writes the device block to host memory of at least `block_bytes` bytes."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes that `launch(workspace=)` must point to; 0 if no row is split. With limits, for any
        plan within them."""

    def launch(
        self, q: int, k: int, v: int, out: int, lse: int, scale: float, num_threads: int,
        tensors: Sequence[int] = (), scalars: Sequence[int | float] = (), workspace: int = 0,
        states: int = 0, page_indices: int = 0, key_blocks: int = 0, device_block: int = 0,
        stream: int = 0, device: int = 0,
    ) -> None:  # fmt: skip
        """Runs the kernels, then their merge, without the GIL.

        CUDA artifacts are enqueued on `stream` of `device`; their addresses are the device's.
        Raises `AbiError` or `ValueError` if the artifact refuses, `MemoryError` if its scratch
        cannot be allocated, `LaunchError` if CUDA refuses; `out` is then undefined.
        """

    def plan_launches(
        self, q: int, k: int, v: int, out: int, lse: int, scale: float, num_threads: int,
        tensors: Sequence[int] = (), scalars: Sequence[int | float] = (), workspace: int = 0,
        states: int = 0, page_indices: int = 0, key_blocks: int = 0, device_block: int = 0,
        stream: int = 0, device: int = 0,
    ) -> list[tuple[Module, Launch]]:  # fmt: skip
        """The launches of `launch` with these arguments as data, each with its module.

        CUDA artifacts only; needs no driver.
        """

class RepeatedCall:
    """A bound call on the host that is made again, with other tensors of the same layouts.

    layouts: of q, k, v, out and lse, each (shape, strides, a tensor of the dtype); None for a call
    without lse. params: of the tensors that the variant reads, likewise; param_bytes: their
    extents. plan: owns the memory of page_indices and key_blocks. scale: the default, NaN if there
    is none. packed: whether k and v are codes of 4 bits. num_threads: that it was planned for, 0 if
    it does not depend on them. variable: what FLASHATTN_JIT_TARGET held ("" if it was unset), None
    if it does not choose the target. Immutable: threads may share it.

    For `run_again`: asked: whether return_lse and partial are set, and out and lse given. captured:
    a `Captured` of variants/binding.py, or None. planned: per tensor that the variant reads, the
    plan's own in place of it, or None. scalars: of the kernel.
    """

    def __init__(
        self, call: BatchCall, layouts: Sequence[_TensorLayout | None], *,
        params: Sequence[_TensorLayout], param_bytes: Sequence[int], plan: object,
        workspace: object, workspace_bytes: int, page_indices: int, key_blocks: int, scale: float,
        packed: tuple[bool, bool], num_threads: int, variable: str | None,
        asked: tuple[bool, bool, bool, bool], captured: tuple[Any, ...] | None,
        planned: tuple[torch.Tensor | None, ...], scalars: tuple[int | float, ...],
    ) -> None: ...  # fmt: skip
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None,
        lse: torch.Tensor | None, scale: float, params: Sequence[int],
        scalars: Sequence[int | float],
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:  # fmt: skip
        """Launch, and return (out, lse), which are made where they are None.

        params, scalars: addresses of the variant's tensors, of the call's layouts, and its numbers.
        None, with nothing done, unless all are plain tensors in host memory with these layouts,
        none has derivatives, and out and lse share memory with no other.
        """

    @property
    def can_run_again(self) -> bool:
        """Whether there is a `captured`, and DLPack describes all tensors."""
    def run_again(
        self, variant: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor | None, lse: torch.Tensor | None, scale: object, return_lse: object,
        partial: object, params: Mapping[str, object],
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:  # fmt: skip
        """(out, lse) of the call with these arguments, on the tensors of a direct call.

        None, with nothing done, as for `run`, and where the call differs from the repeated one in
        what it asks for, in the number of threads, or in what the variant is bound to; where params
        is no dict.
        """

class RepeatedAppend:
    """A bound append on the host that is made again, with other tensors of the same layouts.

    layouts: of k, v, k_pages and v_pages, then of scales, zeros and codebook beside the codes of k
    and of v, None for what does not exist. packed: whether pages are codes of 4 bits. params: of
    the tensors that the variant reads. captured: a `Captured` of variants/binding.py. address: of
    page_indices. scalars: of the kernel. Immutable: threads may share it.
    """

    def __init__(
        self, call: BatchCall, layouts: Sequence[_TensorLayout | None], *,
        packed: tuple[bool, bool], params: Sequence[_TensorLayout], captured: tuple[Any, ...],
        page_indices: torch.Tensor, address: int, scalars: tuple[int | float, ...],
    ) -> None: ...  # fmt: skip
    @property
    def is_readable(self) -> bool:
        """Whether DLPack describes all tensors."""
    def run(
        self, variant: object, given: Sequence[torch.Tensor | None], params: Mapping[str, object]
    ) -> bool:
        """Write the rows. given: tensors, as layouts.

        False, with nothing done, unless no mode is active, all are plain tensors in host memory
        with these layouts, none has derivatives, what is written shares memory with nothing, and
        the variant would be bound as before; where params is no dict.
        """

# --- interval forms of masks ----------------------------------------------------------------------

def interval_functions() -> list[str]:
    """The functions of fajit/interval/*.h that statements of an `IntervalForm` may call."""

class IntervalForm:
    """The interval form of a mask, the same as in compiled kernels: see csrc/interval/program.h.

    code: a `Code` of variants/interval/statements.py. tensors: dtype and rank of the variant's
    params; calls pass `num_tables` pairs of lo and hi tables after them. scalar_kinds: "i" (int64)
    or "f" (float64) for each scalar. Immutable: threads may share it. Raises ValueError or
    TypeError for any other object.

    The methods take the mask's inputs: addresses and layouts of host tensors with their tables,
    scalars, and the lists q_len, kv_len, q_offset, q_token0 and kv_token0 of all requests. They run
    without the GIL, and raise ValueError for wrong counts or table sizes.
    """

    def __init__(
        self,
        code: object,
        *,
        tensors: Sequence[tuple[str, int]],
        num_tables: int,
        scalar_kinds: str,
    ) -> None: ...
    def classify(
        self,
        boxes: Buffer,
        *,
        tensors: Sequence[int],
        layouts: Sequence[_Layout],
        scalars: Sequence[int | float],
        lengths: Sequence[Sequence[int]],
    ) -> bytes:
        """The state of every box: 0 empty, 1 partial, 2 full. boxes: contiguous int64 [N, 8], of b,
        h, q_idx and kv_idx the first and the last value."""

    def tile_runs(
        self,
        *,
        q_begin: int,
        q_end: int,
        tile_q: int,
        kv_begin: int,
        kv_end: int,
        tile_kv: int,
        b: Sequence[tuple[int, int]],
        h: Sequence[tuple[int, int]],
        tensors: Sequence[int],
        layouts: Sequence[_Layout],
        scalars: Sequence[int | float],
        lengths: Sequence[Sequence[int]],
    ) -> tuple[bytes, bytes, bytes, bytes]:
        """Runs of non-empty tiles as in `TileRuns` of variants/interval/tile_runs.py: indptr,
        begin, end (int64) and state (uint8). b, h: first and last value of each interval along
        them."""
