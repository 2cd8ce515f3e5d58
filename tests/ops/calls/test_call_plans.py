"""Plans of dense and packed calls: kernels, tiles, and plans that serve later calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import _C
from flashattn_jit.ops.arguments import calls
from flashattn_jit.ops.arguments.calls import KEPT_SIZE, Recent
from flashattn_jit.ops.attention import run_dense
from flashattn_jit.ops.launching import launches
from flashattn_jit.ops.planning.batch_plan import Variation
from flashattn_jit.variants.reference import varlen_reference
from tests.harness.toolkit import needs_nvcc
from tests.planner.batch_plans import WORK, indptr, items_of

ON_ANY = pytest.mark.parametrize(
    "target", [None, pytest.param("emulated:sm_80", marks=needs_nvcc)], ids=["cpu", "emulated"]
)


@pytest.fixture(autouse=True)
def no_earlier_launches() -> None:
    """Entries of earlier tests would lead to evictions in this one."""
    launches.forget_launches()


def latest() -> Variation:
    """The plan that was made last."""
    return list(launches._launches.values())[-1][0]


def work(plan: _C.BatchPlan, kind: int) -> list[dict[str, int]]:
    return items_of(plan.work(kind), WORK)


@contextmanager
def planning(count: int) -> Iterator[None]:
    """Asserts that the calls within it make and keep `count` plans."""
    before = len(launches._launches)
    yield
    assert len(launches._launches) == before + count


# --- kernels --------------------------------------------------------------------------------------


@pytest.mark.by_turns(3)
@ON_ANY
@pytest.mark.parametrize("variant", [fa.Causal(), fa.ALiBi()], ids=["causal", "alibi"])
def test_one_long_request_among_one_token_ones_has_a_kernel_of_its_own(
    variant: fa.Variant, target: str | None
) -> None:
    q_len = [*[1] * 9, 70, *[1] * 8]
    kv_len = [*range(3, 75, 8), 90, 0, *range(40, 89, 7)]
    dtype = torch.float32 if target is None else torch.bfloat16
    q, k, v = (
        torch.randn(sum(n), heads, 64).to(dtype)
        for n, heads in ((q_len, 4), (kv_len, 2), (kv_len, 2))
    )
    starts = [torch.from_numpy(indptr(n)) for n in (q_len, kv_len)]
    out, lse = fa.varlen_attention(q, k, v, *starts, variant, return_lse=True, target=target)
    plan = latest()
    tiles = [kernel and kernel.spec.tile_kind for kernel in plan.kernels]
    assert tiles == ["prefill", "few_row"]
    requests = [{item["request"] for item in work(plan.native, kind)} for kind in (0, 1)]
    assert requests == [{9}, set(range(18)) - {9}]
    exact, exact_lse = varlen_reference(q, k, v, *starts, variant)
    bound = 1e-5 if target is None else 0.03
    torch.testing.assert_close(out.double(), exact, rtol=bound, atol=bound)
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "kinds"), [(70, (True, False)), (1, (False, True))])
def test_calls_of_one_kind_of_rows_load_one_kernel(rows: int, kinds: tuple[bool, bool]) -> None:
    q = torch.randn(3, 2, rows, 24)
    fa.attention(q, q, q, scale=0.77)
    assert tuple(kernel is not None for kernel in latest().kernels) == kinds


# --- plans that serve later calls -----------------------------------------------------------------


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout at another address."""
    return tensor.clone(memory_format=torch.preserve_format)


@ON_ANY
def test_equal_dense_calls_have_one_plan_wherever_their_tensors_are(target: str | None) -> None:
    dtype = torch.float32 if target is None else torch.bfloat16
    q, k, v = (torch.randn(2, h, n, 64).to(dtype) for h, n in ((4, 5), (2, 30), (2, 30)))
    kv_len, offsets = torch.tensor([30, 17]), torch.tensor([25, 12])

    def call(*tensors: torch.Tensor, **change: Any) -> torch.Tensor:
        given = {"kv_len": kv_len, "q_offset": offsets, "scale": 0.31, **change}
        return fa.attention(*tensors, fa.SlidingWindow(9), target=target, **given)

    first = call(q, k, v)
    others = [elsewhere(t) for t in (q, k, v)]
    assert {t.data_ptr() for t in others}.isdisjoint(t.data_ptr() for t in (q, k, v))
    with planning(0):
        assert torch.equal(call(q, k, v), first)
        assert torch.equal(call(*others), first)
        assert torch.equal(call(q, k, v, kv_len=kv_len.int(), q_offset=elsewhere(offsets)), first)
        call(q, k, v, scale=0.5)
        assert not torch.equal(call(torch.randn_like(q), k, v), first)
    for change in ({"kv_len": torch.tensor([30, 18])}, {"q_offset": 3}, {"return_lse": True}):
        with planning(1):
            call(q, k, v, **change)
        with planning(0):
            call(*others, **change)
    for tensors in ((q[:, :, :4], k, v), (q, k.transpose(0, 1).contiguous().transpose(0, 1), v)):
        with planning(1):
            call(*tensors)
    out = torch.empty_like(q)
    with planning(1):
        call(q, k, v, out=out)
    with planning(0):
        call(*others, out=elsewhere(out))
    assert torch.equal(out, first)


def test_equal_packed_calls_have_one_plan() -> None:
    q, k = torch.randn(9, 2, 16), torch.randn(40, 2, 16)
    starts = torch.tensor([0, 1, 9]), torch.tensor([0, 30, 40])

    def call(*lengths: torch.Tensor, **change: Any) -> torch.Tensor:
        return fa.varlen_attention(q, k, k, *lengths, fa.Causal(), scale=0.29, **change)

    first = call(*starts)
    with planning(0):
        assert torch.equal(call(*map(elsewhere, starts)), first)
        assert torch.equal(call(*starts, max_q_len=8), first)
    starts[1][1] = 12  # the same tensor with another value
    with planning(1):
        assert not torch.equal(call(*starts), first)


def test_values_of_params_make_a_plan_where_the_mask_is_costed_by_them() -> None:
    q = torch.randn(1, 2, 40, 24)
    fa.attention(q, q, q, fa.SoftCap(cap=4.0))
    with planning(0):
        fa.attention(q, q, q, fa.SoftCap(cap=5.0))
    fa.attention(q, q, q, fa.SlidingWindow(4))
    with planning(1):
        fa.attention(q, q, q, fa.SlidingWindow(5))
    with planning(0):
        fa.attention(q, q, q, fa.SlidingWindow(4))


# --- block masks ----------------------------------------------------------------------------------

BLOCK = (40, 48)


def masked(states: torch.Tensor, q_len: int, target: str | None) -> tuple[torch.Tensor, Variation]:
    """A call of 4 heads over 2 kv heads with a block mask, and its plan."""
    generator = torch.Generator().manual_seed(q_len)
    dtype = torch.float32 if target is None else torch.bfloat16
    q, k, v = (
        torch.randn(2, h, n, 64, generator=generator).to(dtype)
        for h, n in ((4, q_len), (2, 170), (2, 170))
    )
    out, _ = run_dense(
        q, k, v, fa.Causal(), {}, block_states=states, block_size=BLOCK, q_offset=90, target=target
    )
    return out, latest()


@pytest.mark.by_turns(3)
@ON_ANY
@pytest.mark.parametrize("q_len", [130, 3])
def test_heads_share_tiles_where_they_visit_the_same_blocks(q_len: int, target: str | None) -> None:
    blocks = (-(-q_len // BLOCK[0]), -(-170 // BLOCK[1]))
    generator = torch.Generator().manual_seed(5)
    one = torch.randint(0, 3, (2, 1, *blocks), generator=generator, dtype=torch.uint8)
    shared, of_each = one.expand(2, 4, *blocks), one.expand(2, 4, *blocks).contiguous()
    found = []
    for states, heads in ((shared, 2), (of_each, 1)):
        out, variation = masked(states, q_len, target)
        found.append(out)
        items = [item for kind in (0, 1) for item in work(variation.native, kind)]
        assert {item["head_count"] for item in items} == {heads}
        for item in items:
            ends = (item["row_begin"] // heads, (item["row_end"] - 1) // heads)
            assert ends[0] // BLOCK[0] == ends[1] // BLOCK[0], "rows of two blocks"
    torch.testing.assert_close(*found, rtol=2e-2 if target else 1e-5, atol=2e-2 if target else 1e-5)


def test_every_key_of_a_block_mask_is_planned_for() -> None:
    """Full blocks are visited whatever the mask keeps, so the mask is not used to plan them."""
    states = torch.full((2, 1, 4, 4), 2, dtype=torch.uint8).expand(2, 4, 4, 4)
    out, variation = masked(states, 130, None)
    assert not variation.classified
    assert all((i["kv_begin"], i["kv_end"]) == (0, 170) for i in work(variation.native, 0))
    generator = torch.Generator().manual_seed(130)
    q, k, v = (torch.randn(2, h, n, 64, generator=generator)
               for h, n in ((4, 130), (2, 170), (2, 170)))  # fmt: skip
    torch.testing.assert_close(out, fa.attention(q, k, v), rtol=1e-5, atol=1e-5)


# --- memory ---------------------------------------------------------------------------------------


def test_the_newest_entries_stay_as_far_as_their_sizes_go() -> None:
    kept: Recent[object, str] = Recent(100)
    for i in range(10):
        assert kept.keep(i, str(i), 30) == str(i)
    assert list(kept) == [7, 8, 9]
    kept.keep(9, "nine", 50)
    assert kept == {8: "8", 9: "nine"}
    kept.keep("alone", "", 1000)
    assert list(kept) == ["alone"]
    kept.clear()
    for i in range(2):
        kept.keep(i, str(i), 50)
    assert list(kept) == [0, 1]


def test_calls_of_many_requests_are_evicted_sooner() -> None:
    count = 900
    q, starts = torch.randn(count, 1, 8), torch.arange(count + 1)
    for i in range(2 * KEPT_SIZE // count):
        kv = starts + i * (starts == count)
        k = torch.randn(count + i, 1, 8)
        fa.varlen_attention(q, k, k, starts, kv)
    for kept in (calls._requests.values(), launches._launches):
        assert [x.lengths.num_requests for x in kept] == [count] * (KEPT_SIZE // (64 + count))
