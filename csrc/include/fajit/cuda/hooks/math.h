// Elementary functions of hooks on float and double, without local memory or tables; those of float
// have no branches, but for sin, cos and tan of large arguments.
//
// float: at most 4 ulp from the correctly rounded result (`tanh_approx`: 2^-11), IEEE results for
// infinities, NaN and out-of-range arguments; results below 2^-126 may be 0. Divisions and square
// roots in hooks are IEEE's, those inside these functions within 1 ulp. double: CUDA's own
// functions, which branch.
//
// Coefficients: minimax fits (iteratively reweighted least squares, low orders rounded first);
// those of fajit/cpu/vector/fast_math.h, except where the special-function unit allows a shorter
// form.
#pragma once
#include <fajit/cuda/hooks/approx.h>

namespace fajit {
namespace math {

constexpr float kInf = __builtin_inff();

FAJIT_FN float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FAJIT_FN float abs(float x) { return __builtin_fabsf(x); }
FAJIT_FN double abs(double x) { return __builtin_fabs(x); }
FAJIT_FN float copysign(float x, float s) { return __builtin_copysignf(x, s); }
FAJIT_FN double copysign(double x, double s) { return __builtin_copysign(x, s); }
FAJIT_FN float trunc(float x) { return __builtin_truncf(x); }
FAJIT_FN double trunc(double x) { return __builtin_trunc(x); }
FAJIT_FN float sqrt(float x) { return __builtin_sqrtf(x); }

// Highest order first: c0 x^n + c1 x^(n-1) + ... + cn.
template <class... C>
FAJIT_FN float poly(float x, float c0, C... rest) {
  ((c0 = fma(c0, x, rest)), ...);
  return c0;
}

// x limited to [low, high]; NaN becomes one of them.
FAJIT_FN float clamp(float x, float low, float high) {
  return __builtin_fmaxf(low, __builtin_fminf(high, x));
}

// a / b for normal b inside +-2^126, 1 ulp.
FAJIT_FN float quotient(float a, float b) {
  const float r = approx_reciprocal(b), q = a * r;
  return fma(fma(-q, b, a), r, q);
}

// --- exponentials -----------------------------------------------------------------------------

// n = x rounded to an integer, and 2^n, for -126 <= x <= 127: adding 1.5 * 2^23 puts the integer
// into the low bits, and adding 127 makes it a biased exponent.
struct Power { float n, two_n; };
FAJIT_FN Power integral_power(float x) {
  constexpr float kShift = 12582912.0f + 127.0f;
  const float shifted = x + kShift;
  return {shifted - kShift, as_float(int32_t(uint32_t(as_int(shifted)) << 23))};
}

FAJIT_FN float exp2(float x) {
  const Power p = integral_power(clamp(x, -126.0f, 127.0f));
  return approx_exp2(x - p.n) * p.two_n;
}

// log2(e) is split in two parts, so the fraction is exact for large x too.
FAJIT_FN float exp(float x) {
  const Power p = integral_power(clamp(x * 1.44269502f, -126.0f, 127.0f));
  return approx_exp2(fma(x, 1.92596299e-8f, fma(x, 1.44269502f, -p.n))) * p.two_n;
}

// e^r - 1 for |r| <= ln 2 / 2.
FAJIT_FN float expm1_poly(float r) {
  return fma(r * r,
             poly(r, 0x1.a184a0p-13f, 0x1.6d225ep-10f, 0x1.111054p-7f, 0x1.55550cp-5f,
                  0x1.555556p-3f, 0.5f),
             r);
}
// e^y - 1 for |y| <= 87: 2^n (e^r - 1) + (2^n - 1) is exact in the second term at n = 0.
FAJIT_FN float expm1_finite(float y) {
  const Power p = integral_power(y * 1.44269502f);
  const float r = fma(p.n, 2.12194440e-4f, fma(p.n, -0.693359375f, y));
  return fma(p.two_n, expm1_poly(r), p.two_n - 1.0f);
}
FAJIT_FN float expm1(float x) {
  const float y = expm1_finite(clamp(x, -20.0f, 87.0f));
  const float r = x > 87.0f ? exp(x) : y;
  return x == 0.0f || x != x ? x : r;
}

// 3 ulp: an odd polynomial near 0, 1 - 2 / (e^2|x| + 1) elsewhere. Fourteen operations without a
// branch, two of them on the special-function unit. tanh.approx.f32 is a single one, but its
// relative error of 5e-4 is an error of 0.02 in a score capped at 50: hooks ask for it by name.
FAJIT_FN float tanh(float x) {
  const float a = abs(x), u = x * x;
  const float small =
      fma(x * u, poly(u, 1.57396831e-2f, -5.23039624e-2f, 1.33152977e-1f, -3.33327681e-1f), x);
  const float e = approx_exp2(a * 2.88539008f);
  const float big = copysign(fma(-2.0f, approx_reciprocal(e + 1.0f), 1.0f), x);
  return a < 0.55f ? small : big;
}

FAJIT_FN float tanh_approx(float x) { return approx_tanh(x); }

FAJIT_FN float sigmoid(float x) { return approx_reciprocal(1.0f + exp(-x)); }

// e^a / 2 for a >= 0, which overflows only where sinh and cosh do.
FAJIT_FN float half_exp(float a) {
  const Power p = integral_power(clamp(a * 1.44269502f, 0.0f, 127.0f));
  return approx_exp2(fma(a, 1.92596299e-8f, fma(a, 1.44269502f, -1.0f - p.n))) * p.two_n;
}
FAJIT_FN float sinh(float x) {
  const float a = abs(x), u = x * x, h = half_exp(a);
  const float small =
      fma(x * u, poly(u, 2.78224820e-6f, 1.98428927e-4f, 8.33331048e-3f, 0.166666672f), x);
  return a < 1.0f ? small : copysign(fma(-0.25f, approx_reciprocal(h), h), x);
}
FAJIT_FN float cosh(float x) {
  const float h = half_exp(abs(x));
  return fma(0.25f, approx_reciprocal(h), h);
}

// --- logarithms -------------------------------------------------------------------------------

// x = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)), for positive finite x, subnormals included.
struct LogParts { float e, f; };
FAJIT_FN LogParts split_log(float x) {
  const bool tiny = x < 0x1p-126f;
  const int32_t bits = as_int(tiny ? x * 0x1p23f : x) - 0x3f3504f3;  // sqrt(1/2)
  const float e = float((bits >> 23) - (tiny ? 23 : 0));
  return {e, as_float((bits & 0x7fffff) + 0x3f3504f3) - 1.0f};
}
// log(1 + f) - f.
FAJIT_FN float log1p_tail(float f) {
  const float p =
      poly(f, 0x1.147338p-4f, -0x1.de01dap-4f, 0x1.e6c00ap-4f, -0x1.fc28cap-4f, 0x1.233ba2p-3f,
           -0x1.555c44p-3f, 0x1.99a476p-3f, -0x1.000006p-2f, 0x1.555548p-2f);
  const float u = f * f;
  return fma(f * u, p, -0.5f * u);
}
// `value` where x is positive and finite, else the logarithm of the special value x.
FAJIT_FN float log_special(float x, float value) {
  const float r = x > 0.0f ? value : (x == 0.0f ? -kInf : __builtin_nanf(""));
  return x == kInf ? x : r;
}

FAJIT_FN float log(float x) {
  const LogParts p = split_log(x);
  const float tail = fma(p.e, -2.12194440e-4f, log1p_tail(p.f));
  return log_special(x, fma(p.e, 0.693359375f, p.f + tail));
}
FAJIT_FN float log2(float x) {
  const LogParts p = split_log(x);
  const float tail = log1p_tail(p.f);
  // log2(e) = 1 + 0.442695: the leading part of f is not rounded by a product.
  const float sum = fma(tail, 0.442695041f, p.f * 0.442695041f) + tail + p.f;
  return log_special(x, sum + p.e);
}
FAJIT_FN float log10(float x) {
  const LogParts p = split_log(x);
  const float ln = p.f + log1p_tail(p.f);
  // log10(2) in two parts; e times the first is exact.
  return log_special(x, fma(p.e, 0.301025391f, fma(ln, 0.434294482f, p.e * 4.60503907e-6f)));
}
FAJIT_FN float log1p(float x) {
  const float u = x + 1.0f;
  const LogParts p = split_log(u);
  // The rounding error of 1 + x, to first order; 0 for huge x, where u may be infinite.
  const float lost = abs(x) < 0x1p24f ? (x - (u - 1.0f)) * approx_reciprocal(u) : 0.0f;
  const float tail = log1p_tail(p.f) + fma(p.e, -2.12194440e-4f, lost);
  const float value = log_special(u, fma(p.e, 0.693359375f, p.f + tail));
  return x == 0.0f ? x : value;
}

// --- erf --------------------------------------------------------------------------------------

// Two polynomials (N. Juffa's coefficients): odd below 0.93, 1 - e^p above.
FAJIT_FN float erf(float x) {
  const float a = abs(x), s = x * x, t = a > 10.0f ? 10.0f : a;
  const float small = fma(x,
                          poly(s, -5.96761703e-4f, 4.99119423e-3f, -2.67681349e-2f, 1.12819925e-1f,
                               -3.76125336e-1f, 1.28379166e-1f),
                          x);
  const float p = poly(t, -1.72853470e-5f, 3.83197126e-4f, -3.88396438e-3f, 2.42546219e-2f,
                       -1.06777877e-1f, -6.34846687e-1f, -1.28717512e-1f);
  // The product with log2(e) is rounded, but there e^p is small compared with 1.
  const float big = 1.0f - approx_exp2(fma(p, t, -t) * 1.44269502f);
  return a < 0.927734375f ? small : copysign(big, x);
}

// --- double -----------------------------------------------------------------------------------

#define FAJIT_DOUBLE(name) \
  FAJIT_FN double name(double x) { return __builtin_##name(x); }
FAJIT_DOUBLE(exp)
FAJIT_DOUBLE(exp2)
FAJIT_DOUBLE(expm1)
FAJIT_DOUBLE(log)
FAJIT_DOUBLE(log2)
FAJIT_DOUBLE(log10)
FAJIT_DOUBLE(log1p)
FAJIT_DOUBLE(tanh)
FAJIT_DOUBLE(sinh)
FAJIT_DOUBLE(cosh)
FAJIT_DOUBLE(erf)
#undef FAJIT_DOUBLE
FAJIT_FN double tanh_approx(double x) { return tanh(x); }
FAJIT_FN double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

}  // namespace math
}  // namespace fajit

#include <fajit/cuda/hooks/pow.h>
#include <fajit/cuda/hooks/trig.h>
