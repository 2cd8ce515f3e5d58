// The two products of a few query rows with a tile of keys, on AMX tiles:
//
//   scores   S^T[key][row] = sum_d K[key][d] Q^T[d][row]      K read in place
//   values   O[row][dim] += sum_key P[row][key] V[key][dim]   rows of V interleaved by two in L1;
//                                                             from 256 dims on read in place
//
// Arguments and results are those of the vector products in few_row_kernel.h (dims of O in the
// order that `ordered_dims` undoes), but keys are counted in steps of 32: scores and weights need
// room for them. The time hardly depends on the number of rows, up to 16 in a block, 8 of values
// that are read in place.
#pragma once
#include <fajit/cpu/amx/tiles.h>
#include <fajit/cpu/few_row_kernel.h>
#include <fajit/cpu/pack.h>

namespace fajit {

// Prefetches rows of K and V, alternately, a few at a time. A core can have 16 misses outstanding,
// two keys of D128: memory is busy throughout only if every part of the work prefetches, in
// proportion to its time. With all prefetches during the products with K, keys from L3 took 1.2
// times as long (4 rows, D128, pages of 16, one thread, timed by hand).
template <int KeyBytes, int ValueBytes, class KeyStream, class ValueStream>
class TileStream {
 public:
  // `count` rows of each.
  FAJIT_INLINE TileStream(KeyStream& k, ValueStream& v, int count, bool same_rows)
      : k_(k), v_(v), left_(count), same_rows_(same_rows) {}

  // The next `rows` rows of K and of V. Values that are the first dims of keys come with them.
  FAJIT_INLINE void next(int rows) {
    for (; rows > 0 && left_ > 0; --rows, --left_) {
      k_.template next<KeyBytes>();
      if (!same_rows_) v_.template next<ValueBytes>();
    }
  }

 private:
  KeyStream& k_;
  ValueStream& v_;
  int left_;
  const bool same_rows_;
};

// Transposes `count` rows of Q by words, blocks of 16 rows next to each other: qt[word][row].
template <int Dim>
FAJIT_INLINE void pack_queries(const bfloat16_t* q, int count, int32_t* qt) {
  const int blocks = (count + 15) / 16;
  for (int j = 0; j < blocks; ++j) {
    const int32_t* rows[kLanes];
    for (int i = 0; i < kLanes; ++i)
      rows[i] = reinterpret_cast<const int32_t*>(q + (j * 16 + i) * Dim);
    transpose_rows<Dim / 2>(rows, qt + j * kLanes, blocks * kLanes);
  }
}

// Rows of V as the products read them, [pair of keys][Dim] words of two keys. Pairs are packed a
// few at a time, during the products of K: both wait for L2 most of the time. Keys from `count` to
// a multiple of 32 are zeros.
template <int Dim, class ValueRows>
class PairedValues {
  using Value = typename ValueRows::Element;
  static_assert(Dim * sizeof(Value) <= sizeof kZeroRow);

 public:
  FAJIT_INLINE PairedValues(const ValueRows& v, int count, int32_t* words)
      : v_(v), count_(count), words_(words), left_((count + 31) / 32 * 16) {}

  // The next `pairs` pairs.
  FAJIT_INLINE void next(int pairs) {
    const auto* const zeros = reinterpret_cast<const Value*>(kZeroRow);
    for (; pairs > 0 && left_ > 0; --pairs, --left_) {
      const Value* const even = at_ < count_ ? v_(at_) : zeros;
      const Value* const odd = at_ + 1 < count_ ? v_(at_ + 1) : zeros;
#pragma GCC unroll 8
      for (int d = 0; d < Dim; d += 32) {
        vi x[2];
        ValueStep<bfloat16_t, Value, Dim>::load(even, odd, d, x);
        store(words_ + d, x[0]);
        store(words_ + d + 16, x[1]);
      }
      at_ += 2;
      words_ += Dim;
    }
  }

 private:
  const ValueRows v_;
  const int count_;
  int32_t* words_;
  int left_, at_ = 0;
};

// Dims [d, d + Dims) of rows [n, n + 16) of K or V for a tile: in place where they can be, else in
// `copy`. Rows from `count` on repeat the last row.
template <int Dim, int Dims, class Rows>
FAJIT_INLINE TileRows tile_rows(const Rows& rows, int n, int count, int d, bfloat16_t* copy) {
  if (n + 16 <= count)
    if (const int64_t stride = even_stride(rows, n))
      return {reinterpret_cast<const char*>(rows(n) + d), stride};
  for (int i = 0; i < 16; ++i) {
    const auto* const row = rows(n + i < count ? n + i : count - 1);
#pragma GCC unroll 8
    for (int j = 0; j < Dims; j += 32) store(copy + i * Dims + j, bfloat16_words<Dim>(row, d + j));
  }
  return {reinterpret_cast<const char*>(copy), Dims * 2};
}

// st[key][row] of 64 keys from key n on, in four accumulators: a product takes 52 clocks to finish,
// so two leave the unit idle (0.8 of the time, 576 dims). False where a tile cannot load its rows
// in place.
template <int Dim, class KeyRows, class Between>
FAJIT_INLINE bool four_score_tiles(const KeyRows& k, int n, const int32_t* qt, float* st,
                                   Between between) {
  const int64_t stride = even_stride(k, n);
  const char* rows[4];
  bool even = stride != 0;
  for (int i = 0; i < 4; ++i) {
    rows[i] = reinterpret_cast<const char*>(k(n + 16 * i));
    even &= even_stride(k, n + 16 * i) == stride;
  }
  if (!even) return false;
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  const char* q = reinterpret_cast<const char*>(qt);
#pragma GCC unroll 1
  for (int d = 0; d < Dim * 2; d += 64) {
    tile_load<4>(q, 64);
    tile_load<5>(rows[0] + d, stride);
    tile_multiply<0, 5, 4>();
    tile_load<6>(rows[1] + d, stride);
    tile_multiply<1, 6, 4>();
    between();
    tile_load<7>(rows[2] + d, stride);
    tile_multiply<2, 7, 4>();
    tile_load<5>(rows[3] + d, stride);
    tile_multiply<3, 5, 4>();
    between();
    q += 1024;
  }
  tile_store<0>(st, 64);
  tile_store<1>(st + 256, 64);
  tile_store<2>(st + 512, 64);
  tile_store<3>(st + 768, 64);
  return true;
}

// s[row * s_stride + key] = scale * q[row] . k[key] for keys [0, count), count rounded up to 32,
// and rows [0, rows) of 16 NB. `qt`: rows of Q, transposed by words, [Dim / 2][16 NB].
// `between()` is called kScoreSteps<Dim> times for 32 keys. Full: all tiles have 16 rows.
template <int Dim>
constexpr int kScoreSteps = Dim / 32;
template <int NB, int Dim, bool Full, class KeyRows, class Stream, class Between>
FAJIT_INLINE void score_blocks(KeyRows k, int count, const int32_t* qt, int rows, float scale,
                               float* s, int s_stride, Stream& stream, Between between) {
  constexpr int width = 16 * NB;
  alignas(64) bfloat16_t copy[32 * Dim];
  alignas(64) float st[64 * width];
  for (int n = 0, done; n < count; n += done) {
    done = 32;
    if (Full && NB == 1 && n + 64 <= count && four_score_tiles<Dim>(k, n, qt, st, between)) {
      done = 64;
    } else {
      zero_tiles<2, NB>();
      multiply_tiles<2, NB>(tile_rows<Dim, Dim>(k, n, count, 0, copy),
                            tile_rows<Dim, Dim>(k, n + 16, count, 0, copy + 16 * Dim),
                            {reinterpret_cast<const char*>(qt), width * 4}, kScoreSteps<Dim>,
                            between);
      store_tiles<2, NB>(st, width * 4);
    }
#pragma GCC unroll 1
    for (int half = 0; half < done; half += 16)
#pragma GCC unroll 1
      for (int first = 0; first < rows; first += 16) {
        stream.next(1);
        vi square[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) square[i] = load<vi>(st + (half + i) * width + first);
        transpose(square);
        float* out = s + first * s_stride + n + half;
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
          if (first + i < rows) store(out + i * s_stride, as_float(square[i]) * scale);
      }
  }
}

// o[row][0, Dim) += sum over `count` keys of p[row] v for 16 NA rows, or for fewer with NA 1: those
// that `TileUnit::configure` was given. `words`: PairedValues. `p`: bf16 weights, zero for keys
// from `count` on, p_stride words a row.
template <int NA, int Dim, class Stream>
FAJIT_INLINE void value_blocks(const int32_t* words, int count, const int32_t* p, int p_stride,
                               float* o, Stream& stream) {
  constexpr int64_t stride = Dim * 4;  // of O and of pairs
  const int steps = (count + 31) / 32;
#pragma GCC unroll 1
  for (int d = 0; d < Dim; d += 32) {
    const char* weights = reinterpret_cast<const char*>(p);
    const char* v = reinterpret_cast<const char*>(words + d);
    if constexpr (NA == 1) {
      tile_load<1>(o + d, stride);
      tile_load<3>(o + d + 16, stride);
#pragma GCC unroll 1
      for (int i = 0; i < steps; ++i) {
        tile_load<7>(weights + 64 * i, p_stride * 4);
        tile_load<4>(v, stride);
        tile_multiply<1, 7, 4>();
        stream.next(2);
        tile_load<5>(v + 64, stride);
        tile_multiply<3, 7, 5>();
        v += 16 * stride;
      }
      tile_store<1>(o + d, stride);
      tile_store<3>(o + d + 16, stride);
    } else {
      load_tiles<NA, 2>(o + d, stride);
      multiply_tiles<NA, 2>({weights, p_stride * 4}, {weights + 64 * p_stride, p_stride * 4},
                            {v, stride}, steps, [&] { stream.next(4); });
      store_tiles<NA, 2>(o + d, stride);
    }
  }
}

// Weights as `value_dims` takes them, a word each. A product of tiles sums over pairs of adjacent
// elements, which in a row of V are two dims. So a row of weights is there twice, in words whose
// other half is 0: in the high halves for odd dims, and in the low halves for even dims. The second
// row is this many rows after the first; up to 8 rows and their second ones fill one tile.
template <int TileRows>
constexpr int even_distance(int rows) {
  return rows <= 8 ? 8 : TileRows;
}
// Weights of 16 `vectors` keys, in place, for one of `rows` rows; `stride`: words of a row.
template <int TileRows>
FAJIT_INLINE void put_word_weights(float* p, int rows, int vectors, int stride) {
  float* const even = p + even_distance<TileRows>(rows) * stride;
  for (int n = 0; n < vectors * kLanes; n += kLanes) {
    vh halves;
    asm("vcvtneps2bf16 %1, %0" : "=v"(halves) : "v"(load(p + n)));
    const vi words = (vi) __builtin_convertvector(halves, vu);
    store(p + n, words << 16);
    store(even + n, words);
  }
}

// o[row][d, d + 32 NB) += sum over `count` keys of p[row] v, V read in place, for `rows` rows of p
// and o, at most 16. `p`: from put_word_weights, zero for keys from `count` on, p_stride words a
// row; the weights for even dims are in the same tile (OneTile) or `apart` words after those for
// odd dims. Zero times a value that is not finite makes NaN of the neighbouring dim, too: then sums
// are computed again, key by key. Packing pairs of keys in L1 instead took 1.05 to 1.25 times as
// long (8 requests of 4,096 keys, 256 and 512 dims, 1 to 8 rows, heads of a token side by side, two
// threads of a Xeon, by hand).
template <int Dim, int NB, bool OneTile, class ValueRows, class Stream>
FAJIT_INLINE void value_dims(const ValueRows& v, int count, int d, const int32_t* p, int p_stride,
                             int apart, int rows, float* o, Stream& stream) {
  constexpr int to_even = OneTile ? 8 : 16;  // rows of sums from odd dims to even ones
  constexpr int tiles = OneTile ? NB : 2 * NB;
  static_assert(tiles <= 4);
  alignas(64) bfloat16_t copy[16 * 32 * NB];
  alignas(64) float sums[NB][2 * to_even][kLanes];
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
#pragma GCC unroll 1
  for (int n = 0; n < count; n += 16) {
    const TileRows at = tile_rows<Dim, 32 * NB>(v, n, count, d, copy);
    tile_load<4>(p + n, p_stride * 4);
    tile_load<6>(at.first, at.stride);
    tile_multiply<0, 4, 6>();
    if constexpr (OneTile) {
      if constexpr (NB > 1) {
        tile_load<7>(at.first + 64, at.stride);
        tile_multiply<1, 4, 7>();
      }
      if constexpr (NB > 2) {
        tile_load<5>(at.first + 128, at.stride);
        tile_multiply<2, 4, 5>();
      }
      if constexpr (NB > 3) {
        tile_load<6>(at.first + 192, at.stride);
        tile_multiply<3, 4, 6>();
      }
    } else {
      tile_load<5>(p + n + apart, p_stride * 4);
      tile_multiply<1, 5, 6>();
      if constexpr (NB > 1) {
        tile_load<7>(at.first + 64, at.stride);
        tile_multiply<2, 4, 7>();
        tile_multiply<3, 5, 7>();
      }
    }
    stream.next((160 * NB + Dim - 1) / Dim);  // a third of the rows, in all passes
  }
  float* const all = sums[0][0];
  tile_store<0>(all, 64);
  if constexpr (tiles > 1) tile_store<1>(all + 256, 64);
  if constexpr (tiles > 2) tile_store<2>(all + 512, 64);
  if constexpr (tiles > 3) tile_store<3>(all + 768, 64);

  vf zero{};
  for (int i = 0; i < NB; ++i)
    for (int r = 0; r < rows; ++r)
      zero += load(sums[i][r]) * 0.0f + load(sums[i][r + to_even]) * 0.0f;
  const bool finite = !any(!(zero == 0.0f));
  const vi low = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};  // see ValueStep
  for (int i = 0; i < NB; ++i)
    for (int r = 0; r < rows; ++r) {
      vf odd = load(sums[i][r]), even = load(sums[i][r + to_even]);
      if (!finite) {
        odd = even = vf{};
        for (int n = 0; n < count; ++n) {
          const vf weight = as_float(broadcast_word(p + r * p_stride + n));
          const vi words = bfloat16_words<Dim>(v(n), d + 32 * i);
          even += weight * as_float(words << 16);
          odd += weight * as_float(words & static_cast<int32_t>(0xffff0000));
        }
      }
      float* const to = o + r * Dim + d + 32 * i;
      store(to, load(to) + (vf)__builtin_shuffle(even, odd, low));
      store(to + kLanes, load(to + kLanes) + (vf)__builtin_shuffle(even, odd, low + 2));
    }
}

// value_dims of all dims, for up to 32 rows of a tile of TileRows.
template <int Dim, int TileRows, class ValueRows, class Stream>
FAJIT_INLINE void values_in_place(const ValueRows& v, int count, const int32_t* p, int rows,
                                  int p_stride, float* o, Stream& stream) {
  // Tiles<N>: passes over 32 N dims. All rows and their second ones fit one tile for N = 4.
  const auto pass = [&](auto blocks, auto all, int d, int first) __attribute__((always_inline)) {
    value_dims<Dim, blocks.value, all.value == 4>(
        v, count, d, p + first * p_stride, p_stride, even_distance<TileRows>(rows) * p_stride,
        rows - first < 16 ? rows - first : 16, o + first * Dim, stream);
  };
  const auto passes = [&](auto blocks, int first) __attribute__((always_inline)) {
    constexpr int dims = 32 * blocks.value, left = Dim % dims;
#pragma GCC unroll 1
    for (int d = 0; d + dims <= Dim; d += dims) pass(blocks, blocks, d, first);
    if constexpr (left > 0) pass(Tiles<left / 32>{}, blocks, Dim - left, first);
  };
  if (rows <= 8) return passes(Tiles<4>{}, 0);
#pragma GCC unroll 1
  for (int first = 0; first < rows; first += 16) passes(Tiles<2>{}, first);
}

// score_blocks and value_blocks for up to 32 rows: one block of 16 or two.
template <int Dim, bool Full, class KeyRows, class Stream, class Between>
FAJIT_INLINE void tile_few_scores(KeyRows k, int count, const int32_t* qt, int rows, float scale,
                                  float* s, int s_stride, Stream& stream, Between between) {
  if (rows <= 16)
    score_blocks<1, Dim, Full>(k, count, qt, rows, scale, s, s_stride, stream, between);
  else score_blocks<2, Dim, Full>(k, count, qt, rows, scale, s, s_stride, stream, between);
}
// `words`: unless Wide, room for the pairs of v, or those that are `packed`.
template <int Dim, bool Wide, int TileRows, class ValueRows, class Stream>
FAJIT_INLINE void tile_few_values(const ValueRows& v, [[maybe_unused]] bool packed, int count,
                                  const int32_t* p, int rows, int p_stride, float* o,
                                  [[maybe_unused]] int32_t* words, Stream& stream) {
  if constexpr (Wide) {
    values_in_place<Dim, TileRows>(v, count, p, rows, p_stride, o, stream);
  } else {
    if (!packed) PairedValues<Dim, ValueRows>(v, count, words).next(count + 31);
    if (rows <= 16) value_blocks<1, Dim>(words, count, p, p_stride, o, stream);
    else value_blocks<2, Dim>(words, count, p, p_stride, o, stream);
  }
}

}  // namespace fajit
