"""Calls on the device: packed requests, streams, graphs, new params, no waiting, other devices."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.errors import InputError, LaunchError
from flashattn_jit.jit.module import default
from flashattn_jit.variants.reference import attention_reference, varlen_reference
from tests.gpu.harness import Want
from tests.gpu.place import DEVICE, EMULATED, TARGET, needs_gpu, synchronize
from tests.ops.cases import assert_close
from tests.registry.case import Shape

BF16 = torch.bfloat16
PREFILL = Shape(1, 4, 1, 300, 500, 64, 64) if EMULATED else Shape(2, 8, 2, 300, 500, 64, 64)
DECODE = Shape(4, 4, 1, 1, 3000, 64, 64)  # long enough for its keys to be split
attention = partial(fa.attention, target=TARGET)
WANTS = tuple(
    Want(name, shape, BF16)
    for name in ("plain full", "plain causal", "plain window", "plain alibi")
    for shape in (PREFILL, DECODE)
)


@pytest.fixture(autouse=True)
def _settled():
    yield
    synchronize()  # raises the errors of this test before the next one


def tensors(shape: Shape, seed: int = 0, device: str = DEVICE) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    b, hq, hkv, sq, skv, d, dv = shape
    made = ((b, hq, sq, d), (b, hkv, skv, d), (b, hkv, skv, dv))
    return tuple(torch.randn(*s, generator=generator).to(BF16).to(device) for s in made)


def check(out, q, k, v, variant=None, **options) -> None:
    """Against fp64 and the eager reference in bf16, on the CPU."""
    cpu = [t.cpu() for t in (q, k, v)]
    params = {n: p.cpu() if isinstance(p, torch.Tensor) else p
              for n, p in options.pop("params", {}).items()}  # fmt: skip
    exact, _ = attention_reference(*cpu, variant, params=params, **options)
    eager, _ = attention_reference(*cpu, variant, params=params, dtype=BF16, **options)
    assert_close(out.cpu(), exact, eager)


@pytest.mark.parametrize("shape", [PREFILL, DECODE], ids=lambda s: s.id)
def test_a_call_leaves_no_entry_unwritten(shape):
    q, k, v = tensors(shape)
    out = torch.full((*q.shape[:3], shape.head_dim_v), torch.nan, dtype=BF16, device=DEVICE)
    attention(q, k, v, fa.Causal(), q_offset="end", out=out)
    check(out, q, k, v, fa.Causal(), q_offset="end")


def test_requests_of_different_lengths_packed_end_to_end():
    q_len, kv_len = [1, 300, 0, 17, 1], [2500, 300, 40, 900, 1]
    q_indptr = torch.tensor([0, *q_len]).cumsum(0)
    kv_indptr = torch.tensor([0, *kv_len]).cumsum(0)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(sum(q_len), 8, 64, generator=generator).to(BF16)
    k, v = (torch.randn(sum(kv_len), 2, 64, generator=generator).to(BF16) for _ in range(2))
    out, lse = fa.varlen_attention(
        q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), q_indptr, kv_indptr, fa.Causal(), return_lse=True,
        target=TARGET,
    )  # fmt: skip
    exact, exact_lse = varlen_reference(q, k, v, q_indptr, kv_indptr, fa.Causal())
    eager, _ = varlen_reference(q, k, v, q_indptr, kv_indptr, fa.Causal(), dtype=BF16)
    assert_close(out.cpu(), exact, eager)
    torch.testing.assert_close(lse.cpu().double(), exact_lse.double(), rtol=1e-4, atol=1e-4)


def test_keys_past_a_request_are_never_read():
    q, k, v = tensors(DECODE)
    lengths = torch.tensor([3000, 1, 1234, 0])
    for b, n in enumerate(lengths.tolist()):
        k[b, :, n:], v[b, :, n:] = torch.nan, torch.nan
    out = attention(q, k, v, kv_len=lengths)
    assert torch.isfinite(out).all() and (out[3] == 0).all()
    check(out, q, k.nan_to_num(), v.nan_to_num(), kv_len=lengths)


def test_strided_and_unaligned_tensors():
    q, k, v = tensors(PREFILL)
    packed = torch.cat(
        [k.transpose(1, 2), v.transpose(1, 2)], dim=-1
    )  # K and V of a token together
    k2, v2 = packed[..., :64].transpose(1, 2), packed[..., 64:].transpose(1, 2)
    storage = torch.empty(q.numel() + 1, dtype=BF16, device=DEVICE)
    shifted = storage[1:].view_as(q).copy_(q)  # two bytes off
    # All calls before any assertion, which fails where kernels are only compiled.
    reference, strided, unaligned = (
        attention(*given, fa.Causal()) for given in ((q, k, v), (q, k2, v2), (shifted, k, v))
    )
    assert torch.equal(strided, reference)
    check(unaligned, q, k, v, fa.Causal())  # of another tile


def test_partial_states_merge():
    q, k, v = tensors(PREFILL)
    halves = [
        attention(q, k[:, :, a:b], v[:, :, a:b], partial=True) for a, b in ((0, 190), (190, 500))
    ]
    out, lse = fa.merge_states([o for o, _ in halves], [x for _, x in halves], target=TARGET)
    check(out.to(BF16), q, k, v)
    whole = attention(q, k, v, return_lse=True)[1]
    torch.testing.assert_close(lse, whole, rtol=1e-4, atol=1e-4)


def test_equal_inputs_give_equal_bits():
    for shape in (PREFILL, DECODE):
        q, k, v = tensors(shape)
        first = attention(q, k, v, fa.ALiBi(), q_offset="end")
        for _ in range(5):
            assert torch.equal(attention(q, k, v, fa.ALiBi(), q_offset="end"), first)


def test_a_second_call_with_new_params_needs_no_new_kernel():
    q, k, v = tensors(PREFILL)
    attention(q, k, v, fa.SlidingWindow(40))
    attention(q, k, v, fa.ALiBi())
    compiled = fa.cache_info().compiles
    for window in (3, 64, 1000):
        check(attention(q, k, v, fa.SlidingWindow(window)), q, k, v, fa.SlidingWindow(window))
    for seed in (1, 2):
        slopes = torch.rand(PREFILL.num_q_heads, generator=torch.Generator().manual_seed(seed))
        out = attention(q, k, v, fa.ALiBi(), slopes=slopes.to(DEVICE))
        check(out, q, k, v, fa.ALiBi(), params={"slopes": slopes})
    assert fa.cache_info().compiles == compiled


@needs_gpu
@pytest.mark.parametrize("shape", [PREFILL, DECODE], ids=lambda s: s.id)
def test_work_goes_to_the_current_stream_alone(shape):
    q, k, v = tensors(shape)
    expected = attention(q, k, v)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    attention(q, k, v)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of the default stream
    with torch.cuda.stream(side):
        out = attention(q, k, v)
    side.synchronize()
    assert not torch.cuda.default_stream().query(), "the default stream was waited for"
    assert torch.equal(out, expected)


@needs_gpu
def test_a_steady_call_waits_for_nothing():
    q, k, v = tensors(DECODE)
    for _ in range(2):
        attention(q, k, v, fa.ALiBi(), q_offset="end")
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(q, k, v, fa.ALiBi(), q_offset="end")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("shape", [PREFILL, DECODE], ids=lambda s: s.id)
def test_a_captured_call_replays_on_new_contents(shape):
    q, k, v = tensors(shape)
    slopes = torch.rand(shape.num_q_heads, device=DEVICE)

    def call() -> torch.Tensor:
        return attention(q, k, v, fa.ALiBi(), q_offset="end", slopes=slopes)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for seed in (1, 2, 3):
        for old, new in zip((q, k, v), tensors(shape, seed), strict=True):
            old.copy_(new)
        slopes.copy_(torch.rand(shape.num_q_heads, generator=torch.Generator().manual_seed(seed)))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        check(out, q, k, v, fa.ALiBi(), q_offset="end", params={"slopes": slopes})


@needs_gpu
def test_graphs_of_several_calls_keep_their_plans():
    """The memory of a plan in a graph is neither reused nor freed when more calls are planned."""
    q, k, v = tensors(DECODE)
    expected = attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v)
    for n in range(1, 400):  # other plans, other blocks of device memory
        attention(q, k[:, :, :n], v[:, :, :n])
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@needs_gpu
def test_what_is_not_planned_is_not_captured():
    q, k, v = tensors(PREFILL._replace(kv_len=77))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(LaunchError, match="before the capture"), torch.cuda.graph(graph):
        torch.zeros(1, device=DEVICE)  # an empty capture would warn
        attention(q, k, v)


@needs_gpu
def test_tensors_of_different_devices_are_refused():
    q, k, v = tensors(PREFILL)
    with pytest.raises(InputError, match="cpu"):
        attention(q, k.cpu(), v)
    with pytest.raises(InputError, match=r"bfloat16|float16"):
        attention(q.float(), k.float(), v.float())


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)
def test_a_second_device_and_the_current_one_stays():
    for device in ("cuda:1", "cuda:0"):
        q, k, v = tensors(PREFILL, device=device)
        out = attention(q, k, v, fa.Causal())
        assert out.device == q.device and torch.cuda.current_device() == 0
        check(out, q, k, v, fa.Causal())


@needs_gpu
def test_multiprocessors_hold_the_blocks_that_were_planned():
    q, k, v = tensors(PREFILL)
    attention(q, k, v, fa.Causal(), q_offset="end")
    held = [h for loaded in default.loaded() for h in loaded.module.residency(q.device.index)]
    assert held
    assert all(blocks >= planned for _, planned, blocks in held), held
