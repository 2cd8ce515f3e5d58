"""Packed requests and merged states, against the dense call and the fp64 reference."""

from __future__ import annotations

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.variants.reference import varlen_reference
from tests.batch.batches import indptr
from tests.ops.merge_oracle import merge_reference

# Requests of every kind: decode, prefill, append, no query, no key, longer queries than keys.
Q_LENS = (1, 40, 7, 0, 3, 9)
KV_LENS = (130, 40, 90, 25, 0, 4)


def packed(dtype=torch.float32, heads=(4, 2), dims=(32, 32)):
    q = torch.randn(sum(Q_LENS), heads[0], dims[0])
    k = torch.randn(sum(KV_LENS), heads[1], dims[0])
    v = torch.randn(sum(KV_LENS), heads[1], dims[1])
    return tuple(t.to(dtype) for t in (q, k, v)), indptr(Q_LENS), indptr(KV_LENS)


VARIANTS = {
    "full": lambda: None,
    "causal": lambda: fa.Causal(),
    "window": lambda: fa.SlidingWindow(20),
    "alibi": lambda: fa.ALiBi() & fa.Causal(),
    "sink": lambda: fa.Sink(sink=torch.randn(4)) & fa.Causal(),
}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("q_offset", ["end", 0])
def test_equals_the_reference(name, q_offset):
    (q, k, v), q_indptr, kv_indptr = packed()
    variant = VARIANTS[name]()
    out, lse = fa.varlen_attention(
        q, k, v, q_indptr, kv_indptr, variant, q_offset=q_offset, return_lse=True
    )
    expected, expected_lse = varlen_reference(
        q, k, v, q_indptr, kv_indptr, variant, q_offset=q_offset
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_request_is_what_a_dense_call_gives(dtype):
    (q, k, v), q_indptr, kv_indptr = packed(dtype)
    out = fa.varlen_attention(q, k, v, q_indptr, kv_indptr, fa.Causal())
    for i in range(len(Q_LENS)):
        rows = slice(q_indptr[i], q_indptr[i + 1])
        keys = slice(kv_indptr[i], kv_indptr[i + 1])
        alone = fa.attention(
            q[rows].transpose(0, 1)[None], k[keys].transpose(0, 1)[None],
            v[keys].transpose(0, 1)[None], fa.Causal(), q_offset="end",
        )[0].transpose(0, 1)  # fmt: skip
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out[rows], alone, rtol=tolerance, atol=tolerance)


def test_hooks_read_packed_rows_and_slots():
    (q, k, v), q_indptr, kv_indptr = packed()
    row_bias, slot_bias = torch.randn(sum(Q_LENS)), torch.randn(sum(KV_LENS))

    def mod(score, b, h, q_idx, kv_idx):
        near = (fa.kv_len(b) - kv_idx) * 0.01 + fa.q_len(b) * 0.1
        return score + row_bias[fa.q_row(b, q_idx)] + slot_bias[fa.kv_slot(b, kv_idx)] + near

    out = fa.varlen_attention(q, k, v, q_indptr, kv_indptr, mod)
    expected, _ = varlen_reference(q, k, v, q_indptr, kv_indptr, mod)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_offsets_of_each_request():
    (q, k, v), q_indptr, kv_indptr = packed()
    offsets = torch.tensor([100, 0, 50, 3, 0, -2], dtype=torch.int32)
    out = fa.varlen_attention(q, k, v, q_indptr, kv_indptr, fa.Causal(), q_offset=offsets)
    expected, _ = varlen_reference(
        q, k, v, q_indptr, kv_indptr, fa.Causal(), q_offset=offsets.long()
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_writes_into_out_and_takes_strided_views():
    (q, k, v), q_indptr, kv_indptr = packed()
    wide = torch.cat([q, torch.full_like(q, float("nan"))], -1)[..., :32]
    out = torch.full_like(q, float("nan"))
    got = fa.varlen_attention(wide, k, v, q_indptr, kv_indptr, fa.Causal(), out=out)
    assert got is out
    assert torch.equal(out, fa.varlen_attention(q, k, v, q_indptr, kv_indptr, fa.Causal()))


def test_an_empty_batch():
    q, k = torch.empty(0, 4, 32), torch.empty(0, 2, 32)
    none = torch.zeros(1, dtype=torch.int64)
    assert fa.varlen_attention(q, k, k, none, none).shape == (0, 4, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.__setitem__("q_indptr", a["q_indptr"] + 1), r"q_indptr\[0\]=1 must be 0"),
        (lambda a: a["kv_indptr"].__setitem__(2, 999), "request 2"),
        (lambda a: a.__setitem__("kv_indptr", a["kv_indptr"][:-1]), "kv_indptr"),
        (lambda a: a.__setitem__("q_indptr", a["q_indptr"].float()), "int32 or int64"),
        (lambda a: a.__setitem__("max_q_len", 39), "max_q_len=39"),
        (lambda a: a.__setitem__("v", a["v"][:-1]), "num_kv_tokens"),
        (lambda a: a.__setitem__("q_offset", "start"), "q_offset"),
    ],
)
def test_wrong_requests_are_named(change, message):
    (q, k, v), q_indptr, kv_indptr = packed()
    call = {"q": q, "k": k, "v": v, "q_indptr": q_indptr, "kv_indptr": kv_indptr}
    change(call)
    with pytest.raises(fa.InputError, match=message):
        fa.varlen_attention(**call)


@pytest.mark.parametrize("shape", [(3, 4, 8), (2, 3, 5, 16)])
def test_states_merge_as_the_reference_says(shape):
    outs = [torch.randn(shape) for _ in range(4)]
    lses = [torch.randn(shape[:-1]) * 20 for _ in range(4)]
    lses[1][0] = float("-inf")
    outs[1][0] = float("nan")  # a state without keys has no weight, whatever it holds
    out, lse = fa.merge_states(outs, lses)
    clean = [o.nan_to_num() for o in outs]
    expected, expected_lse = merge_reference(
        [o.double() for o in clean], [x.double() for x in lses]
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


def test_rows_without_any_key_merge_to_nothing():
    out, lse = fa.merge_states(
        [torch.full((1, 2, 4), 7.0)] * 2, [torch.full((1, 2), float("-inf"))] * 2
    )
    assert (out == 0).all() and (lse == float("-inf")).all()


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "at least one state"),
        ([torch.zeros(1, 2, 4)], [torch.zeros(1, 3)], r"lses\[0\]"),
        ([torch.zeros(1, 2, 4).half()], [torch.zeros(1, 2)], "float32"),
        ([torch.zeros(1, 2, 4)] * 2, [torch.zeros(1, 2)], "lses has 1"),
        ([torch.zeros(1, 2, 4), torch.zeros(1, 2, 5)], None, r"outs\[1\]"),
        ([torch.zeros(4)], None, "head_dim_v"),
    ],
)
def test_states_that_do_not_fit_are_refused(outs, lses, message):
    with pytest.raises(fa.InputError, match=message):
        fa.merge_states(outs, lses)
