// The two products of a few query rows with a tile of keys, bound by memory: every K and V vector
// is loaded once, in place, for all rows.
//
//   few_scores   lanes over head_dim: kLanes dot products at a time (1 row x 16 keys, 2 x 8,
//                4 x 4), reduced to one vector of scores by a tree of exchanges
//   few_values   lanes over head_dim_v: rows x vectors of O in registers, a chunk of keys at a time
#pragma once
#include <fajit/cpu/key_rows.h>
#include <fajit/cpu/microkernel.h>
#include <fajit/cpu/vector/transpose.h>

namespace fajit {

constexpr int kFewRowGroup = 4;  // rows that share a loaded vector

// Lane i of the result is the sum over the lanes of r[i].
FAJIT_INLINE vf reduce_columns(vf (&r)[kLanes]) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
    const vi lane = iota();
    const vi upper = (lane & half) != 0;
    const vi even = upper ? lane - half + kLanes : lane;
    const vi odd = upper ? lane + kLanes : lane + half;
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      const vi a = as_int(r[i]), b = as_int(r[i + half]);
      r[i] = as_float(shuffle2(a, b, even)) + as_float(shuffle2(a, b, odd));
    }
  }
  return r[0];
}

// Whether rows of `Dim` bf16 values are read as words of two: a shift makes floats of the even
// elements and an AND of the odd ones, two operations where widening each vector takes four. Q is
// permuted to match (`paired_row`), O is permuted back before it is written (`ordered_dims`). One
// row takes 0.37 of the time that widening took, four rows 0.64 (AVX2, from L2, timed by hand).
template <class Matrix, class T, int Dim>
constexpr bool kPaired = same<Matrix, float> && same<T, bfloat16_t> && Dim % (2 * kLanes) == 0;

struct EvenOdd {
  vf even, odd;
  explicit FAJIT_INLINE EvenOdd(const bfloat16_t* p) {
    const vi words = load<vi>(p);
    even = as_float(words << 16);
    odd = as_float(words & ~0xffff);
  }
};

// One vector of K against one of Q. Two bf16 vectors are multiplied as words of two; other storage
// types are converted to float.
template <class Matrix, class Key, bool Paired = false>
struct KeyVector {
  static constexpr int kElements = kLanes;
  vf v;
  explicit FAJIT_INLINE KeyVector(const Key* p) : v(Storage<Key>::load(p)) {}
  FAJIT_INLINE vf dot(vf acc, const Matrix* q) const { return acc + v * load(q); }
};
template <>
struct KeyVector<float, bfloat16_t, true> {
  static constexpr int kElements = 2 * kLanes;
  EvenOdd v;
  explicit FAJIT_INLINE KeyVector(const bfloat16_t* p) : v(p) {}
  FAJIT_INLINE vf dot(vf acc, const float* q) const {
    return acc + v.even * load(q) + v.odd * load(q + kLanes);
  }
};
#if defined(__AVX512BF16__)
template <>
struct KeyVector<bfloat16_t, bfloat16_t> {
  static constexpr int kElements = 2 * kLanes;
  vi v;
  explicit FAJIT_INLINE KeyVector(const bfloat16_t* p) : v(load<vi>(p)) {}
  FAJIT_INLINE vf dot(vf acc, const bfloat16_t* q) const {
    return Dot<bfloat16_t>::step(acc, v, load<vi>(q));
  }
};
#endif

// s[row * s_stride + key] = scale * q[row] . k[key] for NR rows and keys [0, count), count rounded
// up to kLanes / NR. Rows of q are `Dim` long; `Dim` is a multiple of a vector. Keys past `count`
// repeat the last key. `k(n)`: row n, for prefetches also past `count`. The NG groups of NR rows
// process the same few keys one after another, so all but the first find them in L1: the rows of
// one head may be 4 KB apart, where 8 of them fill their L1 set and 128 their L2 set.
template <class Matrix, class Key, int Dim, int NR, int NG = 1, class KeyRows>
FAJIT_INLINE void few_scores(KeyRows k, int count, const Matrix* q, float scale, float* s,
                             int s_stride) {
  constexpr int keys = kLanes / NR;
  constexpr int ahead = prefetch_keys(Dim * sizeof(Key));
  using Vector = KeyVector<Matrix, Key, kPaired<Matrix, Key, Dim>>;
  for (int n = 0; n < count; n += keys) {
    const Key* row[keys];
#pragma GCC unroll 16
    for (int i = 0; i < keys; ++i) {
      row[i] = k(n + i < count ? n + i : count - 1);
      prefetch_row<Dim * sizeof(Key)>(k(n + i + ahead));
    }
#pragma GCC unroll 1
    for (int g = 0; g < NG; ++g) {
      const Matrix* of_group = q + g * NR * Dim;
      vf acc[kLanes] = {};
      for (int d = 0; d < Dim; d += Vector::kElements) {
#pragma GCC unroll 16
        for (int i = 0; i < keys; ++i) {
          const Vector v(row[i] + d);
#pragma GCC unroll 4
          for (int r = 0; r < NR; ++r)
            acc[r * keys + i] = v.dot(acc[r * keys + i], of_group + r * Dim + d);
        }
      }
      const vf dots = reduce_columns(acc) * scale;
      float lanes[kLanes];
      store(lanes, dots);
#pragma GCC unroll 4
      for (int r = 0; r < NR; ++r)
        __builtin_memcpy(s + (g * NR + r) * s_stride + n, lanes + r * keys, keys * sizeof(float));
    }
  }
}

// One step of O += P V. float weights: a key at a time, values become float. bf16 weights and
// values: two keys at a time, as words of two; interleaving within 128-bit lanes is one operation
// for 16 words, and leaves 32 dims as two vectors in the order that `ordered_dims` undoes. With a
// conversion and an FMA for each key instead, 4 rows took 2.4 times as long from L1.
template <class Matrix, class Value, bool Paired = false>
struct ValueStep {
  using Weight = float;
  static constexpr int kKeys = 1;
  static constexpr int kVectors = 1;  // vectors that load() makes
  static FAJIT_INLINE void load(const Value* row, const Value*, vi (&x)[1]) {
    x[0] = as_int(Storage<Value>::load(row));
  }
};
template <>
struct ValueStep<float, bfloat16_t, true> {
  using Weight = float;
  static constexpr int kKeys = 1;
  static constexpr int kVectors = 2;
  static FAJIT_INLINE void load(const bfloat16_t* row, const bfloat16_t*, vi (&x)[2]) {
    const EvenOdd v(row);
    x[0] = as_int(v.even);
    x[1] = as_int(v.odd);
  }
};
#if defined(__AVX512BF16__)
template <>
struct ValueStep<bfloat16_t, bfloat16_t> {
  using Weight = bfloat16_t;
  static constexpr int kKeys = 2;
  static constexpr int kVectors = 2;
  static FAJIT_INLINE void load(const bfloat16_t* even, const bfloat16_t* odd, vi (&x)[2]) {
    typedef uint16_t v32 __attribute__((vector_size(64)));
    const v32 a = fajit::load<v32>(even), b = fajit::load<v32>(odd);
    const v32 low = {0,  32, 1,  33, 2,  34, 3,  35, 8,  40, 9,  41, 10, 42, 11, 43,
                     16, 48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59};
    x[0] = (vi)__builtin_shuffle(a, b, low);
    x[1] = (vi)__builtin_shuffle(a, b, low + 4);
  }
};
#endif

// o[row][0, NV * kLanes) += sum over `count` keys of p[row] v, in steps of kKeys: `p` has a word a
// step. An odd last key is paired with itself, with weight 0. `Fetch`: bytes of the rows of `ahead`
// to prefetch at each key, 0 for none.
template <class Matrix, class Value, bool Paired, int NR, int NV, int Fetch, class ValueRows,
          class AheadRows>
FAJIT_INLINE void few_values_part(ValueRows v, AheadRows ahead, int count, const int32_t* p,
                                  int p_stride, float* o, int o_stride) {
  using Step = ValueStep<Matrix, Value, Paired>;
  using Weight = Dot<typename Step::Weight>;
  static_assert(NV % Step::kVectors == 0);
  vf acc[NR][NV] = {};  // added to o at the end: short chains of additions have small errors
  for (int n = 0; n < count; n += Step::kKeys) {
    const Value* row = v(n);
    const Value* partner = n + 1 < count ? v(n + 1) : row;
    if constexpr (Fetch > 0)
#pragma GCC unroll 2
      for (int i = 0; i < Step::kKeys; ++i) prefetch_row<Fetch>(ahead(n + i));
    vi weight[NR];
#pragma GCC unroll 4
    for (int r = 0; r < NR; ++r) weight[r] = splat(p[r * p_stride + n / Step::kKeys]);
#pragma GCC unroll 16
    for (int j = 0; j < NV; j += Step::kVectors) {
      vi x[Step::kVectors];
      Step::load(row + j * kLanes, partner + j * kLanes, x);
#pragma GCC unroll 2
      for (int i = 0; i < Step::kVectors; ++i)
#pragma GCC unroll 4
        for (int r = 0; r < NR; ++r) acc[r][j + i] = Weight::step(acc[r][j + i], weight[r], x[i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < NR; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < NV; ++j) {
      float* at = o + r * o_stride + j * kLanes;
      store(at, load(at) + acc[r][j]);
    }
}

// All of `Dim` (a multiple of what a step makes) for NR rows. Keys are processed in chunks whose V
// rows stay in L1 for all parts of the head dim; the first part prefetches, a row at a step.
template <class Matrix, class Value, int Dim, int NR, class ValueRows>
FAJIT_INLINE void few_values(ValueRows v, int count, const int32_t* p, int p_stride, float* o) {
  constexpr bool paired = kPaired<Matrix, Value, Dim>;
  constexpr int vectors = Dim / kLanes;
  constexpr int most = (kLanes == 16 ? 16 : 8) / NR;
  constexpr int NV = vectors < most ? vectors : most;
  constexpr int chunk = 16;
  constexpr int ahead = prefetch_keys(Dim * sizeof(Value));
  for (int n = 0; n < count; n += chunk) {
    const int keys = count - n < chunk ? count - n : chunk;
    const ValueRows rows = v.from(n, 0);
    const int32_t* words = p + n / ValueStep<Matrix, Value>::kKeys;
    few_values_part<Matrix, Value, paired, NR, NV, Dim * sizeof(Value)>(
        rows, rows.from(ahead, 0), keys, words, p_stride, o, Dim);
    int d = NV * kLanes;
    for (; d + NV * kLanes <= Dim; d += NV * kLanes)
      few_values_part<Matrix, Value, paired, NR, NV, 0>(rows.from(0, d), rows, keys, words,
                                                        p_stride, o + d, Dim);
    if constexpr (vectors % NV != 0)
      few_values_part<Matrix, Value, paired, NR, vectors % NV, 0>(rows.from(0, d), rows, keys,
                                                                  words, p_stride, o + d, Dim);
  }
}

// The same for NG groups of NR rows, bound by arithmetic as much as by memory. A chunk's rows are
// first copied to a contiguous buffer: in place, 4 KB apart, they evict each other from L1 between
// the groups, and loads from L2 queue behind the prefetches. Each part of the first group
// prefetches its columns of the next chunk, so the memory stays busy. 8 rows take 0.85 to 0.94 of
// the time of one group after the other, in bf16 0.8 to 0.89 (measured with chunks of 8 keys, one
// thread on AVX2, 1 to 32 KV heads). Chunks of 16 take as long, and O, which is updated half as
// often, then has 1.3 instead of 1.7 times the error of a prefill tile over 8,192 keys.
template <class Matrix, class Value, int Dim, int NR, int NG, class ValueRows>
FAJIT_INLINE void grouped_values(ValueRows v, int count, const int32_t* p, int p_stride, float* o) {
  using Step = ValueStep<Matrix, Value>;
  // The type of V in the copy: that of the weights.
  using Copy = typename Step::Weight;
  constexpr int vectors = Dim / kLanes;
  constexpr int most = (kLanes == 16 ? 16 : 8) / NR;
  constexpr int NV = vectors < most ? vectors : most;
  constexpr int bytes = NV * kLanes * sizeof(Value);
  constexpr int chunk = 16;
  alignas(64) Copy copy[chunk * Dim];
  const StridedRows<Copy> held{copy, Dim};
  for (int n = 0; n < count; n += chunk) {
    const int keys = count - n < chunk ? count - n : chunk;
    for (int i = 0; i < keys; ++i) {
      const Value* row = v(n + i);
      if constexpr (sizeof(Copy) == sizeof(Value)) {
        __builtin_memcpy(copy + i * Dim, row, Dim * sizeof(Value));
      } else if constexpr (kPaired<Matrix, Value, Dim>) {
#pragma GCC unroll 4
        for (int d = 0; d < Dim; d += 2 * kLanes) {
          const EvenOdd x(row + d);
          store(copy + i * Dim + d, x.even);
          store(copy + i * Dim + d + kLanes, x.odd);
        }
      } else {
#pragma GCC unroll 4
        for (int d = 0; d < Dim; d += kLanes)
          store(copy + i * Dim + d, Storage<Value>::load(row + d));
      }
    }
    const ValueRows next = v.from(n + chunk, 0);
    const int32_t* words = p + n / Step::kKeys;
    int d = 0;
    for (; d + NV * kLanes <= Dim; d += NV * kLanes)
      few_values_part<Matrix, Copy, false, NR, NV, bytes>(held.from(0, d), next.from(0, d), keys,
                                                          words, p_stride, o + d, Dim);
    if constexpr (vectors % NV != 0)
      few_values_part<Matrix, Copy, false, NR, vectors % NV, bytes>(
          held.from(0, d), next.from(0, d), keys, words, p_stride, o + d, Dim);
#pragma GCC unroll 1
    for (int g = 1; g < NG; ++g) {
      const int32_t* of_group = words + g * NR * p_stride;
      float* out = o + g * NR * Dim;
      for (d = 0; d + NV * kLanes <= Dim; d += NV * kLanes)
        few_values_part<Matrix, Copy, false, NR, NV, 0>(held.from(0, d), held, keys, of_group,
                                                        p_stride, out + d, Dim);
      if constexpr (vectors % NV != 0)
        few_values_part<Matrix, Copy, false, NR, vectors % NV, 0>(held.from(0, d), held, keys,
                                                                  of_group, p_stride, out + d, Dim);
    }
  }
}

// A row of float weights as the words of `few_values`, in place: `keys` is a multiple of kLanes and
// weights past the last key are zero.
template <class Matrix, class Value>
FAJIT_INLINE void pack_row_weights([[maybe_unused]] float* p, [[maybe_unused]] int keys) {
#if defined(__AVX512BF16__)
  if constexpr (ValueStep<Matrix, Value>::kKeys == 2) {
    for (int n = 0; n < keys; n += 2 * kLanes) {
      const vf low = load(p + n), high = n + kLanes < keys ? load(p + n + kLanes) : vf{};
      vi words;  // adjacent keys are already adjacent halves
      asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(words) : "v"(high), "v"(low));
      store(p + n / 2, words);
    }
  }
#endif
}

// The even elements of every 2 * kLanes before the odd ones, in place.
template <int Dim>
FAJIT_INLINE void paired_row(float* q) {
  const vi even = (iota() * 2) & (2 * kLanes - 1);
  for (int d = 0; d < Dim; d += 2 * kLanes) {
    const vi a = load<vi>(q + d), b = load<vi>(q + d + kLanes);
    store(q + d, shuffle2(a, b, even));
    store(q + d + kLanes, shuffle2(a, b, even + 1));
  }
}

// Restores the order of dims in a row of accumulators, in place.
template <class Matrix, class Value, int Dim>
FAJIT_INLINE void ordered_dims([[maybe_unused]] float* o) {
  if constexpr (kPaired<Matrix, Value, Dim>) {
    const vi first = (iota() >> 1) + (iota() & 1) * kLanes;
    for (int d = 0; d < Dim; d += 2 * kLanes) {
      const vi a = load<vi>(o + d), b = load<vi>(o + d + kLanes);
      store(o + d, shuffle2(a, b, first));
      store(o + d + kLanes, shuffle2(a, b, first + kLanes / 2));
    }
  }
#if defined(__AVX512BF16__)
  if constexpr (ValueStep<Matrix, Value>::kKeys == 2) {
    const vi first = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    for (int d = 0; d < Dim; d += 2 * kLanes) {
      const vi a = load<vi>(o + d), b = load<vi>(o + d + kLanes);
      store(o + d, shuffle2(a, b, first));
      store(o + d + kLanes, shuffle2(a, b, first + 8));
    }
  }
#endif
}

}  // namespace fajit
