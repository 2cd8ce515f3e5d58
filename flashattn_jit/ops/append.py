"""`fa.append_paged_kv` and `fa.plan_append`: new keys and values into their pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _C
from ..codegen.spec import UtilitySpec, on_cpu, utility_target
from ..codegen.targets import compiled_target
from ..errors import InputError
from ..torch_modes import is_direct
from .arguments import checks
from .arguments.calls import host_array
from .arguments.new_rows import check_memory, check_new_rows
from .device.cuda import LaunchTensors
from .keys.paged import Paged
from .keys.storage import check_pages, read_storage
from .launching.utility import UtilityWork, addresses, layouts, run_utility
from .torch_ops import as_op

_Step = tuple[int, int, int, int, int, int]
_ITEM_TOKENS = 16
_UNIT_BYTES = 16


def append_paged_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    q_indptr: torch.Tensor,
    paged: Paged,
    *,
    positions: torch.Tensor | None = None,
    target: str | None = None,
) -> None:
    """Write the newest keys and values of each request to the ends of their pages.

    `paged` describes the requests after the append: the q_len new tokens of a request become its
    keys kv_len - q_len to kv_len - 1, the positions of `q_offset="end"`.

    Args:
        k: [num_tokens, num_kv_heads, head_dim], of k_pages' dtype; any dtype.
        v: [num_tokens, num_kv_heads, head_dim_v], of v_pages' dtype.
        k_pages: [num_pages, page_size, num_kv_heads, head_dim], written to. Any strides with a
            contiguous last dim, so that another layout is a transposed view.
        v_pages: [num_pages, page_size, num_kv_heads, head_dim_v], written to.
        q_indptr: int32 or int64 cpu tensor [num_requests + 1]: request b has the new tokens
            q_indptr[b] to q_indptr[b + 1].
        paged: the pages of each request; see `Paged`.
        positions: the key that each token becomes instead, as for `plan_append`.
        target: a CUDA target on CUDA tensors, or one such as ``"emulated:sm_80"`` on CPU tensors;
            the device's own by default.

    Raises:
        InputError: a shape, dtype, device or value is wrong, or a request has more new tokens than
            its pages hold. Nothing was written then.
        GradError: a tensor requires grad while grad mode is on.
        TargetError: `target` is unknown, or does not run on that device.
        LaunchError: CUDA refused the launch.

    If two tokens go to one slot, as when requests share a page, either of them is stored.

    Example:
        >>> fa.append_paged_kv(k, v, k_pages, v_pages, q_indptr, paged)
    """
    given = (k, v, k_pages, v_pages)
    if torch.compiler.is_dynamo_compiling() or not is_direct(*given):
        _refuse_positions(positions)
        as_op.append(run_append, *given, q_indptr, paged, target)
    else:
        _plan(q_indptr, paged, positions, _device_of(k), target).write(*given)


def plan_append(
    q_indptr: torch.Tensor,
    paged: Paged,
    *,
    positions: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    target: str | None = None,
) -> AppendPlan:
    """Where the new tokens of a batch go, found once for all layers of a step.

    Args:
        q_indptr, paged: as for `append_paged_kv`.
        positions: int32 or int64 cpu tensor [num_tokens]: the key that each new token becomes, from
            0 to kv_len - 1 of its request. The last keys of each request by default.
        device: of the tensors of runs; that of page_indices by default.
        target: as for `append_paged_kv`.

    Raises:
        InputError: a shape, dtype, device or value is wrong, or a request has more new tokens than
            its pages hold.
        TargetError: `target` is unknown, or does not run on that device.

    Example:
        >>> append = fa.plan_append(q_indptr, paged)
        >>> for k, v, k_pages, v_pages in layers:
        ...     append.run(k, v, k_pages, v_pages)
    """
    own = paged.page_indices.device if isinstance(paged, Paged) else torch.device("cpu")
    return _plan(
        q_indptr, paged, positions, own if device is None else checks.check_device(device), target
    )


class AppendPlan:
    """Where the new tokens of a batch go; `plan_append` makes it, and any number of runs use it.

    On CPUs the slots are found when it is planned: what the tensors of the page tables become later
    does not count. On devices they are referenced, not copied, as in `BatchAttention.plan`.
    """

    def __init__(
        self,
        q_indptr: torch.Tensor,
        paged: Paged,
        positions: torch.Tensor | None,
        device: torch.device,
        target: str | None,
    ) -> None:
        if not isinstance(paged, Paged):
            raise InputError(f"paged must be an fa.Paged, got {type(paged).__name__}")
        rows, self._held_rows = host_array("q_indptr", q_indptr)
        self._stored = stored = read_storage(paged, device)
        try:
            self._lengths = lengths = _C.BatchLengths(rows, stored.native)
        except ValueError as error:
            raise InputError(str(error)) from None
        for b, (new_len, kv_len) in enumerate(zip(lengths.q_len, lengths.kv_len, strict=True)):
            if new_len > kv_len and positions is None:
                raise InputError(
                    f"request {b} has {new_len} new tokens, but paged gives it kv_len={kv_len}, "
                    "which counts them: append its pages and last_page_len first"
                )
        self._arguments = (q_indptr, paged, target)
        self._device = device
        self._target = utility_target(torch.empty(0, device=device), target)
        self._positions = positions
        self._keys = _keys(lengths, positions)
        self._slots = self._host_slots() if on_cpu(self._target) else None
        self._forms: dict[object, _Steps] = {}

    def __reduce__(self) -> NoReturn:
        raise InputError("an AppendPlan cannot be copied or pickled; plan_append() again")

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return self._lengths.num_q_tokens

    def run(
        self, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor
    ) -> None:
        """Write new keys and values into the pages of one layer.

        Args:
            k, v, k_pages, v_pages: as for `append_paged_kv`.

        Raises:
            InputError: a tensor is wrong; nothing was written then.
            GradError: a tensor requires grad while grad mode is on.
            LaunchError: CUDA refused the launch.
        """
        given = (k, v, k_pages, v_pages)
        if torch.compiler.is_dynamo_compiling() or not is_direct(*given):
            _refuse_positions(self._positions)
            as_op.append(run_append, *given, *self._arguments)
        else:
            self.write(*given)

    def write(
        self, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor
    ) -> None:
        """`run` outside of the tracer."""
        given = (k, v, k_pages, v_pages)
        for name, tensor in zip(("k", "v", "k_pages", "v_pages"), given, strict=True):
            checks.check_readable(name, tensor)
        form = tuple(
            (t.shape, t.stride(), t.dtype, t.device, t.requires_grad or t.is_neg()) for t in given
        )
        steps = self._forms.get(form)
        if steps is None:
            steps = self._check(*given)
            if not any(t.requires_grad for t in given):  # which is wrong in grad mode alone
                self._forms[form] = steps
        check_memory(*given)
        if not self.num_tokens:
            return
        if self._slots is None:
            self._on_device(*given)
            return
        pages, slots = self._slots
        addresses = [t.data_ptr() for t in given]
        copies = (
            (addresses[0], addresses[2], *steps.k),
            (addresses[1], addresses[3], *steps.v),
        )  # fmt: skip
        _C.copy_rows(pages, slots, k.shape[1], copies, torch.get_num_threads())

    def _check(
        self, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor
    ) -> _Steps:
        """What does not depend on addresses; returns the steps of the copies."""
        for name, new, cache in (("k", k, k_pages), ("v", v, v_pages)):
            check_new_rows(name, new, cache)
        if k.shape[:2] != v.shape[:2]:
            raise InputError(
                f"v has num_tokens={v.shape[0]} and num_kv_heads={v.shape[1]}, but k has "
                f"num_tokens={k.shape[0]} and num_kv_heads={k.shape[1]}"
            )
        tensors = {"k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages}
        checks.check_devices(tensors)
        if k.device != self._device and k.device.type != self._device.type:
            raise InputError(f"k is on {k.device}, but the append was planned for {self._device}")
        checks.check_grad(tuple(tensors.values()))
        size = self._stored.page_size
        for name, cache in (("k_pages", k_pages), ("v_pages", v_pages)):
            if cache.shape[1] != size:
                raise InputError(f"{name} has page_size={cache.shape[1]}, but paged {size}")
        num_pages = k_pages.shape[0]
        if num_pages != v_pages.shape[0]:
            raise InputError(
                f"v_pages has num_pages={v_pages.shape[0]}, but k_pages has {num_pages}"
            )
        if num_pages > checks.INT32_MAX:
            raise InputError(f"num_pages={num_pages} does not fit 32 bits")
        stored, where = self._stored, "k_pages and v_pages"
        check_pages(stored.pages, stored.page_indices, num_pages, stored.held[:1], where)
        if self._slots is not None and len(self._slots[0]):
            least, most = int(self._slots[0].min()), int(self._slots[0].max())
            if least < 0 or most >= num_pages:  # page indices whose check was switched off
                raise InputError(
                    f"page {least if least < 0 else most} of page_indices is outside of "
                    f"num_pages={num_pages} of {where}"
                )
        if self.num_tokens != k.shape[0]:
            raise InputError(
                f"q_indptr must run from 0 to the number of tokens ({k.shape[0]}), it ends at "
                f"{self.num_tokens}"
            )
        return _Steps(_steps(k, k_pages), _steps(v, v_pages))

    def _host_slots(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The page and the slot of each new token."""
        assert self._stored.page_indices is not None
        size = self._stored.page_size
        first = self._stored.held[0].numpy().astype(np.int64)
        entry = first[_requests(self._lengths)] + self._keys // size
        pages = self._stored.page_indices.numpy()[entry]
        return np.ascontiguousarray(pages, np.int32), (self._keys % size).astype(np.int32)

    def _on_device(
        self, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor
    ) -> None:
        stored, lengths = self._stored, self._lengths
        assert stored.page_indices is not None
        views = [t.view(torch.uint8) for t in (k, v, k_pages, v_pages)]
        shapes, unit_bytes, num_pages = layouts(views), _unit_bytes(views), k_pages.shape[0]

        def work() -> UtilityWork:
            return UtilityWork(
                UtilitySpec("append_paged_kv", compiled_target(self._target), unit_bytes),
                lengths,
                _items(lengths.q_len, self._keys),
                shapes,
                num_pages=num_pages,
            )

        tensors = LaunchTensors(
            views[0], views[2], views[3], views[2], None, views, addresses(views),
            page_indices=stored.page_indices,
            allocations=[
                ("k", views[0], False),
                ("v", views[1], False),
                ("k_pages", views[2], True),
                ("v_pages", views[3], True),
                ("page_indices", stored.page_indices, False),
            ],
        )  # fmt: skip
        signature = ("append_paged_kv", shapes, unit_bytes, num_pages, *self._content)
        run_utility(signature, self._target, k.device, work, tensors)

    @cached_property
    def _content(self) -> tuple[object, ...]:
        """What the work of a device depends on besides the tensors."""
        held = (self._held_rows, *self._stored.held)
        lengths = tuple((t.dtype, t.numpy().tobytes()) for t in held)
        return self._stored.page_size, lengths, self._keys.tobytes()


class _Steps(NamedTuple):
    """Bytes between tokens and heads of k or v; between pages, slots and heads; bytes of a row."""

    k: _Step
    v: _Step


def run_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    q_indptr: torch.Tensor,
    paged: Paged,
    target: str | None,
) -> None:
    """`append_paged_kv` outside of the tracer."""
    _plan(q_indptr, paged, None, _device_of(k), target).write(k, v, k_pages, v_pages)


def _plan(
    q_indptr: torch.Tensor,
    paged: Paged,
    positions: torch.Tensor | None,
    device: torch.device,
    target: str | None,
) -> AppendPlan:
    return AppendPlan(q_indptr, paged, positions, device, target)


def _device_of(k: object) -> torch.device:
    return k.device if isinstance(k, torch.Tensor) else torch.device("cpu")


def _refuse_positions(positions: torch.Tensor | None) -> None:
    if positions is not None:
        raise InputError(
            "positions are not part of the op that torch.compile, export and tensor subclasses "
            "use; append outside of them"
        )


def _requests(lengths: _C.BatchLengths) -> NDArray[np.int64]:
    """The request of each new token."""
    return np.repeat(np.arange(len(lengths.q_len)), np.asarray(lengths.q_len, np.int64))


def _keys(lengths: _C.BatchLengths, positions: torch.Tensor | None) -> NDArray[np.int64]:
    """The key that each new token becomes. Raises InputError for positions out of range."""
    new, kv_len = (np.asarray(x, np.int64) for x in (lengths.q_len, lengths.kv_len))
    request = _requests(lengths)
    if positions is None:
        starts = np.cumsum(new) - new
        return np.arange(len(request)) + (kv_len - new - starts)[request]
    keys = checks.check_host_integers("positions", positions).numpy().astype(np.int64)
    if keys.shape != request.shape:
        raise InputError(
            f"positions must be [num_tokens={len(request)}], got {list(positions.shape)}"
        )
    wrong = np.flatnonzero((keys < 0) | (keys >= kv_len[request]))
    if len(wrong):
        at = int(wrong[0])
        raise InputError(
            f"positions[{at}]={int(keys[at])} of request {int(request[at])} must be 0 to "
            f"{int(kv_len[request[at]]) - 1}, its keys in paged"
        )
    return keys


def _steps(new: torch.Tensor, cache: torch.Tensor) -> _Step:
    size = new.element_size()
    (token, head), (page, slot, own) = new.stride()[:2], cache.stride()[:3]
    return size * token, size * head, size * page, size * slot, size * own, size * new.shape[2]


def _items(q_lens: Sequence[int], keys: NDArray[np.int64]) -> torch.Tensor:
    """Work items of up to 16 new tokens that become keys in a row: request, rows, keys."""
    items = []
    begin = 0
    for b, new_len in enumerate(q_lens):
        row = 0
        while row < new_len:
            own = keys[begin + row : begin + min(new_len, row + _ITEM_TOKENS)]
            breaks = np.flatnonzero(np.diff(own) != 1)
            count = int(breaks[0]) + 1 if len(breaks) else len(own)
            first = int(own[0])
            items.append((b, 0, 1, row, row + count, first, first + count, -1))
            row += count
        begin += new_len
    return torch.tensor(items, dtype=torch.int32, device="cpu")


def _unit_bytes(views: Sequence[torch.Tensor]) -> int:
    """The largest unit, up to 16 bytes, that divides all addresses, strides and row lengths."""
    bits = _UNIT_BYTES
    for view in views:
        bits |= view.data_ptr() | view.shape[-1]
        for size, stride in zip(view.shape[:-1], view.stride(), strict=False):
            bits |= stride if size > 1 else 0
    return bits & -bits
