// Writes the result of a kernel: the state (out, lse) of each row, unfinalised or final.
//
// Unfinalised states are fp32, before sink and output_mod. Each row is finalised once: in the
// attention kernel when one work item sees all of its keys, else in fajit_merge.
#pragma once
#include <fajit/context.h>
#include <fajit/cpu/packed_rows.h>
#include <fajit/cpu/vector/fast_math.h>
#include <fajit/cpu/vector/load_row.h>
#include <fajit/emit.h>

namespace fajit {

struct Normalized {
  vf factor;  // multiplies the sum of weighted values
  vf lse;     // natural
};

// `top` and `sum` of rows whose weights are e^(score - top). Rows without a key have top = -inf and
// sum = 0: factor 0, lse -inf.
FAJIT_INLINE Normalized normalize(vf top, vf sum) {
  const vi empty = sum == 0.0f;
  const vf lse = top + math::log(sum);
  return {select(empty, splat(0.0f), 1.0f / sum), select(empty, splat(-kInf), lse)};
}

// normalize() with a sink: one more key, whose value is zero.
FAJIT_INLINE Normalized normalize_with_sink(vf top, vf sum, vf sink) {
  const vf highest = max(sink, top);
  const vf base = select(highest == -kInf, splat(0.0f), highest);  // avoids -inf - -inf = NaN
  const vf kept = math::exp2((top - base) * kLog2e);
  const Normalized n = normalize(base, sum * kept + math::exp2((sink - base) * kLog2e));
  return {n.factor * kept, n.lse};
}

template <class Config, class Hooks>
struct RowWriter {
  static constexpr int kPaddedV = round_up(Config::kHeadDimV, kLanes);

  Context c;
  int32_t request;  // of the item
  Emit emit;

  FAJIT_INLINE bool finalizes() const { return emit == Emit::kFinal; }

  // The factors and lse of rows of requests `b` and heads `h`; the sink is included only in final
  // states.
  FAJIT_INLINE Normalized normalizer(vf top, vf sum, vi b, vi h) const {
    if constexpr (Hooks::kPointwise) {
      return {splat(1.0f), splat(0.0f)};
    } else if constexpr (Hooks::kSink) {
      if (finalizes()) {
        vf sink;
        for (int i = 0; i < kLanes; ++i) sink[i] = Hooks::sink(c, b[i], h[i]);
        return normalize_with_sink(top, sum, sink);
      }
    }
    return normalize(top, sum);
  }

  // `values` are normalised and padded to kLanes. `split_row`: row of the split state.
  void write(const PackedRow& row, int64_t split_row, const float* values, float lse) const {
    const fajit_args& a = *c.args;
    if (emit == Emit::kSplit) {
      store_row<float, Config::kHeadDimV>(a.partial_out + split_row * Config::kHeadDimV, values);
      a.partial_lse[split_row] = lse;
      return;
    }
    const int64_t at = row_offset(a.out_stride, request, row.h, row.row);
    if constexpr (!Hooks::kPointwise)
      if (a.flags & FAJIT_WRITE_LSE) a.lse[row_offset(a.lse_stride, request, row.h, row.row)] = lse;
    if (emit == Emit::kUnfinalized) {
      store_row<float, Config::kHeadDimV>(static_cast<float*>(a.out) + at, values);
      return;
    }
    auto* out = static_cast<typename Config::Q*>(a.out) + at;
    if constexpr (Hooks::kOutputMod) {
      alignas(64) float changed[kPaddedV];
      Hooks::output_mod(c, values, changed, lse, row.b, row.h, row.q_idx);
      store_row<typename Config::Q, Config::kHeadDimV>(out, changed);
    } else {
      store_row<typename Config::Q, Config::kHeadDimV>(out, values);
    }
  }
};

}  // namespace fajit
