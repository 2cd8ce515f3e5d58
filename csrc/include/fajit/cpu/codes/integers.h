// Products of a few bf16 rows with keys and values of 8 or 4 bits as integers, for few_row.h.
//
// A row of Q, or of weights, becomes `unit` times integers of 16 bits, of two bytes each, `high`
// and `low`; codes are read as c + z, which is unsigned: z is 128, or 8 for those of 4 bits:
//
//   q . k = unit * (256 high . (k + z) + low . (k + z) - z * sum(256 high + low))
//
// With VNNI four products of bytes are one instruction, where bf16 has two and each code is
// converted first. Without it, products of pairs are added in words of 16 bits, eight at a time:
// codes of 4 bits alone are small enough.
//
// Products of a group of channels are multiplied by its scale before they are added, and zero
// points are products with sums of q.
#pragma once
#include <fajit/cpu/codes/numbers.h>
#include <fajit/cpu/few_row_kernel.h>

namespace fajit {

// Whether rows of Dim codes are multiplied as integers with queries of Q.
template <class Q, class Code, int Dim>
constexpr bool kIntegers = false;
#if FAJIT_AVX
#if defined(__AVX512VNNI__) && FAJIT_AVX == 512
#define FAJIT_VNNI 1
template <int Dim>
constexpr bool kIntegers<bfloat16_t, int8_t, Dim> = Dim % 64 == 0;
template <int Dim>
constexpr bool kIntegers<bfloat16_t, int4x2_t, Dim> = Dim == 64 || Dim % 128 == 0;
#else
#define FAJIT_VNNI 0
template <int Dim>
constexpr bool kIntegers<bfloat16_t, int4x2_t, Dim> = Dim % (8 * kLanes) == 0;
#endif
constexpr int kLeastGroup = 32;  // channels of a group
// Whether rows of Dim have groups of channels that products of integers take.
template <class Numbers, int Dim>
constexpr bool takes_groups() {
  if constexpr (Numbers::kGroups > 0) {
    constexpr int channels = Dim / Numbers::kGroups;  // no vector of codes may have parts of two
    // Sums of 512 products of 32,639 and 128 are below 2^31, and those of 512 integers 2^24.
    return Numbers::kCodebook < 0 && channels <= 512 &&
           (Numbers::kGroups == 1 || channels % (4 * kLanes) == 0 ||
            (channels % kLeastGroup == 0 && 4 * kLanes % channels == 0));
  }
  return false;
}
template <class Numbers, int Dim>
constexpr bool kIntegerGroups = takes_groups<Numbers, Dim>();
template <class Code>
constexpr int kCodeZero = same<Code, int8_t> ? 128 : 8;

// What a row has beside its bytes: the sum of its integers.
struct IntegerRow {
  float unit;
  int32_t sum;
};

// The low byte of each word.
FAJIT_INLINE vs low_bytes(vi x) {
#if FAJIT_AVX == 256 && !defined(__clang__)
  typedef int8_t quarters __attribute__((vector_size(32)));
  const quarters order = {0, 4, 8, 12, 16, 20, 24, 28};  // then byte 0: not used
  const quarters bytes = __builtin_shuffle((quarters)x, order);
  vs r;
  __builtin_memcpy(&r, &bytes, sizeof r);
  return r;
#else
  return __builtin_convertvector(x, vs);
#endif
}

// x[0, n) as integers, n a multiple of kLanes, N at most: high bytes to `bytes`, low ones to
// `bytes + N`. x may be the same memory. With NaN or an infinite value the unit is NaN.
// sums: of each kLeastGroup integers, or nullptr.
template <int N>
FAJIT_INLINE IntegerRow integer_row(const float* x, int n, int8_t* bytes, int32_t* sums = nullptr) {
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
    store(bytes + d, low_bytes((q - rest) >> 8));
    store(low + d, low_bytes(rest));
  }
  if (sums != nullptr)
    for (int d = 0; d < n; d += kLeastGroup) {
      vi total{};
      for (int i = d; i < d + kLeastGroup; i += kLanes)
        total += (__builtin_convertvector(load<vs>(bytes + i), vi) << 8) +
                 __builtin_convertvector(load<vs>(low + i), vi);
      sums[d / kLeastGroup] = static_cast<int32_t>(reduce_add(to_float(total)));
    }
  for (int d = 0; d < n; d += kLanes) store(bytes + N + d, load<vs>(low + d));
  // The sum is exact as a float: N is at most 512.
  return {unit + reduce_add(finite), static_cast<int32_t>(reduce_add(to_float(sum)))};
}

constexpr int kVectorBytes = 4 * kLanes;
typedef int8_t vq __attribute__((vector_size(4 * FAJIT_LANES)));

// The lower, or the upper, halves of each 128 bits of a and b, interleaved.
#define FAJIT_UNPACK(name, code)                        \
  FAJIT_INLINE vq name(vq a, vq b) {                    \
    vq r;                                               \
    asm(code " %2, %1, %0" : "=v"(r) : "v"(a), "v"(b)); \
    return r;                                           \
  }
FAJIT_UNPACK(unpack_low_bytes, "vpunpcklbw")
FAJIT_UNPACK(unpack_high_bytes, "vpunpckhbw")
FAJIT_UNPACK(unpack_low_words, "vpunpcklwd")
FAJIT_UNPACK(unpack_high_words, "vpunpckhwd")
#undef FAJIT_UNPACK

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

// Adds all sums, of rows and their two bytes, to the totals.
template <int NR, int N>
FAJIT_INLINE void settle(vi (&total)[NR][2][N], ProductSum (&sums)[NR][2][N]) {
#pragma GCC unroll 4
  for (int r = 0; r < NR; ++r)
#pragma GCC unroll 2
    for (int limb = 0; limb < 2; ++limb)
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        total[r][limb][i] = settled(total[r][limb][i], sums[r][limb][i]);
        if constexpr (!FAJIT_VNNI) sums[r][limb][i] = ProductSum{};
      }
}

// How rows of Dim codes lie in vectors, and what a vector has.
template <class Code, int Dim>
struct CodeVectors {
  static constexpr int kRowBytes = elements_of<Code>(Dim);
  static constexpr int kCount = (kRowBytes + kVectorBytes - 1) / kVectorBytes;
  static constexpr int kParts = kPerElement<Code>;  // codes of a byte
  static constexpr bool kHalf = kRowBytes == kVectorBytes / 2;

  // A vector of a row; half a vector, if a row has no more.
  static FAJIT_INLINE vi load_row(const Code* row, int vector) {
    if constexpr (kHalf) {
      vi x;
      asm("vmovdqu64 %1, %t0" : "=v"(x) : "m"(*reinterpret_cast<const char (*)[32]>(row)));
      return x;
    } else {
      return load<vi>(row + vector * kVectorBytes);
    }
  }
  // One code of each byte, unsigned: of its low or of its high bits.
  template <int part>
  static FAJIT_INLINE vi codes_of(vi x) {
    if constexpr (same<Code, int8_t>) return x ^ static_cast<int32_t>(0x80808080u);
    return (part ? x >> 4 : x) & 0x0f0f0f0f;
  }
};

// few_scores for such rows, times the scales of keys. Lanes are keys: the words of 16 rows are
// transposed, and each word, of four or eight dims, is multiplied by that of a row of Q. Lanes over
// dims would take a tree of exchanges for each sum. `q` has QBytes a row, `sums` those of
// `integer_row`; numbers: those of the tile's keys, Keys apart.
template <class Numbers, int Dim, int NR, bool Several, int Keys, int QBytes, class KeyRows,
          class Fetch>
FAJIT_INLINE void integer_scores(KeyRows k, int count, const float* numbers, const int8_t* q,
                                 const IntegerRow* rows, const int32_t* sums, int groups,
                                 float scale, float* s, int s_stride, Fetch fetch) {
  using Code = typename KeyRows::Element;
  using Vectors = CodeVectors<Code, Dim>;
  constexpr int words = Vectors::kRowBytes / 4, in_vector = words < kLanes ? words : kLanes;
  constexpr int chains = FAJIT_VNNI && NR == 1 ? 2 : 1;  // products have a latency of four
  // Words whose products are added as integers: of one group of channels.
  constexpr int channels = Dim / Numbers::kGroups, wide = channels / 4;
  constexpr bool whole = Numbers::kGroups == 1;
  constexpr int run = whole ? in_vector : wide < in_vector ? wide : in_vector;
  alignas(64) int32_t kept[Several ? words * kLanes : 1];
  for (int n = 0; n < count; n += kLanes) {
    const auto group = [&](int g, auto words_of) __attribute__((always_inline)) {
      const int8_t* const of_group = q + g * NR * QBytes;
      ProductSum acc[NR][2][chains] = {};
      vi settled_sum[NR][2][chains] = {};
      vf total[NR] = {};
      // Adds the products of a group of channels, which begins at channel d.
      const auto finish = [&](int d) __attribute__((always_inline)) {
        const int own = whole ? 0 : d / channels;
        vf key_scale = splat(1.0f);
        if constexpr (Numbers::kCount > 0) key_scale = load(numbers + own * Keys + n);
        settle(settled_sum, acc);
#pragma GCC unroll 4
        for (int r = 0; r < NR; ++r) {
          int32_t of_row = whole ? rows[g * NR + r].sum : 0;
          if constexpr (!whole)
#pragma GCC unroll 2
            for (int i = 0; i < run * 4 / kLeastGroup; ++i)
              of_row += sums[(g * NR + r) * (Dim / kLeastGroup) + d / kLeastGroup + i];
          const auto& own_sum = settled_sum[r];
          vi sum = (own_sum[0][0] << 8) + own_sum[1][0] - kCodeZero<Code> * of_row;
          if constexpr (chains == 2) sum += (own_sum[0][1] << 8) + own_sum[1][1];
          vf x = to_float(sum);
          if constexpr (Numbers::kZeros)
            x -= load(numbers + (Numbers::kGroups + own) * Keys + n) * static_cast<float>(of_row);
          total[r] += x * key_scale;
#pragma GCC unroll 2
          for (int limb = 0; limb < 2; ++limb)
#pragma GCC unroll 2
            for (int i = 0; i < chains; ++i) {
              acc[r][limb][i] = ProductSum{};
              settled_sum[r][limb][i] = vi{};
            }
        }
      };
#pragma GCC unroll 1
      for (int c = 0; c < Vectors::kCount; ++c) {
        vi x[kLanes];
        words_of(c, x);
        const int8_t* const at = of_group + c * kVectorBytes;
        each_index<Vectors::kParts>([&](auto part) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int j = 0; j < in_vector; ++j) {
            const vi codes = Vectors::template codes_of<part.value>(x[j]);
            // As many as keys, evenly: in a burst decoding took 1.2 times as long (by hand).
            constexpr int every = words >= kLanes ? words / kLanes : 1;
            if (g == 0 && part.value == 0 && j % every == 0) {
              fetch();
              if constexpr (words < kLanes) fetch();
            }
#pragma GCC unroll 4
            for (int r = 0; r < NR; ++r)
#pragma GCC unroll 2
              for (int limb = 0; limb < 2; ++limb)
                acc[r][limb][j % chains] =
                    add_products(acc[r][limb][j % chains], codes, at,
                                 r * QBytes + limb * Dim + part.value * (Dim / 2) + 4 * j);
            if (!FAJIT_VNNI && (j + 1) % kProducts == 0) settle(settled_sum, acc);
            if (!whole && (j + 1) % run == 0)
              finish(part.value * (Dim / 2) + c * kVectorBytes + (j + 1 - run) * 4);
          }
        });
      }
      if constexpr (whole) finish(0);
#pragma GCC unroll 4
      for (int r = 0; r < NR; ++r)
        store(s + (g * NR + r) * s_stride + n, total[r] * (rows[g * NR + r].unit * scale));
    };
    const auto transposed = [&](int c, vi(&x)[kLanes]) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        x[i] = Vectors::load_row(k(n + i < count ? n + i : count - 1), c);
      transpose(x);
    };
    if constexpr (!Several) {
      group(0, transposed);
    } else {
      group(0, [&](int c, vi(&x)[kLanes]) __attribute__((always_inline)) {
        transposed(c, x);
#pragma GCC unroll 16
        for (int j = 0; j < in_vector; ++j) store(kept + (c * kLanes + j) * kLanes, x[j]);
      });
#pragma GCC unroll 1
      for (int g = 1; g < groups; ++g)
        group(g, [&](int c, vi(&x)[kLanes]) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int j = 0; j < in_vector; ++j) x[j] = load<vi>(kept + (c * kLanes + j) * kLanes);
        });
    }
  }
}

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
      x[i] = Vectors::template codes_of<0>(bytes[i]);
      if constexpr (Vectors::kParts == 2) x[4 + i] = Vectors::template codes_of<1>(bytes[i]);
    }
  }
}

// Vectors of codes whose sums with NR rows are in registers.
template <class Code, int Dim, int NR>
constexpr int kPassVectors = !FAJIT_VNNI ? 4 / NR
                             : NR == 1   ? kKeyVectors<Code, Dim>
                                         : 2;
// Passes over four keys, for a group of NR rows.
template <class Code, int Dim, int NR>
constexpr int kValuePasses =
    CodeVectors<Code, Dim>::kCount * kKeyVectors<Code, Dim> / kPassVectors<Code, Dim, NR>;

// o[row][0, Dim) += sum over `count` keys of p[row] v for groups of NR rows. `p`: bytes of weights,
// times the scales of a group of channels; those of a row N high and N low ones, zero from `count`
// on, those of a row 4 N bytes after the one before, those of a group of channels Rows rows. zeros:
// for each of these rows the sum of weights times zero points. `fetch()` issues the prefetches of
// four keys, in kValuePasses parts. A single pass decodes codes as it multiplies them; several read
// them decoded, from L1.
template <class Numbers, int Dim, int NR, int Rows, int N, class ValueRows, class Fetch>
FAJIT_INLINE void integer_values(ValueRows v, int count, const int8_t* p, const IntegerRow* rows,
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
      ProductSum acc[NR][2][pass] = {};
      vi total[NR][2][pass] = {};
      for (int n = 0; n < count; n += 4) {
        vi x[pass];
        read(n, x);
        if (g == 0) fetch();
#pragma GCC unroll 4
        for (int r = 0; r < NR; ++r)
#pragma GCC unroll 2
          for (int limb = 0; limb < 2; ++limb)
#pragma GCC unroll 8
            for (int j = 0; j < pass; ++j) {
              const int8_t* const base = of_vector[j / same * same] + n;
              acc[r][limb][j] = add_products(acc[r][limb][j], x[j], base, r * stride + limb * N);
            }
        if (!FAJIT_VNNI && n % (4 * kProducts) == 4 * (kProducts - 1)) settle(total, acc);
      }
      settle(total, acc);
#pragma GCC unroll 4
      for (int r = 0; r < NR; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < pass; ++j) {
          const int d = dim_of(first + j), row = d / channels * Rows + g * NR + r;
          float* at = o + (g * NR + r) * Dim + d;
          const vi sum = (total[r][0][j] << 8) + total[r][1][j] - kCodeZero<Code> * rows[row].sum;
          vf x = load(at) + to_float(sum) * rows[row].unit;
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
#else  // never called
struct IntegerRow {};
template <int N, class... Arguments>
IntegerRow integer_row(Arguments...);
template <class Numbers, int Dim, int NR, bool Several, int Keys, int QBytes, class... Arguments>
void integer_scores(Arguments...);
template <class Numbers, int Dim, int NR, int Rows, int N, class... Arguments>
void integer_values(Arguments...);
template <class Code, int Dim, int NR>
constexpr int kValuePasses = 1;
template <class Numbers, int Dim>
constexpr bool kIntegerGroups = false;
constexpr int kLeastGroup = 32;
#endif

}  // namespace fajit
