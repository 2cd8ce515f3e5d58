// The two products of a few query rows with a tile of keys, bound by memory: every K and V vector
// is loaded once, in place, for all rows.
//
//   few_scores   lanes over head_dim: kLanes dot products at a time (1 row x 16 keys, 2 x 8,
//                4 x 4), reduced to one vector of scores by a tree of exchanges; on AVX2 12
//                (4 rows x 3 keys), reduced key by key
//   few_values   lanes over head_dim_v: rows x vectors of O in registers, a chunk of keys at a time
#pragma once
#include <fajit/cpu/key_rows.h>
#include <fajit/cpu/microkernel.h>
#include <fajit/cpu/vector/bfloat16_words.h>
#include <fajit/cpu/vector/nan_codes.h>
#include <fajit/cpu/vector/transpose.h>

namespace fajit {

constexpr int kFewRowGroup = 4;  // rows that share a loaded vector

// Prefetches rows in the order of memory, a piece at a time between other work: a burst fills the
// core's miss queue and stalls, and afterwards the memory is idle. When the first of the parts in
// which O is computed prefetched all of V, AVX2 (8 parts for 4 rows, D128) read V at 10 instead of
// 25 GB/s (fp32; 9 and 17 in bf16; one thread of a Zen 4, timed by hand).
template <class Rows>
class RowStream {
 public:
  // `bytes`: of a row, or of several adjacent ones.
  FAJIT_INLINE RowStream(const Rows& rows, int64_t bytes) : rows_(rows), bytes_(bytes) { start(); }

  template <int piece>
  FAJIT_INLINE void next() {
    prefetch_row<piece>(at_);
    at_ += piece;
    if (at_ < end_) return;
    rows_ = rows_.from(1, 0);
    start();
  }

 private:
  FAJIT_INLINE void start() {
    at_ = reinterpret_cast<const char*>(rows_(0));
    end_ = at_ + bytes_;
  }

  Rows rows_;
  const int64_t bytes_;
  const char *at_, *end_;
};

// Starts the translation of the addresses of `Count` rows from row `first` on.
template <int Count, class Rows>
FAJIT_INLINE void touch_pages(const Rows& rows, int first) {
  each_page(rows, first, Count, [](const char* p) { __builtin_prefetch(p, 0, kPrefetchLocality); });
}

// What the tiles of TileKv rows before would have fetched: for the first tile, and where the mask
// skips keys. Bytes: of a row of one of `heads` heads, whose rows are `ahead` of those in use;
// there are `left` rows.
template <int TileKv, int Bytes, class Rows>
__attribute__((noinline)) void start_rows(const Rows& rows, int ahead, int heads, int left) {
  for (int n = 0; n < ahead + TileKv && n < left; n += TileKv) touch_pages<TileKv>(rows, n);
  RowStream<Rows> stream(rows, heads * Bytes);
  const int wanted = ahead < left ? ahead : left;
  for (int n = 0; n < heads * wanted; ++n) stream.template next<Bytes>();
}

// What products with vectors need in place of the TileStream of amx/few_row.h.
struct NoStream {
  template <class KeyStream, class ValueStream>
  NoStream(KeyStream&, ValueStream&, int, bool) {}
  void next(int) {}
};

template <int N, bool Several>
struct Groups {
  static constexpr int count = N;
  static constexpr bool several = Several;
};
// Calls `f` with a group size for rows [0, count), Most at most, and the number of groups: the rows
// of a group share each loaded vector. One group of 1, 2 or 4 rows, or groups of 4. Results of rows
// past `count` are not read. Most is 0 where tiles compute all rows.
template <int Most, class F>
FAJIT_INLINE void with_rows(int count, F f) {
  if constexpr (Most == 0) return;
  if constexpr (Most == 1) return f(Groups<1, false>{}, 1);
  if (Most > kFewRowGroup && count > kFewRowGroup) {
    f(Groups<kFewRowGroup, true>{}, (count + kFewRowGroup - 1) / kFewRowGroup);
  } else if (count >= 3) {
    f(Groups<4, false>{}, 1);
  } else if (count == 2) {
    f(Groups<2, false>{}, 1);
  } else {
    f(Groups<1, false>{}, 1);
  }
}

// Lane i of the result is the sum over the lanes of r[i]. Vector: vf or vi.
template <class Vector>
FAJIT_INLINE Vector reduce_columns(Vector (&r)[kLanes]) {
  return reduce_columns(r, [](Vector a, Vector b) { return a + b; });
}

// Whether rows of `Dim` bf16 values are read as words of two: a shift makes floats of the even
// elements and an AND of the odd ones, two operations where widening each vector takes four. Q is
// permuted to match (`paired_row`), O is permuted back before it is written (`ordered_dims`). One
// row takes 0.37 of the time that widening took, four rows 0.64 (AVX2, from L2, timed by hand).
template <class Matrix, class T, int Dim>
constexpr bool kPaired = same<Matrix, float> && same<T, bfloat16_t> && Dim % (2 * kLanes) == 0;

// How rows of T are read: a vector at a time, two at once, as finite e4m3, or words of two. Two at
// once, e5m2 takes 0.8 to 0.9 of the time with 4 rows a key and 0.7 (AVX2) and 0.9 (AVX-512) with
// one (head_dim 128, keys from L3, one thread of a Xeon, by hand).
//
// Products of e4m3 are those of halves, times kUnit, where NaN is finite; NanCodes, which takes two
// operations for 32 codes, finds it and makes the results NaN. With 1 and with 4 rows a key this
// takes 0.75 of the time of products with floats and NaN (AVX2, from L2, Zen 3, by hand).
enum class Reading { kOne, kTwo, kFinite, kPaired };
template <class Matrix, class T, int Dim>
constexpr Reading reading() {
  if constexpr (kPaired<Matrix, T, Dim>) return Reading::kPaired;
  else if constexpr (!same<Matrix, float> || !kReadsTwo<T>) return Reading::kOne;
  else if constexpr (same<T, e4m3_t> && Dim % (4 * kLanes) == 0) return Reading::kFinite;
  else return Dim % (2 * kLanes) == 0 ? Reading::kTwo : Reading::kOne;
}
template <class Matrix, class T, int Dim>
constexpr Reading kReading = reading<Matrix, T, Dim>();
template <Reading How>
constexpr float kUnit = How == Reading::kFinite ? 256.0f : 1.0f;

struct EvenOdd {
  vf even, odd;
  explicit FAJIT_INLINE EvenOdd(const bfloat16_t* p) {
    const vi words = load<vi>(p);
    even = as_float(words << 16);
    odd = as_float(words & ~0xffff);
  }
};

// One vector of K, dims of a row of Dim from `d` on, against one of Q. Two bf16 vectors are
// multiplied as words of two; other storage types are converted to float.
template <class Matrix, class Key, int Dim, Reading How = Reading::kOne>
struct KeyVector {
  static constexpr int kElements = kLanes;
  vf v;
  FAJIT_INLINE KeyVector(const Key* row, int d) : v(load_dims<Key, Dim>(row, d)) {}
  FAJIT_INLINE vf dot(vf acc, const Matrix* q) const { return acc + v * load(q); }
};
struct TwoOfKey {
  static constexpr int kElements = 2 * kLanes;
  TwoVectors v;
  FAJIT_INLINE vf dot(vf acc, const float* q) const {
    return acc + v.low * load(q) + v.high * load(q + kLanes);
  }
};
template <class Key, int Dim>
struct KeyVector<float, Key, Dim, Reading::kTwo> : TwoOfKey {
  FAJIT_INLINE KeyVector(const Key* row, int d) : TwoOfKey{load_two_dims<Key, Dim>(row, d)} {}
};
#if FAJIT_AVX
template <int Dim>
struct KeyVector<float, e4m3_t, Dim, Reading::kFinite> : TwoOfKey {
  FAJIT_INLINE KeyVector(const e4m3_t* row, int d)
      : TwoOfKey{widen_halves(small_float_halves<4>(row + d))} {}
};
#endif
template <int Dim>
struct KeyVector<float, bfloat16_t, Dim, Reading::kPaired> {
  static constexpr int kElements = 2 * kLanes;
  EvenOdd v;
  FAJIT_INLINE KeyVector(const bfloat16_t* row, int d) : v(row + d) {}
  FAJIT_INLINE vf dot(vf acc, const float* q) const {
    return acc + v.even * load(q) + v.odd * load(q + kLanes);
  }
};
#if defined(__AVX512BF16__)
template <class Key, int Dim>
struct KeyVector<bfloat16_t, Key, Dim> {
  static constexpr int kElements = 2 * kLanes;
  vi v;
  FAJIT_INLINE KeyVector(const Key* row, int d) : v(bfloat16_words<Dim>(row, d)) {}
  FAJIT_INLINE vf dot(vf acc, const bfloat16_t* q) const {
    return Dot<bfloat16_t>::step(acc, v, load<vi>(q));
  }
};
#endif

// The sums over the lanes of four vectors of 8, in lanes 0, 4, 2 and 6. They are added in the order
// of `reduce_columns`: scores of a row do not depend on how many rows are computed with it.
FAJIT_INLINE vf reduce_four(vf r0, vf r1, vf r2, vf r3) {
  const auto join = [](vf a, vf b, const Halves& halves) {
    return as_float(shuffle2(as_int(a), as_int(b), halves.even)) +
           as_float(shuffle2(as_int(a), as_int(b), halves.odd));
  };
  const Halves four(4), two(2);
  const vf x = join(join(r0, r1, four), join(r2, r3, four), two);
  return x + as_float(shuffle2(as_int(x), as_int(x), iota() ^ 1));
}
constexpr int kLaneOfFour[4] = {0, 4, 2, 6};

#if FAJIT_AVX
// Makes scores of `count` rows NaN for those of N keys that have a NaN.
template <int Dim, int N>
FAJIT_INLINE void put_nan_scores(const e4m3_t* const (&keys)[N], int count, float* s,
                                 int s_stride) {
  NanCodes any;
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i)
    for (int d = 0; d < Dim; d += 4 * kLanes) any.add(load<vi>(keys[i] + d));
  if (__builtin_expect(!any.found(), true)) return;
  for (int i = 0; i < N; ++i) {
    NanCodes of_key;
    for (int d = 0; d < Dim; d += 4 * kLanes) of_key.add(load<vi>(keys[i] + d));
    if (of_key.found())
      for (int r = 0; r < count; ++r) s[r * s_stride + i] = __builtin_nanf("");
  }
}
// Makes elements of `count` rows of O NaN where a value is.
template <int Dim, class ValueRows>
FAJIT_INLINE void put_nan_values(ValueRows v, int keys, int count, float* o) {
  for (int d = 0; d < Dim; d += 4 * kLanes) {
    NanCodes nan;
    for (int n = 0; n < keys; ++n) nan.add(load<vi>(v(n) + d));
    if (__builtin_expect(nan.found(), false)) nan.put(o + d, count, Dim);
  }
}
#else  // never called
template <int Dim, class... Arguments>
void put_nan_scores(Arguments...);
template <int Dim, class... Arguments>
void put_nan_values(Arguments...);
#endif

// s[row * s_stride + key] = scale * q[row] . k[key] for groups of NR rows and keys [0, count); up
// to `count` rounded up to kLanes / NR is written, where keys repeat the last one. Rows of q are
// `Dim` long; `Dim` is a multiple of a vector. `fetch()` issues the prefetches that belong to a
// key. The groups process the same few keys one after another, so all but the first find them in
// L1: the rows of one head may be 4 KB apart, where 8 of them fill their L1 set and 128 their L2
// set.
template <class Matrix, class Key, int Dim, int NR, class KeyRows, class Fetch>
FAJIT_INLINE void few_scores(KeyRows k, int count, const Matrix* q, int groups, float scale,
                             float* s, int s_stride, Fetch fetch) {
  constexpr Reading how = kReading<Matrix, Key, Dim>;
  using Vector = KeyVector<Matrix, Key, Dim, how>;
  // Four rows against three keys have 12 sums in 16 registers: with the 8 of two keys, the latency
  // of the FMAs shows, and fp32 takes 1.14 times as long (from L2, Zen 4, timed by hand). Words of
  // two need six registers for three keys.
  constexpr bool by_key = kLanes == 8 && NR == 4 && Vector::kElements == kLanes;
  constexpr int keys = by_key ? 3 : kLanes / NR;
  for (int n = 0; n < count; n += keys) {
    const Key* row[keys];
#pragma GCC unroll 16
    for (int i = 0; i < keys; ++i) {
      row[i] = k(n + i < count ? n + i : count - 1);
      fetch();
    }
#pragma GCC unroll 1
    for (int g = 0; g < groups; ++g) {
      const Matrix* of_group = q + g * NR * Dim;
      float* out = s + g * NR * s_stride + n;
      vf acc[NR * keys] = {};
      for (int d = 0; d < Dim; d += Vector::kElements) {
        if constexpr (by_key) {
          vf v[keys];
#pragma GCC unroll 3
          for (int i = 0; i < keys; ++i) v[i] = Vector(row[i], d).v;
#pragma GCC unroll 4
          for (int r = 0; r < NR; ++r) {
            const vf x = load(of_group + r * Dim + d);
#pragma GCC unroll 3
            for (int i = 0; i < keys; ++i) acc[r * keys + i] += v[i] * x;
          }
        } else {
#pragma GCC unroll 16
          for (int i = 0; i < keys; ++i) {
            const Vector v(row[i], d);
#pragma GCC unroll 4
            for (int r = 0; r < NR; ++r)
              acc[r * keys + i] = v.dot(acc[r * keys + i], of_group + r * Dim + d);
          }
        }
      }
      float lanes[kLanes];
      if constexpr (by_key) {
#pragma GCC unroll 3
        for (int i = 0; i < keys; ++i) {
          store(lanes,
                reduce_four(acc[i], acc[keys + i], acc[2 * keys + i], acc[3 * keys + i]) * scale);
          if (n + i < count)
#pragma GCC unroll 4
            for (int r = 0; r < NR; ++r) out[r * s_stride + i] = lanes[kLaneOfFour[r]];
        }
      } else {
        store(lanes, reduce_columns(acc) * kUnit<how> * scale);
#pragma GCC unroll 4
        for (int r = 0; r < NR; ++r)
          __builtin_memcpy(out + r * s_stride, lanes + r * keys, keys * sizeof(float));
      }
    }
    if constexpr (how == Reading::kFinite) put_nan_scores<Dim>(row, groups * NR, s + n, s_stride);
  }
}

// One step of O += P V. float weights: a key at a time, values become float. bf16 weights and
// values: two keys at a time, as words of two; interleaving within 128-bit lanes is one operation
// for 16 words, and leaves 32 dims as two vectors in the order that `ordered_dims` undoes. With a
// conversion and an FMA for each key instead, 4 rows took 2.4 times as long from L1.
template <class Matrix, class Value, int Dim, Reading How = Reading::kOne>
struct ValueStep {
  using Weight = float;
  static constexpr int kKeys = 1;
  static constexpr int kVectors = 1;  // vectors that load() makes
  // From dim `d` of two rows of Dim on.
  static FAJIT_INLINE void load(const Value* row, const Value*, int d, vi (&x)[1]) {
    x[0] = as_int(load_dims<Value, Dim>(row, d));
  }
};
template <class Value, int Dim>
struct ValueStep<float, Value, Dim, Reading::kTwo> {
  using Weight = float;
  static constexpr int kKeys = 1;
  static constexpr int kVectors = 2;
  static FAJIT_INLINE void load(const Value* row, const Value*, int d, vi (&x)[2]) {
    const TwoVectors v = load_two_dims<Value, Dim>(row, d);
    x[0] = as_int(v.low);
    x[1] = as_int(v.high);
  }
};
#if FAJIT_AVX
template <int Dim>
struct ValueStep<float, e4m3_t, Dim, Reading::kFinite> {
  using Weight = float;
  static constexpr int kKeys = 1;
  static constexpr int kVectors = 2;
  static FAJIT_INLINE void load(const e4m3_t* row, const e4m3_t*, int d, vi (&x)[2]) {
    const TwoVectors v = widen_halves(small_float_halves<4>(row + d));
    x[0] = as_int(v.low);
    x[1] = as_int(v.high);
  }
};
#endif
template <int Dim>
struct ValueStep<float, bfloat16_t, Dim, Reading::kPaired> {
  using Weight = float;
  static constexpr int kKeys = 1;
  static constexpr int kVectors = 2;
  static FAJIT_INLINE void load(const bfloat16_t* row, const bfloat16_t*, int d, vi (&x)[2]) {
    const EvenOdd v(row + d);
    x[0] = as_int(v.even);
    x[1] = as_int(v.odd);
  }
};
#if defined(__AVX512BF16__)
template <class Value, int Dim>
struct ValueStep<bfloat16_t, Value, Dim> {
  using Weight = bfloat16_t;
  static constexpr int kKeys = 2;
  static constexpr int kVectors = 2;
  static FAJIT_INLINE void load(const Value* even, const Value* odd, int d, vi (&x)[2]) {
    const v32 a = (v32)bfloat16_words<Dim>(even, d), b = (v32)bfloat16_words<Dim>(odd, d);
    const v32 low = {0,  32, 1,  33, 2,  34, 3,  35, 8,  40, 9,  41, 10, 42, 11, 43,
                     16, 48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59};
    x[0] = (vi)__builtin_shuffle(a, b, low);
    x[1] = (vi)__builtin_shuffle(a, b, low + 4);
  }
};
#endif

// A row of zeros, or of codes of finite values, with the most dims.
alignas(64) inline constexpr char kZeroRow[576 * sizeof(float)] = {};

// Rows of V, as the vectors of a ValueStep from dim `d` on; steps are counted by their first key.
// An odd last key is paired with kZeroRow: infinity, which it may have, times a weight of 0 is NaN.
template <class Step, class ValueRows>
struct StoredValues {
  using Weight = Dot<typename Step::Weight>;
  static constexpr int kKeys = Step::kKeys, kVectors = Step::kVectors;
  ValueRows v;
  int count;

  FAJIT_INLINE auto at(int n, int d) const {
    using Row = decltype(v(n));
    const Row row = v(n), zeros = reinterpret_cast<Row>(kZeroRow);
    const Row partner = kKeys > 1 ? n + 1 < count ? v(n + 1) : zeros : row;
    return [=](int j, vi(&x)[kVectors])
               __attribute__((always_inline)) { Step::load(row, partner, d + j * kLanes, x); };
  }
};
// The vectors of a chunk of keys, Dim words a step, which other groups of rows have left in L1.
template <class Step, int Dim>
struct KeptValues {
  using Weight = Dot<typename Step::Weight>;
  static constexpr int kKeys = Step::kKeys, kVectors = 1;
  const int32_t* words;

  FAJIT_INLINE auto at(int n, int d) const {
    const int32_t* step = words + n / kKeys * Dim + d;
    return [=](int j, vi(&x)[1])
               __attribute__((always_inline)) { x[0] = load<vi>(step + j * kLanes); };
  }
};
// StoredValues that are kept in `words` as they are read.
template <class Step, int Dim, class ValueRows>
struct KeepingValues : StoredValues<Step, ValueRows> {
  using Stored = StoredValues<Step, ValueRows>;
  int32_t* words;

  FAJIT_INLINE KeepingValues(Stored stored, int32_t* to) : Stored(stored), words(to) {}
  FAJIT_INLINE auto at(int n, int d) const {
    const auto read = Stored::at(n, d);
    int32_t* step = words + n / Stored::kKeys * Dim + d;
    return [=](int j, vi(&x)[Stored::kVectors]) __attribute__((always_inline)) {
      read(j, x);
#pragma GCC unroll 2
      for (int i = 0; i < Stored::kVectors; ++i) store(step + (j + i) * kLanes, x[i]);
    };
  }
};

// o[row][d, d + NV * kLanes) += unit * (sum over `count` keys of p[row] v): `p` has a word a step.
// `fetch()` issues the prefetches that belong to a step.
template <int NR, int NV, class Values, class Fetch>
FAJIT_INLINE void few_values_part(float unit, const Values& values, int d, int count,
                                  const int32_t* p, int p_stride, float* o, int o_stride,
                                  Fetch fetch) {
  static_assert(NV % Values::kVectors == 0);
  vf acc[NR][NV] = {};  // added to o at the end: short chains of additions have small errors
  for (int n = 0; n < count; n += Values::kKeys) {
    const auto read = values.at(n, d);
    fetch();
    vi weight[NR];
#pragma GCC unroll 4
    for (int r = 0; r < NR; ++r) weight[r] = splat(p[r * p_stride + n / Values::kKeys]);
#pragma GCC unroll 16
    for (int j = 0; j < NV; j += Values::kVectors) {
      vi x[Values::kVectors];
      read(j, x);
#pragma GCC unroll 2
      for (int i = 0; i < Values::kVectors; ++i)
#pragma GCC unroll 4
        for (int r = 0; r < NR; ++r)
          acc[r][j + i] = Values::Weight::step(acc[r][j + i], weight[r], x[i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < NR; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < NV; ++j) {
      float* at = o + r * o_stride + d + j * kLanes;
      store(at, load(at) + acc[r][j] * unit);
    }
}

// The parts in which O of NR rows is computed, so that the accumulators fit the registers: `whole`
// parts of NV vectors, then one of `rest`. Keys are processed in chunks whose V rows stay in L1 for
// all parts.
template <int Dim, int NR>
struct ValueParts {
  static constexpr int vectors = Dim / kLanes, most = (FAJIT_AVX == 512 ? 16 : 8) / NR;
  static constexpr int NV = vectors < most ? vectors : most;
  static constexpr int whole = vectors / NV, rest = vectors % NV;
  static constexpr int chunk = 16, count = whole + (rest > 0);

  template <int N>
  struct Width {
    static constexpr int vectors = N;
  };
  // f(width, first dim) for each part.
  template <class F>
  static FAJIT_INLINE void each(F f) {
    for (int i = 0; i < whole; ++i) f(Width<NV>{}, i * NV * kLanes);
    if constexpr (rest > 0) f(Width<rest>{}, whole * NV * kLanes);
  }
};

// o[row][0, Dim) += sum over `count` keys of p[row] v for groups of NR rows; Dim is a multiple
// of what a step makes. `fetch()` issues the prefetches that belong to a key of a part. All but the
// first group, which also prefetches, read the vectors that it has kept: rows of V may be 4 KB
// apart, where they evict each other from L1, and loads from L2 queue behind the prefetches. Chunks
// of 16 keys: O, which is updated half as often as with 8, has 1.3 instead of 1.7 times the error
// of a prefill tile over 8,192 keys.
template <class Matrix, class Value, int Dim, int NR, bool Several, class ValueRows, class Fetch>
FAJIT_INLINE void few_values(ValueRows v, int count, const int32_t* p, int p_stride, int groups,
                             float* o, Fetch fetch) {
  constexpr Reading how = kReading<Matrix, Value, Dim>;
  using Step = ValueStep<Matrix, Value, Dim, how>;
  using Parts = ValueParts<Dim, NR>;
  alignas(64) int32_t kept[Several ? Parts::chunk / Step::kKeys * Dim : 1];
  for (int n = 0; n < count; n += Parts::chunk) {
    const int keys = count - n < Parts::chunk ? count - n : Parts::chunk;
    const auto group = [&](int g, const auto& values,
                           auto each_key) __attribute__((always_inline)) {
      const int32_t* words = p + g * NR * p_stride + n / Step::kKeys;
      Parts::each([&](auto width, int d) __attribute__((always_inline)) {
        few_values_part<NR, width.vectors>(kUnit<how>, values, d, keys, words, p_stride,
                                           o + g * NR * Dim, Dim, each_key);
      });
    };
    const StoredValues<Step, ValueRows> stored{v.from(n, 0), keys};
    if constexpr (!Several) {
      group(0, stored, fetch);
    } else {
      group(0, KeepingValues<Step, Dim, ValueRows>(stored, kept), fetch);
#pragma GCC unroll 1
      for (int g = 1; g < groups; ++g) group(g, KeptValues<Step, Dim>{kept}, [] {});
    }
    if constexpr (how == Reading::kFinite) put_nan_values<Dim>(stored.v, keys, groups * NR, o);
  }
}

// A row of float weights as the words of `few_values`, in place: `keys` is a multiple of kLanes and
// weights past the last key are zero.
template <class Matrix, class Value, int Dim>
FAJIT_INLINE void pack_row_weights([[maybe_unused]] float* p, [[maybe_unused]] int keys) {
#if defined(__AVX512BF16__)
  if constexpr (ValueStep<Matrix, Value, Dim>::kKeys == 2) {
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
  if constexpr (ValueStep<Matrix, Value, Dim>::kKeys == 2) {
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
