// cap * tanh(x) as a term of a score, where the host knows the cap: `tanh` with a small absolute
// error, which takes half the instructions of one with a small relative error.
//
//   cap * tanh(x) = 2 |cap| (r - 1/2),    r = 1 / (1 + 2^y),    y = -2 log2(e) sign(cap) x
//
// 2 |cap| is a unit of scores and 1/2 goes to the base of the softmax (`Hooks::line`), so a score
// costs r: a product, a power of two, a sum, and a reciprocal, which two scores of a row share.
//
// The error of r, of |r| <= 1 and with u = 2^-24 (half an ulp of numbers in [1, 2), relative):
//
//   y       the host's factor 2u, the product u, both relative: |y| r (1 - r) ln 2 <= 0.224,
//           so                                                                       0.68 u
//   2^y     ex2.approx: 2 ulp, 4u of e; e / (1 + e)^2 <= 1/4:                         1.00 u
//   1 + e   u of the sum, for both scores of the pair: r b has the factors
//           (1 + u) of a, and none of b, which cancels:                              1.00 u
//   a b     u; its reciprocal, 1 ulp: 2u; the product with b: u:                     4.00 u
//
// together 6.7 u, below 2^-21. The error of a score is 2 |cap| times that, below |cap| 2^-20:
// 3e-5 for a cap of 30. Caps up to 2^8 have it: 2^-12 of a weight, which is rounded by up to
// 2^-12 (float16) or 2^-9 (bfloat16) for the second product. Beyond, tiles take the other form.
//
// y is at most 60, so that a b < 2^121 is finite and r is at least 2^-60. NaN remains NaN, in both
// scores of the pair: a row with one such score is NaN in any case.
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
