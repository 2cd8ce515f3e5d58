"""Rows of calls that are bound by arithmetic: prefill, score hooks, masks; each with its peers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

import flashattn_jit as fa
from benchmarks.parts import gpu_mods as mods
from benchmarks.parts import gpu_peers as peers
from benchmarks.parts.gpu_measure import Clock, interleave_on_device
from benchmarks.parts.measure import Row, ratio
from benchmarks.parts.progress import say
from benchmarks.parts.work import (
    attention_flops,
    document_lengths,
    pairs_causal,
    pairs_documents,
    pairs_window,
)

_HIDDEN = 2048  # heads x head_dim, as in FlashAttention's own benchmark
_TOKENS = 16384
WINDOW = 1024
DOCUMENTS = 12


def inputs(batch: int, heads: int, length: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [batch, heads, length, head_dim], standard normal, bf16."""
    q, k, v = (
        torch.randn(batch, heads, length, head_dim, dtype=torch.bfloat16, device="cuda")
        for _ in range(3)
    )
    return q, k, v


def prefill_shapes() -> list[tuple[int, int, int, int]]:
    """(batch, heads, length, head_dim) of the prefill rows: 16k tokens, hidden size 2048."""
    return [(_TOKENS // s, _HIDDEN // d, s, d) for d in (64, 128) for s in (4096, 16384)]


def prefill_rows(rounds: int, clock: Clock) -> Iterator[Row]:
    """Full and causal, over torch's flash backend (FA2); cuDNN and FlashInfer without a goal."""
    for batch, heads, length, head_dim in prefill_shapes():
        q, k, v = inputs(batch, heads, length, head_dim)
        for causal in (False, True):
            name = f"prefill D{head_dim} S{length} {'causal' if causal else 'full'}"
            if not clock.allows(name, 10):
                continue
            variant = fa.Causal() if causal else None
            pairs = pairs_causal(length) if causal else length * length
            others = peers.sdpa_peers(q, k, v, causal)
            if head_dim == 128 and length == 16384:
                others |= peers.flashinfer_prefill(q, k, v, causal)
            times = interleave_on_device(
                {"ours": lambda q=q, k=k, v=v, x=variant: fa.attention(q, k, v, x), **others},
                rounds,
            )
            flops = attention_flops(pairs, batch, heads, head_dim)
            yield _against(f"{name}: over flash", "flash", 0.95, times, flops)


def hook_rows(rounds: int, clock: Clock) -> Iterator[Row]:
    """ALiBi and a soft cap over compiled FlexAttention, full attention."""
    for head_dim, goal in ((128, 0.75), (64, 0.85)):
        heads = _HIDDEN // head_dim
        q, k, v = inputs(2, heads, 8192, head_dim)
        made = {
            "ALiBi": mods.alibi(torch.rand(heads, device="cuda")),
            "softcap": mods.softcap(30.0),
        }
        for name, mod in made.items():
            claim = f"{name} D{head_dim} S8192: over FlexAttention"
            if not clock.allows(claim, 40):
                continue
            others = peers.flex(q, k, v, mod)
            times = interleave_on_device(
                {"ours": lambda q=q, k=k, v=v, m=mod: fa.attention(q, k, v, m), **others}, rounds
            )
            flops = attention_flops(8192 * 8192, 2, heads, head_dim)
            yield _against(claim, "flex", goal, times, flops)


def mask_rows(rounds: int, clock: Clock) -> Iterator[Row]:
    """A sliding window and a document mask over FlexAttention, without and with mask creation."""
    length, heads, head_dim = 16384, 16, 128
    q, k, v = inputs(1, heads, length, head_dim)
    lengths = document_lengths(length, DOCUMENTS)
    documents = torch.repeat_interleave(
        torch.arange(DOCUMENTS, device="cuda"), torch.tensor(lengths, device="cuda")
    )

    cases = (
        ("sliding window", mods.window(WINDOW), pairs_window(length, WINDOW)),
        ("document mask", mods.document(documents), pairs_documents(lengths)),
    )
    for name, mod, pairs in cases:
        if not clock.allows(name, 60):
            continue
        others = peers.flex_masked(q, k, v, mod)
        times = interleave_on_device(
            {"ours": lambda m=mod: fa.attention(q, k, v, m), **others}, rounds
        )
        flops = attention_flops(pairs, 1, heads, head_dim)
        yield _against(f"{name} S{length}: over FlexAttention's kernel", "flex", 1.0, times, flops)
        claim = f"{name} S{length}: over FlexAttention with its mask's creation"
        yield _against(claim, "flex + mask", 3.0, times, flops)


def _against(
    claim: str, peer: str, goal: float, times: Mapping[str, list[float]], flops: float
) -> Row:
    """Our speed relative to a peer's; our rate without a goal if the peer did not run."""
    shown = ", ".join(f"{n} {statistics.median(t) * 1e3:.3f} ms" for n, t in times.items())
    rate = flops / statistics.median(times["ours"]) / 1e12
    detail = f"{rate:.0f} TFLOP/s; {shown}"
    if peer not in times:
        row = Row(f"{claim} (no peer)", None, rate, "TFLOP/s", detail=shown)
    else:
        value, spread = ratio(times[peer], times["ours"])
        row = Row(claim, goal, value, "x", "higher", spread, detail)
    say(f"  {row.claim}: {row.measured:.3g} {row.unit} ({detail})")
    return row
