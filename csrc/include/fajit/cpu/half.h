// 16- and 8-bit floating-point storage as fp32, one value at a time.
#pragma once
#include <fajit/cpu/vec.h>

namespace fajit {

FAJIT_INLINE float bfloat16_to_float(uint16_t x) { return as_float(static_cast<int32_t>(static_cast<uint32_t>(x) << 16)); }

// One vcvtph2ps with F16C, else the compiler's software conversion.
FAJIT_INLINE float half_to_float(uint16_t x) {
  return static_cast<float>(__builtin_bit_cast(_Float16, x));
}

FAJIT_INLINE float e5m2_to_float(uint8_t x) { return half_to_float(static_cast<uint16_t>(x << 8)); }

// e4m3 "fn" (OCP FP8): bias 7, no infinities, NaN is 0x7f / 0xff. Moving the bits into an fp32 and
// scaling by 2^(127 - 7) is exact for normal and subnormal values alike.
FAJIT_INLINE float e4m3_to_float(uint8_t x) {
  const int32_t magnitude = x & 0x7f, sign = static_cast<int32_t>(static_cast<uint32_t>(x & 0x80) << 24);
  const float value = as_float(magnitude << 20) * 0x1p120f;
  return as_float(as_int(magnitude == 0x7f ? __builtin_nanf("") : value) | sign);
}

}  // namespace fajit
