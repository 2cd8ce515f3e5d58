// Elementary functions on float and vf lanes, at most 4 ulp from the correctly rounded result, with
// IEEE results for infinities, NaN and out-of-range arguments. One template serves float and vf;
// `tanh` of vectors has a reciprocal of its own, whose last bit may differ. `tanh_approx` is within
// 2^-11. double and vd call the C library.
//
// Coefficients: minimax fits (iteratively reweighted least squares, low orders rounded first).
#pragma once
#include <fajit/cpu/vector/vec.h>

namespace fajit {
namespace math {

// c[0] + c[1] x + ... by Horner's rule.
template <class T>
FAJIT_INLINE T horner(T, T acc) {
  return acc;
}
template <class T, class... C>
FAJIT_INLINE T horner(T x, T acc, float c, C... rest) {
  return horner(x, T(acc * x + c), rest...);
}
// Highest order first.
template <class T, class... C>
FAJIT_INLINE T poly(T x, float c, C... rest) {
  return horner(x, splat_as<T>(c), rest...);
}

// x * 2^n for integral n, |n| <= 252, with gradual underflow and overflow to infinity.
template <class T>
FAJIT_INLINE T scale2(T x, T n) {
#if FAJIT_AVX == 512
  if constexpr (sizeof(T) == 64) {
    T r;
    asm("vscalefps %2, %1, %0" : "=v"(r) : "v"(x), "v"(n));
    return r;
  }
#endif
  const auto whole = to_int(n);
  const auto half = whole >> 1;  // two factors, each a normal number
  return x * as_float((half + 127) << 23) * as_float((whole - half + 127) << 23);
}

// 1 / x for normal x well inside the range, about 1 ulp; a third of a division's time.
FAJIT_INLINE float fast_reciprocal(float x) { return 1.0f / x; }
FAJIT_INLINE vf fast_reciprocal(vf x) {
#if FAJIT_AVX == 512
  vf r;
  asm("vrcp14ps %1, %0" : "=v"(r) : "v"(x));
  return r + r * (1.0f - x * r);
#else
  return 1.0f / x;
#endif
}

// 1 / x for normal x well inside the range, to 2^-14; float and vf alike.
template <class T>
FAJIT_INLINE T approx_reciprocal(T x) {
#if FAJIT_AVX == 512
  T r;
  if constexpr (sizeof(T) == 64) {
    asm("vrcp14ps %1, %0" : "=v"(r) : "v"(x));
  } else {
    asm("vrcp14ss %1, %1, %0" : "=v"(r) : "v"(x));
  }
  return r;
#else
  return 1.0f / x;
#endif
}

// --- exponentials -----------------------------------------------------------------------------

// 2^r on [-0.5, 0.5]: degree 5, error 9.3e-8, exactly 1 at 0.
template <class T>
FAJIT_INLINE T exp2_poly(T r) {
  return poly(r, 0x1.5bda58p-10f, 0x1.3ce8aep-7f, 0x1.c6b6d8p-5f, 0x1.ebf9c2p-3f, 0x1.62e42ap-1f,
              1.0f);
}

// x limited to [low, high]; NaN stays.
template <class T>
FAJIT_INLINE T clamp(T x, float low, float high) {
  return max(splat_as<T>(low), T(min(splat_as<T>(high), x)));
}

template <class T>
FAJIT_INLINE T exp2(T x) {
  const T y = clamp(x, -160.0f, 130.0f);
  const T n = round_even(y);
  const T r = y - n;
  return scale2(poly(r, 0x1.416b52p-13f, 0x1.5f082ep-10f, 0x1.3b2de0p-7f, 0x1.c6af7cp-5f,
                     0x1.ebfbdcp-3f, 0x1.62e430p-1f, 1.0f),
                n);
}

// x = n ln 2 + r, |r| <= ln 2 / 2; the first part of ln 2 has 9 bits, so n times it is exact.
template <class T>
struct ExpParts {
  T n, r;
};
template <class T>
FAJIT_INLINE ExpParts<T> split_exp(T x) {
  const T n = round_even(T(x * 1.44269504f));
  const T r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  return {n, r};
}
// e^r - 1 for |r| <= ln 2 / 2.
template <class T>
FAJIT_INLINE T expm1_poly(T r) {
  return r * r *
             poly(r, 0x1.a184a0p-13f, 0x1.6d225ep-10f, 0x1.111054p-7f, 0x1.55550cp-5f,
                  0x1.555556p-3f, 0.5f) +
         r;
}
// 2^k e^x.
template <class T>
FAJIT_INLINE T exp_scaled(T x, float k) {
  const ExpParts<T> p = split_exp(clamp(x, -110.0f, 90.0f));
  return scale2(T(expm1_poly(p.r) + 1.0f), T(p.n + k));
}

template <class T>
FAJIT_INLINE T exp(T x) {
  return exp_scaled(x, 0.0f);
}

// e^y - 1 for |y| <= 88: 2^n (e^r - 1) + (2^n - 1) is exact in the second term at n = 0.
template <class T>
FAJIT_INLINE T expm1_finite(T y) {
  const ExpParts<T> p = split_exp(y);
  const T two_n = scale2(splat_as<T>(1.0f), p.n);
  return two_n * expm1_poly(p.r) + (two_n - 1.0f);
}
template <class T>
FAJIT_INLINE T expm1(T x) {
  const T y = clamp(x, -20.0f, 88.0f);
  return select(x > 88.0f, exp(x), select(x == 0.0f, x, expm1_finite(y)));
}

// An odd polynomial below 3/4, and 1 - 2 / (e^2|x| + 1) beyond, where rounding 2 |x| log2(e) costs
// no accuracy, because tanh is flat. Soft caps bound most scores well below the cap, so vectors of
// small values alone have a path of their own. A soft cap adds 24 % to bf16 prefill on AMX tiles
// (S4096, D128; benchmarks/cpu_attention.py).
template <class T>
FAJIT_INLINE T tanh(T x) {
  const T u = x * x;
  const T small = x * poly(u, -0x1.389a56p-8f, 0x1.423392p-6f, -0x1.b5604ep-5f, 0x1.10ed66p-3f,
                           -0x1.5554a4p-2f, 1.0f);
  if (__builtin_expect(!any_at_least(u, 0.5625f), 1)) return small;
  const T y = min(splat_as<T>(30.0f), T(abs(x) * 2.88539008f));
  const T n = round_even(y);
  const T e = scale2(exp2_poly(T(y - n)), n);
  const T big = 1.0f - 2.0f * fast_reciprocal(T(e + 1.0f));
  return select(u >= 0.5625f, copysign(big, x), small);
}

// tanh with a relative error of at most 2^-11, which it reaches where it becomes 1, at |x| = 4.4;
// 2^-13 elsewhere. An odd polynomial below 1, and an odd rational function beyond. In operations
// with AVX-512, `tanh` takes 7 for small values and 26 for others, this one 5 and 17.
template <class T>
FAJIT_INLINE T tanh_approx(T x) {
  const T u = x * x;
  const T small = x * poly(u, -2.66299216e-2f, 1.18897977e-1f, -3.30654522e-1f, 9.99918594e-1f);
  if (__builtin_expect(!any_at_least(u, 1.0f), 1)) return small;
  // Beyond 4.4 the quotient is proportional to x, so that it exceeds 1 and is limited, for infinity
  // too.
  const T w = min(splat_as<T>(19.36f), u);
  const T numerator = x * poly(w, 6.95281209e-4f, 1.02854676e-1f, 9.99698146e-1f);
  const T denominator = poly(w, 1.30133307e-2f, 4.35612216e-1f, 1.0f);
  const T big = clamp(T(numerator * approx_reciprocal(denominator)), -1.0f, 1.0f);
  return select(u >= 1.0f, big, small);
}

template <class T>
FAJIT_INLINE T sigmoid(T x) {
  return 1.0f / (1.0f + exp(T(-x)));
}

template <class T>
FAJIT_INLINE T sinh(T x) {
  const T a = abs(x), u = x * x;
  const T small = x * u * poly(u, 2.78224820e-6f, 1.98428927e-4f, 8.33331048e-3f, 0.166666672f) + x;
  const T h = exp_scaled(a, -1.0f);
  return select(a < 1.0f, small, copysign(T(h - 0.25f / h), x));
}
template <class T>
FAJIT_INLINE T cosh(T x) {
  const T h = exp_scaled(T(abs(x)), -1.0f);
  return h + 0.25f / h;
}

// --- logarithms -------------------------------------------------------------------------------

// x = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)), for positive finite x, subnormals included.
template <class T>
struct LogParts {
  T e, f;
};
template <class T>
FAJIT_INLINE LogParts<T> split_log(T x) {
  const auto tiny = x < 0x1p-126f;
  const T y = select(tiny, T(x * 0x1p23f), x);
  const auto bits = as_int(y) - 0x3f3504f3;  // sqrt(1/2)
  const auto e = bits >> 23;
  const T m = as_float((bits & 0x7fffff) + 0x3f3504f3);
  return {to_float(e) - select(tiny, splat_as<T>(23.0f), splat_as<T>(0.0f)), m - 1.0f};
}
// log(1 + f) - f.
template <class T>
FAJIT_INLINE T log1p_tail(T f) {
  const T p =
      poly(f, 0x1.147338p-4f, -0x1.de01dap-4f, 0x1.e6c00ap-4f, -0x1.fc28cap-4f, 0x1.233ba2p-3f,
           -0x1.555c44p-3f, 0x1.99a476p-3f, -0x1.000006p-2f, 0x1.555548p-2f);
  const T u = f * f;
  return f * u * p - 0.5f * u;
}
// `value` where x is positive and finite, else the logarithm of the special value x.
template <class T>
FAJIT_INLINE T log_special(T x, T value) {
  value = select(x == kInf, x, value);
  value = select(x == 0.0f, splat_as<T>(-kInf), value);
  return select(x >= 0.0f, value, splat_as<T>(__builtin_nanf("")));
}

template <class T>
FAJIT_INLINE T log(T x) {
  const LogParts<T> p = split_log(x);
  const T tail = log1p_tail(p.f) - p.e * 2.12194440e-4f;
  return log_special(x, T((p.f + tail) + p.e * 0.693359375f));
}
template <class T>
FAJIT_INLINE T log2(T x) {
  const LogParts<T> p = split_log(x);
  const T tail = log1p_tail(p.f);
  // log2(e) = 1 + 0.442695: the leading part of f is not rounded by a product.
  const T sum = (tail * 0.442695041f + p.f * 0.442695041f) + tail + p.f;
  return log_special(x, T(sum + p.e));
}
template <class T>
FAJIT_INLINE T log10(T x) {
  const LogParts<T> p = split_log(x);
  const T ln = p.f + log1p_tail(p.f);
  // log10(2) in two parts; e times the first is exact.
  return log_special(x, T((ln * 0.434294482f + p.e * 4.60503907e-6f) + p.e * 0.301025391f));
}
template <class T>
FAJIT_INLINE T log1p(T x) {
  const T u = x + 1.0f;
  const LogParts<T> p = split_log(u);
  // The rounding error of 1 + x, to first order; 0 for huge x, where u may be infinite.
  const T lost = select(abs(x) < 0x1p24f, T((x - (u - 1.0f)) / u), splat_as<T>(0.0f));
  const T tail = log1p_tail(p.f) + (lost - p.e * 2.12194440e-4f);
  const T value = (p.f + tail) + p.e * 0.693359375f;
  return select(x == 0.0f, x, log_special(u, value));
}

// --- erf --------------------------------------------------------------------------------------

// Two polynomials (N. Juffa's coefficients): odd below 0.93, 1 - e^p above.
template <class T>
FAJIT_INLINE T erf(T x) {
  const T s = x * x, t = clamp(T(abs(x)), 0.0f, 10.0f);
  const T small = x * poly(s, -5.96761703e-4f, 4.99119423e-3f, -2.67681349e-2f, 1.12819925e-1f,
                           -3.76125336e-1f, 1.28379166e-1f) +
                  x;
  const T p = poly(t, -1.72853470e-5f, 3.83197126e-4f, -3.88396438e-3f, 2.42546219e-2f,
                   -1.06777877e-1f, -6.34846687e-1f, -1.28717512e-1f);
  return select(abs(x) < 0.927734375f, small, copysign(T(1.0f - exp(T(p * t - t))), x));
}

}  // namespace math
}  // namespace fajit

#include <fajit/cpu/vector/fast_trig.h>

namespace fajit {
namespace math {

// --- double -----------------------------------------------------------------------------------

#define FAJIT_DOUBLE(name, fn)                         \
  FAJIT_INLINE double name(double x) { return fn(x); } \
  FAJIT_INLINE vd name(const vd& x) {                  \
    vd r;                                              \
    for (int i = 0; i < kLanes; ++i) r[i] = fn(x[i]);  \
    return r;                                          \
  }
FAJIT_DOUBLE(exp, __builtin_exp)
FAJIT_DOUBLE(exp2, __builtin_exp2)
FAJIT_DOUBLE(expm1, __builtin_expm1)
FAJIT_DOUBLE(log, __builtin_log)
FAJIT_DOUBLE(log2, __builtin_log2)
FAJIT_DOUBLE(log10, __builtin_log10)
FAJIT_DOUBLE(log1p, __builtin_log1p)
FAJIT_DOUBLE(tanh, __builtin_tanh)
FAJIT_DOUBLE(tanh_approx, __builtin_tanh)
FAJIT_DOUBLE(sin, __builtin_sin)
FAJIT_DOUBLE(cos, __builtin_cos)
FAJIT_DOUBLE(tan, __builtin_tan)
FAJIT_DOUBLE(asin, __builtin_asin)
FAJIT_DOUBLE(acos, __builtin_acos)
FAJIT_DOUBLE(atan, __builtin_atan)
FAJIT_DOUBLE(sinh, __builtin_sinh)
FAJIT_DOUBLE(cosh, __builtin_cosh)
FAJIT_DOUBLE(erf, __builtin_erf)
#undef FAJIT_DOUBLE
FAJIT_INLINE float fmod(float x, float y) { return __builtin_fmodf(x, y); }
FAJIT_INLINE double fmod(double x, double y) { return __builtin_fmod(x, y); }
FAJIT_INLINE double sigmoid(double x) { return 1.0 / (1.0 + __builtin_exp(-x)); }
FAJIT_INLINE vd sigmoid(const vd& x) { return 1.0 / (1.0 + exp(-x)); }
#define FAJIT_DOUBLE(name, fn)                                      \
  FAJIT_INLINE double name(double x, double y) { return fn(x, y); } \
  FAJIT_INLINE vd name(const vd& x, const vd& y) {                  \
    vd r;                                                           \
    for (int i = 0; i < kLanes; ++i) r[i] = fn(x[i], y[i]);         \
    return r;                                                       \
  }
FAJIT_DOUBLE(pow, __builtin_pow)
FAJIT_DOUBLE(atan2, __builtin_atan2)
#undef FAJIT_DOUBLE

}  // namespace math
}  // namespace fajit
