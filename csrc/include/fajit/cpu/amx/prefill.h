// The two products of a block of query rows on AMX tiles, with rows on lanes:
//
//   scores   S^T[key][row] = sum_d K[key][d] Q^T[d][row]           K: tiles of 16 rows
//   values   O^T[dim][row] += sum_key V^T[dim][key] P^T[key][row]   V^T: `pack_value_tiles`
//
// Q^T, P^T, S^T and O^T have the layout of the vector products: NV vectors of rows next to each
// other.
#pragma once
#include <fajit/cpu/amx/tiles.h>
#include <fajit/cpu/vector/transpose.h>

namespace fajit {

// Keys [n0, n1) against a block of rows; not scaled. `tile(n)`: the TileRows of keys [n, n + 16)
// for n a multiple of 16, all readable; `s`: of key 0, with room for n1 rounded up to 16.
// `fetch(words)` is called with the words of K that each part multiplies.
template <int NV, int Words, class Tile, class Fetch>
__attribute__((noinline)) void tile_scores(Tile tile, int n0, int n1, const int32_t* qt, float* s,
                                           Fetch fetch) {
  static_assert(NV <= 2);
  constexpr int64_t stride = NV * 64;
  const TileRows queries{reinterpret_cast<const char*>(qt), stride};
  const auto part = [&](auto tiles, int n) __attribute__((always_inline)) {
    constexpr int steps = Words / 16;
    const auto fetch_some = [&]() __attribute__((always_inline)) { fetch(256 * tiles.value); };
    zero_tiles<tiles.value, NV>();
    multiply_tiles<tiles.value, NV>(tile(n), tile(tiles.value == 2 ? n + 16 : n), queries, steps,
                                    fetch_some);
    store_tiles<tiles.value, NV>(s + n * NV * kLanes, stride);
  };
  int n = n0;
  for (; n + 16 < n1; n += 32) part(Tiles<2>{}, n);
  if (n < n1) part(Tiles<1>{}, n);
}

// O^T += V^T P^T for `Pairs` times 32 dims and `steps` of 32 keys, the last step first: sums are
// the same whether parts of a key tile are added at once or one after the other. `vt`: the tiles of
// the first step; those of the next 32 dims are PairWords after those of 32 dims. `fetch` as above.
template <int NV, int Pairs, int64_t PairWords, class Fetch>
__attribute__((noinline)) void tile_values(const int32_t* vt, int steps, const int32_t* pt,
                                           float* o, Fetch fetch) {
  static_assert(NV <= 2);
  constexpr int64_t tile_bytes = 1024, stride = NV * 64;
  const char* weights = reinterpret_cast<const char*>(pt);
  for (int i = 0; i < Pairs; ++i) {
    const char* const v = reinterpret_cast<const char*>(vt + i * PairWords);
    float* const out = o + i * 32 * NV * kLanes;
    load_tiles<2, NV>(out, stride);
    for (int k = steps; k-- > 0;) {
      const char* const step = v + k * 2 * tile_bytes;
      multiply_tiles<2, NV>({step, 64}, {step + tile_bytes, 64},
                            {weights + k * 16 * stride, stride}, 1,
                            [&]() __attribute__((always_inline)) { fetch(512); });
    }
    store_tiles<2, NV>(out, stride);
  }
}

// A step of 32 rows of V to V^T tiles, [32 dims, PairWords][dim][16 words]: a word holds two
// neighbouring keys. Rows have 32 * Pairs elements.
template <int Pairs, int64_t PairWords>
FAJIT_INLINE void pack_value_tiles(const bfloat16_t* const (&rows)[32], int32_t* vt) {
  // Interleaving within 128-bit lanes is one operation, and leaves dims in this order.
  constexpr int dims[16] = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
  const v32 low = {0,  32, 1,  33, 2,  34, 3,  35, 8,  40, 9,  41, 10, 42, 11, 43,
                   16, 48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59};
#pragma GCC unroll 1
  for (int d = 0; d < 32 * Pairs; d += 32, vt += PairWords) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      vi r[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
        r[i] = (vi)__builtin_shuffle(load<v32>(rows[2 * i] + d), load<v32>(rows[2 * i + 1] + d),
                                     low + static_cast<uint16_t>(4 * half));
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) store(vt + (dims[i] + 4 * half) * 16, r[i]);
    }
  }
}

}  // namespace fajit
