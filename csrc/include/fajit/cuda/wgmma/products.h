// The two products of a tile by wgmma, m64nNk16: A is Q in shared memory, or P in registers.
//
// An operand in shared memory is named by a descriptor: its address, two strides and the swizzle
// (PTX ISA, "Matrix Descriptor Format"; all in units of 16 bytes). In panels of 128-byte rows,
//   Q, K   K-major: 8 rows are 1024 bytes apart from the next 8 (stride). A step of 16 columns is
//          32 bytes further in the row, 4 steps make a panel.
//   V      MN-major (rows are keys, transposed): 8 keys are 1024 bytes apart (stride), panels of 64
//          columns by the size of a panel (leading). A step of 16 keys is 2048 bytes.
// Only the address field changes from step to step, so a step is one addition.
//
// `Wgmma` has the instructions: see templates/cuda/_wgmma.cu.j2.
#pragma once
#include <fajit/cuda/ptx/warpgroup.h>
#include <fajit/cuda/tile/element.h>
#include <fajit/cuda/tile/panel_layout.h>

namespace fajit::cuda {

FAJIT_DEV uint64_t operand(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t{stride_bytes >> 4} << 32 | uint64_t{leading_bytes >> 4} << 16 |
         (address & 0x3ffff) >> 4;
}

constexpr uint32_t kPatternBytes = 8 * kPanelRowBytes;  // the swizzle repeats

// Starts s = Q K^T: 64 rows of Q at `q` and the keys at `k`, shared memory addresses.
template <class Wgmma, class QLayout, class KLayout, int kN>
FAJIT_DEV void start_scores(float (&s)[1][kN][4], uint32_t q, uint32_t k) {
  const uint64_t a = operand(q, 0, kPatternBytes), b = operand(k, 0, kPatternBytes);
#pragma unroll
  for (int step = 0; step < QLayout::kDim / 16; ++step) {
    const int panel = step / 4, at = step % 4 * 32;
    Wgmma::scores(s, a + ((panel * QLayout::kPanelBytes + at) >> 4),
                  b + ((panel * KLayout::kPanelBytes + at) >> 4), step != 0);
  }
}

// Starts o += P V for the values at `v`.
template <class Wgmma, class VLayout, int kN, int kD>
FAJIT_DEV void start_values(float (&o)[1][kD][4], const uint32_t (&p)[kN / 2][4], uint32_t v) {
  const uint64_t b = operand(v, VLayout::kPanelBytes, kPatternBytes);
#pragma unroll
  for (int step = 0; step < kN / 2; ++step)
    Wgmma::values(o, p[step], b + ((step * 2 * kPatternBytes) >> 4), 1);
}

// Weights rounded to Element as the A operand of start_values: the accumulators of two adjacent
// blocks of 8 keys are one step.
template <class Element, int kN>
FAJIT_DEV void pack_weights(uint32_t (&p)[kN / 2][4], const float (&s)[1][kN][4]) {
#pragma unroll
  for (int i = 0; i < 2 * kN; ++i) {
    const float (&block)[4] = s[0][i / 2];
    p[i / 4][i % 4] = Element::pack(block[i % 2 * 2], block[i % 2 * 2 + 1]);
  }
}

}  // namespace fajit::cuda
