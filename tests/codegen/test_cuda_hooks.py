"""The hooks of every case of the registry, rendered for CUDA and emulated, against the IR.

A thread a pair for score and mask, a warp a row for row hooks. All cases are one source, so that
nvcc starts once.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch

from flashattn_jit.variants.ir import VariantIR
from flashattn_jit.variants.lower import lower_hooks
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.spec import Variant, as_variant, cpp, scalar, tensor, variant
from tests.codegen.cuda_unit import Unit, needs_nvcc, nvcc
from tests.registry import CASES, Case, Shape
from tests.variants.ir_eval import evaluate

pytestmark = needs_nvcc

ROW_HOOKS = ("query_mod", "key_mod", "value_mod", "output_mod")
ROW_DIMS = (64, 80, 20)  # whole warps, a tail, less than a warp
Q_STEP = 9
MAX_TENSORS, MAX_SCALARS = 16, 16

_HEAD = f"""
#include <fajit/cuda/hooks/row_hooks.h>
#include <fajit/interval.h>
using namespace fajit;

struct Call {{
  fajit_tensor tensors[{MAX_TENSORS}];
  uint64_t scalars[{MAX_SCALARS}];
  const int32_t *q_len, *kv_len, *q_offset, *q_token0, *kv_token0;
  const float* in;   // scores, or rows
  float* out;
  uint8_t* mask;
  float* sink;
  int32_t num_requests, q_step, num_keys, group;
}};

// The context of a call whose scalars this thread digests itself.
template <class Hooks>
struct CallContext {{
  fajit_args args{{}};
  typename Hooks::Uniforms uniforms;
  FAJIT_FN explicit CallContext(const Call& p) {{
    args.num_requests = p.num_requests;
    args.q_len = p.q_len;
    args.kv_len = p.kv_len;
    args.q_offset = p.q_offset;
    args.q_token0 = p.q_token0;
    args.kv_token0 = p.kv_token0;
    uniforms = Hooks::uniforms(Context(&args, p.tensors, p.scalars));
  }}
  FAJIT_FN Context context(const Call& p) const {{
    return Context(&args, p.tensors, p.scalars, &uniforms);
  }}
}};

template <class Hooks>
__device__ __forceinline__ void pairs(const Call& p) {{
  const CallContext<Hooks> holder(p);
  const Context c = holder.context(p);
  const int32_t b = blockIdx.z, h = blockIdx.y, q = blockIdx.x * p.q_step + p.q_offset[b];
  const auto row = Hooks::rows(c, b, h, q);
  const int64_t place = ((int64_t(b) * gridDim.y + h) * gridDim.x + blockIdx.x);
  for (int32_t k = threadIdx.x; k < p.num_keys; k += blockDim.x) {{
    const auto key = Hooks::keys(c, b, h / p.group, k);
    const int64_t i = place * p.num_keys + k;
    p.out[i] = Hooks::pointwise(c, Hooks::score(c, p.in[i], row, key));
    p.mask[i] = Hooks::mask(c, row, key);
  }}
  if (threadIdx.x == 0) p.sink[place] = Hooks::sink(c, b, h) + Hooks::pointwise_scale(c, b, h, q);
}}

struct SharedRow {{
  float* values;
  FAJIT_FN float operator[](int i) const {{ return values[i]; }}
  FAJIT_FN void write(int i, float x) const {{ values[i] = x; }}
}};

// Two warps, a row each: f(context, row, temps, lane, b, h, position).
template <class Hooks, int kDim, class F>
__device__ __forceinline__ void each_row(const Call& p, F f) {{
  __shared__ float rows[2][kDim];
  alignas(16) __shared__ float temps[2][Hooks::kRowTemps + 4];
  const CallContext<Hooks> holder(p);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, position = blockIdx.x * 2 + warp;
  const int64_t begin =
      ((int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x * 2 + position) * kDim;
  for (int i = lane; i < kDim; i += 32) rows[warp][i] = p.in[begin + i];
  __syncwarp();
  const SharedRow row{{rows[warp]}};
  f(holder.context(p), row, temps[warp], lane, int32_t(blockIdx.z), int32_t(blockIdx.y), position);
  for (int i = lane; i < kDim; i += 32) p.out[begin + i] = rows[warp][i];
}}
"""


class _Tensor(ctypes.Structure):
    _fields_ = [("ptr", ctypes.c_void_p), ("sizes", ctypes.c_int64 * 8),
                ("strides", ctypes.c_int64 * 8)]  # fmt: skip


class _Call(ctypes.Structure):
    _fields_ = [
        ("tensors", _Tensor * MAX_TENSORS), ("scalars", ctypes.c_uint64 * MAX_SCALARS),
        *((n, ctypes.c_void_p) for n in ("q_len", "kv_len", "q_offset", "q_token0", "kv_token0")),
        *((n, ctypes.c_void_p) for n in ("in_", "out", "mask", "sink")),
        *((n, ctypes.c_int32) for n in ("num_requests", "q_step", "num_keys", "group")),
    ]  # fmt: skip


@dataclass(frozen=True)
class Built:
    """A case bound to the params of a call on a shape."""

    case: Case
    shape: Shape
    ir: VariantIR
    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[float, ...]

    @property
    def id(self) -> str:
        return f"{self.case.name}-{self.shape.head_dim}"

    def value(self, hook: str, inputs, lengths) -> torch.Tensor:
        """What the hook's IR gives on inputs that broadcast."""
        graph = self.ir.hook(hook)
        assert graph is not None

        def builtin(op, args):
            b = args[0].long()
            if op in ("q_len", "kv_len"):
                return lengths[op][b]
            base = lengths["q_token0"][b] - lengths["q_offset"][b]
            return args[1] + (base if op == "q_row" else lengths["kv_token0"][b])

        return evaluate(graph, inputs, self.tensors, self.scalars, builtin)


def build(case: Case, shape: Shape) -> Built:
    variant, params = case.build(shape)
    call = as_variant(variant).bind(Dims(*shape), params)
    return Built(case, shape, call.ir, tuple(call.tensors), tuple(call.scalars))


def graphs(ir: VariantIR, hooks) -> bool:
    return any(ir.hook(h) is not None for h in hooks)


BUILT = [build(case, case.shape) for case in CASES]
PAIRED = [x for x in BUILT if graphs(x.ir, ("score_mod", "mask_mod", "pointwise", "sink"))]
ROWS = [
    build(x.case, x.shape._replace(head_dim=d, head_dim_v=d))
    for x in BUILT
    if graphs(x.ir, ROW_HOOKS)
    for d in ROW_DIMS
    if x.case.fits(x.shape._replace(head_dim=d, head_dim_v=d))
]


def source(names: dict[int, Built], kernels) -> str:
    parts = [_HEAD]
    for number, built in names.items():
        hooks = lower_hooks(built.ir, built.case.name, "cuda")
        parts.append(f"namespace fajit::case_{number} {{\n{hooks}}}\n{kernels(number, built)}")
    return "\n".join(parts)


def pair_kernel(number: int, built: Built) -> str:
    return (
        f'extern "C" __global__ void pairs_{number}(const __grid_constant__ Call p) '
        f"{{ pairs<case_{number}::Hooks>(p); }}"
    )


def row_kernels(number: int, built: Built) -> str:
    out = []
    for hook in ROW_HOOKS:
        if built.ir.hook(hook) is None:
            continue
        lse = "0.25f * position, " if hook == "output_mod" else ""
        out.append(
            f'extern "C" __global__ void {hook}_{number}(const __grid_constant__ Call p) {{\n'
            f"  using Hooks = case_{number}::Hooks;\n"
            f"  each_row<Hooks, {built.shape.head_dim}>(p, [](const Context& c, "
            "const SharedRow& r, float* temps, int lane, int32_t b, int32_t h, int32_t position) "
            "{\n"
            f"    Hooks::{hook}(c, r, temps, lane, {lse}b, h, position);\n  }});\n}}"
        )
    return "\n".join(out)


@pytest.fixture(scope="module")
def pair_unit(tmp_path_factory):
    return Unit(source(dict(enumerate(PAIRED)), pair_kernel), tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def row_unit(tmp_path_factory):
    return Unit(source(dict(enumerate(ROWS)), row_kernels), tmp_path_factory.mktemp("rows"))


def lengths_of(shape: Shape) -> dict[str, torch.Tensor]:
    """Lengths and packed positions that differ between requests."""
    b = torch.arange(shape.batch, dtype=torch.int32)
    return {
        "q_len": shape.q_len - 3 * b, "kv_len": shape.kv_len - 5 * b,
        "q_offset": torch.zeros_like(b), "q_token0": b * shape.q_len,
        "kv_token0": b * shape.kv_len,
    }  # fmt: skip


def call_of(built: Built, lengths, **fields) -> tuple[bytes, dict[str, torch.Tensor]]:
    """The kernel's param, and all memory that it points to."""
    call = _Call(
        num_requests=built.shape.batch, **{k: v for k, v in fields.items() if type(v) is int}
    )
    memory = {**lengths, **{k: v for k, v in fields.items() if type(v) is not int}}
    for name, t in memory.items():
        setattr(call, name, t.data_ptr())
    for i, t in enumerate(built.tensors):
        memory[f"param{i}"] = t
        call.tensors[i].ptr = t.data_ptr() if t.numel() else None
        call.tensors[i].sizes[: t.ndim], call.tensors[i].strides[: t.ndim] = t.shape, t.stride()
    for i, (param, value) in enumerate(zip(built.ir.scalars, built.scalars, strict=True)):
        kind = ctypes.c_int64 if param.dtype == "int64" else ctypes.c_double
        call.scalars[i] = ctypes.c_uint64.from_buffer_copy(
            kind(int(value) if param.dtype == "int64" else value)
        ).value
    return bytes(call), memory


@pytest.mark.parametrize("number", range(len(PAIRED)), ids=[x.case.name for x in PAIRED])
def test_pairs(pair_unit, number):
    built = PAIRED[number]
    shape, ir = built.shape, built.ir
    lengths = lengths_of(shape)
    rows = -(-shape.q_len // Q_STEP)
    size = (shape.batch, shape.num_q_heads, rows, shape.kv_len)
    scores = torch.randn(size, generator=torch.Generator().manual_seed(number)) * 3
    out, sink = torch.empty(size), torch.empty(size[:3])
    mask = torch.empty(size, dtype=torch.uint8)
    params, memory = call_of(
        built, lengths, in_=scores, out=out, mask=mask, sink=sink, q_step=Q_STEP,
        num_keys=shape.kv_len, group=shape.num_q_heads // shape.num_kv_heads,
    )  # fmt: skip
    written = ("out", "mask", "sink")
    pair_unit.run(f"pairs_{number}", params, memory, written,
                  blocks=(rows, *size[1::-1]), threads=64)  # fmt: skip

    def index(n: int, dim: int, step: int = 1) -> torch.Tensor:
        view = [1, 1, 1, 1]
        view[dim] = n
        return (torch.arange(n, dtype=torch.int32) * step).view(view)

    inputs = {"b": index(size[0], 0), "h": index(size[1], 1), "q_idx": index(rows, 2, Q_STEP),
              "kv_idx": index(size[3], 3), "score": scores}  # fmt: skip

    def value(hook: str, default: torch.Tensor) -> torch.Tensor:
        graph = built.ir.hook(hook)
        return default if graph is None else built.value(hook, inputs, lengths)

    inputs["score"] = value("score_mod", scores).float()
    expected = value("pointwise", inputs["score"]).float().expand(size)
    torch.testing.assert_close(out, expected, rtol=3e-6, atol=3e-6, equal_nan=True)
    keep = value("mask_mod", torch.tensor(True)).expand(size)
    assert torch.equal(mask.bool(), keep)
    if ir.hook("sink") is not None or ir.hook("pointwise_scale") is not None:
        total = value("sink", torch.tensor(0.0)) + value("pointwise_scale", torch.tensor(1.0))
        torch.testing.assert_close(
            sink, total.float().expand(*size[:3], 1)[..., 0], rtol=3e-6, atol=3e-6
        )


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[x.id for x in ROWS])
def test_rows(row_unit, number):
    built = ROWS[number]
    shape, lengths = built.shape, lengths_of(built.shape)
    count = 12
    for hook in ROW_HOOKS:
        if built.ir.hook(hook) is None:
            continue
        kv = hook in ("key_mod", "value_mod")
        heads = shape.num_kv_heads if kv else shape.num_q_heads
        size = (shape.batch, heads, count, shape.head_dim)
        rows = torch.randn(size, generator=torch.Generator().manual_seed(number))
        out = torch.empty(size)
        params, memory = call_of(built, lengths, in_=rows, out=out)
        row_unit.run(f"{hook}_{number}", params, memory, ("out",),
                     blocks=(count // 2, heads, shape.batch), threads=64)  # fmt: skip
        position = torch.arange(count, dtype=torch.int32).view(1, 1, -1)
        inputs = {
            "b": torch.arange(shape.batch, dtype=torch.int32).view(-1, 1, 1),
            "kv_h" if kv else "h": torch.arange(heads, dtype=torch.int32).view(1, -1, 1),
            "kv_idx" if kv else "q_idx": position, "row": rows, "lse": 0.25 * position.float(),
        }  # fmt: skip
        expected = built.value(hook, inputs, lengths)
        if expected.ndim == 3:
            expected = expected[..., None]
        torch.testing.assert_close(out, expected.float().expand(size), rtol=1e-5, atol=1e-5)


class Text(Variant):
    """Hooks given as C++ text, with params of every kind."""

    cap: float = scalar(3.0)
    window: int = scalar(17)
    slopes: torch.Tensor = tensor("num_q_heads")
    score_mod = cpp("return cap * math::tanh(score / cap) + slopes(h) * (kv_idx - q_idx);")
    mask_mod = cpp("const int32_t d = q_idx - kv_idx;\nreturn d >= 0 && d < window;")


def test_text(tmp_path):
    shape = Shape(2, 4, 2, 40, 40, 64, 64)
    slopes = torch.tensor([0.5, 0.25, -0.125, 1.0])
    call = Text().bind(Dims(*shape), {"slopes": slopes})
    built = Built(CASES[0], shape, call.ir, tuple(call.tensors), tuple(call.scalars))
    unit = Unit(source({0: built}, pair_kernel), tmp_path)
    size = (2, 4, 40, 40)
    scores, out, sink = torch.randn(size), torch.empty(size), torch.empty(size[:3])
    mask = torch.empty(size, dtype=torch.uint8)
    params, memory = call_of(built, lengths_of(shape), in_=scores, out=out, mask=mask, sink=sink,
                             q_step=1, num_keys=40, group=2)  # fmt: skip
    unit.run("pairs_0", params, memory, ("out", "mask", "sink"), blocks=(40, 4, 2), threads=64)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    expected = 3 * torch.tanh(scores / 3) - slopes[:, None, None] * distance
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(mask.bool(), ((distance >= 0) & (distance < 17)).expand(size))


def test_an_error_in_text_names_the_hook(tmp_path):
    call = as_variant(variant(score_mod=cpp("return score +\n  nonsense;"), name="Odd")).bind(
        Dims()
    )
    (tmp_path / "unit.cu").write_text(
        f"{_HEAD}\nnamespace fajit {{\n{lower_hooks(call.ir, 'Odd', 'cuda')}}}"
    )
    with pytest.raises(AssertionError, match=r"hook:Odd\.score_mod\(2\): error"):
        nvcc(tmp_path / "unit.cu", "-cubin", "-o", "unit.cubin")


def test_no_hook_uses_local_memory_or_spills(tmp_path):
    (tmp_path / "unit.cu").write_text(source(dict(enumerate(PAIRED)), pair_kernel))
    words = nvcc(tmp_path / "unit.cu", "-cubin", "--ptxas-options=-v", "-o", "unit.cubin")
    assert words.count("bytes stack frame") == len(PAIRED)
    assert words.count("0 bytes stack frame, 0 bytes spill stores") == len(PAIRED)
