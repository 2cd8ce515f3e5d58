// Converts rows of q, k and v, after their hooks, to the matrix dtype and the layouts of the
// microkernel.
#pragma once
#include <fajit/cpu/codes/numbers.h>
#include <fajit/cpu/microkernel.h>
#include <fajit/cpu/packed_rows.h>
#include <fajit/cpu/vector/transpose.h>
#include <fajit/types.h>

namespace fajit {

// dst[0, N) = src, changed by `mod` where Modified, rounded once to the matrix dtype;
// dst[N, Padded) = 0.
template <bool Modified, int N, int Padded, class Matrix, class T, class Mod>
FAJIT_INLINE void convert_row(const T* src, Matrix* dst, Mod mod) {
  if constexpr (same<T, Matrix> && !Modified) {
    __builtin_memcpy(dst, src, N * sizeof(T));
  } else if constexpr (same<T, latent_t> && !Modified) {
    decode_latent<N>(src, dst);
  } else {
    alignas(64) float row[round_up(N, kLanes)];
    if constexpr (same<T, latent_t>) decode_latent<N>(src, static_cast<float*>(row));
    else load_row<T, N>(src, row);
    if constexpr (Modified) {
      alignas(64) float changed[round_up(N, kLanes)];
      mod(static_cast<const float*>(row), static_cast<float*>(changed));
      store_row<Matrix, N>(dst, changed);
    } else {
      store_row<Matrix, N>(dst, row);
    }
  }
  if constexpr (N < Padded) __builtin_memset(dst + N, 0, (Padded - N) * sizeof(Matrix));
}

// Converts a row of q, k or v for the products: applies its hook and pads it. key_mod and value_mod
// run once for all query rows, with the item's request.
template <class Config, class Hooks, int Padded>
FAJIT_INLINE void convert_query(const Context& c, const fajit_work& w, const PackedRow& row,
                                typename Config::Matrix* dst) {
  const auto* src = static_cast<const typename Config::Q*>(c.args->q) +
                    row_offset(c.args->q_stride, w.request, row.h, row.row);
  convert_row<Hooks::kQueryMod, Config::kHeadDim, Padded>(src, dst, [&](const float* x, float* y) {
    if constexpr (Hooks::kQueryMod) Hooks::query_mod(c, x, y, row.b, row.h, row.q_idx);
  });
}
// Modified: whether key_mod applies; kernels that scale scores instead convert the row alone.
template <class Config, class Hooks, int Padded, bool Modified = true>
FAJIT_INLINE void convert_key(const Context& c, int32_t b, int32_t kv_h, int32_t kv_idx,
                              const typename Config::K* src, typename Config::Matrix* dst) {
  convert_row<Modified && Hooks::kKeyMod, Config::kHeadDim, Padded>(
      src, dst, [&](const float* x, float* y) {
        if constexpr (Modified && Hooks::kKeyMod) Hooks::key_mod(c, x, y, b, kv_h, kv_idx);
      });
}
template <class Config, class Hooks, int Padded>
FAJIT_INLINE void convert_value(const Context& c, int32_t b, int32_t kv_h, int32_t kv_idx,
                                const typename Config::V* src, typename Config::Matrix* dst) {
  convert_row<Hooks::kValueMod, Config::kHeadDimV, Padded>(src, dst, [&](const float* x, float* y) {
    if constexpr (Hooks::kValueMod) Hooks::value_mod(c, x, y, b, kv_h, kv_idx);
  });
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

// `panels` panels of V rows [0, count): words[panel * stride + (n / pack) * kPanel + dim % kPanel].
// A word holds `pack` adjacent keys of one dim; keys past an odd count are zero. `row(n)` returns
// row n in the matrix dtype, padded to whole panels; it may alternate between two buffers.
template <class Matrix, class Row>
FAJIT_INLINE void pack_panels(int count, int panels, int32_t* words, int64_t stride, Row row) {
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
        int p = 0;
#if defined(__AVX512BF16__)
        // Two panels at once, without widening.
        const v32 low = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
        for (; p + 2 <= panels; p += 2) {
          const v32 a = load<v32>(even + p * kPanel), b = load<v32>(odd + p * kPanel);
          int32_t* const to = words + p * stride + n / 2 * kPanel;
          store(to, __builtin_shuffle(a, b, low));
          store(to + stride, __builtin_shuffle(a, b, low + uint16_t{16}));
        }
#endif
        for (; p < panels; ++p)
          for (int i = 0; i < kPanel; i += kLanes) {
            const vu lo = widen(load<vh>(even + p * kPanel + i));
            const vu hi = widen(load<vh>(odd + p * kPanel + i));
            store(words + p * stride + n / 2 * kPanel + i, lo | (hi << 16));
          }
      } else {
        for (int p = 0; p < panels; ++p)
          for (int i = 0; i < kPanel; i += kLanes)
            store(words + p * stride + n / 2 * kPanel + i, widen(load<vh>(even + p * kPanel + i)));
      }
    }
  }
}

}  // namespace fajit
