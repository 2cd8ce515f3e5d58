"""Calls on devices, tested without one: placement, plans, argument blocks."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashattn_jit as fa
from flashattn_jit import _C
from flashattn_jit.codegen import spec as targets
from flashattn_jit.codegen.spec import UtilitySpec
from flashattn_jit.errors import InputError, LaunchError, TargetError
from flashattn_jit.jit.module import default, load_stepping
from flashattn_jit.ops.arguments import checks
from flashattn_jit.ops.arguments.calls import Call, Form, dense_form, is_aligned, packed_form
from flashattn_jit.ops.device import cuda
from flashattn_jit.ops.device.plan_memory import DeviceState
from flashattn_jit.ops.launching import launches, utility
from flashattn_jit.ops.planning.batch_plan import Kernels, Needs, Options
from flashattn_jit.planner import tiles
from flashattn_jit.planner.devices import named_hardware
from flashattn_jit.planner.tiles import build_request, slots
from flashattn_jit.torch_modes import is_capturing
from flashattn_jit.variants.params import Dims
from tests.cuda import suffixed
from tests.cuda.kernels import compiled, spec_of
from tests.harness.stand_in_driver import StandIn, driver, stand_in_library  # noqa: F401
from tests.harness.toolkit import needs_nvcc
from tests.planner.batch_plans import Dense, Paged, device_block, lengths, make

CUDA0, CPU = torch.device("cuda", 0), torch.device("cpu")
needs_no_driver = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would launch it")


@dataclass
class OnDevice:
    """The attributes of a CUDA tensor that placement reads."""

    dtype: torch.dtype = torch.bfloat16
    device: torch.device = CUDA0
    is_cuda: bool = True


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "device_capability", lambda index: (9, 0))


def place(*dtypes: torch.dtype, target: str | None = None) -> str:
    return targets.call_target(*map(OnDevice, dtypes), target)  # type: ignore[arg-type]


@pytest.mark.usefixtures("h100")
def test_a_device_takes_its_own_target_and_older_ones_of_its_major_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = (torch.float16,) * 3
    assert place(*half) == "sm_90" == place(*half, target="sm_90")
    monkeypatch.setattr(targets, "device_capability", lambda index: (8, 9))
    assert place(*half, target="sm_86") == "sm_86"
    for target in ("sm_90", "sm_75"):
        with pytest.raises(TargetError, match="does not run on cuda:0, whose target is 'sm_89'"):
            place(*half, target=target)
    for target in ("cpu:avx2", "emulated:sm_89"):
        with pytest.raises(TargetError, match=r"runs on CPU tensors.*\.cpu\(\)"):
            place(*half, target=target)
    with pytest.raises(TargetError, match="unknown target 'sm_42'"):
        place(*half, target="sm_42")


@pytest.mark.usefixtures("h100")
def test_matrix_dtypes_are_what_the_architecture_multiplies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bf16, half, single = torch.bfloat16, torch.float16, torch.float32
    assert place(bf16, bf16, bf16) == "sm_90"
    assert place(bf16, torch.int8, torch.int8) == "sm_90"  # codes
    refused = r"or torch\.float16, or codes .*; got q .*to\(torch\.bf"
    for dtypes in ((single,) * 3, (bf16, half, half), (torch.int8, bf16, bf16)):
        with pytest.raises(InputError, match=refused):
            place(*dtypes)
    monkeypatch.setattr(targets, "device_capability", lambda index: (7, 5))
    assert place(half, half, half) == "sm_75"
    refused = r"sm_75 take .* torch\.float16, or codes .*; got q torch\.bfloat16"
    with pytest.raises(InputError, match=refused):
        place(bf16, bf16, bf16)


def test_an_architecture_without_kernels_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "device_capability", lambda index: (7, 0))
    with pytest.raises(TargetError, match=r"compute capability 7\.0"):
        targets.device_target(3)


def test_tensors_of_different_devices_are_named_with_their_devices() -> None:
    there = {"q": OnDevice(), "k": torch.empty(1), "v": OnDevice()}
    with pytest.raises(InputError, match=r"q on cuda:0, k on cpu, v on cuda:0.*k\.to\('cuda:0'\)"):
        checks.check_devices(there)  # type: ignore[arg-type]
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(InputError, match="v is on device meta, but kernels run on cpu and cuda"):
        fa.attention(q, q, q.to("meta"))
    with pytest.raises(InputError, match=r"out must be .* on cpu, got .* on meta"):
        fa.attention(q, q, q, out=torch.empty_like(q, device="meta"))
    with pytest.raises(InputError, match=r"kv_len must be .* on meta; lengths are planned on"):
        fa.attention(q, q, q, kv_len=torch.ones(1, dtype=torch.int32, device="meta"))


def bf16(*sizes: int, shift: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor that starts `shift` entries after a multiple of 64 bytes."""
    count = torch.Size(sizes).numel()
    return torch.zeros(count + 64, dtype=dtype)[shift : count + shift].view(sizes)


SHAPE = (1, 2, 8, 64)
PLAIN = {name: lambda: bf16(*SHAPE) for name in "qkv"}
UNALIGNED: dict[str, dict[str, Callable[[], torch.Tensor]]] = {
    "q between 16 bytes": {"q": lambda: bf16(*SHAPE, shift=1)},
    "k between 16 bytes": {"k": lambda: bf16(*SHAPE, shift=4)},
    "v between 16 bytes": {"v": lambda: bf16(*SHAPE, shift=7)},
    "out between 16 bytes": {"out": lambda: bf16(*SHAPE, shift=1)},
    "head_dim": {name: lambda: bf16(1, 2, 8, 60) for name in "qk"},
    "head_dim_v": {"v": lambda: bf16(1, 2, 8, 36)},
    "heads of q": {"q": lambda: bf16(1, 2 * 516).as_strided(SHAPE, (1032, 516, 64, 1))},
    "rows of k": {"k": lambda: bf16(1, 2, 8, 65)[..., :64]},
    "rows of out": {"out": lambda: bf16(1, 2, 8, 65)[..., :64]},
    "rows of a partial out": {"out": lambda: bf16(1, 2, 8, 65, dtype=torch.float32)[..., :64]},
}


@pytest.mark.parametrize("change", UNALIGNED)
def test_rows_that_start_between_16_bytes_take_another_kernel(change: str) -> None:
    def aligned(made: dict[str, Callable[[], torch.Tensor]]) -> bool:
        tensors = {name: make() for name, make in made.items()}
        q, k, v = (tensors[name] for name in "qkv")
        return is_aligned(dense_form(q, k, v), q, k, v, tensors.get("out"))

    assert aligned(PLAIN)
    assert aligned({**PLAIN, "out": lambda: bf16(*SHAPE)})
    assert not aligned({**PLAIN, **UNALIGNED[change]})
    assert Needs(8, False, unaligned=True).features(cpu=False) == ("unaligned",)
    assert Needs(8, False, unaligned=True).features(cpu=True) == ()


def test_partial_results_are_aligned_as_fp32_and_packed_rows_as_dense_ones() -> None:
    q = bf16(*SHAPE)
    for dtype, fits in ((torch.float32, True), (torch.bfloat16, False)):
        out = bf16(1, 2, 8, 68, dtype=dtype)[..., :64]
        assert is_aligned(dense_form(q, q, q), q, q, q, out) == fits
    rows = bf16(8, 2, 64)
    assert is_aligned(packed_form(rows, rows, rows), rows, rows, rows, None)
    odd = bf16(8, 2, 65)[..., :64]
    assert not is_aligned(packed_form(rows, rows, odd), rows, rows, odd, None)


def test_block_masks_are_features() -> None:
    for cpu in (False, True):
        assert Needs(8, True, block_mask=True).features(cpu) == ("block_mask",)


def test_nothing_is_planned_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    q = bf16(*SHAPE)
    fa.attention(q, q, q, scale=0.2189)  # nothing is captured on the CPU
    form = dense_form(q, q, q)
    there = Form(*(CUDA0 if name == "device" else getattr(form, name) for name in FORM_FIELDS))
    lengths = _C.BatchLengths.dense(1, 8, 8)
    call = Call(there, lengths, 0, (), None, False, False, "sm_80", 0)
    bound: Any = None
    with pytest.raises(LaunchError, match="make the same call once before the capture"):
        launches._plan(call, bound, bound, "variant")
    with pytest.raises(LaunchError, match="make the same call once before it"):
        utility.run_utility(("captured",), "sm_80", CUDA0, pytest.fail, bound)


FORM_FIELDS = ("kind", "q_shape", "k_shape", "v_shape", "strides", "dtypes", "device",
               "rows_aligned", "input_bytes")  # fmt: skip


@pytest.mark.parametrize(
    ("supported", "needed", "refused"),
    [(13000, 580, False), (13010, 580, False), (12080, 580, True), (12000, 525, False),
     (10020, 450, True), (14000, 580, False)],
)  # fmt: skip
def test_a_driver_runs_what_its_cuda_or_an_older_one_compiled(
    monkeypatch: pytest.MonkeyPatch, supported: int, needed: int, refused: bool
) -> None:
    monkeypatch.setattr(cuda, "min_driver", lambda module: needed)
    monkeypatch.setattr(cuda, "driver_version", lambda: supported)
    module: Any = SimpleNamespace(path=f"/kernels/{supported}/{needed}.so")
    if not refused:
        cuda.check_driver(module)
        return
    with pytest.raises(LaunchError, match=rf"needs driver {needed} or newer") as error:
        cuda.check_driver(module)
    assert module.path in str(error.value)


# --- launches on a fake device --------------------------------------------------------------------


class Recorded:
    """Stands in for a native call, for a plan's memory and for the event after its copy."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.events: list[str] = []

    def launch(self, *values: Any, stream: int, device: int) -> None:
        names = ("q", "k", "v", "out", "lse", "scale", "num_threads", "tensors", "scalars",
                 "workspace", "states", "page_indices", "key_blocks", "device_block")  # fmt: skip
        self.launches.append(
            dict(zip(names, values, strict=True)) | {"stream": stream, "device": device}
        )

    def data_ptr(self) -> int:
        return 4096

    def record_stream(self, stream: Any) -> None:
        self.events.append(f"release after {stream}")

    def wait(self, stream: Any) -> None:
        self.events.append(f"{stream} waits")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(stream=7, capturing=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: state.stream, raising=False
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: f"stream {state.stream}")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(cuda, "_captured", {})
    return state


def test_launches_go_to_the_current_stream_of_the_tensors_device(device: SimpleNamespace) -> None:
    fake: Any = Recorded()
    block = cuda.DeviceBlock(fake, None, fake, {7})
    q = torch.zeros(4)
    call = cuda.LaunchTensors(q, q, q, q, None, addresses=(1, 2), scalars=(0.5,))

    def enqueue() -> int | None:
        return cuda.enqueue(fake, block, call, 0.25, torch.device("cuda", 1), (block,))

    assert enqueue() == 7
    assert fake.events == []
    only = fake.launches[0]
    assert (only["stream"], only["device"], only["device_block"]) == (7, 1, 4096)
    assert (only["scale"], only["tensors"], only["scalars"]) == (0.25, (1, 2), (0.5,))
    # Another stream is ordered after the plan's copy, once.
    device.stream = 8
    assert [enqueue() for _ in range(2)] == [8, 8]
    assert fake.events == ["stream 8 waits", "release after stream 8"]
    assert [launch["stream"] for launch in fake.launches] == [7, 8, 8]


def test_a_captured_plan_is_kept_and_records_nothing_on_streams(device: SimpleNamespace) -> None:
    fake: Any = Recorded()
    block = cuda.DeviceBlock(fake, None, fake, {7})
    device.stream, device.capturing = 9, True
    q, param, table = torch.zeros(3, 4).unbind()
    tensors = cuda.LaunchTensors(q, q, q, q, None, (param, table), num_params=1)
    assert cuda.enqueue(fake, block, tensors, 1.0, CUDA0, (block,)) is None
    assert fake.events == [] and fake.launches[0]["stream"] == 9
    assert list(cuda._captured.values()) == [block, param] and block.streams == {7}


# --- argument blocks of a real CUDA artifact ------------------------------------------------------


@pytest.fixture(scope="module")
def merge_module() -> _C.Module:
    spec = UtilitySpec("merge_states", "sm_80")
    return load_stepping([build_request(spec)])[1]


def call_of(module: _C.Module, q_len: tuple[int, ...] = (3, 0, 2)) -> _C.BatchCall:
    """Two items over pages of 7 slots; the tensors are the states that it merges."""
    batch = lengths(q_len, Paged((5, 6, 14), 7), (-1, 0, 4))
    work = struct.pack("8i", 0, 0, 1, 0, 3, 0, 5, -1) + struct.pack("8i", 2, 0, 1, 0, 2, 0, 7, -1)
    core = _C.BatchCall(
        _C.BatchPlan.of_work(work), batch, (module, None), num_q_heads=1, num_kv_heads=1,
        head_dim=2, head_dim_v=2,
    )  # fmt: skip
    none = (0, 0, 0)
    return core.bind(
        strides=(none, none, none, (0, 0, 2), (0, 0, 1)), num_pages=9, flags=_C.WRITE_LSE,
        layouts=(((1, 1, 5, 2), (10, 10, 2, 1)), ((1, 1, 5), (5, 5, 1)), ((0, 0, 0), (0, 0, 1))),
        scalar_kinds="i",
    )  # fmt: skip


@needs_nvcc
def test_the_device_block_holds_lengths_pages_and_work_at_multiples_of_16(
    merge_module: _C.Module,
) -> None:
    assert merge_module.is_cuda
    block = device_block(call_of(merge_module))
    rows, keys = [(0, 3, 3)], [(0, 0, 0)]
    arrays = [(3, 0, 2), (5, 6, 14), *rows, *keys, (-1, 0, 4), *rows, *keys]
    first_keys = (0, 0, 0)
    for i, array in enumerate([*arrays, first_keys]):
        assert struct.unpack_from("3i", block, 16 * i) == array
    assert struct.unpack_from("4i", block, 16 * 8) == (0, 1, 2, 4)
    assert struct.unpack_from("8i", block, 16 * 9) == (0, 0, 1, 0, 3, 0, 5, -1)
    assert struct.unpack_from("8i", block, 16 * 11) == (2, 0, 1, 0, 2, 0, 7, -1)
    assert struct.unpack_from("3i", block, 16 * 13) == (0, 1, 2), "each item has its own worker"
    assert len(block) == 16 * 14


@needs_nvcc
def test_launches_are_data_without_a_driver(merge_module: _C.Module) -> None:
    call = call_of(merge_module)
    values = {"q": 1, "k": 1, "v": 1, "out": 64, "lse": 128, "scale": 1.0, "num_threads": 1,
              "tensors": (256, 512, 0), "scalars": (0,), "page_indices": 8,
              "device_block": 1024}  # fmt: skip
    ((module, (kernel, grid, block, shared_bytes, params, overlaps)),) = call.plan_launches(
        **values
    )
    assert module is merge_module and not overlaps
    assert (kernel, grid, block, shared_bytes) == (
        "fajit_merge_states_kernel", (2, 1, 1), (128, 1, 1), 0,
    )  # fmt: skip
    assert struct.unpack_from("2q", params) == (64, 128)
    for wrong, message in (
        ({"device_block": 0}, "device_block has address 0"),
        ({"device_block": 1032}, "device_block must be aligned to 16"),
        ({"page_indices": 0}, "page_indices has address 0"),
        ({"tensors": (256, 0, 0)}, "param tensor 1 has address 0"),
        ({"out": 0}, "out has address 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call.plan_launches(**(values | wrong))


@needs_nvcc
@pytest.mark.parametrize(("heads", "fits"), [(2**27 - 9, True), (2**27, False), (2**62, False)])
def test_a_token_whose_units_do_not_fit_32_bits_is_refused(heads: int, fits: bool) -> None:
    module = load_stepping([build_request(UtilitySpec("append_paged_kv", "sm_80", 2))])[1]
    core = _C.BatchCall(
        _C.BatchPlan.of_work(struct.pack("8i", 0, 0, 1, 0, 3, 0, 5, -1)),
        lengths((3,), Paged((5,), 7), (-1,)), (module, None), num_q_heads=1, num_kv_heads=1,
        head_dim=16, head_dim_v=16,
    )  # fmt: skip
    none = (0, 0, 0)
    rows, pages = ((3, heads, 32), (0, 0, 1)), ((9, 7, heads, 32), (0, 0, 0, 1))
    call = core.bind(
        strides=(none, none, none, none, none), num_pages=9, flags=0,
        layouts=(rows, rows, pages, pages),
    )  # fmt: skip
    values = {"q": 1, "k": 1, "v": 1, "out": 64, "lse": 0, "scale": 1.0, "num_threads": 1,
              "tensors": (256,) * 4, "page_indices": 8, "device_block": 1024}  # fmt: skip
    if fits:
        assert len(call.plan_launches(**values)) == 1
        return
    with pytest.raises(ValueError, match=r"fajit_plan_launch of artifact .* refused its arg"):
        call.plan_launches(**values)


@needs_nvcc
@needs_no_driver
def test_a_failed_launch_names_kernel_grid_and_artifact(merge_module: _C.Module) -> None:
    call = call_of(merge_module)
    with pytest.raises(LaunchError, match=r"fajit_merge_states_kernel with grid \(2, 1, 1\)") as e:
        call.launch(
            1, 1, 1, 64, 128, 1.0, 1, (256, 512, 0), (0,), page_indices=8, device_block=1024
        )
    assert merge_module.path in str(e.value) and "cuda" in str(e.value)
    with pytest.raises(LaunchError, match="cannot be loaded on device 0: there is no CUDA driver"):
        merge_module.load(0)


def test_cpu_artifacts_have_no_launches_to_plan() -> None:
    q = torch.randn(1, 1, 2, 16)
    fa.attention(q, q, q)
    module = next(m for m in default._modules.values() if not m.is_cuda)
    with pytest.raises(ValueError, match="has no CUDA target"):
        call_of(module).plan_launches(1, 1, 1, 64, 128, 1.0, 1, (256, 512), page_indices=8)


def test_replacing_a_spec_keeps_utilities_apart() -> None:
    spec = UtilitySpec("append_paged_kv", "sm_80", 16)
    assert spec.document() != replace(spec, unit_bytes=8).document()
    assert spec.document() != replace(spec, target="sm_90").document()


@needs_nvcc
def test_work_is_planned_for_the_blocks_that_a_device_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.randn(1, 2, 1, 64).bfloat16()
    fa.attention(q, q, q, target="emulated:sm_90")
    plan, _ = list(launches._launches.values())[-1]
    kernel = plan.kernels[1]
    assert plan.kernels[0] is None and kernel is not None and kernel.module is not None
    module, spec = kernel.module, kernel.spec
    assert default.find(spec.document()) is module
    registers = cuda._registers(module)
    assert registers is not None and 32 <= registers <= 255
    assert kernel.workers == cuda.workers(spec, CPU, module) == cuda.EMULATED_SLOTS
    assert len(plan.native.worker_indptr(1)) == cuda.EMULATED_SLOTS + 1
    h200 = named_hardware("H200")
    monkeypatch.setattr(cuda, "_hardware", lambda index: h200)
    expected = slots(spec, h200, registers).total
    assert cuda.workers(spec, CUDA0, module) == expected >= 132
    gone: Any = SimpleNamespace(path="/nowhere/artifact.so")
    assert cuda._registers(gone) is None
    assert cuda.workers(spec, CUDA0, gone) == slots(spec, h200).total


@needs_nvcc
def test_work_costs_what_the_device_that_runs_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's kernels have its bandwidth; emulated ones that of the target's typical device."""
    structure = fa.Full().bind(Dims(1, 1, 1, 1, 64, 64, 64), {}).structure

    def ns_of_a_tile(device: torch.device, target: str) -> float:
        options = Options(1, 1, 64, 64, *[torch.bfloat16] * 3, device, target)
        _, few = Kernels(options).pair(structure, Needs(0, True), "full")
        assert few is not None
        planned = make([1], Dense([64]), heads=(1, 1), kinds=(None, few.native), workers=1)
        return sum(planned.plan.load_ns(1)) - tiles._CUDA_ITEM_NS

    found = {}
    for name in ("H100", "H200"):
        monkeypatch.setattr(cuda, "_hardware", lambda _, name=name: named_hardware(name))
        found[name] = ns_of_a_tile(CUDA0, "sm_90")
    assert found["H100"] / found["H200"] == pytest.approx(4800 / 3350)
    assert ns_of_a_tile(CPU, "emulated:sm_90") == found["H100"]


def test_a_suffixed_target_runs_on_one_compute_capability_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    suffixed.add_row(monkeypatch)
    half = (torch.float16,) * 3
    monkeypatch.setattr(targets, "device_capability", lambda index: (10, 0))
    assert place(*half) == "sm_100"  # suffixed only where it is asked for
    assert place(*half, target=suffixed.TARGET) == suffixed.TARGET
    for capability in ((8, 9), (9, 0), (10, 3), (12, 0)):
        monkeypatch.setattr(targets, "device_capability", lambda index, c=capability: c)
        with pytest.raises(TargetError, match=r"'sm_100a' does not run on cuda:0"):
            place(*half, target=suffixed.TARGET)


# --- several devices ------------------------------------------------------------------------------


def test_a_capture_is_asked_of_the_stream_of_the_tensors_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = SimpleNamespace(device=0, capturing={1})

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        previous, state.device = state.device, device.index
        yield
        state.device = previous

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.device)
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: state.device in state.capturing
    )
    cuda1, unnumbered = torch.device("cuda", 1), torch.device("cuda")
    assert [is_capturing(d) for d in (CUDA0, cuda1, unnumbered, CPU)] == [False, True, False, False]
    state.device = 1
    assert [is_capturing(d) for d in (CUDA0, cuda1, unnumbered, CPU)] == [False, True, True, False]
    assert state.device == 1


def test_asking_for_a_capture_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", pytest.fail)
    assert not is_capturing(torch.device("cuda", 1))


# --- kernels of which a device holds fewer blocks than planned ------------------------------------


@needs_nvcc
def test_fewer_blocks_than_planned_are_logged_once(
    driver: StandIn,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel = compiled(spec_of("plain", "sm_80", "prefill"))
    monkeypatch.setattr(cuda, "driver_version", lambda: 13000)
    state = DeviceState(CUDA0, "sm_80", fixed=False)

    def in_a_new_process() -> None:
        monkeypatch.setattr(cuda, "_compared", {})
        monkeypatch.setattr(cuda, "_shortages", set())

    def prepared(blocks: int, workers: int = 0) -> list[str]:
        caplog.clear()
        driver.holds(blocks)
        module = _C.Module(str(kernel.folder / "artifact.so"))
        state.prepare(module, workers)
        state.prepare(module, workers)
        assert all(module.path in record.getMessage() for record in caplog.records)
        return [f"{r.levelname}: {r.getMessage()}".split(":\n")[0] for r in caplog.records]

    in_a_new_process()
    (warning,) = prepared(1)
    assert warning.startswith(
        "WARNING: fajit_attention_kernel runs 1 blocks on a multiprocessor of device 0, and is "
        "planned for 2"
    )
    assert prepared(1) == [], "a module of the same artifact was warned of"
    in_a_new_process()
    assert prepared(2) == []
    # Also where the tile was chosen for fewer blocks than its registers let the plan count with.
    device = named_hardware("A100")
    monkeypatch.setattr(cuda, "_hardware", lambda index: device)
    for workers, expected in ((2 * device.num_sms, 0), (3 * device.num_sms, 1)):
        in_a_new_process()
        found = prepared(2, workers)
        assert len(found) == expected and all("planned for 3" in words for words in found)
    # A later plan of a kernel for more blocks is compared too, and each shortage is logged once.
    in_a_new_process()
    assert [prepared(2, n * device.num_sms) for n in (1, 2)] == [[], []]
    (later,) = prepared(2, 3 * device.num_sms)
    assert "runs 2 blocks" in later and "planned for 3" in later
    assert [prepared(2, n * device.num_sms) for n in (3, 1)] == [[], []]
    in_a_new_process()
    (first,), again = prepared(1, device.num_sms), prepared(1, 2 * device.num_sms)
    assert "planned for 2" in first and again == [], "the tile was chosen for two in any case"
