// The two matrix products of a block of query rows, with rows on lanes:
//
//   multiply_scores   S^T[key][row] = sum_d K[key][d] Q^T[d][row]
//   multiply_values   O^T[dim][row] = alpha[row] O^T[dim][row]
//                                     + sum_key V^T[dim][key] P^T[key][row]
//
//        Q^T or P^T   [depth][NV vectors of rows]   vectors, from L1
//        K or V       [depth] words                 broadcast
//        S^T or O^T   MR x NV vectors               accumulators, in registers
//
// A word is 32 bits: one float, or two bfloat16 adjacent in depth. Both products have rows on
// lanes, so row maxima, row sums and rescaling need no horizontal reduction, and a head dim of any
// size needs no vector tail. MR x NV = 8 x 3 of 32 registers: 24 FMAs (12 cycles) for 11 loads; 95
// % of the FMA peak for both products, fp32 and bf16 (measured, L1-resident tiles).
#pragma once
#include <fajit/cpu/vector/load_row.h>

namespace fajit {

#if FAJIT_LANES == 16
constexpr int kMicroRows = 8, kMaxVectors = 3;
#elif FAJIT_LANES == 8
constexpr int kMicroRows = 4, kMaxVectors = 3;  // 12 of 16 registers
#else
constexpr int kMicroRows = 4, kMaxVectors = 2;  // without FMA, the product needs a register
#endif
// Maximum length of a chain of fp32 additions; longer sums are split into several chains. Chains of
// a whole head dim (64, 128, 256) and of 96 keys had 1.7, 2.8 and 3.2 times the rms error of the
// few-row kernel; these lengths have at most 1.4 times, and cost 1 to 3 % of the time on AVX-512,
// none on AVX2.
constexpr int kScoreChain = 40, kValueChain = 48;
constexpr int kPanel = 16;  // contiguous words of V of one key (or key pair)

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

// While it lives, results below 2^-126 are 0 in this thread, as they are in `vdpbf16ps` and in
// products of AMX tiles. A vector with a denormal result takes 150 clocks: weights of keys far from
// a row, with a bias that falls on both sides, took most of the time.
class FlushDenormals {
 public:
  FlushDenormals() { __builtin_ia32_ldmxcsr(before_ | 0x8000); }
  ~FlushDenormals() { __builtin_ia32_ldmxcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  const unsigned before_ = __builtin_ia32_stmxcsr();
};
struct NoSession {
  static void configure(int) {}
};

// K and V rows are prefetched this far ahead of the one in use, a row at a step, into L2: a core
// can have more misses outstanding there (48 and 64 on Xeons with AMX and on Zen 4) than in L1 (16
// and 24). Without prefetching, decode reaches 65-70 % of the machine's read bandwidth, because the
// hardware prefetcher stops at page boundaries; with a burst of rows per chunk of keys, V fell to
// 50 %. 16 KB ahead into L2 takes 0.5 to 0.9 of the time of 6 KB ahead into L1 (17 of 18 shapes of
// decode, fp32 and bf16, on a Zen 4 with AVX-512, timed by hand; one took 1.04).
constexpr int kPrefetchBytes = 16384, kPrefetchLocality = 2;
constexpr int prefetch_keys(int row_bytes) {
  constexpr int most = 128;  // bounds the size of the tables of keys
  const int keys = kPrefetchBytes / row_bytes;
  return keys < 1 ? 1 : keys < most ? keys : most;
}

// Prefetches a row of `bytes` bytes. The address may be past the end of the tensor: a prefetch does
// not fault.
template <int bytes>
FAJIT_INLINE void prefetch_row(const void* p) {
#pragma GCC unroll 16
  for (int i = 0; i < bytes; i += 64)
    __builtin_prefetch(static_cast<const char*>(p) + i, 0, kPrefetchLocality);
}

// Rows of `bytes` bytes, in lines of 64, are prefetched by equal pieces: the size of a piece, at
// most four lines.
constexpr int piece_of(int bytes) {
  const int lines = (bytes + 63) / 64;
  return 64 * (lines % 4 == 0 ? 4 : lines % 3 == 0 ? 3 : lines % 2 == 0 ? 2 : 1);
}

FAJIT_INLINE vi broadcast_word(const void* p) {
  int32_t w;
  __builtin_memcpy(&w, p, 4);
  return splat(w);
}

// acc[i][j] = sum over depth of word(k, i) * vectors[k * NV + j]; depth is at least 1.
template <class Matrix, int NV, class Word>
FAJIT_INLINE void accumulate(vf (&acc)[kMicroRows][NV], const int32_t* vectors, int depth,
                             Word word) {
  const auto step = [&](int k, auto add) __attribute__((always_inline)) {
    vi b[NV];
#pragma GCC unroll 3
    for (int j = 0; j < NV; ++j) b[j] = load<vi>(vectors + (k * NV + j) * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kMicroRows; ++i) {
      const vi a = broadcast_word(word(k, i));
#pragma GCC unroll 3
      for (int j = 0; j < NV; ++j) acc[i][j] = add(acc[i][j], a, b[j]);
    }
  };
  // The first step is a product without an addition: zeroing registers uses the ports of the FMAs,
  // 1 % of the time in fp32.
  if constexpr (Dot<Matrix>::kPack == 1) {
    step(0, [](vf, vi a, vi b) { return (vf)a * (vf)b; });
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < kMicroRows; ++i)
#pragma GCC unroll 3
      for (int j = 0; j < NV; ++j) acc[i][j] = vf{};
  }
  // Not unrolled: unrolled by 2, gcc 12 keeps half of the accumulators on the stack (68 % of peak
  // instead of 80 % for the whole kernel, bf16).
#pragma GCC unroll 1
  for (int k = Dot<Matrix>::kPack == 1; k < depth; ++k) step(k, Dot<Matrix>::step);
}

// Compiler barrier for memory. Without it gcc 12 keeps the values that one part of a sum stored in
// registers for the next part, and spills accumulators.
FAJIT_INLINE void settle() { asm volatile("" ::: "memory"); }

// Keys [0, count) against a block of rows. `keys(n)`: row n; `s` has room for count rounded up to
// kMicroRows. Rows past `count` are not read, the last one is used instead. `fetch(words)` is
// called with the words of K that each part multiplies.
template <class Matrix, int NV, int Words, class KeyRows, class Fetch>
__attribute__((noinline)) void multiply_scores(KeyRows keys, int count, const int32_t* qt, float* s,
                                               Fetch fetch) {
  for (int n = 0; n < count; n += kMicroRows) {
    const char* row[kMicroRows];
#pragma GCC unroll 8
    for (int i = 0; i < kMicroRows; ++i)
      row[i] = reinterpret_cast<const char*>(keys(n + i < count ? n + i : count - 1));
    fetch(kMicroRows * Words);
    const auto part = [&](int at, int depth, auto join) __attribute__((always_inline)) {
      vf acc[kMicroRows][NV];
      accumulate<Matrix, NV>(acc, qt + at * NV * kLanes, depth,
                             [&](int k, int i) { return row[i] + 4 * (at + k); });
#pragma GCC unroll 8
      for (int i = 0; i < kMicroRows; ++i)
#pragma GCC unroll 3
        for (int j = 0; j < NV; ++j) join(s + ((n + i) * NV + j) * kLanes, acc[i][j]);
      settle();
    };
    constexpr int parts = Dot<Matrix>::kPack == 1 ? (Words + kScoreChain - 1) / kScoreChain : 1;
    constexpr int each = (Words + parts - 1) / parts;
    constexpr int last = Words - (parts - 1) * each;
    const auto add = [](float* at, vf x) { store(at, load(at) + x); };
    part(0, each, [](float* at, vf x) { store(at, x); });
#pragma GCC unroll 1
    for (int at = each; at < Words - last; at += each) part(at, each, add);
    if constexpr (parts > 1) part(Words - last, last, add);
  }
}

// Dims [0, dims) of the output; `dims` is a multiple of kMicroRows. V panels are `panel_stride`
// words apart; `depth` counts words. A tile's sum starts from zero and is added to the rescaled
// output at the end: one chain of additions over 1024 keys had 1.6 times the error, and a separate
// pass for rescaling cost 1.5 %. Chains of additions end at multiples of kValueChain words, counted
// from the tile's start, `skipped` words before the panels: keys that other rows need do not change
// the order of a row's sums. `fetch(words)` as above.
template <class Matrix, int NV, class Fetch>
__attribute__((noinline)) void multiply_values(const int32_t* panels, int64_t panel_stride,
                                               int dims, int skipped, int depth, const int32_t* pt,
                                               const float* alpha, float* o, Fetch fetch) {
  const int chain = kValueChain - skipped % kValueChain;
  for (int d = 0; d < dims; d += kMicroRows) {
    const int32_t* v = panels + d / kPanel * panel_stride + d % kPanel;
    fetch(kMicroRows * depth);
    const auto part = [&](int at, int count, auto join) __attribute__((always_inline)) {
      vf acc[kMicroRows][NV];
      accumulate<Matrix, NV>(acc, pt + at * NV * kLanes, count,
                             [&](int k, int i) { return v + (at + k) * kPanel + i; });
#pragma GCC unroll 8
      for (int i = 0; i < kMicroRows; ++i)
#pragma GCC unroll 3
        for (int j = 0; j < NV; ++j) join(o + ((d + i) * NV + j) * kLanes, acc[i][j], j);
      settle();
    };
    const int first = Dot<Matrix>::kPack == 1 && depth > chain ? chain : depth;
    part(0, first, [&](float* at, vf x, int j) __attribute__((always_inline)) {
      store(at, x + load(at) * load(alpha + j * kLanes));
    });
#pragma GCC unroll 1
    for (int at = first; at < depth; at += kValueChain)
      part(at, depth - at < kValueChain ? depth - at : kValueChain,
           [](float* at, vf x, int) __attribute__((always_inline)) { store(at, x + load(at)); });
  }
}

}  // namespace fajit
