"""The hooks of every case of the registry, rendered for CUDA and emulated, against the IR.

Score and mask hooks run with one thread for each pair, row hooks with one warp for each row. All
cases are one source, so that nvcc runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from flashattn_jit.variants.lower.hooks import lower_hooks
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.variant import Variant, as_variant, cpp, scalar, tensor, variant
from tests.codegen.cuda_unit import Unit, nvcc
from tests.codegen.registry_hooks import (
    CALL_STRUCT,
    PAIRED,
    ROW_COUNT,
    ROW_HOOKS,
    ROWS,
    Built,
    Pairs,
    Rows,
    call_of,
    lengths_of,
    unit_source,
)
from tests.harness.toolkit import needs_nvcc
from tests.registry.cases import CASES, Shape

pytestmark = needs_nvcc

_MOST_CAP = 50.0
"""Of the registry's soft caps; `hooks/soft_cap.h` derives the error of a score."""

_HEAD = f"""
#include <fajit/cuda/common/kv_walk.h>
#include <fajit/cuda/common/units.h>
#include <fajit/cuda/hooks/row_hooks.h>
using namespace fajit;

{CALL_STRUCT}
// The context of a call; this thread computes the hooks' uniforms itself.
template <class Hooks>
struct CallContext {{
  fajit_args args{{}};
  typename Hooks::Uniforms uniforms;
  FAJIT_FN explicit CallContext(const Call& p) {{
    args.num_requests = p.num_requests;
    args.scale = 1.0f;
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
    float score = Hooks::score(c, p.in[i], row, key);
    if constexpr (Hooks::kRaw) score *= Hooks::unit(c);
    if constexpr (Hooks::kLine) {{
      // Odd columns by a line from the first key of a tile of 16, where it is one.
      const int32_t first = k / 16 * 16;
      if (k % 2 == 1 && Hooks::is_line(c, Interval{{first, first + 15}}, Interval{{q, q}})) {{
        const auto line = Hooks::line(c, row, first);
        float in = p.in[i];
        if constexpr (Hooks::kSoftCap) {{
          in = Hooks::exponent(c, in, row, key);
          float other = -in;
          ops::half_tanh(in, other);
        }}
        const float rest = Hooks::rest(c, in, row, key);
        score = (fmaf(line.slope, float(k - first), rest) + line.at_first) * Hooks::unit(c);
      }}
    }}
    p.out[i] = Hooks::pointwise(c, score);
    p.mask[i] = Hooks::mask(c, row, key);
  }}
  if (threadIdx.x == 0) p.sink[place] = Hooks::sink(c, b, h) + Hooks::pointwise_scale(c, b, h, q);
}}

struct SharedRow {{
  float* values;
  FAJIT_FN float operator[](int i) const {{ return values[i]; }}
  FAJIT_FN void write(int i, float x) const {{ values[i] = x; }}
}};

// Two warps with one row each: f(context, row, temps, lane, b, h, position).
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


def source(cases: Sequence[Built], kernels: Callable[[int, Built], str]) -> str:
    return unit_source(_HEAD, cases, kernels, "cuda")


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
    return Unit(source(PAIRED, pair_kernel), tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def row_unit(tmp_path_factory):
    return Unit(source(ROWS, row_kernels), tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize("number", range(len(PAIRED)), ids=[x.case.name for x in PAIRED])
def test_pairs(pair_unit, number):
    pairs = Pairs(PAIRED[number], number)
    batch, heads = pairs.size[:2]
    pair_unit.run(f"pairs_{number}", bytes(pairs.call), pairs.memory, ("out", "mask", "sink"),
                  blocks=(pairs.rows, heads, batch), threads=64)  # fmt: skip
    capped = "kSoftCap = true" in lower_hooks(PAIRED[number].ir, "Case", "cuda")
    pairs.check(atol=_MOST_CAP * 2.0**-20 if capped else 3e-6)


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[x.id for x in ROWS])
def test_rows(row_unit, number):
    for hook in ROW_HOOKS:
        if ROWS[number].ir.hook(hook) is not None:
            rows = Rows(ROWS[number], hook, number)
            row_unit.run(f"{hook}_{number}", bytes(rows.call), rows.memory, ("out",),
                         blocks=(ROW_COUNT // 2, rows.heads, rows.size[0]), threads=64)  # fmt: skip
            rows.check()


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
    unit = Unit(source([built], pair_kernel), tmp_path)
    size = (2, 4, 40, 40)
    scores, out, sink = torch.randn(size), torch.empty(size), torch.empty(size[:3])
    mask = torch.empty(size, dtype=torch.uint8)
    call, memory = call_of(built, lengths_of(shape), in_=scores, out=out, mask=mask, sink=sink,
                           q_step=1, num_keys=40, group=2)  # fmt: skip
    unit.run("pairs_0", bytes(call), memory, ("out", "mask", "sink"), blocks=(40, 4, 2), threads=64)
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
    (tmp_path / "unit.cu").write_text(source(PAIRED, pair_kernel))
    words = nvcc(tmp_path / "unit.cu", "-cubin", "--ptxas-options=-v", "-o", "unit.cubin")
    assert words.count("bytes stack frame") == len(PAIRED)
    assert words.count("0 bytes stack frame, 0 bytes spill stores") == len(PAIRED)
