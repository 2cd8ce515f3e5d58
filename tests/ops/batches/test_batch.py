"""plan() and run(): storages and sparsities in pairs, params, plans after plans, shared memory.

The lists of shapes at full size, and every variant through every format, are in tests/batch.
"""

from __future__ import annotations

import gc
import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import _C
from flashattn_jit.variants.reference import varlen_reference
from tests.batch.batches import Batch, indptr, share_prefix
from tests.batch.oracle import Math, check
from tests.batch.sparse import Visited, blocks, tokens, trees
from tests.harness import rotation
from tests.harness.toolkit import needs_nvcc
from tests.ops.batches.mixed_batches import MIXED, SLOPES, WIDTH, Windowed, made_for, mixed

TARGETS = ("cpu", pytest.param("emulated:sm_80", marks=needs_nvcc))
SPARSITIES = {
    "none": lambda b: None,
    "blocks": lambda b: blocks(b, (16, 8), 0.5),
    "blocks of one key": lambda b: blocks(b, (3, 1), 0.3, per_head=True),
    "bits": lambda b: blocks(b, (16, 16), 0.5, per_head=True, bits=True),
    "tokens": lambda b: tokens(b, 24, per_head=True),
    "tree": trees,
}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("name", "page_size"), list(itertools.product(SPARSITIES, (0, 16))))
def test_any_storage_with_any_sparsity(name: str, page_size: int) -> None:
    any_storage_with_any_sparsity(name, page_size, "cpu")


@pytest.mark.by_turns(3)
@needs_nvcc
@pytest.mark.parametrize(
    ("name", "page_size"), rotation.chosen(list(itertools.product(SPARSITIES, (0, 16))), 3)
)
def test_any_storage_with_any_sparsity_on_cuda(name: str, page_size: int) -> None:
    any_storage_with_any_sparsity(name, page_size, "emulated:sm_80")


def any_storage_with_any_sparsity(name: str, page_size: int, target: str) -> None:
    b = mixed(target, page_size)
    visited: Visited | None = SPARSITIES[name](b)
    what = Math(causal=name != "tree")
    batch = made_for(b, what.variant(4), target)
    batch.plan(b.q_indptr, b.storage, sparsity=visited.sparsity if visited else None)
    out, lse = batch.run(b.q, b.k, b.v, return_lse=True)
    check(b, what, out, lse, seen=visited.seen if visited else None)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_lengths_of_both_integer_types_in_any_memory(kind: torch.dtype) -> None:
    b = mixed(page_size=16)
    batch = made_for(b, fa.Causal())
    batch.plan(b.q_indptr, b.storage)
    expected = batch.run(b.q, b.k, b.v)
    assert isinstance(b.storage, fa.Paged)

    def apart(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.to(kind), x.to(kind)], 1)[:, 0]

    storage = fa.Paged(
        apart(b.storage.page_indptr), apart(b.storage.page_indices),
        apart(b.storage.last_page_len), 16,
    )  # fmt: skip
    batch.plan(apart(b.q_indptr), storage)
    assert torch.equal(batch.run(b.q, b.k, b.v), expected)


def test_one_plan_serves_every_layer_and_every_layout() -> None:
    b = mixed(page_size=16)
    batch = made_for(b, fa.Causal())
    batch.plan(b.q_indptr, b.storage)
    for layout in ("pages", "heads first", "halves", "layers", "mixed"):
        layer = mixed(page_size=16, layout=layout, seed=0)
        out, lse = batch.run(layer.q, layer.k, layer.v, return_lse=True)
        check(layer, Math(causal=True), out, lse)


def test_runs_plan_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    b = mixed(page_size=16)
    batch = made_for(b, fa.Causal())
    batch.plan(b.q_indptr, b.storage)
    for name in ("BatchLengths", "BatchPlan", "BatchCall"):
        monkeypatch.setattr(_C, name, None)
    for layout in ("pages", "heads first"):
        layer = mixed(page_size=16, layout=layout, seed=0)
        out, lse = batch.run(layer.q, layer.k, layer.v, return_lse=True)
        check(layer, Math(causal=True), out, lse)


class OnDevice(torch.Tensor):
    """A tensor whose values the host may not read, since for a device tensor that is a sync."""

    READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__",
             "nonzero", "unique", "equal", "is_nonzero", "repeat_interleave")  # fmt: skip

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__ not in cls.READS, f"plan() waits for a device in {func.__name__}"
        return super().__torch_function__(func, types, args, kwargs or {})


@needs_nvcc
@pytest.mark.parametrize(
    ("name", "cuda_graph"),
    rotation.chosen(
        list(itertools.product([*SPARSITIES, "cascade"], (False, True))), 4, lambda case: case[1]
    ),
)
def test_plans_read_nothing_of_a_device(
    name: str, cuda_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHATTN_JIT_CHECK_PAGES", "0")
    b = mixed("emulated:sm_80", 16)
    visited = None if name == "cascade" else SPARSITIES[name](b)
    sparsity = visited and visited.sparsity
    if name == "tree":
        sparsity = fa.Tree(torch.stack([torch.eye(20, dtype=torch.bool)] * 5))
    if name == "cascade":
        share_prefix(b, 16, (0, 1, 3))

    def placed(value: Any) -> Any:
        return value if value is None else value.as_subclass(OnDevice)

    def on_device(paged: Any) -> Any:
        return replace(paged, page_indices=placed(paged.page_indices))

    if isinstance(sparsity, fa.Tree):
        sparsity = fa.Tree(placed(sparsity.bits))
    elif sparsity is not None:
        sparsity = replace(sparsity, indices=placed(sparsity.indices))
        if isinstance(sparsity, fa.BlockSparse):
            sparsity = replace(sparsity, bits=placed(sparsity.bits))
    limits = fa.Limits(max_requests=6, max_q_tokens=40, max_kv_len=128, max_pages=32)
    options = {**b.options(), "target": "emulated:sm_80", "cuda_graph": cuda_graph}
    variant = None if name == "tree" else fa.Causal()
    cls = fa.CascadeAttention if name == "cascade" else fa.BatchAttention
    batch: Any = cls(variant, **options, limits=limits if cuda_graph else None)
    for _ in range(2):
        if name == "cascade":
            levels = fa.cascade_levels(b.q_indptr, b.storage)
            batch.plan([replace(level, storage=on_device(level.storage)) for level in levels])
        else:
            batch.plan(b.q_indptr, on_device(b.storage), sparsity=sparsity)


# --- params ---------------------------------------------------------------------------------------


def reference(b: Batch, variant: Any, **params: Any) -> torch.Tensor:
    call = (b.q, *b.packed_keys(), b.q_indptr, indptr(b.kv_len), variant)
    return varlen_reference(*call, params=params)[0]


@pytest.mark.parametrize("page_size", [0, 8])
def test_runs_take_new_values_of_their_params_and_keep_those_of_the_mask(page_size: int) -> None:
    b = mixed(page_size=page_size)
    batch = made_for(b, Windowed())
    batch.plan(b.q_indptr, b.storage, width=WIDTH, extra=3)
    for slopes, gain in ((SLOPES, 1.0), (2 * SLOPES, 0.5)):
        out = batch.run(b.q, b.k, b.v, slopes=slopes, gain=gain)
        expected = reference(b, Windowed(), width=WIDTH, extra=3, slopes=slopes, gain=gain)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    batch.plan(b.q_indptr, b.storage, width=2 * WIDTH)
    out = batch.run(b.q, b.k, b.v, slopes=SLOPES)
    expected = reference(b, Windowed(), width=2 * WIDTH, slopes=SLOPES)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_number_that_the_mask_captures_is_that_of_the_plan() -> None:
    window = 7

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx < window) & (kv_idx <= q_idx)

    b = mixed()
    batch = made_for(b, mask_mod)
    batch.plan(b.q_indptr, b.storage)
    expected = reference(b, mask_mod)
    window = 20
    out = batch.run(b.q, b.k, b.v)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    batch.plan(b.q_indptr, b.storage)
    again = batch.run(b.q, b.k, b.v)
    torch.testing.assert_close(again.double(), reference(b, mask_mod), rtol=1e-5, atol=1e-5)
    assert not torch.equal(out, again)


def test_params_of_another_dtype_or_layout_are_planned_for_once() -> None:
    b = mixed(page_size=8)
    batch = made_for(b, Windowed())
    batch.plan(b.q_indptr, b.storage, width=WIDTH)
    for slopes in (SLOPES.half(), SLOPES.repeat_interleave(2)[::2], SLOPES):
        out = batch.run(b.q, b.k, b.v, slopes=slopes)
        expected = reference(b, Windowed(), width=WIDTH, slopes=slopes.float())
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    # The next plan expects what the runs gave.
    batch.plan(b.q_indptr, b.storage, width=WIDTH)
    batch.run(b.q, b.k, b.v, slopes=SLOPES.half())
    assert batch._planned is not None and len(batch._planned.variations) <= 2


@needs_nvcc
def test_tensors_that_are_not_aligned_get_kernels_of_their_own() -> None:
    b = mixed("emulated:sm_80", 16)
    batch = made_for(b, fa.Causal(), "emulated:sm_80")
    batch.plan(b.q_indptr, b.storage)
    expected = batch.run(b.q, b.k, b.v)
    wide = torch.zeros(b.q.shape[0], 4, 65, dtype=b.q.dtype)
    wide[..., 1:] = b.q
    check(b, Math(causal=True), batch.run(wide[..., 1:], b.k, b.v), None)
    assert torch.equal(batch.run(b.q, b.k, b.v), expected)
    batch.plan(b.q_indptr, b.storage)
    check(b, Math(causal=True), batch.run(wide[..., 1:], b.k, b.v), None)


# --- results --------------------------------------------------------------------------------------


def test_results_of_the_callers_and_states_of_parts() -> None:
    b = mixed(page_size=16)
    batch = made_for(b, fa.Causal() & fa.Sink(sink=torch.linspace(-1, 1, 4)))
    batch.plan(b.q_indptr, b.storage)
    expected, expected_lse = batch.run(b.q, b.k, b.v, return_lse=True)
    wide = torch.full((25, 4, 80), 7.0)
    out = batch.run(b.q, b.k, b.v, out=wide[..., :64])
    assert out is not wide and torch.equal(out, expected) and bool((wide[..., 64:] == 7).all())
    state, lse = batch.run(b.q, b.k, b.v, partial=True)
    assert state.dtype == lse.dtype == torch.float32
    assert not torch.equal(lse, expected_lse)  # a state is before its sink
    scaled = batch.run(b.q, b.k, b.v, scale=0.125)
    assert torch.equal(scaled, expected)


@pytest.mark.parametrize("target", TARGETS)
def test_objects_share_a_workspace_that_is_as_large_as_their_plans(target: str) -> None:
    """Layers of two kinds alternate; they use all bytes of the workspace and none past its end."""
    b = Batch((1,), (5000 if target == "cpu" else 700,), (2, 1), 64,
              torch.float32 if target == "cpu" else torch.bfloat16, 16)  # fmt: skip
    variants = fa.Causal(), None
    free = [made_for(b, variant, target) for variant in variants]
    needed = {batch.plan(b.q_indptr, b.storage).workspace_bytes for batch in free}
    assert len(needed) == 1
    (size,) = needed
    assert size > 0 or torch.get_num_threads() == 1
    memory = torch.full((size + 512,), 255, dtype=torch.uint8)  # NaN
    begin = -memory.data_ptr() % 128
    workspace = memory[begin : begin + size]
    both = [made_for(b, variant, target, workspace=workspace) for variant in variants]
    for batch in both:
        assert batch.plan(b.q_indptr, b.storage).workspace_bytes == size
    for batch, other in [*zip(both, free, strict=True)] * 2:
        assert torch.equal(batch.run(b.q, b.k, b.v), other.run(b.q, b.k, b.v))
    assert not size or bool((workspace.view(torch.int32)[[0, -1]] != -1).all())
    memory[begin : begin + size] = 255
    assert bool((memory == 255).all())


# --- plans after plans ----------------------------------------------------------------------------


def test_limits_bound_the_workspace_of_every_plan() -> None:
    limits = fa.Limits(max_requests=8, max_q_tokens=300, max_kv_len=6000, max_pages=3000)
    options = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "q_dtype": torch.float32}
    bound = fa.BatchAttention(fa.Causal(), **options).workspace_bytes(limits)
    batch = fa.BatchAttention(fa.Causal(), **options, limits=limits)
    assert batch.workspace_bytes() == bound
    for lengths in (MIXED, ((1,), (6000,)), ((300,), (6000,)), ((1,) * 8, (5000,) * 8), ((), ())):
        b = Batch(*lengths, (4, 2), 64, page_size=16)
        plan = batch.plan(b.q_indptr, b.storage)
        assert plan.workspace_bytes <= bound
        free = fa.BatchAttention(fa.Causal(), **options)
        assert free.plan(b.q_indptr, b.storage).workspace_bytes <= plan.workspace_bytes
        check(b, Math(causal=True), *batch.run(b.q, b.k, b.v, return_lse=True))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", [*SPARSITIES, "cascade"])
def test_limits_bound_the_workspace_of_every_format(name: str, invariant: bool) -> None:
    """The bound holds for plans with the limits and for the same plans without them."""
    limits = fa.Limits(max_requests=5, max_q_tokens=48, max_kv_len=5000, max_pages=1000)
    options: dict[str, Any] = {"batch_invariant": invariant}
    for lengths in (MIXED, ((1,), (5000,)), ((2, 1, 3), (3000, 4097, 70)), ((40,), (300,))):
        b = Batch(*lengths, (4, 2), 64, page_size=16)
        sized: dict[str, Any] = {}
        if name == "cascade":
            if len(lengths[0]) == 3:
                share_prefix(b, 64)
            levels = fa.cascade_levels(b.q_indptr, b.storage)
            given: tuple[tuple[Any, ...], dict[str, Any]] = ((levels,), {})
            sized["num_levels"] = len(levels) - 1
        else:
            visited = SPARSITIES[name](b)
            given = ((b.q_indptr, b.storage), {"sparsity": visited and visited.sparsity})
            if "blocks" in name or name == "bits":
                sized["q_block"] = visited.sparsity.block_size[0]
            elif name == "tokens":
                sized["q_block"] = 1
        cls = fa.CascadeAttention if name == "cascade" else fa.BatchAttention
        variant = None if name == "tree" else fa.Causal()
        free, made = (cls(variant, **b.options(), **options, limits=x) for x in (None, limits))
        needed = free.plan(*given[0], **given[1]).workspace_bytes
        fixed = made.plan(*given[0], **given[1]).workspace_bytes
        assert needed <= fixed <= made.workspace_bytes(**sized)
        assert made.workspace_bytes(**sized) == free.workspace_bytes(limits, **sized)


def test_storage_and_sparsity_change_from_plan_to_plan() -> None:
    b, ragged = mixed(page_size=16), mixed()
    batch = made_for(b, fa.Causal())
    for storage, sparsity in ((16, None), (0, None), (16, "bits"), (0, "tokens"), (16, None)):
        of = b if storage else ragged
        visited = SPARSITIES[sparsity](of) if sparsity else None
        batch.plan(of.q_indptr, of.storage, sparsity=visited.sparsity if visited else None)
        out = batch.run(of.q, of.k, of.v)
        check(of, Math(causal=True), out, None, seen=visited.seen if visited else None)


def test_plans_hold_what_they_read() -> None:
    b = mixed(page_size=16)
    batch = made_for(b, fa.Causal())
    batch.plan(b.q_indptr, b.storage)
    expected = batch.run(b.q, b.k, b.v)
    storage = b.storage
    assert isinstance(storage, fa.Paged)
    batch.plan(
        b.q_indptr.clone(),
        fa.Paged(storage.page_indptr.clone(), storage.page_indices.long(),
                 storage.last_page_len.clone(), 16),
    )  # fmt: skip
    gc.collect()
    _ = [torch.full((11,), -1, dtype=torch.int32) for _ in range(64)]  # takes freed memory
    assert torch.equal(batch.run(b.q, b.k, b.v), expected)


def test_threads_run_one_plan() -> None:
    b = Batch((1, 1), (3000, 100), (2, 1), 64, page_size=16)
    batch = made_for(b, fa.Causal())
    batch.plan(b.q_indptr, b.storage)
    expected, wrong = batch.run(b.q, b.k, b.v), []

    def work() -> None:
        for _ in range(20):
            if not torch.equal(batch.run(b.q, b.k, b.v), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_nvcc
def test_a_fixed_batch_keeps_what_its_first_plan_fixed() -> None:
    b = mixed("emulated:sm_80", 16)
    limits = fa.Limits(max_requests=6, max_q_tokens=40, max_kv_len=128, max_pages=32)
    batch = made_for(
        b, fa.SlidingWindow(), "emulated:sm_80", limits=limits, cuda_graph=True
    )  # fmt: skip
    batch.plan(b.q_indptr, b.storage, window=20)
    # As under a CUDA graph: tensors of the largest batch.
    q = torch.zeros(40, 4, 64, dtype=b.q.dtype)
    q[:25] = b.q
    out = batch.run(q, b.k, b.v)
    check(b, Math(window=20), out[:25], None)
    with pytest.raises(fa.InputError, match="the mask reads: window was 20, is now 21; make"):
        batch.plan(b.q_indptr, b.storage, window=21)
    ragged = mixed("emulated:sm_80")
    with pytest.raises(fa.InputError, match="first plan fixes the storage's page_size"):
        batch.plan(ragged.q_indptr, ragged.storage, window=20)
    with pytest.raises(fa.InputError, match="first plan fixes the kind of sparsity"):
        batch.plan(b.q_indptr, b.storage, window=20, sparsity=trees(b).sparsity)
    # The refused plans changed nothing.
    check(b, Math(window=20), batch.run(q, b.k, b.v)[:25], None)
    other = Batch((2, 1), (100, 30), (4, 2), 64, b.q.dtype, 16)
    batch.plan(other.q_indptr, other.storage, window=20)
    q[:3] = other.q
    check(other, Math(window=20), batch.run(q, other.k, other.v)[:3], None)


@needs_nvcc
def test_lists_of_another_form_leave_a_fixed_plan_as_it_is() -> None:
    limits = fa.Limits(max_requests=2, max_q_tokens=32, max_kv_len=64, max_pages=8)
    b = Batch((32,), (64,), (4, 2), 64, torch.bfloat16, 16)
    batch = made_for(b, None, "emulated:sm_80", limits=limits, cuda_graph=True)
    two = torch.tensor([1, 3], dtype=torch.int32)
    batch.plan(
        b.q_indptr, b.storage, sparsity=fa.BlockSparse(torch.tensor([0, 1, 2]), two, (16, 16))
    )
    expected = batch.run(b.q, b.k, b.v)
    assert isinstance(b.storage, fa.Paged)
    moved = fa.Paged(b.storage.page_indptr, b.storage.page_indices.flip(0).contiguous(),
                     b.storage.last_page_len, 16)  # fmt: skip
    wider = fa.BlockSparse(torch.tensor([0, 2]), two.flip(0).contiguous(), (32, 16))
    with pytest.raises(
        fa.InputError, match="first plan fixes the form of the key lists: it has bl"
    ):
        batch.plan(b.q_indptr, moved, sparsity=wider)
    assert torch.equal(batch.run(b.q, b.k, b.v), expected)


REPLAYED = (
    ((30, 20), (50, 160)), ((1, 1, 1), (90, 160, 3)), ((1, 40, 0, 2), (7, 40, 9, 100)),
    ((), ()), ((1,), (0,)), ((64,), (64,)),
)  # fmt: skip
"""Batches of many rows, few rows, both and none, within the limits below."""
LARGEST_BITS = {
    "bits": [((60, 1, 1, 1, 1), (160, 90, 64, 64, 64))], "tree": [((64, 0, 0, 0, 0), (160,) * 5)],
}  # fmt: skip


@pytest.mark.by_turns(3)
@needs_nvcc
@pytest.mark.parametrize("name", rotation.chosen([*SPARSITIES, "cascade"], 3))
def test_a_captured_run_replays_plans_of_any_kind(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launches of the first run are replayed unchanged for later plans, with other lengths of
    lists and other numbers of levels. The first plan fixes the memory for bits."""
    from flashattn_jit.ops.device import plan_memory
    from flashattn_jit.ops.device.emulated import record

    recorded = []

    def recording(*arguments: Any) -> None:
        recorded.append(record(*arguments))
        recorded[-1].replay()

    monkeypatch.setattr(plan_memory, "launch", recording)
    limits = fa.Limits(max_requests=5, max_q_tokens=64, max_kv_len=160, max_pages=50)
    options = {"limits": limits, "cuda_graph": True, "target": "emulated:sm_80"}
    made: Any = None
    dtype, what = torch.bfloat16, Math(causal=name != "tree")
    q, out = torch.zeros(64, 4, 64, dtype=dtype), torch.zeros(64, 4, 64, dtype=dtype)
    k, v = (torch.full((64, 16, 2, 64), torch.nan, dtype=dtype) for _ in range(2))
    for lengths in (*LARGEST_BITS.get(name, ()), *REPLAYED):
        if name == "tree" and lengths == ((1,), (0,)):
            continue  # a draft token without its own key
        b = Batch(*lengths, (4, 2), 64, dtype, 16, seed=len(lengths[0]))
        cls = fa.CascadeAttention if name == "cascade" else fa.BatchAttention
        made = made or cls(what.variant(4), **{**b.options(), **options})
        visited = None
        # As in a serving engine: the buffer of page indices is longer than the batch needs.
        pages = torch.cat([b.storage.page_indices, torch.full((99,), -1, dtype=torch.int32)])
        b.storage = replace(b.storage, page_indices=pages)
        if name == "cascade":
            if lengths is REPLAYED[0]:
                share_prefix(b, 32)
            made.plan(fa.cascade_levels(b.q_indptr, b.storage))
        else:
            visited = SPARSITIES[name](b)
            made.plan(b.q_indptr, b.storage, sparsity=visited and visited.sparsity)
        count = b.q.shape[0]
        q[:count], k[: b.k.shape[0]], v[: b.v.shape[0]] = b.q, b.k, b.v
        out.fill_(torch.nan)
        if not recorded:
            made.run(q, k, v, out=out)
        else:
            recorded[0].replay()
        check(b, what, out[:count], None, seen=visited.seen if visited else None)
        assert out[count:].isnan().all(), "rows past the batch are written"
    assert len(recorded) == 1
