// The two products of a block of query rows on AMX tiles, with rows on lanes:
//
//   scores   S^T[key][row] = sum_d K[key][d] Q^T[d][row]           K: rows side by side
//   values   O^T[dim][row] += sum_key V^T[dim][key] P^T[key][row]   V^T: `pack_value_tiles`
//
// Q^T, P^T, S^T and O^T lie as for the vector products: NV vectors of rows together.
#pragma once
#include <fajit/cpu/amx.h>
#include <fajit/cpu/transpose.h>

namespace fajit {

// S^T of NA x NB tiles: 16 NA keys by 16 NB of a block's NV vectors of rows. Not scaled.
template <int NA, int NB, int NV, int Words>
FAJIT_INLINE void score_tiles(const char* keys, const int32_t* qt, float* s) {
  constexpr int64_t key_bytes = Words * 4, stride = NV * 64;
  zero_tiles<NA, NB>();
  multiply_tiles<NA, NB>({keys, key_bytes}, {keys + 16 * key_bytes, key_bytes},
                         {reinterpret_cast<const char*>(qt), stride}, Words / 16, [] {});
  store_tiles<NA, NB>(s, stride);
}

// Keys [0, count) against a block of rows. `keys`: rows of `Words` words side by side; `keys` and `s`
// have room for count rounded up to 16.
template <int NV, int Words>
__attribute__((noinline)) void tile_scores(const void* keys, int count, const int32_t* qt, float* s) {
  const char* k = static_cast<const char*>(keys);
  const auto part = [&](auto tiles, int n) __attribute__((always_inline)) {
    constexpr int NA = tiles.value;
    const char* rows = k + int64_t{n} * Words * 4;
    float* out = s + n * NV * kLanes;
    if constexpr (NV >= 2) score_tiles<NA, 2, NV, Words>(rows, qt, out);
    if constexpr (NV == 1 || NV == 3)
      score_tiles<NA, 1, NV, Words>(rows, qt + (NV - 1) * kLanes, out + (NV - 1) * kLanes);
    if constexpr (NV == 4)
      score_tiles<NA, 2, NV, Words>(rows, qt + 2 * kLanes, out + 2 * kLanes);
  };
  int n = 0;
  for (; n + 16 < count; n += 32) part(Tiles<2>{}, n);
  if (n < count) part(Tiles<1>{}, n);
}

// O^T of NA x NB tiles over `steps` of 32 keys.
template <int NA, int NB, int NV>
FAJIT_INLINE void value_tiles(const int32_t* vt, int64_t step_words, int steps, const int32_t* pt,
                              float* o) {
  constexpr int64_t stride = NV * 64;
  load_tiles<NA, NB>(o, stride);
  // A step of V^T lies behind all dims of the one before.
  const char* v = reinterpret_cast<const char*>(vt);
  const char* p = reinterpret_cast<const char*>(pt);
  for (int k = 0; k < steps; ++k)
    multiply_tiles<NA, NB>({v + k * step_words * 4, 64}, {v + k * step_words * 4 + 1024, 64},
                           {p + k * 16 * stride, stride}, 1, [] {});
  store_tiles<NA, NB>(o, stride);
}

// O^T += V^T P^T for `Blocks` blocks of 16 dims and `steps` of 32 keys.
template <int NV, int Blocks>
__attribute__((noinline)) void tile_values(const int32_t* vt, int steps, const int32_t* pt,
                                           float* o) {
  constexpr int64_t step_words = Blocks * 256;
  const auto part = [&](auto tiles, int d) __attribute__((always_inline)) {
    constexpr int NA = tiles.value;
    const int32_t* v = vt + d * 256;
    float* out = o + d * 16 * NV * kLanes;
    if constexpr (NV >= 2) value_tiles<NA, 2, NV>(v, step_words, steps, pt, out);
    if constexpr (NV == 1 || NV == 3)
      value_tiles<NA, 1, NV>(v, step_words, steps, pt + (NV - 1) * kLanes, out + (NV - 1) * kLanes);
    if constexpr (NV == 4)
      value_tiles<NA, 2, NV>(v, step_words, steps, pt + 2 * kLanes, out + 2 * kLanes);
  };
  int d = 0;
  for (; d + 1 < Blocks; d += 2) part(Tiles<2>{}, d);
  if (d < Blocks) part(Tiles<1>{}, d);
}

// 32 rows of V (null: zero) to V^T tiles, [block of 16 dims][dim][16 words]: a word holds two
// neighbouring keys. `Blocks` is even; rows have 16 * Blocks elements.
template <int Blocks>
FAJIT_INLINE void pack_value_tiles(const bfloat16_t* const (&rows)[32], int32_t* vt) {
  typedef uint16_t v32 __attribute__((vector_size(64)));
  // Interleaving within 128-bit lanes is one operation, and leaves dims in this order.
  constexpr int dims[16] = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
  const v32 low = {0,  32, 1,  33, 2,  34, 3,  35, 8,  40, 9,  41, 10, 42, 11, 43,
                   16, 48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59};
#pragma GCC unroll 1
  for (int d = 0; d < 16 * Blocks; d += 32) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      vi r[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
        r[i] = (vi)__builtin_shuffle(load<v32>(rows[2 * i] + d), load<v32>(rows[2 * i + 1] + d),
                                     low + static_cast<uint16_t>(4 * half));
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) store(vt + (d + dims[i] + 4 * half) * 16, r[i]);
    }
  }
}

}  // namespace fajit
