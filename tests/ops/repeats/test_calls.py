"""Dense calls after the second of a kind: C repeats those that are the same, others are checked."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.spec import host_target, host_targets
from flashattn_jit.errors import FlashAttnJitError, GradError, InputError, ParamError
from flashattn_jit.ops.launching import launches, repeats
from flashattn_jit.variants import binding
from flashattn_jit.variants.reference import attention_reference as reference
from tests.ops.repeats.cases import calls_of

SHAPE, KEYS = (2, 4, 5, 32), (2, 2, 40, 32)
HEADS = SHAPE[1]


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(s).to(dtype) for s in (SHAPE, KEYS, KEYS))


def check(out: torch.Tensor, given: Any, variant: Any, **options: Any) -> None:
    expected, _ = reference(*(t.double() for t in given), variant, **options)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.fixture
def checked_calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows at each call that Python binds the variant for."""
    return calls_of(monkeypatch, launches, "bind")


VARIANTS: dict[str, Callable[[], Any]] = {
    "none": lambda: None, "causal": fa.Causal, "window": lambda: fa.SlidingWindow(7),
    "tensor": lambda: fa.ALiBi() & fa.Causal(), "pair": lambda: fa.SoftCap(5.0),
    "function": lambda: fa.variant(mask_mod=lambda b, h, i, j: j % 3 != 1),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("q_offset", [0, "end", 3])
def test_calls_are_repeated_by_c(name: str, q_offset: Any, checked_calls: list[object]) -> None:
    variant = VARIANTS[name]()
    for asked in ({}, {"return_lse": True}, {"scale": 0.3}):
        options = {"q_offset": q_offset, **asked}
        for _ in range(2):
            fa.attention(*tensors(), variant, **options)
        count = len(checked_calls)
        given = tensors()
        result = fa.attention(*given, variant, **options)
        assert len(checked_calls) == count
        out = result[0] if isinstance(result, tuple) else result
        check(out, given, variant, q_offset=q_offset, scale=asked.get("scale"))
        if isinstance(result, tuple):
            _, lse = reference(*(t.double() for t in given), variant, q_offset=q_offset)
            torch.testing.assert_close(result[1].double(), lse, atol=2e-5, rtol=2e-5)


def test_another_offset_or_layout_is_another_call() -> None:
    variant = fa.Causal()
    for q_offset in (0, 4, "end", 0, 9, 30, 35, 0):
        for keys in (40, 17, 40):
            for _ in range(3):
                q, k, v = tensors()
                given = q, k[:, :, :keys], v[:, :, :keys]
                check(fa.attention(*given, variant, q_offset=q_offset), given, variant,
                      q_offset=q_offset)  # fmt: skip
    assert max(len(calls) for calls in repeats._calls.values()) <= repeats._KEPT


def test_params_are_read_at_each_call(checked_calls: list[object]) -> None:
    variant, given = fa.ALiBi(), tensors()
    for slopes in (None, torch.rand(HEADS), torch.rand(HEADS)):
        if slopes is not None:
            variant.slopes = slopes
        for _ in range(3):
            check(fa.attention(*given, variant), given, variant)
    for _ in range(3):
        slopes = torch.rand(HEADS)
        out = fa.attention(*given, variant, slopes=slopes)
        check(out, given, fa.ALiBi(slopes=slopes))
        check(fa.attention(*given, variant), given, variant)
    lens = torch.tensor([40, 9])
    for _ in range(3):
        check(fa.attention(*given, variant, kv_len=lens), given, variant, kv_len=lens)


def test_what_a_hook_captures_is_read_at_each_call() -> None:
    bias, factor = torch.randn(HEADS), 1.5
    variant = fa.variant(score_mod=lambda s, b, h, i, j: s * factor + bias[h])
    given = tensors()
    for _ in range(3):
        for _ in range(3):
            check(fa.attention(*given, variant), given, variant)
        bias, factor = torch.randn(HEADS), factor + 1


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("code", ["int8", "nf4", "e4m3"])
@pytest.mark.parametrize("rotate", [False, True])
def test_stored_keys_and_values(code: str, rotate: bool, checked_calls: list[object]) -> None:
    own = fa.kv.Format(code, rotate=rotate)
    for i in range(4):
        q, k, v = tensors()
        variant = fa.SlidingWindow(20 + i // 3)
        check(fa.attention(q, k, v, variant), (q, k, v), variant)
        stored = own.quantize(k, heads_dim=1), own.quantize(v, heads_dim=1)
        rows = [x.dequantize().to(torch.float32) for x in stored]
        count = len(checked_calls)
        check(fa.attention(q, *stored, variant), (q, *rows), variant)
        assert len(checked_calls) == count + (i != 2)  # a changed number is checked
        if i == 2:  # scales of another layout, and none at all
            apart = [
                replace(x, scales=torch.stack([x.scales, x.scales], -1)[..., 0]) for x in stored
            ]
            check(fa.attention(q, *apart, variant), (q, *rows), variant)
            assert len(checked_calls) == count + 1


def test_the_target_and_the_threads_of_each_call(
    monkeypatch: pytest.MonkeyPatch, checked_calls: list[object]
) -> None:
    variant, given = fa.Causal(), tensors(torch.bfloat16)
    before = torch.get_num_threads()
    for target in (*host_targets(), None):
        if target is None:
            monkeypatch.delenv("FLASHATTN_JIT_TARGET")
        else:
            monkeypatch.setenv("FLASHATTN_JIT_TARGET", target)
        for count in (1, 2):
            torch.set_num_threads(count)
            try:
                bound = len(checked_calls)
                outs = [fa.attention(*given, variant) for _ in range(4)]
                assert bound < len(checked_calls) <= bound + 2, "C saw a difference"
                expected = fa.attention(*given, variant, target=target or host_target())
            finally:
                torch.set_num_threads(before)
            assert all(torch.equal(out, expected) for out in outs)
    monkeypatch.setenv("FLASHATTN_JIT_TARGET", "cpu:none")
    with pytest.raises(FlashAttnJitError, match="cpu:none"):
        fa.attention(*given, variant)


def test_sdpa_checks_heads_by_its_own_rules(checked_calls: list[object]) -> None:
    q, k, v = tensors()
    for _ in range(3):
        out = fa.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        check(out, (q, k, v), None)
        with pytest.raises(InputError, match="heads"):
            fa.scaled_dot_product_attention(q, k, v)
        one = [t[0] for t in (q, k, v)]
        out = fa.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
        check(out[None], [t[None] for t in one], fa.Causal())
    count = len(checked_calls)
    fa.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert len(checked_calls) == count
    for wrong in ({"dropout_p": 0.5}, {"dropout_p": None}, {"scale": "x"}):
        with pytest.raises(FlashAttnJitError):
            fa.scaled_dot_product_attention(q, k, v, enable_gqa=True, **wrong)
    mask = torch.rand(5, 40) > 0.3
    out = fa.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_results_that_are_given() -> None:
    q, k, v = tensors()
    out, lse = torch.empty_like(q), torch.empty(SHAPE[:3])
    for _ in range(4):
        given = tensors()
        assert fa.attention(*given, out=out) is out
        check(out, given, None)
        assert fa.attention(*given, out=out, lse=lse)[1] is lse
    for wrong, words in ((q, "out shares memory"), (torch.empty(3), "out"), (q.half(), "out")):
        with pytest.raises(InputError, match=words):
            fa.attention(q, k, v, out=wrong)
    with pytest.raises(GradError):
        fa.attention(q.clone().requires_grad_(), k, v, out=out)
    with pytest.raises(GradError, match="out requires grad"):
        fa.attention(q, k, v, out=torch.empty_like(q).requires_grad_())


@pytest.mark.parametrize("kind", ["attention", "varlen_attention", "merge_states"])
def test_autograd_sees_that_given_results_are_written(kind: str) -> None:
    """Calls that are checked and those that C repeats raise their version counters."""
    q, k, _ = given = tensors()
    out, lse = torch.empty_like(q), torch.empty(SHAPE[:3])
    call = functools.partial(fa.attention, *given)
    if kind == "varlen_attention":
        ends = [torch.tensor([0, t.shape[2]]) for t in (q, k)]
        rows = [t[0].transpose(0, 1).contiguous() for t in given]
        out, lse = torch.empty_like(rows[0]), torch.empty(rows[0].shape[:2])
        call = functools.partial(fa.varlen_attention, *rows, *ends)
    elif kind == "merge_states":
        call = functools.partial(fa.merge_states, [q, q], [torch.zeros(SHAPE[:3])] * 2)
    for _ in range(5):
        before = out._version, lse._version
        call(out=out, lse=lse)
        assert out._version > before[0] and lse._version > before[1]
    product = torch.ones_like(out).requires_grad_() * out
    call(out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        call(out=torch.empty_like(out))
    results = call(return_lse=True) if kind != "merge_states" else call()
    assert [x._version for x in results] == [0, 0]


@pytest.mark.parametrize("q_offset", [True, 0.5, [0], None, "start", torch.tensor([0, 3])], ids=str)
def test_other_offsets(q_offset: Any) -> None:
    variant, given = fa.Causal(), tensors()
    for _ in range(3):
        fa.attention(*given, variant)
        if isinstance(q_offset, torch.Tensor):
            check(fa.attention(*given, variant, q_offset=q_offset), given, variant,
                  q_offset=q_offset)  # fmt: skip
            continue
        with pytest.raises(FlashAttnJitError):
            fa.attention(*given, variant, q_offset=q_offset)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows at each try to let C recognise a call."""
    return calls_of(monkeypatch, launches, "captured")


def test_new_variants_of_one_shape(checked_calls: list[object]) -> None:
    """As calls make them: fa.attention(q, k, v, fa.SlidingWindow(7)), or a function."""
    launches.forget_launches()
    given = tensors()
    for make in (
        fa.Causal, lambda: fa.SlidingWindow(7), lambda: fa.ALiBi() & fa.Causal(),
        lambda: (lambda b, h, i, j: j <= i + 2),
    ):  # fmt: skip
        fa.attention(*given, make()), fa.attention(*given, make())
        count = len(checked_calls)
        for _ in range(3):
            check(fa.attention(*given, make()), given, make())
        assert len(checked_calls) == count
    for window in (7, 3, 7, 12, 3, 40):
        for _ in range(3):
            variant = fa.SlidingWindow(window)
            check(fa.attention(*given, variant), given, variant)


def test_what_c_cannot_recognise_is_tried_twice(tries: list[object]) -> None:
    launches.forget_launches()
    given = tensors()
    variant = fa.SoftCap(5.0)
    for _ in range(9):
        check(fa.attention(*given, variant, scale=1), given, variant, scale=1.0)
    assert len(tries) == 2
    for i in range(60):  # other numbers in turn
        fa.attention(*given, fa.SoftCap(1.0 + i % 6))
    assert len(tries) <= 2 + 2 * 6
    computed = fa.variant(score_mod=lambda s, b, h, i, j: s + (2 * torch.ones(HEADS))[h])
    count = len(tries)
    for _ in range(9):
        fa.attention(*given, computed)
    assert len(tries) <= count + 2


def test_masks_of_sdpa_are_not_kept(tries: list[object]) -> None:
    q, k, v = tensors()
    for _ in range(4):
        mask = torch.randn(5, 40)
        out = fa.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    assert not tries


def test_sizes_of_tensors_that_the_kernel_does_not_read() -> None:
    limit: Any = torch.zeros(30)
    variant = fa.variant(mask_mod=lambda b, h, i, j: j < limit.shape[0])
    given = tensors()
    for size in (30, 9, 30):
        limit = torch.zeros(size)
        for _ in range(4):
            check(fa.attention(*given, variant), given, variant)

    class Sized(fa.Variant):
        t: torch.Tensor = fa.tensor("n")
        unread: torch.Tensor = fa.tensor("num_q_heads")

        def score_mod(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score * self.t.shape[0] * 0.25

    for size in (3, 8, 3):
        params = {"t": torch.zeros(size), "unread": torch.zeros(HEADS)}
        for _ in range(4):
            check(fa.attention(*given, Sized(), **params), given, Sized(**params))
        with pytest.raises(ParamError, match="unread"):
            fa.attention(*given, Sized(), **params | {"unread": torch.zeros(9)})


@pytest.mark.parametrize("scale", [1e39, -1e300, float("nan"), float("inf")])
def test_scales_that_float32_does_not_hold(scale: float) -> None:
    given = tensors()
    for _ in range(4):
        fa.attention(*given, scale=0.5)
        with pytest.raises(InputError, match="finite"):
            fa.attention(*given, scale=scale)


def test_a_variant_with_attributes_of_another() -> None:
    class Doubled(fa.Variant):
        inner: Any

        def score_mod(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return 2.0 * score

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or "inner" not in self.__dict__:
                raise AttributeError(name)
            return getattr(self.__dict__["inner"], name)

    inner = fa.Causal()
    doubled, given = Doubled(inner=inner), tensors()
    expected = fa.attention(*given, Doubled(inner=fa.Causal()), target=host_target())
    for _ in range(5):
        check(fa.attention(*given, inner), given, inner)
        assert torch.equal(fa.attention(*given, doubled), expected)


class Scored(fa.Variant):
    """A variant whose instances may have hooks of their own."""

    cap: float = fa.scalar(1.0)

    def score_mod(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * self.cap


class Helper:
    def scaled(self, score: Any) -> Any:
        return score * 0.5


@pytest.mark.parametrize("first", ["class", "instance"])
def test_hooks_and_methods_of_an_instance(first: str) -> None:
    """They are found whatever was called before them."""
    binding.clear()
    plain, scored, masked, given = Scored(), Scored(), Scored(), tensors()
    scored.score_mod = lambda score, b, h, q_idx, kv_idx: score * 9  # type: ignore[method-assign]
    masked.mask_mod = lambda b, h, q_idx, kv_idx: kv_idx < 5
    variants = [plain, scored, masked] if first == "class" else [scored, masked, plain]
    for _ in range(4):
        for variant in variants:
            check(fa.attention(*given, variant), given, variant)
    helper = Helper()
    variant = fa.variant(score_mod=lambda s, b, h, i, j: helper.scaled(s))
    for method in (None, lambda score: score * 5.0, None):
        helper.__dict__.pop("scaled", None)
        if method is not None:
            helper.scaled = method  # type: ignore[method-assign]
        for _ in range(4):
            check(fa.attention(*given, variant), given, variant)


def test_threads_with_params_of_their_own() -> None:
    variant, given = fa.ALiBi(), tensors()
    slopes = [torch.rand(HEADS) for _ in range(4)]
    expected = [fa.attention(*given, variant, slopes=s) for s in slopes]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(3000):
            if not torch.equal(fa.attention(*given, variant, slopes=slopes[i]), expected[i]):
                wrong.append(i)

    before, interval = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(before)
        sys.setswitchinterval(interval)
    assert not wrong


def test_tensors_of_calls_are_not_kept() -> None:
    """Neither captured ones, nor params, nor those of a variant: they go at once."""
    given = tensors()

    def call(kind: str) -> Any:
        bias = torch.rand(HEADS)
        if kind == "captured":
            fa.attention(*given, lambda s, b, h, i, j: s + bias[h])
        elif kind == "given":
            fa.attention(*given, fa.ALiBi(), slopes=bias)
        else:
            fa.attention(*given, fa.ALiBi(slopes=bias) & fa.Causal())
        return weakref.ref(bias)

    gc.collect()
    gc.disable()
    try:
        for kind in ("captured", "given"):
            assert all(call(kind)() is None for _ in range(6)), kind
        own = [call("own") for _ in range(6)]
        gc.collect()  # a variant with params refers to itself
        assert all(tensor() is None for tensor in own)
    finally:
        gc.enable()


def test_copies_and_pickles_of_a_variant_that_was_called() -> None:
    variant, given = fa.SlidingWindow(7), tensors()
    for _ in range(3):
        fa.attention(*given, variant)
    for other in (copy.copy(variant), copy.deepcopy(variant), pickle.loads(pickle.dumps(variant))):
        other.window = 3
        for _ in range(3):
            check(fa.attention(*given, other), given, fa.SlidingWindow(3))
    check(fa.attention(*given, variant), given, variant)
