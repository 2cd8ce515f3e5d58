"""The peers on the CPU: torch's SDPA and FlexAttention under torch.compile.

FlexAttention runs as it is fastest here: with static shapes and a block mask made ahead, and for
full attention both with a block mask and without one, where it treats the sequence as one tile. A
peer that does not run here is left out, and the report states why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.parts.measure import Run
from benchmarks.parts.progress import say

missing: dict[str, str] = {}
"""Peers that did not run, with the reason."""


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """FlexAttention's causal mask."""
    return q_idx >= kv_idx


def prefill_peers(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> dict[str, Run]:
    """Peers for equal q_len and kv_len."""
    compiled = compiled_flex()
    q_len, kv_len, grouped = q.shape[2], k.shape[2], q.shape[1] != k.shape[1]
    mask = create_block_mask(causal if is_causal else noop_mask, None, None, q_len, kv_len, "cpu")
    peers: dict[str, Run] = {
        "sdpa": lambda: scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, enable_gqa=grouped
        ),
        "flex": lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped),
    }
    if not is_causal:
        peers["flex, no block mask"] = lambda: compiled(q, k, v, enable_gqa=grouped)
    return that_work(peers)


def decode_peers(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Run]:
    """Peers for one query row a head and grouped heads; SDPA also with heads packed by hand."""
    compiled = compiled_flex()
    batch, num_q_heads, _, head_dim = q.shape
    packed = q.view(batch, k.shape[1], num_q_heads // k.shape[1], head_dim)
    return that_work({
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "sdpa, packed by hand": lambda: scaled_dot_product_attention(packed, k, v),
        "flex": lambda: compiled(q, k, v, enable_gqa=True),
    })  # fmt: skip


def compiled_flex() -> Any:
    """FlexAttention, compiled for static shapes at its first call."""
    # torch keeps 8 compilations of a function and then runs it uncompiled without a warning.
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False)


def that_work(
    peers: Mapping[str, Run], synchronize: Callable[[], object] = lambda: None
) -> dict[str, Run]:
    """The peers that run; reports the others and adds them to `missing`.

    On a CPU FlexAttention needs AVX2, a compiler and supported shapes. synchronize: raises the
    errors of work that runs on a device.
    """
    working = {}
    for name, run in peers.items():
        try:
            run()
            synchronize()
        except Exception as error:  # a peer may fail in any way
            leave_out(name, error)
        else:
            working[name] = run
    return working


def leave_out(name: str, error: Exception) -> None:
    """Reports a peer that does not run."""
    missing[name] = f"{type(error).__name__}: {str(error)[:160]}"
    say(f"  {name} does not run here: {missing[name]}")
