// Matrix instructions of one warp: ldmatrix and mma.sync. Fragment layouts: PTX ISA, "Matrix
// Fragments for mma.m16n8k16 with floating point type".
//
//   A  16 x 16, row r, column k   a0: r = l/4, k = 2(l%4)..   a1: r + 8   a2: k + 8   a3: both
//   B  16 x 8, row k, column n    b0: k = 2(l%4).., n = l/4   b1: k + 8
//   C  16 x 8                     c0, c1: r = l/4, n = 2(l%4), + 1        c2, c3: r + 8
//
// with lane l; each 32-bit register of A and B holds two adjacent 16-bit values, the first in the
// low half.
#pragma once
#include <fajit/cuda/ptx/device.h>

namespace fajit::ptx {

// Four 8 x 8 matrices of 16-bit values. Lane l gives the address of row l % 8 of matrix l / 8.
FAJIT_DEV void load_matrices(uint32_t (&m)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row_address)
               : "memory");
}

// load_matrices with each matrix transposed.
FAJIT_DEV void load_matrices_transposed(uint32_t (&m)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row_address)
               : "memory");
}

// c += A B for 16-bit operands of type `Element`, accumulated in fp32.
template <class Element>
FAJIT_DEV void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (Element::kBfloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#elif defined(__CUDA_ARCH__)
  // sm_75 multiplies 8 columns of A at a time, and fp16 only.
  static_assert(!Element::kBfloat16, "bfloat16 needs sm_80");
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

}  // namespace fajit::ptx
