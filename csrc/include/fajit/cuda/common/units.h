// The factors between Q K^T and the softmax, which the host computes: as kernel parameters they are
// operands in the constant bank, and occupy no register.
#pragma once
#include <fajit/context.h>
#include <fajit/types.h>

namespace fajit::cuda {

#define FAJIT_INF __int_as_float(0x7f800000)

// Q is multiplied by `query` before the products and scores by `score` before the hooks; a score s
// has the weight 2^(s * exponent - max).
//   no hook                  the scale is folded into the multiply-add of the exponent, where a
//                            factor of 0 or less would not keep the order of the scores, so its
//                            sign goes to Q: (sign of scale, 1, |scale| log2 e); with a scale of 0,
//                            (0, 1, log2 e)
//   kRaw: a score_mod        likewise; the hook has scores before the scale, knows the scale, and
//                            gives multiples of its own unit: (sign of scale, 1, unit log2 e)
//   other hooks              pointwise functions and C++ texts see natural units:
//                            (1, scale, log2 e)
//
// far: see OnlineSoftmax.
struct Units { float query, score, exponent, far; };

// The factor of an exponent is not 0, for -inf times 0 is NaN. Smaller units count as this one.
constexpr float kLeastUnit = 0x1p-100f;

// The unit of a hook's result that is a multiple of `factor`, or of -factor.
FAJIT_FN float result_unit(float factor) {
  const float unit = __builtin_fabsf(factor);
  return unit < kLeastUnit ? kLeastUnit : unit;
}
// The natural value of a score of 1 before the scale, whose sign goes to Q.
FAJIT_FN float score_unit(float scale) { return scale == 0.0f ? 1.0f : result_unit(scale); }

FAJIT_FN Units units_with(float query, float score, float exponent) {
  const float far = 0x1p16f / exponent;
  return {query, score, exponent, far < 0x1p127f ? far : 0x1p127f};
}

// c: with the hooks' uniforms.
template <class Hooks>
FAJIT_FN Units units_of(float scale, const Context& c) {
  const bool folded = Hooks::kRaw || !(Hooks::kScore || Hooks::kPointwise);
  if (!folded) return units_with(1.0f, scale, kLog2e);
  float unit = score_unit(scale);
  if constexpr (Hooks::kRaw) unit = Hooks::unit(c);
  const float sign = scale > 0.0f ? 1.0f : scale < 0.0f ? -1.0f : scale;
  return units_with(sign, 1.0f, unit * kLog2e);
}

}  // namespace fajit::cuda
