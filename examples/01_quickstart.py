"""Define a variant in Python, run it as a fused kernel, check it, and time it against torch.

    python examples/01_quickstart.py

The first start compiles one kernel (about two seconds); later starts take it from disk.
"""

import time

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


def seconds(run, repeats=20):
    """Median wall time of `run`."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return sorted(times)[repeats // 2]


def main():
    """Compile, run, check, explain, time."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 1024, 64) for _ in range(3))
    variant = SlidingALiBi()

    begin = time.perf_counter()
    out = fa.attention(q, k, v, variant)
    print(f"first call: {time.perf_counter() - begin:.2f} s (from {fa.last_kernel_source()})")

    # The reference runs the same hooks in eager torch, in fp64.
    expected = variant.reference(q, k, v)
    error = (out - expected).abs().max().item()
    print(f"largest error against the fp64 reference: {error:.1e}")
    assert error < 1e-5

    # A new value of a scalar needs no new kernel.
    wide = fa.attention(q, k, v, variant, window=512)
    assert (wide - variant.reference(q, k, v, window=512)).abs().max() < 1e-5

    print(variant.explain(q, k, v).tiles)

    def with_torch():  # torch's own: the same scores as a bias, in one dense mask
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=window_mask)

    position = torch.arange(1024)
    distance = position[:, None] - position[None, :]
    window_mask = (distance >= 0) & (distance < 256)
    ours, theirs = seconds(lambda: fa.attention(q, k, v, variant)), seconds(with_torch)
    print(
        f"this variant: {ours * 1e3:.2f} ms; torch SDPA, same mask, no cap, no ALiBi: "
        f"{theirs * 1e3:.2f} ms ({theirs / ours:.1f}x)"
    )


if __name__ == "__main__":
    main()
