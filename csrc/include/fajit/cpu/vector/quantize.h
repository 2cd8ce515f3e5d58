// Rows of floats to codes of 8 or 4 bits: `Format.quantize` of flashattn_jit/formats.py, bit for
// bit.
#pragma once
#include <fajit/abi.h>
#include <fajit/cpu/vector/load_row.h>
#include <fajit/cpu/vector/transpose.h>

namespace fajit {

// The largest value of a symmetric code.
template <class T>
constexpr float kLargestCode = same<T, int8_t>     ? 127.0f
                               : same<T, int4x2_t> ? 7.0f
                               : same<T, e4m3_t>   ? 448.0f
                                                   : 57344.0f;

// The bits of a float of 8 bits with `Mantissa` of them, in the low byte: x rounded to nearest
// even. |x| is at most the largest code. A sum with a power of two whose ulp is that of the code
// counts ulps in its low bits; below 2^(1 - Bias) the ulp is that of subnormals.
template <int Mantissa, int Bias>
FAJIT_INLINE vu small_float_bits(vf x) {
  constexpr int shift = 23 - Mantissa;
  constexpr uint32_t least = (128u - Bias) << 23;                   // 2^(1 - Bias)
  constexpr uint32_t normal = -((128u - Bias) << Mantissa) & 0xff;  // a code counts from there
  static_assert(normal % 2 == 0);  // rounding to even is of the code
  const vu bits = (vu)x, own = bits & 0x7f800000;
  const vu power = own > least ? own : vu{} + least;
  const vu sum = (vu)(abs(x) + (vf)(power + (uint32_t{shift} << 23 | normal)));
  return (sum + (power >> shift)) | ((bits >> 24) & 0x80);
}

// x in [least, largest]; NaN becomes 0.
FAJIT_INLINE vf clamped(vf x, float least, float largest) {
  x = x == x ? x : vf{};
  x = x > largest ? splat(largest) : x;
  return x < least ? splat(least) : x;
}
// The codes nearest to x, in the low bytes. Integers of 4 bits are codes plus 8.
template <class T>
FAJIT_INLINE vu code_words(vf x) {
  if constexpr (same<T, int8_t> || same<T, int4x2_t>) {
    return (vu)(x + (0x1.8p23f + (same<T, int8_t> ? 0 : 8)));  // its ulp is 1
  } else if constexpr (same<T, e4m3_t>) {
    return small_float_bits<3, 7>(x);
  } else {
    return small_float_bits<2, 15>(x);
  }
}

// The 16 values of codes of 4 bits.
class Codebook {
 public:
  explicit Codebook(const fajit_tensor& t) : used_(t.sizes[0] == 16) {
    if (!used_) return;
    const float* const values = static_cast<const float*>(t.ptr);
    float sorted[16];
    for (int i = 0; i < 16; ++i) {  // codes of equal values ascend
      int at = i;
      for (; at > 0 && sorted[at - 1] > values[i]; --at) {
        sorted[at] = sorted[at - 1];
        codes_[at] = codes_[at - 1];
      }
      sorted[at] = values[i];
      codes_[at] = as_float(i);
    }
    largest_ = abs(sorted[0]) > abs(sorted[15]) ? abs(sorted[0]) : abs(sorted[15]);
    for (int i = 0; i < 16; ++i) ascends_ &= as_int(codes_[i]) == i;
    for (int count = 1; count < 16; count *= 2)
      for (int i = 0; i < count; ++i) {
        const int at = (2 * i + 1) * (8 / count);
        const float middle = (sorted[at] + sorted[at - 1]) * 0.5f;
        middles_[count + i] = middle;
        is_tiny_ |= middle != 0.0f && abs(middle) < 0x1p-64f;
      }
#if FAJIT_AVX == 512
    make_cells(sorted);
#endif
  }

  bool is_used() const { return used_; }
  float largest() const { return largest_; }
  // Whether quotients are compared with numbers so small that their last bits may be subnormal.
  bool is_tiny() const { return is_tiny_; }
  // The code of the value nearest to x, no NaN: of two equally near ones of the lower. A look-up by
  // cells, or a binary search among the middles between values. Appends of 2,048 tokens in nf4 took
  // 1.25 times as long with a search as with cells, and a comparison with all middles 2.4 times as
  // long as a search (AVX-512, one thread, by hand).
  FAJIT_INLINE vu nearest(vf x) const {
#if FAJIT_AVX == 512
    if (has_cells_) {
      const vi cell = cell_of(x);
      const vi below = as_int(of_cell(below_, cell));
      const vi at = x > of_cell(middle_, cell) ? below + 1 : below;
      return ascends_ ? (vu)at : (vu)lookup16(codes_, at);
    }
#endif
    const auto next = [&](vi twice, vf middle) {
      if constexpr (kLanes == 16) return x > middle ? twice + 1 : twice;  // one masked instruction
      else return twice - (x > middle);
    };
    vi at = next(vi{} + 2, splat(middles_[1]));
    at = next(at + at, middles<0>(at));
    at = next(at + at, middles<0>(at));
    at = next(at + at, middles<8>(at));
    at &= 15;
    return ascends_ ? (vu)at : (vu)lookup16(codes_, at);
  }

 private:
  // middles_[at], which all are from First to First + 7.
  template <int First>
  FAJIT_INLINE vf middles(vi at) const {
#if FAJIT_AVX == 256 && !defined(__clang__)
    return __builtin_shuffle(load(middles_ + First), at);  // of `at`, 3 bits count
#else
    return lookup16(middles_, at);
#endif
  }

#if FAJIT_AVX == 512
  // 31 cells of equal width between plus and minus the largest value, if none has two middles: then
  // one comparison is left. A larger number is in the same cell or a later one, however it is
  // rounded.
  void make_cells(const float* sorted) {
    per_value_ = 15.0f / largest_;
    has_cells_ = largest_ > 0x1p-64f && largest_ < 0x1p64f;
    for (int i = 0; i < 32; ++i) middle_[i] = kInf;
    for (int i = 1; i < 16; ++i) {
      const float middle = (sorted[i] + sorted[i - 1]) * 0.5f;
      const int cell = cell_of(splat(middle))[0] & 31;
      has_cells_ &= middle_[cell] == kInf;
      middle_[cell] = middle;
      for (int later = cell + 1; later < 32; ++later) below_[later] = as_float(i);
    }
  }
  // In the low five bits: 1 to 31.
  FAJIT_INLINE vi cell_of(vf x) const {
    asm("vfmadd213ps %2, %1, %0" : "+v"(x) : "v"(splat(per_value_)), "v"(splat(0x1.8p23f + 16)));
    return as_int(x);
  }
  static FAJIT_INLINE vf of_cell(const float* values, vi cell) {
    asm("vpermi2ps %2, %1, %0" : "+v"(cell) : "v"(load(values)), "v"(load(values + 16)));
    return as_float(cell);
  }

  bool has_cells_ = false;
  float per_value_ = 0.0f;
  alignas(64) float middle_[32] = {};  // of a cell, or infinity
  alignas(64) float below_[32] = {};   // middles before the cell: the bits of an int
#endif
  const bool used_;
  bool ascends_ = true;  // in order of values, code i is i
  bool is_tiny_ = false;
  float largest_ = 0.0f;
  // Level by level of a binary tree: the middle of all, of the lower and the upper half, and so on.
  alignas(64) float middles_[16] = {};
  alignas(64) float codes_[16] = {};  // their bits are codes, in ascending order of values
};

// Numbers [page, slot, head, group of channels] of a cache, scales or zero points, beside its
// codes. Strides in bytes; the number of groups is sizes[3], the dtype strides[4]: 0 for none.
class NumberPages {
 public:
  enum Dtype { kNone, kFloat, kHalf, kBfloat16 };

  explicit NumberPages(const fajit_tensor& t) : t_(t), dtype_(Dtype(t.strides[4])) {}

  bool exist() const { return dtype_ != kNone; }
  bool are_stored() const { return exist() && t_.sizes[3] > 0; }
  int groups() const { return are_stored() ? static_cast<int>(t_.sizes[3]) : 1; }

  char* at(int64_t page, int64_t slot, int64_t head) const {
    return static_cast<char*>(const_cast<void*>(t_.ptr)) + page * t_.strides[0] +
           slot * t_.strides[1] + head * t_.strides[2];
  }

  // x rounded to the dtype, and from there up where `is_less(rounded)`.
  template <class IsLess>
  FAJIT_INLINE vf rounded(vf x, IsLess is_less) const {
    if (dtype_ == kFloat) return (vf)((vi)x - is_less(x));
    if (dtype_ == kHalf) {
      const vh bits = float_to_half(x);
      const vu up = (vu)is_less(half_to_float(bits));
      return half_to_float(__builtin_convertvector(widen(bits) - up, vh));
    }
    const vf y = bfloat16_to_float(float_to_bfloat16(x));
    return (vf)((vi)y - (is_less(y) << 16));
  }

  // Stores x, which has been rounded, for a group of a row.
  FAJIT_INLINE void put(float x, char* row, int group) const {
    char* const to = row + group * t_.strides[3];
    if (dtype_ == kFloat) {
      __builtin_memcpy(to, &x, sizeof x);
    } else {
      const uint16_t bits = dtype_ == kHalf ? float_to_half(splat(x))[0] : as_int(x) >> 16;
      __builtin_memcpy(to, &bits, sizeof bits);
    }
  }

 private:
  const fajit_tensor& t_;
  const Dtype dtype_;
};

// Numbers of channels. One that is known when the kernel is compiled:
template <int N>
struct Fixed {
  constexpr operator int() const { return N; }
};
// Whole vectors of them:
struct Whole {
  int count;
  operator int() const { return count; }
};
template <class Count>
constexpr bool kIsWhole = false;
template <int N>
constexpr bool kIsWhole<Fixed<N>> = N % kLanes == 0;
template <>
constexpr bool kIsWhole<Whole> = true;
// Channels that are known when the kernel is compiled, or 0.
template <class Count>
constexpr int kKnown = 0;
template <int N>
constexpr int kKnown<Fixed<N>> = N;

// The low byte of each lane. Of lanes that come from floats gcc 12 makes scalar instructions of
// __builtin_convertvector: appends of int8 took 4 times as long.
FAJIT_INLINE vb low_bytes(vu x) {
#if FAJIT_AVX == 512
  vb bytes;
  asm("vpmovdb %1, %0" : "=v"(bytes) : "v"(x));
  return bytes;
#elif FAJIT_AVX
  typedef char Bytes __attribute__((vector_size(32)));
  const vi words = (vi)__builtin_ia32_pshufb256((Bytes)x, (Bytes)(vi{} + 0x0c080400));
  const uint32_t halves[2] = {uint32_t(words[0]), uint32_t(words[4])};
  vb bytes;
  __builtin_memcpy(&bytes, halves, sizeof bytes);
  return bytes;
#else
  return __builtin_convertvector(x, vb);
#endif
}
// Of two words a lane: all of them in order.
FAJIT_INLINE vh low_bytes(vw x) {
#if FAJIT_AVX == 512
  vh bytes;
  asm("vpmovwb %1, %0" : "=v"(bytes) : "v"(x));
  return bytes;
#else
  typedef uint8_t Bytes __attribute__((vector_size(2 * kLanes)));
  return (vh) __builtin_convertvector(x, Bytes);
#endif
}

#if FAJIT_AVX
// The bits of x / divisor, by a product and a correction (Markstein 1990), in less time than
// divisions take. The divisor is from 2^-64 to 2^64, and x / divisor finite and either 0 or at
// least 2^-64 where its last bits matter: what is left of such quotients is exact.
struct QuotientByProducts {
  vf divisor, reciprocal;
  FAJIT_INLINE vf operator()(vf x) const {
    vf quotient = x * reciprocal, beyond = quotient;
    asm("vfmsub213ps %2, %1, %0" : "+v"(beyond) : "v"(divisor), "v"(x));
    asm("vfnmadd231ps %2, %1, %0" : "+v"(quotient) : "v"(beyond), "v"(reciprocal));
    return quotient;
  }
};
#endif

// How rows become codes of T: `Format.quantize`. Scales that are not stored are applied already.
//
// The scales of as many rows as there are lanes are computed at once: one by one, each waits for a
// reduction, two divisions and a rounding. Of 8 rows, with half of the 16 lanes in use, appends
// take 1.14 (int8, int4) or 1.07 (e4m3) times as long (256 tokens of 8 heads of 128 dims in bf16,
// AVX-512, one thread of a Zen 5, by hand). Codes go to the cache in vectors as they were made: a
// wider load of what narrower stores have just written waits for the stores to end. Appends take
// 0.85 of the time (int8) to 0.6 (int4 with zero points in groups of 64; 128 dims, AVX-512, by
// hand).
//
// Rows that no hook changes are read twice, as they are, instead of staged as floats: 0.85 (int8)
// to 0.94 (e4m3) of the time (2,048 tokens of 8 heads of 128 dims in bf16, one thread, by hand).
// Numbers in bf16 are divided without a conversion, two of a lane, and become words together: nf4
// 0.92, int4 0.96 of the time on AVX-512, e4m3 0.9, int8 0.95 on AVX2 (256 tokens, by hand).
template <class T>
class Quantizer {
 public:
  static constexpr int kRows = kLanes;
  // Floats from a row to the next.
  template <int N>
  static constexpr int kStride = round_up(N, kLanes) + kLanes;

  // A row of a cache: its codes, scales and zero points.
  struct Place {
    T* codes;
    char *scales, *zeros;
  };

  Quantizer(const fajit_tensor& scales, const fajit_tensor& zeros, const fajit_tensor& book)
      : scales_(scales), zeros_(zeros), book_(book) {
    constexpr bool integers = same<T, int8_t> || same<T, int4x2_t>;
    largest_ = book_.is_used() ? book_.largest() : kLargestCode<T>;
    least_ = -largest_ - (integers && zeros_.exist() ? 1.0f : 0.0f);
  }

  Place place(T* codes, int64_t page, int64_t slot, int64_t head) const {
    return {codes, scales_.at(page, slot, head), zeros_.at(page, slot, head)};
  }

  // Whether rows of N are read as they are, in whole vectors; others need kStride<N> floats.
  template <int N>
  bool reads_whole() const {
    return N % kLanes == 0 && N / scales_.groups() % kLanes == 0;
  }

  // Rows of N numbers, `count` of at most kRows, as codes with their numbers beside them.
  template <int N, class E>
  __attribute__((noinline)) void store_rows(const E* const* rows, const Place* places,
                                            int count) const {
    const int groups = scales_.groups();
    const auto each = [&](auto channels) __attribute__((always_inline)) {
      const int most = kNumbers<N> / groups;
      for (int r = 0; r < count; r += most)
        quantize_rows<N>(rows + r, places + r, most < count - r ? most : count - r, channels,
                         groups);
    };
    if (!scales_.are_stored()) {
      for (int r = 0; r < count; ++r) {
        put_codes<N>(rows[r], Fixed<N>{}, 1, places[r].codes,
                     [&](const E* x, int) { return words_of<true>(Storage<E>::load(x)); });
      }
    } else if (groups == 1) {
      each(Fixed<N>{});
    } else if (N > 64 && N == 64 * groups) {
      each(Fixed<64>{});  // 0.9 of the time of a number that is not known
    } else if (N / groups % kLanes == 0) {
      each(Whole{N / groups});
    } else {
      each(N / groups);
    }
  }

 private:
  // Scales that are computed together: those of a row at least.
  template <int N>
  static constexpr int kNumbers = round_up(larger_of(N, 4 * kRows), kLanes);

  template <int N, class E, class Count>
  FAJIT_INLINE void quantize_rows(const E* const* rows, const Place* places, int count,
                                  Count channels, int groups) const {
    alignas(64) float scales[kNumbers<N>], zeros[kNumbers<N>], reciprocals[kNumbers<N>];
    const bool with_zeros = zeros_.exist();
    for (int i = 0, r = 0, g = 0; i < count * groups; i += kLanes) {
      vf scale;
      const auto next = [&]() __attribute__((always_inline)) {
        const E* const x = rows[r] + g * channels;
        if (++g == groups) g = 0, ++r;
        return x;
      };
      const int own = count * groups - i < kLanes ? count * groups - i : kLanes;
      if (with_zeros) {
        vf tops[kLanes], bottoms[kLanes];
        for (int lane = 0; lane < own; ++lane)
          extremes(next(), channels, tops[lane], bottoms[lane]);
        for (int lane = own; lane < kLanes; ++lane)
          tops[lane] = tops[0], bottoms[lane] = bottoms[0];
        const vf high = reduce_columns(tops, larger), low = -reduce_columns(bottoms, larger);
        scale = affine(high, low, zeros + i);
      } else {
        vi tops[kLanes];
        for (int lane = 0; lane < own; ++lane) tops[lane] = magnitudes(next(), channels);
        for (int lane = own; lane < kLanes; ++lane) tops[lane] = tops[0];
        scale = symmetric(as_float(reduce_columns(tops, [](vi a, vi b) { return a > b ? a : b; })));
      }
      store(scales + i, scale);
      store(reciprocals + i, 1.0f / scale);
    }
    for (int r = 0; r < count; ++r) {
      for (int g = 0; g < groups; ++g) {
        scales_.put(scales[r * groups + g], places[r].scales, g);
        if (with_zeros) zeros_.put(zeros[r * groups + g], places[r].zeros, g);
      }
      const Divisors own{scales + r * groups, reciprocals + r * groups, zeros + r * groups};
      const E* const x = rows[r];
      if (with_zeros) encode_row<N, true>(x, channels, groups, own, places[r].codes);
      else encode_row<N, false>(x, channels, groups, own, places[r].codes);
    }
  }

  // The largest magnitude of the channels of each lane: its bits, which are ordered as magnitudes
  // are, NaN last.
  template <class E, class Count>
  static FAJIT_INLINE vi magnitudes(const E* x, Count count) {
    vi top{};
    int i = 0;
    if constexpr (same<E, bfloat16_t>) {  // two a lane
      vw words{};
      for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
        const vw own = load<vw>(x + i) & 0x7fff;
        words = own > words ? own : words;
      }
      const vi low = (vi)((vu)words << 16), high = (vi)((vu)words & 0xffff0000);
      top = high > low ? high : low;
    }
    for (; i < count; i += kLanes) {
      const vi bits = as_int(Storage<E>::load(x + i)) & 0x7fffffff;
      const vi own = kIsWhole<Count> ? bits : iota() + i < int{count} ? bits : vi{};
      top = own > top ? own : top;
    }
    return top;
  }
  // The scales of magnitudes: NaN unless these are finite.
  FAJIT_INLINE vf symmetric(vf largest) const {
    const vf exact = largest - largest == 0.0f ? largest : splat(__builtin_nanf(""));
    return scales_.rounded(exact / largest_, [&](vf s) { return s * largest_ < exact; });
  }

  // The largest value of the channels of each lane, and minus the least; NaN if one is not finite.
  template <class E, class Count>
  static FAJIT_INLINE void extremes(const E* x, Count count, vf& top, vf& bottom) {
    top = bottom = splat(-kInf);
    vf finite{};  // NaN where a value is not
    for (int i = 0; i < count; i += kLanes) {
      const vf all = Storage<E>::load(x + i);
      const vf some = kIsWhole<Count> ? all : select(iota() + i < int{count}, all, splat(all[0]));
      top = max(top, some);
      bottom = max(bottom, -some);
      finite += some * 0.0f;
    }
    top += finite;
    bottom += finite;
  }
  // a or b, whichever is larger, or NaN.
  static FAJIT_INLINE vf larger(vf a, vf b) { return a == a ? max(a, b) : a; }
  // The scales of groups with these extremes, and their zero points.
  FAJIT_INLINE vf affine(vf high, vf low, float* zeros) const {
    const float steps = largest_ - least_;
    const vf span = max(high - low, max(high, -low) * (steps / 1024.0f));
    const vf exact = span - span == 0.0f ? span : splat(__builtin_nanf(""));
    const vf scale = scales_.rounded(exact / steps, [&](vf s) { return s * steps < exact; });
    const vf wanted = least_ - low / scale;
    const vf zero = wanted - wanted == 0.0f ? wanted : vf{};  // infinite where the scale is 0
    store(zeros, zeros_.rounded(zero, [](vf) { return vi{}; }));
    return scale;
  }

  // What the groups of a row are divided by, and their zero points.
  struct Divisors { const float *scales, *reciprocals, *zeros; };

  // dst = the codes of x / scale + zero. Affine: whether there are zero points, and codes beyond
  // the largest, therefore.
  template <int N, bool Affine, class E, class Count>
  FAJIT_INLINE void encode_row(const E* x, Count channels, int groups, const Divisors& own,
                               T* dst) const {
#if FAJIT_AVX
    bool normal = !book_.is_tiny();
    for (int g = 0; g < groups; ++g) normal &= own.scales[g] > 0x1p-64f && own.scales[g] < 0x1p64f;
    if (normal) {
      const auto codes = [&](vf from, int g) __attribute__((always_inline)) {
        const QuotientByProducts quotient{splat(own.scales[g]), splat(own.reciprocals[g])};
        const vf y = quotient(from);
        return words_of<Affine>(Affine ? y + own.zeros[g] : y);
      };
      if constexpr (kTwoALane<E, Count>) {
        const auto words = [&](const E* from, int g) __attribute__((always_inline)) {
          const vu two = load<vu>(from);
          const vu even = codes((vf)(two << 16), g), odd = codes((vf)(two & 0xffff0000), g);
          return (vw)((even & 0xffff) | (odd << 16));
        };
        return put_codes<N>(x, channels, groups, dst, words);
      } else {
        const auto words = [&](const E* from, int g) __attribute__((always_inline)) {
          return codes(Storage<E>::load(from), g);
        };
        return put_codes<N>(x, channels, groups, dst, words);
      }
    }
    // Such scales are rare: one function for all numbers of channels.
    encode_by_divisions<N, Affine>(x, int{channels}, groups, own, dst);
#else
    encode_by_divisions<N, Affine>(x, channels, groups, own, dst);
#endif
  }

  template <int N, bool Affine, class E, class Count>
  __attribute__((noinline)) void encode_by_divisions(const E* x, Count channels, int groups,
                                                     const Divisors& own, T* dst) const {
    put_codes<N>(x, channels, groups, dst, [&](const E* from, int g) {
      const vf y = Storage<E>::load(from) / own.scales[g];
      return words_of<true>(Affine ? y + own.zeros[g] : y);
    });
  }

  // Whether two numbers in bf16 become words of a lane.
  template <class E, class Count>
  static constexpr bool kTwoALane = same<E, bfloat16_t> && kKnown<Count> > 0 &&
                                    kKnown<Count> % ((same<T, int4x2_t> ? 4 : 2) * kLanes) == 0;

  // dst = the codes of a row, words(x + i, group) at a time: one or two a lane.
  template <int N, class E, class Count, class Words>
  FAJIT_INLINE void put_codes(const E* x, Count channels, int groups, T* dst, Words words) const {
    constexpr bool pairs = same<T, int4x2_t>;
    constexpr int step = same<decltype(words(x, 0)), vw> ? 2 * kLanes : kLanes;
    if constexpr (kIsWhole<Count> && !pairs) {
      for (int g = 0; g < groups; ++g)
        for (int i = 0; i < channels; i += step)
          store(dst + g * channels + i, low_bytes(words(x + g * channels + i, g)));
      return;
    }
    if constexpr (kIsWhole<Count> && N % (2 * kLanes) == 0) {
      // Channels i and i + N / 2 are a pair.
      const auto pair = [&](int i, int low, int high) __attribute__((always_inline)) {
        store(dst + i, low_bytes(words(x + i, low) | (words(x + N / 2 + i, high) << 4)));
      };
      if (groups == 1) {
        for (int i = 0; i < N / 2; i += step) pair(i, 0, 0);
        return;
      }
      if (groups % 2 == 0) {
        for (int g = 0; g < groups / 2; ++g)
          for (int i = 0; i < channels; i += step) pair(g * channels + i, g, g + groups / 2);
        return;
      }
    }
    alignas(64) uint8_t codes[kStride<N>];
    for (int g = 0; g < groups; ++g)
      for (int i = 0; i < channels; i += step)
        store(codes + g * channels + i, low_bytes(words(x + g * channels + i, g)));
    if constexpr (pairs) {
      for (int i = 0; i < N / 2; ++i) dst[i].bits = codes[i] | (codes[i + N / 2] << 4);
    } else {
      __builtin_memcpy(dst, codes, N);
    }
  }

  // The codes of numbers that are divided. Clamps: whether they may be beyond the largest code.
  template <bool Clamps>
  FAJIT_INLINE vu words_of(vf x) const {
    if constexpr (same<T, int4x2_t>)
      if (book_.is_used()) return book_.nearest(Clamps ? clamped(x, least_, largest_) : x);
    return code_words<T>(Clamps ? clamped(x, least_, largest_) : x);
  }

  const NumberPages scales_, zeros_;
  const Codebook book_;
  float least_, largest_;
};

}  // namespace fajit
