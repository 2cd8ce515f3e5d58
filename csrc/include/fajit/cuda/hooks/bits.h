// Bits of floats, on the device and on the host.
#pragma once
#include <fajit/function.h>
#include <stdint.h>

namespace fajit {

FAJIT_FN int32_t as_int(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_int(x);
#else
  int32_t r;
  __builtin_memcpy(&r, &x, sizeof r);
  return r;
#endif
}
FAJIT_FN float as_float(int32_t x) {
#if defined(__CUDA_ARCH__)
  return __int_as_float(x);
#else
  float r;
  __builtin_memcpy(&r, &x, sizeof r);
  return r;
#endif
}

}  // namespace fajit
