// The functions that row hooks rendered for CUDA call. A warp processes one row.
//
// Element i of a row belongs to lane i % 32. All 32 lanes of a converged warp call a row hook, so
// that reductions are shuffles. Loops over a row are unrolled, so a lane's values stay in
// registers.
#pragma once
#include <fajit/cuda/hooks/hook_ops.h>

namespace fajit {
namespace ops {

// Maximum number of elements of a row of N that one lane has.
template <int N> inline constexpr int per_lane = (N + 31) / 32;

// Calls f(i, j) for every element i of a row of N that belongs to `lane`; j counts them.
template <int N, class F> FAJIT_FN void each_element(int lane, F f) {
#pragma unroll
  for (int j = 0; j < N / 32; ++j) f(lane + 32 * j, j);
  if constexpr (N % 32 != 0) {
    if (lane < N % 32) f(lane + N / 32 * 32, N / 32);
  }
}

FAJIT_FN void sync_warp() {
#if defined(__CUDA_ARCH__)
  __syncwarp();
#endif
}

// The value of x in lane `lane ^ mask`.
template <class T> FAJIT_FN T from_lane_xor(T x, int mask) {
#if defined(__CUDA_ARCH__)
  if constexpr (same<T, bool>) return __shfl_xor_sync(0xffffffffu, int(x), mask) != 0;
  else return __shfl_xor_sync(0xffffffffu, x, mask);
#else
  return x;
#endif
}

// Reduces `x` over all lanes, in the same tree and therefore with the same bits in every lane and
// run.
template <class T, class Join> FAJIT_FN T join_lanes(T x, Join join) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = join(x, from_lane_xor(x, mask));
  return x;
}

// Operations of reductions over a row, each with its neutral element.
struct Sum {
  template <class T> static FAJIT_FN T none() { return T(0); }
  template <class T> FAJIT_FN T operator()(T a, T b) const { return T(add(a, b)); }
};
struct Product {
  template <class T> static FAJIT_FN T none() { return T(1); }
  template <class T> FAJIT_FN T operator()(T a, T b) const { return T(mul(a, b)); }
};
struct Greatest {
  template <class T> static FAJIT_FN T none() {
    if constexpr (is_float<T>) return T(-math::kInf);
    else return same<T, bool> ? T(0) : T(Unsigned<T>(1) << (8 * sizeof(T) - 1));
  }
  template <class T> FAJIT_FN T operator()(T a, T b) const { return T(maximum(a, b)); }
};
struct Least {
  template <class T> static FAJIT_FN T none() {
    if constexpr (is_float<T>) return T(math::kInf);
    else return same<T, bool> ? T(1) : T(~(Unsigned<T>(1) << (8 * sizeof(T) - 1)));
  }
  template <class T> FAJIT_FN T operator()(T a, T b) const { return T(minimum(a, b)); }
};
struct Any {
  template <class T> static FAJIT_FN T none() { return T(0); }
  template <class T> FAJIT_FN T operator()(T a, T b) const { return T(a | b); }
};
struct All {
  template <class T> static FAJIT_FN T none() { return T(1); }
  template <class T> FAJIT_FN T operator()(T a, T b) const { return T(a & b); }
};

// Reduces `total` and f(i) of this lane's elements i of N.
template <int N, class Join, class T, class F>
FAJIT_FN T join_elements(int lane, Join join, T total, F f) {
  each_element<N>(lane, [&](int i, int) { total = join(total, T(f(i))); });
  return total;
}

}  // namespace ops
}  // namespace fajit
