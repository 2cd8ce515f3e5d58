"""Cascades over quantised caches: a scale for each slot of the cache, found by `fa.kv_slot`.

A slot's scale is the same for all requests of a group, so hooks of keys and values may gather it,
although `fa.kv_slot` takes the request. Expected values are computed here in fp64, without hooks.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit.codegen.spec import host_target
from flashattn_jit.errors import VariantError
from flashattn_jit.variants.ir.ir import keys_read_request
from flashattn_jit.variants.params import Dims
from tests.batch.batches import indptr
from tests.harness import rotation
from tests.harness.toolkit import needs_nvcc
from tests.ops.cases import HOST_TARGETS, normal

HQ, HKV, D, PAGE = 4, 2, 32, 4

# Pages of each request, in the order of their keys; requests 0, 1, 4 and 0, 1 share some.
TABLES = [[7, 2, 9, 4, 0], [7, 2, 9, 1], [5, 8], [3], [7, 2, 6, 10, 11]]
LAST = [3, 4, 1, 2, 4]
KV_LENS = [PAGE * (len(t) - 1) + n for t, n in zip(TABLES, LAST, strict=True)]
FEW, MANY = [1, 2, 1, 1, 2], [14, 9, 5, 6, 20]


def paged() -> fa.Paged:
    flat = torch.tensor([p for own in TABLES for p in own], dtype=torch.int32)
    return fa.Paged(indptr([len(t) for t in TABLES]), flat, torch.tensor(LAST), PAGE)


def by_slot(k_scale: torch.Tensor, v_scale: torch.Tensor) -> fa.Variant:
    """Dequantises with the scales [slots, num_kv_heads] of a cache."""
    return fa.Causal() & fa.variant(
        key_mod=lambda row, b, kv_h, kv_idx: row * k_scale[fa.kv_slot(b, kv_idx), kv_h],
        value_mod=lambda row, b, kv_h, kv_idx: row * v_scale[fa.kv_slot(b, kv_idx), kv_h],
    )


class Cache:
    """Pages [pages, page_size, num_kv_heads, head_dim] and scales [slots, num_kv_heads]."""

    def __init__(self, dtype: torch.dtype) -> None:
        slots = 12 * PAGE
        # Every slot and head has another scale, so that the scale of a wrong slot shows.
        self.k_scale, self.v_scale = (
            0.01 * (1 + torch.arange(slots * HKV).reshape(slots, HKV) % 7 + normal(s, slots, HKV))
            for s in (1, 2)
        )
        sizes = (12, PAGE, HKV, D)
        self.k, self.v = (
            (30 * normal(s, *sizes)).round().clamp(-127, 127).to(dtype) for s in (3, 4)
        )

    def request(self, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_len, num_kv_heads, head_dim] of a request, dequantised, fp64."""
        slots = torch.tensor([p * PAGE + n for p in TABLES[b] for n in range(PAGE)])[: KV_LENS[b]]
        return tuple(  # type: ignore[return-value]
            x.flatten(0, 1)[slots].double() * scale[slots].double()[..., None]
            for x, scale in ((self.k, self.k_scale), (self.v, self.v_scale))
        )


def expected(cache: Cache, q: torch.Tensor, q_lens: list[int]) -> torch.Tensor:
    out = []
    for b, rows in enumerate(q.double().split(q_lens)):
        k, v = (x.repeat_interleave(HQ // HKV, 1) for x in cache.request(b))
        s = torch.einsum("rhd,khd->hrk", rows, k) / math.sqrt(D)
        behind = torch.arange(q_lens[b])[:, None] + KV_LENS[b] - q_lens[b] - torch.arange(len(k))
        weights = torch.softmax(s.masked_fill(behind < 0, -math.inf), -1).nan_to_num()
        out.append(torch.einsum("hrk,khd->rhd", weights, v))
    return torch.cat(out)


def options(dtype: torch.dtype, kv_dtype: torch.dtype, target: str) -> dict[str, Any]:
    return {"num_q_heads": HQ, "num_kv_heads": HKV, "head_dim": D, "q_dtype": dtype,
            "kv_dtype": kv_dtype, "device": "cpu", "target": target}  # fmt: skip


def check(
    q_lens: list[int], dtype: torch.dtype, kv_dtype: torch.dtype, target: str, tolerance: float
) -> None:
    cache = Cache(kv_dtype)
    variant = by_slot(cache.k_scale, cache.v_scale)
    q = normal(5, sum(q_lens), HQ, D).to(dtype)
    levels = fa.cascade_levels(indptr(q_lens), paged())
    assert len(levels) == 3  # two of shared pages: {0, 1, 4}, and {0, 1} inside it
    cascade = fa.CascadeAttention(variant, **options(dtype, kv_dtype, target))
    cascade.plan(levels)
    got = cascade.run(q, cache.k, cache.v)
    flat = fa.BatchAttention(variant, **options(dtype, kv_dtype, target))
    flat.plan(indptr(q_lens), paged())
    wanted = expected(cache, q, q_lens)
    for out in (got, flat.run(q, cache.k, cache.v)):
        torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("target", rotation.chosen(HOST_TARGETS, 2))
@pytest.mark.parametrize("q_lens", [FEW, MANY], ids=["few", "many"])
def test_int8_cache(target: str, q_lens: list[int]) -> None:
    check(q_lens, torch.float32, torch.int8, target, 2e-5)


@pytest.mark.parametrize("q_lens", [FEW, MANY], ids=["few", "many"])
def test_int8_cache_of_bfloat16_queries(q_lens: list[int]) -> None:
    check(q_lens, torch.bfloat16, torch.int8, host_target(), 2e-2)


@needs_nvcc
def test_on_a_cuda_target() -> None:
    """CUDA kernels take one dtype; the scales are found the same way."""
    check(FEW, torch.float16, torch.float16, "emulated:sm_80", 3e-3)


def test_ragged_levels() -> None:
    """Shared keys that lie one after another: the outermost level's first."""
    shared, own = 7, [3, 5]
    tokens = shared + sum(own)
    k, v = (torch.randint(-127, 128, (tokens, HKV, D)).to(torch.int8) for _ in range(2))
    scale = 0.02 * (1 + torch.rand(tokens, HKV))
    q = normal(6, 4, HQ, D)
    cascade = fa.CascadeAttention(
        by_slot(scale, scale), **options(torch.float32, torch.int8, host_target())
    )
    cascade.plan([
        fa.CascadeLevel(torch.tensor([0, 4]), fa.Ragged(torch.tensor([0, shared]))),
        fa.CascadeLevel(torch.tensor([0, 2, 4]), fa.Ragged(indptr(own))),
    ])  # fmt: skip
    got = cascade.run(q, k, v)
    at = [[*range(7), 7, 8, 9], [*range(7), 10, 11, 12, 13, 14]]
    kd, vd = (x.double() * scale.double()[..., None] for x in (k, v))
    for b, slots in enumerate(at):
        keys, values = (x[slots].repeat_interleave(HQ // HKV, 1) for x in (kd, vd))
        s = torch.einsum("rhd,khd->hrk", q[2 * b : 2 * b + 2].double(), keys) / math.sqrt(D)
        late = torch.arange(len(slots)) > torch.arange(2)[:, None] + len(slots) - 2
        weights = torch.softmax(s.masked_fill(late, -math.inf), -1)
        wanted = torch.einsum("hrk,khd->rhd", weights, values)
        torch.testing.assert_close(got[2 * b : 2 * b + 2].double(), wanted, rtol=2e-5, atol=2e-5)


GAIN = torch.ones(64)
SERVED = {
    "the key's slot": lambda row, b, h, j: row * GAIN[fa.kv_slot(b, j)],
    "cast": lambda row, b, h, j: row * GAIN[fa.kv_slot(b, j.long())] * GAIN[h] * GAIN[j],
    "the request, cast": lambda row, b, h, j: row * GAIN[fa.kv_slot(b.long(), j)],
}
REFUSED = {
    "the request": lambda row, b, h, j: row * GAIN[b],
    "a number of the request": lambda row, b, h, j: row * b,
    "its length": lambda row, b, h, j: row * GAIN[fa.kv_len(b) - j],
    "its queries": lambda row, b, h, j: row * GAIN[fa.q_len(b)],
    "a row of its queries": lambda row, b, h, j: row * GAIN[fa.q_row(b, j)],
    "the slot of another key": lambda row, b, h, j: row * GAIN[fa.kv_slot(b, j + 1)],
    "the slot of another request": lambda row, b, h, j: row * GAIN[fa.kv_slot(b + 1, j)],
    "the slot of a constant": lambda row, b, h, j: row * GAIN[fa.kv_slot(torch.tensor(3), j)],
    "the slot of a head": lambda row, b, h, j: row * GAIN[fa.kv_slot(h, j)],
    "the slot of the first request": lambda row, b, h, j: row * GAIN[fa.kv_slot(b * 0, j)],
    "the length of a head": lambda row, b, h, j: row * GAIN[fa.kv_len(h) - j],
    "the queries of a constant": lambda row, b, h, j: row * GAIN[fa.q_len(torch.tensor(1))],
    "a row of a head": lambda row, b, h, j: row * GAIN[fa.q_row(h, j)],
    "the request, cast, and a number": lambda row, b, h, j: row * b.long(),
    "the slot and the request": lambda row, b, h, j: row * GAIN[fa.kv_slot(b, j)] * GAIN[b],
}


@pytest.mark.parametrize("hook", ["key_mod", "value_mod"])
@pytest.mark.parametrize("name", [*SERVED, *REFUSED])
def test_what_reads_the_request(name: str, hook: str) -> None:
    variant = fa.variant(**{hook: {**SERVED, **REFUSED}[name]})
    assert keys_read_request(variant.bind(Dims(5, HQ, HKV, 4, 20, D, D)).ir) == (name in REFUSED)
    if name in REFUSED:
        cascade = fa.CascadeAttention(
            variant, **options(torch.float32, torch.float32, host_target())
        )
        before = fa.cache_info().misses
        with pytest.raises(VariantError, match=r"reads the request b.*fa\.kv_slot\(b, kv_idx\)"):
            cascade.plan(fa.cascade_levels(indptr(FEW), paged()))
        assert fa.cache_info().misses == before, "no kernel is compiled for what is refused"
