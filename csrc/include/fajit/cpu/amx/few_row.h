// The two products of a few query rows with a tile of keys, on AMX tiles:
//
//   scores   S^T[key][row] = sum_d K[key][d] Q^T[d][row]     K read in place
//   values   O[row][dim] += sum_key P[row][key] V[key][dim]   rows of V interleaved by two in L1
//
// Arguments and results are those of the vector products in few_row_kernel.h (dims of O in the
// order that `ordered_dims` undoes), but keys are counted in steps of 32: scores and weights need
// room for them. The time hardly depends on the number of rows, up to 16 in a block.
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

// Words from a packed pair of rows of V to the next: rows 2 KB apart share two sets of the L1. With
// a line between them 16 rows of 576 + 512 dims took 0.8 of the time from L2, 0.93 from memory
// (least times of one thread).
template <int Dim>
constexpr int kPairStride = Dim + (Dim % 256 == 0 ? 16 : 0);

// Words of dims [d, d + Dims) of two rows of V, in the order that `ordered_dims` undoes.
template <int Dim, int Dims, class Value>
FAJIT_INLINE void pair_rows(const Value* even, const Value* odd, int d, int32_t* words) {
#pragma GCC unroll 8
  for (int i = 0; i < Dims; i += 32) {
    vi x[2];
    ValueStep<bfloat16_t, Value, Dim>::load(even, odd, d + i, x);
    store(words + i, x[0]);
    store(words + i + 16, x[1]);
  }
}

// Rows of V as the products read them, [pair of keys][kPairStride] words of two keys. Pairs are
// packed a few at a time, during the products of K: both wait for L2 most of the time. Keys from
// `count` on have weight 0, but their values must not be NaN: they repeat the last key, up to a
// multiple of 32.
template <int Dim, class ValueRows>
class PairedValues {
 public:
  FAJIT_INLINE PairedValues(const ValueRows& v, int count, int32_t* words)
      : v_(v), last_(count - 1), words_(words), left_((count + 31) / 32 * 16) {}

  // The next `pairs` pairs.
  FAJIT_INLINE void next(int pairs) {
    for (; pairs > 0 && left_ > 0; --pairs, --left_) {
      pair_rows<Dim, Dim>(v_(at_ < last_ ? at_ : last_), v_(at_ < last_ ? at_ + 1 : last_), 0,
                          words_);
      at_ += 2;
      words_ += kPairStride<Dim>;
    }
  }

 private:
  const ValueRows v_;
  const int last_;
  int32_t* words_;
  int left_, at_ = 0;
};

// Rows [n, n + 16) of K for a tile: in place where they can be, else in `copy`. Rows from `count`
// on repeat the last row.
template <int Dim, class KeyRows>
FAJIT_INLINE TileRows tile_keys(const KeyRows& k, int n, int count, bfloat16_t* copy) {
  if (n + 16 <= count)
    if (const int64_t stride = even_stride(k, n))
      return {reinterpret_cast<const char*>(k(n)), stride};
  for (int i = 0; i < 16; ++i) {
    const auto* const row = k(n + i < count ? n + i : count - 1);
#pragma GCC unroll 8
    for (int d = 0; d < Dim; d += 32) store(copy + i * Dim + d, bfloat16_words<Dim>(row, d));
  }
  return {reinterpret_cast<const char*>(copy), Dim * 2};
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
      multiply_tiles<2, NB>(
          tile_keys<Dim>(k, n, count, copy), tile_keys<Dim>(k, n + 16, count, copy + 16 * Dim),
          {reinterpret_cast<const char*>(qt), width * 4}, kScoreSteps<Dim>, between);
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
  constexpr int64_t stride = Dim * 4, pair_stride = kPairStride<Dim> * 4;
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
        tile_load<4>(v, pair_stride);
        tile_multiply<1, 7, 4>();
        stream.next(2);
        tile_load<5>(v + 64, pair_stride);
        tile_multiply<3, 7, 5>();
        v += 16 * pair_stride;
      }
      tile_store<1>(o + d, stride);
      tile_store<3>(o + d + 16, stride);
    } else {
      load_tiles<NA, 2>(o + d, stride);
      multiply_tiles<NA, 2>({weights, p_stride * 4}, {weights + 64 * p_stride, p_stride * 4},
                            {v, pair_stride}, steps, [&] { stream.next(4); });
      store_tiles<NA, 2>(o + d, stride);
    }
  }
}

// value_blocks where all tiles have 16 rows, of rows of V that are not packed: 64 keys and 64 / NA
// dims of them at a time, in L1 (`words`: kPartWords). Both products then read K and V from L2
// twice, and nothing of them is written there; O, which is as large as the L1, is read and written
// once in `count` keys. With tiles of 256 keys and four accumulators, 16 rows of 576 + 512 dims
// take 0.83 of the time, 4 to 16 rows of 256 dims 0.85 to 0.92, 8 rows of 512 dims 1.01 (least
// times of one thread of a Xeon, by hand).
constexpr int kPartWords = 32 * 64;
template <int NA, int Dim, class ValueRows, class Stream>
FAJIT_INLINE void value_parts(const ValueRows& v, int count, const int32_t* p, int p_stride,
                              float* o, int32_t* words, Stream& stream) {
  constexpr int64_t stride = Dim * 4, dims = 64 / NA;
  const int last = count - 1;
#pragma GCC unroll 1
  for (int d = 0; d < Dim; d += dims) {
    load_tiles<2, 2>(o + d, stride, NA == 1 ? 128 : 16 * stride);
#pragma GCC unroll 1
    for (int n = 0; n < count; n += 64) {
      const int end = count - n < 64 ? (count - n + 31) / 32 * 32 : 64;
#pragma GCC unroll 1
      for (int i = 0; i < end; i += 2) {
        const int at = n + i;
        pair_rows<Dim, dims>(v(at < last ? at : last), v(at < last ? at + 1 : last), d,
                             words + i / 2 * dims);
      }
      stream.next(3);
#pragma GCC unroll 1
      for (int i = 0; i < end; i += 32) {
        const int32_t* const weights = p + (n + i) / 2;
        const int32_t* const part = words + i / 2 * dims;
        if constexpr (NA == 1) {
          tile_load<7>(weights, p_stride * 4);
          tile_load<4>(part, dims * 4);
          tile_multiply<0, 7, 4>();
          tile_load<5>(part + 16, dims * 4);
          tile_multiply<1, 7, 5>();
          tile_load<6>(part + 32, dims * 4);
          tile_multiply<2, 7, 6>();
          tile_load<4>(part + 48, dims * 4);
          tile_multiply<3, 7, 4>();
        } else {
          multiply_tiles<2, 2>(
              {reinterpret_cast<const char*>(weights), p_stride * 4},
              {reinterpret_cast<const char*>(weights + 16 * p_stride), p_stride * 4},
              {reinterpret_cast<const char*>(part), dims * 4}, 1, [] {});
        }
      }
    }
    store_tiles<2, 2>(o + d, stride, NA == 1 ? 128 : 16 * stride);
  }
}

// score_blocks, value_blocks and value_parts for up to 32 rows: one block of 16 or two.
template <int Dim, bool Full, class KeyRows, class Stream, class Between>
FAJIT_INLINE void tile_few_scores(KeyRows k, int count, const int32_t* qt, int rows, float scale,
                                  float* s, int s_stride, Stream& stream, Between between) {
  if (rows <= 16)
    score_blocks<1, Dim, Full>(k, count, qt, rows, scale, s, s_stride, stream, between);
  else score_blocks<2, Dim, Full>(k, count, qt, rows, scale, s, s_stride, stream, between);
}
// `v`: rows of V. `words`: room for a part of them (Parts), or for pairs of all, `packed` or not
// yet.
template <int Dim, bool Parts, class ValueRows, class Stream>
FAJIT_INLINE void tile_few_values(const ValueRows& v, [[maybe_unused]] bool packed, int count,
                                  const int32_t* p, int rows, int p_stride, float* o,
                                  int32_t* words, Stream& stream) {
  if constexpr (Parts) {
    if (rows <= 16) value_parts<1, Dim>(v, count, p, p_stride, o, words, stream);
    else value_parts<2, Dim>(v, count, p, p_stride, o, words, stream);
  } else {
    if (!packed) PairedValues<Dim, ValueRows>(v, count, words).next(count + 31);
    if (rows <= 16) value_blocks<1, Dim>(words, count, p, p_stride, o, stream);
    else value_blocks<2, Dim>(words, count, p, p_stride, o, stream);
  }
}

}  // namespace fajit
