"""Tensors whose memory does not hold dense entries, made of ordinary tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch


class Wrapper(torch.Tensor):
    """A wrapper subclass as users write them: it holds another tensor and unwraps it for ops."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrap = lambda x: x.inner if isinstance(x, Wrapper) else x  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        return func(*args, **kwargs)


class Refusing(Wrapper):
    """A wrapper subclass that implements no op."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


class Own(torch.Tensor):
    """A subclass that holds its entries as an ordinary tensor does."""


def _jagged(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([*x.unsqueeze(0), *x.unsqueeze(0)], layout=torch.jagged)


def _nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x, x])


def _masked(x: torch.Tensor) -> torch.Tensor:
    return torch.masked.masked_tensor(x.clone(), torch.ones_like(x, dtype=torch.bool))


def _quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)


def _csr(x: torch.Tensor) -> torch.Tensor:
    return (x if x.dim() > 1 else x.expand(2, -1)).to_sparse_csr()


MAKERS: dict[str, Callable[[Any], Any]] = {
    "coo": torch.Tensor.to_sparse,
    "csr": _csr,
    "mkldnn": lambda x: x.float().to_mkldnn(),
    "quantized": _quantized,
    "nested": _nested,
    "jagged": _jagged,
    "masked": _masked,
    "wrapper": Wrapper,
    "refusing": Refusing,
}
"""By name: makes of a dense tensor one that stores its values in another way."""


def make(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    """An odd tensor, without torch's warnings about prototypes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MAKERS[kind](tensor)
