"""_C.BatchCall: every row is computed on any number of threads; wrong arguments are refused."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch

from flashattn_jit import _C
from tests.planner.batch_plans import device_block

Strides = tuple[int, int, int]
LISTS = (1, 2, 5, 40)  # work lists; 40 is more than the counters that are kept on the stack


def array(values: Sequence[int]) -> tuple[tuple[int, int, int], torch.Tensor]:
    """The native view of a host array, and the tensor that keeps it alive."""
    tensor = torch.tensor(values, dtype=torch.int32)
    return (tensor.data_ptr(), tensor.numel(), 4), tensor


def indptr(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def ragged(q_len: Sequence[int], kv_len: Sequence[int]) -> _C.BatchLengths:
    rows, _held = array(indptr(q_len))
    keys, _also = array(indptr(kv_len))
    return _C.BatchLengths(rows, (keys, None, None, 0, 0))


def paged(q_len: Sequence[int], kv_len: Sequence[int], size: int) -> _C.BatchLengths:
    pages = [-(-n // size) for n in kv_len]
    rows, _held = array(indptr(q_len))
    starts, _also = array(indptr(pages))
    last, _too = array([(n - 1) % size + 1 if n else 0 for n in kv_len])
    return _C.BatchLengths(rows, (None, starts, last, size, sum(pages)))


@dataclass
class Batch:
    """A planned batch on the minimal artifact: out = scale * q[..., 0] * the number of splits."""

    module: _C.Module
    q_len: Sequence[int]
    kv_len: Sequence[int]
    heads: tuple[int, int] = (4, 2)
    dim: int = 8
    workers: int = 2
    limits: tuple[int, int, int, int] | None = None
    page_size: int = 0
    few_rows: int = 8

    def __post_init__(self) -> None:
        size = self.page_size
        self.lengths = (
            paged(self.q_len, self.kv_len, size) if size else ragged(self.q_len, self.kv_len)
        )
        kind = _C.Kind(self.module, 8, 1, 16, 16, 500.0, 1.0, 2.0, 20.0)
        self.plan = _C.BatchPlan(
            self.lengths,
            (kind, kind),
            _C.PlanOptions(
                num_q_heads=self.heads[0], num_kv_heads=self.heads[1], head_dim_v=self.dim,
                few_rows=self.few_rows, num_workers=(self.workers,) * 2, share_workers=True,
                limits=self.limits,
            ),
        )  # fmt: skip
        self.core = self.call_on(self.plan)

    def call_on(self, plan: _C.BatchPlan, lengths: Any = None, **change: Any) -> _C.BatchCall:
        shape = {
            "num_q_heads": self.heads[0], "num_kv_heads": self.heads[1], "head_dim": self.dim,
            "head_dim_v": self.dim,
        }  # fmt: skip
        return _C.BatchCall(
            plan, lengths or self.lengths, (self.module, self.module), **{**shape, **change}
        )

    def strides(self, q: torch.Tensor) -> tuple[Strides, Strides, Strides, Strides, Strides]:
        rows = (0, q.stride(1), q.stride(0))
        return rows, rows, rows, rows, (0, 1, self.heads[0])

    def run(self, threads: int, flags: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q, out, lse) of a run with random queries; elements that are not written stay NaN."""
        q = torch.randn(sum(self.q_len), self.heads[0], self.dim)
        out = torch.full_like(q, torch.nan)
        lse = torch.full(q.shape[:2], torch.nan)
        call = self.core.bind(strides=self.strides(q), flags=flags)
        workspace = torch.full((max(call.workspace_bytes, 1),), 255, dtype=torch.uint8)
        address = q.data_ptr()
        call.launch(
            address, address, address, out.data_ptr(), lse.data_ptr(), 0.5, threads,
            workspace=workspace.data_ptr(),
        )  # fmt: skip
        return q, out, lse

    def parts(self) -> torch.Tensor:
        """[Nq, Hq]: the number of partial states that the plan makes of each row."""
        count = torch.zeros(sum(self.q_len), self.heads[0])
        starts = indptr(self.q_len)
        for kind in (0, 1):
            for item in struct.iter_unpack("8i", self.plan.work(kind)):
                request, head, heads, begin, end = item[:5]
                for row in range(begin, end):
                    count[starts[request] + row // heads, head + row % heads] += 1
        return count


MIXED = ([1, 30, 0, 2, 1, 17, 1], [300, 40, 9, 0, 1500, 17, 64])


@pytest.mark.parametrize("workers", LISTS)
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_row_is_computed_whatever_the_lists_and_the_threads(
    minimal_module: _C.Module, workers: int, threads: int
) -> None:
    batch = Batch(minimal_module, *MIXED, workers=workers)
    parts = batch.parts()
    assert parts.min() == 1
    if workers == 40:
        assert parts.max() > 1
        assert batch.core.workspace_bytes == batch.plan.workspace_bytes > 0
    q, out, _ = batch.run(threads)
    torch.testing.assert_close(out, (0.5 * q[..., :1] * parts[..., None]).expand_as(out))


def test_lengths_and_strides_reach_the_kernel(minimal_module: _C.Module) -> None:
    batch = Batch(minimal_module, [3, 1], [5, 7], workers=1)
    _, _, lse = batch.run(2, _C.WRITE_LSE)
    assert lse.tolist() == [[5.0] * 4] * 3 + [[7.0] * 4]


def test_a_thread_without_memory_leaves_its_work_to_the_others(minimal_module: _C.Module) -> None:
    batch = Batch(minimal_module, *MIXED, dim=15, workers=3)
    q, out, _ = batch.run(3)
    expected = 0.5 * q[..., :1] * batch.parts()[..., None]
    torch.testing.assert_close(out, expected.expand_as(out))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("dim", "error"), [(13, ValueError), (14, MemoryError)])
def test_a_kernels_refusal_is_an_error(
    minimal_module: _C.Module, dim: int, error: type[Exception], threads: int
) -> None:
    with pytest.raises(error):
        Batch(minimal_module, *MIXED, dim=dim).run(threads)


def test_an_empty_batch_launches_nothing(minimal_module: _C.Module) -> None:
    for lengths in (((), ()), ((0, 0), (3, 0))):
        batch = Batch(minimal_module, *lengths)
        assert batch.core.workspace_bytes == 0
        batch.core.bind(strides=((0, 0, 0),) * 5).launch(0, 0, 0, 0, 0, 1.0, 2)
    none = _C.BatchCall(
        batch.plan, batch.lengths, (None, None), num_q_heads=4, num_kv_heads=2, head_dim=8,
        head_dim_v=8,
    )  # fmt: skip
    none.bind(strides=((0, 0, 0),) * 5).launch(0, 0, 0, 0, 0, 1.0, 2)


def test_threads_may_share_a_call(minimal_module: _C.Module) -> None:
    batch = Batch(minimal_module, [1] * 64, [200] * 64, workers=2)
    errors: list[str] = []

    def run() -> None:
        for _ in range(30):
            q, out, _ = batch.run(2)
            if not torch.equal(out, (0.5 * q[..., :1]).expand_as(out)):
                errors.append("wrong")

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_params_and_flags_belong_to_the_bound_call(minimal_module: _C.Module) -> None:
    batch = Batch(minimal_module, [1], [4], workers=1)
    q, out, two = torch.ones(1, 4, 8), torch.empty(1, 4, 8), torch.tensor([2.0])
    call = batch.core.bind(
        strides=batch.strides(q), layouts=[((1,), (1,))], scalar_kinds="i", flags=_C.PARTIAL
    )
    address = q.data_ptr()
    arguments = (address, address, address, out.data_ptr(), 0, 1.0, 1)
    call.launch(*arguments, (two.data_ptr(),), (40,))
    assert (out == 43).all()
    with pytest.raises(ValueError, match="tensors must have 1 addresses"):
        call.launch(*arguments)
    with pytest.raises(ValueError, match="unknown bits"):
        batch.core.bind(strides=batch.strides(q), flags=8)
    with pytest.raises(ValueError, match="5 entries"):
        batch.core.bind(strides=batch.strides(q)[:4])


@pytest.mark.parametrize("missing", ["q", "k", "v", "out", "lse", "workspace"])
def test_a_null_tensor_is_refused(minimal_module: _C.Module, missing: str) -> None:
    batch = Batch(minimal_module, [1], [4000], workers=3)
    assert batch.core.workspace_bytes > 0
    call = batch.core.bind(strides=((0, 0, 0),) * 5, flags=_C.WRITE_LSE)
    names = ("q", "k", "v", "out", "lse", "workspace")
    with pytest.raises(ValueError, match=f"{missing} has address 0"):
        call.launch(**{**dict.fromkeys(names, 4096), missing: 0}, scale=1.0, num_threads=1)


def test_pages_need_their_indices(minimal_module: _C.Module) -> None:
    batch = Batch(minimal_module, [1], [40], page_size=16)
    call = batch.core.bind(strides=((0, 0, 0),) * 5, num_pages=9)
    with pytest.raises(ValueError, match="page_indices has address 0"):
        call.launch(8, 8, 8, 8, 8, 1.0, 1)


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        (([1, 30, 0, 2, 1, 17], [300, 40, 9, 0, 1500, 17]), "request 6 of num_requests=6"),
        (([1, 30, 0, 2, 1, 16, 1], [300, 40, 9, 0, 1500, 17, 64]), "rows .* packed rows"),
        (([1, 30, 0, 2, 1, 17, 1], [300, 40, 9, 0, 1400, 17, 64]), "keys .*1400"),
    ],
)
def test_a_plan_of_other_lengths_is_refused(
    minimal_module: _C.Module, lengths: tuple[list[int], list[int]], says: str
) -> None:
    batch = Batch(minimal_module, *MIXED)
    with pytest.raises(ValueError, match=says):
        batch.call_on(batch.plan, ragged(*lengths))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_kv_heads": 4}, "not of one kv head"),
        ({"num_q_heads": 2, "num_kv_heads": 1}, "heads .* of num_q_heads=2"),
        ({"num_kv_heads": 3}, "does not divide"),
        ({"head_dim": 0}, "head_dim=0 must be positive"),
        ({"key_block": 16, "num_key_blocks": 20}, "keys .*320"),
        ({"key_block": -1}, "negative"),
    ],
)
def test_a_shape_that_the_plan_is_not_for_is_refused(
    minimal_module: _C.Module, change: dict[str, int], says: str
) -> None:
    batch = Batch(minimal_module, *MIXED)
    with pytest.raises(ValueError, match=says):
        batch.call_on(batch.plan, **change)


def test_work_needs_a_module(minimal_module: _C.Module) -> None:
    batch = Batch(minimal_module, *MIXED)
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "head_dim_v": 8}
    for kind, modules in enumerate(((None, minimal_module), (minimal_module, None))):
        name = ("prefill", "few-row")[kind]
        with pytest.raises(ValueError, match=f"the plan has {name} work, but there is no module"):
            _C.BatchCall(batch.plan, batch.lengths, modules, **shape)


# --- the device block -----------------------------------------------------------------------------

LIMITS = (8, 64, 4096, 0)


def test_blocks_of_all_plans_within_limits_have_one_size(minimal_module: _C.Module) -> None:
    plans = [
        Batch(minimal_module, *lengths, workers=3, limits=LIMITS)
        for lengths in (MIXED, ([], []), ([64], [4096]), ([1] * 8, [1, 4096] * 4))
    ]
    assert len({batch.core.block_bytes for batch in plans}) == 1
    assert len({batch.core.workspace_bytes for batch in plans}) == 1
    blocks = [device_block(batch.core) for batch in plans]
    assert len(set(blocks)) == len(blocks)
    # Lengths come first, then work; items beyond those of the plan are padding.
    empty = struct.unpack(f"{len(blocks[1]) // 4}i", blocks[1])
    assert not any(empty[: 8 * 8])
    items = [empty[i : i + 8] for i in range(0, len(empty) - 7, 4)]
    assert (-1, 0, 0, 0, 0, 0, 0, -1) in items
    assert (-1, 0, 0, 0, 0, 0, 0, 0) in items


def test_a_block_is_written_where_there_is_room(minimal_module: _C.Module) -> None:
    core = Batch(minimal_module, *MIXED).core
    memory = torch.full((core.block_bytes + 1,), 7, dtype=torch.uint8)
    core.write_block(memory.data_ptr(), core.block_bytes)
    assert memory[:-1].numpy().tobytes() == device_block(core)
    assert memory[-1] == 7
    with pytest.raises(ValueError, match="are written"):
        core.write_block(memory.data_ptr(), core.block_bytes - 1)
    with pytest.raises(ValueError, match="address 0"):
        core.write_block(0, core.block_bytes)


def test_artifacts_of_cpus_have_no_launches_as_data(minimal_module: _C.Module) -> None:
    call = Batch(minimal_module, *MIXED).core.bind(strides=((0, 0, 0),) * 5)
    with pytest.raises(ValueError, match="no CUDA target"):
        call.plan_launches(8, 8, 8, 8, 8, 1.0, 1)


# --- time -----------------------------------------------------------------------------------------


def test_a_launch_costs_microseconds(minimal_module: _C.Module) -> None:
    batch = Batch(minimal_module, [1], [16], workers=2)
    q = torch.ones(1, 4, 8)
    call = batch.core.bind(strides=batch.strides(q))
    address = q.data_ptr()
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(500):
            call.launch(address, address, address, address, 0, 1.0, 2, (), ())
        best = min(best, (time.perf_counter() - start) / 500)
    assert best < 5e-6
