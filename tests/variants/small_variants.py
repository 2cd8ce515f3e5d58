"""Small user variants, and the value of a hook at one pair, for tests of `bind`."""

# Variants are written as users write them.
# mypy: disable-error-code="no-untyped-call,no-untyped-def,no-any-return"

from __future__ import annotations

import torch

from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.variant import Variant, as_variant, scalar, tensor
from tests.variants.ir_eval import evaluate

DIMS = Dims(2, 4, 2, 5, 7, 16, 8)


def slopes_of(dims):
    return torch.arange(dims.num_q_heads, dtype=torch.float32)


class CappedAlibi(Variant):
    cap: float = scalar(30.0)
    slopes: torch.Tensor = tensor("num_q_heads", default=slopes_of)

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return self.cap * torch.tanh(score / self.cap) + self.slopes[h] * (kv_idx - q_idx)


class Window(Variant):
    window: int = scalar()

    def mask_mod(self, b, h, q_idx, kv_idx):
        return q_idx - kv_idx < self.window


class Causal(Variant):
    def mask_mod(self, b, h, q_idx, kv_idx):
        return q_idx >= kv_idx


def at(graph, tensors=(), scalars=(), **index):
    inputs = {n: torch.tensor(i, dtype=torch.int32) for n, i in index.items() if n != "score"}
    inputs["score"] = torch.tensor(index.get("score", 1.0))
    for name in ("b", "h", "q_idx", "kv_idx"):
        inputs.setdefault(name, torch.tensor(0, dtype=torch.int32))
    return evaluate(graph, inputs, tensors, scalars).item()


def run(v, hook, params=None, **index):
    bound = as_variant(v).bind(DIMS, params or {})
    graph = bound.ir.hook(hook)
    assert graph is not None
    return at(graph, bound.tensors, bound.scalars, **index)
