// Conversion of the small float types of param tensors to float.
#pragma once
#include <fajit/cuda/hooks/approx.h>
#include <stdint.h>

namespace fajit {
namespace ops {

FAJIT_FN float bfloat16_to_float(uint16_t h) { return as_float(int32_t(uint32_t(h) << 16)); }

FAJIT_FN float half_to_float(uint16_t h) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(h));
  return r;
#else
  const uint32_t magnitude = h & 0x7fff;
  const float normal = as_float(int32_t((magnitude << 13) + 0x38000000u));
  const float tiny = float(magnitude) * 0x1p-24f;
  const float special = as_float(int32_t((magnitude << 13) + 0x70000000u));
  const float r = magnitude >= 0x7c00 ? special : magnitude < 0x400 ? tiny : normal;
  return h & 0x8000 ? -r : r;
#endif
}

// float8_e4m3fn: no infinities, NaN is 0x7f.
FAJIT_FN float e4m3_to_float(uint8_t b) {
  const uint32_t magnitude = b & 0x7f;
  const float normal = as_float(int32_t((magnitude << 20) + (120u << 23)));
  const float tiny = float(magnitude) * 0x1p-9f;
  const float r = magnitude == 0x7f ? as_float(0x7fc00000) : magnitude < 8 ? tiny : normal;
  return as_float(as_int(r) | int32_t((b & 0x80u) << 24));
}
// e5m2 is the upper byte of a half.
FAJIT_FN float e5m2_to_float(uint8_t b) { return half_to_float(uint16_t(b << 8)); }

}  // namespace ops
}  // namespace fajit
