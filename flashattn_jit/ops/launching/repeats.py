"""Runs on the CPU that are made again, with tensors of the layouts of an earlier run.

The checks and look-ups of a first run are Python, which a kernel evicts from the caches: between
the layers of a model they take 100 us, several times as long as from the caches. Here C compares
the tensors, read by torch's functions for DLPack, and launches. One token over 1,024 keys takes
0.20 ms instead of 0.25 (bf16, 32 heads over 8, head_dim 128, three caches in turn; by hand, 2 cores
of a Xeon with AMX).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ... import _C
from ...variants.binding import Bound
from ...variants.ir.dtypes import CODES4
from ..arguments import checks
from ..arguments.calls import Form, Layouts, bind_tensors
from ..planning.batch_plan import Variation

if TYPE_CHECKING:
    from .launches import Launch, Workspace

Results = tuple[torch.Tensor, torch.Tensor | None]

_CPU = torch.device("cpu")
_examples: dict[torch.dtype, torch.Tensor] = {}


class Repeat:
    """A launch and the layouts that it is bound to. Threads may share it.

    launch: made for `form`, and for params of these layouts.
    """

    __slots__ = ("_layouts", "_native", "_packed", "_variation", "_workspace_bytes", "launch")

    def __init__(self, variation: Variation, launch: Launch, layouts: Layouts, form: Form) -> None:
        self._variation, self.launch, self._layouts = variation, launch, layouts
        self._workspace_bytes = variation.native.workspace_bytes
        self._packed = tuple(dtype == CODES4 for dtype in form.dtypes)
        lse = None
        if launch.return_lse:
            lse = launch.shape[:-1], launch.lse_strides, _example(torch.float32)
        # Not of the tensors: another thread may have rebound them since they were checked.
        self._native = _C.RepeatedCall(
            launch.call,
            (
                (form.q_shape, form.strides[0], _example(form.dtypes[0])),
                (form.k_shape, form.strides[1], _example(form.dtypes[1])),
                (form.v_shape, form.strides[2], _example(form.dtypes[2])),
                (launch.shape, launch.strides, _example(launch.dtype)),
                lse,
            ),
            launch.input_bytes[3:],
        )

    def run(
        self, bound: Bound, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor | None, lse: torch.Tensor | None, scale: float, workspace: Workspace,
    ) -> Results | None:  # fmt: skip
        """(out, lse); None, with nothing done, unless the tensors have the launch's layouts.

        bound: of the launch's structure. out, lse: None where they were. Raises GradError.
        """
        variation, launch = self._variation, self.launch
        keys, values = k, v
        if True in self._packed:
            keys, values = _as_bytes(k, self._packed[1]), _as_bytes(v, self._packed[2])
        if not self._native.fits(q, keys, values, out, lse):
            return None
        tensors, scalars = variation.values(bound)
        checks.check_grad((q, k, v, *tensors))
        addresses, layouts, _held = bind_tensors(variation.known, tensors)
        if layouts != self._layouts:
            return None
        if out is None:
            out = torch.empty_strided(launch.shape, launch.strides, dtype=launch.dtype, device=_CPU)
        else:
            checks.check_out_grad(out)
        if lse is not None:
            checks.check_out_grad(lse, "lse")
        elif launch.return_lse:
            lse = torch.empty(launch.shape[:-1], dtype=torch.float32, device=_CPU)
        space, address = workspace.borrow(self._workspace_bytes)
        launched = self._native.launch(
            q, keys, values, out, lse, scale, torch.get_num_threads(), addresses, scalars, address,
            *variation.pointers,
        )  # fmt: skip
        workspace.give_back(space, address)
        return (out, lse) if launched else None


def _example(dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a dtype; DLPack has none for codes of 4 bits, which are read as bytes."""
    found = _examples.get(dtype)
    if found is None:
        read = torch.uint8 if dtype == CODES4 else dtype
        found = _examples[dtype] = torch.empty(0, dtype=read, device=_CPU)
    return found


def _as_bytes(tensor: torch.Tensor, packed: bool) -> Any:
    """A tensor as it is read; None, which does not fit, for one that should be packed."""
    if not packed:
        return tensor
    is_codes = type(tensor) is torch.Tensor and tensor.dtype == CODES4
    return tensor.view(torch.uint8) if is_codes else None
