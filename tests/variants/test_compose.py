"""Variants of variants: ``&``, ``|``, ``~`` and `named`."""

# Variants are written as users write them.
# mypy: disable-error-code="no-untyped-call,no-untyped-def,no-any-return,attr-defined,operator"

from __future__ import annotations

import functools
import pickle

import pytest
import torch

from flashattn_jit.errors import ParamError, VariantError
from flashattn_jit.variants.variant import (
    Pointwise,
    Softmax,
    Variant,
    is_pointwise,
    scalar,
    tensor,
    variant,
)
from tests.variants.ir_eval import evaluate
from tests.variants.small_variants import DIMS, CappedAlibi, Causal, Window, run


def test_masks_combine():
    c, w = Causal(), Window(window=3)
    for i in range(6):
        for j in range(6):
            causal, near = i >= j, i - j < 3
            at_ij = {"q_idx": i, "kv_idx": j}
            assert run(c & w, "mask_mod", **at_ij) == (causal and near)
            assert run(c | w, "mask_mod", **at_ij) == (causal or near)
            assert run(~c, "mask_mod", **at_ij) == (not causal)
            assert run(~(c & ~w) | c, "mask_mod", **at_ij) == (
                (not (causal and not near)) or causal
            )


def test_bare_functions_combine_with_variants():
    def near(b, h, q, k):
        return q - k < 3

    double = lambda s, b, h, q, k: s * 2  # noqa: E731
    near_by_name = functools.partial(lambda n, b, h, q, k: q - k < n, 3)
    for i, j in ((5, 1), (5, 3), (1, 5)):
        at_ij = {"q_idx": i, "kv_idx": j}
        for both in (Causal() & near, near & Causal(), Causal() & near_by_name):
            assert run(both, "mask_mod", **at_ij) == (i >= j and i - j < 3)
        assert run(near | Causal(), "mask_mod", **at_ij) == (i >= j or i - j < 3)
        assert run(~(Causal() | near), "mask_mod", **at_ij) == (i < j and i - j >= 3)
    assert run(near & Causal() & double, "score_mod", score=5.0) == 10


def test_constant_masks_combine():
    never = variant(mask_mod=lambda b, h, q, k: False)
    for v, expected in ((never & Causal(), False), (never | Causal(), True), (~never, True)):
        assert run(v, "mask_mod", q_idx=1) is expected


def test_scores_chain_left_to_right():
    double = variant(score_mod=lambda s, b, h, q, k: s * 2)
    plus = variant(score_mod=lambda s, b, h, q, k: s + 3)
    assert run(double & plus, "score_mod", score=5.0) == 13
    assert run(plus & double, "score_mod", score=5.0) == 16
    assert run(plus & double & plus, "score_mod", score=5.0) == 19


def test_row_hooks_chain_and_normalizers_pass_through():
    first = variant(query_mod=lambda x, b, h, i: x * 2, normalizer=Softmax(sink=1.0))
    second = variant(query_mod=lambda x, b, h, i: x + 1) & Causal()
    bound = (first & second).bind(DIMS)
    graph = bound.ir.hook("query_mod")
    assert graph is not None and bound.ir.has("sink") and bound.ir.has("mask_mod")
    row = torch.arange(16.0)
    assert torch.equal(evaluate(graph, {"row": row}), row * 2 + 1)
    gate = variant(output_mod=lambda o, lse, b, h, i: o * lse)
    bias = variant(output_mod=lambda o, lse, b, h, i: o + lse)
    graph = (gate & bias).bind(DIMS).ir.hook("output_mod")
    assert graph is not None
    inputs = {"row": torch.ones(8), "lse": torch.tensor(3.0)}
    assert torch.equal(evaluate(graph, inputs), torch.full((8,), 6.0))


def test_what_does_not_compose():
    sunk = variant(normalizer=Softmax(sink=1.0))
    with pytest.raises(VariantError, match="both have a normalizer"):
        sunk & variant(normalizer=Pointwise(torch.sigmoid))
    with pytest.raises(VariantError, match=r"`\|` combines.*CappedAlibi.*score_mod"):
        Causal() | CappedAlibi()
    with pytest.raises(VariantError, match=r"`~` combines.*normalizer"):
        ~(Causal() & sunk)
    with pytest.raises(VariantError, match="no mask"):
        ~variant()
    with pytest.raises(VariantError, match=r"both have a param 'window'.*\.named\('local'\)"):
        Window(window=1) & Window(window=2)
    with pytest.raises(VariantError, match=r"`\|` combines.*score_mod"):
        Causal() | (lambda s, b, h, q, k: s)
    with pytest.raises(VariantError, match=r"must take 4 arguments .* or 5"):
        Causal() & (lambda q, k: q >= k)
    with pytest.raises(VariantError, match=r"make a variant of it: Causal\(\)"):
        Causal() & Causal
    with pytest.raises(TypeError):
        Causal() & 3
    with pytest.raises(TypeError):
        3 & Causal()


def test_named_prefixes():
    near, far = Window(window=2).named("near"), Window(window=9).named("far")
    both = Causal() & (near | ~far)
    assert both.param_names == ("near_window", "far_window")
    bound = both.bind(DIMS, {"far_window": 5})
    assert bound.scalars == (2, 5)
    assert [p.name for p in bound.ir.scalars] == ["near_window", "far_window"]
    twice = Window(window=2).named("a").named("b")
    assert twice.param_names == ("b_a_window",)
    with pytest.raises(ParamError, match="needs the param 'x_window'"):
        Window().named("x").bind(DIMS)
    with pytest.raises(VariantError, match="expects an identifier"):
        near.named("not an identifier")


def test_free_dims_agree_across_parts():
    class A(Variant):
        a: torch.Tensor = tensor("tokens")

        def score_mod(self, score, b, h, q_idx, kv_idx):
            return score + self.a[q_idx]

    class B(Variant):
        b_table: torch.Tensor = tensor("tokens")

        def score_mod(self, score, b, h, q_idx, kv_idx):
            return score + self.b_table[kv_idx]

    with pytest.raises(ParamError, match="tokens=3, as 'a' has"):
        (A(a=torch.ones(3)) & B(b_table=torch.ones(4))).bind(DIMS)


def test_new_compositions_do_not_retrace(monkeypatch):
    from flashattn_jit.variants import binding

    first = (Causal() & Window(window=3) & CappedAlibi()).bind(DIMS)
    monkeypatch.setattr(binding, "trace_variant", None)
    again = (Causal() & Window(window=4) & CappedAlibi(cap=2.0)).bind(DIMS)
    assert again.structure == first.structure and again.scalars == (2.0, 4)


def test_only_and_without_split_a_variant_by_hooks():
    norm = variant(query_mod=lambda x, b, h, i: x * 2, key_mod=lambda x, b, h, i: x * 3)
    sunk = variant(score_mod=lambda s, b, h, q, k: s + 1, normalizer=Softmax(sink=1.0))
    whole = norm & sunk & Window(window=3) & WithBias()
    stored, read = whole.only("key_mod", "value_mod"), whole.without("key_mod", "value_mod")
    ir = stored.bind(DIMS).ir
    assert [name for name, _ in ir.hooks] == ["key_mod"] and ir.normalizer == "softmax"
    assert stored.param_names == ()  # those of parts that have none of the hooks are gone
    bias = torch.zeros(DIMS.num_q_heads)
    ir = read.bind(DIMS, {"bias": bias}).ir
    assert {name for name, _ in ir.hooks} == {"query_mod", "score_mod", "mask_mod", "sink"}
    again = pickle.loads(pickle.dumps(Both().without("key_mod")))
    assert {*again.hooks()} == {"query_mod"}
    # Hooks of one class, and a renamed part.
    assert {*Both(factor=2.0).only("key_mod").hooks()} == {"key_mod"}
    assert {*Both(factor=2.0).named("own").only("key_mod").hooks()} == {"key_mod"}
    assert Both().named("own").only("key_mod").param_names == ("own_factor",)


def test_only_keeps_or_drops_the_normalizer():
    squared = variant(normalizer=Pointwise(torch.relu), key_mod=lambda x, b, h, i: x)
    assert is_pointwise(squared.without("key_mod")) and not is_pointwise(squared.only("key_mod"))
    assert is_pointwise(squared & Causal()) and not is_pointwise((squared & Causal()).without(
        "normalizer"))  # fmt: skip
    assert squared.only("key_mod").bind(DIMS).ir.normalizer == "softmax"


def test_what_is_left_of_a_variant_composes_as_such():
    mixed = variant(score_mod=lambda s, b, h, q, k: s, mask_mod=lambda b, h, q, k: q > k)
    mask = mixed.only("mask_mod")
    assert run(~mask, "mask_mod", q_idx=1) is False
    assert run(mask | Causal(), "mask_mod", q_idx=0) is True
    with pytest.raises(VariantError, match="combines"):
        ~mixed.only("score_mod")


def test_only_of_nothing_is_full_attention_and_all_of_it_is_the_variant():
    window = Window(window=3)
    assert window.only("mask_mod") is window and window.without("key_mod") is window
    assert window.only("key_mod").hooks() == {}
    with pytest.raises(VariantError, match="unknown hook 'keys'; hooks are query_mod"):
        window.only("keys")


class Both(Variant):
    """Two row hooks, one param."""

    factor: float = scalar(1.0)

    def query_mod(self, row, b, h, q_idx):
        return row * self.factor

    def key_mod(self, row, b, kv_h, kv_idx):
        return row / self.factor


class WithBias(Variant):
    """A param without a default."""

    bias: torch.Tensor = tensor("num_q_heads")

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.bias[h]
