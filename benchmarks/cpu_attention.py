"""Prefill and decode on this CPU, against torch's SDPA and FlexAttention and the machine's peaks.

    python -m benchmarks.cpu_attention [--only prefill peak hooks causal decode] [--save]

Random normal data, as many threads as torch uses, no gradients. All parts take ten minutes.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor

import flashattn_jit as fa
from benchmarks.parts.measure import Row, interleave, median, ratio, run_parts
from benchmarks.parts.peers import decode_peers, prefill_peers
from benchmarks.parts.progress import say
from benchmarks.parts.work import attention_flops, kv_bytes, pairs_causal
from benchmarks.peak import peak
from flashattn_jit.codegen.spec import default_target

_HEADS = 8
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_WIDE_GOALS = {("bf16", 128): 3.5, ("bf16", 64): 2.7, ("fp32", 128): 1.7, ("fp32", 64): 1.7}
"""Times the faster peer, with AVX-512 on AMD: torch has no AMX there and MKL's code for AVX2."""
_PREFILL_GOALS = {
    "cpu:avx2": dict.fromkeys(_WIDE_GOALS, 1.04),
    "cpu:amx_bf16": {key: 1.2 if key[0] == "bf16" else 1.1 for key in _WIDE_GOALS},
}
_PEAK_GOALS = {"bf16": 60.0, "fp32": 62.0}
_PEAK_GOALS_OF = {
    "cpu:avx2": {"bf16": 75.0, "fp32": 72.0},
    "cpu:amx_bf16": {"bf16": 16.0, "fp32": 70.0},
}
_HOOK_GOALS = {"ALiBi": 10.0, "softcap": 25.0}
_HOOK_GOALS_OF = {"cpu:amx_bf16": {"ALiBi": 15.0, "softcap": 25.0}}
_DECODE_GOAL = 85.0
_REST_S = 0.006
"""Between the kernel and a loop of the machine's peak: their threads are of two pools, and those of
the one that ran last spin for some milliseconds."""


def prefill_inputs(q_len: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1, 8, q_len, head_dim] of standard normal values."""
    q, k, v = (torch.randn(1, _HEADS, q_len, head_dim).to(dtype) for _ in range(3))
    return q, k, v


def prefill_rows(options: argparse.Namespace) -> list[Row]:
    """Speedup over the faster of torch SDPA and compiled FlexAttention."""
    goals = _PREFILL_GOALS.get(default_target(), _WIDE_GOALS)
    rows = []
    for dtype_name, dtype in _DTYPES.items():
        for head_dim in (128, 64):
            for q_len in (1024, 4096):
                q, k, v = prefill_inputs(q_len, head_dim, dtype)
                for name, variant in (("full", None), ("causal", fa.Causal())):
                    goal = goals[dtype_name, head_dim]
                    claim = f"{dtype_name} D{head_dim} S{q_len} {name}: times the faster peer"
                    rows.append(_against_peers(claim, goal, q, k, v, variant, options.pairs))
    return rows


def _against_peers(
    claim: str, goal: float, q: Tensor, k: Tensor, v: Tensor, variant: fa.Variant | None, pairs: int
) -> Row:
    peers = prefill_peers(q, k, v, variant is not None)
    times = interleave({"ours": lambda: fa.attention(q, k, v, variant), **peers}, pairs)
    fastest = min(peers, key=lambda name: median(times[name]))
    value, spread = ratio(times[fastest], times["ours"])
    length, head_dim = q.shape[2:]
    kept = length**2 if variant is None else pairs_causal(length)
    rate = attention_flops(kept, 1, _HEADS, head_dim) / median(times["ours"]) / 1e9
    others = ", ".join(f"{name} {median(times[name]) * 1e3:.2f} ms" for name in peers)
    detail = f"ours {median(times['ours']) * 1e3:.2f} ms ({rate:.0f} GFLOP/s), {others}"
    row = Row(claim, goal, value, "x", "higher", spread, detail)
    say(f"  {claim}: {value:.2f}x ({detail})")
    return row


def peak_rows(options: argparse.Namespace) -> list[Row]:
    """Share of the machine's FMA peak, which is measured in turn with the calls."""
    goals = _PEAK_GOALS_OF.get(default_target(), _PEAK_GOALS)
    machine = peak(torch.get_num_threads())
    rows = []
    for dtype_name, dtype in _DTYPES.items():
        probe = machine.dot_bf16 if dtype_name == "bf16" else machine.fma_fp32
        probe_flops = machine.bf16_flops if dtype_name == "bf16" else machine.fp32_flops
        for q_len in (1024, 4096):
            q, k, v = prefill_inputs(q_len, 128, dtype)
            runs = {"ours": partial(fa.attention, q, k, v), "peak": probe}
            times = interleave(runs, options.pairs, rest=_REST_S)
            factor = 100 * attention_flops(q_len**2, 1, _HEADS, 128) / probe_flops
            value, spread = ratio(times["peak"], times["ours"], factor)
            top = probe_flops / median(times["peak"]) / 1e9
            claim = f"{dtype_name} D128 S{q_len} full: share of the FMA peak"
            detail = f"peak {top:.0f} GFLOP/s"
            rows.append(Row(claim, goals[dtype_name], value, "%", "higher", spread, detail))
    return rows


def hook_rows(options: argparse.Namespace) -> list[Row]:
    """Time that ALiBi and a soft cap add to full attention, D128, in percent."""
    goals = _HOOK_GOALS_OF.get(default_target(), _HOOK_GOALS)
    rows = []
    for dtype_name, dtype in _DTYPES.items():
        for q_len in (1024, 4096):
            q, k, v = prefill_inputs(q_len, 128, dtype)
            variants = {"none": None, "ALiBi": fa.ALiBi(), "softcap": fa.SoftCap()}
            times = interleave(
                {
                    name: partial(fa.attention, q, k, v, variant)
                    for name, variant in variants.items()
                },
                options.pairs,
            )
            for name, goal in goals.items():
                cost, (low, high) = ratio(times[name], times["none"], 100.0)
                claim = f"{dtype_name} D128 S{q_len} full: {name} costs"
                rows.append(Row(claim, goal, cost - 100, "%", "lower", (low - 100, high - 100)))
    return rows


def causal_rows(options: argparse.Namespace) -> list[Row]:
    """Time of causal over full attention at S4096; half of the pairs are masked."""
    rows = []
    for dtype_name, dtype in _DTYPES.items():
        for head_dim in (128, 64):
            q, k, v = prefill_inputs(4096, head_dim, dtype)
            times = interleave(
                {
                    "full": partial(fa.attention, q, k, v),
                    "causal": partial(fa.attention, q, k, v, fa.Causal()),
                },
                options.pairs,
            )
            value, spread = ratio(times["causal"], times["full"])
            claim = f"{dtype_name} D{head_dim} S4096: causal over full"
            rows.append(Row(claim, 0.56, value, "", "lower", spread))
    return rows


def decode_rows(options: argparse.Namespace) -> list[Row]:
    """One query row per head: share of the machine's read bandwidth, and speedup over torch.

    Keys of a head lie together, or the heads of a token side by side, as in a paged cache.
    """
    machine = peak(torch.get_num_threads())
    rows = []
    heads_apart = [(name, 128, (32, 8), False) for name in _DTYPES]
    side_by_side = [
        ("fp32", 128, (32, 8), True),
        ("bf16", 256, (32, 8), True),
        ("bf16", 256, (8, 4), True),
    ]
    for dtype_name, dim, (q_heads, kv_heads), adjacent in heads_apart + side_by_side:
        dtype = _DTYPES[dtype_name]
        shape = (8, 4096, kv_heads, dim) if adjacent else (8, kv_heads, 4096, dim)
        stored = [torch.randn(shape).to(dtype) for _ in range(2)]
        q = torch.randn(8, q_heads, 1, dim).to(dtype)
        k, v = (x.transpose(1, 2) for x in stored) if adjacent else stored
        size = kv_bytes(8 * 4096, kv_heads, dim, dtype.itemsize)

        def read(stored: list[Tensor] = stored) -> None:
            for x in stored:
                machine.read(x)

        ours = partial(fa.attention, q, k, v)
        times = interleave({"ours": ours, "read": read}, options.pairs, rest=_REST_S)
        value, spread = ratio(times["read"], times["ours"], 100.0)
        rate, top = size / median(times["ours"]) / 1e9, size / median(times["read"]) / 1e9
        layout = ", side by side" * adjacent
        case = f"{dtype_name} decode B8 {q_heads}/{kv_heads} heads{layout} kv4096 D{dim}"
        claim, detail = f"{case}: share of read bandwidth", f"{rate:.1f} of {top:.1f} GB/s"
        rows.append(Row(claim, _DECODE_GOAL, value, "%", "higher", spread, detail))
        if adjacent:
            continue
        peers = decode_peers(q, k, v)
        times = interleave({"ours": ours, **peers}, max(3, options.pairs // 4))
        fastest = min(peers, key=lambda name: median(times[name]))
        value, spread = ratio(times[fastest], times["ours"])
        detail = ", ".join(f"{name} {size / median(t) / 1e9:.1f} GB/s" for name, t in times.items())
        rows.append(Row(f"{case}: times {fastest}", None, value, "x", "higher", spread, detail))
    return rows


_PARTS = {
    "prefill": prefill_rows,
    "peak": peak_rows,
    "hooks": hook_rows,
    "causal": causal_rows,
    "decode": decode_rows,
}


if __name__ == "__main__":
    run_parts("cpu_attention", __doc__, _PARTS)
