"""Calls on the CPU that are made again, with tensors of the layouts of an earlier one.

The checks and look-ups of a first call are Python. Between the layers of a model, when a kernel has
filled the caches with other data, they take several times as long as in a loop. Here C compares the
tensors, read by torch's functions for DLPack, and launches. It also compares what the variant is
bound to (`Captured`), where nothing is computed from contents of tensors: then the only Python that
looks at the variant is the function that reads its captures.

A run of one request of 16 keys (bf16, 8 heads over 2, head_dim 64; by hand, 2 cores of a Xeon), in
microseconds:

                                        bound by Python   by C alone
bf16, in a loop / with cold caches           16 / 50         8 / 27
int8 pages, likewise                         40 / 93        22 / 54
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from ... import _C
from ...torch_modes import example
from ...variants.binding import Bound, Captured, shape_of
from ...variants.ir.dtypes import CODES4
from ...variants.variant import Variant
from ..arguments import checks
from ..arguments.calls import KEPT_SIZE, Form, Layouts, Recent, bind_tensors
from ..planning.batch_plan import Variation

if TYPE_CHECKING:
    from .launches import Launch, Workspace

Results = tuple[torch.Tensor, torch.Tensor | None]
Asked = tuple[bool, bool, bool, bool]
"""What a run asks for: whether return_lse and partial are set, and out and lse given."""
Kind = tuple[object, ...]
"""The function that was called, and its other arguments, without tensors."""


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
            lse = launch.shape[:-1], launch.lse_strides, example_of(torch.float32)
        page_indices, key_blocks = variation.pointers
        # Not of the tensors: another thread may have rebound them since they were checked.
        tensors = (
            (form.q_shape, form.strides[0], example_of(form.dtypes[0])),
            (form.k_shape, form.strides[1], example_of(form.dtypes[1])),
            (form.v_shape, form.strides[2], example_of(form.dtypes[2])),
            (launch.shape, launch.strides, example_of(launch.dtype)),
            lse,
        )
        params = [(*x, example_of(t.dtype)) for x, t in zip(layouts, bound.tensors, strict=False)]
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
            checks.check_grad(tensors, (), variation.known.tensor_names)
        addresses, layouts, _held = bind_tensors(variation.known, tensors)
        if layouts != self._layouts:
            return None
        return self.native.run(q, k, v, out, lse, scale, addresses, scalars)


class Notes:
    """Counts calls that C did not recognise. The second and third of a kind are recorded for C,
    which takes 20 us each; the first is not, as its numbers may not come again."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[tuple[object, ...], int] = {}

    def count(self, key: tuple[object, ...]) -> bool:
        """Counts a call; whether it is to be recorded."""
        count = self._counts.get(key, 0)
        if count < _MOST_NOTES:
            if len(self._counts) >= 256:
                self._counts.clear()
            self._counts[key] = count + 1
        return 0 < count < _MOST_NOTES

    def clear(self) -> None:
        """Forgets all counts."""
        self._counts.clear()


_MOST_NOTES = 3
_KEPT = 8  # calls of one kind
_calls: Recent[tuple[object, ...], tuple[_C.RepeatedCall, ...]] = Recent(KEPT_SIZE)


def call_again(
    variant: Variant, kind: Kind, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor | None, lse: torch.Tensor | None, scale: object, return_lse: bool,
    partial: bool, params: dict[str, object],
) -> Results | None:  # fmt: skip
    """(out, lse) of a dense call like an earlier one of such a variant; None, with nothing done, if
    there was none, or where C cannot see that it is.

    The tensors are those of direct calls (`is_direct`).
    """
    for call in _calls.get((shape_of(variant), *kind), ()):
        results = call.run_again(variant, q, k, v, out, lse, scale, return_lse, partial, params)
        if results is not None:
            return results
    return None


def keep_call(variant: Variant, kind: Kind, call: _C.RepeatedCall, size: int) -> None:
    """Keeps a call for `call_again`. size: of its plan."""
    key = (shape_of(variant), *kind)
    _calls.keep(key, (call, *_calls.get(key, ())[: _KEPT - 1]), _KEPT * size)


def forget_calls() -> None:
    """Forget all calls. For tests and benchmarks."""
    _calls.clear()


def example_of(dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a dtype; DLPack has none for codes of 4 bits, which are read as bytes."""
    return example(torch.uint8 if dtype == CODES4 else dtype)
