"""Define a variant in Python, run it as a fused kernel, check it, and time it against torch.

    python examples/01_quickstart.py

The first start compiles one kernel (about two seconds); later starts take it from disk.
"""

import statistics
import time
import timeit

import torch

import flashattn_jit as fa


class SlidingALiBi(fa.Variant):
    """ALiBi with a soft cap inside a causal sliding window."""

    slopes: torch.Tensor = fa.tensor("num_q_heads", default=fa.alibi_slopes)  # a captured tensor
    cap: float = fa.scalar(30.0)  # a runtime scalar
    window: int = fa.scalar(256)

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return self.cap * torch.tanh(score / self.cap) + self.slopes[h] * (kv_idx - q_idx)

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < self.window)


def milliseconds(run):
    """Median wall time of `run`."""
    return statistics.median(timeit.repeat(run, number=1, repeat=10)) * 1e3


def main():
    """Compile, run, check, explain, time."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 1024, 64) for _ in range(3))
    variant = SlidingALiBi()

    begin = time.perf_counter()
    out = fa.attention(q, k, v, variant)
    print(
        f"first call: {time.perf_counter() - begin:.2f} s (kernel from {fa.last_kernel_source()})"
    )

    # The reference runs the same hooks in eager torch, in fp64.
    expected = variant.reference(q, k, v)
    error = (out - expected).abs().max().item()
    print(f"largest error against the fp64 reference: {error:.1e}")
    assert error < 1e-5

    # A new value of a scalar needs no new kernel.
    wide = fa.attention(q, k, v, variant, window=512)
    assert (wide - variant.reference(q, k, v, window=512)).abs().max() < 1e-5

    print(variant.explain(q, k, v).tiles)

    # torch's own fused attention cannot cap scores; it takes the rest as one dense bias.
    distance = torch.arange(1024) - torch.arange(1024)[:, None]
    seen = (distance <= 0) & (distance > -256)
    bias = (fa.alibi_slopes(8)[:, None, None] * distance).masked_fill(~seen, -torch.inf)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    ours = milliseconds(lambda: fa.attention(q, k, v, variant))
    theirs = milliseconds(lambda: sdpa(q, k, v, attn_mask=bias))
    print(f"this variant {ours:.1f} ms; torch SDPA, the same but for the cap, {theirs:.1f} ms")


if __name__ == "__main__":
    main()
