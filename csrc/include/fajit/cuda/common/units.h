// The factors between Q K^T and the softmax, which the host computes: as kernel parameters they are
// operands in the constant bank, and occupy no register.
#pragma once
#include <fajit/context.h>

namespace fajit::cuda {

constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;
#define FAJIT_INF __int_as_float(0x7f800000)

// Q is multiplied by `query` before the products and scores by `score` before the hooks; a score s
// has the weight 2^(s * exponent - max).
//   score_mod or pointwise   hooks see natural units: (1, scale, log2 e)
//   else                     the scale is folded into the multiply-add of the exponent, where a
//                            factor of 0 or less would not keep the order of the scores, so its
//                            sign goes to Q: (sign of scale, 1, |scale| log2 e); with a scale of 0,
//                            (0, 1, log2 e)
struct Units { float query, score, exponent; };

template <class Hooks>
FAJIT_FN Units units_of(float scale) {
  if (Hooks::kScore || Hooks::kPointwise) return {1.0f, scale, kLog2e};
  if (scale > 0.0f) return {1.0f, 1.0f, scale * kLog2e};
  if (scale < 0.0f) return {-1.0f, 1.0f, -scale * kLog2e};
  return {scale, 1.0f, kLog2e};  // 0
}

}  // namespace fajit::cuda
