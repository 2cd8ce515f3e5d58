// Bytes and halves of registers. Each function is one instruction.
#pragma once
#include <fajit/cuda/ptx/device.h>

namespace fajit::ptx {

// Four bytes of b:a, picked by the nibbles of `order`, the lowest byte first.
FAJIT_DEV uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t order) {
  uint32_t picked;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(a), "r"(b), "r"(order));
  return picked;
}

// a b + c of two values each, rounded once.
template <class Element>
FAJIT_DEV uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d = 0;
  if constexpr (!Element::kBfloat16) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else if constexpr (kArch >= 80) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

}  // namespace fajit::ptx
