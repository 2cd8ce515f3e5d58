// Rows of floats to codes of 8 bits: `Format.quantize` of flashattn_jit/formats.py, bit for bit.
#pragma once
#include <fajit/abi.h>
#include <fajit/cpu/vector/load_row.h>

namespace fajit {

template <class T>
constexpr bool kIsCode = same<T, int8_t> || same<T, e4m3_t> || same<T, e5m2_t>;
template <class T>
constexpr float kLargestCode = same<T, int8_t>   ? 127.0f
                               : same<T, e4m3_t> ? 448.0f
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

// The codes nearest to x, which is clamped to the largest code; NaN becomes 0.
template <class T>
FAJIT_INLINE vb codes(vf x) {
  const vf largest = splat(kLargestCode<T>);
  x = x == x ? x : vf{};
  x = x > largest ? largest : x;
  x = x < -largest ? -largest : x;
  if constexpr (same<T, int8_t>) {
    const vf whole = splat(0x1.8p23f);  // its ulp is 1
    return __builtin_convertvector((vu)(x + whole) - (vu)whole, vb);
  } else if constexpr (same<T, e4m3_t>) {
    return __builtin_convertvector(small_float_bits<3, 7>(x), vb);
  } else {
    return __builtin_convertvector(small_float_bits<2, 15>(x), vb);
  }
}

// Scales [page, slot, head] of a cache, written beside its codes. Strides in bytes; sizes[3] is the
// dtype. Without one (0), rows are at the scale of the codes already.
class ScalePages {
 public:
  enum Dtype { kNone, kFloat, kHalf, kBfloat16 };

  explicit ScalePages(const fajit_tensor& t) : t_(t), dtype_(Dtype(t.sizes[3])) {}

  bool has_scales() const { return dtype_ != kNone; }

  // Stores the least scale for rows of this largest magnitude, and returns it: codes never exceed
  // the largest. NaN stays NaN.
  float put(float magnitude, float largest_code, int64_t page, int64_t slot, int64_t head) const {
    char* const at = static_cast<char*>(const_cast<void*>(t_.ptr)) + page * t_.strides[0] +
                     slot * t_.strides[1] + head * t_.strides[2];
    const float exact = magnitude / largest_code;
    const auto up = [&](float stored) { return stored * largest_code < magnitude; };
    if (dtype_ == kFloat) {
      uint32_t bits = as_bits(exact);
      bits += up(exact);
      __builtin_memcpy(at, &bits, sizeof bits);
      return as_float(int32_t(bits));
    }
    const auto widened = [&](uint16_t bits) {
      return dtype_ == kHalf ? half_to_float(bits) : bfloat16_to_float(bits);
    };
    uint16_t bits =
        (dtype_ == kHalf ? float_to_half(splat(exact)) : float_to_bfloat16(splat(exact)))[0];
    bits += up(widened(bits));
    __builtin_memcpy(at, &bits, sizeof bits);
    return widened(bits);
  }

 private:
  static uint32_t as_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof x);
    return bits;
  }

  const fajit_tensor& t_;
  const Dtype dtype_;
};

// dst[0, N) = the codes of row[0, N), whose scale is stored where there are scales. `row` has room
// for N rounded up to kLanes.
template <class T, int N>
FAJIT_INLINE void store_codes(float* row, T* dst, const ScalePages& scales, int64_t page,
                              int64_t slot, int64_t head) {
  constexpr int whole = N / kLanes * kLanes, padded = round_up(N, kLanes);
  for (int i = N; i < padded; ++i) row[i] = 0.0f;
  float scale = 1.0f;
  if (scales.has_scales()) {
    vf largest{}, finite{};  // finite: NaN where a value is not
    for (int i = 0; i < padded; i += kLanes) {
      const vf x = load(row + i);
      largest = max(largest, abs(x));
      finite += x * 0.0f;
    }
    const float magnitude = reduce_max(largest) + reduce_add(finite);
    scale = scales.put(magnitude, kLargestCode<T>, page, slot, head);
  }
  for (int i = 0; i < whole; i += kLanes)
    store(reinterpret_cast<uint8_t*>(dst) + i, codes<T>(load(row + i) / scale));
  if constexpr (whole < N) {
    const vb tail = codes<T>(load(row + whole) / scale);
    __builtin_memcpy(dst + whole, &tail, N - whole);
  }
}

}  // namespace fajit
