// 32 stored elements at once as bf16, for bf16 dot products.
#pragma once
#include <fajit/cpu/vector/load_row.h>

#if defined(__AVX512BF16__)
namespace fajit {

// 32 floats of 8 bits as bf16, which has Shift more bits of mantissa and a larger exponent by
// `bias`. Magnitudes from `special` to 127, then those from 0 to `subnormal`, come from `table`.
template <int Shift, uint16_t bias, uint16_t special, uint16_t subnormal>
FAJIT_INLINE vi small_float_words(const void* p, v32 table) {
  v32 w;
  asm("vpmovzxbw %1, %0" : "=v"(w) : "m"(*static_cast<const char (*)[32]>(p)));
  const v32 entry = (w - special) & uint16_t{127};
  const v32 normal = ((w & uint16_t{127}) << Shift) + uint16_t(bias << 7);
  constexpr uint16_t entries = 129 - special + subnormal;
  const v32 magnitude = entry < entries ? __builtin_shuffle(table, entry) : normal;
  return (vi)(magnitude | ((w << 8) & uint16_t{0x8000}));
}

// Dims [d, d + 32) of a row of Dim as words of two bf16, exact for integers and floats of 8 bits,
// else rounded once. Products take subnormal bf16 as 0, and so does the rounding.
template <int Dim, class T>
FAJIT_INLINE vi bfloat16_words(const T* row, int d) {
  [[maybe_unused]] const T* const p = row + d;
  if constexpr (same<T, bfloat16_t>) {
    return load<vi>(p);
  } else if constexpr (same<T, int4x2_t>) {
    static_assert(Dim % 64 == 0);
    constexpr v32 table = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                           0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    v32 pairs;
    asm("vpmovzxbw %1, %0" : "=v"(pairs) : "m"(*(const char (*)[32])(row + d % (Dim / 2))));
    return (vi)__builtin_shuffle(table, (pairs >> uint16_t(d < Dim / 2 ? 0 : 4)) & uint16_t{15});
  } else if constexpr (same<T, e4m3_t>) {
    constexpr v32 table = {0x7fc0, 0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    return small_float_words<4, 120, 127, 7>(p, table);
  } else if constexpr (same<T, e5m2_t>) {
    constexpr v32 table = {0x7f80, 0x7fc0, 0x7fc0, 0x7fc0, 0, 0x3780, 0x3800, 0x3840};
    return small_float_words<5, 112, 124, 3>(p, table);
  } else {
    const vf low = Storage<T>::load(p), high = Storage<T>::load(p + kLanes);
    vi words;
    asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(words) : "v"(high), "v"(low));
    return words;
  }
}

// The first and the last 16 of them as floats.
FAJIT_INLINE vf low_floats(vi words) {
  const v32 w = (v32)words;
  return bfloat16_to_float(
      __builtin_shufflevector(w, w, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
FAJIT_INLINE vf high_floats(vi words) {
  const v32 w = (v32)words;
  return bfloat16_to_float(__builtin_shufflevector(w, w, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26,
                                                   27, 28, 29, 30, 31));
}

}  // namespace fajit
#endif
