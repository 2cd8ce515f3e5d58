"""The cases of `verify`: group sizes, edge lengths, layouts, extreme scores."""

from __future__ import annotations

import pytest
import torch

from flashattn_jit.errors import InputError
from flashattn_jit.inspect.dims import DEFAULT, complete_dims
from flashattn_jit.inspect.verification.cases import GROUP_SIZES, cases, extra_kernels, fallbacks
from flashattn_jit.inspect.verification.inputs import make_inputs
from flashattn_jit.planner.tiles import tile_kind

ALL = [*cases(DEFAULT, 96, 96), *extra_kernels(DEFAULT, 96, 96)]


def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("target", ["cpu:avx2", "cpu:amx_bf16"])
def test_every_group_size_is_tried_with_both_tile_kinds(target):
    found = {
        (c.dims.group_size, tile_kind(c.dims.q_len * c.dims.group_size, target, "bfloat16"))
        for c in ALL if c.group
    }  # fmt: skip
    assert found >= {(g, kind) for g in GROUP_SIZES for kind in ("few_row", "prefill")}


def test_edges_of_lengths_are_tried():
    assert {0, 1} <= {c.dims.q_len for c in ALL}
    assert {0, 1} <= {c.dims.kv_len for c in ALL}
    assert any(c.dims.kv_len % 96 == 0 and c.dims.kv_len for c in ALL)
    assert any(c.dims.kv_len % 96 == 1 for c in ALL)
    assert any(c.dims.kv_len % 96 == 95 for c in ALL)


def test_names_and_sizes_tell_cases_apart():
    assert len({(c.name, c.dims) for c in ALL}) == len(ALL)


@pytest.mark.parametrize("case", ALL, ids=lambda c: f"{c.name} {c.dims.num_q_heads}")
def test_inputs_have_the_cases_sizes_and_a_contiguous_last_dim(case):
    d = case.dims
    x = make_inputs(case, torch.bfloat16, generator())
    assert x.q.shape == (d.batch, d.num_q_heads, d.q_len, d.head_dim)
    assert x.k.shape == (d.batch, d.num_kv_heads, d.kv_len, d.head_dim)
    assert x.v.shape == (d.batch, d.num_kv_heads, d.kv_len, d.head_dim_v)
    assert all(t.stride(-1) == 1 for t in (x.q, x.k, x.v))
    assert not x.clean_k.isnan().any()
    assert not x.clean_v.isnan().any()
    if case.lengths == "ragged":
        past = torch.arange(d.kv_len) >= x.kv_len[:, None]
        assert x.k.isnan().any(-1)[:, 0].equal(past)
        assert 0 in x.kv_len
    if case.layout == "transposed":
        assert not x.q.is_contiguous()
    if case.layout == "sliced":
        assert x.k.stride(2) * x.k.element_size() % 16 != 0
    if case.layout == "expanded":
        assert x.v.stride(0) == 0


def test_extreme_scores_reach_1e4_and_are_exact_in_half_precision():
    case = next(c for c in ALL if c.extreme)
    x = make_inputs(case, torch.float16, generator())
    scores = (x.q.double() @ x.k[:, :1].double().transpose(-1, -2)) * case.dims.head_dim**-0.5
    assert scores.abs().max() > 1e4
    single = (x.q.float() @ x.k[:, :1].float().transpose(-1, -2)) * case.dims.head_dim**-0.5
    assert single.double().equal(scores)


def test_inputs_depend_on_the_seed_alone():
    first, second = (make_inputs(ALL[1], torch.float32, generator()) for _ in range(2))
    assert first.q.equal(second.q)
    assert first.v.equal(second.v)


def test_fallbacks_end_with_the_given_sizes():
    base = DEFAULT._replace(num_q_heads=12, num_kv_heads=4, q_len=20, kv_len=30)
    case = next(c for c in ALL if c.name == "ragged tails")
    tried = list(fallbacks(case, base))
    assert tried[0] == case
    assert tried[-1].dims == base


def test_dims_are_completed():
    assert complete_dims(None) == DEFAULT
    assert complete_dims({"num_q_heads": 12}).num_kv_heads == 6
    assert complete_dims({"num_q_heads": 7}).group_size == 1
    assert complete_dims({"num_kv_heads": 3}).num_q_heads == 6
    assert complete_dims({"head_dim": 80}).head_dim_v == 80
    assert complete_dims((1, 2, 2))[:3] == (1, 2, 2)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"heads": 3}, "unknown names ['heads']"),
        ({"num_q_heads": 8, "num_kv_heads": 3}, "num_kv_heads=3 does not divide num_q_heads=8"),
        ({"q_len": -5}, "q_len=-5"),
        ({"kv_len": 1.5}, "kv_len=1.5"),
        ({"head_dim": 0}, "at least 1"),
    ],
)
def test_unusable_dims_are_errors(dims, message):
    with pytest.raises(InputError) as info:
        complete_dims(dims)
    assert message in str(info.value)
