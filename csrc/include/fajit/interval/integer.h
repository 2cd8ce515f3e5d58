// Intervals, and their integer arithmetic.
#pragma once
#include <fajit/context.h>
#include <fajit/divide.h>

namespace fajit {

// Integers lo..hi, both included. INT64_MIN as lo and INT64_MAX as hi mean unbounded: arithmetic
// saturates there and stays there.
struct Interval { int64_t lo, hi; };

// Reals lo..hi, and NaN if maybe_nan.
struct FInterval {
  double lo, hi;
  bool maybe_nan;
};

// A condition over the box: may it hold somewhere, must it hold everywhere?
struct Tri { bool may, must; };

namespace interval {

constexpr int64_t kMin = INT64_MIN, kMax = INT64_MAX;
constexpr Interval kTop = {kMin, kMax};
constexpr int64_t kMaxPosition = 1 << 30;
constexpr int64_t kMaxRows = 256;       // most index tuples (without the scanned dim) of a gather
constexpr int64_t kMaxBitLoads = 4096;  // most elements that `gather_bits` visits
#if defined(__CUDA_ARCH__)              // ranges of more entries use a table, if there is one
constexpr int64_t kScan = 63;
#else
constexpr int64_t kScan = 256;
#endif
constexpr int64_t kBlock = 64;  // entries of a table's block

FAJIT_SHARED int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
FAJIT_SHARED int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

FAJIT_SHARED bool positions(Interval x) { return x.lo >= -kMaxPosition && x.hi <= kMaxPosition; }

// Whether every value fits a machine integer of range [lo, hi]; at 64 bits, whether x is bounded.
FAJIT_SHARED bool fits(Interval x, int64_t lo, int64_t hi) {
  return x.lo >= lo && x.hi <= hi && x.lo != kMin && x.hi != kMax;
}

// Narrows x to [lo, hi]; false if nothing is left.
FAJIT_SHARED bool meet(Interval& x, int64_t lo, int64_t hi) {
  x.lo = larger(x.lo, lo);
  x.hi = smaller(x.hi, hi);
  return x.lo <= x.hi;
}

FAJIT_SHARED bool is(Interval x, int64_t value) { return x.lo == value && x.hi == value; }

// Conditions that end a clause when false: whether two values may differ, whether a condition may
// hold, whether it may fail.
FAJIT_SHARED bool differ(Interval x, Interval y) { return y.lo != y.hi || !is(x, y.lo); }
FAJIT_SHARED bool may(Tri a) { return a.may; }
FAJIT_SHARED bool may_fail(Tri a) { return !a.must; }

// Whether 0 may be among the values. Also true for reversed ends, which only an invalid program can
// produce, so that nothing divides by zero.
FAJIT_SHARED bool spans_zero(Interval x) {
  return (x.lo <= 0 || x.hi <= 0) && (x.lo >= 0 || x.hi >= 0);
}

// --- saturating endpoints ------------------------------------------------------------------------

// Set r to the wrapped result; return whether it differs from the exact one.
FAJIT_SHARED bool add_overflows(int64_t a, int64_t b, int64_t& r) {
  r = int64_t(uint64_t(a) + uint64_t(b));
  return ((a ^ r) & (b ^ r)) < 0;
}
FAJIT_SHARED bool mul_overflows(int64_t a, int64_t b, int64_t& r) {
#if defined(__CUDA_ARCH__)
  r = int64_t(uint64_t(a) * uint64_t(b));
  return __mul64hi(a, b) != r >> 63;
#else
  return __builtin_mul_overflow(a, b, &r);
#endif
}

FAJIT_SHARED int64_t add_lo(int64_t a, int64_t b) {
  int64_t r;
  if (a == kMin || b == kMin) return kMin;
  if (add_overflows(a, b, r)) return a > 0 ? kMax : kMin;
  return r;
}
FAJIT_SHARED int64_t add_hi(int64_t a, int64_t b) {
  int64_t r;
  if (a == kMax || b == kMax) return kMax;
  if (add_overflows(a, b, r)) return a > 0 ? kMax : kMin;
  return r;
}
FAJIT_SHARED int64_t negated(int64_t a) { return a == kMin ? kMax : (a == kMax ? kMin : -a); }
FAJIT_SHARED bool infinite(int64_t a) { return a == kMin || a == kMax; }
FAJIT_SHARED int64_t times(int64_t a, int64_t b) {
  int64_t r;
  if (a == 0 || b == 0) return 0;
  if (infinite(a) || infinite(b) || mul_overflows(a, b, r)) {
    return (a < 0) == (b < 0) ? kMax : kMin;
  }
  return r;
}
FAJIT_SHARED int64_t floor_quotient(int64_t a, int64_t b) {
  if (b == -1) return negated(a);
  const int64_t q = quotient(a, b);
  return q - (a != q * b && (a < 0) != (b < 0));
}
FAJIT_SHARED int64_t trunc_quotient(int64_t a, int64_t b) {
  return b == -1 ? negated(a) : quotient(a, b);
}

// The hull of f at the four corners. A loop that is not unrolled, so f is inlined once.
template <class F>
FAJIT_SHARED Interval corners(Interval a, Interval b, F f) {
  Interval r = {kMax, kMin};
  FAJIT_ROLLED
  for (int i = 0; i < 4; ++i) {
    const int64_t x = f(i < 2 ? a.lo : a.hi, i % 2 == 0 ? b.lo : b.hi);
    r = {smaller(r.lo, x), larger(r.hi, x)};
  }
  return r;
}

// --- integers ------------------------------------------------------------------------------------

FAJIT_SHARED Interval i_hull(Interval a, Interval b) {
  return {smaller(a.lo, b.lo), larger(a.hi, b.hi)};
}
FAJIT_SHARED Interval i_add(Interval a, Interval b) {
  return {add_lo(a.lo, b.lo), add_hi(a.hi, b.hi)};
}
FAJIT_SHARED Interval i_neg(Interval a) { return {negated(a.hi), negated(a.lo)}; }
FAJIT_SHARED Interval i_sub(Interval a, Interval b) { return i_add(a, i_neg(b)); }
FAJIT_SHARED Interval i_mul(Interval a, Interval b) { return corners(a, b, times); }
FAJIT_SHARED Interval i_scale(Interval a, int64_t c) {
  return c < 0 ? Interval{times(a.hi, c), times(a.lo, c)}
               : Interval{times(a.lo, c), times(a.hi, c)};
}
FAJIT_SHARED bool bounded(Interval a) { return a.lo != kMin && a.hi != kMax; }
// a + c * b, where static ranges prove that no value overflows.
FAJIT_SHARED Interval i_add_scaled(Interval a, Interval b, int64_t c) {
  if (!bounded(a) || !bounded(b)) return i_add(a, i_scale(b, c));
  return c < 0 ? Interval{a.lo + c * b.hi, a.hi + c * b.lo}
               : Interval{a.lo + c * b.lo, a.hi + c * b.hi};
}
FAJIT_SHARED Interval i_minimum(Interval a, Interval b) {
  return {smaller(a.lo, b.lo), smaller(a.hi, b.hi)};
}
FAJIT_SHARED Interval i_maximum(Interval a, Interval b) {
  return {larger(a.lo, b.lo), larger(a.hi, b.hi)};
}
FAJIT_SHARED Interval i_abs(Interval a) {
  if (a.lo >= 0) return a;
  if (a.hi <= 0) return i_neg(a);
  return {0, larger(negated(a.lo), a.hi)};
}
FAJIT_SHARED Interval i_sign(Interval a) {
  return {(a.lo > 0) - (a.lo < 0), (a.hi > 0) - (a.hi < 0)};
}
// The quotients by a divisor of one sign; an end of a that means unbounded stays unbounded.
template <class F>
FAJIT_SHARED Interval quotients(Interval a, Interval b, F f) {
  if (spans_zero(b)) return kTop;
  Interval r = corners(a, b, f);
  if (b.lo > 0 ? a.lo == kMin : a.hi == kMax) r.lo = kMin;
  if (b.lo > 0 ? a.hi == kMax : a.lo == kMin) r.hi = kMax;
  return r;
}
FAJIT_SHARED Interval i_floordiv(Interval a, Interval b) { return quotients(a, b, floor_quotient); }
FAJIT_SHARED Interval i_truncdiv(Interval a, Interval b) { return quotients(a, b, trunc_quotient); }
// x % c is exact as long as x stays within one period.
FAJIT_SHARED Interval i_remainder(Interval a, Interval b) {
  if (spans_zero(b)) return kTop;
  if (b.lo > 0 && a.lo >= 0 && a.hi < b.lo) return a;
  if (b.lo == b.hi && !infinite(a.lo) && !infinite(a.hi) && b.lo != kMin) {
    const Interval q = corners(a, b, floor_quotient);
    if (q.lo == q.hi) return {a.lo - q.lo * b.lo, a.hi - q.lo * b.lo};
  }
  return b.lo > 0 ? Interval{0, b.hi - 1} : Interval{b.lo + 1, 0};
}
// The remainder with the sign of the dividend.
FAJIT_SHARED Interval i_fmod(Interval a, Interval b) {
  if (spans_zero(b)) return kTop;
  const Interval m = i_abs(b);
  if (a.lo >= 0) return i_remainder(a, m);
  if (a.hi <= 0) return i_neg(i_remainder(i_neg(a), m));
  return {larger(a.lo, -(m.hi - 1)), smaller(a.hi, m.hi - 1)};
}

// The smallest 2^n - 1 that is at least x >= 0.
FAJIT_SHARED int64_t all_ones(int64_t x) {
  return x == 0 ? 0 : int64_t(~uint64_t(0) >> __builtin_clzll(uint64_t(x)));
}
// Bitwise results of n-bit two's complement numbers have n bits.
FAJIT_SHARED Interval same_bits(Interval a, Interval b) {
  const int64_t low = smaller(a.lo, b.lo), high = larger(a.hi, b.hi);
  const int64_t ones = all_ones(larger(low < 0 ? -1 - low : 0, high < 0 ? 0 : high));
  return {low < 0 ? -1 - ones : 0, ones};
}
FAJIT_SHARED bool single(Interval a, Interval b) { return a.lo == a.hi && b.lo == b.hi; }
FAJIT_SHARED Interval i_and(Interval a, Interval b) {
  if (single(a, b)) return {a.lo & b.lo, a.lo & b.lo};
  if (a.lo >= 0 && b.lo >= 0) return {0, smaller(a.hi, b.hi)};
  if (a.lo >= 0) return {0, a.hi};
  if (b.lo >= 0) return {0, b.hi};
  return same_bits(a, b);
}
FAJIT_SHARED Interval i_or(Interval a, Interval b) {
  if (single(a, b)) return {a.lo | b.lo, a.lo | b.lo};
  Interval r = same_bits(a, b);
  if (a.lo >= 0 && b.lo >= 0) r.lo = larger(a.lo, b.lo);
  return r;
}
FAJIT_SHARED Interval i_xor(Interval a, Interval b) {
  if (single(a, b)) return {a.lo ^ b.lo, a.lo ^ b.lo};
  return same_bits(a, b);
}
FAJIT_SHARED int64_t power_of_two(int64_t n) { return int64_t(1) << n; }
FAJIT_SHARED Interval i_shl(Interval a, Interval b) {
  if (b.lo < 0 || b.hi > 61) return kTop;
  return i_mul(a, {power_of_two(b.lo), power_of_two(b.hi)});
}
FAJIT_SHARED Interval i_shr(Interval a, Interval b) {
  if (b.lo < 0 || b.hi > 61) return kTop;
  return i_floordiv(a, {power_of_two(b.lo), power_of_two(b.hi)});
}

// A value of a machine dtype: its whole range if the exact result may be outside.
FAJIT_SHARED Interval i_wrap(Interval a, int64_t lo, int64_t hi) {
  return fits(a, lo, hi) ? a : Interval{lo, hi};
}
FAJIT_SHARED Interval i_where(Tri c, Interval a, Interval b) {
  return c.must ? a : (c.may ? i_hull(a, b) : b);
}
FAJIT_SHARED Interval i_top(int64_t lo, int64_t hi) { return {lo, hi}; }
FAJIT_SHARED Interval i_point(int64_t x) { return {x, x}; }

// Splits x by the periods of (value + offset): the first incomplete period, the whole periods, the
// last incomplete one. Returns the number of parts.
FAJIT_SHARED int periods(Interval x, Interval offset, Interval divisor, Interval parts[3]) {
  const int64_t d = divisor.lo, o = offset.lo;
  const bool known = d == divisor.hi && o == offset.hi && positions(offset) && positions(x);
  if (!known || d <= 1 || d > kMaxPosition || x.lo > x.hi) return 1;
  // The begin of the first whole period, and the end of the last.
  int64_t first = x.lo + o + d - 1, last = x.hi + o + 1;
  FAJIT_ROLLED
  for (int end = 0; end < 2; ++end) {
    const int64_t border = floor_quotient(end == 0 ? first : last, d) * d - o;
    first = end == 0 ? border : first;
    last = end == 0 ? last : border;
  }
  if (first > x.hi || last <= x.lo) return 1;
  const Interval begin = {x.lo, first - 1}, middle = {first, last - 1}, end = {last, x.hi};
  const bool begins = first > x.lo, whole = last > first, ends = last <= x.hi;
  // Every index is constant, so a GPU keeps the parts in registers.
  parts[0] = begins ? begin : (whole ? middle : end);
  parts[1] = begins && whole ? middle : end;
  parts[2] = end;
  return begins + whole + ends;
}

// The state of a box, or, if it is partial, the state from those of its parts. One loop over the
// box and its parts, so `box` is inlined once.
template <class F>
FAJIT_SHARED int by_parts(F box, Interval q, Interval k, const Interval (&parts_q)[3], int count_q,
                          const Interval (&parts_k)[3], int count_k) {
  bool keep = false, drop = false;
  int i = 0, j = -1;  // -1: the whole box
  do {
    const Interval part_q = j < 0 ? q : (i == 0 ? parts_q[0] : i == 1 ? parts_q[1] : parts_q[2]);
    const Interval part_k = j < 0 ? k : (j == 0 ? parts_k[0] : j == 1 ? parts_k[1] : parts_k[2]);
    const int state = box(part_q, part_k);
    if (j < 0) {
      if (state != FAJIT_TILE_PARTIAL || count_q * count_k == 1) return state;
    } else {
      keep |= state != FAJIT_TILE_EMPTY;
      drop |= state != FAJIT_TILE_FULL;
      if (keep && drop) return FAJIT_TILE_PARTIAL;
    }
    if (++j == count_k) j = 0, ++i;
  } while (i < count_q);
  return keep ? FAJIT_TILE_FULL : FAJIT_TILE_EMPTY;
}

// --- conditions ----------------------------------------------------------------------------------

FAJIT_SHARED Tri t_not(Tri a) { return {!a.must, !a.may}; }
FAJIT_SHARED Tri t_and(Tri a, Tri b) { return {a.may && b.may, a.must && b.must}; }
FAJIT_SHARED Tri t_or(Tri a, Tri b) { return {a.may || b.may, a.must || b.must}; }
FAJIT_SHARED Tri t_hull(Tri a, Tri b) { return {a.may || b.may, a.must && b.must}; }
FAJIT_SHARED Tri t_where(Tri c, Tri a, Tri b) { return c.must ? a : (c.may ? t_hull(a, b) : b); }
FAJIT_SHARED Tri t_xor(Tri a, Tri b) { return t_or(t_and(a, t_not(b)), t_and(t_not(a), b)); }

FAJIT_SHARED Tri i_ge(Interval a, Interval b) { return {a.hi >= b.lo, a.lo >= b.hi}; }
FAJIT_SHARED Tri i_gt(Interval a, Interval b) { return {a.hi > b.lo, a.lo > b.hi}; }
FAJIT_SHARED Tri i_le(Interval a, Interval b) { return i_ge(b, a); }
FAJIT_SHARED Tri i_lt(Interval a, Interval b) { return i_gt(b, a); }
FAJIT_SHARED Tri i_eq(Interval a, Interval b) {
  return {a.lo <= b.hi && b.lo <= a.hi, a.lo == a.hi && is(b, a.lo) && !infinite(a.lo)};
}
FAJIT_SHARED Tri i_ne(Interval a, Interval b) { return t_not(i_eq(a, b)); }

}  // namespace interval
}  // namespace fajit
