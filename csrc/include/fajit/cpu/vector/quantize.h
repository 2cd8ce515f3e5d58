// Rows of floats to codes of 8 or 4 bits: `Format.quantize` of flashattn_jit/formats.py, bit for
// bit.
#pragma once
#include <fajit/abi.h>
#include <fajit/cpu/vector/load_row.h>

namespace fajit {

// The largest value of a symmetric code.
template <class T>
constexpr float kLargestCode = same<T, int8_t>     ? 127.0f
                               : same<T, int4x2_t> ? 7.0f
                               : same<T, e4m3_t>   ? 448.0f
                                                   : 57344.0f;

// The bits of a float of 8 bits in the upper part of a float of `Mantissa` bits: rounded to nearest
// even. x is at most the largest code. Multiples of the smallest subnormal are found by an addition
// to a float whose ulp is that number.
template <int Mantissa, int Bias>
FAJIT_INLINE vu small_float_bits(vf x) {
  const vu bits = (vu)x, magnitude = bits & 0x7fffffff;
  constexpr int shift = 23 - Mantissa;
  const vu rounded = magnitude + ((1u << (shift - 1)) - 1) + ((magnitude >> shift) & 1);
  const vu normal = (rounded >> shift) - ((127u - Bias) << Mantissa);
  constexpr float unit = 1ull << (24 - Bias - Mantissa);  // its ulp: 2^(1 - Bias - Mantissa)
  const vu subnormal = (vu)((vf)magnitude + unit) - (vu)splat(unit);
  constexpr uint32_t least = (128u - Bias) << 23;  // 2^(1 - Bias)
  return (magnitude < least ? subnormal : normal) | ((bits >> 24) & 0x80);
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

// Values of codes of 4 bits in ascending order, with their codes: those of equal values ascend.
class Codebook {
 public:
  explicit Codebook(const fajit_tensor& t) : used_(t.sizes[0] == 16) {
    if (!used_) return;
    const float* const values = static_cast<const float*>(t.ptr);
    for (int i = 0; i < 16; ++i) {
      int at = i;
      for (; at > 0 && values_[at - 1] > values[i]; --at) {
        values_[at] = values_[at - 1];
        codes_[at] = codes_[at - 1];
      }
      values_[at] = values[i];
      codes_[at] = static_cast<uint8_t>(i);
    }
    for (int i = 0; i < 15; ++i) middles_[i] = (values_[i + 1] + values_[i]) * 0.5f;
    for (int i = 0; i < 16; ++i) ascends_ &= codes_[i] == i;
  }

  bool is_used() const { return used_; }
  float largest() const { return max(abs_of(values_[0]), abs_of(values_[15])); }
  // The place of the nearest value, in ascending order: of two equally near ones of the lower. NaN
  // becomes 0. All middles between values are compared: appends of nf4 took 1.6 times as long with
  // a binary search among them, and 1.2 times when each vector computed them again (AVX-512, by
  // hand).
  FAJIT_INLINE vu nearest(vf x) const {
    x = x == x ? x : vf{};
    vi above{};
#pragma GCC unroll 15
    for (int i = 0; i < 15; ++i) above -= x > middles_[i];
    return (vu)above;
  }
  // Whether places are codes, and the code of a place.
  bool ascends() const { return ascends_; }
  uint8_t code(int place) const { return codes_[place]; }

 private:
  static float abs_of(float x) { return x < 0 ? -x : x; }

  const bool used_;
  bool ascends_ = true;
  float values_[16];
  float middles_[15];
  uint8_t codes_[16];
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

  // Stores x, rounded, for a group of a row, and returns it. Below `least`, a scale is rounded up:
  // `is_less(stored)`.
  template <class IsLess>
  float put(float x, char* row, int group, IsLess is_less) const {
    char* const to = row + group * t_.strides[3];
    if (dtype_ == kFloat) {
      uint32_t bits;
      __builtin_memcpy(&bits, &x, sizeof x);
      bits += is_less(x);
      __builtin_memcpy(to, &bits, sizeof bits);
      return as_float(int32_t(bits));
    }
    const auto widened = [&](uint16_t bits) {
      return dtype_ == kHalf ? half_to_float(bits) : bfloat16_to_float(bits);
    };
    uint16_t bits = (dtype_ == kHalf ? float_to_half(splat(x)) : float_to_bfloat16(splat(x)))[0];
    bits += is_less(widened(bits));
    __builtin_memcpy(to, &bits, sizeof bits);
    return widened(bits);
  }

 private:
  const fajit_tensor& t_;
  const Dtype dtype_;
};

// A number that is known when the kernel is compiled.
template <int N>
struct Fixed {
  constexpr operator int() const { return N; }
};

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

// x / divisor.
struct Quotient {
  vf divisor;
  FAJIT_INLINE vf operator()(vf x) const { return x / divisor; }
};
#if FAJIT_AVX
// The bits of x / divisor, by a product and a correction (Markstein 1990), in less time than
// divisions take. The divisor is from 2^-64 to 2^64, and x / divisor finite: what is left of
// quotients that matter is exact.
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
template <class T>
class Quantizer {
 public:
  Quantizer(const fajit_tensor& scales, const fajit_tensor& zeros, const fajit_tensor& book)
      : scales_(scales), zeros_(zeros), book_(book) {
    constexpr bool integers = same<T, int8_t> || same<T, int4x2_t>;
    largest_ = book_.is_used() ? book_.largest() : kLargestCode<T>;
    least_ = -largest_ - (integers && zeros_.exist() ? 1.0f : 0.0f);
  }

  // dst = the codes of row[0, N), whose numbers are stored beside them. `row` has room for N
  // rounded up to kLanes, and kLanes more.
  template <int N>
  FAJIT_INLINE void store_row(const float* row, T* dst, int64_t page, int64_t slot,
                              int64_t head) const {
    alignas(64) uint8_t out[round_up(N, kLanes) + kLanes];
    if (!scales_.are_stored()) {
      encode<true>(row, N, out, Quotient{splat(1.0f)}, kNoZero);
    } else {
      char* const scale_row = scales_.at(page, slot, head);
      char* const zero_row = zeros_.exist() ? zeros_.at(page, slot, head) : nullptr;
      const int groups = scales_.groups();
      const auto each = [&](auto count) __attribute__((always_inline)) {
        for (int g = 0; g < groups; ++g)
          store_group(row + g * count, count, out + g * count, scale_row, zero_row, g);
      };
      if (groups == 1) each(Fixed<N>{});
      else if (N > 64 && N == 64 * groups) each(Fixed<64>{});
      else each(N / groups);
    }
    if constexpr (same<T, int4x2_t>) {
      for (int i = 0; i < N / 2; ++i) dst[i].bits = out[i] | (out[i + N / 2] << 4);
    } else {
      __builtin_memcpy(dst, out, N);
    }
  }

 private:
  static constexpr float kNoZero = -0.0f;  // x + -0 is x, for x = -0 too

  template <class Count>
  FAJIT_INLINE void store_group(const float* x, Count count, uint8_t* out, char* scale_row,
                                char* zero_row, int g) const {
    if (zero_row == nullptr) {
      vi top{};  // bits of magnitudes, which are ordered as these are, NaN last
      for (int i = 0; i < count; i += kLanes) {
        const vi bits = load<vi>(x + i) & 0x7fffffff;
        const vi own = iota() + i < int{count} ? bits : vi{};
        top = own > top ? own : top;
      }
      const float largest = as_float(reduce_max(top));
      const float magnitude = largest - largest == 0.0f ? largest : __builtin_nanf("");
      const float scale = scales_.put(magnitude / largest_, scale_row, g,
                                      [&](float s) { return s * largest_ < magnitude; });
      return divide<false>(x, count, out, scale, kNoZero);
    }
    vf top = splat(-kInf), bottom = splat(kInf), finite{};  // finite: NaN where a value is not
    for (int i = 0; i < count; i += kLanes) {
      const vf some = select(iota() + i < int{count}, load(x + i), splat(x[0]));
      top = max(top, some);
      bottom = min(bottom, some);
      finite += some * 0.0f;
    }
    const float high = reduce_max(top), low = -reduce_max(-bottom), nan = reduce_add(finite);
    const float steps = largest_ - least_, magnitude = max(high, -low);
    const float span = max(high - low, magnitude * (steps / 1024.0f));
    const float exact = span - span == 0.0f ? span + nan : __builtin_nanf("");
    const float scale =
        scales_.put(exact / steps, scale_row, g, [&](float s) { return s * steps < exact; });
    const float wanted = least_ - low / scale;
    const float zero =
        zeros_.put(wanted == wanted ? wanted : 0.0f, zero_row, g, [](float) { return false; });
    divide<true>(x, count, out, scale, zero);
  }

  // out = the codes of x / scale + zero. Clamps: whether they may be beyond the largest code.
  template <bool Clamps, class Count>
  FAJIT_INLINE void divide(const float* x, Count count, uint8_t* out, float scale,
                           float zero) const {
#if FAJIT_AVX
    if (scale > 0x1p-64f && scale < 0x1p64f)
      return encode<Clamps>(x, count, out, QuotientByProducts{splat(scale), splat(1.0f / scale)},
                            zero);
#endif
    encode<true>(x, count, out, Quotient{splat(scale)}, zero);
  }

  template <bool Clamps, class Count, class Divided>
  FAJIT_INLINE void encode(const float* x, Count count, uint8_t* out, Divided divided,
                           float zero) const {
    for (int i = 0; i < count; i += kLanes) {
      const vf quotient = divided(load(x + i)) + zero;
      store(out + i, low_bytes(words_of<Clamps>(quotient)));
    }
    if constexpr (same<T, int4x2_t>)
      if (book_.is_used() && !book_.ascends())
        for (int i = 0; i < count; ++i) out[i] = book_.code(out[i]);
  }

  template <bool Clamps>
  FAJIT_INLINE vu words_of(vf x) const {
    if constexpr (same<T, int4x2_t>)
      if (book_.is_used()) return book_.nearest(x);
    return code_words<T>(Clamps ? clamped(x, least_, largest_) : x);
  }

  const NumberPages scales_, zeros_;
  const Codebook book_;
  float least_, largest_;
};

}  // namespace fajit
