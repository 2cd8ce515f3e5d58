// kLanes x kLanes squares of 32-bit words in registers: transposed, and reduced to a vector.
#pragma once
#include <fajit/cpu/vector/vec.h>

namespace fajit {

// r[i] = index < kLanes ? a[index] : b[index - kLanes]. Constant indices become one permute.
FAJIT_INLINE vi shuffle2(vi a, vi b, vi index) {
#if defined(__clang__)
  vi r;
  for (int i = 0; i < kLanes; ++i) r[i] = index[i] < kLanes ? a[index[i]] : b[index[i] - kLanes];
  return r;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// Lanes of two vectors in one, by `shuffle2`, that differ in the bit `half` of their number: those
// without it in `even`, those with it in `odd`; the lower half of each pair is of the first vector.
struct Halves {
  vi even, odd;
  explicit FAJIT_INLINE Halves(int half) {
    const vi lane = iota(), upper = (lane & half) != 0;
    even = upper ? lane - half + kLanes : lane;
    odd = upper ? lane + kLanes : lane + half;
  }
};

template <int Half>
FAJIT_INLINE void exchange_halves(vi (&r)[kLanes]) {
  const Halves halves(Half);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & Half) continue;
    const vi a = r[i], b = r[i + Half];
    r[i] = shuffle2(a, b, halves.even);
    r[i + Half] = shuffle2(a, b, halves.odd);
  }
}

// r[i] lane j <-> r[j] lane i, by exchanging ever smaller off-diagonal squares.
FAJIT_INLINE void transpose(vi (&r)[kLanes]) {
#if FAJIT_LANES >= 16
  exchange_halves<8>(r);
#endif
#if FAJIT_LANES >= 8
  exchange_halves<4>(r);
#endif
  exchange_halves<2>(r);
  exchange_halves<1>(r);
}

// Lane i of the result is `join` over the lanes of r[i]. Vector: vf or vi.
template <class Vector, class Join>
FAJIT_INLINE Vector reduce_columns(Vector (&r)[kLanes], Join join) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
    const Halves halves(half);
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      const vi a = (vi)r[i], b = (vi)r[i + half];
      r[i] = join((Vector)shuffle2(a, b, halves.even), (Vector)shuffle2(a, b, halves.odd));
    }
  }
  return r[0];
}

// The same of Count vectors, a power of two: `join` over the lanes of r[i] in lane `lane_of(i)`.
FAJIT_INLINE constexpr int lane_of(int i) {
  int lane = 0;
  for (int half = kLanes / 2; half > 0; half /= 2, i /= 2) lane += i % 2 * half;
  return lane;
}
template <int Count, class Vector, class Join>
FAJIT_INLINE Vector reduce_few(Vector (&r)[Count], Join join) {
  static_assert(Count <= kLanes && (Count & (Count - 1)) == 0);
  int left = Count;
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
    const Halves halves(half);
    const int other = left > 1;
    left = left > 1 ? left / 2 : 1;
#pragma GCC unroll 8
    for (int i = 0; i < left; ++i) {
      const vi a = (vi)r[i << other], b = (vi)r[(i << other) + other];
      r[i] = join((Vector)shuffle2(a, b, halves.even), (Vector)shuffle2(a, b, halves.odd));
    }
  }
  return r[0];
}

}  // namespace fajit
