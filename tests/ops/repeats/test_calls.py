"""Dense calls after the second of a kind: C repeats those that are the same, others are checked."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.spec import host_target, host_targets
from flashattn_jit.errors import FlashAttnJitError, GradError, InputError
from flashattn_jit.ops.launching import launches, repeats
from flashattn_jit.ops.launching.repeats import kept_calls
from flashattn_jit.variants.reference import attention_reference as reference

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
    found: list[object] = []
    bind = launches.bind

    def counted(*arguments: Any) -> Any:
        found.append(arguments)
        return bind(*arguments)

    monkeypatch.setattr(launches, "bind", counted)
    return found


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
    assert len(kept_calls(variant)) <= repeats.KEPT
    assert all(len(calls) <= repeats.KEPT for calls in kept_calls(variant).values())


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


def test_stored_keys_and_values() -> None:
    variant, own = fa.Causal(), fa.kv.Format("int8")
    for _ in range(3):
        q, k, v = tensors()
        check(fa.attention(q, k, v, variant), (q, k, v), variant)
        stored = own.quantize(k), own.quantize(v)
        rows = [x.dequantize().to(torch.float32) for x in stored]
        check(fa.attention(q, *stored, variant), (q, *rows), variant)


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


def test_copies_and_pickles_of_a_variant_that_was_called() -> None:
    variant, given = fa.SlidingWindow(7), tensors()
    for _ in range(3):
        fa.attention(*given, variant)
    assert kept_calls(variant)
    for other in (copy.copy(variant), copy.deepcopy(variant), pickle.loads(pickle.dumps(variant))):
        assert not kept_calls(other)
        other.window = 3
        for _ in range(3):
            check(fa.attention(*given, other), given, fa.SlidingWindow(3))
    check(fa.attention(*given, variant), given, variant)


def test_a_variant_that_was_called_is_collected() -> None:
    variant, given = fa.ALiBi(), tensors()
    for _ in range(3):
        fa.attention(*given, variant)
    assert kept_calls(variant)
    gone = weakref.ref(variant)
    del variant
    gc.collect()
    assert gone() is None
