"""Calls on the CPU that are made again, with tensors of the layouts of an earlier one.

The checks and look-ups of a first call are Python, which a kernel evicts from the caches: between
the layers of a model they take several times as long as from the caches. Here C compares the
tensors, read by torch's functions for DLPack, and launches. It also compares what the variant has
captured (`Captured`), where nothing is computed from contents of tensors: then no Python of a call
is left but the function that reads the captures.

A run of one request of 16 keys, with what Python bound before and with C alone (bf16, 8 heads over
2, head_dim 64; by hand, 2 cores of a Xeon): 16 and 7 us, int8 pages 40 and 22 us; after other work
that fills the caches 50 and 27, 93 and 54 us. `fa.attention` likewise: 22 and 13, 70 and 45 us.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ... import _C
from ...variants.binding import Bound, Captured
from ...variants.ir.dtypes import CODES4
from ...variants.variant import FULL, Variant
from ..arguments import checks
from ..arguments.calls import Form, Layouts, bind_tensors
from ..planning.batch_plan import Variation

if TYPE_CHECKING:
    from .launches import Launch, Workspace

Results = tuple[torch.Tensor, torch.Tensor | None]
Asked = tuple[bool, bool, bool, bool]
"""What a run asks for: whether return_lse and partial are set, and out and lse given."""
Kind = tuple[object, ...]
"""The function that was called, and its other arguments, without tensors."""

_CPU = torch.device("cpu")
_examples: dict[torch.dtype, torch.Tensor] = {}


class Repeat:
    """A launch and the layouts that it is bound to. Threads may share it.

    launch: made for `form`, and for params of these layouts. native: repeats it in C.
    """

    __slots__ = ("_layouts", "_make", "_variation", "launch", "native")

    def __init__(
        self, variation: Variation, launch: Launch, layouts: Layouts, form: Form, asked: Asked,
        bound: Bound, captured: Captured | None, scale: float | None, workspace: Workspace,
        num_threads: int = 0, variable: str | None = None,
    ) -> None:  # fmt: skip
        """captured: of `bound`, or None where C cannot see whether a variant is bound so again.

        scale: the default. num_threads: that the launch was planned for, if it depends on them.
        variable: what FLASHATTN_JIT_TARGET held, if the target is its.
        """
        self._variation, self.launch, self._layouts = variation, launch, layouts
        lse = None
        if launch.return_lse:
            lse = launch.shape[:-1], launch.lse_strides, _example(torch.float32)
        page_indices, key_blocks = variation.pointers
        # Not of the tensors: another thread may have rebound them since they were checked.
        tensors = (
            (form.q_shape, form.strides[0], _example(form.dtypes[0])),
            (form.k_shape, form.strides[1], _example(form.dtypes[1])),
            (form.v_shape, form.strides[2], _example(form.dtypes[2])),
            (launch.shape, launch.strides, _example(launch.dtype)),
            lse,
        )
        params = [(*x, _example(t.dtype)) for x, t in zip(layouts, bound.tensors, strict=False)]
        planned = dict(variation.mask_tensors)
        self._make = functools.partial(
            _C.RepeatedCall, launch.call, tensors, params=params, plan=variation, asked=asked,
            param_bytes=launch.input_bytes[3:], workspace=workspace,
            workspace_bytes=variation.native.workspace_bytes, page_indices=page_indices,
            key_blocks=key_blocks, scale=math.nan if scale is None else scale,
            packed=(form.dtypes[1] == CODES4, form.dtypes[2] == CODES4), num_threads=num_threads,
            variable=variable, planned=tuple(planned.get(i) for i in range(len(bound.tensors))),
        )  # fmt: skip
        self.native = self.of(bound, captured)

    def of(self, bound: Bound, captured: Captured | None) -> _C.RepeatedCall:
        """The call in C for a variant that is bound so."""
        scalars = tuple(self._variation.values(bound)[1])
        return self._make(captured=captured, scalars=scalars)

    def run(
        self, bound: Bound, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor | None, lse: torch.Tensor | None, scale: float,
    ) -> Results | None:  # fmt: skip
        """(out, lse); None, with nothing done, unless the tensors have the launch's layouts.

        bound: of the launch's structure. out, lse: None where they were. Raises GradError.
        """
        variation = self._variation
        tensors, scalars = variation.values(bound)
        if tensors:
            checks.check_grad(tensors)
        addresses, layouts, _held = bind_tensors(variation.known, tensors)
        if layouts != self._layouts:
            return None
        return self.native.run(q, k, v, out, lse, scale, addresses, scalars)


class Notes:
    """Calls that C did not recognise. From the second one of a kind on it shall: the numbers that a
    variant reads may be others at each call."""

    __slots__ = ("_noted",)

    def __init__(self) -> None:
        self._noted: dict[tuple[object, ...], bool] = {}

    def is_again(self, key: tuple[object, ...]) -> bool:
        """Whether the call was noted before, and C may recognise it; notes it."""
        found = self._noted.get(key)
        if found is None:
            if len(self._noted) >= 256:
                self._noted.clear()
            self._noted[key] = True
        return found or False

    def give_up(self, key: tuple[object, ...]) -> None:
        """Notes that C cannot see whether calls are like this one."""
        self._noted[key] = False


_NO_CALLS: dict[Kind, tuple[_C.RepeatedCall, ...]] = {}
KEPT = 4
"""Calls that are kept of one kind, and kinds of a variant's calls."""


def call_again(
    variant: object, kind: Kind, q: torch.Tensor, k: object, v: object, out: torch.Tensor | None,
    lse: torch.Tensor | None, scale: object, return_lse: bool, partial: bool,
    params: dict[str, object],
) -> Any:  # fmt: skip
    """The result of a dense call like an earlier one of this variant; None, with nothing done, if
    there was none, or where C cannot see that it is."""
    if variant is None:
        variant = FULL
    elif not isinstance(variant, Variant):
        return None
    for call in kept_calls(variant).get(kind, ()):
        result = call.run_again(q, k, v, out, lse, scale, return_lse, partial, params)
        if result is not None:
            return result
    return None


def kept_calls(variant: Variant) -> Mapping[Kind, tuple[_C.RepeatedCall, ...]]:
    """The calls that `call_again` knows."""
    kept = getattr(variant, "__fajit_repeats__", None)
    return kept[1] if kept is not None and kept[0] is _era else _NO_CALLS


def keep_call(variant: Variant, kind: Kind, call: _C.RepeatedCall) -> None:
    """Keeps a call for `call_again`."""
    known = kept_calls(variant)
    if kind not in known and len(known) >= KEPT:
        known = {}
    kept = (call, *known.get(kind, ())[: KEPT - 1])
    object.__setattr__(variant, "__fajit_repeats__", (_era, {**known, kind: kept}))


_era = object()


def forget_calls() -> None:
    """Forget the calls of all variants. For tests and benchmarks."""
    global _era
    _era = object()


def _example(dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a dtype; DLPack has none for codes of 4 bits, which are read as bytes."""
    found = _examples.get(dtype)
    if found is None:
        read = torch.uint8 if dtype == CODES4 else dtype
        found = _examples[dtype] = torch.empty(0, dtype=read, device=_CPU)
    return found
