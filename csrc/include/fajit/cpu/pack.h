// Rows of q, k and v, brought into the matrix dtype and the layouts of the microkernel.
#pragma once
#include <fajit/cpu/microkernel.h>
#include <fajit/cpu/transpose.h>

namespace fajit {

template <class A, class B>
inline constexpr bool same_type = false;
template <class A>
inline constexpr bool same_type<A, A> = true;

// Stands for the absence of query_mod, key_mod or value_mod.
struct NoMod {};

// dst[0, N) = mod(src) rounded once to the matrix dtype; dst[N, Padded) = 0.
template <class Matrix, class T, int N, int Padded, class Mod>
FAJIT_INLINE void convert_row(const T* src, Matrix* dst, Mod mod) {
  constexpr bool modified = !same_type<Mod, NoMod>;
  if constexpr (same_type<T, Matrix> && !modified) {
    __builtin_memcpy(dst, src, N * sizeof(T));
  } else {
    alignas(64) float row[round_up(N, kLanes)];
    load_row<T, N>(src, row);
    if constexpr (modified) {
      alignas(64) float changed[round_up(N, kLanes)];
      mod(static_cast<const float*>(row), static_cast<float*>(changed));
      store_row<Matrix, N>(dst, changed);
    } else {
      store_row<Matrix, N>(dst, row);
    }
  }
  if constexpr (N < Padded) __builtin_memset(dst + N, 0, (Padded - N) * sizeof(Matrix));
}

// kLanes rows of words, `stride` apart, to columns: qt[word * qt_stride + lane], `Words` of them.
template <int Words>
FAJIT_INLINE void transpose_rows(const int32_t* const (&rows)[kLanes], int32_t* qt, int qt_stride) {
  for (int w = 0; w < Words; w += kLanes) {
    vi square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = load<vi>(rows[i] + w);
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      if (w + i < Words) store(qt + int64_t{w + i} * qt_stride, square[i]);
  }
}

// V rows [0, count) to panels: words[panel * stride + (n / pack) * kPanel + dim % kPanel]. A word
// holds `pack` neighbouring keys of one dim; keys past an odd count are zero. `row(n)` fetches row
// n in the matrix dtype, padded to whole panels; it may use two buffers in turn.
template <class Matrix, int Dims, class Row>
FAJIT_INLINE void pack_panels(int count, int32_t* words, int64_t stride, Row row) {
  constexpr int panels = (Dims + kPanel - 1) / kPanel;
  if constexpr (Dot<Matrix>::kPack == 1) {
    for (int n = 0; n < count; ++n) {
      const Matrix* src = row(n);
      for (int p = 0; p < panels; ++p)
        for (int i = 0; i < kPanel; i += kLanes)
          store(words + p * stride + n * kPanel + i, load(src + p * kPanel + i));
    }
  } else {
    for (int n = 0; n < count; n += 2) {
      const Matrix* even = row(n);
      if (n + 1 < count) {
        const Matrix* odd = row(n + 1);
        for (int p = 0; p < panels; ++p)
          for (int i = 0; i < kPanel; i += kLanes) {
            const vu lo = __builtin_convertvector(load<vh>(even + p * kPanel + i), vu);
            const vu hi = __builtin_convertvector(load<vh>(odd + p * kPanel + i), vu);
            store(words + p * stride + n / 2 * kPanel + i, lo | (hi << 16));
          }
      } else {
        for (int p = 0; p < panels; ++p)
          for (int i = 0; i < kPanel; i += kLanes)
            store(words + p * stride + n / 2 * kPanel + i,
                  __builtin_convertvector(load<vh>(even + p * kPanel + i), vu));
      }
    }
  }
}

}  // namespace fajit
