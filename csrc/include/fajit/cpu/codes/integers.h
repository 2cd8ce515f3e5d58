// Products of a few bf16 rows with codes of 8 or 4 bits as integers, for code_products.h.
//
// A row of Q, or of weights, becomes `unit` times integers of 16 bits, of two bytes each, `high`
// and `low`; codes are read as c + z, which is unsigned: z is 128, or 8 for those of 4 bits:
//
//   q . k = unit * (256 high . (k + z) + low . (k + z) - z * sum(256 high + low))
//
// With VNNI four products of bytes are one instruction, where bf16 has two and each code is
// converted first. Without it, products of pairs are added in words of 16 bits, eight at a time:
// codes of 4 bits alone are small enough.
#pragma once
#include <fajit/cpu/codes/numbers.h>

namespace fajit {

#if FAJIT_AVX
#if defined(__AVX512VNNI__) && FAJIT_AVX == 512
#define FAJIT_VNNI 1
#else
#define FAJIT_VNNI 0
#endif
// Whether rows of Dim codes, which hooks with Numbers decode, are multiplied as integers with
// queries of Q.
template <class Q, class Code, int Dim, class Numbers>
constexpr bool takes_integers() {
  if constexpr (same<Q, bfloat16_t> && Numbers::kGroups > 0)
    if constexpr (FAJIT_AVX == 512 && Numbers::kCodebook < 0) {
      if constexpr (same<Code, int8_t>) return FAJIT_VNNI && Dim % 64 == 0;
      if constexpr (same<Code, int4x2_t>) return (FAJIT_VNNI && Dim == 64) || Dim % 128 == 0;
    }
  return false;
}
template <class Code>
constexpr int kCodeZero = same<Code, int8_t> ? 128 : 8;

typedef int8_t vq __attribute__((vector_size(4 * FAJIT_LANES)));

// The lower, or the upper, halves of each 128 bits of a and b, interleaved; bytes of each 128 bits
// in another order.
#define FAJIT_BYTES(name, code)                         \
  FAJIT_INLINE vq name(vq a, vq b) {                    \
    vq r;                                               \
    asm(code " %2, %1, %0" : "=v"(r) : "v"(a), "v"(b)); \
    return r;                                           \
  }
FAJIT_BYTES(unpack_low_bytes, "vpunpcklbw")
FAJIT_BYTES(unpack_high_bytes, "vpunpckhbw")
FAJIT_BYTES(unpack_low_words, "vpunpcklwd")
FAJIT_BYTES(unpack_high_words, "vpunpckhwd")
FAJIT_BYTES(ordered_bytes, "vpshufb")
#undef FAJIT_BYTES

// Integers of up to `most`, as which rows are multiplied. An infinite value or NaN makes the unit
// NaN.
constexpr float kMostInteger = 32639;  // 127 * 256 + 127
template <class Most = float>
FAJIT_INLINE RowScales integer_scales(vi largest, Most most = kMostInteger) {
  const vf exact = as_float(largest) * (1 / most);
  const vf unit = exact < 0x1p-126f ? vf{} : exact;  // its reciprocal is finite
  const vf inverse = unit > 0.0f ? 1.0f / unit : vf{};
  return {inverse, unit + as_float(largest) * 0.0f};
}
FAJIT_INLINE vi to_integers(vf x, vf factor) {
  const vf whole = splat(0x1.8p23f);  // its ulp is 1: rounds to nearest even
  return (vi)(x * factor + whole) - (vi)whole;
}
// The integers as bytes, in groups of four: high ones, then low ones.
FAJIT_INLINE void store_bytes(int8_t* to, vi integers) {
  const vi bytes = (integers + 128) ^ 128;  // a low byte has a sign
  const vi order = (iota() & 1) != 0 ? splat(0x0c080400) : splat(0x0d090501);
  const vi grouped = (vi)ordered_bytes((vq)bytes, (vq)order);
  const vi packed = shuffle2(grouped, grouped, (iota() >> 1) * 4 + (iota() & 1));
  __builtin_memcpy(to, &packed, 2 * kLanes);
}

// put(d, q) for x[0, N) as integers, kLanes at a time. sums: of each kLeastGroup integers, or
// nullptr.
template <int N, class Put>
FAJIT_INLINE CodeRow integer_row(const float* x, int32_t* sums, Put put) {
  vi largest{};
  for (int d = 0; d < N; d += kLanes) largest = larger_bits(largest, magnitude_bits(load(x + d)));
  const RowScales scales = integer_scales(splat(reduce_max(largest)));
  vi sum{}, of_group{};
  for (int d = 0; d < N; d += kLanes) {
    const vi q = to_integers(load(x + d), scales.factor);
    put(d, q);
    sum += q, of_group += q;
    if (sums != nullptr && (d + kLanes) % kLeastGroup == 0) {
      sums[d / kLeastGroup] = static_cast<int32_t>(reduce_add(to_float(of_group)));
      of_group = vi{};
    }
  }
  // The sum is exact as a float: N is at most 512.
  return {scales.unit[0], static_cast<int32_t>(reduce_add(to_float(sum)))};
}

// A sum of products of four unsigned bytes of each word with four signed ones, the same in all
// lanes, which are at base + offset. `settled` adds it to a total, after kProducts of them at most.
constexpr int kProducts = 8;
#if FAJIT_VNNI
using ProductSum = vi;
// The offset is a constant once loops are unrolled: gcc 12 would load the bytes by an instruction
// of its own, or with "m" compute all addresses beforehand and spill them.
FAJIT_INLINE ProductSum add_products(ProductSum a, vi x, const int8_t* base, int offset) {
#if defined(__clang__) || defined(__SANITIZE_ADDRESS__) || !defined(__OPTIMIZE__)
  typedef int vnni __attribute__((vector_size(64)));
  int32_t bytes;
  __builtin_memcpy(&bytes, base + offset, 4);
  return (vi)__builtin_ia32_vpdpbusd_v16si((vnni)a, (vnni)x, (vnni)splat(bytes));
#else
  asm("vpdpbusd %c3(%2)%{1to16%}, %1, %0"
      : "+v"(a)
      : "v"(x), "r"(base), "i"(offset), "m"(*reinterpret_cast<const char (*)[]>(base)));
  return a;
#endif
}
// Sums are totals already.
FAJIT_INLINE vi settled(vi, ProductSum a) { return a; }
#else
// Of codes up to 15: eight pairs of products are at most 30,720.
typedef int16_t ProductSum __attribute__((vector_size(4 * FAJIT_LANES)));
FAJIT_INLINE ProductSum add_products(ProductSum a, vi x, const int8_t* base, int offset) {
  int32_t bytes;
  __builtin_memcpy(&bytes, base + offset, 4);
  ProductSum products;
  asm("vpmaddubsw %2, %1, %0" : "=v"(products) : "v"(x), "v"(splat(bytes)));
  return a + products;
}
FAJIT_INLINE vi settled(vi total, ProductSum a) {
  vi pairs;
  asm("vpmaddwd %2, %1, %0" : "=v"(pairs) : "v"(a), "v"(ProductSum{} + int16_t{1}));
  return total + pairs;
}
#endif

// Products of integers, for code_products.h.
template <class Code>
class IntegerProducts {
 public:
  static constexpr bool kTakes = true, kMayBeNan = false;
  // Channels of a group whose products are added before they become floats: sums of 512 products
  // of 32,639 and 128 are below 2^31, and those of 512 integers 2^24.
  static constexpr int kMostDims = 512;
  // Steps after which sums must be settled.
  static constexpr int kSteps = FAJIT_VNNI ? 0 : kProducts;

  template <class Numbers>
  static FAJIT_INLINE IntegerProducts of(const Context&) {
    return {};
  }

  static constexpr float unit() { return 1.0f; }
  static constexpr float weight_unit() { return 1.0f; }
  // A row of Q as integers. x may be the same memory.
  template <int N>
  FAJIT_INLINE CodeRow query(const float* x, int8_t* bytes, int32_t* sums) const {
    return integer_row<N>(x, sums, [&](int d, vi q) __attribute__((always_inline)) {
      store_bytes(bytes + 2 * d, q);
    });
  }
  // Rows of N weights, and kLanes of them, from n on; `sum` is of the integers.
  static constexpr bool kTakesTotals = false;
  template <int N>
  FAJIT_INLINE RowScales weights(vi largest, vf) const {
    return integer_scales(largest);
  }
  FAJIT_INLINE void put(vf x, vf factor, int8_t* row, int n, vi& sum) const {
    const vi q = to_integers(x, factor);
    store_bytes(row + 2 * n, q);
    sum += q;
  }
  // Where the bytes of a row are that four codes, of dims from d on, are multiplied with.
  template <int Dim>
  static constexpr int at(int d, int side) {
    return 2 * d + 4 * side;
  }

  // One code of each byte, unsigned: of its low or of its high bits.
  template <int part>
  static FAJIT_INLINE vi codes_of(vi x) {
    if constexpr (same<Code, int8_t>) return x ^ static_cast<int32_t>(0x80808080u);
    return (part ? x >> 4 : x) & 0x0f0f0f0f;
  }
  // What the bytes of either side are multiplied with.
  struct Operands { vi side[2]; };
  FAJIT_INLINE Operands operands(vi codes) const { return {{codes, codes}}; }

  // N sums of products with one row.
  template <int N>
  class Sums {
   public:
    template <int side>
    FAJIT_INLINE void add(int i, const Operands& x, const int8_t* base, int offset) {
      now_[side][i] = add_products(now_[side][i], x.side[side], base, offset);
    }
    FAJIT_INLINE void settle() {
#pragma GCC unroll 2
      for (int side = 0; side < 2; ++side)
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) {
          total_[side][i] = settled(total_[side][i], now_[side][i]);
          if constexpr (!FAJIT_VNNI) now_[side][i] = ProductSum{};
        }
    }
    // Those from `first` on, `count` of them, added; of_row: the sum of the row's integers.
    FAJIT_INLINE vf value(int first, int count, int32_t of_row) {
      settle();
      vi sum = splat(-kCodeZero<Code> * of_row);
#pragma GCC unroll 2
      for (int i = first; i < first + count; ++i) sum += (total_[0][i] << 8) + total_[1][i];
      return to_float(sum);
    }

   private:
    ProductSum now_[2][N] = {};
    vi total_[2][N] = {};
  };
};

// Rows of codes by four keys: x[i] has kLanes adjacent dims, a byte a key; those of low bits come
// before those of high ones.
template <class Code, int Dim>
constexpr int kKeyVectors = CodeVectors<Code, Dim>::kHalf ? 4 : 4 * kPerElement<Code>;
template <class Code, int Dim, class ValueRows>
FAJIT_INLINE void interleave_keys(const ValueRows& v, int n, int count, int vector,
                                  vi (&x)[kKeyVectors<Code, Dim>]) {
  using Vectors = CodeVectors<Code, Dim>;
  vq row[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    vi bytes = Vectors::load_row(v(n + i < count ? n + i : count - 1), vector);
    if constexpr (Vectors::kHalf) {
      bytes = shuffle2(bytes, bytes, iota() & (kLanes / 2 - 1));
      bytes = (iota() < kLanes / 2 ? bytes : bytes >> 4) & 0x0f0f0f0f;
    }
    // Interleaving within 128 bits then leaves dims in order.
    row[i] = (vq)shuffle2(bytes, bytes, (iota() & 3) * (kLanes / 4) + (iota() >> 2));
  }
  // Bytes of two keys, then words of two such pairs.
  const vq low0 = unpack_low_bytes(row[0], row[1]), low1 = unpack_low_bytes(row[2], row[3]);
  const vq high0 = unpack_high_bytes(row[0], row[1]), high1 = unpack_high_bytes(row[2], row[3]);
  const vi bytes[4] = {(vi)unpack_low_words(low0, low1), (vi)unpack_high_words(low0, low1),
                       (vi)unpack_low_words(high0, high1), (vi)unpack_high_words(high0, high1)};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    if constexpr (Vectors::kHalf) {
      x[i] = bytes[i];
    } else {
      x[i] = IntegerProducts<Code>::template codes_of<0>(bytes[i]);
      if constexpr (Vectors::kParts == 2)
        x[4 + i] = IntegerProducts<Code>::template codes_of<1>(bytes[i]);
    }
  }
}

// Vectors of codes whose sums with NR rows are in registers.
template <class Code, int Dim, int NR>
constexpr int kPassVectors = !FAJIT_VNNI ? 4 / NR
                             : NR == 1   ? kKeyVectors<Code, Dim>
                                         : 2;

// o[row][0, Dim) += sum over `count` keys of p[row] v for groups of NR rows. `p`: bytes of weights,
// times the scales of a group of channels, zero from `count` on; those of a row 4 N bytes after the
// one before, those of a group of channels Rows rows. zeros: for each of these rows the sum of
// weights times zero points. `fetch()` issues the prefetches of
// four keys, in kValuePasses parts. A single pass decodes codes as it multiplies them; several read
// them decoded, from L1.
template <class Numbers, int Dim, int NR, int Rows, int N, class ValueRows, class Fetch>
FAJIT_INLINE void integer_values(ValueRows v, int count, const int8_t* p, const CodeRow* rows,
                                 const float* zeros, int groups, float* o, Fetch fetch) {
  static_assert(N <= 256);  // sums fit 32 bits
  using Code = typename ValueRows::Element;
  using Vectors = CodeVectors<Code, Dim>;
  constexpr int width = kKeyVectors<Code, Dim>, steps = N / 4, stride = 4 * N;
  constexpr int pass = kPassVectors<Code, Dim, NR>;
  constexpr int channels = Dim / Numbers::kGroups;
  // Vectors after a multiple of `same` have the weights of that one.
  constexpr int same = channels == Dim ? 8 : channels >= kVectorBytes ? 4 : channels / kLanes;
  alignas(64) int32_t decoded[pass == width ? 1 : width * steps * kLanes];
#pragma GCC unroll 1
  for (int c = 0; c < Vectors::kCount; ++c) {
    // The first dim of vectors in multiples of the first one's.
    const auto dim_of = [&](int vector) __attribute__((always_inline)) {
      return vector / 4 * (Dim / 2) + c * kVectorBytes + vector % 4 * kLanes;
    };
    // Sums of vectors [first, first + pass) for a group of rows; read(step, x) gives their codes.
    const auto add = [&](int g, int first, auto read) __attribute__((always_inline)) {
      const int8_t* of_vector[pass];
#pragma GCC unroll 8
      for (int j = 0; j < pass; ++j)
        of_vector[j] = p + (g * NR + dim_of(first + j) / channels * Rows) * stride;
      typename IntegerProducts<Code>::template Sums<pass> acc[NR];
      for (int n = 0; n < count; n += 4) {
        vi x[pass];
        read(n, x);
        if (g == 0) fetch();
#pragma GCC unroll 8
        for (int j = 0; j < pass; ++j)
#pragma GCC unroll 4
          for (int r = 0; r < NR; ++r)
            each_index<2>([&](auto side) __attribute__((always_inline)) {
              acc[r].template add<side.value>(j, {x[j], x[j]}, of_vector[j / same * same] + 2 * n,
                                              r * stride + 4 * side.value);
            });
        if (!FAJIT_VNNI && n % (4 * kProducts) == 4 * (kProducts - 1))
#pragma GCC unroll 4
          for (int r = 0; r < NR; ++r) acc[r].settle();
      }
#pragma GCC unroll 4
      for (int r = 0; r < NR; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < pass; ++j) {
          const int d = dim_of(first + j), row = d / channels * Rows + g * NR + r;
          float* at = o + (g * NR + r) * Dim + d;
          vf x = load(at) + acc[r].value(j, 1, rows[row].sum) * rows[row].unit;
          if constexpr (Numbers::kZeros) x -= zeros[row];
          store(at, x);
        }
    };
    if constexpr (pass == width) {
#pragma GCC unroll 1
      for (int g = 0; g < groups; ++g)
        add(g, 0, [&](int n, vi(&x)[width]) __attribute__((always_inline)) {
          interleave_keys<Code, Dim>(v, n, count, c, x);
        });
    } else {
      for (int n = 0; n < count; n += 4) {
        vi x[width];
        interleave_keys<Code, Dim>(v, n, count, c, x);
#pragma GCC unroll 8
        for (int j = 0; j < width; ++j) store(decoded + (j * steps + n / 4) * kLanes, x[j]);
      }
#pragma GCC unroll 1
      for (int g = 0; g < groups; ++g)
#pragma GCC unroll 1
        for (int first = 0; first < width; first += pass)
          add(g, first, [&](int n, vi(&x)[pass]) __attribute__((always_inline)) {
#pragma GCC unroll 2
            for (int j = 0; j < pass; ++j)
              x[j] = load<vi>(decoded + ((first + j) * steps + n / 4) * kLanes);
          });
    }
  }
}
#endif

}  // namespace fajit
