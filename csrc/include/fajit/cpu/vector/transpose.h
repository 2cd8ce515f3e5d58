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

template <int Half>
FAJIT_INLINE void exchange_halves(vi (&r)[kLanes]) {
  const vi lane = iota();
  const vi upper = (lane & Half) != 0;
  const vi even = upper ? lane - Half + kLanes : lane;
  const vi odd = upper ? lane + kLanes : lane + Half;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & Half) continue;
    const vi a = r[i], b = r[i + Half];
    r[i] = shuffle2(a, b, even);
    r[i + Half] = shuffle2(a, b, odd);
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
    const vi lane = iota();
    const vi upper = (lane & half) != 0;
    const vi even = upper ? lane - half + kLanes : lane;
    const vi odd = upper ? lane + kLanes : lane + half;
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      const vi a = (vi)r[i], b = (vi)r[i + half];
      r[i] = join((Vector)shuffle2(a, b, even), (Vector)shuffle2(a, b, odd));
    }
  }
  return r[0];
}

}  // namespace fajit
