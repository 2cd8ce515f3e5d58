"""Threads and memory: one OpenMP runtime, torch's thread count, scratch that does not grow."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tests.harness import processes, rotation


def run(body: str) -> str:
    """The output of Python code in a separate process."""
    code = textwrap.dedent(body)
    done = processes.run(["-c", code])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_process_has_one_openmp_runtime():
    text = run("""
        import torch, flashattn_jit as fa
        q = torch.randn(1, 4, 200, 32)
        fa.attention(q, q, q)
        print(open("/proc/self/maps").read())
    """)
    runtimes = {
        Path(m).resolve() for m in re.findall(r"\S*lib(?:gomp|iomp|omp)[^/\s]*\.so\S*", text)
    }
    assert len(runtimes) == 1, runtimes


@pytest.mark.parametrize("threads", rotation.turn(0, [1, 2, 3]))
def test_kernels_run_on_torchs_own_threads(threads):
    body = f"""
        import os, torch
        torch.set_num_threads({threads})
        import flashattn_jit as fa
        q = torch.randn(1, 8, 500, 32)
        torch.randn(8_000_000).exp_()  # starts torch's team
        before = len(os.listdir("/proc/self/task"))
        for _ in range(3):
            fa.attention(q, q, q)
        print(before, len(os.listdir("/proc/self/task")), fa.last_kernel_source())
    """
    run(body)  # compiles, which starts threads of its own
    before, after, source = run(body).split()
    assert source == "memory" or source == "disk"
    assert after == before


def test_scratch_does_not_grow_with_the_keys():
    text = run("""
        import resource, torch, flashattn_jit as fa
        torch.set_num_threads(2)
        q = torch.randn(1, 1, 256, 64)
        k = torch.randn(1, 1, 200_000, 64)
        v = torch.randn(1, 1, 200_000, 64)
        out = torch.empty(1, 1, 256, 64)
        fa.attention(q, k[:, :, :1000], v[:, :, :1000], fa.Causal(), out=out, q_offset="end")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        fa.attention(q, k, v, fa.Causal(), out=out, q_offset="end")
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
    """)
    # Two threads' scratch of under 4 MB, and the partial states of a split.
    assert int(text) < 10_000_000, text
