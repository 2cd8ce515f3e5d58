"""Compiled functions, which must equal the eager ones, and calls for tests of `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend

import flashattn_jit as fa

D = 32


class Compiled:
    """A function under torch.compile(fullgraph=True) that counts its graphs."""

    def __init__(self, fn: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> None:
        self._counter = CompileCounterWithBackend(backend)
        self._fn = fn
        self._compiled = torch.compile(fn, fullgraph=True, backend=self._counter, **options)

    @property
    def graphs(self) -> int:
        """How many graphs were made."""
        return int(self._counter.frame_count)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled result, which must equal the eager one bit for bit."""
        result, expected = self._compiled(*args, **kwargs), self._fn(*args, **kwargs)
        flat, _ = torch.utils._pytree.tree_flatten(result)
        wanted, _ = torch.utils._pytree.tree_flatten(expected)
        assert len(flat) == len(wanted)
        for a, b in zip(flat, wanted, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
        return result


def dense(
    batch: int = 2, q_len: int = 40, kv_len: int = 70, heads: int = 4, kv_heads: int = 2
) -> tuple[torch.Tensor, ...]:
    q = torch.randn(batch, heads, q_len, D)
    return q, torch.randn(batch, kv_heads, kv_len, D), torch.randn(batch, kv_heads, kv_len, D)


class Window(fa.Variant):
    """A tensor and numbers, declared."""

    slopes: torch.Tensor = fa.tensor("num_q_heads", default=fa.alibi_slopes)
    window: int = fa.scalar(30)
    factor: float = fa.scalar(0.5)

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score * self.factor + self.slopes[h] * (kv_idx - q_idx)

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < self.window)
