"""Memory for partial states: the user's, or torch's allocator for each run."""

from __future__ import annotations

import torch

from ...errors import InputError
from ..arguments import checks

ALIGNMENT = 128  # bytes, of a workspace's begin


class Workspace:
    """Memory for the partial states of an object's runs: the user's, or torch's allocator for each.

    Torch's allocator orders memory by stream, so that runs of several threads and streams do not
    meet. Memory of the user's is one place for all: it serves one stream at a time, in order.

    given: uint8 tensor [bytes] on the device, or None.
    """

    __slots__ = ("_device", "_given", "given")

    def __init__(self, given: object, device: torch.device) -> None:
        """Raises InputError where `given` is no such tensor."""
        self._device = device
        self.given: torch.Tensor | None = None
        self._given: torch.Tensor | None = None
        if given is None:
            return
        if not isinstance(given, torch.Tensor) or given.dtype != torch.uint8:
            got = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
            raise InputError(f"workspace must be a uint8 tensor [bytes], got {got}")
        checks.check_readable("workspace", given)
        if given.device != device:
            raise InputError(f"workspace is on {given.device}, the batch on {device}")
        if given.dim() != 1 or not given.is_contiguous():
            raise InputError(
                f"workspace must be a contiguous uint8 tensor [bytes], got {list(given.shape)} "
                f"with strides {list(given.stride())}"
            )
        self.given = given
        self._given = given[-given.data_ptr() % ALIGNMENT :]

    def check(self, wanted: int) -> None:
        """Raises InputError where the user's memory holds less than `wanted` bytes."""
        given = self._given
        if given is not None and given.numel() < wanted:
            raise InputError(
                f"the plan needs a workspace of {wanted} bytes, workspace has {given.numel()} from "
                f"its first multiple of {ALIGNMENT} bytes on; pass a larger one, or none (see "
                "workspace_bytes(limits))"
            )

    def take(self, wanted: int) -> tuple[torch.Tensor | None, int]:
        """Memory for one run and its aligned address; (None, 0) where it needs none."""
        if not wanted:
            return None, 0
        if self._given is not None:
            space = self._given[:wanted]
        elif self._device.type == "cpu":  # where torch aligns to 64 bytes
            space = torch.empty(wanted + ALIGNMENT, dtype=torch.uint8, device=self._device)
            space = space[-space.data_ptr() % ALIGNMENT :][:wanted]
        else:
            space = torch.empty(wanted, dtype=torch.uint8, device=self._device)
        return space, space.data_ptr()
