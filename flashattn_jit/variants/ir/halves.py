"""Hooks read tensors of half precision and fp8 as float32, also where torch computes for them, and
integers that become floats are float32, whatever torch's default dtype is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


def reads_as_float32(dtype: torch.dtype) -> bool:
    """Whether hooks read tensors of a dtype as float32."""
    return dtype.is_floating_point and dtype.itemsize < 4


def widened(x: Any) -> Any:
    """A tensor as hooks read it; any other object as it is."""
    return x.float() if isinstance(x, torch.Tensor) and reads_as_float32(x.dtype) else x


def call_as_read(
    func: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, Callable[[Any], Any] | None]:
    """The result of a function as kernels compute it, and what each argument is read as for that;
    None: all as they are.

    Values of half precision and fp8 are `widened`, but not by a function that only makes views,
    reads attributes or writes to its argument. Integers that torch would make the default dtype are
    float32 in kernels. A function that writes is called once.
    """
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if any(reads_as_float32(x.dtype) for x in given):
        try:
            result = func(*args, **kwargs)
        except RuntimeError:  # torch does not compute it of such tensors
            return _widely(func, args, kwargs), widened
        if not _is_new(result, given):
            return result, None
        return func(*read_all(widened, args), **read_all(widened, kwargs)), widened
    result = func(*args, **kwargs)
    default = torch.get_default_dtype()
    if default is torch.float32 or not given or any(x.is_floating_point() for x in given):
        return result, None
    if default not in _dtypes(result):
        return result, None
    # A condition stays a boolean where it can; `torch.where(condition, 0.1, 0.3)` has floats alone.
    for read in (_integers_as_float32, _tensors_as_float32, _numbers_as_float32):
        try:
            found = func(*read_all(read, args), **read_all(read, kwargs))
        except (RuntimeError, TypeError):
            continue
        if torch.float32 in _dtypes(found):
            return found, read
    return result, None  # the dtype is one that the hook asks for


def _widely(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The result with `widened` arguments; one that the function writes to is written to."""
    written: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(x: Any) -> Any:
        wide = widened(x)
        if wide is not x:
            written.append((x, wide))
        return wide

    result = func(*read_all(read, args), **read_all(read, kwargs))
    for narrow, wide in written:
        if result is wide:
            return narrow.copy_(wide)
    return result


def _is_new(result: Any, given: list[torch.Tensor]) -> bool:
    """Whether a result has memory of its own."""
    results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    try:
        memory = set(map(_memory, given))
        return any(_memory(x) not in memory for x in results)
    except RuntimeError:  # of tensors without storage
        return True


def _dtypes(results: Any) -> set[torch.dtype]:
    return {x.dtype for x in tree_leaves(results) if isinstance(x, torch.Tensor)}


def _integers_as_float32(x: Any) -> Any:
    return _tensors_as_float32(x) if getattr(x, "dtype", None) is not torch.bool else x


def _tensors_as_float32(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) else x


def _numbers_as_float32(x: Any) -> Any:
    if isinstance(x, float):
        return torch.scalar_tensor(x, dtype=torch.float32, device="cpu")
    return _integers_as_float32(x)


def _memory(x: torch.Tensor) -> int:
    """Equal for tensors that share memory, also under `torch.vmap`."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return int(x.untyped_storage()._cdata)


def read_all(read: Callable[[Any], Any], tree: Any) -> Any:
    """`read` of every argument, also in tuples, lists and dicts."""
    return tree_map(read, tree)
