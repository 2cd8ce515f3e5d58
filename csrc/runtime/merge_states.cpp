#include "merge_states.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "host/fork_guard.h"

namespace fajit::runtime {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// Minimum number of entries per thread, so that waking it is worth it.
constexpr int64_t kEntriesPerThread = 16 * 1024;

struct Row {
  int64_t i, j, k;
  int64_t at(const std::array<int64_t, 3>& strides) const {
    return i * strides[0] + j * strides[1] + k * strides[2];
  }
};

void add_row(const std::vector<State>& states, const State& merged, const Row& row, int64_t dim) {
  float* out = merged.out + row.at(merged.out_strides);
  std::fill_n(out, dim, 0.0f);
  for (const State& state : states) {
    const float* in = state.out + row.at(state.out_strides);
    for (int64_t d = 0; d < dim; ++d) out[d] += in[d];
  }
}

void merge_row(const std::vector<State>& states, const State& merged, const Row& row, int64_t dim) {
  float* out = merged.out + row.at(merged.out_strides);
  float largest = kMinusInf;
  for (const State& state : states) {
    // Unlike std::max, this keeps a NaN, which then reaches the result.
    const float lse = state.lse[row.at(state.lse_strides)];
    if (!(lse <= largest)) largest = lse;
  }
  std::fill_n(out, dim, 0.0f);
  if (largest == kMinusInf) {
    merged.lse[row.at(merged.lse_strides)] = kMinusInf;
    return;
  }
  float sum = 0.0f;
  for (const State& state : states) {
    const float lse = state.lse[row.at(state.lse_strides)];
    // The out of an empty state is not read: it may have any contents.
    if (lse == kMinusInf) continue;
    const float weight = std::exp(lse - largest);
    const float* in = state.out + row.at(state.out_strides);
    sum += weight;
    for (int64_t d = 0; d < dim; ++d) out[d] += weight * in[d];
  }
  const float inverse = 1.0f / sum;
  for (int64_t d = 0; d < dim; ++d) out[d] *= inverse;
  merged.lse[row.at(merged.lse_strides)] = largest + std::log(sum);
}

}  // namespace

void merge_states(const std::vector<State>& states, const State& merged,
                  const std::array<int64_t, 3>& shape, int64_t head_dim_v, int num_threads) {
  const int64_t rows = shape[0] * shape[1] * shape[2];
  if (rows == 0) return;
  const int64_t entries = rows * head_dim_v * static_cast<int64_t>(states.size() + 1);
  const int64_t useful = std::max<int64_t>(1, entries / kEntriesPerThread);
  const int threads = static_cast<int>(std::min<int64_t>(num_threads, useful));
  if (threads > 1) before_parallel_region();
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const Row row{r / (shape[1] * shape[2]), r / shape[2] % shape[1], r % shape[2]};
    if (merged.lse == nullptr) {
      add_row(states, merged, row, head_dim_v);
    } else {
      merge_row(states, merged, row, head_dim_v);
    }
  }
}

}  // namespace fajit::runtime
