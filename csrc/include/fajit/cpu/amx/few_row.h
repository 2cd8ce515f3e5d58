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

namespace fajit {

// Prefetches `count` rows of K and V, alternately, a few at a time.
template <int KeyBytes, int ValueBytes, class KeyStream, class ValueStream>
class TileStream {
 public:
  FAJIT_INLINE TileStream(KeyStream& k, ValueStream& v, int count) : k_(k), v_(v), left_(count) {}

  // The next `rows` rows of K and of V.
  FAJIT_INLINE void next(int rows) {
    for (; rows > 0 && left_ > 0; --rows, --left_) {
      k_.template next<KeyBytes>();
      v_.template next<ValueBytes>();
    }
  }

 private:
  KeyStream& k_;
  ValueStream& v_;
  int left_;
};

// Rows [n, n + 16) of K for a tile: in place when they are evenly spaced, else copied to `copy`.
// Rows from `count` on repeat the last row.
template <int Dim, class KeyRows>
FAJIT_INLINE TileRows tile_keys(const KeyRows& k, int n, int count, bfloat16_t* copy) {
  const bfloat16_t* const first = k(n < count ? n : count - 1);
  if (n + 16 <= count) {
    const int64_t stride = k(n + 1) - first;
    int64_t uneven = 0;
    for (int i = 2; i < 16; ++i) uneven |= (k(n + i) - first) ^ (i * stride);
    if (uneven == 0) return {reinterpret_cast<const char*>(first), stride * 2};
  }
  for (int i = 0; i < 16; ++i)
    __builtin_memcpy(copy + i * Dim, k(n + i < count ? n + i : count - 1), Dim * 2);
  return {reinterpret_cast<const char*>(copy), Dim * 2};
}

// s[row * s_stride + key] = scale * q[row] . k[key] for keys [0, count), count rounded up to 32,
// and rows [0, rows) of 16 NB. `qt`: rows of Q, transposed by words, [Dim / 2][16 NB].
template <int NB, int Dim, class KeyRows, class Stream>
FAJIT_INLINE void score_blocks(KeyRows k, int count, const int32_t* qt, int rows, float scale,
                               float* s, int s_stride, Stream& stream) {
  constexpr int width = 16 * NB;
  alignas(64) bfloat16_t copy[32 * Dim];
  alignas(64) float st[32 * width];
  for (int n = 0; n < count; n += 32) {
    zero_tiles<2, NB>();
    multiply_tiles<2, NB>(
        tile_keys<Dim>(k, n, count, copy), tile_keys<Dim>(k, n + 16, count, copy + 16 * Dim),
        {reinterpret_cast<const char*>(qt), width * 4}, Dim / 32, [&] { stream.next(2); });
    store_tiles<2, NB>(st, width * 4);
#pragma GCC unroll 1
    for (int half = 0; half < 32; half += 16)
#pragma GCC unroll 1
      for (int first = 0; first < rows; first += 16) {
        stream.next(2);
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

// o[row][0, Dim) += sum over `count` keys of p[row] v for 16 NA rows. `p`: bf16 weights, zero for
// keys from `count` on, p_stride words a row.
template <int NA, int Dim, class ValueRows, class Stream>
FAJIT_INLINE void value_blocks(ValueRows v, int count, const int32_t* p, int p_stride, float* o,
                               Stream& stream) {
  using Step = ValueStep<bfloat16_t, bfloat16_t>;
  constexpr int chunk = 64;
  alignas(64) int32_t words[chunk / 2 * Dim];
  for (int n = 0; n < count; n += chunk) {
    const int steps = count - n > 32 ? 2 : 1;
#pragma GCC unroll 1
    for (int i = 0; i < 32 * steps; i += 2) {
      const int at = n + i;
      stream.next(1);
      // Keys past the last one have weight 0, but their values must not be NaN.
      const bfloat16_t* even = v(at < count ? at : count - 1);
      const bfloat16_t* odd = v(at + 1 < count ? at + 1 : count - 1);
#pragma GCC unroll 8
      for (int d = 0; d < Dim; d += 32) {
        vi x[2];
        Step::load(even + d, odd + d, x);
        store(words + i / 2 * Dim + d, x[0]);
        store(words + i / 2 * Dim + d + 16, x[1]);
      }
    }
#pragma GCC unroll 1
    for (int d = 0; d < Dim; d += 32) {
      const char* weights = reinterpret_cast<const char*>(p + n / 2);
      stream.next(2);
      load_tiles<NA, 2>(o + d, Dim * 4);
      multiply_tiles<NA, 2>({weights, p_stride * 4}, {weights + 64 * p_stride, p_stride * 4},
                            {reinterpret_cast<const char*>(words + d), Dim * 4}, steps, [] {});
      store_tiles<NA, 2>(o + d, Dim * 4);
    }
  }
  stream.next(count);
}

// score_blocks and value_blocks for up to 32 rows: one block of 16 or two.
template <int Dim, class KeyRows, class Stream>
FAJIT_INLINE void tile_few_scores(KeyRows k, int count, const int32_t* qt, int rows, float scale,
                                  float* s, int s_stride, Stream& stream) {
  if (rows <= 16) {
    score_blocks<1, Dim>(k, count, qt, rows, scale, s, s_stride, stream);
  } else {
    score_blocks<2, Dim>(k, count, qt, rows, scale, s, s_stride, stream);
  }
}
template <int Dim, class ValueRows, class Stream>
FAJIT_INLINE void tile_few_values(ValueRows v, int count, const int32_t* p, int rows, int p_stride,
                                  float* o, Stream& stream) {
  if (rows <= 16) {
    value_blocks<1, Dim>(v, count, p, p_stride, o, stream);
  } else {
    value_blocks<2, Dim>(v, count, p, p_stride, o, stream);
  }
}

}  // namespace fajit
