// The approximations of the special-function unit, and bit casts of floats. On the host, for tests,
// the exact function is used instead.
#pragma once
#include <fajit/function.h>
#include <stdint.h>

namespace fajit {

FAJIT_FN int32_t as_int(float x) { return __builtin_bit_cast(int32_t, x); }
FAJIT_FN float as_float(int32_t x) { return __builtin_bit_cast(float, x); }

namespace math {

// 2^x, 2 ulp; results below 2^-126 are 0.
FAJIT_FN float approx_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  const float r = __builtin_exp2f(x);
  return r < 0x1p-126f ? 0.0f : r;
#endif
}

// 1 / x, 1 ulp; 0 beyond 2^126.
FAJIT_FN float approx_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  const float r = 1.0f / x;
  return __builtin_fabsf(r) < 0x1p-126f ? __builtin_copysignf(0.0f, r) : r;
#endif
}

// tanh(x), relative error at most 2^-11; on sm_75 and later.
FAJIT_FN float approx_tanh(float x) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return __builtin_tanhf(x);
#endif
}

}  // namespace math
}  // namespace fajit
