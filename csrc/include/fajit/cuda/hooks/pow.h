// pow and fmod of hooks. Included by math.h, whose header comment holds here too.
#pragma once
#include <fajit/cuda/hooks/math.h>

namespace fajit {
namespace math {

// A float and its rounding error.
struct Pair { float high, low; };

// log(x) of positive finite x to 2^-40: m = 2^e (1 + q) / (1 - q), an atanh series in pairs.
FAJIT_FN Pair log_pair(float x) {
  const LogParts parts = split_log(x);
  const float f = parts.f, d = f + 2.0f;
  const float r = quotient(1.0f, d);
  const float q = r * f;
  // f - q d, with the rounding error of d.
  const float q_low = r * fma(-q, f, fma(-2.0f, q, f));
  const float s = q * q;
  const float series =
      poly(s, 9.09090909e-2f, 1.11111111e-1f, 1.42857143e-1f, 0.2f, 3.33333333e-1f);
  // q^2 and q^3 as pairs.
  const float s_low = fma(q, q_low + q_low, fma(q, q, -s));
  const float cube = s * q;
  const float cube_low = fma(s, q_low, fma(s_low, q, fma(s, q, -cube)));
  // The rounding error of 1 / 3 matters in the cubic term.
  const float third_low = -9.93410748e-9f;
  const float tail = fma(series, cube, fma(series, cube_low, fma(third_low, cube, q_low)));
  const float twice = 2.0f * q;
  const float high = fma(0.693147182f, parts.e, twice);
  const float rest = fma(-0.693147182f, parts.e, high);
  const float low = fma(-1.90465421e-9f, parts.e, fma(2.0f, tail, twice - rest));
  const float sum = high + low;
  return {sum, (high - sum) + low};
}

// x^y for positive finite x and finite y.
FAJIT_FN float pow_positive(float x, float y) {
  const Pair log_x = log_pair(x);
  const float high = log_x.high * y;
  const float low = fma(log_x.low, y, fma(log_x.high, y, -high));
  const float r = exp(high);
  // e^(high + low); r is 0 or infinite where the product is out of range, and low may be anything.
  return r > 0.0f && r < kInf ? fma(r, low, r) : r;
}

// x^y for any arguments; `positive` is |x|^y, used where both are finite and x is not 0.
template <class T>
FAJIT_FN T pow_special(T x, T y, T positive) {
  constexpr T inf = kInf;
  const T a = abs(x), b = abs(y);
  const bool integral = trunc(y) == y, odd = integral && trunc(T(0.5) * y) != T(0.5) * y;
  // Zero and infinity: the result is zero or infinite too.
  const bool grows = (a > 1) == (y > 0);
  T r = a == 0 || a == inf || b == inf ? (grows ? inf : T(0)) : positive;
  r = a == 1 ? T(1) : r;
  r = copysign(T(1), x) < 0 && odd ? -r : r;
  r = x < 0 && a < inf && !integral ? T(__builtin_nan("")) : r;
  r = x != x || y != y ? x + y : r;
  return y == 0 || x == 1 ? T(1) : r;
}

FAJIT_FN float pow(float x, float y) { return pow_special(x, y, pow_positive(abs(x), y)); }

// x^y in double, to 1e-15. CUDA's own pow is a function call.
FAJIT_FN double pow(double x, double y) {
  const double a = abs(x);
  const bool tiny = a < 0x1p-1022;
  const int64_t one_half = 0x3fe6a09e667f3bcd;  // sqrt(1/2)
  const int64_t bits = __builtin_bit_cast(int64_t, tiny ? a * 0x1p54 : a) - one_half;
  const double e = double((bits >> 52) - (tiny ? 54 : 0));
  const double f = __builtin_bit_cast(double, (bits & 0xfffffffffffff) + one_half) - 1.0;
  const double q = f / (f + 2.0);
  const double q_low = __builtin_fma(-q, f, __builtin_fma(-2.0, q, f)) / (f + 2.0);
  const double s = q * q, s_low = __builtin_fma(q, q_low + q_low, __builtin_fma(q, q, -s));
  double series = 1.0 / 25;
  series = __builtin_fma(series, s, 1.0 / 23);
  series = __builtin_fma(series, s, 1.0 / 21);
  series = __builtin_fma(series, s, 1.0 / 19);
  series = __builtin_fma(series, s, 1.0 / 17);
  series = __builtin_fma(series, s, 1.0 / 15);
  series = __builtin_fma(series, s, 1.0 / 13);
  series = __builtin_fma(series, s, 1.0 / 11);
  series = __builtin_fma(series, s, 1.0 / 9);
  series = __builtin_fma(series, s, 1.0 / 7);
  series = __builtin_fma(series, s, 1.0 / 5);
  const double third = 1.0 / 3, third_low = 0x1.5555555555555p-56;
  const double cube = s * q;
  const double cube_low =
      __builtin_fma(s, q_low, __builtin_fma(s_low, q, __builtin_fma(s, q, -cube)));
  // q^3 / 3 as a pair: its rounding error would affect the result.
  const double cubic = cube * third;
  const double cubic_low =
      __builtin_fma(cube, third, -cubic) + __builtin_fma(cube, third_low, cube_low * third);
  const double tail = __builtin_fma(series * s, cube, cubic_low + q_low);
  const double ln2 = 0x1.62e42fefa39efp-1, ln2_low = 0x1.abc9e3b39803fp-56;
  const double twice = 2.0 * q, high = __builtin_fma(ln2, e, twice);
  const double rest = __builtin_fma(-ln2, e, high);
  const double low = __builtin_fma(ln2_low, e, 2.0 * (cubic + tail) + (twice - rest));
  const double log_high = high + low, log_low = (high - log_high) + low;
  const double p = log_high * y;
  const double p_low = __builtin_fma(log_low, y, __builtin_fma(log_high, y, -p));
  const double r = exp(p);
  return pow_special(x, y, r > 0 && r < kInf ? __builtin_fma(r, p_low, r) : r);
}

FAJIT_FN float fmod(float x, float y) { return __builtin_fmodf(x, y); }
FAJIT_FN double fmod(double x, double y) { return __builtin_fmod(x, y); }

}  // namespace math
}  // namespace fajit
