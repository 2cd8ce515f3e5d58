"""Kernels stay within the working memory that they allocate, for any head dims and dtypes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashattn_jit.jit.compilation.toolchain import find_compiler

PROGRAM = """
import torch
import flashattn_jit as fa

torch.manual_seed(0)
int32 = torch.int32
for dim, dim_v, q_len, dtype in (
    (64, 1, 1, torch.bfloat16), (8, 8, 1, torch.bfloat16), (20, 33, 12, torch.bfloat16),
    (128, 128, 1, torch.float8_e4m3fn), (5, 70, 1, torch.float32),
):
    q_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    batch = fa.BatchAttention(num_q_heads=4, num_kv_heads=1, head_dim=dim, head_dim_v=dim_v,
                              q_dtype=q_dtype, kv_dtype=dtype)
    pages = fa.Paged(torch.tensor([0, 5], dtype=int32), torch.arange(5, dtype=int32),
                     torch.tensor([7], dtype=int32), 16)
    batch.plan(torch.tensor([0, q_len], dtype=int32), pages)
    k, v = (torch.randn(5, 16, 1, d).to(dtype) for d in (dim, dim_v))
    q = torch.randn(q_len, 4, dim).to(q_dtype)
    out = batch.run(q, k, v)
    keys, values = (x.double().reshape(80, -1)[:71] for x in (k, v))
    weights = torch.softmax(q.double() @ keys.T / dim**0.5, -1)
    assert (out.double() - weights @ values).abs().max() < 0.02, (dim, dim_v)
"""


def test_no_kernel_leaves_its_working_memory(tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    guard, source = tmp_path / "guard.so", Path(__file__).with_name("guard.c")
    built = subprocess.run(
        [*compiler.command, "-x", "c", "-shared", "-fPIC", str(source), "-o", str(guard)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if built.returncode != 0:
        pytest.skip(f"the compiler builds no C: {built.stderr[:200]}")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "LD_PRELOAD": str(guard)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
