"""What a hook did not find when a call was compiled, and containers that change, are guarded."""

# Hooks are written as users write them.
# mypy: disable-error-code="no-untyped-call,no-untyped-def,attr-defined"

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashattn_jit as fa
from tests.ops.torch_ops.compiled import Compiled, dense

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]


class Bare:
    """An object to which a test adds attributes."""


class Biased(fa.Variant):
    """Its bias may be set later."""

    bias = None

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score if self.bias is None else score + self.bias[h]


def params_with_defaults() -> tuple[Any, Any]:
    slopes = fa.ALiBi()

    def change():
        slopes.slopes = torch.tensor([3.0, 1.0, 0.5, 0.1])

    return lambda q, k, v: fa.attention(q, k, v, fa.Causal() & slopes), change


def renamed_params() -> tuple[Any, Any]:
    slopes = fa.ALiBi()

    def change():
        slopes.slopes = torch.tensor([3.0, 1.0, 0.5, 0.1])

    return lambda q, k, v: fa.attention(q, k, v, slopes.named("own")), change


def keys_of_dicts() -> tuple[Any, Any]:
    biases = {"a": torch.rand(4)}

    def change():
        biases["b"] = torch.rand(4) * 5

    def call(q, k, v):
        return fa.attention(q, k, v, lambda s, b, h, i, j: s + sum(biases[x][h] for x in biases))

    return call, change


def membership() -> tuple[Any, Any]:
    biases = {"a": torch.rand(4)}

    def change():
        biases["c"] = torch.rand(4) * 5

    def call(q, k, v):
        return fa.attention(
            q, k, v, lambda s, b, h, i, j: s + (biases["c"][h] if "c" in biases else 0.0)
        )

    return call, change


def attributes() -> tuple[Any, Any]:
    bare = Bare()

    def change():
        bare.factor = 5.0

    def call(q, k, v):
        return fa.attention(q, k, v, lambda s, b, h, i, j: s * getattr(bare, "factor", 1.0))

    return call, change


def hooks_of_instances() -> tuple[Any, Any]:
    mask = fa.Causal()

    def change():
        mask.mask_mod = lambda b, h, q_idx, kv_idx: kv_idx < 3

    return lambda q, k, v: fa.attention(q, k, v, mask & fa.SoftCap(5.0)), change


def none_that_becomes_a_tensor() -> tuple[Any, Any]:
    biased = Biased()

    def change():
        biased.bias = torch.rand(4) * 5

    return lambda q, k, v: fa.attention(q, k, v, biased), change


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    "make",
    [params_with_defaults, renamed_params, keys_of_dicts, membership, attributes,
     hooks_of_instances, none_that_becomes_a_tensor],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_a_change_is_compiled_again(make: Any) -> None:
    call, change = make()
    run = Compiled(call)
    for _ in range(2):
        run(*dense())
    assert run.graphs == 1
    change()
    for _ in range(2):
        run(*dense())
    assert run.graphs == 2


def test_a_dict_whose_keys_change_their_order() -> None:
    biases = {"a": torch.rand(4) * 5, "b": torch.rand(4)}

    def score_mod(score, b, h, q_idx, kv_idx):
        first, second = biases.values()
        return score + first[h] - second[h] * 3.0

    variant = fa.variant(score_mod=score_mod)
    run = Compiled(lambda q, k, v: fa.attention(q, k, v, variant))
    for _ in range(3):
        run(*dense())
        biases["a"] = biases.pop("a")
        run(*dense())
        biases["b"] = biases.pop("b")
