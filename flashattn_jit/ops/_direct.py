"""Whether a call may run without torch's dispatcher, which costs more than a small kernel.

The dispatcher's 6 to 9 us (measured, 2 cores) buy nothing for plain tensors when nothing
listens: no mode, no transform, no trace, no profiler. Everything else goes through the registered
op.
"""

from __future__ import annotations

import torch

from ..variants.modes import is_quiet, outside_modes

_keys = torch._C._dispatch_keys
_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

_TYPES = (torch.Tensor, torch.nn.Parameter)


_PLAIN_KEYS: set[int] = set()


def learn_device(device: torch.device) -> None:
    """Know the key sets of plain tensors on a device, on which a call was planned."""
    with outside_modes():
        for inference in (False, True):
            with torch.inference_mode(inference):
                _PLAIN_KEYS.add(_keys(torch.empty(0, device=device)).raw_repr())


learn_device(torch.device("cpu"))


def is_direct(*tensors: torch.Tensor) -> bool:
    """Whether the op on these tensors is exactly its implementation here."""
    if _profiling() or not is_quiet():
        return False
    for tensor in tensors:
        if type(tensor) not in _TYPES or _keys(tensor).raw_repr() not in _PLAIN_KEYS:
            return False
    return True
