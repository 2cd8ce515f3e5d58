// Products of a few bf16 rows with e4m3 codes, and with codes of 4 bits that have a codebook, as
// halves, for code_products.h.
//
// An instruction of AVX512-FP16 (Intel's Xeons from Sapphire Rapids on) multiplies and adds 32
// halves, twice as many as floats. A code becomes a half by two or three operations, e4m3 having
// fewer bits of either kind, or by one look-up. A row of Q, or of weights, becomes `unit` times
// halves:
//
//   q . k = unit * (halves of q . halves of k)
//
// Units are powers of two by which no sum overflows, so that bf16 queries stay exact down to 2^-23
// of the largest (e4m3, 128 dims). A sum has 11 bits, so sums of kSteps products are added to
// others: where all products are equal, as of queries that see equal values, roundings go the same
// way, and a sum of 64 was off by up to 1.6 %, four times what bf16 is. Sums become floats after
// kMostDims dims or kMostKeys keys.
#pragma once
#include <fajit/cpu/codes/numbers.h>
#include <fajit/cpu/vector/nan_codes.h>

// Older compilers come with assemblers that may not know the instructions (binutils before 2.38).
#if FAJIT_FP16 && (defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 12)
#define FAJIT_HALVES 1
#else
#define FAJIT_HALVES 0
#endif

namespace fajit {

// Whether rows of Dim codes, which hooks with Numbers decode, are multiplied as halves with queries
// of Q. Differences of codes and zero points may be much smaller than both: they stay floats.
template <class Q, class Code, int Dim, class Numbers>
constexpr bool takes_halves() {
#if FAJIT_HALVES
  if constexpr (same<Q, bfloat16_t> && Numbers::kGroups > 0) {
    constexpr bool looked = Numbers::kCodebook >= 0;
    if constexpr (same<Code, e4m3_t>) return Dim % 64 == 0 && !looked && !Numbers::kZeros;
    if constexpr (same<Code, int4x2_t>)
      return (Dim == 64 || Dim % 128 == 0) && looked && !Numbers::kZeros;
  }
#endif
  return false;
}

#if FAJIT_HALVES
FAJIT_INLINE v32 add_half_products(v32 a, v32 x, v32 y) {
  asm("vfmadd231ph %2, %1, %0" : "+v"(a) : "v"(x), "v"(y));
  return a;
}
// a + x * the two halves, or the one, at base + offset: the same in all lanes. As in integers.h,
// the offset is a constant, which gcc 12 would not keep in the instruction.
#if defined(__clang__) || defined(__SANITIZE_ADDRESS__) || !defined(__OPTIMIZE__)
template <class T>
FAJIT_INLINE T half_bits(const int8_t* at) {
  T bits;
  __builtin_memcpy(&bits, at, sizeof bits);
  return bits;
}
FAJIT_INLINE v32 add_products_of_two(v32 a, v32 x, const int8_t* base, int offset) {
  return add_half_products(a, x, (v32)splat(half_bits<int32_t>(base + offset)));
}
FAJIT_INLINE v32 add_products_of_one(v32 a, v32 x, const int8_t* base, int offset) {
  return add_half_products(a, x, v32{} + half_bits<uint16_t>(base + offset));
}
#else
FAJIT_INLINE v32 add_products_of_two(v32 a, v32 x, const int8_t* base, int offset) {
  v32 y;
  asm("vpbroadcastd %c2(%1), %0"
      : "=v"(y)
      : "r"(base), "i"(offset), "m"(*reinterpret_cast<const char (*)[]>(base)));
  return add_half_products(a, x, y);
}
FAJIT_INLINE v32 add_products_of_one(v32 a, v32 x, const int8_t* base, int offset) {
  asm("vfmadd231ph %c3(%2)%{1to32%}, %1, %0"
      : "+v"(a)
      : "v"(x), "r"(base), "i"(offset), "m"(*reinterpret_cast<const char (*)[]>(base)));
  return a;
}
#endif
FAJIT_INLINE vf lower_floats(v32 halves) {
  vf r;
  asm("vcvtph2ps %t1, %0" : "=v"(r) : "v"(halves));
  return r;
}
FAJIT_INLINE vf upper_floats(v32 halves) {
  v32 upper;
  asm("vextracti64x4 $1, %1, %t0" : "=v"(upper) : "v"(halves));
  return lower_floats(upper);
}
FAJIT_INLINE v32 add_halves(v32 a, v32 b) {
  asm("vaddph %1, %0, %0" : "+v"(a) : "v"(b));
  return a;
}

// 2^exponent, or the smallest or largest such float whose reciprocal is one too.
FAJIT_INLINE vf power_of_two(vi exponent) {
  const vi biased = exponent + 127;
  return as_float((biased < 1 ? splat(1) : biased > 253 ? splat(253) : biased) << 23);
}
// The least exponent with |x| < 2^exponent, of magnitudes; of 0 a small one.
FAJIT_INLINE vi exponent_above(vi magnitudes) { return (magnitudes >> 23) - 126; }

// Products of halves, for code_products.h.
template <class Code>
class HalfProducts {
  static constexpr bool kLooked = same<Code, int4x2_t>;
  // Halves of codes are less than 2^kCodeBits.
  static constexpr int kCodeBits = kLooked ? 4 : 1;

 public:
  static constexpr bool kTakes = true, kMayBeNan = !kLooked;
  static constexpr int kMostDims = 128, kMostKeys = 64, kSteps = 8;

  template <class Numbers>
  static FAJIT_INLINE HalfProducts of(const Context& c) {
    HalfProducts products;
    if constexpr (kLooked) {
      const Table table = Table::of<Numbers>(c);
      const vi exponent = exponent_above(as_int(splat(table.largest()))) - kCodeBits;
      products.unit_ = power_of_two(exponent)[0];
      products.table_ = table.halves(power_of_two(-exponent)[0]);
    }
    return products;
  }

  FAJIT_INLINE float unit() const { return unit_; }
  static constexpr float weight_unit() { return 1.0f; }  // `weights` has it
  // A row of Q as halves, in groups of four: 0, 2, 1, 3. x may be the same memory, of which halves
  // take no more than half: none is overwritten before it is read.
  template <int N>
  FAJIT_INLINE CodeRow query(const float* x, int8_t* halves, int32_t*) const {
    constexpr vh order = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
    vi largest{};
    for (int d = 0; d < N; d += kLanes)
      largest = larger_bits(largest, magnitude_bits(fajit::load(x + d)));
    const RowScales scales = scales_of<N>(splat(reduce_max(largest)));
    for (int d = 0; d < N; d += kLanes)
      store(halves + 2 * d,
            __builtin_shuffle(float_to_half(fajit::load(x + d) * scales.factor), order));
    return {scales.unit[0], 0};
  }
  // Rows of N weights, in order, and kLanes of them, from n on.
  static constexpr bool kTakesTotals = false;
  template <int N>
  FAJIT_INLINE RowScales weights(vi largest, vf) const {
    RowScales scales = scales_of<N>(largest);
    scales.unit *= unit_;
    return scales;
  }
  FAJIT_INLINE void put(vf x, vf factor, int8_t* row, int n, vi&) const {
    store(row + 2 * n, float_to_half(x * factor));
  }
  template <int Dim>
  static constexpr int at(int d, int side) {
    return 2 * d + 4 * side;
  }

  // The codes themselves; of those of 4 bits that are in the low bits of a byte, others above them.
  template <int part>
  static FAJIT_INLINE vi codes_of(vi x) {
    return part ? x >> 4 : x;
  }
  // Halves of the even codes of each word, and of the odd ones.
  struct Operands { v32 side[2]; };
  FAJIT_INLINE Operands operands(vi codes) const {
    const v32 x = (v32)codes;
    if constexpr (kLooked) {
      return {{lookup32(table_, x), lookup32(table_, x >> 8)}};
    } else {
      // Shifted with its sign, which bit 14 then has too.
      typedef int16_t words __attribute__((vector_size(64)));
      const auto half = [](v32 x) { return (v32)((words)x >> 1) & uint16_t{0xbf80}; };
      return {{half(x << 8), half(x)}};
    }
  }

  template <int N>
  class Sums {
   public:
    template <int side>
    FAJIT_INLINE void add(int i, const Operands& x, const int8_t* base, int offset) {
      now_[side][i] = add_products_of_two(now_[side][i], x.side[side], base, offset);
    }
    FAJIT_INLINE void settle() {
#pragma GCC unroll 2
      for (int i = 0; i < N; ++i) {
        total_[i] = add_halves(total_[i], add_halves(now_[0][i], now_[1][i]));
        now_[0][i] = now_[1][i] = v32{};
      }
    }
    FAJIT_INLINE vf value(int first, int count, int32_t) {
      settle();
      v32 sum = total_[first];
#pragma GCC unroll 2
      for (int i = first + 1; i < first + count; ++i) sum = add_halves(sum, total_[i]);
      sum = add_halves(sum, (v32)((vu)sum >> 16));
      return half_to_float(__builtin_convertvector((vu)sum, vh));
    }

   private:
    v32 now_[2][N] = {};
    v32 total_[N] = {};
  };

  // Codes of dims [d, d + 32) of a row of Dim.
  template <int Dim>
  FAJIT_INLINE v32 load(const Code* row, int d) const {
    if constexpr (kLooked)
      return lookup32(table_, load_bytes(row + d % (Dim / 2)) >> uint16_t(d < Dim / 2 ? 0 : 4));
    else return (load_signed_bytes(row + d) << 7) & uint16_t{0xbf80};
  }

 private:
  static constexpr int ceil_log2(int n) { return n > 1 ? 1 + ceil_log2((n + 1) / 2) : 0; }

  // Of rows of N: sums of as many products are halves. An infinite value or NaN makes the unit NaN.
  template <int N>
  static FAJIT_INLINE RowScales scales_of(vi largest) {
    constexpr int room = 15 - kCodeBits - ceil_log2(N);
    const vi exponent = exponent_above(largest) - room;
    return {power_of_two(-exponent), power_of_two(exponent) + as_float(largest) * 0.0f};
  }

  float unit_ = 256.0f;  // of halves of codes: an e4m3 is a half of 1/256 of its value
  v32 table_{};
};

// As integer_values. A row's codes are converted in place, key by key; `fetch()` issues the
// prefetches of a key, in kValuePasses parts.
template <int Dim, int NR>
constexpr int kHalfVectors = NR <= 2 && Dim % 128 == 0 ? 4 : 2;  // whose sums are in registers
template <class Numbers, int Dim, int NR, int Rows, int N, class Code, class ValueRows, class Fetch>
FAJIT_INLINE void half_values(const HalfProducts<Code>& products, ValueRows v, int count,
                              const int8_t* p, const CodeRow* rows, int groups, float* o,
                              Fetch fetch) {
  constexpr int vectors = kHalfVectors<Dim, NR>, stride = 4 * N, channels = Dim / Numbers::kGroups;
  constexpr int most = HalfProducts<Code>::kMostKeys, steps = HalfProducts<Code>::kSteps;
  for (int g = 0; g < groups; ++g)
    each_index<Dim / (32 * vectors)>([&](auto pass) __attribute__((always_inline)) {
      constexpr int first = pass.value * 32 * vectors;
      const int8_t* of_vector[vectors];
#pragma GCC unroll 4
      for (int j = 0; j < vectors; ++j)
        of_vector[j] = p + ((first + 32 * j) / channels * Rows + g * NR) * stride;
      for (int begin = 0; begin < count; begin += most) {
        const int end = N <= most || count - begin < most ? count : begin + most;
        v32 total[NR][vectors] = {};
        NanCodes nan[vectors / 2];
        for (int n = begin; n < end;) {
          v32 now[NR][vectors] = {};
          const int pause = end - n < steps ? end : n + steps;
          for (; n < pause; ++n) {
            const Code* const row = v(n);
            if (g == 0) fetch();
#pragma GCC unroll 4
            for (int j = 0; j < vectors; ++j) {
              const v32 x = products.template load<Dim>(row, first + 32 * j);
              if constexpr (HalfProducts<Code>::kMayBeNan)
                if (j % 2 == 0) nan[j / 2].add(load<vi>(row + first + 32 * j));
#pragma GCC unroll 4
              for (int r = 0; r < NR; ++r)
                now[r][j] = add_products_of_one(now[r][j], x, of_vector[j] + 2 * n, r * stride);
            }
          }
#pragma GCC unroll 4
          for (int r = 0; r < NR; ++r)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; ++j) total[r][j] = add_halves(total[r][j], now[r][j]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < NR; ++r)
#pragma GCC unroll 4
          for (int j = 0; j < vectors; ++j) {
            const int d = first + 32 * j, row = d / channels * Rows + g * NR + r;
            float* const at = o + (g * NR + r) * Dim + d;
            const vf unit = splat(rows[row].unit);
            store(at, load(at) + lower_floats(total[r][j]) * unit);
            store(at + kLanes, load(at + kLanes) + upper_floats(total[r][j]) * unit);
          }
        if constexpr (HalfProducts<Code>::kMayBeNan)
#pragma GCC unroll 2
          for (int i = 0; i < vectors / 2; ++i)
            if (__builtin_expect(nan[i].found(), false))
              nan[i].put(o + g * NR * Dim + first + 64 * i, NR, Dim);
      }
    });
}
#else
template <class Code>
class HalfProducts {
 public:
  static constexpr bool kTakes = false;
};
#endif

}  // namespace fajit
