#include "merge_states.h"

#include <algorithm>
#include <cmath>
#include <cstring>
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

uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (x != x) return static_cast<uint16_t>((bits | 1u << 22) >> 16);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rounds to nearest even.
uint16_t to_float16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000;
  if (x != x) return static_cast<uint16_t>(sign | 0x7e00 | (bits >> 13 & 0x1ff));
  float magnitude = std::fabs(x);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x1p-14f) {  // subnormal: the last bits of the sum are those of the result
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, sizeof(bits));
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  const uint32_t rounded = (bits & 0x7fffffff) + 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13);
}

// Writes a row in the dtype of `merged`.
void store(const float* row, const Merged& merged, int64_t at, int64_t dim) {
  if (merged.dtype == Dtype::kFloat32) {
    std::copy_n(row, dim, static_cast<float*>(merged.out) + at);
    return;
  }
  uint16_t* const out = static_cast<uint16_t*>(merged.out) + at;
  const auto convert = merged.dtype == Dtype::kBfloat16 ? to_bfloat16 : to_float16;
  for (int64_t d = 0; d < dim; ++d) out[d] = convert(row[d]);
}

void add_row(const std::vector<State>& states, const Merged& merged, const Row& row,
             std::vector<float>& sums) {
  const int64_t dim = static_cast<int64_t>(sums.size());
  std::fill(sums.begin(), sums.end(), 0.0f);
  for (const State& state : states) {
    const float* in = state.out + row.at(state.out_strides);
    for (int64_t d = 0; d < dim; ++d) sums[d] += in[d];
  }
  store(sums.data(), merged, row.at(merged.out_strides), dim);
}

void merge_row(const std::vector<State>& states, const Merged& merged, const Row& row,
               std::vector<float>& sums) {
  const int64_t dim = static_cast<int64_t>(sums.size());
  float largest = kMinusInf;
  for (const State& state : states) {
    // Unlike std::max, this keeps a NaN, which then reaches the result.
    const float lse = state.lse[row.at(state.lse_strides)];
    if (!(lse <= largest)) largest = lse;
  }
  std::fill(sums.begin(), sums.end(), 0.0f);
  float lse_of_all = kMinusInf;
  if (largest != kMinusInf) {
    float sum = 0.0f;
    for (const State& state : states) {
      const float lse = state.lse[row.at(state.lse_strides)];
      // The out of an empty state is not read: it may have any contents.
      if (lse == kMinusInf) continue;
      const float weight = std::exp(lse - largest);
      const float* in = state.out + row.at(state.out_strides);
      sum += weight;
      for (int64_t d = 0; d < dim; ++d) sums[d] += weight * in[d];
    }
    const float inverse = 1.0f / sum;
    for (float& x : sums) x *= inverse;
    lse_of_all = largest + std::log(sum);
  }
  store(sums.data(), merged, row.at(merged.out_strides), dim);
  merged.lse[row.at(merged.lse_strides)] = lse_of_all;
}

// A row that the mask excludes: the first state as it is, which may be `merged` itself.
void keep_row(const State& state, const Merged& merged, const Row& row, std::vector<float>& sums) {
  const int64_t dim = static_cast<int64_t>(sums.size());
  std::copy_n(state.out + row.at(state.out_strides), dim, sums.begin());
  store(sums.data(), merged, row.at(merged.out_strides), dim);
  if (merged.lse != nullptr)
    merged.lse[row.at(merged.lse_strides)] = state.lse[row.at(state.lse_strides)];
}

}  // namespace

void merge_states(const std::vector<State>& states, const Merged& merged,
                  const std::array<int64_t, 3>& shape, int64_t head_dim_v, int num_threads) {
  const int64_t rows = shape[0] * shape[1] * shape[2];
  if (rows == 0) return;
  const int64_t entries = rows * head_dim_v * static_cast<int64_t>(states.size() + 1);
  const int64_t useful = std::max<int64_t>(1, entries / kEntriesPerThread);
  const int threads = static_cast<int>(std::min<int64_t>(num_threads, useful));
  if (threads > 1) before_parallel_region();
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> sums(static_cast<size_t>(head_dim_v));
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
      const Row row{r / (shape[1] * shape[2]), r / shape[2] % shape[1], r % shape[2]};
      const bool merges = merged.mask == nullptr || merged.mask[row.at(merged.mask_strides)] != 0;
      if (!merges) {
        keep_row(states[0], merged, row, sums);
      } else if (merged.lse == nullptr) {
        add_row(states, merged, row, sums);
      } else {
        merge_row(states, merged, row, sums);
      }
    }
  }
}

}  // namespace fajit::runtime
