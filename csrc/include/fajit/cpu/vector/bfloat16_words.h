// 32 stored elements at once as bf16, for bf16 dot products.
#pragma once
#include <fajit/cpu/vector/load_row.h>

#if defined(__AVX512BF16__)
namespace fajit {

// 32 floats of 8 bits as bf16, which has Shift more bits of mantissa and a larger exponent by
// `bias`. Magnitudes from 128 - special on, which are infinite or NaN, come from `table` behind
// each other, as do those from 0 to 15 - special, of which the first ones are subnormal.
template <int Shift, uint16_t bias, uint16_t special>
FAJIT_INLINE vi small_float_words(const void* p, v32 table) {
  const v32 w = load_signed_bytes(p), entry = w + special;  // modulo 128
  v32 x = ((entry << Shift) & uint16_t(127 << Shift)) + uint16_t((bias << 7) - (special << Shift));
  unsigned looked;
  asm("vptestnmw %1, %2, %0" : "=Yk"(looked) : "v"(entry), "v"(v32{} + uint16_t{0x70}));
  asm("vpermw %2, %3, %0%{%1%}" : "+v"(x) : "Yk"(looked), "v"(table), "v"(entry));
  return (vi)(x | (w & uint16_t{0x8000}));
}

// Dims [d, d + 32) of a row of Dim codes of 4 bits, by a table that repeats its 16 values.
template <int Dim>
FAJIT_INLINE v32 lookup_codes(const int4x2_t* row, int d, v32 table) {
  static_assert(Dim % 64 == 0);
  const v32 pairs = load_bytes(row + d % (Dim / 2));
  return lookup32(table, pairs >> uint16_t(d < Dim / 2 ? 0 : 4));
}

// Dims [d, d + 32) of a row of Dim as words of two bf16, exact for integers and floats of 8 bits,
// else rounded once. Products take subnormal bf16 as 0, and so does the rounding.
template <int Dim, class T>
FAJIT_INLINE vi bfloat16_words(const T* row, int d) {
  [[maybe_unused]] const T* const p = row + d;
  if constexpr (same<T, bfloat16_t>) {
    return load<vi>(p);
  } else if constexpr (same<T, int4x2_t>) {
    constexpr v32 table = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                           0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                           0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                           0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    return (vi)lookup_codes<Dim>(row, d, table);
  } else if constexpr (same<T, e4m3_t>) {
    constexpr v32 table = {0x7fc0, 0,      0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40,
                           0x3c60, 0x3c80, 0x3c90, 0x3ca0, 0x3cb0, 0x3cc0, 0x3cd0, 0x3ce0};
    return small_float_words<4, 120, 1>(p, table);
  } else if constexpr (same<T, e5m2_t>) {
    constexpr v32 table = {0x7f80, 0x7fc0, 0x7fc0, 0x7fc0, 0,      0x3780, 0x3800, 0x3840,
                           0x3880, 0x38a0, 0x38c0, 0x38e0, 0x3900, 0x3920, 0x3940, 0x3960};
    return small_float_words<5, 112, 4>(p, table);
  } else {
    const vf low = Storage<T>::load(p), high = Storage<T>::load(p + kLanes);
    vi words;
    asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(words) : "v"(high), "v"(low));
    return words;
  }
}

}  // namespace fajit
#endif
