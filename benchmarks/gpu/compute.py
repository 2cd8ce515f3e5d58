"""The second call: what is bound by arithmetic. Prefill, tiles, score hooks, masks, counters."""

from __future__ import annotations

import csv
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashattn_jit as fa
from benchmarks.gpu import mods, peers
from benchmarks.gpu.kernels import (
    called,
    kernel_words,
    predicted_peer_tflops,
    predicted_tflops,
    quotient,
)
from benchmarks.gpu.machine import Machine, interleave
from benchmarks.gpu.sections import Measurement
from benchmarks.parts.measure import ROOT, Row, ratio
from benchmarks.parts.planned_otherwise import clear_plans, on_tile, planned
from benchmarks.parts.work import (
    attention_flops,
    document_lengths,
    pairs_causal,
    pairs_documents,
    pairs_window,
)

_HIDDEN = 2048  # heads x head_dim, as in FlashAttention's own benchmark
_TOKENS = 16384
_REDUCED = 160  # queries and keys in a dry run: more rows than a tile has
WINDOW = 1024
DOCUMENTS = 12
_WGMMA, _MMA_SYNC = ("prefill_wgmma", "sm_90a", 12), ("prefill", "sm_90", 4)
SWEEP = {
    64: (
        (_WGMMA, 192, 2), (_WGMMA, 128, 2), (_MMA_SYNC, 128, 2), (_MMA_SYNC, 64, 2),
    ),
    128: (
        (_WGMMA, 160, 2), (_WGMMA, 128, 2), (_MMA_SYNC, 64, 2), (_MMA_SYNC, 64, 1),
        (_MMA_SYNC, 32, 2),
    ),
}  # fmt: skip
"""By head_dim: kind, target and warps of a kernel, keys and stages of its tile of 128 rows; the
planned one first."""


def compute(machine: Machine, rounds: int) -> Iterator[Measurement]:
    """All measurements, the most important first."""
    reduced = [(1, 2, _REDUCED, head_dim) for head_dim in (128, 64, 256)]
    for shape in machine.cases(machine.pick(prefill_shapes(), reduced), 2):
        for causal in (False, True):
            rows = partial(prefill_rows, machine, rounds, shape, causal)
            yield Measurement(f"prefill {shape} {'causal' if causal else 'full'}", 10, rows)
    profiled = machine.cases(tuple(PROFILED), 1)
    for head_dim in machine.cases((128, 64), 1):
        for name in ("ALiBi", "soft cap", "soft cap, approximate"):
            rows = partial(hook_rows, machine, rounds, head_dim, name)
            yield Measurement(f"{name} D{head_dim}", 40, rows)
        for name in machine.cases(("full", "causal", "soft cap"), 1):
            rows = partial(tile_rows, machine, rounds, head_dim, name)
            yield Measurement(f"tiles of {name} D{head_dim}", 15, rows)
        if head_dim == 128:
            yield Measurement(f"counters of {profiled[0]}", 60,
                              partial(counter_rows, machine, profiled[0]))  # fmt: skip
            for name in ("sliding window", "document mask"):
                yield Measurement(name, 60, partial(mask_rows, machine, rounds, name))
    yield from (
        Measurement(f"counters of {name}", 60, partial(counter_rows, machine, name))
        for name in profiled[1:]
    )


def inputs(
    machine: Machine, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a shape (batch, heads, length, head_dim), standard normal."""
    q, k, v = (machine.random(*shape, dtype=dtype) for _ in range(3))
    return q, k, v


def prefill_shapes() -> list[tuple[int, int, int, int]]:
    """(batch, heads, length, head_dim) of the prefill rows: 16k tokens, hidden size 2048."""
    shapes = [(_TOKENS // s, _HIDDEN // d, s, d) for s in (16384, 4096) for d in (128, 64)]
    return [*shapes, (1, _HIDDEN // 256, _TOKENS, 256)]


def hook_shape(machine: Machine, head_dim: int) -> tuple[int, int, int, int]:
    """(batch, heads, length, head_dim) of the rows of hooks and tiles."""
    heads = _HIDDEN // head_dim
    return machine.pick((2, heads, 8192, head_dim), (1, 2, _REDUCED, head_dim))


def prefill_rows(
    machine: Machine, rounds: int, shape: tuple[int, int, int, int], causal: bool
) -> Iterator[Row]:
    """Full or causal, over torch's flash backend (FA2); cuDNN and FlashInfer without a goal."""
    batch, heads, length, head_dim = shape
    q, k, v = inputs(machine, shape)
    others = peers.sdpa_peers(machine, q, k, v, causal)
    if batch == 1 and head_dim == 128:
        others |= peers.flashinfer_prefill(machine, q, k, v, causal)
    variant = fa.Causal() if causal else None
    ours = partial(fa.attention, q, k, v, variant, target=machine.target)
    words = called(ours)
    times = interleave(machine, {"ours": ours, **others}, rounds)
    pairs = pairs_causal(length) if causal else length * length
    name = f"prefill D{head_dim} S{length} {'causal' if causal else 'full'}"
    model = "causal" if causal else "plain"
    predicted = quotient(predicted_tflops(model, head_dim, length),
                         predicted_peer_tflops(head_dim, causal, length))  # fmt: skip
    flops = attention_flops(pairs, batch, heads, head_dim)
    yield against(f"{name}: over flash", "flash", 0.95, times, flops, words, predicted)


def hook_rows(machine: Machine, rounds: int, head_dim: int, name: str) -> Iterator[Row]:
    """A score hook over compiled FlexAttention with the same function, and over no hook."""
    batch, heads, length, _ = shape = hook_shape(machine, head_dim)
    q, k, v = inputs(machine, shape)
    slopes = torch.rand(heads, device=machine.device)
    variants: dict[str, tuple[Any, Any, str]] = {
        "ALiBi": (mods.alibi(slopes), mods.alibi(slopes), "ALiBi"),
        "soft cap": (mods.softcap(30.0), mods.softcap(30.0), "soft cap 50"),
        "soft cap, approximate": (
            fa.SoftCap(30.0, approximate=True), mods.softcap(30.0), "soft cap 50, approximate",
        ),
    }  # fmt: skip
    ours, mod, model = variants[name]
    runs = {
        "ours": partial(fa.attention, q, k, v, ours, target=machine.target),
        "plain": partial(fa.attention, q, k, v, target=machine.target),
        **peers.flex(machine, q, k, v, mod),
    }
    words = called(runs["ours"])
    times = interleave(machine, runs, rounds)
    flops = attention_flops(length * length, batch, heads, head_dim)
    claim = f"{name} D{head_dim} S{length}"
    yield against(f"{claim}: over FlexAttention", "flex", {128: 0.75, 64: 0.85}[head_dim], times,
                  flops, words)  # fmt: skip
    predicted = quotient(*(predicted_tflops(m, head_dim, length) for m in (model, "plain")))
    yield against(f"{claim}: over no hook", "plain", None, times, flops, words, predicted)


def mask_rows(machine: Machine, rounds: int, name: str) -> Iterator[Row]:
    """A mask over FlexAttention's kernel, without and with the creation of its block mask."""
    length, heads, head_dim = machine.pick((16384, 16, 128), (_REDUCED, 2, 128))
    q, k, v = inputs(machine, (1, heads, length, head_dim))
    lengths = document_lengths(length, DOCUMENTS)
    documents = torch.repeat_interleave(torch.arange(DOCUMENTS), torch.tensor(lengths))
    mod, pairs = {
        "sliding window": (mods.window(WINDOW), pairs_window(length, WINDOW)),
        "document mask": (
            mods.document(documents.to(machine.device)), pairs_documents(lengths),
        ),
    }[name]  # fmt: skip
    ours = partial(fa.attention, q, k, v, mod, target=machine.target)
    words = called(ours)
    times = interleave(machine, {"ours": ours, **peers.flex_masked(machine, q, k, v, mod)}, rounds)
    flops = attention_flops(pairs, 1, heads, head_dim)
    claim = f"{name} S{length}: over FlexAttention"
    yield against(f"{claim}'s kernel", "flex", 1.0, times, flops, words)
    yield against(f"{claim} with its mask's creation", "flex + mask", 3.0, times, flops, words)


def tile_rows(machine: Machine, rounds: int, head_dim: int, name: str) -> Iterator[Row]:
    """Each tile as a share of the planned one's rate, those that spill beyond the rule as well.

    In fp16: kernels built past the rule must not be found by calls of the other rows.
    """
    batch, heads, length, _ = shape = hook_shape(machine, head_dim)
    q, k, v = inputs(machine, shape, torch.float16)
    variant = {"full": None, "causal": fa.Causal(), "soft cap": fa.SoftCap(30.0)}[name]
    call = partial(fa.attention, q, k, v, variant, target=machine.target)
    runs, words = {}, {}
    for (kind, target, warps), keys, stages in SWEEP[head_dim]:
        tile = f"128 x {keys} s{stages} of {'wgmma' if kind == 'prefill_wgmma' else 'mma.sync'}"
        where = on_tile(
            target=target, tile_kind=kind, tile_q=128, tile_kv=keys, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
        runs[tile], (spec,) = planned(call, where)
        words[tile] = kernel_words(spec)
    times = interleave(machine, runs, rounds)
    clear_plans()
    pairs = pairs_causal(length) if name == "causal" else length * length
    flops = attention_flops(pairs, batch, heads, head_dim)
    first = next(iter(runs))
    for tile, taken in times.items():
        value, spread = ratio(times[first], taken)
        rate = flops / statistics.median(taken) / 1e12
        yield Row(f"{name} D{head_dim} S{length}, tile {tile}: rate over {first}", None, value, "x",
                  "higher", spread, f"{rate:.0f} TFLOP/s; {words[tile]}")  # fmt: skip


def against(
    claim: str,
    peer: str,
    goal: float | None,
    times: Mapping[str, list[float]],
    flops: float,
    kernel: str,
    predicted: float | None = None,
) -> Row:
    """Our speed relative to a peer's; our rate without a goal if the peer did not run."""
    shown = ", ".join(f"{n} {statistics.median(t) * 1e3:.3f} ms" for n, t in times.items())
    rate = flops / statistics.median(times["ours"]) / 1e12
    if peer not in times:
        return Row(f"{claim} (no peer)", None, rate, "TFLOP/s", detail=f"{shown}; {kernel}")
    value, spread = ratio(times[peer], times["ours"])
    detail = f"{rate:.0f} TFLOP/s; {shown}; {kernel}"
    return Row(claim, goal, value, "x", "higher", spread, detail, predicted)


# --- hardware counters ----------------------------------------------------------------------------

PROFILED = {
    "full D128": (128, None),
    "causal D64": (64, fa.Causal()),
    "soft cap D128": (128, fa.SoftCap(30.0)),
}
"""Calls whose kernels Nsight Compute counts: head_dim, variant."""

METRICS = {
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": "tensor pipe",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "tensor instructions",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_active": "shared memory",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "MUFU pipe",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue slots",
}


_TOOLS = ("ncu", "/usr/local/cuda/bin/ncu")


def profiled_call(machine: Machine, name: str) -> None:
    """The call whose kernel is counted, as a process of its own under Nsight Compute."""
    head_dim, variant = PROFILED[name]
    q, k, v = inputs(machine, hook_shape(machine, head_dim))
    fa.attention(q, k, v, variant, target=machine.target)
    machine.synchronize()


def counter_rows(machine: Machine, name: str) -> Iterator[Row]:
    """Shares of peak rates while a kernel is active, as Nsight Compute reports them."""
    tool = next(filter(None, map(shutil.which, _TOOLS)), None)
    if tool is None:
        yield Row(f"{name}: Nsight Compute (ncu) is not installed", None, 0.0, "")
        return
    # It refuses a list with a metric that the device lacks.
    query = [tool, "--query-metrics", "--chip", "gh100"]  # of sm_90, the target of the pack
    known = subprocess.run(
        query, capture_output=True, text=True, check=False, timeout=60,
    ).stdout  # fmt: skip
    wanted = [m for m in METRICS if m.partition(".")[0] in known] or list(METRICS)
    command = [
        tool, "--csv", "--kernel-name", "regex:fajit_attention", "--launch-count", "1",
        "--clock-control", "none", "--metrics", ",".join(wanted),
        sys.executable, "-m", "benchmarks.gpu", "profiled", name,
        *([] if machine.full else ["--dry-run"]),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    found = read_counters(done.stdout)
    if not found:
        said = " ".join((done.stdout + done.stderr)[-300:].split())
        yield Row(f"{name}: Nsight Compute counted nothing", None, 0.0, "", detail=said)
    for metric, what in METRICS.items():
        if metric in found:
            yield Row(f"{name}: {what}, share of its peak", None, found[metric], "%")


def read_counters(text: str) -> dict[str, float]:
    """The metrics in Nsight Compute's table of comma-separated values, which follows its log."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = csv.DictReader(lines)
    values = {r["Metric Name"]: r["Metric Value"].replace(",", "") for r in rows}
    return {name: float(x) for name, x in values.items() if re.fullmatch(r"[\d.]+", x)}
