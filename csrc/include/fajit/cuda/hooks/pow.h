// pow and fmod of hooks. Included by math.h, whose header comment holds here too.
#pragma once
#include <fajit/cuda/hooks/math.h>

namespace fajit {
namespace math {

// A float and what it lost by rounding.
struct Pair {
  float high, low;
};

// log(x) of positive finite x to 2^-40: m = 2^e (1 + q) / (1 - q), an atanh series in pairs.
FAJIT_FN Pair log_pair(float x) {
  const LogParts parts = split_log(x);
  const float f = parts.f, d = f + 2.0f;
  const float r = quotient(1.0f, d);
  const float q = r * f;
  // f - q d, with what d lost.
  const float q_low = r * fma(-q, f, fma(-2.0f, q, f));
  const float s = q * q;
  const float series =
      poly(s, 9.09090909e-2f, 1.11111111e-1f, 1.42857143e-1f, 0.2f, 3.33333333e-1f);
  // q^2 and q^3 as pairs.
  const float s_low = fma(q, q_low + q_low, fma(q, q, -s));
  const float cube = s * q;
  const float cube_low = fma(s, q_low, fma(s_low, q, fma(s, q, -cube)));
  // 1 / 3 is not a float: what it lost counts in the cube.
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

FAJIT_FN float pow(float x, float y) {
  const float a = abs(x), b = abs(y);
  const bool integral = trunc(y) == y, odd = integral && trunc(0.5f * y) != 0.5f * y;
  float r = pow_positive(a, y);
  // Zero and infinity: the result is zero or infinite too.
  const bool grows = (a > 1.0f) == (y > 0.0f);
  r = a == 0.0f || a == kInf || b == kInf ? (grows ? kInf : 0.0f) : r;
  r = a == 1.0f ? 1.0f : r;
  const bool negative = as_int(x) < 0;
  r = negative && odd ? -r : r;
  r = x < 0.0f && a < kInf && !integral ? __builtin_nanf("") : r;
  r = x != x || y != y ? x + y : r;
  return y == 0.0f || x == 1.0f ? 1.0f : r;
}
FAJIT_FN double pow(double x, double y) { return __builtin_pow(x, y); }

FAJIT_FN float fmod(float x, float y) { return __builtin_fmodf(x, y); }
FAJIT_FN double fmod(double x, double y) { return __builtin_fmod(x, y); }

}  // namespace math
}  // namespace fajit
