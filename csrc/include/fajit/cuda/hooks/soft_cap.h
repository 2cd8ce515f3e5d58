// cap * tanh(x) as a term of a score, where the host knows the cap: by a `tanh` with a small
// absolute error, which takes half the instructions of one with a small relative error.
//
//   cap * tanh(x) = 2 |cap| (r - 1/2),   r = 1 / (1 + e),   e = 2^y,   y = -2 log2(e) sign(cap) x
//
// 2 |cap| is the unit of the scores and -1/2 goes to the base of the softmax (`Hooks::line`), so a
// score costs r alone: a product, a minimum, a power of two, a sum, and a reciprocal that two
// scores of a row share, 1 / a = b / (a b). The special-function unit computes 1.5 values for it.
//
// The absolute error of r, with u = 2^-24:
//
//   y      its factor, of the host: 4u, and the product: u; relative errors. |y| r (1 - r) ln 2 is
//          at most 0.224:                                                        1.1 u
//   e      ex2.approx: 4u, relative; e / (1 + e)^2 is at most 1/4:               1.0 u
//   1 + e  u; that of the other score of the pair cancels:                       1.0 u
//   1 / a  u of a b, 2u of rcp.approx, u of the product with b; r is at most 1:  4.0 u
//
// together less than 8u = 2^-21 (5u is the largest found by tests/codegen/test_soft_cap.py). So the
// error of a score is below |cap| 2^-20: 3e-5 for a cap of 30. Caps are small up to 2^8, where it
// is 2^-12, and so is the relative error of a weight, which is rounded by up to 2^-12 (float16) or
// 2^-9 (bfloat16) for the second product. With larger caps all tiles are handled as partial ones,
// whose `tanh` has a small relative error.
//
// y is at most 60, so that a b is finite: r is then 2^-60 too large at most. NaN remains NaN, for
// both scores of the pair; a row with one such score is NaN in any case.
#pragma once
#include <fajit/cuda/hooks/approx.h>

namespace fajit::ops {

constexpr float kTanhRate = -2.88539008f;  // -2 log2(e)

// Whether scores are exact enough with `half_tanh`; not if the cap is NaN.
FAJIT_FN bool is_small_cap(float cap) { return __builtin_fabsf(cap) <= 0x1p8f; }

// The smaller value; NaN if x is.
FAJIT_FN float least(float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
#else
  return x > y ? y : x;
#endif
}

// 1 / (1 + 2^x) and 1 / (1 + 2^y), in place: tanh(-x ln(2) / 2) / 2 + 1/2.
FAJIT_FN void half_tanh(float& x, float& y) {
  const float a = 1.0f + math::approx_exp2(least(x, 60.0f));
  const float b = 1.0f + math::approx_exp2(least(y, 60.0f));
  const float r = math::approx_reciprocal(a * b);
  x = r * b;
  y = r * a;
}

}  // namespace fajit::ops
