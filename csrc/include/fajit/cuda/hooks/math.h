// Elementary functions of hooks, on float and double.
#pragma once
#include <fajit/cuda/hooks/bits.h>
#include <math.h>

namespace fajit {
namespace math {

constexpr float kInf = __builtin_inff();

#define FAJIT_MATH(name, f32, f64)                     \
  FAJIT_FN float name(float x) { return ::f32(x); }    \
  FAJIT_FN double name(double x) { return ::f64(x); }
FAJIT_MATH(abs, fabsf, fabs)
FAJIT_MATH(floor, floorf, floor)
FAJIT_MATH(ceil, ceilf, ceil)
FAJIT_MATH(round, rintf, rint)
FAJIT_MATH(trunc, truncf, trunc)
FAJIT_MATH(sqrt, sqrtf, sqrt)
FAJIT_MATH(exp, expf, exp)
FAJIT_MATH(exp2, exp2f, exp2)
FAJIT_MATH(expm1, expm1f, expm1)
FAJIT_MATH(log, logf, log)
FAJIT_MATH(log2, log2f, log2)
FAJIT_MATH(log10, log10f, log10)
FAJIT_MATH(log1p, log1pf, log1p)
FAJIT_MATH(tanh, tanhf, tanh)
FAJIT_MATH(sin, sinf, sin)
FAJIT_MATH(cos, cosf, cos)
FAJIT_MATH(tan, tanf, tan)
FAJIT_MATH(asin, asinf, asin)
FAJIT_MATH(acos, acosf, acos)
FAJIT_MATH(atan, atanf, atan)
FAJIT_MATH(sinh, sinhf, sinh)
FAJIT_MATH(cosh, coshf, cosh)
FAJIT_MATH(erf, erff, erf)
#undef FAJIT_MATH
FAJIT_FN float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }
FAJIT_FN double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
FAJIT_FN float pow(float x, float y) { return ::powf(x, y); }
FAJIT_FN double pow(double x, double y) { return ::pow(x, y); }
FAJIT_FN float atan2(float y, float x) { return ::atan2f(y, x); }
FAJIT_FN double atan2(double y, double x) { return ::atan2(y, x); }
FAJIT_FN float fmod(float x, float y) { return ::fmodf(x, y); }
FAJIT_FN double fmod(double x, double y) { return ::fmod(x, y); }

}  // namespace math
}  // namespace fajit
