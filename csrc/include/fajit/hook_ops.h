// The IR's operations: the functions that rendered hooks call, on CPUs and on CUDA.
//
// Every function takes scalars, vectors, or a mix (see hook_types.h), so one rendered hook can be
// used with query rows on lanes or keys on lanes, and uniform sub-expressions stay scalar.
//
// Results are PyTorch's: integer arithmetic wraps, floor division and remainder follow the
// divisor's sign, minimum and maximum propagate NaN. Where PyTorch raises (integer division by
// zero) the result is 0, because a masked-out pair must not trap.
//
// Included by fajit/cpu/hooks/hook_ops.h and fajit/cuda/hooks/hook_ops.h after their own
// definitions: `math`, conversions of small floats, and the functions for vectors.
#pragma once
#include <fajit/context.h>
#include <fajit/divide.h>
#include <fajit/fold.h>
#include <fajit/hook_types.h>

namespace fajit {
namespace ops {

// --- conversions ---------------------------------------------------------------------------------

// Wraps a result to the range of D: 8- and 16-bit integers are held in 32-bit registers.
template <class D, class T> FAJIT_FN T wrap(T x) {
  using S = typename storage<D>::type;
  constexpr int kSpare = 32 - 8 * int(sizeof(S));
  if constexpr (same<D, dt::b1> || kSpare <= 0) return x;
  else if constexpr (same<D, dt::u8>) return x & 255;
  else if constexpr (is_vector<T>) return T(x << kSpare) >> kSpare;
  else return T(S(x));
}

template <class From, class To, class T> FAJIT_FN auto cast(T x) {
  if constexpr (is_vector<T>) return wrap<To>(cast_lanes(From{}, To{}, x));
  else if constexpr (same<To, dt::b1>) return bool(x != T{});
  else return wrap<To>(typename To::type(x));
}

// --- arithmetic ----------------------------------------------------------------------------------

#define FAJIT_BINARY(name, op)                                              \
  template <class A, class B> FAJIT_FN auto name(A a, B b) {                \
    using W = Wide<A, B>;                                                   \
    using U = Unsigned<W>;                                                  \
    if constexpr (is_vector<W>) return W(U(widen<W>(a)) op U(widen<W>(b))); \
    else return W(U(a) op U(b));                                            \
  }
FAJIT_BINARY(add, +)
FAJIT_BINARY(sub, -)
FAJIT_BINARY(mul, *)
FAJIT_BINARY(and_, &)
FAJIT_BINARY(or_, |)
FAJIT_BINARY(xor_, ^)
#undef FAJIT_BINARY

template <class A, class B> FAJIT_FN auto div(A a, B b) {
  using W = Wide<A, B>;
  return W(widen<W>(a) / widen<W>(b));
}

namespace scalar {
template <class T> FAJIT_FN T truncdiv(T a, T b) {
  if constexpr (is_float<T>) {
    return sizeof(T) == 4 ? T(__builtin_truncf(a / b)) : T(__builtin_trunc(a / b));
  } else {
    if (b == 0) return 0;
    if (b == -1) return T(0 - Unsigned<T>(a));  // the quotient of the smallest value wraps
    return T(quotient(a, b));
  }
}
template <class T> FAJIT_FN T fmod(T a, T b) {
  if constexpr (is_float<T>) return math::fmod(a, b);
  else return b == 0 || b == -1 ? T(0) : T(a - quotient(a, b) * b);
}
template <class T> FAJIT_FN T remainder(T a, T b) {
  const T m = fmod(a, b);
  return m != 0 && ((m < 0) != (b < 0)) ? m + b : m;
}
template <class T> FAJIT_FN T floordiv(T a, T b) {
  if constexpr (is_float<T>) {
    const T m = fmod(a, b);
    T d = (a - m) / b;
    if (m != 0 && ((b < 0) != (m < 0))) d -= 1;
    const T f = sizeof(T) == 4 ? T(__builtin_floorf(d)) : T(__builtin_floor(d));
    const T r = d - f > T(0.5) ? f + 1 : f;
    // A zero has the quotient's sign, and x // 0 is the quotient.
    return b == 0 ? a / b : (d == 0 ? T(0) * (a / b) : r);
  } else {
    const T q = truncdiv(a, b), m = T(Unsigned<T>(a) - Unsigned<T>(q) * Unsigned<T>(b));
    return b != 0 && m != 0 && ((a < 0) != (b < 0)) ? q - 1 : q;
  }
}
template <class T> FAJIT_FN T ipow(T base, T exponent) {
  if (exponent < 0) return base == 1 ? 1 : (base == -1 ? (exponent & 1 ? -1 : 1) : 0);
  Unsigned<T> r = 1, x = Unsigned<T>(base);
  for (; exponent; exponent >>= 1, x *= x)
    if (exponent & 1) r *= x;
  return T(r);
}
}  // namespace scalar

#define FAJIT_DIVISION(name)                                                  \
  template <class A, class B> FAJIT_FN auto name(A a, B b) {                  \
    using W = Wide<A, B>;                                                     \
    using L = Lane<W>;                                                        \
    if constexpr (is_vector<W>)                                               \
      return name##_lanes(a, b, [](L x, L y) { return scalar::name(x, y); }); \
    else return scalar::name(W(a), W(b));                                     \
  }
FAJIT_DIVISION(truncdiv)
FAJIT_DIVISION(fmod)
FAJIT_DIVISION(floordiv)
FAJIT_DIVISION(remainder)
#undef FAJIT_DIVISION

template <class A, class B> FAJIT_FN auto pow(A a, B b) {
  using W = Wide<A, B>;
  using L = Lane<W>;
  if constexpr (is_float<W>) return math::pow(widen<W>(a), widen<W>(b));
  else return each_lane([](L x, L y) { return scalar::ipow(x, y); }, a, b);
}

template <class A, class B> FAJIT_FN auto atan2(A a, B b) {
  using W = Wide<A, B>;
  return math::atan2(widen<W>(a), widen<W>(b));
}

template <class A> FAJIT_FN A neg(A a) {
  if constexpr (is_float<A>) return -a;
  else return A(0 - Unsigned<A>(a));
}

// --- comparison and choice -----------------------------------------------------------------------

#define FAJIT_COMPARE(name, op)                                             \
  template <class A, class B> FAJIT_FN auto name(A a, B b) {                \
    using W = Wide<A, B>;                                                   \
    if constexpr (is_vector<W>) return mask_of(widen<W>(a) op widen<W>(b)); \
    else return bool(a op b);                                               \
  }
FAJIT_COMPARE(ge, >=)
FAJIT_COMPARE(gt, >)
FAJIT_COMPARE(le, <=)
FAJIT_COMPARE(lt, <)
FAJIT_COMPARE(eq, ==)
FAJIT_COMPARE(ne, !=)
#undef FAJIT_COMPARE

template <class C, class A, class B> FAJIT_FN auto where(C c, A a, B b) {
  using W = Wide<A, B>;
  if constexpr (is_vector<C>) return select_lanes(c, a, b);
  else return c ? widen<W>(a) : widen<W>(b);
}

template <class A> FAJIT_FN auto isnan(A a) { return ne(a, a); }

template <class A> FAJIT_FN A abs(A a) {
  if constexpr (!is_float<A>) return A(a < A{} ? neg(a) : a);
  else if constexpr (is_vector<A>) return a < A{} ? -a : a + A{};  // -0.0 + 0.0 is 0.0
  else return sizeof(A) == 4 ? A(__builtin_fabsf(a)) : A(__builtin_fabs(a));
}

template <class A> FAJIT_FN auto isinf(A a) { return eq(abs(a), Lane<A>(__builtin_inf())); }

template <class A, class B> FAJIT_FN auto maximum(A a, B b) {
  using W = Wide<A, B>;
  const W x = widen<W>(a), y = widen<W>(b);
  if constexpr (is_float<W>) return W(x != x ? x : (y < x ? x : y));
  else return W(x > y ? x : y);
}

template <class A, class B> FAJIT_FN auto minimum(A a, B b) {
  using W = Wide<A, B>;
  const W x = widen<W>(a), y = widen<W>(b);
  if constexpr (is_float<W>) return W(x != x ? x : (y > x ? x : y));
  else return W(x < y ? x : y);
}

template <class A> FAJIT_FN A sign(A a) {
  const A zero{};
  if constexpr (is_vector<A>) return (a > zero ? zero + 1 : zero) - (a < zero ? zero + 1 : zero);
  else return A((a > zero) - (a < zero));
}

// --- bits ----------------------------------------------------------------------------------------

template <class A> FAJIT_FN A not_(A a) {
  if constexpr (same<A, bool>) return !a;
  else return ~a;
}

// A shift by the width or more gives 0, or the sign for a negative value shifted right.
template <class A, class B> FAJIT_FN auto shl(A a, B b) {
  using W = Wide<A, B>;
  using U = Unsigned<W>;
  constexpr Unsigned<Lane<W>> kBits = 8 * sizeof(Lane<W>);
  const U n = U(widen<W>(b));
  if constexpr (is_vector<W>) return W(n < kBits ? U(widen<W>(a)) << (n < kBits ? n : U{}) : U{});
  else return n < kBits ? W(U(a) << n) : W(0);
}

template <class A, class B> FAJIT_FN auto shr(A a, B b) {
  using W = Wide<A, B>;
  using U = Unsigned<W>;
  constexpr Unsigned<Lane<W>> kBits = 8 * sizeof(Lane<W>);
  const U n = U(widen<W>(b));
  return W(widen<W>(a) >> (n < kBits ? n : U{} + (kBits - 1)));
}

// --- functions -----------------------------------------------------------------------------------

#define FAJIT_UNARY(name) \
  template <class A> FAJIT_FN A name(A a) { return math::name(a); }
FAJIT_UNARY(exp)
FAJIT_UNARY(exp2)
FAJIT_UNARY(expm1)
FAJIT_UNARY(log)
FAJIT_UNARY(log2)
FAJIT_UNARY(log10)
FAJIT_UNARY(log1p)
FAJIT_UNARY(tanh)
FAJIT_UNARY(tanh_approx)
FAJIT_UNARY(sigmoid)
FAJIT_UNARY(sin)
FAJIT_UNARY(cos)
FAJIT_UNARY(tan)
FAJIT_UNARY(asin)
FAJIT_UNARY(acos)
FAJIT_UNARY(atan)
FAJIT_UNARY(sinh)
FAJIT_UNARY(cosh)
FAJIT_UNARY(erf)
#undef FAJIT_UNARY

#define FAJIT_ROUNDING(name, f32, f64)                                                            \
  template <class A> FAJIT_FN A name(A a) {                                                       \
    if constexpr (!is_float<A>) return a;                                                         \
    else if constexpr (sizeof(Lane<A>) == 4) return each_lane([](float x) { return f32(x); }, a); \
    else return each_lane([](double x) { return f64(x); }, a);                                    \
  }
FAJIT_ROUNDING(floor, __builtin_floorf, __builtin_floor)
FAJIT_ROUNDING(ceil, __builtin_ceilf, __builtin_ceil)
FAJIT_ROUNDING(round, __builtin_rintf, __builtin_rint)  // half to even, as torch.round
FAJIT_ROUNDING(trunc, __builtin_truncf, __builtin_trunc)
FAJIT_ROUNDING(sqrt, __builtin_sqrtf, __builtin_sqrt)
#undef FAJIT_ROUNDING

template <class A> FAJIT_FN A rsqrt(A a) { return div(Lane<A>(1), sqrt(a)); }

// --- params --------------------------------------------------------------------------------------

// Converts a stored element to the type that hooks compute with.
template <class D, class S> FAJIT_FN auto from_storage(S x) {
  if constexpr (same<D, dt::b1>) return bool(x);
  else if constexpr (same<D, dt::f16>) return half_to_float(x);
  else if constexpr (same<D, dt::bf16>) return bfloat16_to_float(x);
  else if constexpr (same<D, dt::e4m3>) return e4m3_to_float(x);
  else if constexpr (same<D, dt::e5m2>) return e5m2_to_float(x);
  else if constexpr (sizeof(S) < 4) return int32_t(x);
  else return x;
}

// The element at `offset` (in elements). The param must not be empty.
template <class D> FAJIT_FN auto load_scalar(const fajit_tensor& t, int64_t offset) {
  const auto* first = static_cast<const typename storage<D>::type*>(t.ptr);
  return from_storage<D>(load_global(first + offset));
}

// Rank of `value` in a sorted 1-D param, as torch.searchsorted.
template <class D, bool Right, class V> FAJIT_FN auto searchsorted(const fajit_tensor& t, V value) {
  const auto find = [&](auto x) {
    int64_t lo = 0, hi = t.ptr == nullptr ? 0 : t.sizes[0];
    while (lo < hi) {
      const int64_t mid = lo + (hi - lo) / 2;
      const auto y = load_scalar<D>(t, mid * t.strides[0]);
      if (Right ? !(y > x) : y < x) lo = mid + 1;
      else hi = mid;
    }
    return lo;
  };
  return each_lane(find, value);
}

// --- lengths -------------------------------------------------------------------------------------

FAJIT_FN int32_t request(const Context& c, int64_t b) {
  const int32_t n = c.args->num_requests;
  b = b < 0 ? b + n : b;
  return b < 0 || b >= n ? 0 : int32_t(b);
}
// The entry of a request, or of each lane's request.
template <class B> FAJIT_FN auto of_request(const Context& c, const int32_t* entries, B b) {
  return each_lane([&](int64_t r) { return load_global(entries + request(c, r)); }, b);
}
template <class B> FAJIT_FN auto q_len(const Context& c, B b) {
  return of_request(c, c.args->q_len, b);
}
template <class B> FAJIT_FN auto kv_len(const Context& c, B b) {
  return of_request(c, c.args->kv_len, b);
}
template <class B, class Q> FAJIT_FN auto q_row(const Context& c, B b, Q q_idx) {
  const auto wide = [](auto x) { return cast<dt::i32, dt::i64>(x); };
  return sub(add(wide(q_idx), wide(of_request(c, c.args->q_token0, b))),
             wide(of_request(c, c.args->q_offset, b)));
}

}  // namespace ops
}  // namespace fajit
