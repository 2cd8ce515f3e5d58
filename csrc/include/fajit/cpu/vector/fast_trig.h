// Trigonometric functions and pow on float and vf lanes.
// Included by fast_math.h, whose header comment holds here too.
#pragma once
#include <fajit/cpu/vector/fast_math.h>

namespace fajit {
namespace math {

// Applies f to the lanes where m is set: rare arguments are passed to the C library.
template <class F>
FAJIT_INLINE float patch(float r, float x, bool m, F f) {
  return m ? f(x) : r;
}
template <class F>
FAJIT_INLINE vf patch(vf r, vf x, vi m, F f) {
  if (__builtin_expect(any(m), 0))
    for (int i = 0; i < kLanes; ++i)
      if (m[i]) r[i] = f(x[i]);
  return r;
}

// --- sin, cos, tan ----------------------------------------------------------------------------

// Larger |x| is passed to the C library: the quadrant's product with pi / 2 would be rounded.
constexpr float kReduceLimit = 2e5f;

// x = quadrant * pi / 2 + r, |r| <= pi / 4. In double: products with a 33-bit pi / 2 are exact.
template <class T>
struct Quadrant {
  T r;
  int_t<T> q;
};
template <class T>
FAJIT_INLINE Quadrant<T> reduce_quadrant(T x) {
  const T y = select(abs(x) <= kReduceLimit, x, splat_as<T>(0.0f));
  const T n = round_even(T(y * 0.636619772f));
  const auto wide = to_double(n);
  const auto r = (to_double(y) - wide * 0x1.921fb544p+0) - wide * 0x1.0b4611a62633p-34;
  return {narrow(r), to_int(n)};
}
template <class T>
FAJIT_INLINE T sin_poly(T r) {
  const T u = r * r;
  return r * u * poly(u, 2.83281042e-6f, -1.98530775e-4f, 8.33337940e-3f, -0.166666672f) + r;
}
template <class T>
FAJIT_INLINE T cos_poly(T r) {
  const T u = r * r;
  return u * u * poly(u, 2.44306684e-5f, -1.38873013e-3f, 4.16666456e-2f) + (1.0f - 0.5f * u);
}
// sin(quadrant * pi / 2 + r).
template <class T>
FAJIT_INLINE T sin_quadrant(T r, int_t<T> q) {
  const T v = select((q & 1) != 0, cos_poly(r), sin_poly(r));
  return as_float(as_int(v) ^ ((q & 2) << 30));
}

template <class T>
FAJIT_INLINE T sin(T x) {
  const Quadrant<T> p = reduce_quadrant(x);
  return patch(sin_quadrant<T>(p.r, p.q), x, !(abs(x) <= kReduceLimit),
               [](float v) { return __builtin_sinf(v); });
}
template <class T>
FAJIT_INLINE T cos(T x) {
  const Quadrant<T> p = reduce_quadrant(x);
  return patch(sin_quadrant<T>(p.r, p.q + 1), x, !(abs(x) <= kReduceLimit),
               [](float v) { return __builtin_cosf(v); });
}
template <class T>
FAJIT_INLINE T tan(T x) {
  const Quadrant<T> p = reduce_quadrant(x);
  const T s = sin_poly(p.r), c = cos_poly(p.r);
  const auto odd = (p.q & 1) != 0;
  const T r = select(odd, T(-c), s) / select(odd, s, c);
  return patch(r, x, !(abs(x) <= kReduceLimit), [](float v) { return __builtin_tanf(v); });
}

// --- inverse functions ------------------------------------------------------------------------

// asin on [-0.5, 0.5].
template <class T>
FAJIT_INLINE T asin_poly(T x) {
  const T u = x * x;
  return x * u *
             poly(u, 3.76983769e-2f, 1.43141244e-2f, 3.18391919e-2f, 4.45133708e-2f, 7.50052184e-2f,
                  0.166666597f) +
         x;
}
// Out of [-1, 1] the square root is NaN.
template <class T>
FAJIT_INLINE T asin(T x) {
  const T a = abs(x);
  const T half = asin_poly(sqrt(T(0.5f - 0.5f * a)));
  const T big = 1.57079637f - (2.0f * half + 4.37113883e-8f);
  return select(a <= 0.5f, asin_poly(x), copysign(big, x));
}
template <class T>
FAJIT_INLINE T acos(T x) {
  const T a = abs(x);
  const T half = 2.0f * asin_poly(sqrt(T(0.5f - 0.5f * a)));
  const T outer = select(x < 0.0f, T(3.14159274f - (half + 8.74227766e-8f)), half);
  return select(a <= 0.5f, T(1.57079637f - (asin_poly(x) + 4.37113883e-8f)), outer);
}

// atan(t) for t = num / den >= 0, 0 <= num, 0 <= den, not both zero or infinite. Folded at
// tan(pi / 8) and tan(3 pi / 8), before dividing, so that there is one division.
template <class T>
FAJIT_INLINE T atan_ratio(T num, T den) {
  const auto high = num > 2.41421356f * den;
  const auto mid = num > 0.414213562f * den;
  const T top = select(high, T(-den), select(mid, T(num - den), num));
  const T bottom = select(high, num, select(mid, T(num + den), den));
  const T base = select(high, splat_as<T>(1.57079637f),
                        select(mid, splat_as<T>(0.785398185f), splat_as<T>(0.0f)));
  // The rounding error of the base.
  const T low = select(high, splat_as<T>(-4.37113883e-8f),
                       select(mid, splat_as<T>(-2.18556941e-8f), splat_as<T>(0.0f)));
  const T t = top / bottom, u = t * t;
  const T tail =
      t * u * poly(u, -6.08885586e-2f, 0.105987556f, -0.142443463f, 0.199985266f, -0.333333164f);
  return base + (t + (tail + low));
}
template <class T>
FAJIT_INLINE T atan(T x) {
  const T a = abs(x);
  // Huge arguments become 1 / 0, because infinity / 1 cannot be folded.
  const auto huge = a > 1e30f;
  const T one = select(huge, splat_as<T>(0.0f), splat_as<T>(1.0f));
  const T value = atan_ratio(select(huge, splat_as<T>(1.0f), a), one);
  return copysign(value, x);
}
template <class T>
FAJIT_INLINE T atan2(T y, T x) {
  T num = abs(y), den = abs(x);
  // Equal infinities and equal zeros: 45 and 0 degrees.
  const auto both_inf = (num == kInf) & (den == kInf);
  const auto both_zero = (num == 0.0f) & (den == 0.0f);
  const T one = splat_as<T>(1.0f);
  num = select(both_inf, one, num);
  den = select(both_inf | both_zero, one, den);
  // Scaling by a power of two keeps both folds inside the range.
  const auto big = (num > 0x1p100f) | (den > 0x1p100f);
  const auto tiny = (num < 0x1p-60f) & (den < 0x1p-60f);
  const T k = select(big, splat_as<T>(0x1p-28f), select(tiny, splat_as<T>(0x1p60f), one));
  const auto inf_num = num == kInf, inf_den = den == kInf;
  num = select(inf_den, splat_as<T>(0.0f), T(num * k));
  den = select(inf_num, splat_as<T>(0.0f), T(den * k));
  num = select(inf_num, one, num);
  den = select(inf_den, one, den);
  const T v = atan_ratio(num, den);
  // Tests the sign bit of x, so that -0 counts as negative.
  const T turned = 3.14159274f - (v + 8.74227766e-8f);
  const T r = copysign(select(as_int(x) < 0, turned, v), y);
  return select((x == x) & (y == y), r, T(x + y));
}

// --- pow --------------------------------------------------------------------------------------

// x^y for finite positive x in double: e = y log2(x), 2^e. The error before rounding to float is
// negligible: log2 to 1e-13 by an atanh series, 2^r to 1e-12.
FAJIT_INLINE vf pow_positive(vf x, vf y) {
  const LogParts<vf> p = split_log(x);
  const vd f = to_double(p.f);
  const vd z = f / (f + 2.0), w = z * z;
  vd series = w * (1.0 / 17) + 1.0 / 15;
  series = series * w + 1.0 / 13;
  series = series * w + 1.0 / 11;
  series = series * w + 1.0 / 9;
  series = series * w + 1.0 / 7;
  series = series * w + 1.0 / 5;
  series = series * w + 1.0 / 3;
  series = series * w + 1.0;
  vd e = to_double(p.e) + series * z * 2.8853900817779268;  // 2 / ln 2
  e = e * to_double(y);
  e = e > 200.0 ? e - e + 200.0 : e;
  e = e < -200.0 ? e - e - 200.0 : e;
  const vf n = round_even(narrow(e));
  const vd r = (e - to_double(n)) * 0.69314718055994531;
  vd q = r * (1.0 / 3628800) + 1.0 / 362880;
  q = q * r + 1.0 / 40320;
  q = q * r + 1.0 / 5040;
  q = q * r + 1.0 / 720;
  q = q * r + 1.0 / 120;
  q = q * r + 1.0 / 24;
  q = q * r + 1.0 / 6;
  q = q * r + 0.5;
  q = q * r + 1.0;
  q = q * r + 1.0;
  return scale2(narrow(q), n);
}
FAJIT_INLINE float pow(float x, float y) { return __builtin_powf(x, y); }
FAJIT_INLINE vf pow(vf x, vf y) {
  const vf a = abs(x);
  const vi integral = trunc(y) == y;
  const vf half = y * 0.5f;
  const vi odd = integral & (trunc(half) != half);
  vf r = pow_positive(a, y);
  r = select(x < 0.0f, select(odd, -r, select(integral, r, splat(__builtin_nanf("")))), r);
  r = select((y == 0.0f) | (x == 1.0f), splat(1.0f), r);
  // Zeros, infinities and NaN.
  const vi rare = !((a > 0.0f) & (a < kInf) & (abs(y) < kInf));
  if (__builtin_expect(any(rare), 0))
    for (int i = 0; i < kLanes; ++i)
      if (rare[i]) r[i] = __builtin_powf(x[i], y[i]);
  return r;
}

}  // namespace math
}  // namespace fajit
