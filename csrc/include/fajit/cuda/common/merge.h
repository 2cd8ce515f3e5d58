// Combines the partial states of split work items, in the order of their keys, and finalises them.
//
// Softmax states (out_i normalised, lse_i): out = sum w_i out_i / sum w_i, w_i = e^(lse_i - max);
// the sink is one more weight. Pointwise states are sums and add up. fp32 throughout; the order is
// that of the partial rows, so results do not depend on which block computed them. One warp per
// row.
//
// From sm_90 on it may start while attention ends: what it does before it waits, and why that is
// safe, is in ptx/dependents.h.
#pragma once
#include <fajit/cuda/common/state.h>
#include <fajit/cuda/ptx/dependents.h>

namespace fajit::cuda {

template <class Config, class Hooks>
class Merge {
  static constexpr int kValues = (Config::kHeadDimV + 31) / 32;  // of a row, per lane
  static constexpr int kRowFloats = round_up(Config::kHeadDimV, 32);

 public:
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kSharedBytes = kWarps * (kRowFloats + Hooks::kRowTemps) * 4;

  // Block (i, j) merges rows [4 j, 4 j + 4) of item i.
  static FAJIT_DEV void run(const Context& c, unsigned char* shared, const fajit_merge_work item,
                            int32_t first_row) {
    const fajit_args& a = *c.args;
    const int warp = ptx::warp_index(), lane = ptx::lane_index();
    const int32_t step = item.row_end - item.row_begin, at = first_row + warp;
    const bool has_row = at < step && item.num_splits != 0;
    PackedRow row{};
    if (has_row) row = packed_row<Config::kMixedRows>(a, item, item.row_begin + at);
    if constexpr (Config::kMergeWaits) ptx::wait_for_kernel_before();
    if (!has_row) return;

    float top = -FAJIT_INF;
    if constexpr (!Hooks::kPointwise) {
#pragma unroll 1
      for (int32_t i = lane; i < item.num_splits; i += 32)
        top = fmaxf(top, a.partial_lse[state_row(a, item, i) + at]);
#pragma unroll
      for (int other = 16; other > 0; other /= 2)
        top = fmaxf(top, __shfl_xor_sync(ptx::kAllLanes, top, other));
    }
    const float base = top == -FAJIT_INF ? 0.0f : top;  // if an lse is NaN, its weight becomes NaN

    float sum[kValues] = {};
    float total = 0.0f;
#pragma unroll 2
    for (int32_t i = 0; i < item.num_splits; ++i) {
      const int64_t state = state_row(a, item, i) + at;
      float weight = 1.0f;
      if constexpr (!Hooks::kPointwise)
        weight = ptx::exp2_approx((a.partial_lse[state] - base) * kLog2e);
      total += weight;
      const float* const values = a.partial_out + state * Config::kHeadDimV;
#pragma unroll
      for (int j = 0; j < kValues; ++j)
        if (lane + 32 * j < Config::kHeadDimV) sum[j] += values[lane + 32 * j] * weight;
    }

    const StateWriter<Config, Hooks> writer{c, emit_of(a, -1)};
    const Normalized n = writer.normalizer(base * kLog2e, total, row);
    float* const values = reinterpret_cast<float*>(shared) + warp * (kRowFloats + Hooks::kRowTemps);
#pragma unroll
    for (int j = 0; j < kValues; ++j) values[lane + 32 * j] = sum[j] * n.factor;
    __syncwarp();
    writer.write_row(item, row, 0, values, n.lse, values + kRowFloats);
  }

 private:
  // First row of the i-th partial state of an item: contiguous, or from merge_sources.
  static FAJIT_DEV int64_t state_row(const fajit_args& a, const fajit_merge_work& item, int32_t i) {
    // compute_here: the test stays in the loop; otherwise the compiler duplicates the loop.
    if (compute_here(a.merge_sources != nullptr) != 0)
      return a.merge_sources[item.first_partial + i];
    return item.first_partial + int64_t{i} * (item.row_end - item.row_begin);
  }
};

}  // namespace fajit::cuda
