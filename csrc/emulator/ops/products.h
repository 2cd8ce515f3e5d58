// Tiles of 16 rows, their fragments in the registers of a warp, and their products.
//
// Fragments, with g = lane / 4 and t = lane % 4 (PTX ISA, "Matrix fragments"):
//   A 16 x 16: word i holds row g + 8 * (i & 1), columns 2t, 2t + 1 (+ 8 where i & 2)
//   A 16 x 8:  word i holds row g + 8 * i, columns 2t, 2t + 1
//   C 16 x n:  value i is in row g + 8 * (i >> 1 & 1), column 8 * (i >> 2) + 2t + (i & 1)
//
// Products are exact in fp64, summed in fp64 in ascending k, and added to C; then rounded once to
// fp32.
#pragma once
#include "ops/lanes.h"

namespace fajit::emulator {

inline float to_element(uint32_t bits, bool half) {
  return half ? half_to_float(bits) : bf16_to_float(bits);
}

// Words of a fragment of A.
inline void read_a(const Warp& warp, const uint32_t* slots, int count, bool half,
                   float (&a)[16][16]) {
  for (int i = 0; i < count; ++i) {
    const uint32_t* words = warp.words(slots[i]);
    for (int g = 0; g < 8; ++g)
      for (int t = 0; t < 4; ++t, ++words) {
        float* at = &a[g + 8 * (i & 1)][2 * t + 4 * (i & 2)];
        at[0] = to_element(*words & 0xffff, half);
        at[1] = to_element(*words >> 16, half);
      }
  }
}

// Copies a fragment of C between registers and memory.
template <bool kReads, int kWidth>
void move_c(const Warp& warp, const uint32_t* slots, int count, float (&c)[16][kWidth]) {
  for (int i = 0; i < count; ++i) {
    uint32_t* words = warp.words(slots[i]);
    for (int g = 0; g < 8; ++g) {
      float* row = &c[g + 8 * (i >> 1 & 1)][8 * (i >> 2) + (i & 1)];
      for (int t = 0; t < 4; ++t, ++words) {
        if (kReads) row[2 * t] = bits_as<float>(*words);
        else *words = bits_as<uint32_t>(canonical(row[2 * t]));
      }
    }
  }
}

// c[16][n] += a[16][k] b[k][n]. Inlined, so that it is compiled for the target of its caller.
template <int kWidth>
__attribute__((always_inline)) inline void multiply_rows(const float (&a)[16][16],
                                                         const float (&b)[16][kWidth],
                                                         float (&c)[16][kWidth], int n, int k) {
  for (int row = 0; row < 16; ++row) {
    double sum[kWidth] = {};
    for (int i = 0; i < k; ++i)
      for (int column = 0; column < n; ++column)
        sum[column] += static_cast<double>(a[row][i]) * static_cast<double>(b[i][column]);
    for (int column = 0; column < n; ++column)
      c[row][column] = static_cast<float>(sum[column] + static_cast<double>(c[row][column]));
  }
}

}  // namespace fajit::emulator
