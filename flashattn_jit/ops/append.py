"""`fa.append_paged_kv` and `fa.plan_append`: new keys and values into their pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _C
from ..codegen.spec import MAX_HEAD_DIM, on_cpu, target_on_device
from ..errors import InputError, ParamError
from ..formats import Codes, Stored
from ..planner.reachable import appends_dtypes
from ..stored_hooks import encoded, put_numbers
from ..torch_modes import is_direct, is_quiet_and_plain, on_host
from ..variants.binding import bind
from ..variants.compose import present_hooks, shared_hooks
from ..variants.ir.dtypes import KV_NAMES
from ..variants.ir.ir import KV_HOOKS
from ..variants.variant import FULL, Variant
from .arguments import checks
from .arguments.calls import host_array
from .arguments.new_rows import check_memory, check_new_rows, check_place, is_expanded, used_strides
from .keys.paged import Paged
from .keys.storage import check_pages, read_indices, read_storage
from .launching.appends import BesideCodes, Changes, Places, Side, copy_rows, side_of
from .launching.repeated_appends import RepeatedAppends, codes_of, kind_of
from .torch_ops import as_op

_Step = tuple[int, int, int, int, int, int]
_NAMES = ("k", "v", "k_pages", "v_pages")
_NO_PARAMS: Mapping[str, object] = MappingProxyType({})


def append_paged_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: Codes,
    v_pages: Codes,
    q_indptr: torch.Tensor,
    paged: Paged,
    *,
    positions: torch.Tensor | None = None,
    transform: Variant | None = None,
    target: str | None = None,
) -> None:
    """Write the newest keys and values of each request to the ends of their pages.

    `paged` describes the requests after the append: the q_len new tokens of a request become its
    keys kv_len - q_len to kv_len - 1, the positions of `q_offset="end"`.

    Args:
        k: [num_tokens, num_kv_heads, head_dim], of k_pages' dtype; any dtype.
        v: [num_tokens, num_kv_heads, head_dim_v], of v_pages' dtype.
        k_pages: [num_pages, page_size, num_kv_heads, head_dim], written to. Any strides with a
            contiguous last dim, so that another layout is a transposed view. An `fa.kv.Stored`
            quantises k, of bfloat16, float16 or (on CPUs) float32, after the transform: with one
            scale a row, [num_pages, page_size, num_kv_heads], scales are computed and stored as
            `fa.kv.Format.quantize` does; others are given, and codes end at the largest.
        v_pages: [num_pages, page_size, num_kv_heads, head_dim_v], likewise.
        q_indptr: int32 or int64 cpu tensor [num_requests + 1]: request b has the new tokens
            q_indptr[b] to q_indptr[b + 1].
        paged: the pages of each request; see `Paged`.
        positions: the key that each token becomes instead, as for `plan_append`.
        transform: a variant whose key_mod and value_mod change the rows first, as for
            `plan_append`, whose runs take params.
        target: a CUDA target on CUDA tensors, or one such as ``"emulated:sm_80"`` on CPU tensors;
            the device's own by default.

    Raises:
        InputError: a shape, dtype, device or value is wrong, or a request has more new tokens than
            its pages hold. Nothing was written then.
        GradError: a tensor requires grad while grad mode is on.
        TargetError: `target` is unknown, or does not run on that device.
        LaunchError: CUDA refused the launch.

    If two tokens go to one slot, as for positions that repeat or requests that share a page, its
    contents are those of either, or of both in parts.

    Example:
        >>> fa.append_paged_kv(k, v, k_pages, v_pages, q_indptr, paged)
    """
    if isinstance(k_pages, Stored) or isinstance(v_pages, Stored):
        _check_no_op(_tensors_of(k, v, k_pages, v_pages))
    elif positions is not None or transform is not None:
        _check_no_op((k, v, k_pages, v_pages))
    elif _is_op((k, v, k_pages, v_pages)):
        as_op.append(run_append, k, v, k_pages, v_pages, q_indptr, paged, target)
        return
    run_append(k, v, k_pages, v_pages, q_indptr, paged, target, positions, transform)


@on_host
def plan_append(
    q_indptr: torch.Tensor,
    paged: Paged,
    *,
    positions: torch.Tensor | None = None,
    transform: Variant | None = None,
    device: torch.device | str | None = None,
    target: str | None = None,
) -> AppendPlan:
    """Where the new tokens of a batch go, found once for all layers of a step.

    Args:
        q_indptr, paged: as for `append_paged_kv`.
        positions: int32 or int64 cpu tensor [num_tokens]: the key that each new token becomes, from
            0 to kv_len - 1 of its request. The last keys of each request by default.
        transform: a variant, such as ``fa.RoPE()`` or a norm and it, ``fa.QKNorm() & fa.RoPE()``.
            Its key_mod and value_mod change each row before it is stored, rounded once to the
            dtype; its other hooks have no effect here, and with `positions` it may not read
            `fa.q_row`. Attention over these pages is without them:
            ``variant.without("key_mod", "value_mod")``. Rows of float32, bfloat16 or float16.
        device: of the tensors of runs; that of page_indices by default.
        target: as for `append_paged_kv`.

    Raises:
        InputError: a shape, dtype, device or value is wrong, or a request has more new tokens than
            its pages hold.
        TargetError: `target` is unknown, or does not run on that device.

    If two tokens go to one slot, as for positions that repeat or requests that share a page, its
    contents are those of either, or of both in parts.

    Example:
        >>> append = fa.plan_append(q_indptr, paged)
        >>> for k, v, k_pages, v_pages in layers:
        ...     append.run(k, v, k_pages, v_pages)
    """
    q_indptr, paged = _copied(q_indptr, paged)
    own = paged.page_indices.device
    if device is not None or own.type != "cpu":
        own = checks.check_device(own if device is None else device)
    return AppendPlan(q_indptr, paged, positions, transform, own, target)


class AppendPlan:
    """Where the new tokens of a batch go; `plan_append` makes it, and any number of runs use it.

    Tables on the host are copied when it is planned: what the caller's tensors become later does
    not count. A page_indices on a device is referenced, not copied, as in `BatchAttention.plan`.
    """

    def __init__(
        self,
        q_indptr: torch.Tensor,
        paged: Paged,
        positions: torch.Tensor | None,
        transform: Variant | None,
        device: torch.device,
        target: str | None,
    ) -> None:
        self._transform = check_transform(transform)
        _check_paged(paged)
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
        self._target = target_on_device(device, target)
        self._has_positions = positions is not None
        self._more = self._has_positions or transform is not None
        self._keys = _keys(lengths, positions)
        self._slots = self._host_slots() if on_cpu(self._target) else None
        self._forms: dict[object, _Steps] = {}
        self._repeated = RepeatedAppends()

    def __reduce__(self) -> NoReturn:
        raise InputError("an AppendPlan cannot be copied or pickled; plan_append() again")

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return self._lengths.num_q_tokens

    def run(
        self,
        /,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pages: Codes,
        v_pages: Codes,
        **params: object,
    ) -> None:
        """Write new keys and values into the pages of one layer.

        Args:
            k, v, k_pages, v_pages: as for `append_paged_kv`.
            **params: the transform's params, by name.

        Raises:
            InputError: a tensor is wrong; nothing was written then.
            ParamError: a param is missing, unknown or does not fit; nothing was written then.
            CompileError: the transform needed a new kernel and the compiler failed.
            GradError: a tensor requires grad while grad mode is on.
            LaunchError: CUDA refused the launch.
        """
        if self._repeated.run(k, v, k_pages, v_pages, params):
            return
        if isinstance(k_pages, Stored) or isinstance(v_pages, Stored):
            rows = _tensors_of(k, v, k_pages, v_pages)
            _check_no_op((*rows, *_tensors(params)))
            self._quantise(rows, k_pages, v_pages, params)
            return
        given: tuple[torch.Tensor, ...] = (k, v, k_pages, v_pages)
        if params:
            if self._transform is None:
                raise ParamError(f"params {', '.join(params)} are a transform's, but there is none")
            given = (*given, *_tensors(params))
        if self._more:
            _check_no_op(given)
            self._write_on_host(k, v, k_pages, v_pages, params)
        elif _is_op(given):
            as_op.append(run_append, k, v, k_pages, v_pages, *self._arguments)
        else:
            self._write(k, v, k_pages, v_pages, params)

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pages: Codes,
        v_pages: Codes,
    ) -> None:
        """`run` outside of the tracer, on any objects."""
        if isinstance(k_pages, Stored) or isinstance(v_pages, Stored):
            self._quantise(_tensors_of(k, v, k_pages, v_pages), k_pages, v_pages, {})
            return
        for name, tensor in zip(_NAMES, (k, v, k_pages, v_pages), strict=True):
            checks.check_readable(name, tensor)
        self._write(k, v, k_pages, v_pages, _NO_PARAMS)

    def _write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        params: Mapping[str, object],
    ) -> None:
        """`run` on strided tensors. Each attribute that is read here takes 0.1 us."""
        given = (k, v, k_pages, v_pages)
        form = (
            k.shape, v.shape, k_pages.shape, v_pages.shape,
            k.stride(), v.stride(), k_pages.stride(), v_pages.stride(),
            k.dtype, v.dtype, k_pages.dtype, v_pages.dtype,
            k.device, v.device, k_pages.device, v_pages.device,
            k.is_neg(), v.is_neg(), k_pages.is_neg(), v_pages.is_neg(),
        )  # fmt: skip
        steps = self._forms.get(form)
        if steps is None:
            steps = self._forms[form] = self._check(*given)
        checks.check_grad(given, _NAMES)
        check_memory(*given)
        if self._transform is not None:
            assert steps.changes is not None
            bound = bind(steps.variant, steps.changes.dims, params)
            checks.check_grad(bound.tensors, (), bound.structure.tensor_names)
            if self.num_tokens and k.shape[1]:
                launched = steps.changes.run(given, _NOTHING, bound)
                self._repeated.note(form, given, steps.variant, params, bound, launched)
            return
        if not self.num_tokens:
            return
        if self._slots is None:
            copy_rows(self._places, given, self._target)
            return
        pages, slots = self._slots
        copies = (
            (k.data_ptr(), k_pages.data_ptr(), *steps.k),
            (v.data_ptr(), v_pages.data_ptr(), *steps.v),
        )  # fmt: skip
        _C.copy_rows(pages, slots, k.shape[1], copies, torch.get_num_threads())

    _write_on_host = on_host(_write)

    @on_host
    def _quantise(
        self, given: list[torch.Tensor], k_pages: Codes, v_pages: Codes, params: dict[str, object]
    ) -> None:
        """`run` into pages of codes. given: `_tensors_of` the call."""
        k, v = given[:2]
        form = (kind_of(k_pages), kind_of(v_pages), *[
            (t.shape, t.stride(), t.dtype, t.device, t.is_neg()) for t in given
        ])  # fmt: skip
        steps = self._forms.get(form)
        if steps is None:
            sides = (side_of("k_pages", k_pages), side_of("v_pages", v_pages))
            steps = self._forms[form] = self._check(k, v, k_pages, v_pages, sides)
        assert steps.changes is not None
        k_side, v_side = steps.sides
        beside = (k_side.beside(k_pages), v_side.beside(v_pages))
        kept = [t for own in beside for t in (own.scales, own.zeros) if t is not None]
        checks.check_grad(given, (*_NAMES, *["a tensor beside codes"] * (len(given) - 4)))
        check_memory(*given[:4], *kept)
        for name, x, side in zip("kv", (k_pages, v_pages), steps.sides, strict=True):
            if side.given and isinstance(x, Stored):
                put_numbers(name, x, params, decodes=False)
        bound = bind(steps.variant, steps.changes.dims, params)
        checks.check_grad(bound.tensors, (), bound.structure.tensor_names)
        if self.num_tokens and k.shape[1]:
            launched = steps.changes.run(given[:4], beside, bound)
            if not (k_side.given or v_side.given):  # params then have numbers of the pages
                pairs = k, v, k_pages, v_pages
                self._repeated.note(form, pairs, steps.variant, params, bound, launched)

    def _check(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_stored: Codes,
        v_stored: Codes,
        sides: tuple[Side, Side] = (Side(), Side()),
    ) -> _Steps:
        """What does not depend on addresses; returns the steps of the copies.

        sides: the kinds of k_stored and v_stored, the pages.
        """
        k_side, v_side = sides
        besides = (k_side.beside(k_stored), v_side.beside(v_stored))
        k_pages, v_pages = codes_of(k_stored), codes_of(v_stored)
        for name, new, cache, side, beside in (
            ("k", k, k_pages, k_side, besides[0]), ("v", v, v_pages, v_side, besides[1]),
        ):  # fmt: skip
            check_new_rows(name, new, cache, side.decoding is not None)
            for what, own in (("scales", beside.scales), ("zeros", beside.zeros)):
                if own is not None and is_expanded(own):
                    raise InputError(
                        f"{what} of {name}_pages are an expanded tensor: rows share them"
                    )
        if k.shape[:2] != v.shape[:2]:
            raise InputError(
                f"v has num_tokens={v.shape[0]} and num_kv_heads={v.shape[1]}, but k has "
                f"num_tokens={k.shape[0]} and num_kv_heads={k.shape[1]}"
            )
        tensors = {"k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages}
        checks.check_devices(tensors)
        if k.device != self._device and k.device.type != self._device.type:
            raise InputError(f"k is on {k.device}, but the append was planned for {self._device}")
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
                f"k has num_tokens={k.shape[0]}, but the step, or q_indptr, has {self.num_tokens} "
                "new tokens: pass a row for each"
            )
        changes, variant = None, self._transform or FULL
        if self._transform is not None or sides != (Side(), Side()):
            self._check_changed(k, v, k_pages, v_pages)
            variant = encoded(
                variant, (k_side.decoding, v_side.decoding), (k_side.given, v_side.given)
            )
            changes = Changes(
                self._places, (k, v, k_pages, v_pages), besides, self._target, variant.name
            )
        return _Steps(_steps(k, k_pages), _steps(v, v_pages), variant, changes, sides)

    def _check_changed(
        self, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor
    ) -> None:
        """Raises InputError for rows that no transform can change, and no codes can hold."""
        dtypes, stored = (
            [KV_NAMES.get(t.dtype, str(t.dtype)) for t in pair]
            for pair in ((k, v), (k_pages, v_pages))
        )
        if not appends_dtypes(self._target, dtypes, stored):
            if dtypes != stored:
                raise InputError(
                    f"k and v are {' and '.join(dtypes)}, k_pages and v_pages "
                    f"{' and '.join(stored)}: rows of one dtype become codes, float32, bfloat16 or "
                    "float16 on CPUs, and on CUDA one that attention takes there"
                )
            raise InputError(
                f"k and v are {' and '.join(dtypes)}; a transform changes rows of float32, "
                "bfloat16 or float16 on CPUs, and on CUDA of one dtype that attention takes there"
            )
        for name, dim in (("k", k.shape[2]), ("v", v.shape[2])):
            if not 1 <= dim <= MAX_HEAD_DIM:
                raise InputError(
                    f"{name} has rows of {dim}; a transform changes rows of 1 to {MAX_HEAD_DIM}"
                )

    def _host_slots(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The page and the slot of each new token."""
        assert self._stored.page_indices is not None
        size = self._stored.page_size
        first = self._stored.held[0].numpy().astype(np.int64)
        entry = first[_requests(self._lengths)] + self._keys // size
        pages = self._stored.page_indices.numpy()[entry]
        return np.ascontiguousarray(pages, np.int32), (self._keys % size).astype(np.int32)

    @cached_property
    def _places(self) -> Places:
        """Where the tokens go, for kernels."""
        assert self._stored.page_indices is not None
        held = (self._held_rows, *self._stored.held)
        lengths = tuple((t.dtype, t.numpy().tobytes()) for t in held)
        content = (self._stored.page_size, lengths, self._keys.tobytes())
        return Places(
            self._lengths, self._keys, self._stored.page_indices, content, self._has_positions
        )


class _Steps(NamedTuple):
    """Bytes between tokens and heads of k or v; between pages, slots and heads; bytes of a row.

    variant: the transform, and the division by given scales. changes: where rows are changed.
    sides: the kinds of pages.
    """

    k: _Step
    v: _Step
    variant: Variant
    changes: Changes | None
    sides: tuple[Side, Side]


_NOTHING = (BesideCodes(), BesideCodes())


@on_host
def run_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: Codes,
    v_pages: Codes,
    q_indptr: torch.Tensor,
    paged: Paged,
    target: str | None,
    positions: torch.Tensor | None = None,
    transform: Variant | None = None,
) -> None:
    """`append_paged_kv` outside of the tracer."""
    device = torch.device("cpu")
    if isinstance(k, torch.Tensor):
        check_place("k", k)
        device = k.device
    append = AppendPlan(q_indptr, paged, positions, transform, device, target)
    append.write(k, v, k_pages, v_pages)


def _tensors_of(
    k: torch.Tensor, v: torch.Tensor, k_pages: Codes, v_pages: Codes
) -> list[torch.Tensor]:
    """k, v, pages or their codes, then what codes have beside them."""
    found = [k, v, codes_of(k_pages), codes_of(v_pages)]
    for x in (k_pages, v_pages):
        if isinstance(x, Stored):
            found += [t for t in (x.scales, x.zeros, x.codebook) if t is not None]
    return found


def _tensors(params: Mapping[str, object]) -> list[torch.Tensor]:
    return [x for x in params.values() if isinstance(x, torch.Tensor)]


def _check_paged(paged: object) -> None:
    if not isinstance(paged, Paged):
        raise InputError(f"paged must be an fa.Paged, got {type(paged).__name__}")


def _copied(q_indptr: torch.Tensor, paged: Paged) -> tuple[torch.Tensor, Paged]:
    """The tables, with copies of those on the host. Raises InputError for what is no table."""
    _check_paged(paged)

    def own(name: str, table: torch.Tensor) -> torch.Tensor:
        return checks.check_host_integers(name, table, "batches").clone()

    indices = paged.page_indices
    if not isinstance(indices, torch.Tensor) or indices.is_cpu:
        indices = read_indices("page_indices", indices, torch.device("cpu")).clone()
    indptr, last = own("page_indptr", paged.page_indptr), own("last_page_len", paged.last_page_len)
    return own("q_indptr", q_indptr), Paged(indptr, indices, last, paged.page_size)


def _is_op(given: Sequence[torch.Tensor]) -> bool:
    """Whether an append on these tensors is an op of torch's; else they are strided tensors."""
    return torch.compiler.is_dynamo_compiling() or not is_direct(*given)


def _check_no_op(given: Sequence[torch.Tensor]) -> None:
    """Raises InputError where only an op could be called, which has no positions or transform."""
    if not torch.compiler.is_dynamo_compiling():
        if is_quiet_and_plain(*given, functions=True):
            return
        for name, tensor in zip(_NAMES, given, strict=False):
            checks.check_readable(name, tensor)
            checks.check_not_lazy(name, tensor)
        as_op.is_traced(given)  # its errors say more
    raise InputError(
        "positions, a transform and pages of codes are not part of the op that torch.compile, "
        "export, dispatch modes and tensor subclasses use; append outside of them"
    )


def check_transform(transform: Variant | None) -> Variant | None:
    """The part of a transform that changes keys and values. Raises InputError."""
    if transform is None:
        return None
    if not isinstance(transform, Variant):
        raise InputError(
            f"transform must be an fa.Variant, got {type(transform).__name__}; wrap a function as "
            "fa.variant(key_mod=...)"
        )
    if not present_hooks(transform) & {*KV_HOOKS}:
        raise InputError(
            f"transform={transform.name} has neither a key_mod nor a value_mod: it changes nothing"
        )
    return transform.only(*KV_HOOKS)


def check_applied_once(transform: Variant, variant: Variant, what: str) -> None:
    """Raises InputError for a variant that would change stored rows as the transform did before.

    what: the variant, for the message.
    """
    twice = shared_hooks(transform.only(*KV_HOOKS), variant)
    if twice:
        names = ", ".join(f'"{hook}"' for hook in twice)
        raise InputError(
            f"{' and '.join(twice)} of {what} ({variant.name}) would be applied twice: "
            f"transform={transform.name} stores rows that are changed already. Pass "
            f"variant.without({names}); if both are meant, write one of them as a function of its "
            "own"
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
    keys = checks.check_host_integers("positions", positions).resolve_neg().numpy().astype(np.int64)
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
    size, row = new.element_size(), new.shape[2]
    (token, head, _), (page, slot, own, _) = used_strides(new), used_strides(cache)
    if new.shape[1] == 1:
        head = own = row  # heads without gaps are copied together
    return size * token, size * head, size * page, size * slot, size * own, size * row
