// The IR's operations on scalars: what hooks rendered for CUDA are written in.
//
// The names and meanings are those of fajit/cpu/hook_ops.h, where every operation is overloaded on
// vectors too; here a thread holds one value. Register types by IR dtype: bool; int8, uint8, int16,
// int32 -> int32_t; int64; float32 -> float; float64 -> double.
//
// Meaning is PyTorch's: integer arithmetic wraps, floor division and remainder follow the divisor's
// sign, minimum and maximum propagate NaN. Where PyTorch raises (integer division by zero) the
// result is 0, because a masked-out pair may compute anything but must not trap.
#pragma once
#include <fajit/context.h>
#include <fajit/cuda/hooks/math.h>
#include <fajit/cuda/hooks/storage.h>
#include <fajit/cuda/hooks/types.h>
#include <fajit/divide.h>
#include <fajit/fold.h>

namespace fajit {
namespace ops {

// --- types -------------------------------------------------------------------------------------

template <class T> struct value_of { using type = T; };
template <class T> struct value_of<const T> { using type = T; };
template <class T> struct value_of<T&> : value_of<T> {};
template <class T> using Value = typename value_of<T>::type;

template <class T> inline constexpr bool is_float = same<T, float> || same<T, double>;

// The type of an operation's result: its first argument's, unless that is a bool or an int32 used
// beside a wider one.
template <class A, class B> struct wide_of { using type = A; };
template <class B> struct wide_of<bool, B> { using type = B; };
template <> struct wide_of<int32_t, int64_t> { using type = int64_t; };
template <> struct wide_of<uint32_t, int64_t> { using type = int64_t; };
template <> struct wide_of<float, double> { using type = double; };
template <class A, class B> using Wide = typename wide_of<A, B>::type;

template <class W, class T> FAJIT_FN W widen(T x) { return W(x); }

// Hooks given as C++ text are called through these.
template <class S, class F> FAJIT_FN S each_lane(S s, F f) { return f(s); }
template <class S, class F>
FAJIT_FN S each_lane(S s, int32_t h, int32_t q, int32_t k, F f) { return f(s, h, q, k); }
template <class F> FAJIT_FN bool mask_lanes(int32_t h, int32_t q, int32_t k, F f) {
  return f(h, q, k);
}

// --- conversions ---------------------------------------------------------------------------------

// 8- and 16-bit integers live in 32-bit registers; this wraps a result to their range.
template <class D, class T> FAJIT_FN T wrap(T x) {
  if constexpr (same<D, dt::u8>) return T(x & 255);
  else if constexpr (same<D, dt::i8>) return T(int8_t(x));
  else if constexpr (same<D, dt::i16>) return T(int16_t(x));
  else return x;
}

template <class From, class To, class T> FAJIT_FN auto cast(T x) {
  using L = typename To::type;
  if constexpr (same<To, dt::b1>) return bool(x != T{});
  else return wrap<To>(L(x));
}

template <class T> struct unsigned_of { using type = T; };
template <> struct unsigned_of<int32_t> { using type = uint32_t; };
template <> struct unsigned_of<int64_t> { using type = uint64_t; };
template <class T> using Unsigned = typename unsigned_of<T>::type;

// --- arithmetic ----------------------------------------------------------------------------------

#define FAJIT_BINARY(name, op)                               \
  template <class A, class B> FAJIT_FN auto name(A a, B b) { \
    using W = Wide<A, B>;                                    \
    return W(Unsigned<W>(a) op Unsigned<W>(b));              \
  }
FAJIT_BINARY(add, +)
FAJIT_BINARY(sub, -)
FAJIT_BINARY(mul, *)
#undef FAJIT_BINARY

template <class A, class B> FAJIT_FN auto div(A a, B b) {
  using W = Wide<A, B>;
  return W(W(a) / W(b));
}

namespace scalar {
template <class T> FAJIT_FN T truncdiv(T a, T b) {
  if constexpr (is_float<T>) {
    return math::trunc(T(a / b));
  } else {
    if (b == 0) return 0;
    if (b == -1) return T(0 - Unsigned<T>(a));  // the quotient of the least value wraps
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
    const T m = math::fmod(a, b);
    T d = (a - m) / b;
    if (m != 0 && ((b < 0) != (m < 0))) d -= 1;
    const T f = math::floor(d);
    const T r = d - f > T(0.5) ? f + 1 : f;
    // A zero keeps the quotient's sign, and x // 0 is the quotient.
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

#define FAJIT_DIVISION(name)                                 \
  template <class A, class B> FAJIT_FN auto name(A a, B b) { \
    using W = Wide<A, B>;                                    \
    return scalar::name(W(a), W(b));                         \
  }
FAJIT_DIVISION(truncdiv)
FAJIT_DIVISION(fmod)
FAJIT_DIVISION(floordiv)
FAJIT_DIVISION(remainder)
#undef FAJIT_DIVISION

// By a divisor that the host prepared; a quotient takes about ten instructions.
FAJIT_FN int32_t truncdiv(int32_t a, const Divisor& d) {
  const uint32_t q = d.divide(a < 0 ? 0u - uint32_t(a) : uint32_t(a));
  return int32_t((a ^ d.value) < 0 ? 0u - q : q);
}
FAJIT_FN int32_t floordiv(int32_t a, const Divisor& d) {
  // The floor of a negative quotient -n / d is -1 - (n - 1) / d.
  const bool negative = a != 0 && (a ^ d.value) < 0;
  const uint32_t n = a < 0 ? 0u - uint32_t(a) : uint32_t(a);
  const uint32_t q = d.divide(negative ? n - 1 : n);
  return d.value != 0 ? int32_t(negative ? ~q : q) : 0;
}
FAJIT_FN int32_t remainder(int32_t a, const Divisor& d) {
  const uint32_t m = uint32_t(a) - uint32_t(floordiv(a, d)) * uint32_t(d.value);
  return d.value != 0 ? int32_t(m) : 0;
}
FAJIT_FN int32_t fmod(int32_t a, const Divisor& d) {
  const uint32_t m = uint32_t(a) - uint32_t(truncdiv(a, d)) * uint32_t(d.value);
  return d.value != 0 ? int32_t(m) : 0;
}

template <class A, class B> FAJIT_FN auto pow(A a, B b) {
  using W = Wide<A, B>;
  if constexpr (is_float<W>) return math::pow(W(a), W(b));
  else return scalar::ipow(W(a), W(b));
}

template <class A, class B> FAJIT_FN auto atan2(A a, B b) {
  using W = Wide<A, B>;
  return math::atan2(W(a), W(b));
}

template <class A> FAJIT_FN A neg(A a) {
  if constexpr (is_float<A>) return -a;
  else return A(0 - Unsigned<A>(a));
}

// --- comparison and choice -----------------------------------------------------------------------

#define FAJIT_COMPARE(name, op) \
  template <class A, class B> FAJIT_FN bool name(A a, B b) { return a op b; }
FAJIT_COMPARE(ge, >=)
FAJIT_COMPARE(gt, >)
FAJIT_COMPARE(le, <=)
FAJIT_COMPARE(lt, <)
FAJIT_COMPARE(eq, ==)
FAJIT_COMPARE(ne, !=)
#undef FAJIT_COMPARE

template <class A, class B> FAJIT_FN auto where(bool c, A a, B b) {
  using W = Wide<A, B>;
  return c ? W(a) : W(b);
}

template <class A> FAJIT_FN bool isnan(A a) { return a != a; }

template <class A> FAJIT_FN A abs(A a) {
  if constexpr (is_float<A>) return math::abs(a);
  else return a < 0 ? neg(a) : a;
}

template <class A> FAJIT_FN bool isinf(A a) { return math::abs(a) == A(math::kInf); }

template <class A, class B> FAJIT_FN auto maximum(A a, B b) {
  using W = Wide<A, B>;
  const W x = W(a), y = W(b);
  if constexpr (is_float<W>) return x != x ? x : (y < x ? x : y);
  else return x > y ? x : y;
}

template <class A, class B> FAJIT_FN auto minimum(A a, B b) {
  using W = Wide<A, B>;
  const W x = W(a), y = W(b);
  if constexpr (is_float<W>) return x != x ? x : (y > x ? x : y);
  else return x < y ? x : y;
}

template <class A> FAJIT_FN A sign(A a) { return A((a > A{}) - (a < A{})); }

// --- bits ----------------------------------------------------------------------------------------

#define FAJIT_BITWISE(name, op)                              \
  template <class A, class B> FAJIT_FN auto name(A a, B b) { \
    using W = Wide<A, B>;                                    \
    return W(W(a) op W(b));                                  \
  }
FAJIT_BITWISE(and_, &)
FAJIT_BITWISE(or_, |)
FAJIT_BITWISE(xor_, ^)
#undef FAJIT_BITWISE

template <class A> FAJIT_FN A not_(A a) {
  if constexpr (same<A, bool>) return !a;
  else return ~a;
}

// Shifts by the width or more give what an unbounded shift would: 0, or the sign.
template <class A, class B> FAJIT_FN auto shl(A a, B b) {
  using W = Wide<A, B>;
  constexpr Unsigned<W> kBits = 8 * sizeof(W);
  const Unsigned<W> n = Unsigned<W>(W(b));
  return n < kBits ? W(Unsigned<W>(a) << n) : W(0);
}

template <class A, class B> FAJIT_FN auto shr(A a, B b) {
  using W = Wide<A, B>;
  constexpr Unsigned<W> kBits = 8 * sizeof(W);
  const Unsigned<W> n = Unsigned<W>(W(b));
  return W(W(a) >> (n < kBits ? n : kBits - 1));
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
FAJIT_UNARY(sqrt)
#undef FAJIT_UNARY

#define FAJIT_ROUNDING(name)                    \
  template <class A> FAJIT_FN A name(A a) {     \
    if constexpr (is_float<A>) return math::name(a); \
    else return a;                              \
  }
FAJIT_ROUNDING(floor)
FAJIT_ROUNDING(ceil)
FAJIT_ROUNDING(round)  // half to even, as torch.round
FAJIT_ROUNDING(trunc)
#undef FAJIT_ROUNDING

template <class A> FAJIT_FN A rsqrt(A a) { return A(1) / math::sqrt(a); }

// --- loads ---------------------------------------------------------------------------------------

// The element offset of one index: negative indices wrap, others are clamped into the tensor.
// 32-bit indices are wrapped and clamped in 32 bits; a dim beyond 2^31 - 1 is cut there.
// Natural: the index is not negative. Offsets along a unit stride stay narrow.
template <bool Unit, bool Natural = false, class I>
FAJIT_FN auto offset(const fajit_tensor& t, int dim, I index) {
  using N = decltype(index + 0);  // bool counts as int
  constexpr int64_t kMost = sizeof(N) == 4 ? INT32_MAX : INT64_MAX;
  const N size = N(t.sizes[dim] < kMost ? t.sizes[dim] : kMost);
  N i = N(index);
  if constexpr (Natural) {  // a dim of size 0 has no element to clamp to, and is not read
    i = Unsigned<N>(i) < Unsigned<N>(size - 1) ? i : size - 1;
  } else {
    i = i < 0 ? i + size : i;
    i = i < size ? i : size - 1;
    i = i < 0 ? 0 : i;
  }
  const Unsigned<N> place = Unsigned<N>(i);
  if constexpr (Unit) return place;
  else return int64_t(place) * t.strides[dim];
}

// The first element of a param, and the one `offset` elements on.
template <class D> FAJIT_FN auto place(const fajit_tensor& t) {
  return static_cast<const typename storage<D>::type*>(t.ptr);
}
template <class S, class O> FAJIT_FN const S* moved(const S* place, O offset) {
  return place + offset;
}

// The value of an element as hooks see it.
template <class D, class S> FAJIT_FN auto value_at(const S* place) {
  const S x = load_global(place);
  if constexpr (same<D, dt::b1>) return bool(x);
  else if constexpr (same<D, dt::f16>) return half_to_float(x);
  else if constexpr (same<D, dt::bf16>) return bfloat16_to_float(x);
  else if constexpr (same<D, dt::e4m3>) return e4m3_to_float(x);
  else if constexpr (same<D, dt::e5m2>) return e5m2_to_float(x);
  else if constexpr (sizeof(S) < 4) return int32_t(x);
  else return x;
}

// The element at `place`. A param without elements (numel 0) has no readable address: it gives 0.
template <class D, class S> FAJIT_FN auto read(const fajit_tensor& t, const S* place) {
  using R = decltype(value_at<D>(place));
  return t.ptr == nullptr ? R{} : value_at<D>(place);
}
// Element `i` of the last dim, from `place` on.
template <class D, class S>
FAJIT_FN auto read_at(const fajit_tensor& t, const S* p, int dim, int i) {
  return read<D>(t, p + i * t.strides[dim]);
}

template <class D> FAJIT_FN auto load_scalar(const fajit_tensor& t, int64_t offset) {
  return value_at<D>(place<D>(t) + offset);
}
template <class D> FAJIT_FN auto load(const fajit_tensor& t, int64_t offset) {
  return read<D>(t, place<D>(t) + offset);
}

// Rank of `value` in a sorted 1-D param, as torch.searchsorted.
template <class D, bool Right, class V> FAJIT_FN int64_t searchsorted(const fajit_tensor& t, V x) {
  int64_t lo = 0, hi = t.ptr == nullptr ? 0 : t.sizes[0];
  while (lo < hi) {
    const int64_t mid = lo + (hi - lo) / 2;
    const auto y = load_scalar<D>(t, mid * t.strides[0]);
    if (Right ? !(y > x) : y < x) lo = mid + 1;
    else hi = mid;
  }
  return lo;
}

// --- lengths and slots ---------------------------------------------------------------------------

FAJIT_FN int32_t request(const Context& c, int64_t b) {
  const int32_t n = c.args->num_requests;
  b = b < 0 ? b + n : b;
  return b < 0 || b >= n ? 0 : int32_t(b);
}
FAJIT_FN int32_t q_len(const Context& c, int64_t b) {
  return load_global(c.args->q_len + request(c, b));
}
FAJIT_FN int32_t kv_len(const Context& c, int64_t b) {
  return load_global(c.args->kv_len + request(c, b));
}
FAJIT_FN int64_t q_row(const Context& c, int64_t b, int64_t q_idx) {
  const int32_t r = request(c, b);
  return q_idx + load_global(c.args->q_token0 + r) - load_global(c.args->q_offset + r);
}
// Where K and V are paged, the slot of a key that exists; else 0.
FAJIT_FN int64_t kv_slot(const Context& c, int64_t b, int64_t kv_idx) {
  const fajit_args& a = *c.args;
  const int32_t r = c.kv_request >= 0 ? c.kv_request : request(c, b);
  if (a.page_indptr == nullptr) return kv_idx + load_global(a.kv_token0 + r);
  const int32_t first = a.kv_first == nullptr ? 0 : load_global(a.kv_first + r);
  if (kv_idx < first || kv_idx >= load_global(a.kv_len + r)) return 0;
  const int32_t key = int32_t(kv_idx) - first, page = key / a.page_size;
  const int32_t index = load_global(a.page_indices + load_global(a.page_indptr + r) + page);
  return int64_t(index) * a.page_size + (key - page * a.page_size);
}

}  // namespace ops
}  // namespace fajit
