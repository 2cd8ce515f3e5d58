"""The program for compute-sanitizer: a call of each template. `python -m tests.gpu.sanitized`.

The test turns torch's caching allocator off: each tensor is its own allocation, so that the tool
sees reads past its end.
"""

from __future__ import annotations

import torch

import flashattn_jit as fa
from tests.ops.batches.paged_calls import paged_attention


def main() -> None:
    """Prefill, few rows, the merge of splits, pages, and merged states."""
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(torch.bfloat16).cuda()

    q, k, v = normal(1, 4, 70, 64), normal(1, 2, 130, 64), normal(1, 2, 130, 64)
    fa.attention(q, k, v, fa.Causal() & fa.ALiBi())  # prefill
    fa.attention(q[:, :, :1], k, v, fa.ALiBi())  # few rows
    long_k, long_v = normal(1, 2, 1500, 64), normal(1, 2, 1500, 64)
    fa.attention(q[:, :, :1], long_k, long_v)  # split and merged
    pages = normal(9, 16, 2, 64), normal(9, 16, 2, 64)
    paged = fa.Paged(
        torch.tensor([0, 8]), torch.randperm(9)[:8].to(torch.int32).cuda(), torch.tensor([3]), 16
    )
    tokens, starts = normal(70, 4, 64), torch.tensor([0, 70])
    fa.append_paged_kv(normal(70, 2, 64), normal(70, 2, 64), *pages, starts, paged)
    paged_attention(tokens, *pages, starts, paged, fa.Causal())
    paged_attention(tokens[:1], *pages, torch.tensor([0, 1]), paged)
    states = [fa.attention(q, k, v, partial=True) for _ in range(2)]
    fa.merge_states([o for o, _ in states], [x for _, x in states])
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
