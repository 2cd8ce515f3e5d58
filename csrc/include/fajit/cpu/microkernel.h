// The two matrix products of a block of query rows, with rows on lanes:
//
//   scores   S^T[key][row] = scale * sum_d K[key][d] Q^T[d][row]
//   values   O^T[dim][row] = alpha[row] O^T[dim][row] + sum_key V^T[dim][key] P^T[key][row]
//
//        Q^T or P^T   [depth][NV vectors of rows]   vectors, from L1
//        K or V       [depth] words                 broadcast
//        S^T or O^T   MR x NV vectors               accumulators, in registers
//
// A word is 32 bits: one float, or two bfloat16 that are neighbours in depth. Both products have
// rows on lanes, so row maxima, row sums and rescaling need no horizontal operation, and head dims
// of any size need no vector tail. MR x NV = 8 x 3 of 32 registers: 24 FMAs (12 cycles) for 11
// loads; 95 % of the FMA peak for both products, fp32 and bf16 (measured, L1-resident tiles).
#pragma once
#include <fajit/cpu/load_row.h>

namespace fajit {

#if FAJIT_LANES == 16
constexpr int kMicroRows = 8, kMaxVectors = 3;
#elif FAJIT_LANES == 8
constexpr int kMicroRows = 4, kMaxVectors = 3;  // 12 of 16 registers
#else
constexpr int kMicroRows = 4, kMaxVectors = 2;  // without FMA a product needs a register too
#endif
constexpr int kPanel = 16;  // words of V of one key (or key pair) that lie together

// One accumulation step per matrix dtype. kPack: matrix elements in a word.
template <class Matrix>
struct Dot;
template <>
struct Dot<float> {
  static constexpr int kPack = 1;
  static FAJIT_INLINE vf step(vf c, vi a, vi b) { return c + (vf)a * (vf)b; }
};
#if defined(__AVX512BF16__)
template <>
struct Dot<bfloat16_t> {
  static constexpr int kPack = 2;
  static FAJIT_INLINE vf step(vf c, vi a, vi b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
  }
};
#endif

// K and V rows are prefetched this far ahead of the one in use, a row at a step. Without, decode
// reaches 65-70 % of the machine's read bandwidth, because a hardware prefetcher stops at each page;
// with a burst of rows per chunk of keys V fell to 50 %; with this, 95 % (measured on Zen 4). Cores
// with AMX miss at most 16 lines in the L1 but 48 in the L2: rows are brought to the L2, from
// farther away (24 GB/s on two of them, and 16 into the L1 at any distance, measured).
#if FAJIT_AMX
constexpr int kPrefetchBytes = 16384, kPrefetchLocality = 2;
#else
constexpr int kPrefetchBytes = 6144, kPrefetchLocality = 3;
#endif
constexpr int prefetch_keys(int row_bytes) {
  return row_bytes >= kPrefetchBytes ? 1 : kPrefetchBytes / row_bytes;
}

// Brings a row of `bytes` bytes nearer. The address may lie past the tensor: nothing is read.
template <int bytes>
FAJIT_INLINE void prefetch_row(const void* p) {
#pragma GCC unroll 16
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i, 0, kPrefetchLocality);
}

FAJIT_INLINE vi broadcast_word(const void* p) {
  int32_t w;
  __builtin_memcpy(&w, p, 4);
  return splat(w);
}

// acc[i][j] += sum over depth of word(k, i) * vectors[k * NV + j].
template <class Matrix, int NV, class Word>
FAJIT_INLINE void accumulate(vf (&acc)[kMicroRows][NV], const int32_t* vectors, int depth,
                             Word word) {
  // Not unrolled: unrolled by 2, gcc 12 keeps half of the accumulators on the stack (68 % of peak
  // instead of 80 % for the whole kernel, bf16).
#pragma GCC unroll 1
  for (int k = 0; k < depth; ++k) {
    vi b[NV];
#pragma GCC unroll 3
    for (int j = 0; j < NV; ++j) b[j] = load<vi>(vectors + (k * NV + j) * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kMicroRows; ++i) {
      const vi a = broadcast_word(word(k, i));
#pragma GCC unroll 3
      for (int j = 0; j < NV; ++j) acc[i][j] = Dot<Matrix>::step(acc[i][j], a, b[j]);
    }
  }
}

// Keys [0, count) against a block of rows. `keys(n)`: row n; `s` has room for count rounded up to
// kMicroRows. No row past `count` is read: the last one stands in for it. `fetch(n)`: prefetches
// that go with key n.
template <class Matrix, int NV, int Words, class KeyRows, class Fetch>
__attribute__((noinline)) void scores(KeyRows keys, int count, const int32_t* qt, float scale,
                                      float* s, Fetch fetch) {
  for (int n = 0; n < count; n += kMicroRows) {
    const char* row[kMicroRows];
#pragma GCC unroll 8
    for (int i = 0; i < kMicroRows; ++i)
      row[i] = reinterpret_cast<const char*>(keys(n + i < count ? n + i : count - 1));
#pragma GCC unroll 8
    for (int i = 0; i < kMicroRows; ++i) fetch(n + i);
    vf acc[kMicroRows][NV] = {};
    accumulate<Matrix, NV>(acc, qt, Words, [&](int k, int i) { return row[i] + 4 * k; });
#pragma GCC unroll 8
    for (int i = 0; i < kMicroRows; ++i)
#pragma GCC unroll 3
      for (int j = 0; j < NV; ++j) store(s + ((n + i) * NV + j) * kLanes, acc[i][j] * scale);
  }
}

// Dims [0, dims) of the output; `dims` is a multiple of kMicroRows. V panels are `panel_stride`
// words apart; `depth` counts words. A tile's sum starts from zero and joins the rescaled output at
// the end: one chain of additions over 1024 keys had 1.6 times the error, and rescaling as a pass of
// its own cost 1.5 %.
template <class Matrix, int NV>
__attribute__((noinline)) void values(const int32_t* panels, int64_t panel_stride, int dims,
                                      int depth, const int32_t* pt, const float* alpha, float* o) {
  for (int d = 0; d < dims; d += kMicroRows) {
    const int32_t* v = panels + d / kPanel * panel_stride + d % kPanel;
    vf acc[kMicroRows][NV] = {};
    accumulate<Matrix, NV>(acc, pt, depth, [&](int k, int i) { return v + k * kPanel + i; });
#pragma GCC unroll 8
    for (int i = 0; i < kMicroRows; ++i)
#pragma GCC unroll 3
      for (int j = 0; j < NV; ++j) {
        float* at = o + ((d + i) * NV + j) * kLanes;
        store(at, acc[i][j] + load(at) * load(alpha + j * kLanes));
      }
  }
}

}  // namespace fajit
