"""The results that `verify` expects equal plain attention in fp64, which is written out here.

In `verify`, kernel and reference share inputs, offsets, lengths, packed arrays and the mask of
masked cases, so that it cannot notice a mistake in these.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from flashattn_jit.inspect.verification.cases import Case, cases, extra_kernels
from flashattn_jit.inspect.verification.inputs import Inputs, make_inputs
from flashattn_jit.inspect.verification.run import Runner
from flashattn_jit.variants.params import Dims

BASE = Dims(2, 4, 2, 21, 33, 16, 16)
CASES = [*cases(BASE, 16, 24), *extra_kernels(BASE, 16, 24)]


def one(q: Tensor, k: Tensor, v: Tensor, first: int, masked: bool) -> tuple[Tensor, Tensor]:
    """(out [Hq, Sq, Dv], lse [Hq, Sq]) of one request under a causal mask; q [Hq, Sq, D]."""
    group = q.shape[0] // k.shape[0]
    i, j = first + torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    keep = j <= i
    if masked:
        keep = keep & (i % 3 != 1) & (j % 5 != 2)
    q, k, v = q.double(), k.double(), v.double()
    heads = [
        (q[h] @ k[h // group].T / math.sqrt(q.shape[2])).masked_fill(~keep, -math.inf)
        for h in range(q.shape[0])
    ]
    out = [torch.softmax(s, -1).nan_to_num() @ v[h // group] for h, s in enumerate(heads)]
    return torch.stack(out), torch.stack([s.logsumexp(-1) for s in heads])


def requests(case: Case, inputs: Inputs) -> list[tuple[Tensor, Tensor, Tensor, int]]:
    """(q, k, v, position of the first row) of each request, derived from the case's fields."""
    d, found = case.dims, []
    for b in range(d.batch):
        q_len, kv_len = d.q_len, d.kv_len
        if case.packed:
            q_len = (d.q_len, 1, d.q_len // 2)[b]
        if case.packed or case.lengths == "ragged":
            middle = d.kv_len // 2 + 1
            kv_len = ((d.kv_len, middle, 0) if case.packed else (d.kv_len, 0, middle))[b]
        end = kv_len - (q_len if case.packed else d.q_len)
        first = {"zero": 0, "int": 37, "end": end, "tensor": 5 * b}[case.offset]
        parts = inputs.q[b, :, :q_len], inputs.k[b, :, :kv_len], inputs.v[b, :, :kv_len]
        found.append((*parts, end if case.packed else first))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_of_every_case(case: Case) -> None:
    inputs = make_inputs(case, torch.float32, torch.Generator().manual_seed(3))
    runner = Runner(fa.Causal(), "cpu:generic", 3, {})
    (out, lse), _ = runner.expected(case, inputs, {}, torch.float32)
    if case.masked:  # keys that the mask hides hold NaN, which the plain loop would use
        assert inputs.k.isnan().any()
        inputs.k.nan_to_num_(0.0)
    parts = [one(*request, case.masked) for request in requests(case, inputs)]
    assert not any(x.isnan().any() for part in parts for x in part), "NaN where a row looks"
    join = torch.cat if case.packed else torch.stack
    wanted, wanted_lse = (
        join([part[n] for part in parts], *([1] if case.packed else [])) for n in range(2)
    )
    if case.packed:
        wanted, wanted_lse = wanted[None], wanted_lse[None]
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-9, atol=1e-9)


def test_poison_lies_where_no_row_looks() -> None:
    """NaN lies in all keys that no row sees, and nowhere else."""
    for case in CASES:
        inputs = make_inputs(case, torch.float32, torch.Generator().manual_seed(3))
        for b, (q, k, v, _) in enumerate(requests(case, inputs)):
            if not case.packed:
                past = inputs.k[b, :, k.shape[1] :]
                assert past.isnan().all() if case.lengths == "ragged" else not past.numel()
            assert not q.isnan().any() and not v.isnan().any()
            if case.masked:
                at = torch.arange(k.shape[1]) % 5 == 2
                assert k[:, at].isnan().all() and not k[:, ~at].isnan().any()
            else:
                assert not k.isnan().any()
