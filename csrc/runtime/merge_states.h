// Merging partial attention states, outside of any artifact.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace fajit::runtime {

// Addresses and strides (in elements) of one state as rows [d0, d1, d2], each of `head_dim_v`
// contiguous fp32 entries, and its natural-log lse [d0, d1, d2]. `lse` is null for a sum.
struct State {
  const float* out;
  const float* lse;
  std::array<int64_t, 3> out_strides, lse_strides;
};

enum class Dtype { kFloat32, kBfloat16, kFloat16 };

// Where the merged state is written: `out` in `dtype`, `lse` null for sums. `mask`: bytes
// [d0, d1, d2], 0 for rows that get the first state instead; null if all rows are merged.
struct Merged {
  void* out;
  float* lse;
  std::array<int64_t, 3> out_strides, lse_strides;
  Dtype dtype;
  const uint8_t* mask;
  std::array<int64_t, 3> mask_strides;
};

// Writes the merged state of every row into `merged`:
//   lse = log(sum_i exp(lse_i)), out = sum_i exp(lse_i - lse) out_i   (Milakov, Gimelshein 2018),
// out 0 and lse -inf where every lse_i is -inf, for any out_i. If `merged.lse` is null, the states
// are sums and are added. States are read in order, so the result does not depend on `num_threads`.
// out and lse of the first state may be those of `merged`. Throws LaunchError for several threads
// in a forked child: see fork_guard.h.
void merge_states(const std::vector<State>& states, const Merged& merged,
                  const std::array<int64_t, 3>& shape, int64_t head_dim_v, int num_threads);

}  // namespace fajit::runtime
