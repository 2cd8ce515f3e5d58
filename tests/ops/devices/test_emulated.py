"""Calls on emulated targets: the results of CUDA kernels, without a GPU."""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import EmulatorFault, EnvironmentVariableError, InputError, TargetError
from flashattn_jit.ops.attention import run_dense
from flashattn_jit.ops.device import emulated
from flashattn_jit.ops.launching import launches
from flashattn_jit.variants.reference import attention_reference, varlen_reference
from tests.harness.toolkit import needs_nvcc
from tests.ops.cases import assert_close

pytestmark = needs_nvcc

SM80 = "emulated:sm_80"
BF16 = torch.bfloat16


def inputs(*shape: int, kv_len: int = 130, dtype: torch.dtype = BF16, dim_v: int | None = None):
    """q [B, H, S, D], k and v [B, H / 2, kv_len, D]."""
    generator = torch.Generator().manual_seed(0)
    b, h, s, d = shape
    sizes = ((b, h, s, d), (b, h // 2, kv_len, d), (b, h // 2, kv_len, dim_v or d))
    return tuple(torch.randn(*size, generator=generator).to(dtype) for size in sizes)


def check(q, k, v, variant=None, *, target=SM80, params=None, **options):
    """One call against the fp64 reference; returns (out, lse)."""
    params = params or {}
    call = {**options, **params}
    out, lse = fa.attention(q, k, v, variant, target=target, return_lse=True, **call)
    exact, exact_lse = attention_reference(q, k, v, variant, params=params, **options)
    eager, _ = attention_reference(q, k, v, variant, params=params, dtype=q.dtype, **options)
    assert out.dtype == q.dtype
    assert_close(out, exact, eager)
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=2e-5, atol=2e-5)
    return out, lse


@pytest.mark.parametrize("copies", ["late", "early", "random:3"])
def test_prefill_with_both_orders_of_copies(monkeypatch: pytest.MonkeyPatch, copies: str) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_EMULATOR_COPIES", copies)
    check(*inputs(2, 4, 70, 64), fa.Causal(), q_offset="end")


def test_copies_are_late_or_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_EMULATOR_COPIES", "soon")
    with pytest.raises(EnvironmentVariableError, match="late, early"):
        check(*inputs(2, 4, 70, 64), fa.Causal(), q_offset="end")


def test_sm_75_takes_fp16() -> None:
    check(*inputs(1, 4, 70, 64, dtype=torch.float16), fa.Causal(), target="emulated:sm_75")
    with pytest.raises(InputError, match=r"sm_75 take q, k and v of one dtype, torch\.float16"):
        fa.attention(*inputs(1, 4, 70, 64), target="emulated:sm_75")


def test_split_keys_are_merged_the_same_way_every_time() -> None:
    q, k, v = inputs(1, 4, 1, 64, kv_len=2000)
    out, lse = check(q, k, v, fa.Causal(), q_offset="end")
    plan, _ = list(launches._launches.values())[-1]
    assert plan.native.most_splits > 1
    again = fa.attention(q, k, v, fa.Causal(), q_offset="end", target=SM80, return_lse=True)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


def test_lengths_differ_and_may_be_zero() -> None:
    q, k, v = inputs(3, 4, 1, 64, kv_len=2000)
    lengths = torch.tensor([2000, 0, 77])
    for b, n in enumerate(lengths.tolist()):
        k[b, :, n:], v[b, :, n:] = torch.nan, torch.nan
    out, lse = fa.attention(
        q, k, v, fa.Causal(), q_offset="end", kv_len=lengths, target=SM80, return_lse=True
    )
    assert torch.isfinite(out).all() and (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    clean = [t.nan_to_num(0) for t in (k, v)]
    check(q, *clean, fa.Causal(), q_offset="end", kv_len=lengths)


def test_views_with_any_strides_and_results_in_them() -> None:
    q, k, v = inputs(2, 4, 70, 64)
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    out = torch.full((2, 70, 8, 64), 7.0, dtype=BF16)
    view = out[:, :, 2:6].transpose(1, 2)
    expected, _ = check(q, k, v, fa.Causal(), q_offset="end")
    assert expected.stride() == q.stride()
    got = fa.attention(q, k, v, fa.Causal(), q_offset="end", out=view, target=SM80)
    assert got is view and torch.equal(view, expected)
    assert (out[:, :, :2] == 7).all() and (out[:, :, 6:] == 7).all()


def test_rows_between_16_bytes_and_odd_dims_take_the_unaligned_kernel() -> None:
    q, k, v = inputs(1, 4, 9, 72, kv_len=50, dim_v=44)
    check(q, k, v, scale=0.1)
    plan, _ = list(launches._launches.values())[-1]
    assert all("unaligned" in k.spec.features for k in plan.kernels if k is not None)
    wide = torch.cat([q, q], -1)
    check(wide[..., 5:77], k, v, scale=0.1)


def test_requests_packed_end_to_end() -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(40, 4, 64, generator=generator).to(BF16)
    k, v = (torch.randn(230, 2, 64, generator=generator).to(BF16) for _ in range(2))
    rows, keys = torch.tensor([0, 3, 3, 40]), torch.tensor([0, 100, 150, 230])
    out, lse = fa.varlen_attention(q, k, v, rows, keys, fa.Causal(), return_lse=True, target=SM80)
    exact, exact_lse = varlen_reference(q, k, v, rows, keys, fa.Causal())
    eager, _ = varlen_reference(q, k, v, rows, keys, fa.Causal(), dtype=BF16)
    assert_close(out, exact, eager)
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_partial_states_merge_as_on_the_cpu(count: int) -> None:
    generator = torch.Generator().manual_seed(2)
    outs = [torch.randn(2, 3, 5, 40, generator=generator) for _ in range(count)]
    lses = [torch.randn(2, 3, 5, generator=generator) for _ in range(count)]
    lses[0][0, 1], outs[0][0, 1] = -torch.inf, torch.nan
    for lse in lses:
        lse[1, 2, 3] = -torch.inf
    expected = fa.merge_states(outs, lses)
    got = fa.merge_states(outs, lses, target=SM80)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert (got[0][1, 2, 3] == 0).all() and got[1][1, 2, 3] == -torch.inf
    sums, none = fa.merge_states([o[0] for o in outs[1:]] or [outs[0][1]], target=SM80)
    torch.testing.assert_close(sums, sum(o[0] for o in outs[1:]) if count > 1 else outs[0][1])
    assert none is None


def test_a_partial_call_and_its_merge_are_the_whole_call() -> None:
    q, k, v = inputs(1, 4, 70, 64)
    halves = [
        fa.attention(q, k[:, :, s], v[:, :, s], partial=True, target=SM80)
        for s in (slice(0, 64), slice(64, 130))
    ]
    out, lse = fa.merge_states(*zip(*halves, strict=True), target=SM80)
    whole, whole_lse = check(q, k, v)
    torch.testing.assert_close(out.to(BF16), whole, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, whole_lse)


def test_dtypes_and_targets_that_do_not_run_are_errors() -> None:
    q, k, v = inputs(1, 4, 70, 64)
    with pytest.raises(InputError, match=r"or torch\.float16, or codes .*; got q torch\.float32"):
        fa.attention(q.float(), k, v, target=SM80)
    with pytest.raises(TargetError, match="on CPU tensors use 'emulated:sm_80'"):
        fa.attention(q, k, v, target="sm_80")
    with pytest.raises(TargetError, match="unknown target 'emulated:sm_81'"):
        fa.attention(q, k, v, target="emulated:sm_81")


def test_a_fault_names_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator gets half the size of v, so that the kernel's loads go past its end."""
    q, k, v = inputs(2, 4, 70, 64)
    check(q, k, v, fa.Causal(), q_offset="end")
    whole = emulated.extent

    def half(name, tensor, writable, initialised):
        name, address, size, *rest = whole(name, tensor, writable, initialised)
        return (name, address, size // 2 if name == "v" else size, *rest)

    monkeypatch.setattr(emulated, "extent", half)
    with pytest.raises(EmulatorFault) as fault:
        fa.attention(q, k, v, fa.Causal(), q_offset="end", target=SM80)
    assert fault.value.kernel == "fajit_attention_kernel" and fault.value.source
    assert fault.value.address is not None and fault.value.address >= v.data_ptr()


@pytest.mark.parametrize("shared", [True, False])
def test_block_masks_decide_what_is_visited(shared: bool) -> None:
    q, k, v = inputs(2, 4, 70, 64)
    generator = torch.Generator().manual_seed(3)
    heads = 1 if shared else 4
    states = torch.randint(0, 3, (2, heads, 3, 5), generator=generator, dtype=torch.uint8)
    states[:, :, 1] = 0  # rows without keys
    states = states.expand(2, 4, 3, 5)
    blocks = {"block_states": states, "block_size": (32, 32), "return_lse": True}
    expected = run_dense(q, k, v, fa.SlidingWindow(50), {}, **blocks)
    out, lse = run_dense(q, k, v, fa.SlidingWindow(50), {}, target=SM80, **blocks)
    torch.testing.assert_close(out, expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected[1], rtol=1e-4, atol=1e-4)


def test_compiled_graphs_hold_emulated_calls() -> None:
    q, k, v = inputs(2, 4, 70, 64)
    causal = fa.Causal()
    expected = fa.attention(q, k, v, causal, q_offset="end", target=SM80)

    @torch.compile(backend="eager", fullgraph=True)
    def call(q, k, v):
        return fa.attention(q, k, v, causal, q_offset="end", target=SM80) + 0

    assert torch.equal(call(q, k, v), expected)


def test_more_params_than_a_kernel_holds_are_an_input_error() -> None:
    many = [torch.randn(4) for _ in range(20)]
    numbers = [0.5 + i for i in range(60)]

    def score_mod(score, b, h, q_idx, kv_idx):
        for t in many:
            score = score + t[h]
        for x in numbers:
            score = score * x + q_idx
        return score

    q = torch.randn(1, 4, 8, 64).bfloat16()
    with pytest.raises(fa.InputError, match=r"20 tensors.*60 numbers"):
        fa.attention(q, q, q, score_mod, target="emulated:sm_80")
