"""What this engine is compared with: torch's SDPA and FlexAttention under torch.compile.

FlexAttention gets what makes it fastest here: static shapes, a block mask made ahead, and for full
attention both with a block mask and without one (without, it treats the sequence as one tile).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    flex_attention,
    noop_mask,
)
from torch.nn.functional import scaled_dot_product_attention

from benchmarks._progress import say

Run = Callable[[], object]


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """FlexAttention's causal mask."""
    return q_idx >= kv_idx


def prefill_peers(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> dict[str, Run]:
    """Peers for equal q_len and kv_len and as many kv heads as q heads."""
    _forget_compiled()
    q_len, kv_len = q.shape[2], k.shape[2]
    mask = create_block_mask(causal if is_causal else noop_mask, None, None, q_len, kv_len, "cpu")
    peers: dict[str, Run] = {
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=is_causal),
        "flex": _flex(q, k, v, mask, False),
    }
    if not is_causal:
        peers["flex, no block mask"] = _flex(q, k, v, None, False)
    return _that_work(peers)


def decode_peers(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Run]:
    """Peers for one query row a head and grouped heads; SDPA also with heads packed by hand."""
    _forget_compiled()
    batch, num_q_heads, _, head_dim = q.shape
    packed = q.view(batch, k.shape[1], num_q_heads // k.shape[1], head_dim)
    return _that_work({
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "sdpa, packed by hand": lambda: scaled_dot_product_attention(packed, k, v),
        "flex": _flex(q, k, v, None, True),
    })  # fmt: skip


def _forget_compiled() -> None:
    # torch keeps 8 compilations of a function and then runs it uncompiled, without a word.
    torch.compiler.reset()


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, enable_gqa: bool) -> Run:
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=enable_gqa)


def _that_work(peers: dict[str, Run]) -> dict[str, Run]:
    """Peers that run at all: FlexAttention needs AVX2, a compiler and supported shapes."""
    working = {}
    for name, run in peers.items():
        try:
            run()
        except Exception as error:  # a peer may fail in any way; it is left out, visibly
            say(f"{name} does not run here: {type(error).__name__}: {str(error)[:200]}")
        else:
            working[name] = run
    return working
