"""Calls as planning and launching see them: arguments checked once, for every kind of call.

A `Form` holds the checked shapes, strides, dtypes and device of q, k and v, `Requests` the lengths
and positions of the requests, and a `Call` every value that a launch depends on, except addresses
and the values of tensors and scalars. Forms and requests are remembered by their content: equal
arguments give the same object, so a repeated call costs look-ups alone and a `Call` is hashed by
identities.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from ... import _C
from ...codegen.spec import has_whole_rows
from ...errors import InputError
from ...torch_modes import need_values, refuse_transforms
from ...variants.binding import Structure
from ...variants.ir.dtypes import KV_NAMES, dim_of, row_dim
from ...variants.params import Dims
from . import checks

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Recent(dict[_Key, _Value]):
    """A dict that keeps the newest entries: `keep` evicts the oldest until sizes sum to `most`.

    Threads may share it.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._total = 0
        self._sizes: dict[_Key, int] = {}
        self._lock = Lock()

    def keep(self, key: _Key, value: _Value, size: int = 1) -> _Value:
        """Adds a value, and returns it."""
        with self._lock:
            self.pop(key, None)  # a key that is kept again is the newest
            self[key] = value
            self._total += size - self._sizes.get(key, 0)
            self._sizes[key] = size
            while self._total > self._most and len(self) > 1:
                oldest = next(iter(self))
                del self[oldest]
                self._total -= self._sizes.pop(oldest)
        return value

    def clear(self) -> None:
        """Removes all entries."""
        with self._lock:
            super().clear()
            self._sizes.clear()
            self._total = 0


Offset = int | torch.Tensor | Literal["end"]
"""First ``q_idx``: an int, a tensor with an entry per request, or "end" for kv_len - q_len."""

_LARGEST_OFFSET = 2**30
Strides = tuple[int, ...]
Layouts = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Sizes and strides of param tensors and of their min/max tables."""


class BlockMaskLayout(NamedTuple):
    """The layout of a block map (request, head, q block, kv block), and the size of its blocks."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    q_block: int
    kv_block: int


_NO_PARAMS = ((), (), ())
_KEPT_FORMS = 4096
KEPT_SIZE = 1 << 16
"""Limit of the sum of `Requests.size`, of remembered lengths and of remembered launches."""


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """The checked layout of q, k and v of a call: everything except their addresses.

    kind: "dense" ([B, H, S, D] all), "packed" ([N, H, D] all) or "paged" (q packed, k and v
    [pages, page_size, H, D]). rows_aligned: every row's start and end are multiples of 16 bytes
    from the first row's start, and every key has a row of its own.
    """

    kind: str
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    strides: tuple[Strides, Strides, Strides]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    device: torch.device
    rows_aligned: bool
    input_bytes: tuple[int, int, int]

    @property
    def num_q_heads(self) -> int:
        """Query heads."""
        return self.q_shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads."""
        return self.k_shape[2 if self.kind == "paged" else 1]

    @property
    def head_dim(self) -> int:
        """Head dim of q and k."""
        return self.q_shape[-1]

    @property
    def head_dim_v(self) -> int:
        """Head dim of v and out."""
        return dim_of(self.v_shape[-1], self.dtypes[2])

    @property
    def heads_apart(self) -> bool:
        """Whether the keys of a head are adjacent in memory, not those of a token.

        Values may lie otherwise: it only decides how work is divided.
        """
        step = self.strides[1]
        return self.kind == "dense" and self.k_shape[2] > 1 and step[1] > step[2]

    @property
    def kv_extents(self) -> tuple[int, int]:
        """Requests or pages of k and v (packed: 1), and rows of each, as kernels count them.

        The checks of a form let neither differ between k and v. Rows beyond 32 bits, which the
        packed tensors of a captured graph may have, belong to no request.
        """
        if self.kind == "packed":
            return 1, min(self.k_shape[0], checks.INT32_MAX)
        return self.k_shape[0], self.k_shape[1 if self.kind == "paged" else 2]

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of out: q's with v's last dim."""
        return (*self.q_shape[:-1], self.head_dim_v)


class Requests(NamedTuple):
    """The requests of a call: their lengths for the scheduler, and the call's dims."""

    lengths: _C.BatchLengths
    dims: Dims

    @property
    def size(self) -> int:
        """Memory of them and of a plan for them, in units of 100 bytes: 64, and 1 per request."""
        return 64 + self.lengths.num_requests


class Call(NamedTuple):
    """Everything that a launch depends on except addresses and values. Equal calls have one launch.

    structure: the variant's. layouts: of its param tensors. results: shape, strides, dtype and
    device of a given out and of a given lse. num_threads: 0 on devices. aligned: rows of q, k, v
    and out start and end at multiples of 16 bytes (devices). scalars: the variant's, if its
    schedule depends on them.
    """

    form: Form
    lengths: _C.BatchLengths
    structure: Structure
    layouts: Layouts
    results: tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]
    return_lse: bool
    partial: bool
    target: str
    num_threads: int
    aligned: bool = True
    block_mask: BlockMaskLayout | None = None
    scalars: tuple[int | float, ...] | None = None


# --- forms ----------------------------------------------------------------------------------------


def _form(
    kind: str,
    check: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
    forms: Recent[tuple[Any, ...], Form],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    direct: bool = False,
) -> Form:
    """The form of q, k and v, remembered from an earlier call with equal layouts.

    direct: whether they are plain tensors (`is_direct`); others are checked at each call. Raises
    InputError.
    """
    if not direct:
        check(q, k, v)
    signature = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device,
    )  # fmt: skip
    found = forms.get(signature)
    if found is not None:
        return found
    if direct:
        check(q, k, v)
    tensors = (q, k, v)
    form = Form(
        kind,
        tuple(q.shape),
        tuple(k.shape),
        tuple(v.shape),
        (q.stride(), k.stride(), v.stride()),
        (q.dtype, k.dtype, v.dtype),
        q.device,
        has_whole_rows((q.shape[-1], row_dim(v)), _names(tensors))
        and all(_steps_aligned(t) for t in tensors)
        and not any(_repeats_rows(kind, t) for t in (k, v)),
        (checks.extent(q), checks.extent(k), checks.extent(v)),
    )
    return forms.keep(signature, form)


def _names(tensors: Sequence[torch.Tensor]) -> tuple[str, str, str]:
    q, k, v = (KV_NAMES[t.dtype] for t in tensors)
    return q, k, v


dense_form = functools.partial(_form, "dense", checks.check_dense, Recent(_KEPT_FORMS))
packed_form = functools.partial(_form, "packed", checks.check_packed, Recent(_KEPT_FORMS))
paged_form = functools.partial(_form, "paged", checks.check_paged, Recent(_KEPT_FORMS))


def is_aligned(
    form: Form, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None
) -> bool:
    """Whether every row of q, k, v and a given out starts and ends at a multiple of 16 bytes.

    An allocated result does if the head dims are multiples of 8.
    """
    if not form.rows_aligned or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return False
    return out is None or is_result_aligned(out)


def is_result_aligned(out: torch.Tensor) -> bool:
    """Whether every row of a given out starts at a multiple of 16 bytes."""
    return out.data_ptr() % 16 == 0 and _steps_aligned(out)


_LONGEST_STEP = 1 << 40
"""Bytes; TMA takes no longer strides, and rows that are loaded one by one any."""


def _steps_aligned(tensor: torch.Tensor) -> bool:
    item = tensor.element_size()
    return all(
        stride * item % 16 == 0 and stride * item < _LONGEST_STEP for stride in tensor.stride()[:-1]
    )


def _repeats_rows(kind: str, tensor: torch.Tensor) -> bool:
    """Whether keys share a row of memory: TMA has no stride of 0, other loads any.

    Heads, and the requests of a dense tensor, may: they are not the rows of a copy.
    """
    row_dims = {"dense": (2,), "packed": (0,), "paged": (0, 1)}[kind]
    return any(tensor.stride(d) == 0 and tensor.shape[d] > 1 for d in row_dims)


# --- results --------------------------------------------------------------------------------------


def result_dtype(q_dtype: torch.dtype, partial: bool) -> torch.dtype:
    """q's dtype; partial states are fp32."""
    return torch.float32 if partial else q_dtype


def in_order_of(shape: Sequence[int], strides: Sequence[int], head_dim_v: int) -> Strides:
    """Strides of a dense result, without gaps and with a contiguous last dim [head_dim_v].

    shape, strides: of q, whose stride order the result gets.
    """
    order = sorted(range(3), key=lambda d: (strides[d], -d))
    out, reach = [0, 0, 0, 1], max(1, head_dim_v)
    for d in order:
        out[d] = reach
        reach *= max(1, shape[d])
    return tuple(out)


def contiguous(shape: Sequence[int]) -> Strides:
    """Strides of a contiguous tensor."""
    out, reach = [], 1
    for size in reversed(shape):
        out.append(reach)
        reach *= max(1, size)
    return tuple(reversed(out))


def given_layouts(
    out: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
    """`Call.results` of a given out and lse."""
    return (
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
        None if lse is None else (lse.shape, lse.stride(), lse.dtype, lse.device),
    )


def filled(lse: torch.Tensor | None, like: Any) -> torch.Tensor:
    """An op's lse: an empty tensor on the device of `like` if there is none."""
    return like.new_empty(0, dtype=torch.float32) if lse is None else lse


# --- params ---------------------------------------------------------------------------------------


def bind_tensors(
    known: Structure, tensors: Sequence[torch.Tensor]
) -> tuple[tuple[int, ...], Layouts, Sequence[torch.Tensor]]:
    """Addresses and layouts of the params and of the min/max tables that their mask needs.

    The third result is the tensors, which the caller must keep alive until the launch: the tables
    have no other owner.
    """
    expected = len(known.ir.tensors)
    if len(tensors) != expected:
        raise InputError(f"the variant reads {expected} tensors, got {len(tensors)}")
    if not tensors:
        return _NO_PARAMS
    if any(t.is_neg() for t in tensors):  # lazy views: their memory holds the negated values
        tensors = [t.resolve_neg() for t in tensors]
    if known.tables:
        from ...variants.interval.range_tables import (  # imports numpy's typing: only when needed
            build_tables,
        )

        tensors = [*tensors, *build_tables(known.tables, tensors)]
    try:
        addresses = tuple([t.data_ptr() if t.numel() else 0 for t in tensors])
    except RuntimeError:
        for tensor in tensors:
            refuse_transforms(tensor)
        raise
    if 0 in addresses:
        need_values("a tensor of the variant", "a kernel reads them", tensors)
        for name, tensor, address in zip(known.tensor_names, tensors, addresses, strict=True):
            if tensor.numel() and not address:
                raise InputError(
                    f"param {name!r} has no memory: its storage was freed or resized to 0 bytes; "
                    "pass a tensor that has its values"
                )
    return (
        addresses,
        tuple([(tuple(t.shape), t.stride()) for t in tensors]),
        tensors,
    )


ALIGNMENT = 128  # bytes, of a workspace's first address; that of devices' allocations is larger


def aligned_empty(size: int) -> torch.Tensor:
    """uint8 memory of the host whose address is a multiple of `ALIGNMENT`; torch's is one of 64."""
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device="cpu")
    return memory[-memory.data_ptr() % ALIGNMENT :][:size]


def address_of(tensor: torch.Tensor | None) -> int:
    """Address of the first entry; 0 for no tensor, and as torch has it for one without entries."""
    return 0 if tensor is None else tensor.data_ptr()


# --- requests: lengths and offsets ----------------------------------------------------------------

_requests: Recent[tuple[Any, ...], Requests] = Recent(KEPT_SIZE)


def dense_requests(form: Form, kv_len: torch.Tensor | None, q_offset: Offset) -> Requests:
    """The requests of a dense call: one per batch entry. Raises InputError."""
    batch, q_len, rows = form.q_shape[0], form.q_shape[2], form.k_shape[2]
    lengths, offset = read_lengths(batch, q_len, rows, kv_len, q_offset)
    key = (form, lengths, offset)
    found = _requests.get(key)
    if found is not None:
        return found
    native = dense_lengths(batch, q_len, rows, lengths, offset)
    dims = Dims(
        batch, form.num_q_heads, form.num_kv_heads, q_len, rows, form.head_dim, form.head_dim_v,
        form.device,
    )  # fmt: skip
    made = Requests(native, dims)
    return _requests.keep(key, made, made.size)


def read_lengths(
    batch: int,
    q_len: int,
    kv_rows: int,
    kv_len: torch.Tensor | None,
    q_offset: int | torch.Tensor | str,
) -> tuple[tuple[int, ...] | None, int | tuple[int, ...]]:
    """kv_len and q_offset of a dense call as numbers: one for all requests, or one per request.

    kv_len is None if every request has all `kv_rows` keys. Raises InputError.
    """
    lengths = None
    if kv_len is not None:
        lengths = checks.check_lengths("kv_len", kv_len, batch, 0, kv_rows)
    if isinstance(q_offset, torch.Tensor):
        least, most = -_LARGEST_OFFSET, _LARGEST_OFFSET
        return lengths, checks.check_lengths("q_offset", q_offset, batch, least, most)
    if is_end(q_offset, "batch"):
        if lengths is None:
            return None, kv_rows - q_len
        return lengths, tuple([n - q_len for n in lengths])
    return lengths, check_offset(q_offset, "batch")


def dense_lengths(
    batch: int,
    q_len: int,
    kv_rows: int,
    kv_len: tuple[int, ...] | None,
    q_offset: int | tuple[int, ...],
) -> _C.BatchLengths:
    """The lengths of a dense call for the scheduler. Raises InputError."""
    try:
        return _C.BatchLengths.dense(batch, q_len, kv_rows, kv_len, q_offset)
    except ValueError as error:
        raise InputError(str(error)) from None


def packed_requests(
    form: Form, q_indptr: torch.Tensor, kv_indptr: torch.Tensor, q_offset: Offset
) -> Requests:
    """The requests of packed rows. Raises InputError, which names the request."""
    q_array, q_held = host_array("q_indptr", q_indptr, "[num_requests + 1]")
    kv_array, kv_held = host_array("kv_indptr", kv_indptr, "[num_requests + 1]")
    array, held = offset_array(q_offset, q_array[1] - 1)
    key = (form, _content(q_held), _content(kv_held), None if held is None else _content(held))
    found = _requests.get(key)
    if found is not None:
        return found
    try:
        native = _C.BatchLengths(q_array, (kv_array, None, None, 0, 0), array)
    except ValueError as error:
        raise InputError(str(error)) from None
    for name, rows, what, ends in (
        ("q", form.q_shape[0], "num_q_tokens", native.num_q_tokens),
        ("k", form.k_shape[0], "num_kv_tokens", native.num_kv_tokens),
    ):
        if rows != ends:
            indptr = "q_indptr" if name == "q" else "kv_indptr"
            raise InputError(
                f"{indptr} must run from 0 to the number of tokens, {name} has {what}={rows}, but "
                f"it ends at {ends}"
            )
    dims = Dims(
        native.num_requests, form.num_q_heads, form.num_kv_heads, native.max_q_len,
        native.max_kv_len, form.head_dim, form.head_dim_v, form.device,
    )  # fmt: skip
    made = Requests(native, dims)
    return _requests.keep(key, made, made.size)


def _content(tensor: torch.Tensor) -> tuple[torch.dtype, bytes]:
    return tensor.dtype, tensor.numpy().tobytes()


# --- arrays of lengths and offsets ----------------------------------------------------------------

Array = tuple[int, int, int]
"""A contiguous integer array in host memory: address, entries, bytes per entry."""


def host_array(name: str, value: object, shape: str = "[n]") -> tuple[Array, torch.Tensor]:
    """An int32 or int64 cpu tensor [n] as an `Array`, and the tensor that owns the memory.

    shape: the expected shape, for messages.
    """
    tensor = checks.check_host_integers(name, value, "batches")
    if tensor.dim() != 1:
        raise InputError(f"{name} must be a tensor {shape}, got {list(tensor.shape)}")
    if not tensor.is_contiguous() or tensor.is_neg():
        tensor = tensor.resolve_neg().contiguous()
    return (tensor.data_ptr(), tensor.numel(), tensor.element_size()), tensor


def offset_array(q_offset: Offset, count: int) -> tuple[Array | None, torch.Tensor | None]:
    """The positions of first tokens as an `Array`, and the owner of its memory; None for "end".

    Raises InputError.
    """
    if isinstance(q_offset, torch.Tensor):
        array, held = host_array("q_offset", q_offset)
        values = held.numpy()
        if values.size and (values.min() < -_LARGEST_OFFSET or values.max() > _LARGEST_OFFSET):
            for i, offset in enumerate(values.tolist()):
                _in_range(f"q_offset[{i}]", offset)
        return array, held
    if is_end(q_offset, "num_requests"):
        return None, None
    one = check_offset(q_offset, "num_requests")
    held = torch.full((max(0, count),), one, dtype=torch.int64, device="cpu")
    return host_array("q_offset", held)


def is_end(q_offset: object, requests: str) -> bool:
    """Whether an offset is "end". Raises InputError for any other string."""
    if not isinstance(q_offset, str):
        return False
    if q_offset != "end":
        raise InputError(
            f'q_offset must be an int, a tensor [{requests}] or "end", got {q_offset!r}'
        )
    return True


def check_offset(q_offset: object, requests: str) -> int:
    """An offset that is one number. Raises InputError; requests: the tensor's dim, for messages."""
    if type(q_offset) is not int and (
        isinstance(q_offset, bool) or not hasattr(q_offset, "__index__")
    ):
        raise InputError(
            f'q_offset must be an int, a tensor [{requests}] or "end", got '
            f"{checks.no_tensor('q_offset', q_offset)}"
        )
    return _in_range("q_offset", q_offset)


def _in_range(name: str, offset: object) -> int:
    rule = "is outside of [-2**30, 2**30]"
    return checks.check_int(name, offset, -_LARGEST_OFFSET, _LARGEST_OFFSET, rule)
