"""The class form, params and their errors, normalisers, C++ hooks."""

# Variants are written as users write them.
# mypy: disable-error-code="no-untyped-call,no-untyped-def,no-any-return,attr-defined,operator"

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch

from flashattn_jit.errors import ParamError, TraceError, VariantError
from flashattn_jit.variants.ir import ir
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.variant import (
    Pointwise,
    Softmax,
    Variant,
    as_variant,
    cpp,
    scalar,
    tensor,
    variant,
)
from tests.variants.small_variants import DIMS, CappedAlibi, Causal, Window, run, slopes_of


class Table(Variant):
    """Params of every kind of dim."""

    table: torch.Tensor = tensor("batch", "buckets", 3)
    other: torch.Tensor = tensor("buckets", dtype=(torch.float32, torch.bfloat16))
    optional: torch.Tensor | None = tensor("head_dim", default=None)

    def score_mod(self, score, b, h, q_idx, kv_idx):
        score = score + self.table[b, q_idx, 0] + self.other[kv_idx]
        return score if self.optional is None else score + self.optional[kv_idx]


# --- params -------------------------------------------------------------------------------------


def test_values_come_from_the_call_then_the_variant_then_the_default():
    v = Window(window=3)
    assert run(v, "mask_mod", q_idx=3) is False
    assert run(v, "mask_mod", {"window": 4}, q_idx=3) is True
    assert run(CappedAlibi(), "score_mod", {"cap": 1e9}, h=2, kv_idx=3) == pytest.approx(7)
    assert v.param_names == ("window",)
    assert v.window == 3 and CappedAlibi().cap == 30.0
    v.window = 5
    assert run(v, "mask_mod", q_idx=4) is True


def test_a_new_value_is_the_same_structure():
    handles = {CappedAlibi().bind(DIMS, {"cap": c}).structure for c in (1, 2.5, 100.0)}
    handles |= {CappedAlibi(cap=c, slopes=torch.ones(4)).bind(DIMS).structure for c in (1, 7.5)}
    assert len(handles) == 1


def test_defaults_are_made_once_for_the_dims_they_read():
    calls = []

    class Lazy(Variant):
        t: torch.Tensor = tensor("num_q_heads", default=lambda d: calls.append(d) or slopes_of(d))

        def score_mod(self, score, b, h, q_idx, kv_idx):
            return score + self.t[h]

    v = Lazy()
    for kv_len in (7, 8, 9):
        v.bind(DIMS._replace(kv_len=kv_len, batch=kv_len))
    assert len(calls) == 1
    v.bind(DIMS._replace(num_q_heads=8))
    assert len(calls) == 2


def table_params(**changes):
    return {"table": torch.zeros(2, 9, 3), "other": torch.zeros(9), **changes}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, r"Table needs the param 'table' \[batch, buckets, 3\].*table=\.\.\."),
        (table_params(extra=1), r"no param 'extra'; its params are table, other, optional"),
        (table_params(table=3.0), r"'table' expects a tensor of shape \[batch, .*3\], got float"),
        (table_params(table=3), r"int 3; pass torch\.full\(\(batch, buckets, 3\), 3\)"),
        (table_params(other=[1.0]), r"got list; pass torch\.tensor\(other\)"),
        (table_params(other=0.5), r"float 0\.5; pass torch\.full\(\(buckets,\), 0\.5\)"),
        (table_params(table=torch.zeros(2, 9)), r"expects 3 dims.*got shape \[2, 9\]"),
        (table_params(table=torch.zeros(3, 9, 3)), r"batch=2 at dim 0.*\[3, 9, 3\].*2 elements"),
        (table_params(table=torch.zeros(2, 9, 4)), r"with 3 at dim 2"),
        (table_params(other=torch.zeros(8)), r"buckets=9, as 'table' has"),
        (table_params(other=torch.zeros(9).double()), r"float32 or bfloat16, got float64"),
        (table_params(optional=torch.zeros(9)), r"head_dim=16"),
        (table_params(table=torch.zeros(2, 9, 3, dtype=torch.complex64)), r"complex64"),
        (table_params(table=torch.zeros(2, 9, 3, device="meta")), r"on meta, the call on cpu"),
        (table_params(table=None), r"got NoneType None"),
    ],
)  # fmt: skip
def test_tensor_params_that_do_not_fit(params, message):
    with pytest.raises(ParamError, match=message):
        Table().bind(DIMS, params)


def test_optional_and_half_params():
    v = Table()
    plain = v.bind(DIMS, table_params())
    full = v.bind(DIMS, table_params(optional=torch.ones(16), other=torch.zeros(9).bfloat16()))
    assert len(plain.tensors) == 2 and len(full.tensors) == 3
    assert [p.dtype for p in full.ir.tensors] == ["float32", "bfloat16", "float32"]
    assert full.ir.tensors[1].value_dtype == "float32"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("4", r"expects a number \(int\), got str"),
        (4.5, r"expects an int, got float 4\.5"),
        (True, r"got bool True"),
        (torch.tensor(4), r"got a tensor.*fa\.tensor\(\)"),
        (None, r"got NoneType"),
        (2**63, r"does not fit 64 bits, got 9223372036854775808"),
    ],
)
def test_scalars_of_the_wrong_kind(value, message):
    with pytest.raises(ParamError, match=message):
        Window(window=value)
    with pytest.raises(ParamError, match=message):
        Window(window=1).bind(DIMS, {"window": value})


def test_a_missing_scalar_names_the_variant():
    with pytest.raises(ParamError, match=r"Window needs the param 'window'; pass window="):
        Window().bind(DIMS)
    with pytest.raises(AttributeError, match="given at the call"):
        Window().window  # noqa: B018


def test_unknown_names_when_made():
    with pytest.raises(ParamError, match=r"Window has no param 'size'; its params are window"):
        Window(size=3)
    with pytest.raises(ParamError, match=r"'window'"):
        variant(mask_mod=lambda b, h, q, k: q >= k).bind(DIMS, {"window": 3})


def test_ints_are_floats_where_floats_are_declared():
    assert CappedAlibi(cap=3).bind(DIMS).scalars == (3.0,)
    assert type(CappedAlibi(cap=3).bind(DIMS).scalars[0]) is float


@pytest.mark.parametrize("name", ["q", "scale", "kv_len", "out", "target", "score_mod", "partial"])
def test_reserved_names(name):
    with pytest.raises(VariantError, match=f"may not be called '{name}'"):
        type("Bad", (Variant,), {"__annotations__": {name: float}, name: scalar(1.0)})


def test_static_fields_are_structure_or_runtime_by_kind():
    class Options(Variant):
        mode: str = "causal"
        strict: bool = scalar(False)
        block: int = 4
        needed: float

        def mask_mod(self, b, h, q_idx, kv_idx):
            if self.mode == "full":
                return True
            kept = q_idx > kv_idx if self.strict else q_idx >= kv_idx
            return kept & (kv_idx // self.block < self.needed)

    with pytest.raises(ParamError, match="needs 'needed' when it is made"):
        Options()
    a, b = (Options(needed=2.0, block=n).bind(DIMS) for n in (4, 5))
    assert a.structure == b.structure and a.scalars == (4, 2.0)
    assert a.structure != Options(needed=2.0, strict=True).bind(DIMS).structure
    assert Options(needed=2.0).bind(DIMS, {"strict": True}).structure != a.structure
    assert Options(needed=1.0, mode="full").bind(DIMS).scalars == ()
    with pytest.raises(ParamError, match=r"'strict' expects a bool, got int 1; it is part of"):
        Options(needed=2.0).bind(DIMS, {"strict": 1})
    with pytest.raises(ParamError, match="no param 'block'"):
        Options(needed=2.0).bind(DIMS, {"block": 3})


def test_inheritance():
    class Strict(Window):
        extra: int = scalar(1)

        def mask_mod(self, b, h, q_idx, kv_idx):
            return super().mask_mod(b, h, q_idx, kv_idx) & (q_idx > self.extra)

    v = Strict(window=5)
    assert v.param_names == ("window", "extra")
    assert run(v, "mask_mod", q_idx=2, kv_idx=1) is True
    assert run(v, "mask_mod", {"extra": 2}, q_idx=2, kv_idx=1) is False
    assert run(v, "mask_mod", {"window": 1}, q_idx=3, kv_idx=1) is False
    assert v.bind(DIMS, {"window": 2}).structure == v.bind(DIMS).structure


def test_methods_of_the_class_and_attributes_set_later():
    class Helped(Variant):
        gain: float = scalar(2.0)

        def helper(self, x):
            return x * self.gain

        @property
        def twice(self):
            return self.gain * 2

        def score_mod(self, score, b, h, q_idx, kv_idx):
            return self.helper(score) + self.twice + self.shift

    v = Helped()
    v.shift = 1.0
    assert run(v, "score_mod") == 2 + 4 + 1
    v.shift = 2.0
    assert run(v, "score_mod", {"gain": 3.0}) == 3 + 6 + 2


# --- hooks ----------------------------------------------------------------------------------------


def test_arity_is_checked_when_the_class_or_variant_is_made():
    with pytest.raises(VariantError, match=r"Bad.mask_mod takes 3 .* self, b, h, q_idx, kv_idx"):
        type("Bad", (Variant,), {"mask_mod": lambda self, q, k: q >= k})
    with pytest.raises(VariantError, match=r"score_mod takes 4 arguments.*expected 5: score, b"):
        variant(score_mod=lambda b, h, q, k: q)
    with pytest.raises(VariantError, match=r"must take 4 arguments.*or 5.*got 2"):
        as_variant(lambda q, k: q >= k)
    with pytest.raises(VariantError, match="must be a function, got int"):
        variant(mask_mod=3)
    with pytest.raises(VariantError, match=r"make a variant of it: Causal\(\)"):
        as_variant(Causal)
    for wrong, message in (
        (3, r"expected a Variant, .* got int$"),
        ("causal", r"got str 'causal'; pass fa\.Causal\(\)"),
        ("alibi", r"pass an object, such as fa\.Causal\(\)"),
        (torch.ones(3, 3).bool(), r"pass fa\.variant\(mask_mod=lambda .* mask\[q_idx, kv_idx\]\)"),
        (
            torch.ones(3, 3),
            r"score_mod=.*fa\.scaled_dot_product_attention\(\.\.\., attn_mask",
        ),
        ([Causal(), Window(window=3)], r"got list; join variants with `&`"),
    ):
        with pytest.raises(VariantError, match=message):
            as_variant(wrong)


def test_bare_row_hooks_are_told_by_the_name_of_their_first_argument():
    def rotated(row, b, h, q_idx):
        return row

    def gated(row, lse, b, h, q_idx):
        return row

    class Hook:
        def __call__(self, row, b, kv_h, kv_idx):
            return row

    @functools.wraps(rotated)
    def wrapped(*args):
        return rotated(*args)

    for hook in (rotated, gated, Hook(), Hook().__call__, wrapped, lambda row, b, h, q_idx: row,
                 functools.partial(lambda w, row, b, h, q_idx: row * w, 2.0)):  # fmt: skip
        with pytest.raises(VariantError, match=r"\(row, .* is a row hook .*\(query_mod=\.\.\.\)"):
            as_variant(hook)
    assert as_variant(lambda b, h, row, column: row >= column).bind(DIMS).ir.has("mask_mod")


def test_bare_functions_are_told_apart_by_arity():
    def extra_defaults(b, h, q, k, window=3):
        return q - k < window

    assert as_variant(extra_defaults).bind(DIMS).ir.has("mask_mod")
    assert as_variant(lambda s, b, h, q, k: s).bind(DIMS).ir.has("score_mod")
    score = functools.partial(lambda w, s, b, h, q, k: s * w, 2.0)
    assert as_variant(score).bind(DIMS).ir.has("score_mod")
    assert as_variant(None).bind(DIMS).ir == ir.VariantIR(())
    v = Causal()
    assert as_variant(v) is v


def test_one_bare_function_is_a_variant():
    causal, double = lambda b, h, q, k: q >= k, lambda s, b, h, q, k: s * 2
    assert run(variant(causal), "mask_mod", q_idx=1, kv_idx=2) is False
    both = variant(causal, score_mod=double, name="both")
    assert both.name == "both" and run(both, "score_mod", score=3.0) == 6
    assert variant(double).bind(DIMS).ir == as_variant(double).bind(DIMS).ir
    with pytest.raises(VariantError, match=r"two mask_mod functions; join them with `&`"):
        variant(causal, mask_mod=causal)
    with pytest.raises(VariantError, match=r"Causal is a variant already; join variants with `&`"):
        variant(Causal(), score_mod=double)


def test_compiled_functions_are_what_was_compiled():
    """And `torch.compile` compiles nothing for it."""

    def double(s, b, h, q, k):
        return s * 2

    class Module(torch.nn.Module):
        def forward(self, s, b, h, q, k):
            return s * 3

    compiled = torch.compile(double, backend="eager")
    assert as_variant(compiled).bind(DIMS).ir == as_variant(double).bind(DIMS).ir
    assert run(variant(score_mod=compiled), "score_mod", score=3.0) == 6
    assert variant(score_mod=compiled).name == "score_mod(double)"
    assert run(as_variant(torch.compile(Module(), backend="eager")), "score_mod", score=3.0) == 9


def test_names():
    def my_mask(b, h, q, k):
        return q >= k

    class Scorer:
        def __call__(self, score, b, h, q, k):
            return score

    assert Causal().name == "Causal" and as_variant(my_mask).name == "mask_mod(my_mask)"
    assert variant(mask_mod=my_mask, name="other").name == "other"
    assert as_variant(lambda b, h, q, k: q >= k).name == "mask_mod(<lambda>)"
    both = variant(mask_mod=functools.partial(my_mask), score_mod=Scorer())
    assert both.name == "score_mod(Scorer) & mask_mod(my_mask)"
    assert variant(score_mod=cpp("return score;")).name == "variant"
    assert as_variant(None).name == "Full"
    assert repr(Causal() & ~Window(window=3)) == "(Causal() & ~Window(window=3))"


@pytest.mark.parametrize(
    "text",
    ["Causal & W0", "Causal | ~W0", "(Causal | W0) & ~(W1 & Causal)", "~(~Causal | W0)",
     "Causal & W0 & W1", "~~Causal & (W0 | W1)"],
)  # fmt: skip
def test_names_of_composed_variants_are_what_their_user_writes(text: str):
    """Precedence included; `.named`, which renames params, does not show."""
    parts = {"Causal": Causal(), "W0": Window(3).named("near"), "W1": Window(9).named("far")}
    assert eval(text, parts).name == text.replace("W0", "Window").replace("W1", "Window")


def test_slots_follow_first_use_whatever_the_order_of_capture():
    a, b = torch.ones(4), torch.zeros(4).double()

    def make(first, second):
        def hook(s, b_, h, q, k):
            keep = second  # noqa: F841
            return s * first[h] + second[h]

        return hook

    bounds = [variant(score_mod=make(*x)).bind(DIMS) for x in ((a, b), (b, a))]
    for bound in bounds:
        graph = bound.ir.hook("score_mod")
        assert graph is not None
        used = [n.attr("slot") for n in graph.nodes if n.op == "gather"]
        assert used == [0, 1]
        assert [str(t.dtype)[6:] for t in bound.tensors] == [p.dtype for p in bound.ir.tensors]


def test_params_of_several_hooks_are_one_slot():
    class Both(Variant):
        limit: float = scalar(2.0)
        table: torch.Tensor = tensor("num_q_heads")

        def score_mod(self, score, b, h, q_idx, kv_idx):
            return score * self.table[h] + self.limit

        def mask_mod(self, b, h, q_idx, kv_idx):
            return (self.table[h] > 0) & (kv_idx < self.limit)

    bound = Both(table=torch.ones(4)).bind(DIMS)
    assert len(bound.tensors) == len(bound.scalars) == 1


def test_unused_params_take_no_slot():
    class Unused(Variant):
        first: float = scalar(1.0)
        second: float = scalar(2.0)

        def score_mod(self, score, b, h, q_idx, kv_idx):
            return score + self.second

    assert Unused().bind(DIMS).scalars == (2.0,)


def test_equal_variants_have_equal_json():
    class Again(Variant):
        window: int = scalar()

        def mask_mod(self, b, h, q, k):
            return self.window > q - k

    one, two = Window(window=2).bind(DIMS), Again(window=3).bind(DIMS)
    texts = [ir.canonical_json(ir.variant_to_json(x.ir)) for x in (one, two)]
    assert texts[0] == texts[1] and one.structure == two.structure


# --- normalisers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sink", "expected"),
    [
        (0.5, 0.5),
        (torch.tensor(0.25), 0.25),
        (torch.arange(4.0), 2.0),
        (torch.arange(8.0).view(2, 4), 6.0),
        (lambda b, h: h * 0.5 + b, 2.0),
    ],
)
def test_sinks(sink, expected):
    assert run(variant(normalizer=Softmax(sink=sink)), "sink", b=1, h=2) == expected


def test_sinks_that_name_a_param():
    class Sunk(Variant):
        sinks: torch.Tensor = tensor("num_q_heads")
        normalizer = Softmax(sink="sinks")

    assert run(Sunk(sinks=torch.arange(4.0)), "sink", h=3) == 3
    assert run(Sunk(sinks=torch.arange(4.0)).named("a"), "sink", {"a_sinks": torch.ones(4)}) == 1

    class Wrong(Variant):
        normalizer = Softmax(sink="nothing")

    with pytest.raises(VariantError, match="names no param"):
        Wrong().bind(DIMS)


def test_pointwise_and_its_scale():
    v = variant(normalizer=Pointwise(torch.sigmoid, scale=0.5))
    assert run(v, "pointwise", score=0.0) == 0.5
    assert run(v, "pointwise_scale") == 0.5
    v = variant(normalizer=Pointwise(lambda s: s.relu() ** 2, scale=lambda b, h, i: 1 / (i + 1)))
    assert run(v, "pointwise", score=3.0) == 9
    assert run(v, "pointwise_scale", q_idx=3) == 0.25
    assert v.bind(DIMS).ir.normalizer == "pointwise"


def test_a_normalizer_may_be_a_method():
    class Biased(Variant):
        bias: float = scalar(1.0)

        def normalizer(self):
            return Pointwise(lambda s: s + self.bias)

    assert run(Biased(), "pointwise", score=2.0) == 3
    assert run(Biased(), "pointwise", {"bias": 5.0}, score=2.0) == 7
    assert Biased().bind(DIMS).structure == Biased(bias=9).bind(DIMS).structure


def test_normalizers_of_the_wrong_kind():
    with pytest.raises(VariantError, match=r"fa\.Softmax\(\.\.\.\) or fa\.Pointwise"):
        variant(normalizer=torch.softmax)


# --- C++ hooks ------------------------------------------------------------------------------------


def test_cpp_hooks_keep_their_text_and_the_params_they_name():
    class Custom(Variant):
        unused: float = scalar(1.0)
        cap: float = scalar(30.0)
        slopes: torch.Tensor = tensor("num_q_heads")
        score_mod = cpp("return score * cap + slopes(h);")

    bound = Custom(slopes=torch.ones(4)).bind(DIMS)
    assert bound.ir.cpp == (("score_mod", "return score * cap + slopes(h);"),)
    assert [p.name for p in bound.ir.scalars] == ["cap"]
    assert [p.name for p in bound.ir.tensors] == ["slopes"]
    assert bound.scalars == (30.0,)


def test_an_expression_is_a_body():
    v = variant(mask_mod=cpp("q_idx >= kv_idx"))
    assert v.bind(DIMS).ir.cpp == (("mask_mod", "return q_idx >= kv_idx;"),)
    other = variant(mask_mod=cpp("q_idx > kv_idx"))
    assert other.bind(DIMS).structure != v.bind(DIMS).structure
    assert variant(mask_mod=cpp("q_idx >= kv_idx")).bind(DIMS).structure == v.bind(DIMS).structure


def test_cpp_hooks_that_cannot_be():
    with pytest.raises(VariantError, match="only score_mod, mask_mod"):
        variant(query_mod=cpp("row"))
    with pytest.raises(VariantError, match="cannot be combined"):
        variant(mask_mod=cpp("true")) & Causal()
    with pytest.raises(VariantError, match="cannot be combined"):
        ~variant(mask_mod=cpp("true"))
    with pytest.raises(VariantError, match="expects C\\+\\+ text"):
        cpp("  ")
    with pytest.raises(VariantError, match=r"fa\.variant"):
        as_variant(cpp("true"))
    mixed = variant(score_mod=cpp("score * 2.0f")) & Causal()
    assert mixed.bind(DIMS).ir.has("score_mod") and mixed.bind(DIMS).ir.has("mask_mod")


def test_cpp_pointwise():
    v = variant(normalizer=Pointwise(cpp("score > 0 ? score : 0.0f")))
    assert v.bind(DIMS).ir.cpp_hook("pointwise") == "return score > 0 ? score : 0.0f;"


def test_the_class_form_is_typed(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(
        textwrap.dedent(
            """
            import torch
            from flashattn_jit.variants.variant import Softmax, Variant, scalar, tensor

            class SoftCappedALiBi(Variant):
                cap: float = scalar(30.0)
                slopes: torch.Tensor = tensor("num_q_heads")
                normalizer = Softmax(sink=0.0)

                def score_mod(
                    self, score: torch.Tensor, b: torch.Tensor, h: torch.Tensor,
                    q_idx: torch.Tensor, kv_idx: torch.Tensor,
                ) -> torch.Tensor:
                    bias = self.slopes[h] * (kv_idx - q_idx)
                    return self.cap * torch.tanh(score / self.cap) + bias

            w = SoftCappedALiBi()
            v: Variant = SoftCappedALiBi(cap=20.0, slopes=torch.ones(8)) & w.named("a")
            cap: float = w.cap
            ~v | w
            SoftCappedALiBi(cap="x")  # type: ignore[arg-type]
            SoftCappedALiBi(no=1)  # type: ignore[call-arg]
            """
        )
    )
    command = [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "user.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "user.py:" not in result.stdout and "1 source file" in result.stdout, result.stdout


def test_errors_leave_the_variant_usable():
    v = Window(window=3)
    with pytest.raises(ParamError):
        v.bind(DIMS, {"window": "x"})
    with pytest.raises(TraceError):
        (v & variant(mask_mod=lambda b, h, q, k: q >= k and k > 1)).bind(DIMS)
    assert v.bind(DIMS).scalars == (3,)


def test_copies_are_independent():
    v = Window(window=3)
    for twin in (copy.copy(v), copy.deepcopy(v), pickle.loads(pickle.dumps(v))):
        twin.window = 9
        assert twin.bind(DIMS).scalars == (9,) and v.bind(DIMS).scalars == (3,)
        assert twin.bind(DIMS).structure == v.bind(DIMS).structure
    both = Causal() & Window(window=3).named("x")
    twin = copy.deepcopy(both)
    assert twin.bind(DIMS).scalars == (3,)
    assert copy.copy(variant(mask_mod=lambda b, h, q, k: q >= k)).bind(DIMS).ir.has("mask_mod")


def test_classes_with_an_init_of_their_own():
    class Own(Variant):
        gain: float = scalar(2.0)

        def __init__(self, shift):
            self.shift = shift

        def score_mod(self, score, b, h, q_idx, kv_idx):
            return score * self.gain + self.shift

    assert run(Own(5), "score_mod") == 7
    assert run(Own(6), "score_mod", {"gain": 3.0}) == 9


def test_optional_scalars():
    class Maybe(Variant):
        limit: int | None = scalar(None)

        def mask_mod(self, b, h, q_idx, kv_idx):
            return q_idx >= kv_idx if self.limit is None else kv_idx < self.limit

    assert Maybe().bind(DIMS).scalars == ()
    assert Maybe().bind(DIMS, {"limit": 4}).scalars == (4,)
    with pytest.raises(ParamError, match="expects an int"):
        Maybe(limit=2.5)


def test_row_hooks_need_the_row_s_length():
    with pytest.raises(ParamError, match="head_dim"):
        variant(query_mod=lambda x, b, h, i: x).bind(Dims(1, 1, 1, 1, 1))
