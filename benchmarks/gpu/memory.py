"""The third call: what is bound by memory or latency. Decoding, splits, batches, graphs; then the
sanitizer and tests/gpu."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

import flashattn_jit as fa
from benchmarks.gpu import peers
from benchmarks.gpu.batch import batches
from benchmarks.gpu.kernels import called, plan_kernels
from benchmarks.gpu.machine import Machine, host_seconds, interleave
from benchmarks.gpu.sections import Clock, Measurement
from benchmarks.parts.batch_work import page_table
from benchmarks.parts.measure import ROOT, Row, ratio, time_row
from benchmarks.parts.planned_otherwise import planned, without_splits
from benchmarks.parts.progress import say
from benchmarks.parts.work import batch_for_kv, copy_bytes, decode_bytes

KV_BYTES = 1 << 30
KV_HEADS, HEAD_DIM = 8, 128
GROUPS, PAGES = (4, 1, 8, 7), (64, 16, 1)
FORMATS = {
    "int8": fa.kv.Format("int8"),
    "e4m3": fa.kv.Format("e4m3"),
    "int4, groups of 64": fa.kv.Format("int4", group=64),
}
_GRAPH_CALLS = 20
_TESTS_S, _ENDING_S = 300, 15
VARIABLE = "FAJIT_GPU_TESTS"
"""Where tests/gpu runs if not on a GPU: see tests/gpu/place.py."""


def memory(machine: Machine, rounds: int, clock: Clock) -> Iterator[Measurement]:
    """All measurements, the most important first, the tests last."""
    for page_size in PAGES:
        for group in machine.cases(GROUPS, 1):
            rows = partial(decode_rows, machine, rounds, page_size, group)
            yield Measurement(f"decode, page {page_size}, group {group}", 12, rows)
    for name in machine.cases(tuple(FORMATS), 1):
        for group in machine.cases((4, 1), 1):
            rows = partial(quantised_rows, machine, rounds, name, group)
            yield Measurement(f"decode, {name}, group {group}", 15, rows)
    yield Measurement("decode of one request", 15, partial(latency_rows, machine, rounds))
    for kv_len in machine.cases(machine.pick((1024, 8192, 65536), (1024, 2048)), 1):
        yield Measurement(
            f"splits at kv {kv_len}", 10, partial(split_rows, machine, rounds, kv_len)
        )
    yield from batches(machine, rounds)
    yield Measurement("tests/gpu", 60, partial(rows_of_tests, machine, clock))


def decode_rows(machine: Machine, rounds: int, page_size: int, group: int) -> Iterator[Row]:
    """One token per request over pages in random order: share of this run's copy bandwidth."""
    kv_bytes, kv_len, kv_heads = machine.pick((KV_BYTES, 8192, KV_HEADS), (1 << 18, 256, 2))
    batch = batch_for_kv(kv_bytes, kv_len, kv_heads, HEAD_DIM)
    shape = (batch * kv_len // page_size, page_size, kv_heads, HEAD_DIM)
    k, v = (machine.random(*shape) for _ in range(2))
    q = machine.random(batch, group * kv_heads, HEAD_DIM)
    paged = page_table([kv_len] * batch, page_size, shuffled=True, device=machine.device)
    decode = fa.BatchAttention(
        num_q_heads=q.shape[1], num_kv_heads=kv_heads, head_dim=HEAD_DIM, q_dtype=q.dtype,
        **machine.options(),
    )  # fmt: skip
    decode.plan(torch.arange(batch + 1), paged)
    source = torch.randint(0, 256, (kv_bytes,), dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    table = (paged.page_indptr, paged.page_indices, paged.last_page_len)
    runs = {
        "ours": partial(decode.run, q, k, v),
        "copy": partial(target.copy_, source),
        **peers.flashinfer_decode(machine, q, k, v, *(t.int().to(machine.device) for t in table)),
    }
    times = interleave(machine, runs, rounds, flush=True)
    moved = decode_bytes(batch, kv_len, q.shape[1], kv_heads, HEAD_DIM)
    name = f"decode B{batch} kv {kv_len} page {page_size} group {group}"
    yield bandwidth_row(name, times, moved, copy_bytes(kv_bytes), plan_kernels(decode))


def quantised_rows(machine: Machine, rounds: int, name: str, group: int) -> Iterator[Row]:
    """One token per request over pages of 16 codes: speed over the same pages of bf16."""
    kv_bytes, kv_len, kv_heads = machine.pick((KV_BYTES, 8192, KV_HEADS), (1 << 18, 256, 2))
    batch = batch_for_kv(kv_bytes, kv_len, kv_heads, HEAD_DIM)
    k, v = (machine.random(batch * kv_len // 16, 16, kv_heads, HEAD_DIM) for _ in range(2))
    q = machine.random(batch, group * kv_heads, HEAD_DIM)
    paged = page_table([kv_len] * batch, 16, shuffled=True, device=machine.device)
    kv_format = FORMATS[name]
    plans = {}
    for what, own in (("bf16", None), (name, kv_format)):
        plans[what] = fa.BatchAttention(
            num_q_heads=q.shape[1], num_kv_heads=kv_heads, head_dim=HEAD_DIM, q_dtype=q.dtype,
            kv_format=own, **machine.options(),
        )  # fmt: skip
        plans[what].plan(torch.arange(batch + 1), paged)
    stored = [kv_format.quantize(x.float()) for x in (k, v)]
    runs = {"bf16": partial(plans["bf16"].run, q, k, v), name: partial(plans[name].run, q, *stored)}
    runs[name]()
    times = interleave(machine, runs, rounds, flush=True)
    moved = batch * kv_len * kv_heads * kv_format.row_bytes(HEAD_DIM) * 2 + 4 * q.numel()
    value, spread = ratio(times["bf16"], times[name])
    rate = moved / statistics.median(times[name]) / 1e12
    shown = f"{rate:.2f} TB/s of {moved / 2**30:.2f} GiB; {plan_kernels(plans[name])}"
    yield Row(f"decode {name}, page 16, group {group}: speed over bf16", None, value, "x", "higher",
              spread, shown)  # fmt: skip


def bandwidth_row(
    name: str, times: dict[str, list[float]], moved: int, copied: int, kernel: str
) -> Row:
    """The share of the copy's bandwidth. moved, copied: bytes of a call, and of the copy."""
    share, spread = ratio(times["copy"], times["ours"], 100 * moved / copied)
    shown = ", ".join(
        f"{n} {(copied if n == 'copy' else moved) / statistics.median(t) / 1e12:.2f}"
        for n, t in times.items()
    )
    return Row(f"{name}: share of copy bandwidth", 88.0, share, "%", "higher", spread,
               f"TB/s: {shown}; {kernel}")  # fmt: skip


def _one_request(machine: Machine, kv_len: int) -> tuple[torch.Tensor, ...]:
    kv_heads, group = machine.pick((KV_HEADS, 4), (2, 4))
    q = machine.random(1, kv_heads * group, 1, HEAD_DIM)
    k, v = (machine.random(1, kv_heads, kv_len, HEAD_DIM) for _ in range(2))
    return q, k, v


def latency_rows(machine: Machine, rounds: int) -> Iterator[Row]:
    """Decode of one request in a graph, and the host time of a repeated call."""
    q, k, v = _one_request(machine, 1024)
    ours = partial(fa.attention, q, k, v, target=machine.target)
    sdpa = partial(scaled_dot_product_attention, q, k, v, enable_gqa=True)
    kernel = called(ours)
    count = machine.pick(_GRAPH_CALLS, 2)
    replays = {"ours": machine.graph(ours, count), "sdpa": machine.graph(sdpa, count)}
    times = interleave(machine, replays, rounds)
    calls = {name: [t / count for t in found] for name, found in times.items()}
    other = statistics.median(calls["sdpa"]) * 1e6
    yield time_row("decode B1 kv 1024, 4 heads a kv head, in a graph", 12.0, calls["ours"], "us",
                   f"torch SDPA {other:.1f} us; {kernel}")  # fmt: skip
    host = host_seconds(machine, ours, 200, rounds)
    sdpa_host = statistics.median(host_seconds(machine, sdpa, 200, rounds)) * 1e6
    yield time_row("fa.attention, host time of a repeated call", None, host, "us",
                   f"torch SDPA {sdpa_host:.1f} us")  # fmt: skip


def split_rows(machine: Machine, rounds: int, kv_len: int) -> Iterator[Row]:
    """One request with its keys split as planned, over no splits; and the merge's share of time."""
    q, k, v = _one_request(machine, kv_len)
    call = partial(fa.attention, q, k, v, target=machine.target)
    kernel = called(call)
    runs = {
        "split": planned(call, contextlib.nullcontext())[0],
        "whole": planned(call, without_splits())[0],
    }
    times = interleave(machine, runs, rounds)
    value, spread = ratio(times["whole"], times["split"])
    shown = ", ".join(f"{n} {statistics.median(t) * 1e6:.1f} us" for n, t in times.items())
    yield Row(f"decode B1 kv {kv_len}: speed over no splits", None, value, "x", "higher", spread,
              f"{shown}; {kernel}")  # fmt: skip
    kernels = machine.kernel_seconds(runs["split"])
    merge = sum(t for name, t in kernels.items() if "merge" in name)
    total = sum(t for name, t in kernels.items() if "fajit" in name)
    if machine.full and not total:
        raise RuntimeError(f"the profiler reported none of the kernels, only {list(kernels)[:5]}")
    share = 100 * merge / total if total else 0.0
    yield Row(f"decode B1 kv {kv_len}: the merge's share of the kernels' time", None, share, "%",
              "lower", None, f"merge {merge * 1e6:.1f} of {total * 1e6:.1f} us")  # fmt: skip


# --- tests ----------------------------------------------------------------------------------------


def rows_of_tests(machine: Machine, clock: Clock) -> Iterator[Row]:
    """tests/gpu, the sanitizer included, in a process of its own: an error may make a context
    unusable."""
    # Without the project's strict options: a missing plugin, or a warning of another version of
    # torch, is not a failure of a kernel.
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-W",
               "default", "-o", "addopts=--import-mode=importlib", "tests/gpu"]  # fmt: skip
    environment = (
        dict(os.environ) if machine.full else {**os.environ, VARIABLE: machine.target or ""}
    )
    limit = min(machine.pick(_TESTS_S, 900), max(clock.left() - _ENDING_S, 1.0))
    with tempfile.TemporaryFile("w+") as output:
        # A session of its own: the children of a test that hangs are ended with it.
        started = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = started.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            code = started.wait()
            output.write(f"\nstopped after {limit:.0f} s")
        output.seek(0)
        text = output.read()
    say("\n".join(x for x in text.splitlines() if " PASSED" not in x)[-8000:])
    failed, last = failures(text, code)
    yield Row("tests/gpu: failures", 0.0, failed, "tests", "lower", detail=last)


def failures(text: str, code: int) -> tuple[float, str]:
    """How many tests failed by pytest's last line, at least one if its status is not 0."""
    last = next((x for x in reversed(text.splitlines()) if x.strip()), "")
    counted = sum(int(n) for n, _ in re.findall(r"(\d+) (failed|error)", last))
    return float(counted or (1 if code else 0)), last.strip("= ")
