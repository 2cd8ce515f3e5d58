"""Feature `mixed_rows`: the rows of an item belong to several requests, which share its keys."""

from __future__ import annotations

import struct

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import _C
from flashattn_jit.jit.cuda_toolkit import find_toolkit
from flashattn_jit.jit.module import load_kernel
from flashattn_jit.ops import _device
from flashattn_jit.ops._launch import render_spec
from flashattn_jit.planner import Problem, choose
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.reference import varlen_reference
from tests.ops.test_attention import assert_close

pytest.importorskip("flashattn_jit._emulator")
pytestmark = pytest.mark.skipif(find_toolkit() is None, reason="needs nvcc")

TOKENS, KEYS, HEADS, DIM = (3, 2), 150, 4, 64


def score(score, b, h, q_idx, kv_idx):
    return score + 0.3 * b + 0.02 * (kv_idx - q_idx) * h


def mask(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx + 20 * b


def test_hooks_see_each_rows_own_request() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = sum(TOKENS)
    q = torch.randn(rows, HEADS, DIM, generator=generator).bfloat16()
    k, v = (torch.randn(KEYS, 2, DIM, generator=generator).bfloat16() for _ in range(2))
    offsets = (100, 60)
    variant = fa.variant(score_mod=score, mask_mod=mask)
    bound = variant.bind(Dims(2, HEADS, 2, max(TOKENS), KEYS, DIM, DIM), {})
    problem = Problem((rows,), (KEYS,), HEADS, 2, DIM, DIM, *("bfloat16",) * 3)
    spec = choose(bound.ir, problem, "sm_80", ("mixed_rows",))
    module = load_kernel(spec.document(), spec.template, spec.target, lambda: render_spec(spec))
    out = torch.empty(rows, HEADS, DIM, dtype=torch.bfloat16)
    lse = torch.empty(rows, HEADS)
    # Request 2 stands for the shared keys: its rows are the tokens of both others.
    native = _C.Problem(
        num_requests=3, num_q_heads=HEADS, num_kv_heads=2, head_dim=DIM, head_dim_v=DIM,
        q_len=(*TOKENS, rows), kv_len=(KEYS,) * 3, q_row0=(0, TOKENS[0], 0),
        q_offset=(*offsets, 0), q_stride=(0, DIM, HEADS * DIM), k_stride=(0, DIM, 2 * DIM),
        v_stride=(0, DIM, 2 * DIM), out_stride=(0, DIM, HEADS * DIM), lse_stride=(0, 1, HEADS),
        scalar_kinds="".join("i" if s.dtype == "int64" else "f" for s in bound.ir.scalars),
        row_request=(0,) * TOKENS[0] + (1,) * TOKENS[1],
    )  # fmt: skip
    work = [struct.pack("8i", 2, h, 2, 0, rows * 2, 0, KEYS, -1) for h in (0, 2)]
    call = _C.Call(module, native, b"".join(work), flags=_C.WRITE_LSE)
    plan = _device.make_plan(call, module, "emulated:sm_80", q.device, spec)
    tensors = _device.CallTensors(q, k, v, out, lse, scalars=bound.scalars)
    _device.launch(plan, tensors, DIM**-0.5)

    starts = torch.tensor([0, TOKENS[0], rows])
    packed = (q, torch.cat([k, k]), torch.cat([v, v]), starts, torch.tensor([0, KEYS, 2 * KEYS]))
    options = {"q_offset": torch.tensor(offsets)}
    exact, exact_lse = varlen_reference(*packed, variant, **options)
    eager, _ = varlen_reference(*packed, variant, dtype=torch.bfloat16, **options)
    assert_close(out, exact, eager)
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=2e-5, atol=2e-5)
