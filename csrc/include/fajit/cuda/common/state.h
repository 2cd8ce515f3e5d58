// Writes the result of a kernel: the state (out, lse) of each row, unfinalised or final.
//
// Unfinalised states are fp32, before sink and output_mod. Each row is finalised once: in the
// attention kernel when one work item sees all of its keys, else in the merge kernel.
#pragma once
#include <fajit/cuda/common/packed_rows.h>
#include <fajit/cuda/common/units.h>
#include <fajit/cuda/tile/hook_rows.h>
#include <fajit/emit.h>

namespace fajit::cuda {

struct Normalized {
  float factor;  // multiplies the sum of weighted values
  float lse;     // natural
};

// `top2` (base-2 units) and `sum` of a row whose weights are 2^(score2 - top2). A row without a key
// has top2 = -inf and sum = 0: factor 0, lse -inf.
FAJIT_DEV Normalized normalize(float top2, float sum) {
  if (sum == 0.0f) return {0.0f, -FAJIT_INF};
  // The largest weight is at least 1, so the sum is not small.
  return {ptx::reciprocal_approx(sum), (top2 + ptx::log2_approx(sum)) * kLn2};
}

// normalize() with a sink (in natural units): one more key, whose value is zero.
FAJIT_DEV Normalized normalize_with_sink(float top2, float sum, float sink) {
  const float sink2 = sink * kLog2e;
  const float top = fmaxf(sink2, top2);
  const float base = top == -FAJIT_INF ? 0.0f : top;  // avoids -inf - -inf = NaN
  const float kept = ptx::exp2_approx(top2 - base);
  const Normalized n = normalize(base, sum * kept + ptx::exp2_approx(sink2 - base));
  return {n.factor * kept, n.lse};
}

template <class Config, class Hooks>
struct StateWriter {
  const Context c;
  Emit emit;

  // The factor and lse of a row; the sink is included only in final states.
  FAJIT_DEV Normalized normalizer(float top2, float sum, const PackedRow& row) const {
    if constexpr (Hooks::kPointwise) {
      return {1.0f, 0.0f};
    } else if constexpr (Hooks::kSink) {
      if (emit == Emit::kFinal) return normalize_with_sink(top2, sum, Hooks::sink(c, row.b, row.h));
    }
    return normalize(top2, sum);
  }

  // The lse of a row, by one thread, in every form but that of split states.
  template <class Item>
  FAJIT_DEV void write_lse(const Item& item, const PackedRow& row, float lse) const {
    const fajit_args& a = *c.args;
    if constexpr (!Hooks::kPointwise)
      if ((a.flags & FAJIT_WRITE_LSE) != 0)
        a.lse[row_offset<Config::kMixedRows>(a, item, row, a.lse_stride)] = lse;
  }

  // One warp writes one row: `values`, normalised fp32 in shared memory, may be changed.
  // `split_row`: row of the split state. `temps`: the warp's scratch for row hooks.
  template <class Item>
  FAJIT_DEV void write_row(const Item& item, const PackedRow& row, int64_t split_row, float* values,
                           float lse, float* temps) const {
    const fajit_args& a = *c.args;
    const int lane = ptx::lane_index();
    if (emit == Emit::kSplit) {
      store_floats(a.partial_out + split_row * Config::kHeadDimV, values);
      if (!Hooks::kPointwise && lane == 0) a.partial_lse[split_row] = lse;
      return;
    }
    if (lane == 0) write_lse(item, row, lse);
    const int64_t at = row_offset<Config::kMixedRows>(a, item, row, a.out_stride);
    if (emit == Emit::kUnfinalized) {
      store_floats(static_cast<float*>(a.out) + at, values);
      return;
    }
    if constexpr (Hooks::kOutputMod)
      Hooks::output_mod(c, FloatRow{values}, temps, lane, lse, row.b, row.h, row.q_idx);
    store_rounded(static_cast<uint16_t*>(a.out) + at, values);
  }

 private:
  static FAJIT_DEV void store_floats(float* to, const float* values) {
    for (int d = ptx::lane_index(); d < Config::kHeadDimV; d += 32) to[d] = values[d];
  }

  static FAJIT_DEV void store_rounded(uint16_t* to, const float* values) {
    using Element = typename Config::Element;
    if constexpr (Config::kAligned) {
      // 8 bytes per lane: a row of 128 is one instruction of the warp.
      for (int d = ptx::lane_index() * 4; d < Config::kHeadDimV; d += 128) {
        const float4 x = *reinterpret_cast<const float4*>(values + d);
        *reinterpret_cast<uint2*>(to + d) = uint2{Element::pack(x.x, x.y), Element::pack(x.z, x.w)};
      }
    } else {
      for (int d = ptx::lane_index(); d < Config::kHeadDimV; d += 32)
        to[d] = round_to<Element>(values[d]);
    }
  }
};

}  // namespace fajit::cuda
