// The 16-bit types that matrix instructions multiply.
#pragma once
#include <fajit/cuda/ptx/device.h>

namespace fajit::cuda {

struct Bfloat16 {
  static constexpr bool kBfloat16 = true;
  uint16_t bits;

  static FAJIT_DEV float to_float(uint16_t bits) { return __uint_as_float(uint32_t{bits} << 16); }
  // Two values, rounded to nearest even, as one word; `low` in the low half.
  static FAJIT_DEV uint32_t pack([[maybe_unused]] float low, [[maybe_unused]] float high) {
    uint32_t word = 0;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
    return word;
  }
};

struct Float16 {
  static constexpr bool kBfloat16 = false;
  uint16_t bits;

  static FAJIT_DEV float to_float(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  static FAJIT_DEV uint32_t pack([[maybe_unused]] float low, [[maybe_unused]] float high) {
    uint32_t word = 0;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#elif defined(__CUDA_ARCH__)
    uint16_t a, b;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(a) : "f"(low));
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(high));
    word = uint32_t{a} | uint32_t{b} << 16;
#endif
    return word;
  }
};

template <class Element>
FAJIT_DEV uint16_t round_to(float x) {
  return static_cast<uint16_t>(Element::pack(x, 0.0f));
}

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

}  // namespace fajit::cuda
