"""Calls while a graph is made of them or nothing is computed: fake tensors, make_fx, torch.export.

Such tensors have no values to plan with. The call then is one op (`_compiled`), as inside
``torch.compile``, which plans when its graph runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from ..errors import InputError
from ..variants.modes import VMAP_MESSAGE, has_no_values

_KEYS = torch._C._TorchDispatchModeKey
_active = torch._C._get_dispatch_mode


def is_traced(values: Iterable[object]) -> bool:
    """Whether a tracer or FakeTensorMode is on, or one of the values is a tensor of theirs.

    Raises:
        InputError: one of the values is a tensor of `torch.vmap`, or torch.jit.trace is on.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    if torch._C._get_tracing_state() is not None:
        raise InputError("torch.jit.trace is not followed; use torch.export or torch.compile")
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    if any(torch._C._functorch.is_batchedtensor(x) for x in tensors):
        refuse_vmap()
    if any(_active(key) is not None for key in (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)):
        return True
    if torch._ops._len_torch_dispatch_stack_pre_dispatch():
        return True
    return any(has_no_values(x) or torch._is_functional_tensor(x) for x in tensors)


def refuse_vmap(*args: object) -> NoReturn:
    """What the ops do under `torch.vmap`."""
    raise InputError(VMAP_MESSAGE)


def refuse_functionalize(what: str, values: Iterable[object]) -> None:
    """Raises InputError where an op would write to a tensor of `torch.func.functionalize`."""
    if any(isinstance(x, torch.Tensor) and torch._is_functional_tensor(x) for x in values):
        raise InputError(
            f"{what} is written to, which torch.func.functionalize cannot follow in an op that is "
            "not torch's own; call it outside"
        )


def is_fake(values: Sequence[Any]) -> bool:
    """Whether nothing runs, now or later: fake tensors of which no graph is made."""
    return _fake_mode(values) is not None and not makes_graph()


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
