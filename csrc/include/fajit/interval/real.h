// Interval arithmetic on reals, as float32 or float64 hooks compute it.
//
// Endpoints are computed in double and rounded to the hook's precision. Rounding is monotone, so an
// interval of rounded endpoints holds every rounded result; only products are widened by one unit
// in the last place where they are inexact, because a compiler may fuse them into a sum.
// Approximated functions are widened by far more than the error of any implementation.
#pragma once
#include <fajit/interval/integer.h>

namespace fajit {
namespace interval {

constexpr double kInf = __builtin_inf();

FAJIT_SHARED double f_smaller(double a, double b) { return a < b ? a : b; }
FAJIT_SHARED double f_larger(double a, double b) { return a > b ? a : b; }
FAJIT_SHARED double rounded(double x, bool single) { return single ? double(float(x)) : x; }
FAJIT_SHARED bool whole(double x) { return x == __builtin_floor(x); }

// The next smaller number below x, in the hook's precision.
FAJIT_SHARED double below(double x, bool single) {
  return single ? double(__builtin_nextafterf(float(x), -__builtin_inff()))
                : __builtin_nextafter(x, -kInf);
}

FAJIT_SHARED FInterval f_top() { return {-kInf, kInf, true}; }
FAJIT_SHARED FInterval f_point(double x) { return x != x ? f_top() : FInterval{x, x, false}; }
FAJIT_SHARED FInterval f_range(double lo, double hi) { return {lo, hi, false}; }
FAJIT_SHARED FInterval f_hull(FInterval a, FInterval b) {
  return {f_smaller(a.lo, b.lo), f_larger(a.hi, b.hi), a.maybe_nan || b.maybe_nan};
}
FAJIT_SHARED FInterval f_where(Tri c, FInterval a, FInterval b) {
  return c.must ? a : (c.may ? f_hull(a, b) : b);
}
FAJIT_SHARED FInterval f_round_to(FInterval a, bool single) {
  return {rounded(a.lo, single), rounded(a.hi, single), a.maybe_nan};
}

// --- conversions ---------------------------------------------------------------------------------

FAJIT_SHARED FInterval f_from_i(Interval a, bool single) {
  return single ? FInterval{double(float(a.lo)), double(float(a.hi)), false}
                : FInterval{double(a.lo), double(a.hi), false};
}
FAJIT_SHARED FInterval f_from_t(Tri a, bool) { return {double(a.must), double(a.may), false}; }
FAJIT_SHARED Interval i_from_f(FInterval a, int64_t lo, int64_t hi) {
  if (a.maybe_nan || !(a.lo > -9e18) || !(a.hi < 9e18)) return {lo, hi};
  const Interval r = {int64_t(a.lo), int64_t(a.hi)};
  return r.lo < lo || r.hi > hi ? Interval{lo, hi} : r;
}
FAJIT_SHARED Interval i_from_t(Tri a) { return {a.must, a.may}; }
FAJIT_SHARED Tri t_from_f(FInterval a) {
  return {a.lo != 0 || a.hi != 0 || a.maybe_nan, a.lo > 0 || a.hi < 0};
}
FAJIT_SHARED Tri t_from_i(Interval a) { return {a.lo != 0 || a.hi != 0, a.lo > 0 || a.hi < 0}; }
FAJIT_SHARED Tri t_from_t(Tri a) { return a; }

// --- arithmetic ----------------------------------------------------------------------------------

FAJIT_SHARED bool unbounded(FInterval a) { return a.lo == -kInf || a.hi == kInf; }
FAJIT_SHARED bool has_zero(FInterval a) { return a.lo <= 0 && a.hi >= 0; }

// A NaN endpoint (inf - inf) becomes unbounded.
FAJIT_SHARED FInterval f_made(double lo, double hi, bool nan) {
  const bool lost = lo != lo || hi != hi;
  return {lo != lo ? -kInf : lo, hi != hi ? kInf : hi, nan || lost};
}

FAJIT_SHARED FInterval f_add(FInterval a, FInterval b, bool single) {
  const bool cancels = (a.hi == kInf && b.lo == -kInf) || (a.lo == -kInf && b.hi == kInf);
  return f_made(rounded(a.lo + b.lo, single), rounded(a.hi + b.hi, single),
                a.maybe_nan || b.maybe_nan || cancels);
}
FAJIT_SHARED FInterval f_neg(FInterval a, bool) { return {-a.hi, -a.lo, a.maybe_nan}; }
FAJIT_SHARED FInterval f_sub(FInterval a, FInterval b, bool single) {
  return f_add(a, f_neg(b, single), single);
}

FAJIT_SHARED double product_below(double a, double b, bool single) {
  const double p = a == 0 || b == 0 ? 0 : a * b;
  const bool exact =
      single ? double(float(p)) == p : whole(a) && whole(b) && p < 0x1p53 && p > -0x1p53;
  return exact ? p : below(p, single);
}
FAJIT_SHARED FInterval f_mul(FInterval a, FInterval b, bool single) {
  const bool nan = (unbounded(a) && has_zero(b)) || (unbounded(b) && has_zero(a));
  auto low = [&](double s) {
    return f_smaller(
        f_smaller(product_below(s * a.lo, b.lo, single), product_below(s * a.lo, b.hi, single)),
        f_smaller(product_below(s * a.hi, b.lo, single), product_below(s * a.hi, b.hi, single)));
  };
  return f_made(low(1), -low(-1), a.maybe_nan || b.maybe_nan || nan);
}
FAJIT_SHARED FInterval f_div(FInterval a, FInterval b, bool single) {
  if (has_zero(b) || (unbounded(a) && unbounded(b))) return f_top();
  const double w = a.lo / b.lo, x = a.lo / b.hi, y = a.hi / b.lo, z = a.hi / b.hi;
  return f_made(rounded(f_smaller(f_smaller(w, x), f_smaller(y, z)), single),
                rounded(f_larger(f_larger(w, x), f_larger(y, z)), single),
                a.maybe_nan || b.maybe_nan);
}
// Implementations may differ by one near integral quotients.
FAJIT_SHARED FInterval f_floordiv(FInterval a, FInterval b, bool single) {
  if (unbounded(a)) return f_top();  // inf // x is NaN
  const FInterval q = f_div(a, b, single);
  return {__builtin_floor(q.lo) - 1, __builtin_floor(q.hi) + 1, q.maybe_nan};
}
FAJIT_SHARED FInterval f_remainder(FInterval a, FInterval b, bool) {
  if (has_zero(b) || unbounded(a) || unbounded(b)) return f_top();
  return {b.lo < 0 ? b.lo : 0, b.hi > 0 ? b.hi : 0, a.maybe_nan || b.maybe_nan};
}
FAJIT_SHARED FInterval f_minimum(FInterval a, FInterval b, bool) {
  return {f_smaller(a.lo, b.lo), f_smaller(a.hi, b.hi), a.maybe_nan || b.maybe_nan};
}
FAJIT_SHARED FInterval f_maximum(FInterval a, FInterval b, bool) {
  return {f_larger(a.lo, b.lo), f_larger(a.hi, b.hi), a.maybe_nan || b.maybe_nan};
}
FAJIT_SHARED FInterval f_abs(FInterval a, bool single) {
  if (a.lo >= 0) return a;
  if (a.hi <= 0) return f_neg(a, single);
  return {0, f_larger(-a.lo, a.hi), a.maybe_nan};
}
FAJIT_SHARED FInterval f_sign(FInterval a, bool) {
  const double lo = (a.lo > 0) - (a.lo < 0), hi = (a.hi > 0) - (a.hi < 0);
  if (!a.maybe_nan) return {lo, hi, false};
  return {f_smaller(lo, 0), f_larger(hi, 0), true};
}
FAJIT_SHARED FInterval f_floor(FInterval a, bool) {
  return {__builtin_floor(a.lo), __builtin_floor(a.hi), a.maybe_nan};
}
FAJIT_SHARED FInterval f_ceil(FInterval a, bool) {
  return {__builtin_ceil(a.lo), __builtin_ceil(a.hi), a.maybe_nan};
}
FAJIT_SHARED FInterval f_round(FInterval a, bool) {
  return {__builtin_rint(a.lo), __builtin_rint(a.hi), a.maybe_nan};
}
FAJIT_SHARED FInterval f_trunc(FInterval a, bool) {
  return {__builtin_trunc(a.lo), __builtin_trunc(a.hi), a.maybe_nan};
}

// --- approximated functions ----------------------------------------------------------------------

// [lo, hi] widened beyond any implementation's error, clipped to the function's range [least,
// most].
FAJIT_SHARED FInterval f_loose(double lo, double hi, bool nan, bool single, double least,
                               double most) {
  const double relative = single ? 1e-5 : 1e-12, absolute = single ? 1e-6 : 1e-13;
  // Where one implementation overflows, another may return the largest number.
  constexpr double huge = 0x1.fffffffffffffp1023;
  if (lo == kInf) lo = huge;
  if (hi == -kInf) hi = -huge;
  lo = rounded(lo - (__builtin_fabs(lo) * relative + absolute), single);
  hi = rounded(hi + (__builtin_fabs(hi) * relative + absolute), single);
  const FInterval r = f_made(lo, hi, nan);
  return {f_larger(r.lo, least), f_smaller(r.hi, most), r.maybe_nan};
}

#define FAJIT_INCREASING(name, function, least, most)                                 \
  FAJIT_SHARED FInterval name(FInterval a, bool single) {                             \
    return f_loose(function(a.lo), function(a.hi), a.maybe_nan, single, least, most); \
  }
FAJIT_INCREASING(f_exp, __builtin_exp, 0, kInf)
FAJIT_INCREASING(f_exp2, __builtin_exp2, 0, kInf)
FAJIT_INCREASING(f_expm1, __builtin_expm1, -1.00001, kInf)
FAJIT_INCREASING(f_tanh, __builtin_tanh, -1.00001, 1.00001)
FAJIT_INCREASING(f_erf, __builtin_erf, -1.00001, 1.00001)
FAJIT_INCREASING(f_atan, __builtin_atan, -1.6, 1.6)
FAJIT_INCREASING(f_sinh, __builtin_sinh, -kInf, kInf)
#undef FAJIT_INCREASING

FAJIT_SHARED FInterval f_tanh_approx(FInterval a, bool single) {
  const FInterval r = f_tanh(a, single);
  const double relative = single ? 0x1p-11 : 0;  // in double it is tanh
  return {rounded(r.lo - __builtin_fabs(r.lo) * relative, single),
          rounded(r.hi + __builtin_fabs(r.hi) * relative, single), r.maybe_nan};
}

FAJIT_SHARED double logistic(double x) { return 1 / (1 + __builtin_exp(-x)); }
FAJIT_SHARED FInterval f_sigmoid(FInterval a, bool single) {
  return f_loose(logistic(a.lo), logistic(a.hi), a.maybe_nan, single, 0, 1.00001);
}

// Functions of x >= domain; smaller arguments give NaN.
#define FAJIT_ROOTS(name, function, domain)                                                   \
  FAJIT_SHARED FInterval name(FInterval a, bool single) {                                     \
    if (!(a.hi >= (domain))) return f_top();                                                  \
    const double low = a.lo < (domain) ? -kInf : function(a.lo);                              \
    return f_loose(low, function(a.hi), a.maybe_nan || a.lo < (domain), single, -kInf, kInf); \
  }
FAJIT_ROOTS(f_log, __builtin_log, 0)
FAJIT_ROOTS(f_log2, __builtin_log2, 0)
FAJIT_ROOTS(f_log10, __builtin_log10, 0)
FAJIT_ROOTS(f_log1p, __builtin_log1p, -1)
#undef FAJIT_ROOTS

FAJIT_SHARED FInterval f_sqrt(FInterval a, bool single) {
  if (a.hi < 0) return f_top();
  return {a.lo < 0 ? 0 : rounded(__builtin_sqrt(a.lo), single),
          rounded(__builtin_sqrt(a.hi), single), a.maybe_nan || a.lo < 0};
}

FAJIT_SHARED FInterval f_sum(FInterval a, int64_t n, bool single) {
  if (unbounded(a)) return f_top();
  const double count = double(n);
  const double most = f_larger(__builtin_fabs(a.lo), __builtin_fabs(a.hi));
  const double spread = (single ? 2e-5 : 2e-12) * count * most;
  return f_made(count * a.lo - spread, count * a.hi + spread, a.maybe_nan);
}

// --- conditions ----------------------------------------------------------------------------------

FAJIT_SHARED Tri f_ge(FInterval a, FInterval b) {
  return {a.hi >= b.lo, a.lo >= b.hi && !a.maybe_nan && !b.maybe_nan};
}
FAJIT_SHARED Tri f_gt(FInterval a, FInterval b) {
  return {a.hi > b.lo, a.lo > b.hi && !a.maybe_nan && !b.maybe_nan};
}
FAJIT_SHARED Tri f_le(FInterval a, FInterval b) { return f_ge(b, a); }
FAJIT_SHARED Tri f_lt(FInterval a, FInterval b) { return f_gt(b, a); }
FAJIT_SHARED Tri f_eq(FInterval a, FInterval b) {
  const bool points = a.lo == a.hi && b.lo == b.hi && a.lo == b.lo;
  return {a.lo <= b.hi && b.lo <= a.hi, points && !a.maybe_nan && !b.maybe_nan};
}
FAJIT_SHARED Tri f_ne(FInterval a, FInterval b) { return {!f_eq(a, b).must, !f_eq(a, b).may}; }
FAJIT_SHARED Tri f_isnan(FInterval a) { return {a.maybe_nan, false}; }
FAJIT_SHARED Tri f_isinf(FInterval a) {
  return {unbounded(a), a.lo == a.hi && unbounded(a) && !a.maybe_nan};
}
FAJIT_SHARED Tri t_top() { return {true, false}; }
FAJIT_SHARED Tri t_const(bool x) { return {x, x}; }

}  // namespace interval
}  // namespace fajit
