"""Properties of kernels for any variant: block masks, layouts, scales, states, NaN, equal bits."""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.ops.attention import run_dense
from flashattn_jit.variants.interval.terms import FULL, PARTIAL
from flashattn_jit.variants.reference import attention_reference
from tests.harness import rotation
from tests.ops.cases import assert_close, inputs
from tests.registry.case import Shape

TARGET = "emulated:sm_80"


def check(q, k, v, variant, exact_of=None, target: str = TARGET, **call) -> torch.Tensor:
    """The kernel's output, compared with the reference on `exact_of` (default: the same inputs)."""
    out, lse = fa.attention(q, k, v, variant, return_lse=True, target=target, **call)
    clean = exact_of or (q, k, v)
    exact, exact_lse = attention_reference(*clean, variant, **call)
    eager, _ = attention_reference(*clean, variant, dtype=q.dtype, **call)
    assert_close(out, exact, eager)
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=2e-5, atol=2e-5)
    return out


@pytest.mark.parametrize("block", [(128, 128), (64, 48), (16, 33), (40, 200)], ids=str)
@pytest.mark.parametrize("q_len", [150, 3])
def test_block_masks_of_any_block_size(block: tuple[int, int], q_len: int) -> None:
    """Empty blocks are not visited, full ones run no mask_mod, partial ones run it."""
    kv_len, heads = 170, 2
    q, k, v = inputs(Shape(2, heads, 1, q_len, kv_len, 64, 64), torch.bfloat16)
    generator = torch.Generator().manual_seed(sum(block))
    blocks = (-(-q_len // block[0]), -(-kv_len // block[1]))
    states = torch.randint(0, 3, (2, heads, *blocks), generator=generator, dtype=torch.uint8)
    mask = fa.Causal()
    out, lse = run_dense(
        q, k, v, mask, {}, block_states=states, block_size=block, return_lse=True, target=TARGET,
        q_offset=20,
    )  # fmt: skip
    state = states.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)
    state = state[:, :, :q_len, :kv_len]

    def kept(b, h, q_idx, kv_idx):
        at = state[b, h, q_idx - 20, kv_idx]
        return (at == FULL) | ((at == PARTIAL) & (q_idx >= kv_idx))

    exact, exact_lse = attention_reference(q, k, v, fa.variant(mask_mod=kept), q_offset=20)
    eager, _ = attention_reference(
        q, k, v, fa.variant(mask_mod=kept), q_offset=20, dtype=torch.bfloat16
    )
    assert_close(out, exact, eager)
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("target", ["emulated:sm_75", "emulated:sm_80"])
@pytest.mark.parametrize(
    "head_dims", rotation.chosen([(17, 17), (64, 40), (33, 130), (8, 24)], 2), ids=str
)
def test_rows_that_start_anywhere(head_dims: tuple[int, int], target: str) -> None:
    dtype = torch.float16
    storage = [
        torch.randn(1, 3, 90, d + 3, generator=torch.Generator().manual_seed(d)).to(dtype)
        for d in (head_dims[0], head_dims[0], head_dims[1])
    ]
    q, k, v = (x[..., 1 : x.shape[-1] - 2] for x in storage)
    check(q, k, v, fa.Causal(), target=target)


def test_batch_last_and_interleaved_layouts() -> None:
    packed = torch.randn(60, 2, 3, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, k, v = (packed[:, :, i].permute(1, 2, 0, 3) for i in range(3))  # [S, B, 3, H, D]
    check(q, k, v, fa.ALiBi())


@pytest.mark.parametrize("scale", [-0.2, 0.0, 3.0])
@pytest.mark.parametrize("variant", [fa.Causal(), fa.SoftCap(cap=5.0)], ids=["causal", "softcap"])
def test_any_scale(scale: float, variant: fa.Variant) -> None:
    q, k, v = inputs(Shape(1, 2, 1, 40, 70, 64, 64), torch.bfloat16)
    check(q, k, v, variant, scale=scale)


@pytest.mark.parametrize("q_len", [1, 20])
def test_split_keys_merge_to_the_same_state(q_len: int) -> None:
    """Long keys of few rows are split over blocks; unfinalised parts merge with merge_states."""
    q, k, v = inputs(Shape(1, 2, 1, q_len, 2000, 64, 64), torch.bfloat16)
    exact, exact_lse = attention_reference(q, k, v, fa.Full())
    eager, _ = attention_reference(q, k, v, fa.Full(), dtype=torch.bfloat16)
    whole, lse = fa.attention(q, k, v, return_lse=True, target=TARGET)
    assert_close(whole, exact, eager)
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=2e-5, atol=2e-5)
    parts = [
        fa.attention(q, k[:, :, a:b], v[:, :, a:b], partial=True, target=TARGET)
        for a, b in ((0, 700), (700, 2000))
    ]
    assert all(out.dtype == torch.float32 for out, _ in parts)
    merged, merged_lse = fa.merge_states([p[0] for p in parts], [p[1] for p in parts])
    assert_close(merged.bfloat16(), exact, eager)
    torch.testing.assert_close(merged_lse.double(), exact_lse.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("q_len", [1, 70])
def test_nan_never_leaves_padding_or_masked_keys(q_len: int) -> None:
    q, k, v = inputs(Shape(2, 2, 1, q_len, 90, 64, 64), torch.bfloat16)
    kv_len = torch.tensor([90, 37])
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[1, :, 37:], dirty_v[1, :, 37:] = float("nan"), float("nan")
    window = fa.SlidingWindow(8)
    check(q, dirty_k, dirty_v, window, (q, k, v), kv_len=kv_len, q_offset="end")
    # A key that the mask hides from every row: position 0 is left of all windows.
    hidden = k.clone()
    hidden[:, :, 0] = float("nan")
    rows = q[:, :, -1:]
    check(rows, hidden, v, window, (rows, k, v), q_offset=50)


def test_rows_without_keys_are_zero() -> None:
    q, k, v = inputs(Shape(1, 2, 2, 70, 20, 64, 64), torch.bfloat16)
    out, lse = fa.attention(
        q, k, v, fa.Causal(), q_offset="end", return_lse=True, target=TARGET
    )  # the first 50 rows see nothing
    assert not out[:, :, :50].any() and torch.isneginf(lse[:, :, :50]).all()
    assert torch.isfinite(out).all() and torch.isfinite(lse[:, :, 50:]).all()


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("copies", ["late", "early"])
@pytest.mark.parametrize("q_len", [1, 140])
def test_same_inputs_same_bits_whenever_copies_land(
    q_len: int, copies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_EMULATOR_COPIES", copies)
    q, k, v = inputs(Shape(1, 4, 2, q_len, 300, 128, 128), torch.bfloat16)
    first = check(q, k, v, fa.Causal(), q_offset="end")
    again = fa.attention(q, k, v, fa.Causal(), q_offset="end", target=TARGET)
    assert torch.equal(first, again)
