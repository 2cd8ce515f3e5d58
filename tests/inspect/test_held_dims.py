"""`verify()` takes sizes from the tensors that a variant holds; signatures of its methods."""

from __future__ import annotations

import inspect
import io
from contextlib import redirect_stdout

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import InputError, ParamError
from flashattn_jit.inspect.dims import DEFAULT, complete_dims, held_dims
from flashattn_jit.inspect.explanation.explanation import explain
from flashattn_jit.inspect.verification.verification import verify
from tests.harness import processes, rotation


class Tables(fa.Variant):
    """Tensors with a shared dim, a dim that may be 1, and a free dim."""

    slopes: torch.Tensor = fa.tensor("num_q_heads")
    bias: torch.Tensor = fa.tensor("batch|1", "num_q_heads", "buckets")

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.slopes[h] * self.bias[b, h, 0]


def test_held_params_and_defaults_give_their_sizes():
    assert held_dims(fa.ALiBi(slopes=torch.rand(12)), {}) == {"num_q_heads": 12}
    assert held_dims(fa.ALiBi(), {}) == {}
    assert held_dims(fa.ALiBi(), {"slopes": torch.rand(6)}) == {"num_q_heads": 6}
    assert held_dims(fa.ALiBi(slopes=torch.rand(12)), {"slopes": torch.rand(6)}) == {
        "num_q_heads": 6
    }
    tables = Tables(slopes=torch.rand(6), bias=torch.rand(1, 6, 9))
    assert held_dims(tables, {}) == {"num_q_heads": 6}
    assert held_dims(tables, {"bias": torch.rand(3, 6, 9)}) == {"num_q_heads": 6, "batch": 3}
    both = fa.Causal() & fa.ALiBi(slopes=torch.rand(12))
    assert held_dims(both, {}) == {"num_q_heads": 12}


def test_what_is_left_out_follows():
    assert complete_dims(None, {}) == DEFAULT
    dims = complete_dims(None, {"num_q_heads": 12})
    assert (dims.num_q_heads, dims.num_kv_heads, dims.q_len) == (12, 6, DEFAULT.q_len)
    dims = complete_dims({"q_len": 33}, {"num_q_heads": 5})
    assert (dims.num_q_heads, dims.num_kv_heads, dims.q_len) == (5, 5, 33)


@pytest.mark.parametrize(
    "variant",
    rotation.turn(
        23,
        [
            fa.ALiBi(slopes=torch.linspace(0.01, 0.1, 12)),
            Tables(slopes=torch.ones(3), bias=torch.linspace(-1, 1, 27).view(1, 3, 9)),
        ],
    ),
    ids=lambda v: v.name,
)
def test_verify_without_dims(variant):
    heads = len(variant.slopes)
    report = variant.verify(dtypes=[torch.float32])
    assert report.ok
    ran = [row for row in report.rows if row.status == "pass"]
    assert len(ran) > 20
    assert {row.dims.num_q_heads for row in ran} == {heads}


def test_conflicts_name_both():
    tables = Tables(slopes=torch.rand(6), bias=torch.rand(1, 4, 9))
    with pytest.raises(ParamError, match=r"'bias' has num_q_heads=4 at dim 1.*'slopes' has .*=6"):
        tables.verify()
    with pytest.raises(InputError, match=r"num_q_heads=8, but a tensor .* has num_q_heads=12"):
        fa.ALiBi(slopes=torch.rand(12)).verify({"num_q_heads": 8})


@pytest.mark.parametrize("dims", [7, "abc", 1.5, object()])
def test_dims_of_another_kind(dims):
    with pytest.raises(InputError, match="dims must be a Dims, a mapping"):
        fa.Causal().verify(dims)


@pytest.mark.parametrize(("method", "function"), [("verify", verify), ("explain", explain)])
def test_a_methods_signature_is_its_functions(method, function):
    own = inspect.signature(getattr(fa.Variant, method)).parameters
    real = dict(list(inspect.signature(function).parameters.items())[1:])
    assert list(own)[1:] == list(real)
    for name, parameter in real.items():
        assert own[name].default == parameter.default, name
        assert own[name].kind == parameter.kind, name


@pytest.mark.parametrize("method", ["verify", "explain", "reference", "named"])
def test_help_shows_the_arguments(method):
    text = io.StringIO()
    with redirect_stdout(text):
        help(getattr(fa.Variant, method))
    shown = text.getvalue()
    assert "*args" not in shown
    for name in inspect.signature(getattr(fa.Variant, method)).parameters:
        assert name in shown


def test_making_a_variant_imports_nothing_of_the_inspection():
    code = (
        "import sys, flashattn_jit as fa\n"
        "fa.ALiBi().hooks()\n"
        "assert 'flashattn_jit.inspect.verification.verification' not in sys.modules\n"
        "assert 'flashattn_jit.inspect.explanation.explanation' not in sys.modules\n"
    )
    processes.run(["-c", code], check=True, timeout=60)
