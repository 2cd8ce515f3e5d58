"""Calls while a graph is made of them or nothing is computed: fake tensors, make_fx, torch.export.

Such tensors have no values to plan with. The call then is one op (`_compiled`), as inside
``torch.compile``, which plans when its graph runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..variants.modes import has_no_values

_KEYS = torch._C._TorchDispatchModeKey
_active = torch._C._get_dispatch_mode


def is_traced(values: Iterable[object]) -> bool:
    """Whether a tracer or FakeTensorMode is on, or one of the values is a tensor of theirs."""
    if torch.compiler.is_dynamo_compiling():
        return True
    if any(_active(key) is not None for key in (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)):
        return True
    if torch._ops._len_torch_dispatch_stack_pre_dispatch():
        return True
    return any(isinstance(x, torch.Tensor) and has_no_values(x) for x in values)


def makes_graph() -> bool:
    """Whether what is called now becomes part of a graph that may run later."""
    if torch.compiler.is_exporting() or _active(_KEYS.PROXY) is not None:
        return True
    return bool(torch._ops._len_torch_dispatch_stack_pre_dispatch())


def as_inputs(values: Sequence[Any]) -> list[Any]:
    """The values with ordinary tensors as tensors of the fake mode in force, if there is one.

    What a variant holds is such a tensor. A graph gets it as a constant.
    """
    mode = _fake_mode(values)
    if mode is None or mode.allow_non_fake_inputs:
        return list(values)
    from torch._subclasses.fake_tensor import FakeTensor  # imported by whoever made the mode

    graph = makes_graph()

    def entered(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [entered(item) for item in x]
        if not isinstance(x, torch.Tensor) or isinstance(x, FakeTensor):
            return x
        return torch.ops.aten.lift_fresh_copy(x) if graph else mode.from_tensor(x)

    return [entered(x) for x in values]


def _fake_mode(values: Sequence[Any]) -> Any:
    mode = _active(_KEYS.FAKE)
    if mode is not None:
        return mode
    flat = [y for x in values for y in (x if isinstance(x, (list, tuple)) else (x,))]
    return next((x.fake_mode for x in flat if hasattr(x, "fake_mode")), None)
