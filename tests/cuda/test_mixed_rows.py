"""Rows of several requests in one tile, which share the keys of a common prefix."""

from __future__ import annotations

import struct

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import _C
from flashattn_jit.codegen.spec import KernelSpec
from flashattn_jit.jit.module import load_stepping
from flashattn_jit.ops.device.cuda import LaunchTensors
from flashattn_jit.ops.device.plan_memory import DeviceState, launch
from flashattn_jit.planner.tiles import build_request, kernels_by_rows
from flashattn_jit.variants.reference import attention_reference
from flashattn_jit.variants.variant import Dims
from tests.planner.batch_plans import Level, Ragged, lengths

HEADS, KV_HEADS, DIM = 4, 2, 64
OFFSETS = (90, 35, 200)  # the last one sees every key, the second one not


class OfEachRequest(fa.Variant):
    """Reads what differs between requests: b, h, q_idx and the packed row."""

    bias: torch.Tensor = fa.tensor("batch", "num_q_heads")
    token: torch.Tensor = fa.tensor("tokens")

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.bias[b, h] * (q_idx - kv_idx) * 0.01 + self.token[fa.q_row(b, q_idx)]

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((kv_idx + b) % 5 != 0)


def spec_of(variant: fa.Variant, params: dict[str, object], kind: str) -> tuple[KernelSpec, object]:
    bound = variant.bind(Dims(3, HEADS, KV_HEADS, 40, 130, DIM, DIM), params)
    specs = kernels_by_rows(
        bound.ir, (DIM, DIM), ("bfloat16",) * 3, "emulated:sm_80", (("mixed_rows",),)
    )
    return next(s for s in specs if s.tile_kind == kind), bound


@pytest.mark.parametrize(
    ("kind", "q_lens"), [("prefill", (9, 4, 17)), ("few_row", (1, 3, 2))], ids=["prefill", "few"]
)
def test_rows_of_three_requests_share_a_prefix(kind: str, q_lens: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens, prefix = sum(q_lens), 130
    group = HEADS // KV_HEADS
    params = {
        "bias": torch.randn(3, HEADS, generator=generator),
        "token": torch.randn(tokens, generator=generator),
    }
    variant = OfEachRequest()
    spec, bound = spec_of(variant, params, kind)
    q, k, v = (
        torch.randn(n, h, DIM, generator=generator).bfloat16()
        for n, h in ((tokens, HEADS), (prefix, KV_HEADS), (prefix, KV_HEADS))
    )
    starts = (0, q_lens[0], q_lens[0] + q_lens[1])
    # Requests 0 to 2 are what hooks see; 3 is the group whose keys all of them share.
    shared = Level([range(tokens)], Ragged([prefix]), consecutive=True)
    batch = lengths(q_lens, Ragged([0, 0, 0]), OFFSETS, [shared])
    assert batch.kv_len == [prefix] * 4
    work = [
        struct.pack("8i", 3, kv_h * group, group, row, min(row + spec.tile_q, tokens * group),
                    0, prefix, -1)
        for kv_h in range(KV_HEADS)
        for row in range(0, tokens * group, spec.tile_q)
    ]  # fmt: skip
    module = load_stepping([build_request(spec)])[1]
    core = _C.BatchCall(
        _C.BatchPlan.of_work(b"".join(work)), batch, (module, None), num_q_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=DIM, head_dim_v=DIM,
    )  # fmt: skip
    rows, keys = (0, DIM, HEADS * DIM), (0, DIM, KV_HEADS * DIM)
    call = core.bind(
        strides=(rows, keys, keys, rows, (0, 1, HEADS)), flags=_C.WRITE_LSE,
        layouts=[(tuple(t.shape), t.stride()) for t in bound.tensors],
    )  # fmt: skip
    state = DeviceState(torch.device("cpu"), "emulated:sm_80", fixed=False)
    out = torch.full((tokens, HEADS, DIM), float("nan"), dtype=torch.bfloat16)
    lse = torch.full((tokens, HEADS), float("nan"))
    tensors = list(bound.tensors)
    launch(
        state.upload(core),
        call,
        LaunchTensors(
            q, k, v, out, lse, tensors, tuple(t.data_ptr() for t in tensors),
            names=("bias", "token"),
        ),
        DIM**-0.5,
    )  # fmt: skip
    for b, (start, n) in enumerate(zip(starts, q_lens, strict=True)):
        exact, exact_lse = reference_of(variant, params, b, q[start : start + n], k, v, start)
        error = (out[start : start + n].double() - exact).abs().max()
        assert error < 0.02, f"request {b} is off by {error:.3g}"
        torch.testing.assert_close(
            lse[start : start + n].double(), exact_lse.double(), rtol=2e-5, atol=2e-5
        )


def reference_of(variant, params, b, q, k, v, start):
    """One request alone, in fp64. The reference calls hooks with b = 0, so they use `b` of here."""

    def score_mod(score, zero, h, q_idx, kv_idx):
        bias, token = params["bias"].double(), params["token"].double()
        row = start + q_idx - OFFSETS[b]
        return score + bias[b][h] * (q_idx - kv_idx) * 0.01 + token[row]

    def mask_mod(zero, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((kv_idx + b) % 5 != 0)

    dense = [t.transpose(0, 1)[None] for t in (q, k, v)]
    out, lse = attention_reference(
        *dense, fa.variant(score_mod=score_mod, mask_mod=mask_mod), q_offset=OFFSETS[b]
    )
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)
