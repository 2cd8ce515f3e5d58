// The two products of a few query rows with a tile of keys, bound by memory: every K and V vector
// is loaded once from its place in memory and serves all rows.
//
//   few_scores   lanes over head_dim: kLanes dot products at a time (1 row x 16 keys, 2 x 8, 4 x 4),
//                reduced to one vector of scores by a tree of exchanges
//   few_values   lanes over head_dim_v: rows x vectors of O in registers, a chunk of keys at a time
#pragma once
#include <fajit/cpu/microkernel.h>
#include <fajit/cpu/transpose.h>

namespace fajit {

constexpr int kFewRowGroup = 4;     // rows that share a loaded vector
constexpr int kPrefetchKeys = 32;   // rows ahead of the one in use

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

// Brings a row of `bytes` bytes nearer. The address may lie past the tensor: nothing is read.
template <int bytes>
FAJIT_INLINE void prefetch_row(const void* p) {
#pragma GCC unroll 16
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i);
}

// One vector of K against one of Q. A bf16 pair of vectors multiplies as words; other storage types
// become float.
template <class Matrix, class Key>
struct KeyVector {
  static constexpr int kElements = kLanes;
  vf v;
  explicit FAJIT_INLINE KeyVector(const Key* p) : v(Storage<Key>::load(p)) {}
  FAJIT_INLINE vf dot(vf acc, const Matrix* q) const { return acc + v * load(q); }
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
// up to kLanes / NR. Rows of q are `Dim` long; `Dim` is a multiple of a vector. The last key stands
// in for those past `count`.
template <class Matrix, class Key, int Dim, int NR>
FAJIT_INLINE void few_scores(const Key* k, int64_t k_stride, int count, const Matrix* q,
                             float scale, float* s, int s_stride) {
  constexpr int keys = kLanes / NR;
  using Vector = KeyVector<Matrix, Key>;
  for (int n = 0; n < count; n += keys) {
    const Key* row[keys];
#pragma GCC unroll 16
    for (int i = 0; i < keys; ++i) {
      row[i] = k + k_stride * (n + i < count ? n + i : count - 1);
      prefetch_row<Dim * sizeof(Key)>(k + k_stride * (n + i + kPrefetchKeys));
    }
    vf acc[kLanes] = {};
    for (int d = 0; d < Dim; d += Vector::kElements) {
#pragma GCC unroll 16
      for (int i = 0; i < keys; ++i) {
        const Vector v(row[i] + d);
#pragma GCC unroll 4
        for (int r = 0; r < NR; ++r) acc[r * keys + i] = v.dot(acc[r * keys + i], q + r * Dim + d);
      }
    }
    const vf dots = reduce_columns(acc) * scale;
    float lanes[kLanes];
    store(lanes, dots);
#pragma GCC unroll 4
    for (int r = 0; r < NR; ++r)
      __builtin_memcpy(s + r * s_stride + n, lanes + r * keys, keys * sizeof(float));
  }
}

// o[row][Begin, Begin + NV * kLanes) += sum over keys [0, count) of p[row * p_stride + key] v[key].
template <class Value, int NR, int NV>
FAJIT_INLINE void few_values_part(const Value* v, int64_t v_stride, int count, const float* p,
                                  int p_stride, float* o, int o_stride) {
  vf acc[NR][NV];
#pragma GCC unroll 4
  for (int r = 0; r < NR; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < NV; ++j) acc[r][j] = load(o + r * o_stride + j * kLanes);
  for (int n = 0; n < count; ++n) {
    const Value* row = v + n * v_stride;
    vf weight[NR];
#pragma GCC unroll 4
    for (int r = 0; r < NR; ++r) weight[r] = splat(p[r * p_stride + n]);
#pragma GCC unroll 16
    for (int j = 0; j < NV; ++j) {
      const vf x = Storage<Value>::load(row + j * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < NR; ++r) acc[r][j] += weight[r] * x;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < NR; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < NV; ++j) store(o + r * o_stride + j * kLanes, acc[r][j]);
}

// All of `Dim` (a multiple of kLanes) for NR rows. Keys go in chunks whose V rows stay in L1 while
// the parts of the head dim pass over them.
template <class Value, int Dim, int NR>
FAJIT_INLINE void few_values(const Value* v, int64_t v_stride, int count, const float* p,
                             int p_stride, float* o) {
  constexpr int vectors = Dim / kLanes;
  constexpr int most = (kLanes == 16 ? 16 : 8) / NR;
  constexpr int NV = vectors < most ? vectors : most;
  constexpr int chunk = 16;
  for (int n = 0; n < count; n += chunk) {
    const int keys = count - n < chunk ? count - n : chunk;
    const Value* rows = v + n * v_stride;
    for (int i = 0; i < keys; ++i)
      prefetch_row<Dim * sizeof(Value)>(rows + (i + kPrefetchKeys) * v_stride);
    int d = 0;
    for (; d + NV * kLanes <= Dim; d += NV * kLanes)
      few_values_part<Value, NR, NV>(rows + d, v_stride, keys, p + n, p_stride, o + d, Dim);
    if constexpr (vectors % NV != 0)
      few_values_part<Value, NR, vectors % NV>(rows + d, v_stride, keys, p + n, p_stride, o + d,
                                               Dim);
  }
}

}  // namespace fajit
