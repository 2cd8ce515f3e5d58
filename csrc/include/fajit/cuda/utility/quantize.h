// Rows of floats to codes of 8 or 4 bits: `Format.quantize` of flashattn_jit/formats.py, bit for
// bit, as fajit/cpu/vector/quantize.h.
//
// A warp has one row, in shared memory. Each group of channels that share a scale has some of its
// lanes, a power of two:
//
//   magnitudes of a group -> scale, zero point     by shuffles among its lanes
//   each number -> the bits of its code            in place
//   bits -> bytes of the cache                     of any lanes: pairs may be of two groups
//
// Divisions are IEEE's and subnormal numbers are kept, as kernels are compiled without fast math.
// No product is added to anything, so none is contracted.
#pragma once
#include <fajit/abi.h>
#include <fajit/cuda/hooks/row_hooks.h>
#include <fajit/cuda/tile/codes.h>

namespace fajit::cuda {

// The largest value of a symmetric code; 0 of what is no code.
template <class Codes>
constexpr float kLargestCode = same<Codes, Int8Codes>   ? 127.0f
                               : same<Codes, Int4Codes> ? 7.0f
                               : same<Codes, E4m3Codes> ? 448.0f
                               : same<Codes, E5m2Codes> ? 57344.0f
                                                        : 0.0f;
template <class Codes>
constexpr bool kIsCode = kLargestCode<Codes> > 0.0f;

// The bits of a float of 8 bits, x rounded to nearest even. x is at most the largest code.
// Multiples of the smallest subnormal are found by an addition to a float whose ulp is that number.
template <int Mantissa, int Bias>
FAJIT_DEV uint32_t small_float_bits(float x) {
  const uint32_t bits = as_int(x), magnitude = bits & 0x7fffffff;
  constexpr int shift = 23 - Mantissa;
  constexpr float unit = 1ull << (24 - Bias - Mantissa);  // its ulp: 2^(1 - Bias - Mantissa)
  constexpr uint32_t least = (128u - Bias) << 23;         // 2^(1 - Bias)
  const uint32_t rounded = magnitude + ((1u << (shift - 1)) - 1) + (magnitude >> shift & 1);
  const uint32_t normal = (rounded >> shift) - ((127u - Bias) << Mantissa);
  const uint32_t subnormal = as_int(as_float(magnitude) + unit) - as_int(unit);
  return (magnitude < least ? subnormal : normal) | (bits >> 24 & 0x80);
}

// Numbers [page, slot, head, group of channels] beside the codes of a cache, scales or zero points.
// Strides in bytes.
struct Numbers {
  enum Dtype : int32_t { kNone, kFloat, kHalf, kBfloat16 };

  unsigned char* first;
  int64_t to_page, to_slot, to_head, to_group;
  int32_t groups;  // 0: they exist, but are not stored
  Dtype dtype;     // kNone: there are none

  static Numbers of(const fajit_tensor& t) {
    return {static_cast<unsigned char*>(const_cast<void*>(t.ptr)),
            t.strides[0],
            t.strides[1],
            t.strides[2],
            t.strides[3],
            static_cast<int32_t>(t.sizes[3]),
            static_cast<Dtype>(t.strides[4])};
  }

  FAJIT_DEV unsigned char* at(int64_t page, int64_t slot, int64_t head) const {
    return first + page * to_page + slot * to_slot + head * to_head;
  }

  // Stores x, rounded, for a group of a row if `writes`, and returns it. Below `least`, a scale is
  // rounded up: `is_less(stored)`.
  template <class IsLess>
  FAJIT_DEV float put(float x, unsigned char* row, int group, bool writes, IsLess is_less) const {
    unsigned char* const to = row + group * to_group;
    uint32_t bits = rounded(x);
    bits += is_less(widened(bits));
    if (writes && dtype == kFloat) *reinterpret_cast<uint32_t*>(to) = bits;
    if (writes && dtype != kFloat) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(bits);
    return widened(bits);
  }

 private:
  // To nearest even. NaN has the same bits on every device.
  FAJIT_DEV uint32_t rounded(float x) const {
    const uint32_t bits = x == x ? as_int(x) : 0x7fc00000;
    if (dtype == kFloat) return bits;
    if (dtype == kHalf) return x == x ? round_to<Float16>(x) : 0x7e00;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  FAJIT_DEV float widened(uint32_t bits) const {
    if (dtype == kHalf) return Float16::to_float(static_cast<uint16_t>(bits));
    return as_float(dtype == kFloat ? bits : bits << 16);
  }
};

// What an append writes beside the codes of a cache, or must know of them.
struct BesideCodes {
  Numbers scales, zeros;
  const float* book;  // [16], or null

  // Of three tensors: scales, zero points, the codebook.
  static BesideCodes of(const fajit_tensor* t) {
    const void* const book = t[2].sizes[0] == 16 ? t[2].ptr : nullptr;
    return {Numbers::of(t[0]), Numbers::of(t[1]), static_cast<const float*>(book)};
  }
};

// Values of codes of 4 bits in ascending order, with their codes: those of equal values ascend.
struct Codebook {
  float values[16];
  uint32_t codes[16];

  // By one warp. from: [16]; null for zeros, as compilers read a codebook before they ask for it.
  FAJIT_DEV void sort(const float* from, int lane) {
    const int code = lane % 16;
    const float own = from == nullptr ? 0.0f : from[code];
    int place = 0;
    for (int i = 0; i < 16; ++i) {
      const float other = ptx::from_lane(own, i);
      place += other < own || (other == own && i < code);
    }
    if (lane >= 16) return;
    values[place] = own;
    codes[place] = code;
  }

  FAJIT_DEV float largest() const { return fmaxf(fabsf(values[0]), fabsf(values[15])); }
  // The code of the nearest value; of two equally near ones, of the lower.
  FAJIT_DEV uint32_t nearest(float x) const {
    int place = 0;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) {
      const int i = place + step;
      if (x > (values[i] + values[i - 1]) * 0.5f) place = i;
    }
    return codes[place];
  }
};

// How rows become codes. Scales that are not stored are applied already.
template <class Codes>
class Quantizer {
 public:
  // book: sorted, if there is one.
  FAJIT_DEV Quantizer(const BesideCodes& beside, const Codebook& book)
      : beside_(beside), book_(book) {
    has_book_ = kPairs && beside.book != nullptr;
    has_zeros_ = kIntegers && beside.zeros.dtype != Numbers::kNone;
    largest_ = has_book_ ? book.largest() : kLargestCode<Codes>;
    least_ = -largest_ - (has_zeros_ ? 1.0f : 0.0f);
  }

  // to = the codes of row[0, N), which is overwritten, and stores their numbers. By a warp.
  template <int N>
  FAJIT_DEV void store_row(float* row, unsigned char* to, int64_t page, int64_t slot, int64_t head,
                           int lane) const {
    const bool own = beside_.scales.groups > 0;
    const int groups = own ? beside_.scales.groups : 1, count = N / groups;
    int width = 32;  // lanes of a group
    while (width > 1 && width * groups > 32) width /= 2;
    for (int first = 0; first < groups; first += 32 / width) {
      const int g = first + lane / width;
      const Group group{row + g * count, lane % width, g < groups ? count : 0, width};
      Pair numbers{1.0f, -0.0f};  // x + -0 is x
      if (own) numbers = put_numbers(group, page, slot, head, g);
      for (int i = group.first; i < group.end; i += width)
        group.x[i] = as_float(code(group.x[i] / numbers.scale + numbers.zero));
    }
    __syncwarp();
    for (int i = lane; i < (kPairs ? N / 2 : N); i += 32) {
      uint32_t bits = as_int(row[i]);
      if constexpr (kPairs) bits |= as_int(row[i + N / 2]) << 4;
      to[i] = static_cast<unsigned char>(bits);
    }
  }

 private:
  static constexpr bool kPairs = same<Codes, Int4Codes>;
  static constexpr bool kIntegers = kPairs || same<Codes, Int8Codes>;

  // Numbers of which a lane has x[first], x[first + width], ...
  struct Group {
    float* x;
    int first, end, width;

    template <class T, class Join>
    FAJIT_DEV T join_lanes(T own, Join join) const {
      for (int mask = width / 2; mask > 0; mask /= 2)
        own = join(own, ops::from_lane_xor(own, mask));
      return own;
    }
  };
  struct Pair { float scale, zero; };

  // Computes and stores the scale of a group, and its zero point.
  FAJIT_DEV Pair put_numbers(const Group& group, int64_t page, int64_t slot, int64_t head,
                             int g) const {
    constexpr int32_t infinite = 0x7f800000;
    int32_t top = 0;  // bits of magnitudes, which are ordered as these are, NaN last
    float low = math::kInf, high = -math::kInf;
    for (int i = group.first; i < group.end; i += group.width) {
      top = max(top, as_int(group.x[i]) & 0x7fffffff);
      low = fminf(low, group.x[i]);
      high = fmaxf(high, group.x[i]);
    }
    top = group.join_lanes(top, [](int32_t a, int32_t b) { return max(a, b); });
    float span = as_float(top), steps = largest_;
    if (has_zeros_) {
      low = group.join_lanes(low, [](float a, float b) { return fminf(a, b); });
      high = group.join_lanes(high, [](float a, float b) { return fmaxf(a, b); });
      steps = largest_ - least_;
      span = fmaxf(high - low, span * (steps / 1024.0f));
    }
    if (top >= infinite || span == math::kInf) span = as_float(0x7fc00000);
    const bool writes = group.first == 0 && group.end > 0;
    const float scale = beside_.scales.put(span / steps, beside_.scales.at(page, slot, head), g,
                                           writes, [&](float s) { return s * steps < span; });
    if (!has_zeros_) return {scale, -0.0f};
    const float wanted = least_ - low / scale;
    const float zero = beside_.zeros.put(wanted - wanted == 0.0f ? wanted : 0.0f,
                                         beside_.zeros.at(page, slot, head), g, writes,
                                         [](float) { return false; });
    return {scale, zero};
  }

  // The code nearest to x, which is clamped; NaN becomes that of 0.
  FAJIT_DEV uint32_t code(float x) const {
    x = x == x ? fminf(fmaxf(x, least_), largest_) : 0.0f;
    if constexpr (kIntegers) {
      if (has_book_) return book_.nearest(x);
      constexpr float whole = 0x1.8p23f;  // its ulp is 1
      return as_int(x + whole) - as_int(whole) + (kPairs ? 8 : 0);
    } else if constexpr (same<Codes, E4m3Codes>) {
      return small_float_bits<3, 7>(x);
    } else {
      return small_float_bits<2, 15>(x);
    }
  }

  const BesideCodes& beside_;
  const Codebook& book_;
  bool has_book_, has_zeros_;
  float least_, largest_;
};

}  // namespace fajit::cuda
