// Trigonometric functions of hooks. Included by math.h, whose header comment holds here too.
#pragma once
#include <fajit/cuda/hooks/math.h>

namespace fajit {
namespace math {

// --- sin, cos, tan ----------------------------------------------------------------------------

// x = quadrant * pi / 2 + r, |r| <= pi / 4.
struct Quadrant {
  float r;
  int32_t q;
};

// Up to this |x|, three float parts of pi / 2 suffice; larger arguments are rare.
constexpr float kReduceLimit = 105615.0f;

// Reduction up to 2^50, in double: fused products are exact, so two parts leave an error of n *
// 2^-107. NaN beyond, where adjacent floats are 2^27 apart. Kept short, because it is inlined at
// each use.
FAJIT_FN Quadrant reduce_large(float x) {
  const double wide = x;
  const double n = __builtin_rint(wide * 0.63661977236758134);
  const double near = __builtin_fma(n, -0x1.921fb54442d18p+0, wide);
  const double r = __builtin_fma(n, -0x1.1a62633145c07p-54, near);
  return {abs(x) < 0x1p50f ? float(r) : __builtin_nanf(""), int32_t(int64_t(n))};
}

FAJIT_FN Quadrant reduce_quadrant(float x) {
  if (abs(x) > kReduceLimit) return reduce_large(x);
  constexpr float kShift = 12582912.0f;
  const float shifted = fma(x, 0.636619747f, kShift), n = shifted - kShift;
  const float r = fma(n, -5.39030253e-15f, fma(n, -7.54978942e-8f, fma(n, -1.57079625f, x)));
  return {r, as_int(shifted)};  // the low bits are n
}

FAJIT_FN float sin_poly(float r) {
  const float u = r * r;
  return fma(r * u, poly(u, 2.83281042e-6f, -1.98530775e-4f, 8.33337940e-3f, -0.166666672f), r);
}
FAJIT_FN float cos_poly(float r) {
  const float u = r * r;
  return fma(u * u, poly(u, 2.44306684e-5f, -1.38873013e-3f, 4.16666456e-2f), fma(-0.5f, u, 1.0f));
}
// sin(quadrant * pi / 2 + r).
FAJIT_FN float sin_quadrant(float r, int32_t q) {
  const float v = (q & 1) != 0 ? cos_poly(r) : sin_poly(r);
  return as_float(as_int(v) ^ int32_t(uint32_t(q & 2) << 30));
}

FAJIT_FN float sin(float x) {
  const Quadrant p = reduce_quadrant(x);
  return sin_quadrant(p.r, p.q);
}
FAJIT_FN float cos(float x) {
  const Quadrant p = reduce_quadrant(x);
  return sin_quadrant(p.r, p.q + 1);
}
FAJIT_FN float tan(float x) {
  const Quadrant p = reduce_quadrant(x);
  const float s = sin_poly(p.r), c = cos_poly(p.r);
  const bool odd = (p.q & 1) != 0;
  return quotient(odd ? -c : s, odd ? s : c);
}

// --- inverse functions ------------------------------------------------------------------------

// asin on [-0.5, 0.5].
FAJIT_FN float asin_poly(float x) {
  const float u = x * x;
  return fma(x * u,
             poly(u, 3.76983769e-2f, 1.43141244e-2f, 3.18391919e-2f, 4.45133708e-2f, 7.50052184e-2f,
                  0.166666597f),
             x);
}
// Out of [-1, 1] the square root is NaN.
FAJIT_FN float asin(float x) {
  const float a = abs(x);
  const float half = asin_poly(sqrt(fma(-0.5f, a, 0.5f)));
  const float big = 1.57079637f - fma(2.0f, half, 4.37113883e-8f);
  return a <= 0.5f ? asin_poly(x) : copysign(big, x);
}
FAJIT_FN float acos(float x) {
  const float a = abs(x);
  const float half = 2.0f * asin_poly(sqrt(fma(-0.5f, a, 0.5f)));
  const float outer = x < 0.0f ? 3.14159274f - (half + 8.74227766e-8f) : half;
  return a <= 0.5f ? 1.57079637f - (asin_poly(x) + 4.37113883e-8f) : outer;
}

// atan(num / den) for 0 <= num, 0 <= den, not both zero or infinite, den at most 2^125. Folded at
// tan(pi / 8) and tan(3 pi / 8), before dividing, so that there is one division.
FAJIT_FN float atan_ratio(float num, float den) {
  const bool high = num > 2.41421356f * den, mid = num > 0.414213562f * den;
  const float top = high ? -den : (mid ? num - den : num);
  const float bottom = high ? num : (mid ? num + den : den);
  const float base = high ? 1.57079637f : (mid ? 0.785398185f : 0.0f);
  // The rounding error of the base.
  const float low = high ? -4.37113883e-8f : (mid ? -2.18556941e-8f : 0.0f);
  const float t = quotient(top, bottom), u = t * t;
  const float tail =
      fma(t * u, poly(u, -6.08885586e-2f, 0.105987556f, -0.142443463f, 0.199985266f, -0.333333164f),
          low);
  return base + (t + tail);
}
FAJIT_FN float atan(float x) {
  const float a = abs(x);
  // Huge arguments become 1 / 0, because infinity / 1 cannot be folded.
  const bool huge = a > 1e30f;
  return copysign(atan_ratio(huge ? 1.0f : a, huge ? 0.0f : 1.0f), x);
}
FAJIT_FN float atan2(float y, float x) {
  float num = abs(y), den = abs(x);
  // Equal infinities and equal zeros: 45 and 0 degrees.
  const bool both_inf = num == kInf && den == kInf, both_zero = num == 0.0f && den == 0.0f;
  num = both_inf ? 1.0f : num;
  den = both_inf || both_zero ? 1.0f : den;
  const bool inf_num = num == kInf, inf_den = den == kInf;
  // Scaling by a power of two keeps both folds inside the range.
  const bool big = num > 0x1p100f || den > 0x1p100f, tiny = num < 0x1p-60f && den < 0x1p-60f;
  const float k = big ? 0x1p-28f : (tiny ? 0x1p60f : 1.0f);
  num = inf_num ? 1.0f : (inf_den ? 0.0f : num * k);
  den = inf_den ? 1.0f : (inf_num ? 0.0f : den * k);
  const float v = atan_ratio(num, den);
  // Tests the sign bit of x, so that -0 counts as negative.
  const float turned = as_int(x) < 0 ? 3.14159274f - (v + 8.74227766e-8f) : v;
  return x == x && y == y ? copysign(turned, y) : x + y;
}

// --- double -----------------------------------------------------------------------------------

#define FAJIT_DOUBLE(name) \
  FAJIT_FN double name(double x) { return __builtin_##name(x); }
FAJIT_DOUBLE(asin)
FAJIT_DOUBLE(acos)
FAJIT_DOUBLE(atan)
#undef FAJIT_DOUBLE
FAJIT_FN double atan2(double y, double x) { return __builtin_atan2(y, x); }

// CUDA's sin, cos and tan of doubles use an array in local memory for huge arguments. Here: three
// parts of pi / 2, products as exact pairs; NaN beyond 2^50.
struct WideQuadrant {
  double r;
  int32_t q;
};
FAJIT_FN WideQuadrant reduce_quadrant(double x) {
  if (!(__builtin_fabs(x) < 0x1p50)) return {__builtin_nan(""), 0};
  const double n = __builtin_rint(x * 0.63661977236758134);
  constexpr double kHigh = 0x1.921fb54442d18p+0, kMiddle = 0x1.1a62633145c07p-54,
                   kLow = -0x1.f1976b7ed8fbcp-110;
  const double p = n * kHigh, p_low = __builtin_fma(n, kHigh, -p);
  const double m = n * kMiddle, m_low = __builtin_fma(n, kMiddle, -m);
  const double a = x - p;  // exact
  const double b = a - p_low, b_low = (a - b) - p_low;
  const double c = b - m, c_low = (b - c) - m;
  const double low = b_low + c_low - m_low - n * kLow;
  return {c + low, int32_t(int64_t(n - 4.0 * __builtin_floor(n * 0.25)))};
}
FAJIT_FN double sin_wide(double r, int32_t q) {
  const double u = r * r;
  double s = 1.58969099521155010221e-10, c = -1.13596475577881948265e-11;
  s = __builtin_fma(s, u, -2.50507602534068634195e-08);
  s = __builtin_fma(s, u, 2.75573137070700676789e-06);
  s = __builtin_fma(s, u, -1.98412698298579493134e-04);
  s = __builtin_fma(s, u, 8.33333333332248946124e-03);
  s = __builtin_fma(s, u, -1.66666666666666324348e-01);
  s = __builtin_fma(s * u, r, r);
  c = __builtin_fma(c, u, 2.08757232129817482790e-09);
  c = __builtin_fma(c, u, -2.75573143513906633035e-07);
  c = __builtin_fma(c, u, 2.48015872894767294178e-05);
  c = __builtin_fma(c, u, -1.38888888888741095749e-03);
  c = __builtin_fma(c, u, 4.16666666666666019037e-02);
  c = __builtin_fma(c, u, -0.5);
  c = __builtin_fma(c, u, 1.0);
  const double v = (q & 1) != 0 ? c : s;
  return (q & 2) != 0 ? -v : v;
}
FAJIT_FN double sin(double x) {
  const WideQuadrant p = reduce_quadrant(x);
  return sin_wide(p.r, p.q);
}
FAJIT_FN double cos(double x) {
  const WideQuadrant p = reduce_quadrant(x);
  return sin_wide(p.r, p.q + 1);
}
FAJIT_FN double tan(double x) {
  const WideQuadrant p = reduce_quadrant(x);
  return sin_wide(p.r, p.q) / sin_wide(p.r, p.q + 1);
}

}  // namespace math
}  // namespace fajit
