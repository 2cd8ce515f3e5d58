"""Rows of calls that are bound by memory or latency: decoding over pages, launches, modules."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import flashattn_jit as fa
from benchmarks.parts import gpu_peers as peers
from benchmarks.parts.batch_work import page_table
from benchmarks.parts.gpu_measure import (
    Clock,
    Flush,
    copy_run,
    graph_of,
    host_seconds,
    interleave_on_device,
)
from benchmarks.parts.measure import Row, ratio, time_row
from benchmarks.parts.progress import say
from benchmarks.parts.work import batch_for_kv, copy_bytes, decode_bytes
from flashattn_jit import _C
from flashattn_jit.ops.launching.launches import _launches

KV_BYTES = 1 << 30
KV_LEN = 8192
KV_HEADS, HEAD_DIM = 8, 128
GROUPS, PAGES = (1, 4, 8, 7), (64, 16, 1)
MODULES = 200
_GRAPH_CALLS = 20


def decode_rows(rounds: int, clock: Clock, l2_bytes: int) -> Iterator[Row]:
    """One token per request over pages in random order: share of this run's copy bandwidth."""
    batch = batch_for_kv(KV_BYTES, KV_LEN, KV_HEADS, HEAD_DIM)
    flush = Flush(l2_bytes)
    copy = copy_run(KV_BYTES)
    for page_size in PAGES:
        pages = batch * KV_LEN // page_size
        shape = (pages, page_size, KV_HEADS, HEAD_DIM)
        k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        paged = page_table([KV_LEN] * batch, page_size, shuffled=True, device="cuda")
        table = [
            t.int().cuda() for t in (paged.page_indptr, paged.page_indices, paged.last_page_len)
        ]
        rows = torch.arange(batch + 1)
        for group in GROUPS:
            name = f"decode B{batch} kv {KV_LEN} page {page_size} group {group}"
            if not clock.allows(name, 10):
                continue
            heads = group * KV_HEADS
            q = torch.randn(batch, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")

            planned = fa.BatchAttention(
                num_q_heads=heads, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, q_dtype=q.dtype,
                device="cuda",
            )  # fmt: skip
            planned.plan(rows, paged)

            def ours(q=q, k=k, v=v, planned=planned) -> object:
                return planned.run(q, k, v)

            others = peers.flashinfer_decode(q, k, v, *table)
            times = interleave_on_device({"ours": ours, "copy": copy, **others}, rounds, flush)
            moved = decode_bytes(batch, KV_LEN, heads, KV_HEADS, HEAD_DIM)
            yield _bandwidth_row(name, times, moved)


def _bandwidth_row(name: str, times: dict[str, list[float]], moved: int) -> Row:
    share, spread = ratio(times["copy"], times["ours"], 100 * moved / copy_bytes(KV_BYTES))
    shown = ", ".join(
        f"{n} {(copy_bytes(KV_BYTES) if n == 'copy' else moved) / statistics.median(t) / 1e12:.2f}"
        for n, t in times.items()
    )
    row = Row(f"{name}: share of copy bandwidth", 88.0, share, "%", "higher", spread,
              f"TB/s: {shown}")  # fmt: skip
    say(f"  {row.claim}: {share:.1f} % ({row.detail})")
    return row


def latency_rows(rounds: int, clock: Clock) -> Iterator[Row]:
    """Decode of one request in a graph, and the host time of a repeated call."""
    if not clock.allows("latency", 15):
        return
    q = torch.randn(1, 32, 1, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    k, v = (
        torch.randn(1, KV_HEADS, 1024, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    )

    def ours() -> object:
        return fa.attention(q, k, v)

    def sdpa() -> object:
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    replays = {"ours": graph_of(ours, _GRAPH_CALLS), "sdpa": graph_of(sdpa, _GRAPH_CALLS)}
    times = interleave_on_device(replays, rounds)
    calls = {name: [t / _GRAPH_CALLS for t in found] for name, found in times.items()}
    other = statistics.median(calls["sdpa"]) * 1e6
    yield _said("decode B1 kv 1024, 32 heads over 8, in a graph", 12.0, calls["ours"],
                f"torch SDPA {other:.1f} us")  # fmt: skip
    host = host_seconds(ours, 200, rounds)
    sdpa_host = statistics.median(host_seconds(sdpa, 200, rounds)) * 1e6
    yield _said("fa.attention, host time of a repeated call", None, host,
                f"torch SDPA {sdpa_host:.1f} us")  # fmt: skip
    yield _said("launch of a planned call, host time", 4.0, launch_seconds(q, k, v, rounds),
                "no split")  # fmt: skip


def launch_seconds(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rounds: int) -> list[float]:
    """Host seconds of the native launch alone: filling the arguments and queueing the kernel."""
    short_k, short_v = k[:, :, :64].contiguous(), v[:, :, :64].contiguous()  # one launch: no split
    out = torch.empty_like(q)
    fa.attention(q, short_k, short_v, out=out)
    plan, ready = list(_launches.values())[-1]
    stream = torch.cuda.current_stream().cuda_stream

    def launch() -> None:
        ready.call.launch(
            q.data_ptr(), short_k.data_ptr(), short_v.data_ptr(), out.data_ptr(), 0, 0.1, 1, (),
            (), 0, 0, 0, 0, plan.block.memory.data_ptr(), stream, 0,
        )  # fmt: skip

    return host_seconds(launch, 200, rounds)


def _said(claim: str, goal: float | None, seconds: Sequence[float], detail: str) -> Row:
    row = time_row(claim, goal, seconds, "us", detail)
    say(f"  {claim}: {row.measured:.2f} us ({detail})")
    return row


def module_rows(clock: Clock) -> Iterator[Row]:
    """Memory of a loaded module: copies of one artifact, each loaded on the device."""
    if not clock.allows("loaded modules", 20):
        return
    plan, _ = next(iter(_launches.values()))
    loaded = next(k.module for k in plan.kernels if k is not None)
    assert loaded is not None
    with tempfile.TemporaryDirectory() as folder:
        before = torch.cuda.mem_get_info()[0]
        resident = _resident_bytes()
        kept = []
        for i in range(MODULES):
            copy = Path(folder) / f"{i}.so"
            shutil.copy(loaded.path, copy)
            module = _C.Module(str(copy))
            module.load(0)
            kept.append(module)
        torch.cuda.synchronize()
        on_device = (before - torch.cuda.mem_get_info()[0]) / MODULES / 2**20
        on_host = (_resident_bytes() - resident) / MODULES / 2**20
    detail = f"host {on_host:.2f} MiB each"
    row = Row(f"device memory of a loaded module, of {MODULES}", 1.0, on_device, "MiB", "lower",
              None, detail)  # fmt: skip
    say(f"  {row.claim}: {on_device:.2f} MiB ({detail})")
    yield row


def _resident_bytes() -> int:
    words = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(words[1]) * 4096
