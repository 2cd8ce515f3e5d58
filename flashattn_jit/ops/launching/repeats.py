"""Runs on the CPU that are made again, with tensors of the layouts of an earlier run.

A first run is checked, looked up and bound to strides, by Python that reads some 100 KB of code
and objects. Where a kernel has evicted them, as between the layers of a model, that takes 100 us;
here `_C.RepeatedCall` compares the tensors and launches. One token over 1,024 keys (bf16, 32 heads
over 8, head_dim 128; by hand, 2 cores of a Xeon with AMX): a run of a batch takes 0.20 ms instead
of 0.25.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ... import _C
from ...variants.binding import Bound
from ..arguments import checks
from ..arguments.calls import Layouts, bind_tensors
from ..planning.batch_plan import Variation

if TYPE_CHECKING:
    from .launches import Launch, Workspace

_CPU = torch.device("cpu")

Results = tuple[torch.Tensor, torch.Tensor | None]


class Repeat:
    """A launch and the layouts of its tensors, for those that follow. Threads may share it."""

    __slots__ = ("_launch", "_layouts", "_native", "_variation", "_workspace_bytes")

    def __init__(
        self, variation: Variation, launch: Launch, layouts: Layouts, q: torch.Tensor,
        k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None,
    ) -> None:  # fmt: skip
        self._variation, self._launch, self._layouts = variation, launch, layouts
        self._workspace_bytes = variation.native.workspace_bytes
        self._native = _C.RepeatedCall(launch.call, q, k, v, out, lse, launch.input_bytes[3:])

    def run(
        self, bound: Bound, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor | None, lse: torch.Tensor | None, scale: float, workspace: Workspace,
    ) -> Results | None:  # fmt: skip
        """(out, lse); None, with nothing done, unless the tensors are like those of the launch.

        bound: of the launch's structure. out, lse: None where they were. Raises GradError.
        """
        variation, launch = self._variation, self._launch
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
            q, k, v, out, lse, scale, torch.get_num_threads(), addresses, scalars, address,
            *variation.pointers,
        )  # fmt: skip
        workspace.give_back(space, address)
        return (out, lse) if launched else None
