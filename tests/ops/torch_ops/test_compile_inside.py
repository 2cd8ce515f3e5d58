"""Hooks and variants that the compiled function makes itself: the graph takes what they capture.

Results equal the eager ones bit for bit, and new values make no new graph beyond the one in which
the compiler turns a Python number into an input.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask

import flashattn_jit as fa
from flashattn_jit.ops.torch_ops import outline
from flashattn_jit.variants.library import made_classes
from tests.ops.torch_ops.compiled import Compiled, Window, dense
from tests.ops.torch_ops.made_inside import MADE, Declared, closure

# The compiler's own modules warn when they are first imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]

Tensor = torch.Tensor


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", MADE)
def test_made_inside(name: str) -> None:
    make = MADE[name]
    run = Compiled(lambda q, k, v, t, n: fa.attention(q, k, v, make(t, n)))
    for n in (5, 6, 7, 11):
        run(*dense(), torch.rand(4), n)
    assert run.graphs <= 2


def test_floats() -> None:
    run = Compiled(lambda q, k, v, x: fa.attention(q, k, v, lambda s, b, h, i, j: s * x + x / 3))
    for x in (1.5, 2.25, -0.5, 3.0):
        run(*dense(), x)
    assert run.graphs <= 2


def test_nan_beside_a_number() -> None:
    run = Compiled(
        lambda q, k, v, x: fa.attention(
            q, k, v, lambda s, b, h, i, j: torch.where(j > i + 1000, math.nan, s * x)
        )
    )
    for x in (1.5, 2.25):
        run(*dense(), x)


def test_flags_are_structure() -> None:
    def call(q, k, v, flag):
        return fa.attention(q, k, v, lambda s, b, h, i, j: s * 2 if flag else s)

    run = Compiled(call)
    for flag in (True, False, True):
        run(*dense(), flag)
    assert run.graphs == 2


def test_flags_of_dynamic_shapes_are_structure() -> None:
    def call(q, k, v):
        is_long = q.shape[2] > 40
        out = fa.attention(
            q, k, v, lambda s, b, h, i, j: s * 2 if is_long else s, partial=is_long,
            return_lse=is_long,
        )  # fmt: skip
        dense = fa.scaled_dot_product_attention(q, q, q, is_causal=is_long)
        return out, dense, fa.flex_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    run = Compiled(call, dynamic=True)
    for q_len in (40, 50, 60, 30):
        run(*dense(q_len=q_len))
    assert run.graphs == 2


def test_after_a_write_to_a_dict_from_outside() -> None:
    cache: dict[str, Tensor] = {}

    def call(q, k, v, n):
        cache["k"] = k
        return fa.attention(q, k, v, fa.SlidingWindow(n))

    Compiled(call)(*dense(), 5)


def test_lengths_of_the_call() -> None:
    def call(q, k, v):
        return fa.attention(q, k, v, fa.SlidingWindow(q.shape[2] // 2 + 1) & fa.ALiBi())

    run = Compiled(call, dynamic=True)
    for q_len in (40, 50, 33):
        run(*dense(q_len=q_len))
    assert run.graphs == 1


def test_params_of_the_call_replace_those_of_the_variant() -> None:
    def call(q, k, v, window, cap):
        variant = fa.SlidingWindow(3) & fa.SoftCap(cap)
        return fa.attention(q, k, v, variant, window=window, return_lse=True)

    run = Compiled(call)
    for window, cap in ((5, 3.5), (6, 4.5), (7, 5.5)):
        run(*dense(), window, cap)
    assert run.graphs <= 2


@pytest.mark.parametrize("partial", [False, True])
def test_pointwise(partial: bool) -> None:
    def call(q, k, v, n):
        return fa.attention(q, k, v, fa.Sigmoid() & fa.SlidingWindow(n), partial=partial)

    out = Compiled(call)(*dense(), 9)
    assert isinstance(out, torch.Tensor)


# --- the other functions --------------------------------------------------------------------------


def test_varlen_attention() -> None:
    indptr = torch.tensor([0, 10, 40])
    q = torch.randn(40, 4, 32)

    def call(q, t, n):
        variant = fa.SlidingWindow(n) & fa.ALiBi(slopes=t)
        return fa.varlen_attention(q, q, q, indptr, indptr, variant)

    run = Compiled(call)
    for n in (3, 4, 5):
        run(q, torch.rand(4), n)
    assert run.graphs <= 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_flex_attention(backend: str) -> None:
    def call(q, k, v, t, n):
        return fa.flex_attention(q, k, v, closure(t, n), enable_gqa=True, return_lse=True)

    run = Compiled(call, backend)
    for n in (3, 4, 5):
        run(*dense(), torch.rand(4), n)
    assert run.graphs <= 2


def test_flex_attention_with_a_block_mask_made_inside() -> None:
    def call(q, k, v, n):
        mask = create_block_mask(
            lambda b, h, i, j: i - j < n, None, None, 40, 70, "cpu", BLOCK_SIZE=16
        )
        return fa.flex_attention(q, k, v, None, mask, enable_gqa=True)

    run = Compiled(call)
    for n in (9, 12, 13):
        run(*dense(), n)
    assert run.graphs <= 2


class Doubled(dict[str, int]):
    def __getitem__(self, key: str) -> int:
        return 2 * dict.__getitem__(self, key)


class Listed(list[int]):
    def top(self) -> int:
        return self[-1]


class Biased(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.rand(4), requires_grad=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fa.attention(q, k, v, lambda s, b, h, i, j: s + self.table[h])


LISTED = Listed([2])


@pytest.mark.parametrize(
    "make", [lambda n: Doubled(top=n), lambda n: Listed([n]), lambda n: LISTED.append(n) or LISTED]
)
def test_containers_of_other_classes_are_made_outside(make: Any) -> None:
    def call(q, k, v):
        held = make(3)
        return fa.attention(q, k, v, lambda s, b, h, i, j: s * held["top"])

    words = "(Doubled|Listed).*made or changed inside.*a subclass of a container.*make it outside"
    fails(call, fa.VariantError, words)
    assert LISTED == [2]
    Compiled(lambda q, k, v: fa.attention(q, k, v, lambda s, b, h, i, j: s * LISTED.top()))(
        *dense()
    )


def test_a_compiled_module_can_be_collected() -> None:
    layer = Biased()
    q, k, v = dense()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), layer(q, k, v))
    left = weakref.ref(layer), weakref.ref(layer.table)
    del layer, compiled
    torch._dynamo.reset()
    gc.collect()
    assert left[0]() is None and left[1]() is None


# --- nothing is stale -----------------------------------------------------------------------------

GAIN, TABLE, IS_ON = 3, torch.linspace(0.1, 0.4, 4), True


def gained(x: Any) -> Any:
    return x * GAIN if IS_ON else -x


class UsesGlobals(fa.Variant):
    factor: int = fa.scalar(3)

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return gained(score) * self.factor + TABLE[h]


def test_globals() -> None:
    global GAIN, TABLE, IS_ON

    def call(q, k, v, n):
        def score_mod(score, b, h, i, j):
            return gained(score) + TABLE[h] * n

        variant = UsesGlobals(factor=n) & fa.Causal()
        return fa.attention(q, k, v, score_mod), fa.attention(q, k, v, variant)

    run = Compiled(call)
    run(*dense(), 3)
    GAIN = 7
    run(*dense(), 3)
    TABLE = torch.rand(4)
    run(*dense(), 3)
    IS_ON = False
    run(*dense(), 3)


def test_tensors_that_the_graph_changes() -> None:
    """The order of a change and a read is that of the program."""
    held = torch.ones(4)

    def call(q, k, v, t):
        before = fa.attention(q, k, v, lambda s, b, h, i, j: s + t[h] * held[h])
        t.mul_(2)
        held.add_(1)
        return before, fa.attention(q, k, v, lambda s, b, h, i, j: s + t[h] * held[h])

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    q, k, v = dense()
    for _ in range(2):
        t, kept = torch.rand(4), held.clone()
        expected = call(q, k, v, t.clone())
        held.copy_(kept)
        for a, b in zip(compiled(q, k, v, t), expected, strict=True):
            assert torch.equal(a, b)


class Layer(torch.nn.Module):
    """Hooks over its own parameters, made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.rand(4), requires_grad=False)
        self.window = 11

    def mask(self, b, h, i, j):
        return i - j < self.window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Any:
        def score_mod(score, b, h, i, j):
            return score + t[h] * self.bias[h]

        variant = fa.variant(score_mod=score_mod) & fa.SlidingWindow(self.window)
        both = fa.variant(score_mod=score_mod, mask_mod=self.mask)
        return fa.attention(q, k, v, score_mod), *[
            fa.attention(q, k, v, x, return_lse=True)[0] for x in (variant, both)
        ]


def test_a_layer() -> None:
    layer = Layer()
    run = Compiled(layer)
    for _ in range(2):
        run(*dense(), torch.rand(4))
        layer.bias.mul_(1.5)
    assert run.graphs == 1


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("how", ["strict", "non-strict", "make_fx"])
def test_exported(how: str) -> None:
    layer = Layer()
    given = (*dense(), torch.rand(4))
    if how == "make_fx":
        made: Any = make_fx(layer)(*given)
    else:
        made = torch.export.export(layer, given, strict=how == "strict").module()
    for _ in range(2):
        given = (*dense(), torch.rand(4))
        for a, b in zip(made(*given), layer(*given), strict=True):
            assert torch.equal(a, b)


# --- what cannot be followed is an error ----------------------------------------------------------


def fails(call: Callable[..., Any], error: type[Exception], words: str) -> None:
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises(error, match=words):
        compiled(*dense())


def test_wrong_hooks_raise_as_they_do_elsewhere() -> None:
    fails(lambda q, k, v: fa.attention(q, k, v, lambda b, h: b), fa.VariantError, "got 2")
    fails(
        lambda q, k, v: fa.attention(q, k, v, fa.variant(mask_mod=lambda b, h: b)),
        fa.VariantError, "mask_mod takes 2 arguments",
    )  # fmt: skip
    fails(
        lambda q, k, v: fa.attention(q, k, v, lambda s, b, h, i, j: s if i > j else -s),
        fa.TraceError, r"torch\.where",
    )  # fmt: skip
    fails(lambda q, k, v: fa.attention(q, k, v, fa.Causal), fa.VariantError, "make a variant of it")
    for wrong in ({"a": 1}, {"score_mod": None, "mask_mod": None}):
        fails(lambda q, k, v, x=wrong: fa.attention(q, k, v, x), fa.VariantError, "got dict")
    # Dynamo wraps what a constructor raises in its own error.
    unknown = lambda q, k, v: fa.attention(q, k, v, fa.SlidingWindow(widow=3))  # noqa: E731
    fails(unknown, TorchDynamoException, "no param 'widow'.*did you mean")
    words = "ParamError.*'table' expects 1 dims"
    fails(lambda q, k, v: fa.attention(q, k, v, Declared(q, 3)), TorchDynamoException, words)
    fails(lambda q, k, v: fa.attention(q, k, v, Window(slopes=q[:, 0, 0, 0])), fa.ParamError, "dim")


def test_dynamo_refuses_the_tilde() -> None:
    """Dynamo's ``invert`` takes no objects; the method `__invert__` works (`MADE`)."""
    fails(
        lambda q, k, v: fa.attention(q, k, v, ~fa.SlidingWindow(3)), TorchDynamoException, "invert"
    )


def test_classes_are_made_outside() -> None:
    def call(q, k, v):
        class Inside(fa.Variant):
            def mask_mod(self, b, h, q_idx, kv_idx):
                return q_idx >= kv_idx

        return fa.attention(q, k, v, Inside())

    fails(call, TorchDynamoException, "class")


def test_arguments_of_functions_that_make_classes() -> None:
    words = "an argument of fa.RoPE.* is made inside of the compiled function.*make it outside"
    fails(
        lambda q, k, v: fa.attention(q, k, v, fa.RoPE(scaling=fa.Llama3Scaling())),
        TorchDynamoException, words,
    )  # fmt: skip


def test_a_dynamo_that_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of Dynamo other than `comptime` may change; the error then names a remedy."""

    def change(code: object, scope: object) -> str:
        raise AttributeError("no such thing")

    monkeypatch.setattr(outline.TEMPLATES, "of_function", change)
    words = r"score_mod.*made or changed inside.*this version of torch.*no such thing.*outside"
    bias = torch.rand(4)
    fails(lambda q, k, v: fa.attention(q, k, v, closure(bias, 3)), fa.VariantError, words)


def test_the_mark_of_constants_is_that_of_torch() -> None:
    def theirs() -> None: ...

    assert vars(made_classes._made) == vars(torch.compiler.assume_constant_result(theirs))


class Gain:
    def __init__(self, gain: float) -> None:
        self.gain = gain


def test_a_number_that_is_not_followed_is_an_error() -> None:
    """Not the placeholder that a variant is traced with."""

    def call(q, k, v, gain, name):
        settings = Gain(gain)
        return fa.attention(q, k, v, lambda s, b, h, i, j: s * getattr(settings, "".join(name)))

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for gain in (0.5, 0.5, 0.25):
        with pytest.raises(fa.VariantError, match="reads a number of the compiled function where"):
            compiled(*dense(), gain, ["ga", "in"])
