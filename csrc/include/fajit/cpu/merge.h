// Combines the partial states of split work items, in the order of their keys, and finalises them.
//
// Softmax states (out_i normalised, lse_i): out = sum w_i out_i / sum w_i, w_i = e^(lse_i - max);
// the sink is one more weight. Pointwise states are sums and add up. All in fp32, in the order of
// the partial rows, so results do not depend on which worker computed them.
#pragma once
#include <fajit/cpu/state.h>

namespace fajit {

template <class Config, class Hooks>
class Merge {
  using Writer = RowWriter<Config, Hooks>;

 public:
  explicit Merge(const Context& c) : c_(c) {}

  void run(const fajit_merge_work& w) const {
    if (w.request < 0 || w.num_splits <= 0) return;  // padding
    const Writer writer{c_, w.request, emit_of(*c_.args, -1)};
    for (int32_t p = w.row_begin; p < w.row_end; ++p)
      merge_row(writer, w, packed_row<Config::kIndirect>(*c_.args, w, p), p - w.row_begin);
  }

 private:
  // Merges row `at` of the item.
  void merge_row(const Writer& writer, const fajit_merge_work& w, const PackedRow& row,
                 int32_t at) const {
    const fajit_args& a = *c_.args;
    const int64_t step = w.row_end - w.row_begin;
    const auto state = [&](int i) {
      return at + (a.merge_sources != nullptr ? int64_t{a.merge_sources[w.first_partial + i]}
                                              : w.first_partial + i * step);
    };
    constexpr int dims = Config::kHeadDimV;

    float top = -kInf;
    if constexpr (!Hooks::kPointwise)
      for (int i = 0; i < w.num_splits; ++i) top = max(top, a.partial_lse[state(i)]);
    const float base = top == -kInf ? 0.0f : top;  // if an lse is NaN, its weight becomes NaN

    alignas(64) float sum[Writer::kPaddedV] = {};
    float total = 0.0f;
    for (int i = 0; i < w.num_splits; ++i) {
      const float* src = a.partial_out + state(i) * dims;
      float weight = 1.0f;
      if constexpr (!Hooks::kPointwise)
        weight = math::exp2((a.partial_lse[state(i)] - base) * kLog2e);
      if (weight == 0.0f) continue;
      total += weight;
      constexpr int whole = dims / kLanes * kLanes;
      for (int d = 0; d < whole; d += kLanes)
        store(sum + d, load(sum + d) + load(src + d) * weight);
      for (int d = whole; d < dims; ++d) sum[d] += src[d] * weight;
    }
    const Normalized n = writer.normalizer(splat(base), splat(total), splat(row.b), splat(row.h));
    for (int d = 0; d < Writer::kPaddedV; d += kLanes) store(sum + d, load(sum + d) * n.factor);
    writer.write(row, 0, sum, n.lse[0]);
  }

  const Context c_;
};

}  // namespace fajit
