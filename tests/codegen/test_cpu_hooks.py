"""The hooks of every case of the registry, rendered for CPUs, against the IR.

Each case runs in the lane orientations of kernels: keys on lanes (few rows), rows on lanes
(prefill), and rows of several requests on lanes (batches). All cases are one source, compiled at
-O1: only the text of the hooks is tested, not the loops of a kernel.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from flashattn_jit.codegen.spec import host_target
from flashattn_jit.env import include_dir
from flashattn_jit.jit.compilation.toolchain import flags_for
from tests.codegen.registry_hooks import (
    CALL_STRUCT,
    PAIRED,
    ROW_HOOKS,
    ROWS,
    Built,
    Pairs,
    Rows,
    unit_source,
)

ORIENTATIONS = ("keys", "rows", "requests")

_HEAD = f"""
#include <fajit/cpu/hooks/hook_ops.h>
#include <fajit/interval.h>
using namespace fajit;
{CALL_STRUCT}
static fajit_args args_of(const Call& p) {{
  fajit_args args{{}};
  args.num_requests = p.num_requests;
  args.q_len = p.q_len;
  args.kv_len = p.kv_len;
  args.q_offset = p.q_offset;
  args.q_token0 = p.q_token0;
  args.kv_token0 = p.kv_token0;
  args.tensors = p.tensors;
  args.scalars = p.scalars;
  return args;
}}
template <class M>
static bool lane(const M& m, int i) {{
  if constexpr (sizeof(M) == sizeof(bool)) return m;
  else return m[i] != 0;
}}

// kOn: which index varies over lanes: 0 keys, 1 rows of a request, 2 rows of all requests.
template <class Hooks, int kOn>
static void pairs(const Call& p) {{
  const fajit_args args = args_of(p);
  const Context c(&args);
  const int count = kOn == 0 ? p.num_keys : kOn == 1 ? p.num_rows : p.num_requests * p.num_rows;
  const int outer_rows = kOn == 0 ? p.num_rows : 1, outer_keys = kOn == 0 ? 1 : p.num_keys;
  const int requests = kOn == 2 ? 1 : p.num_requests;
  for (int b0 = 0; b0 < requests; ++b0)
    for (int h = 0; h < p.num_heads; ++h)
      for (int r0 = 0; r0 < outer_rows; ++r0)
        for (int begin = 0; begin < count; begin += kLanes)
          for (int k0 = 0; k0 < outer_keys; ++k0) {{
            vi bs, qs, ks;
            vf x;
            int64_t at[kLanes];
            for (int i = 0; i < kLanes; ++i) {{  // lanes past the end repeat the last index
              const int n = begin + i < count ? begin + i : count - 1;
              const int b = kOn == 2 ? n / p.num_rows : b0;
              const int r = kOn == 0 ? r0 : kOn == 1 ? n : n % p.num_rows;
              const int k = kOn == 0 ? n : k0;
              bs[i] = b;
              qs[i] = r * p.q_step + p.q_offset[b];
              ks[i] = k;
              at[i] = ((int64_t(b) * p.num_heads + h) * p.num_rows + r) * p.num_keys + k;
              x[i] = p.in[at[i]];
            }}
            vi mask;
            vf y;
            const auto finish = [&](const auto& row, const auto& key) {{
              y = Hooks::pointwise(c, Hooks::score(c, x, row, key));
              const auto m = Hooks::mask(c, row, key);
              for (int i = 0; i < kLanes; ++i) mask[i] = lane(m, i);
            }};
            const int32_t kv_h = h / p.group;
            if constexpr (kOn == 0)
              finish(Hooks::rows(c, b0, h, qs[0]), Hooks::keys(c, b0, kv_h, ks));
            else if constexpr (kOn == 1)
              finish(Hooks::rows(c, b0, splat(h), qs), Hooks::keys(c, b0, kv_h, k0));
            else
              finish(Hooks::rows(c, bs, splat(h), qs), Hooks::keys(c, bs, kv_h, k0));
            for (int i = 0; i < kLanes && begin + i < count; ++i) {{
              p.out[at[i]] = y[i];
              p.mask[at[i]] = mask[i] != 0;
              p.sink[at[i] / p.num_keys] =
                  Hooks::sink(c, bs[i], h) + Hooks::pointwise_scale(c, bs[i], h, qs[i]);
            }}
          }}
}}

template <int kDim, class F>
static void each_row(const Call& p, F f) {{
  const fajit_args args = args_of(p);
  const Context c(&args);
  for (int b = 0; b < p.num_requests; ++b)
    for (int h = 0; h < p.num_heads; ++h)
      for (int position = 0; position < p.num_rows; ++position) {{
        const int64_t at = ((int64_t(b) * p.num_heads + h) * p.num_rows + position) * kDim;
        f(c, p.in + at, p.out + at, b, h, position);
      }}
}}
"""


def _pair_functions(number: int) -> str:
    return "\n".join(
        f'extern "C" void pairs_{number}_{on}(const Call* p) '
        f"{{ pairs<case_{number}::Hooks, {place}>(*p); }}"
        for place, on in enumerate(ORIENTATIONS)
    )


def _row_functions(number: int, built: Built) -> str:
    return "\n".join(
        f'extern "C" void {hook}_{number}(const Call* p) {{\n'
        f"  each_row<{built.shape.head_dim}>(*p, [](const Context& c, const float* x, float* y,\n"
        "      int32_t b, int32_t h, int32_t position) {\n"
        f"    case_{number}::Hooks::{hook}(c, x, y, "
        f"{'0.25f * position, ' if hook == 'output_mod' else ''}b, h, position);\n  }});\n}}"
        for hook in ROW_HOOKS
        if built.ir.hook(hook) is not None
    )


def _library(built: list[Built], functions, folder: Path) -> ctypes.CDLL:
    source = folder / "unit.cpp"
    source.write_text(unit_source(_HEAD, built, functions, "cpu"))
    flags = [f for f in flags_for(host_target()) if not f.startswith(("-O", "-fvisibility"))]
    command = ["g++", *flags, "-O1", "-shared", "-fPIC", "-w", f"-I{include_dir()}", str(source)]
    subprocess.run([*command, "-o", str(folder / "unit.so")], check=True)
    return ctypes.CDLL(str(folder / "unit.so"))


@pytest.fixture(scope="module")
def pair_library(tmp_path_factory):
    return _library(PAIRED, lambda n, _: _pair_functions(n), tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def row_library(tmp_path_factory):
    return _library(ROWS, _row_functions, tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize("number", range(len(PAIRED)), ids=[x.case.name for x in PAIRED])
def test_pairs(pair_library, number):
    for on in ORIENTATIONS:
        pairs = Pairs(PAIRED[number], number)
        pair_library[f"pairs_{number}_{on}"](ctypes.byref(pairs.call))
        pairs.check()


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[x.id for x in ROWS])
def test_rows(row_library, number):
    for hook in ROW_HOOKS:
        if ROWS[number].ir.hook(hook) is not None:
            rows = Rows(ROWS[number], hook, number)
            row_library[f"{hook}_{number}"](ctypes.byref(rows.call))
            rows.check()
