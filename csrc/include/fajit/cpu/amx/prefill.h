// The two products of a block of query rows on AMX tiles, with rows on lanes:
//
//   scores   S^T[key][row] = sum_d K[key][d] Q^T[d][row]           K: contiguous rows
//   values   O^T[dim][row] += sum_key V^T[dim][key] P^T[key][row]   V^T: `pack_value_tiles`
//
// Q^T, P^T, S^T and O^T have the layout of the vector products: NV vectors of rows next to each
// other.
#pragma once
#include <fajit/cpu/amx/tiles.h>
#include <fajit/cpu/vector/transpose.h>

namespace fajit {

// Keys [0, count) against a block of rows; not scaled. `keys`: contiguous rows of `Words` words;
// `keys` and `s` have room for count rounded up to 16. `fetch(words)` is called with the words of K
// that were multiplied.
template <int NV, int Words, class Fetch>
__attribute__((noinline)) void tile_scores(const void* keys, int count, const int32_t* qt, float* s,
                                           Fetch fetch) {
  static_assert(NV <= 2);
  constexpr int64_t key_bytes = Words * 4, stride = NV * 64;
  const char* k = static_cast<const char*>(keys);
  const TileRows queries{reinterpret_cast<const char*>(qt), stride};
  const auto part = [&](auto tiles, int n) __attribute__((always_inline)) {
    constexpr int steps = Words / 16;
    const auto fetch_some = [&]() __attribute__((always_inline)) { fetch(256 * tiles.value); };
    const char* first = k + n * key_bytes;
    zero_tiles<tiles.value, NV>();
    multiply_tiles<tiles.value, NV>({first, key_bytes}, {first + 16 * key_bytes, key_bytes},
                                    queries, steps, fetch_some);
    store_tiles<tiles.value, NV>(s + n * NV * kLanes, stride);
  };
  int n = 0;
  for (; n + 16 < count; n += 32) part(Tiles<2>{}, n);
  if (n < count) part(Tiles<1>{}, n);
}

// O^T += V^T P^T for `Blocks` blocks of 16 dims and `steps` of 32 keys. `fetch` as above.
template <int NV, int Blocks, class Fetch>
__attribute__((noinline)) void tile_values(const int32_t* vt, int steps, const int32_t* pt,
                                           float* o, Fetch fetch) {
  static_assert(NV <= 2 && Blocks % 2 == 0);
  constexpr int64_t tile_bytes = 1024, stride = NV * 64;
  const char* weights = reinterpret_cast<const char*>(pt);
  for (int d = 0; d < Blocks; d += 2) {
    const char* v = reinterpret_cast<const char*>(vt) + d * tile_bytes;
    float* out = o + d * 16 * NV * kLanes;
    load_tiles<2, NV>(out, stride);
    // V^T is [step][dims]: a step begins after all dims of the step before.
    for (int k = 0; k < steps; ++k)
      multiply_tiles<2, NV>({v + k * Blocks * tile_bytes, 64},
                            {v + (k * Blocks + 1) * tile_bytes, 64},
                            {weights + k * 16 * stride, stride}, 1,
                            [&]() __attribute__((always_inline)) { fetch(512); });
    store_tiles<2, NV>(out, stride);
  }
}

// 32 rows of V to V^T tiles, [block of 16 dims][dim][16 words]: a word holds two
// neighbouring keys. `Blocks` is even; rows have 16 * Blocks elements.
template <int Blocks>
FAJIT_INLINE void pack_value_tiles(const bfloat16_t* const (&rows)[32], int32_t* vt) {
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
