"""Batches on devices: the ring of pinned buffers, order between streams, replayed graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import _C
from flashattn_jit.errors import EmulatorFault, InputError, LaunchError
from flashattn_jit.jit.module import load_stepping
from flashattn_jit.ops.device import cuda, plan_memory
from flashattn_jit.ops.device.cuda import LaunchTensors
from flashattn_jit.ops.device.emulated import Recording, record
from flashattn_jit.ops.device.plan_memory import DeviceState, Ring, launch
from flashattn_jit.planner.tiles import build_request, kernels_by_rows
from flashattn_jit.variants.reference import attention_reference
from flashattn_jit.variants.variant import Dims
from tests.harness.stand_in_driver import StandIn, driver, stand_in_library  # noqa: F401
from tests.harness.toolkit import needs_nvcc

CPU, CUDA0 = torch.device("cpu"), torch.device("cuda", 0)

# --- the ring -------------------------------------------------------------------------------------


class Link:
    """A link to a device whose copies happen in `proceed`, oldest first."""

    def __init__(self) -> None:
        self.allocated: list[torch.Tensor] = []
        self.waiting: list[tuple[Callable[[], None], Done]] = []

    def allocate(self, size: int) -> torch.Tensor:
        self.allocated.append(torch.zeros(size, dtype=torch.uint8))
        return self.allocated[-1]

    def recorded(self) -> Done:
        return self.waiting[-1][1]

    def proceed(self, count: int) -> None:
        for copy, done in self.waiting[:count]:
            copy()
            done.passed = True
        del self.waiting[:count]


@dataclass
class Done:
    passed: bool = False

    def query(self) -> bool:
        return self.passed


class Target:
    """Device memory at the end of a link."""

    def __init__(self, link: Link, size: int) -> None:
        self.link, self.memory = link, torch.zeros(size, dtype=torch.uint8)

    def numel(self) -> int:
        return self.memory.numel()

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.link.waiting.append((lambda: self.memory.copy_(source), Done()))


def test_a_buffer_is_written_again_only_when_its_copy_has_arrived() -> None:
    link = Link()
    ring = Ring(link.allocate, link.recorded)
    targets = [Target(link, 100) for _ in range(7)]

    def send(i: int) -> None:
        ring.send(lambda host: host.fill_(i + 1), targets[i])  # type: ignore[arg-type]

    for i in range(3):
        send(i)
    assert len(ring) == 3  # all are on their way
    link.proceed(1)
    send(3)
    assert len(ring) == 3
    send(4)
    assert len(ring) == 4
    link.proceed(4)
    send(5)
    send(6)
    assert len(ring) == 4 == len(link.allocated)
    link.proceed(9)
    for i, target in enumerate(targets):
        assert (target.memory == i + 1).all()


def test_a_buffer_that_is_too_small_stays_for_smaller_plans() -> None:
    link = Link()
    ring = Ring(link.allocate, link.recorded)
    small, large = 100, 1 << 20
    for size in (small, large, small, large):
        ring.send(lambda host: host.fill_(1), Target(link, size))  # type: ignore[arg-type]
        link.proceed(1)
    assert len(ring) == 2
    assert [buffer.numel() >= large for buffer in link.allocated] == [False, True]


# --- streams of a fake device ---------------------------------------------------------------------


class Core:
    """The part of a native call that blocks are made of."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.launches: list[dict[str, Any]] = []

    @property
    def block_bytes(self) -> int:
        return len(self.content)

    def write_block(self, address: int, size: int) -> None:
        import ctypes

        assert size == len(self.content)
        ctypes.memmove(address, self.content, size)

    def launch(self, *values: Any, stream: int, device: int) -> None:
        self.launches.append({"block": values[13], "stream": stream, "device": device})


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, driver: StandIn) -> SimpleNamespace:  # noqa: F811
    """One device whose memory is the host's; `log` lists which stream waits for which, `modes` the
    capture mode of the thread at each query and allocation."""
    state = SimpleNamespace(current=1, capturing=False, log=[], modes=[], driver=driver)
    mode = lambda: driver.state()[2]  # noqa: E731

    class Event:
        def record(self, stream: Any = None) -> None:
            self.after = state.current

        def wait(self, stream: Any) -> None:
            state.log.append(f"{stream.cuda_stream} waits for {self.after}")

        def query(self) -> bool:
            state.modes.append(("query", mode()))
            return False

    memory = torch.empty

    def pinned(size: int) -> torch.Tensor:
        state.modes.append(("pinned", mode()))
        return memory(size, dtype=torch.uint8)

    def empty(*size: Any, device: torch.device = CPU, **options: Any) -> torch.Tensor:
        if device.type == "cuda":
            state.modes.append(("allocated", mode()))
        return memory(*size, device="cpu", **options)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=state.current)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: state.current, raising=False
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(plan_memory, "_pinned", pinned)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(cuda, "_captured", {})
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, s: state.log.append("recorded"), raising=False
    )
    return state


def tensors_of(*params: torch.Tensor) -> LaunchTensors:
    q = torch.zeros(4)
    return LaunchTensors(q, q, q, q, None, params, workspace=q, num_params=1)


def run(block: Any, core: Any, tensors: LaunchTensors | None = None) -> None:
    launch(block, core, tensors or tensors_of(), 1.0)


def test_without_limits_a_plan_has_its_own_block(streams: SimpleNamespace) -> None:
    state = DeviceState(CUDA0, "sm_90", fixed=False)
    cores = [Core(bytes([i]) * 32) for i in (1, 2)]
    blocks = [state.upload(core) for core in cores]  # type: ignore[arg-type]
    for block, core in zip(blocks, cores, strict=True):
        assert block.memory.numpy().tobytes() == core.content
        run(block, core)
        assert core.launches == [
            {"block": block.memory.data_ptr(), "stream": 1, "device": 0}
        ]  # fmt: skip
    assert streams.log == []
    # Another stream is ordered after the copy, once, and the memory after that stream.
    streams.current = 5
    run(blocks[0], cores[0])
    run(blocks[0], cores[0])
    assert streams.log == ["5 waits for 1", "recorded"]


def test_a_plan_is_made_beside_the_capture_of_another_thread(streams: SimpleNamespace) -> None:
    # In CUDA's global mode these calls would invalidate that capture.
    state = DeviceState(CUDA0, "sm_90", fixed=False)
    for _ in range(2):
        state.upload(Core(b"1" * 32))  # type: ignore[arg-type]
        state.stage("x", torch.arange(3.0))
    assert {what for what, _ in streams.modes} == {"query", "pinned", "allocated"}
    assert {mode for _, mode in streams.modes} == {_C.RELAXED_CAPTURES}
    assert streams.driver.state() == (-1, 0, 0), "the thread's own mode is as before"


def test_the_mode_of_a_thread_is_restored_if_a_plan_fails(streams: SimpleNamespace) -> None:
    class Broken(Core):
        def write_block(self, address: int, size: int) -> None:
            raise MemoryError

    with pytest.raises(MemoryError):
        DeviceState(CUDA0, "sm_90", fixed=False).upload(Broken(b"1" * 32))  # type: ignore[arg-type]
    assert streams.driver.state() == (-1, 0, 0)


def test_with_limits_a_plan_waits_for_the_runs_of_the_one_it_replaces(
    streams: SimpleNamespace,
) -> None:
    state = DeviceState(CUDA0, "sm_90", fixed=True)
    first, second = Core(b"1" * 32), Core(b"2" * 32)
    block = state.upload(first)  # type: ignore[arg-type]
    address = block.memory.data_ptr()
    streams.current = 5
    run(block, first)
    streams.current = 1
    streams.log.clear()
    later = state.upload(second)  # type: ignore[arg-type]
    assert streams.log == ["1 waits for 5"]
    assert later.memory.data_ptr() == address
    assert later.memory.numpy().tobytes() == second.content
    with pytest.raises(InputError, match="a later plan"):
        run(block, first)
    run(later, second)
    # A plan made on another stream waits for the copy and for the run.
    streams.current = 7
    streams.log.clear()
    state.upload(first)  # type: ignore[arg-type]
    assert streams.log == ["7 waits for 1", "7 waits for 1"]
    with pytest.raises(InputError, match="share their limits"):
        state.upload(Core(b"3" * 48))  # type: ignore[arg-type]


def test_captured_runs_wait_for_nothing_and_keep_what_they_read(streams: SimpleNamespace) -> None:
    state = DeviceState(CUDA0, "sm_90", fixed=True)
    core = Core(b"1" * 32)
    block = state.upload(core)  # type: ignore[arg-type]
    streams.current, streams.capturing = 9, True
    param, table = torch.zeros(2, 3).unbind()
    run(block, core, tensors_of(param, table))
    assert streams.log == []
    kept = list(cuda._captured.values())
    assert any(x is block for x in kept)
    assert any(x is param for x in kept)
    assert not any(x is table for x in kept)
    for refused in (lambda: state.upload(core), lambda: state.stage("x", param)):  # type: ignore
        with pytest.raises(LaunchError, match="plan before the capture"):
            refused()


@pytest.mark.usefixtures("streams")
def test_what_plans_give_by_address_keeps_its_address() -> None:
    state = DeviceState(CUDA0, "sm_90", fixed=True)
    pages = state.stage("page_indices", torch.arange(5, dtype=torch.int32), 8)
    mask = state.stage("mask", torch.arange(6.0).view(2, 3))
    assert pages[:5].tolist() == [0, 1, 2, 3, 4]
    assert pages.shape == (8,)
    assert mask.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    more = state.stage("page_indices", torch.arange(8, dtype=torch.int32) + 10, 8)
    assert more.data_ptr() == pages.data_ptr() != mask.data_ptr()
    assert more.tolist() == list(range(10, 18))
    none = state.stage("page_indices", torch.empty(0, dtype=torch.int32), 8)
    assert none.data_ptr() == pages.data_ptr()
    for wrong in (torch.zeros(9, dtype=torch.int32), torch.zeros(3)):
        with pytest.raises(InputError, match=r"page_indices has .* room for 8 of torch\.int32"):
            state.stage("page_indices", wrong, 8)
    loose = DeviceState(CPU, "emulated:sm_80", fixed=False)
    strided = torch.arange(8)[::2]
    assert loose.stage("x", strided).is_contiguous()


# --- plans in the emulator ------------------------------------------------------------------------

HEADS, KV_HEADS, DIM, WORKERS = 4, 2, 64, 5
LIMITS = (4, 48, 300, 40)
PAGE = 16


def array(values: Sequence[int]) -> tuple[tuple[int, int, int], torch.Tensor]:
    tensor = torch.tensor(list(values), dtype=torch.int32)
    return (tensor.data_ptr(), tensor.numel(), 4), tensor


@dataclass(frozen=True)
class Kernels:
    """Prefill and few-row kernels of a causal variant over pages."""

    modules: tuple[_C.Module, _C.Module]
    native: tuple[_C.Kind, _C.Kind]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    variant = fa.Causal().bind(Dims(1, HEADS, KV_HEADS, 8, 8, DIM, DIM), {})
    specs = kernels_by_rows(
        variant.ir, (DIM, DIM), ("bfloat16",) * 3, "emulated:sm_80", (("paged",),)
    )
    chosen = [next(s for s in specs if s.tile_kind == kind) for kind in ("prefill", "few_row")]
    modules = [load_stepping([build_request(s)])[1]
               for s in chosen]  # fmt: skip
    native = [_C.Kind(m, s.tile_q, s.tile_q, s.tile_kv, s.tile_kv, 500.0, 10.0, 1.0, 20.0)
              for m, s in zip(modules, chosen, strict=True)]  # fmt: skip
    return Kernels(tuple(modules), tuple(native))  # type: ignore[arg-type]


class Pages:
    """One cache for all plans, and tensors with room for the largest batch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.q = torch.randn(LIMITS[1], HEADS, DIM, generator=generator).bfloat16()
        self.k, self.v = (
            torch.randn(60, PAGE, KV_HEADS, DIM, generator=generator).bfloat16() for _ in "kv"
        )
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(self.q.shape[:2])
        self.order = torch.randperm(60, generator=generator).int()


class Planned:
    """A batch of requests over pages, planned."""

    def __init__(
        self, kernels: Kernels, pages: Pages, q_len: Sequence[int], kv_len: Sequence[int],
        limits: tuple[int, int, int, int] | None = LIMITS,
    ) -> None:  # fmt: skip
        self.q_len, self.kv_len, self.pages = q_len, kv_len, pages
        counts = [-(-n // PAGE) for n in kv_len]
        rows, _a = array([0, *accumulate(q_len)])
        self.starts = [0, *accumulate(counts)]
        starts, _b = array(self.starts)
        last, _c = array([(n - 1) % PAGE + 1 if n else 0 for n in kv_len])
        # Every plan takes other pages of the cache.
        shift = sum(kv_len) % 7
        self.indices = pages.order.roll(shift)[: sum(counts)].contiguous()
        lengths = _C.BatchLengths(rows, (None, starts, last, PAGE, sum(counts)))
        self.plan = _C.BatchPlan(
            lengths,
            kernels.native,
            _C.PlanOptions(
                num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim_v=DIM, few_rows=16,
                num_workers=(WORKERS, WORKERS), limits=limits,
            ),
        )  # fmt: skip
        needed = [m if limits or self.plan.work(i) else None for i, m in enumerate(kernels.modules)]
        self.core = _C.BatchCall(
            self.plan, lengths, tuple(needed), num_q_heads=HEADS, num_kv_heads=KV_HEADS,
            head_dim=DIM, head_dim_v=DIM,
        )  # fmt: skip

    def upload(self, state: DeviceState) -> Any:
        self.staged = state.stage("page_indices", self.indices, LIMITS[3])
        return state.upload(self.core)

    def call(self) -> _C.BatchCall:
        p = self.pages
        rows = (0, p.q.stride(1), p.q.stride(0))
        slots = (p.k.stride(0), p.k.stride(2), p.k.stride(1))
        return self.core.bind(
            strides=(rows, slots, slots, rows, (0, 1, HEADS)), num_pages=60, flags=_C.WRITE_LSE
        )

    def tensors(self, workspace: torch.Tensor) -> LaunchTensors:
        p = self.pages
        return LaunchTensors(p.q, p.k, p.v, p.out, p.lse, page_indices=self.staged,
                            workspace=workspace)  # fmt: skip

    def forget(self, workspace: torch.Tensor) -> None:
        """Overwrites the results of an earlier run, which could pass for those of the next."""
        for result in (self.pages.out, self.pages.lse):
            result.fill_(torch.nan)
        workspace.fill_(255)

    def check(self) -> None:
        """Asserts that every row of the plan is right and that no other row was written."""
        p, row = self.pages, 0
        for b, (n, m) in enumerate(zip(self.q_len, self.kv_len, strict=True)):
            own = self.indices[self.starts[b] : self.starts[b + 1]].long()
            k, v = (x[own].flatten(0, 1)[:m].transpose(0, 1)[None] for x in (p.k, p.v))
            rows = slice(row, row + n)
            row += n
            if not n:
                continue
            q = p.q[rows].transpose(0, 1)[None]
            exact, lse = attention_reference(q, k, v, fa.Causal(), q_offset=m - n)
            error = (p.out[rows].transpose(0, 1).double() - exact[0]).abs().max()
            assert error < 0.03, f"request {b} is off by {error:.3g}"
            torch.testing.assert_close(p.lse[rows].T.double(), lse[0], rtol=1e-4, atol=1e-4)
        assert p.out[row:].isnan().all()
        assert p.lse[row:].isnan().all()


BATCHES = (
    ((1, 30, 3), (300, 64, 33)),  # both kinds, one long request that is cut
    ((20, 1, 1, 1), (20, 16, 1, 200)),
    ((1,), (7,)),
    ((), ()),
    ((0, 48), (5, 300)),
)


def memory(size: int) -> torch.Tensor:
    raw = torch.full((size + 128,), 255, dtype=torch.uint8)
    return raw[-raw.data_ptr() % 128 :][:size]


@needs_nvcc
def test_recorded_launches_replay_every_later_plan(kernels: Kernels) -> None:
    pages = Pages()
    state = DeviceState(CPU, "emulated:sm_80", fixed=True)
    first = Planned(kernels, pages, *BATCHES[0])
    assert first.plan.most_splits > 1
    workspace = memory(first.core.workspace_bytes)
    block = first.upload(state)
    recording = record(block, first.call(), first.tensors(workspace), DIM**-0.5)
    assert [launch[0] for _, launch in recording.launches] == [
        "fajit_attention_kernel", "fajit_attention_kernel", "fajit_merge_kernel",
    ]  # fmt: skip
    for batch in (*BATCHES, BATCHES[0]):
        later = Planned(kernels, pages, *batch)
        assert later.core.workspace_bytes == first.core.workspace_bytes
        block = later.upload(state)
        later.forget(workspace)
        recording.replay()
        later.check()
        # The launches of the later plan are the same bytes: a graph is captured once.
        again = record(block, later.call(), later.tensors(workspace), DIM**-0.5)
        assert [launch for _, launch in again.launches] == [
            launch for _, launch in recording.launches
        ]


@needs_nvcc
def test_plans_without_limits_keep_their_own_blocks_and_share_a_workspace(
    kernels: Kernels,
) -> None:
    caches = [Pages(), Pages()]
    state = DeviceState(CPU, "emulated:sm_80", fixed=False)
    plans = [Planned(kernels, cache, *batch, limits=None)
             for cache, batch in zip(caches, BATCHES, strict=False)]  # fmt: skip
    workspace = memory(max(plan.core.workspace_bytes for plan in plans))
    blocks = [plan.upload(state) for plan in plans]
    for plan, block in [*zip(plans, blocks, strict=True)] * 2:  # alternating layers
        plan.pages.out.fill_(torch.nan)
        plan.pages.lse.fill_(torch.nan)
        launch(block, plan.call(), plan.tensors(workspace), DIM**-0.5)
        plan.check()


@needs_nvcc
def test_a_page_beyond_the_cache_is_a_fault_that_names_the_allocation(kernels: Kernels) -> None:
    state = DeviceState(CPU, "emulated:sm_80", fixed=True)
    plan = Planned(kernels, Pages(), (1,), (40,))
    plan.indices[1] = 59
    block = plan.upload(state)
    workspace = memory(plan.core.workspace_bytes)
    recording = record(block, plan.call(), plan.tensors(workspace), 1.0)
    recording.replay()
    shorter = Recording(
        recording.launches,
        tuple((n, t[:59] if n == "k" else t, written) for n, t, written in recording.tensors),
    )
    with pytest.raises(EmulatorFault):
        shorter.replay()


@needs_nvcc
def test_a_stale_plan_is_refused(kernels: Kernels) -> None:
    pages = Pages()
    state = DeviceState(CPU, "emulated:sm_80", fixed=True)
    old, new = (Planned(kernels, pages, *batch) for batch in (BATCHES[2], BATCHES[1]))
    blocks = [plan.upload(state) for plan in (old, new)]
    workspace = memory(new.core.workspace_bytes)
    with pytest.raises(InputError, match="a later plan"):
        launch(blocks[0], old.call(), old.tensors(workspace), 1.0)
    new.forget(workspace)
    launch(blocks[1], new.call(), new.tensors(workspace), DIM**-0.5)
    new.check()
