// Products of a few bf16 rows with keys and values of 8 or 4 bits as integers (VNNI), for
// few_row.h.
//
// A row of Q, or of weights, becomes `unit` times integers of 16 bits, of two bytes each, `high`
// and `low`; codes are read as c + z, which is unsigned: z is 128, or 8 for those of 4 bits. Four
// products of bytes are one instruction, where bf16 has two and each code is converted first:
//
//   q . k = unit * (256 high . (k + z) + low . (k + z) - z * sum(256 high + low))
//
// Sums are exact. A value of a row is off by at most 2^-16 of the row's largest.
#pragma once
#include <fajit/cpu/few_row_kernel.h>

namespace fajit {

template <class Matrix, class Code, int Dim>
constexpr bool kIntegers = false;
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
template <int Dim>
constexpr bool kIntegers<bfloat16_t, int8_t, Dim> = Dim % 64 == 0;
template <int Dim>
constexpr bool kIntegers<bfloat16_t, int4x2_t, Dim> = Dim == 64 || Dim % 128 == 0;
template <class Code>
constexpr int kCodeZero = same<Code, int8_t> ? 128 : 8;

// What a row has beside its bytes: the sum of its integers.
struct IntegerRow {
  float unit;
  int32_t sum;
};

// x[0, n) as integers, n a multiple of kLanes, N at most: high bytes to `bytes`, low ones to
// `bytes + N`. x may be the same memory. With NaN or an infinite value the unit is NaN.
template <int N>
FAJIT_INLINE IntegerRow integer_row(const float* x, int n, int8_t* bytes) {
  vf largest{}, finite{};
  for (int d = 0; d < n; d += kLanes) {
    largest = max(largest, abs(load(x + d)));
    finite += load(x + d) * 0.0f;
  }
  constexpr float most = 32639;  // 127 * 256 + 127
  const float exact = reduce_max(largest) / most;
  const float unit = exact < 0x1p-126f ? 0.0f : exact;  // its reciprocal is finite
  const float inverse = unit > 0 ? 1.0f / unit : 0.0f;
  alignas(64) int8_t low[N];  // x may lie where they go
  vi sum{};
  for (int d = 0; d < n; d += kLanes) {
    const vf whole = splat(0x1.8p23f);  // its ulp is 1: rounds to nearest even
    const vi q = (vi)(load(x + d) * inverse + whole) - (vi)whole;
    const vi rest = (q << 24) >> 24;
    sum += q;
    store(bytes + d, __builtin_convertvector((q - rest) >> 8, vs));
    store(low + d, __builtin_convertvector(rest, vs));
  }
  for (int d = 0; d < n; d += kLanes) store(bytes + N + d, load<vs>(low + d));
  // The sum is exact as a float: N is at most 256.
  return {unit + reduce_add(finite), static_cast<int32_t>(reduce_add(to_float(sum)))};
}

// a + the products of four unsigned bytes with four signed ones, in each lane.
FAJIT_INLINE vi add_products(vi a, vi x, vi y) {
  typedef int vnni __attribute__((vector_size(64)));
  return (vi)__builtin_ia32_vpdpbusd_v16si((vnni)a, (vnni)x, (vnni)y);
}
typedef int8_t v64 __attribute__((vector_size(64)));

// The lower, or the upper, halves of each 128 bits of a and b, interleaved.
#define FAJIT_UNPACK(name, code)                        \
  FAJIT_INLINE v64 name(v64 a, v64 b) {                 \
    v64 r;                                              \
    asm(code " %2, %1, %0" : "=v"(r) : "v"(a), "v"(b)); \
    return r;                                           \
  }
FAJIT_UNPACK(unpack_low_bytes, "vpunpcklbw")
FAJIT_UNPACK(unpack_high_bytes, "vpunpckhbw")
FAJIT_UNPACK(unpack_low_words, "vpunpcklwd")
FAJIT_UNPACK(unpack_high_words, "vpunpckhwd")
#undef FAJIT_UNPACK

// 64 codes of a row of Dim from dim `d` on. Those of 4 bits are c + 8 already.
template <int Dim>
FAJIT_INLINE v64 code_bytes(const int8_t* row, int d) { return load<v64>(row + d); }
template <int Dim>
FAJIT_INLINE v64 code_bytes(const int4x2_t* row, int d) {
  constexpr int half = Dim / 2;
  if constexpr (half == 32) {
    typedef uint64_t v8 __attribute__((vector_size(64)));
    v8 x;
    asm("vbroadcasti64x4 %1, %0" : "=v"(x) : "m"(*reinterpret_cast<const char (*)[32]>(row)));
    constexpr v8 shift = {0, 0, 0, 0, 4, 4, 4, 4};
    return (v64)((x >> shift) & 0x0f0f0f0f0f0f0f0f);
  } else {
    return (v64)((load<vi>(row + d % half) >> (d < half ? 0 : 4)) & 0x0f0f0f0f);
  }
}
template <class Code>
FAJIT_INLINE vi unsigned_codes(vi x) {
  return same<Code, int8_t> ? x ^ static_cast<int32_t>(0x80808080u) : x;
}

// few_scores for such rows, MaxRows at most: `q` has 2 * Dim bytes a row.
template <int Dim, int NR, int MaxRows, class KeyRows, class Fetch>
FAJIT_INLINE void integer_scores(KeyRows k, int count, const int8_t* q, const IntegerRow* rows,
                                 int groups, float scale, float* s, int s_stride, Fetch fetch) {
  using Code = typename KeyRows::Element;
  constexpr int keys = kLanes / NR;
  // Of the lanes of a group's sums.
  alignas(64) float units[MaxRows * keys];
  alignas(64) int32_t offsets[MaxRows * keys];
  for (int i = 0; i < groups * kLanes; ++i) {
    units[i] = rows[i / keys].unit * scale;
    offsets[i] = kCodeZero<Code> * rows[i / keys].sum;
  }
  for (int n = 0; n < count; n += keys) {
    const Code* key[keys];
#pragma GCC unroll 16
    for (int i = 0; i < keys; ++i) {
      key[i] = k(n + i < count ? n + i : count - 1);
      fetch();
    }
#pragma GCC unroll 1
    for (int g = 0; g < groups; ++g) {
      const int8_t* of_group = q + g * NR * 2 * Dim;
      vi acc[NR * keys] = {};
      const auto add = [&](int limb) __attribute__((always_inline)) {
        for (int d = 0; d < Dim; d += 64) {
#pragma GCC unroll 16
          for (int i = 0; i < keys; ++i) {
            const vi x = unsigned_codes<Code>((vi)code_bytes<Dim>(key[i], d));
#pragma GCC unroll 4
            for (int r = 0; r < NR; ++r)
              acc[r * keys + i] =
                  add_products(acc[r * keys + i], x, load<vi>(of_group + (2 * r + limb) * Dim + d));
          }
        }
      };
      add(0);
#pragma GCC unroll 16
      for (int i = 0; i < NR * keys; ++i) acc[i] <<= 8;
      add(1);
      float lanes[kLanes];
      const vi sums = reduce_columns(acc) - load<vi>(offsets + g * kLanes);
      store(lanes, to_float(sums) * load(units + g * kLanes));
      float* out = s + g * NR * s_stride + n;
#pragma GCC unroll 4
      for (int r = 0; r < NR; ++r)
        __builtin_memcpy(out + r * s_stride, lanes + r * keys, keys * sizeof(float));
    }
  }
}
// o[row][0, Dim) += sum over `count` keys of p[row] v for groups of NR rows. `p`: bytes of weights,
// those of a row N high and N low ones, zero from `count` on, `p_stride` bytes apart. Dims of O are
// in the order that `ordered_integer_dims` undoes. `fetch()` issues the prefetches of four keys, in
// Dim / 32 parts.
template <int Dim, int NR, int N, class ValueRows, class Fetch>
FAJIT_INLINE void integer_values(ValueRows v, int count, const int8_t* p, int p_stride,
                                 const IntegerRow* rows, int groups, float* o, Fetch fetch) {
  static_assert(N <= 256);  // sums fit 32 bits
  using Code = typename ValueRows::Element;
#pragma GCC unroll 1
  for (int g = 0; g < groups; ++g) {
    const int8_t* weights = p + g * NR * p_stride;
#pragma GCC unroll 1
    for (int d = 0; d < Dim; d += 64) {
      const auto half = [&](auto unpack, float* out) __attribute__((always_inline)) {
        vi high[NR][2] = {}, low[NR][2] = {};
        for (int n = 0; n < count; n += 4) {
          v64 row[4];
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) row[i] = code_bytes<Dim>(v(n + i < count ? n + i : count - 1), d);
          if (g == 0) fetch();
          // Dims by four keys: bytes of two keys, then words of two such pairs.
          const v64 first = unpack(row[0], row[1]), second = unpack(row[2], row[3]);
          const vi x[2] = {unsigned_codes<Code>((vi)unpack_low_words(first, second)),
                           unsigned_codes<Code>((vi)unpack_high_words(first, second))};
#pragma GCC unroll 4
          for (int r = 0; r < NR; ++r) {
            const int8_t* of_row = weights + r * p_stride + n;
            const vi a = splat(*reinterpret_cast<const int32_t*>(of_row));
            const vi b = splat(*reinterpret_cast<const int32_t*>(of_row + N));
#pragma GCC unroll 2
            for (int j = 0; j < 2; ++j) {
              high[r][j] = add_products(high[r][j], x[j], a);
              low[r][j] = add_products(low[r][j], x[j], b);
            }
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < NR; ++r) {
          const IntegerRow& of_row = rows[g * NR + r];
#pragma GCC unroll 2
          for (int j = 0; j < 2; ++j) {
            float* at = out + r * Dim + j * kLanes;
            const vi sum = (high[r][j] << 8) + low[r][j] - kCodeZero<Code> * of_row.sum;
            store(at, load(at) + to_float(sum) * of_row.unit);
          }
        }
      };
      float* out = o + g * NR * Dim + d;
      half([](v64 a, v64 b) { return unpack_low_bytes(a, b); }, out);
      half([](v64 a, v64 b) { return unpack_high_bytes(a, b); }, out + 2 * kLanes);
    }
  }
}

// Restores the order of dims in a row of O: vector j of 64 dims has dims 16 i + 4 j to 16 i + 4 j +
// 3 in its quarter i.
template <int Dim>
FAJIT_INLINE void ordered_integer_dims(float* o) {
  for (int d = 0; d < Dim; d += 64) {
    alignas(64) float dims[64];
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 4; ++j)
        __builtin_memcpy(dims + 16 * i + 4 * j, o + d + 16 * j + 4 * i, 4 * sizeof(float));
    __builtin_memcpy(o + d, dims, sizeof dims);
  }
}
#else  // never called
struct IntegerRow {};
template <int N>
IntegerRow integer_row(const float* x, int n, int8_t* bytes);
template <int Dim, int NR, int MaxRows, class... Arguments>
void integer_scores(Arguments...);
template <int Dim, int NR, int N, class... Arguments>
void integer_values(Arguments...);
template <int Dim>
void ordered_integer_dims(float* o);
#endif

}  // namespace fajit
