"""Functions for hooks that torch does not have: `tanh_approx`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

TANH_APPROX_ERROR = 2.0**-11
"""The relative error that kernels may have in `tanh_approx` of a float32 value."""


def tanh_approx(input: Tensor) -> Tensor:
    """``tanh(input)`` with a relative error of at most 2^-11 in kernels, for speed.

    For hooks, on values of any shape: integers become float32 first, as in `torch.tanh`. On CUDA it
    is one instruction of the special-function unit (``tanh.approx.f32``; PTX ISA, "max relative
    error 2^-11"), on CPUs a shorter polynomial and rational function than that of `torch.tanh`.
    Kernels of different targets give different values within the error, so a mask that compares
    them may decide differently. Exact are float64 values, what a hook computes from captured
    tensors alone, and eager tensors, as in the reference. `Variant.verify` allows for the error.

    >>> fa.variant(score_mod=lambda s, b, h, q, k: 50.0 * fa.tanh_approx(s / 50.0))
    """
    if has_torch_function_unary(input):
        return handle_torch_function(tanh_approx, (input,), input)
    return torch.tanh(input)
