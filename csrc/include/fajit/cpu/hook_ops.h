// The IR's operations on scalars and vectors: what rendered hooks are written in.
//
// Every function is overloaded (by template) on a scalar, a vector of FAJIT_LANES values, or a
// mix, so one rendered hook serves both lane orientations and uniform sub-expressions stay scalar.
// Register types by IR dtype: bool -> bool | vi (0 / -1); int8, uint8, int16, int32 -> int32_t | vi;
// int64 -> int64_t | vl; float32 -> float | vf; float64 -> double | vd.
//
// Meaning is PyTorch's: integer arithmetic wraps, floor division and remainder follow the divisor's
// sign, minimum and maximum propagate NaN. Where PyTorch raises (integer division by zero) the
// result is 0, because a masked-out pair may compute anything but must not trap.
#pragma once
#include <fajit/context.h>
#include <fajit/cpu/fast_math.h>
#include <fajit/cpu/load_row.h>
#include <fajit/cpu/vec.h>
#include <fajit/fold.h>

namespace fajit {

// Tags for dtypes, and the scalar that holds a value of each.
namespace dt {
struct b1 { using type = bool; };
struct u8 { using type = int32_t; };
struct i8 { using type = int32_t; };
struct i16 { using type = int32_t; };
struct i32 { using type = int32_t; };
struct i64 { using type = int64_t; };
struct f32 { using type = float; };
struct f64 { using type = double; };
struct f16 {};
struct bf16 {};
struct e4m3 {};
struct e5m2 {};
}  // namespace dt

namespace ops {

// --- types -------------------------------------------------------------------------------------

template <class T> struct value_of { using type = T; };
template <class T> struct value_of<const T> { using type = T; };
template <class T> struct value_of<T&> : value_of<T> {};
template <class T> using Value = typename value_of<T>::type;

template <class A, class B> inline constexpr bool same = false;
template <class A> inline constexpr bool same<A, A> = true;

template <class T> inline constexpr bool is_vector = same<T, vf> || same<T, vi> || same<T, vl> || same<T, vd>;
template <class T> inline constexpr bool is_float = same<T, vf> || same<T, vd> || same<T, float> || same<T, double>;

template <class T> struct lane_of { using type = T; };
template <> struct lane_of<vf> { using type = float; };
template <> struct lane_of<vi> { using type = int32_t; };
template <> struct lane_of<vl> { using type = int64_t; };
template <> struct lane_of<vd> { using type = double; };
template <class T> using Lane = typename lane_of<T>::type;

template <class T> struct vector_of;
template <> struct vector_of<bool> { using type = vi; };
template <> struct vector_of<int32_t> { using type = vi; };
template <> struct vector_of<int64_t> { using type = vl; };
template <> struct vector_of<float> { using type = vf; };
template <> struct vector_of<double> { using type = vd; };
template <> struct vector_of<vi> { using type = vi; };
template <> struct vector_of<vl> { using type = vl; };
template <> struct vector_of<vf> { using type = vf; };
template <> struct vector_of<vd> { using type = vd; };
template <class T> using Vector = typename vector_of<T>::type;

// A vector if any is one; else the scalar.
template <class A, class B> struct wide_of { using type = A; };
template <class B> struct wide_of<float, B> { using type = B; };
template <class B> struct wide_of<double, B> { using type = B; };
template <class B> struct wide_of<int32_t, B> { using type = B; };
template <class B> struct wide_of<int64_t, B> { using type = B; };
template <class B> struct wide_of<bool, B> { using type = B; };
template <class A, class B> using Wide = typename wide_of<A, B>::type;

template <class W, class T> FAJIT_INLINE W widen(T x) {
  if constexpr (same<W, T>) {
    return x;
  } else if constexpr (same<T, bool>) {
    return W{} - Lane<W>(x);  // a mask lane is 0 or -1
  } else {
    return W{} + Lane<W>(x);
  }
}

// Calls `f` lane by lane: for rare operations and for hooks given as C++ text.
template <class S, class F> FAJIT_INLINE S each_lane(S s, F f) {
  if constexpr (is_vector<S>) {
    S r;
    for (int i = 0; i < FAJIT_LANES; ++i) r[i] = f(s[i]);
    return r;
  } else {
    return f(s);
  }
}

template <class T> FAJIT_INLINE auto lane(T x, int i) {
  if constexpr (is_vector<T>) return x[i];
  else return x;
}

template <class A, class B, class F> FAJIT_INLINE auto each_lane2(A a, B b, F f) {
  using W = Wide<A, B>;
  if constexpr (is_vector<W>) {
    W r;
    for (int i = 0; i < FAJIT_LANES; ++i) r[i] = f(lane(a, i), lane(b, i));
    return r;
  } else {
    return f(a, b);
  }
}

template <class S, class B, class H, class Q, class K, class F>
FAJIT_INLINE S each_lane(S s, B b, H h, Q q, K k, F f) {
  if constexpr (is_vector<S>) {
    S r;
    for (int i = 0; i < FAJIT_LANES; ++i)
      r[i] = f(s[i], lane(b, i), lane(h, i), lane(q, i), lane(k, i));
    return r;
  } else {
    return f(s, b, h, q, k);
  }
}

template <class B, class H, class Q, class K, class F>
FAJIT_INLINE auto mask_lanes(B b, H h, Q q, K k, F f) {
  if constexpr (is_vector<B> || is_vector<H> || is_vector<Q> || is_vector<K>) {
    vi r;
    for (int i = 0; i < FAJIT_LANES; ++i)
      r[i] = f(lane(b, i), lane(h, i), lane(q, i), lane(k, i)) ? -1 : 0;
    return r;
  } else {
    return bool(f(b, h, q, k));
  }
}

// --- conversions ---------------------------------------------------------------------------------

// 8- and 16-bit integers live in 32-bit registers; this wraps a result to their range.
template <class D, class T> FAJIT_INLINE T wrap(T x) {
  if constexpr (same<D, dt::u8>) return x & 255;
  else if constexpr (same<D, dt::i8>) return T((x << 24)) >> 24;
  else if constexpr (same<D, dt::i16>) return T((x << 16)) >> 16;
  else return x;
}

template <class From, class To, class T> FAJIT_INLINE auto cast(T x) {
  using L = typename To::type;
  if constexpr (same<To, dt::b1>) {
    if constexpr (same<From, dt::b1>) return x;
    else if constexpr (same<T, vl> || same<T, vd>) return __builtin_convertvector(x != T{}, vi);
    else if constexpr (is_vector<T>) return vi(x != T{});
    else return bool(x != T{});
  } else if constexpr (is_vector<T>) {
    if constexpr (same<From, dt::b1>) {
      return __builtin_convertvector(-x, Vector<L>);
    } else if constexpr (same<T, Vector<L>>) {
      return wrap<To>(x);
    } else {
      return wrap<To>(__builtin_convertvector(x, Vector<L>));
    }
  } else {
    return wrap<To>(L(x));
  }
}

template <class T> struct unsigned_of { using type = T; };
template <> struct unsigned_of<int32_t> { using type = uint32_t; };
template <> struct unsigned_of<int64_t> { using type = uint64_t; };
template <> struct unsigned_of<vi> { typedef uint32_t type __attribute__((vector_size(sizeof(vi)))); };
template <> struct unsigned_of<vl> { typedef uint64_t type __attribute__((vector_size(sizeof(vl)))); };
template <class T> using Unsigned = typename unsigned_of<T>::type;

// --- arithmetic ----------------------------------------------------------------------------------

#define FAJIT_BINARY(name, op)                                     \
  template <class A, class B> FAJIT_INLINE auto name(A a, B b) {   \
    using W = Wide<A, B>;                                          \
    return W(Unsigned<W>(widen<W>(a)) op Unsigned<W>(widen<W>(b))); \
  }
FAJIT_BINARY(add, +)
FAJIT_BINARY(sub, -)
FAJIT_BINARY(mul, *)
#undef FAJIT_BINARY

template <class A, class B> FAJIT_INLINE auto div(A a, B b) {
  using W = Wide<A, B>;
  return W(widen<W>(a) / widen<W>(b));
}

namespace scalar {
template <class T> FAJIT_INLINE T truncdiv(T a, T b) {
  if constexpr (is_float<T>) {
    return sizeof(T) == 4 ? T(__builtin_truncf(a / b)) : T(__builtin_trunc(a / b));
  } else {
    if (b == 0) return 0;
    if (b == -1) return T(0 - Unsigned<T>(a));  // the quotient of the least value wraps
    return a / b;
  }
}
template <class T> FAJIT_INLINE T fmod(T a, T b) {
  if constexpr (is_float<T>) {
    return sizeof(T) == 4 ? T(__builtin_fmodf(a, b)) : T(__builtin_fmod(a, b));
  } else {
    return b == 0 || b == -1 ? T(0) : T(a % b);
  }
}
template <class T> FAJIT_INLINE T remainder(T a, T b) {
  T m = fmod(a, b);
  return m != 0 && ((m < 0) != (b < 0)) ? m + b : m;
}
template <class T> FAJIT_INLINE T floordiv(T a, T b) {
  if constexpr (is_float<T>) {
    if (b == 0) return a / b;
    T m = fmod(a, b);
    T d = (a - m) / b;
    if (m != 0 && ((b < 0) != (m < 0))) d -= 1;
    if (d == 0) return T(0) * (a / b);  // keeps the quotient's sign
    T f = sizeof(T) == 4 ? T(__builtin_floorf(d)) : T(__builtin_floor(d));
    return d - f > T(0.5) ? f + 1 : f;
  } else {
    T q = truncdiv(a, b);
    return b != 0 && b != -1 && a % b != 0 && ((a < 0) != (b < 0)) ? q - 1 : q;
  }
}
template <class T> FAJIT_INLINE T ipow(T base, T exponent) {
  if (exponent < 0) return base == 1 ? 1 : (base == -1 ? (exponent & 1 ? -1 : 1) : 0);
  Unsigned<T> r = 1, x = Unsigned<T>(base);
  for (; exponent; exponent >>= 1, x *= x)
    if (exponent & 1) r *= x;
  return T(r);
}
}  // namespace scalar

// Exact for all int32: the double quotient of two 32-bit integers never rounds across an integer.
FAJIT_INLINE vi truncdiv_vi(vi a, vi b) {
  vd q = __builtin_convertvector(a, vd) / __builtin_convertvector(b, vd);
  vi r = __builtin_convertvector(__builtin_convertvector(q, vl), vi);
  return b == 0 ? vi{} : r;
}

#define FAJIT_DIVISION(name, vector_int32)                                     \
  template <class A, class B> FAJIT_INLINE auto name(A a, B b) {               \
    using W = Wide<A, B>;                                                      \
    using L = Lane<W>;                                                         \
    if constexpr (same<W, vi>) {                                               \
      const vi x = widen<vi>(a), y = widen<vi>(b), q = truncdiv_vi(x, y);      \
      [[maybe_unused]] const vi m = y == 0 ? vi{} : x - q * y;                 \
      [[maybe_unused]] const vi off = (m != 0) & ((m ^ y) < 0);                \
      return vi(vector_int32);                                                 \
    } else {                                                                   \
      return each_lane2(a, b, [](L x, L y) { return scalar::name(x, y); });    \
    }                                                                          \
  }
FAJIT_DIVISION(truncdiv, q)
FAJIT_DIVISION(fmod, m)
FAJIT_DIVISION(floordiv, q + off)
FAJIT_DIVISION(remainder, m + (off & y))
#undef FAJIT_DIVISION

template <class A, class B> FAJIT_INLINE auto pow(A a, B b) {
  using W = Wide<A, B>;
  using L = Lane<W>;
  if constexpr (is_float<W>) return math::pow(widen<W>(a), widen<W>(b));
  else return each_lane2(a, b, [](L x, L y) { return scalar::ipow(x, y); });
}

template <class A, class B> FAJIT_INLINE auto atan2(A a, B b) {
  using W = Wide<A, B>;
  return math::atan2(widen<W>(a), widen<W>(b));
}

template <class A> FAJIT_INLINE A neg(A a) {
  if constexpr (is_float<A>) return -a;
  else return A(0 - Unsigned<A>(a));
}

// --- comparison and choice -----------------------------------------------------------------------

template <class M> FAJIT_INLINE auto mask(M m) {
  if constexpr (sizeof(M) == sizeof(vl)) return __builtin_convertvector(m, vi);
  else return vi(m);
}

#define FAJIT_COMPARE(name, op)                                    \
  template <class A, class B> FAJIT_INLINE auto name(A a, B b) {   \
    using W = Wide<A, B>;                                          \
    if constexpr (is_vector<W>) return mask(widen<W>(a) op widen<W>(b)); \
    else return bool(a op b);                                      \
  }
FAJIT_COMPARE(ge, >=)
FAJIT_COMPARE(gt, >)
FAJIT_COMPARE(le, <=)
FAJIT_COMPARE(lt, <)
FAJIT_COMPARE(eq, ==)
FAJIT_COMPARE(ne, !=)
#undef FAJIT_COMPARE

template <class C, class A, class B> FAJIT_INLINE auto where(C c, A a, B b) {
  using W0 = Wide<A, B>;
  if constexpr (same<C, bool>) {
    return c ? widen<W0>(a) : widen<W0>(b);
  } else {
    using W = Vector<W0>;
    if constexpr (sizeof(W) == sizeof(vl)) {
      return W(__builtin_convertvector(c, vl) ? widen<W>(a) : widen<W>(b));
    } else {
      return W(c ? widen<W>(a) : widen<W>(b));
    }
  }
}

template <class A> FAJIT_INLINE auto isnan(A a) { return ne(a, a); }

template <class A> FAJIT_INLINE A abs(A a) {
  if constexpr (is_float<A> && !is_vector<A>) return sizeof(A) == 4 ? A(__builtin_fabsf(a)) : A(__builtin_fabs(a));
  else return where(lt(a, A{}), neg(a), is_float<A> ? A(a + A{}) : a);  // -0.0 + 0.0 is 0.0
}

template <class A> FAJIT_INLINE auto isinf(A a) {
  return eq(abs(a), Lane<A>(__builtin_inf()));
}

template <class A, class B> FAJIT_INLINE auto maximum(A a, B b) {
  using W = Wide<A, B>;
  const W x = widen<W>(a), y = widen<W>(b);
  if constexpr (is_float<W>) return where(isnan(x), x, where(lt(y, x), x, y));
  else return where(gt(x, y), x, y);
}

template <class A, class B> FAJIT_INLINE auto minimum(A a, B b) {
  using W = Wide<A, B>;
  const W x = widen<W>(a), y = widen<W>(b);
  if constexpr (is_float<W>) return where(isnan(x), x, where(gt(y, x), x, y));
  else return where(lt(x, y), x, y);
}

template <class A> FAJIT_INLINE A sign(A a) {
  const A zero{};
  return sub(where(gt(a, zero), widen<A>(Lane<A>(1)), zero),
             where(lt(a, zero), widen<A>(Lane<A>(1)), zero));
}

// --- bits ------------------------------------------------------------------------------------------

#define FAJIT_BITWISE(name, op)                                    \
  template <class A, class B> FAJIT_INLINE auto name(A a, B b) {   \
    using W = Wide<A, B>;                                          \
    return W(widen<W>(a) op widen<W>(b));                          \
  }
FAJIT_BITWISE(and_, &)
FAJIT_BITWISE(or_, |)
FAJIT_BITWISE(xor_, ^)
#undef FAJIT_BITWISE

template <class A> FAJIT_INLINE A not_(A a) {
  if constexpr (same<A, bool>) return !a;
  else return ~a;
}

// Shifts by the width or more give what an unbounded shift would: 0, or the sign.
template <class A, class B> FAJIT_INLINE auto shl(A a, B b) {
  using W = Wide<A, B>;
  using L = Lane<W>;
  constexpr L bits = 8 * sizeof(L);
  const W x = widen<W>(a), n = widen<W>(b);
  const auto ok = and_(ge(n, L(0)), lt(n, bits));
  return where(ok, W(Unsigned<W>(x) << Unsigned<W>(where(ok, n, W{}))), W{});
}

template <class A, class B> FAJIT_INLINE auto shr(A a, B b) {
  using W = Wide<A, B>;
  using L = Lane<W>;
  constexpr L bits = 8 * sizeof(L);
  const W x = widen<W>(a), n = widen<W>(b);
  const auto ok = and_(ge(n, L(0)), lt(n, bits));
  return W(x >> where(ok, n, widen<W>(L(bits - 1))));
}

// --- functions -------------------------------------------------------------------------------------

#define FAJIT_UNARY(name) \
  template <class A> FAJIT_INLINE A name(A a) { return math::name(a); }
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
#undef FAJIT_UNARY

#define FAJIT_ROUNDING(name, f32, f64)                                       \
  template <class A> FAJIT_INLINE A name(A a) {                              \
    if constexpr (!is_float<A>) return a;                                    \
    else if constexpr (sizeof(Lane<A>) == 4)                                 \
      return each_lane(a, [](float x) { return f32(x); });                   \
    else                                                                     \
      return each_lane(a, [](double x) { return f64(x); });                  \
  }
FAJIT_ROUNDING(floor, __builtin_floorf, __builtin_floor)
FAJIT_ROUNDING(ceil, __builtin_ceilf, __builtin_ceil)
FAJIT_ROUNDING(round, __builtin_rintf, __builtin_rint)  // half to even, as torch.round
FAJIT_ROUNDING(trunc, __builtin_truncf, __builtin_trunc)
FAJIT_ROUNDING(sqrt, __builtin_sqrtf, __builtin_sqrt)
#undef FAJIT_ROUNDING

template <class A> FAJIT_INLINE A rsqrt(A a) { return div(Lane<A>(1), sqrt(a)); }

// --- loads -----------------------------------------------------------------------------------------

template <class D> struct storage { using type = typename D::type; };
template <> struct storage<dt::b1> { using type = uint8_t; };
template <> struct storage<dt::u8> { using type = uint8_t; };
template <> struct storage<dt::i8> { using type = int8_t; };
template <> struct storage<dt::i16> { using type = int16_t; };
template <> struct storage<dt::f16> { using type = uint16_t; };
template <> struct storage<dt::bf16> { using type = uint16_t; };
template <> struct storage<dt::e4m3> { using type = uint8_t; };
template <> struct storage<dt::e5m2> { using type = uint8_t; };

template <class D> FAJIT_INLINE auto load_scalar(const fajit_tensor& t, int64_t offset) {
  using S = typename storage<D>::type;
  const S x = static_cast<const S*>(t.ptr)[offset];
  if constexpr (same<D, dt::b1>) return bool(x);
  else if constexpr (same<D, dt::f16>) return half_to_float(x);
  else if constexpr (same<D, dt::bf16>) return bfloat16_to_float(x);
  else if constexpr (same<D, dt::e4m3>) return e4m3_to_float(x);
  else if constexpr (same<D, dt::e5m2>) return e5m2_to_float(x);
  else if constexpr (sizeof(S) < 4) return int32_t(x);
  else return x;
}

FAJIT_INLINE vl cast_index(vl i) { return i; }
FAJIT_INLINE vl cast_index(vi i) { return __builtin_convertvector(i, vl); }

// The element offset of one index: negative indices wrap, others are clamped into the tensor.
template <bool Unit, class I> FAJIT_INLINE auto offset(const fajit_tensor& t, int dim, I index) {
  const int64_t size = t.sizes[dim], stride = Unit ? 1 : t.strides[dim];
  if constexpr (is_vector<I>) {
    vl i = cast_index(index);
    i = i < 0 ? i + size : i;
    i = i > size - 1 ? widen<vl>(size - 1) : i;
    i = i < 0 ? vl{} : i;
    return vl(i * stride);
  } else {
    int64_t i = int64_t(index);
    i = i < 0 ? i + size : i;
    i = i > size - 1 ? size - 1 : i;
    return (i < 0 ? 0 : i) * stride;
  }
}

// The 32-bit entries of `p` at 64-bit offsets. The hardware gathers read no lane of a masked-off
// pair differently: offsets are clamped, so every lane is readable.
template <class S> FAJIT_INLINE auto gather32(const S* p, vl offset) {
  static_assert(sizeof(S) == 4);
  Vector<S> r;
#if FAJIT_LANES == 16
  typedef float half_f __attribute__((vector_size(32)));
  typedef long long half_l __attribute__((vector_size(64)));
  half_l o[2];
  __builtin_memcpy(o, &offset, sizeof o);
  half_f lo = __builtin_ia32_gatherdiv16sf(half_f{}, p, o[0], -1, 4);
  half_f hi = __builtin_ia32_gatherdiv16sf(half_f{}, p, o[1], -1, 4);
  __builtin_memcpy(&r, &lo, 32);
  __builtin_memcpy(reinterpret_cast<char*>(&r) + 32, &hi, 32);
#else
  for (int i = 0; i < FAJIT_LANES; ++i) r[i] = p[offset[i]];
#endif
  return r;
}

// A param without elements (numel 0) has no readable address; its loads give 0.
template <class D, class O> FAJIT_INLINE auto load(const fajit_tensor& t, O offset) {
  using R = decltype(load_scalar<D>(t, 0));
  if constexpr (is_vector<O>) {
    Vector<R> r{};
    if (t.ptr == nullptr) return r;
    if constexpr (same<D, dt::f32>) return gather32(static_cast<const float*>(t.ptr), offset);
    if constexpr (same<D, dt::i32>) return gather32(static_cast<const int32_t*>(t.ptr), offset);
    for (int i = 0; i < FAJIT_LANES; ++i) {
      if constexpr (same<R, bool>) r[i] = -int32_t(load_scalar<D>(t, offset[i]));
      else r[i] = load_scalar<D>(t, offset[i]);
    }
    return r;
  } else {
    return t.ptr == nullptr ? R{} : load_scalar<D>(t, offset);
  }
}

// Element `i` of the last dim behind `offset`.
template <class D, class O>
FAJIT_INLINE auto load_at(const fajit_tensor& t, O offset, int dim, int i) {
  return load<D>(t, O(offset + i * t.strides[dim]));
}

// Rank of `value` in a sorted 1-D param, as torch.searchsorted.
template <class D, bool Right, class V> FAJIT_INLINE auto searchsorted(const fajit_tensor& t, V value) {
  auto find = [&](auto x) {
    int64_t lo = 0, hi = t.ptr == nullptr ? 0 : t.sizes[0];
    while (lo < hi) {
      const int64_t mid = lo + (hi - lo) / 2;
      const auto y = load_scalar<D>(t, mid * t.strides[0]);
      if (Right ? !(y > x) : y < x) lo = mid + 1;
      else hi = mid;
    }
    return lo;
  };
  if constexpr (is_vector<V>) {
    vl r;
    for (int i = 0; i < FAJIT_LANES; ++i) r[i] = find(value[i]);
    return r;
  } else {
    return find(value);
  }
}

// --- reductions over a row ---------------------------------------------------------------------------

// Sixteen running values keep the loop free of a serial dependency, and the order fixed.
template <class T, int N, class Join, class F> FAJIT_INLINE T reduce(Join join, T first, F f) {
  T part[16];
  for (int j = 0; j < 16; ++j) part[j] = first;
  int i = 0;
  for (; i + 16 <= N; i += 16)
    for (int j = 0; j < 16; ++j) part[j] = join(part[j], f(i + j));
  for (int j = 0; i + j < N; ++j) part[j] = join(part[j], f(i + j));
  for (int width = 8; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) part[j] = join(part[j], part[j + width]);
  return part[0];
}

template <class T, int N, class F> FAJIT_INLINE T reduce_sum(F f) {
  return reduce<T, N>([](T a, T b) { return T(add(a, b)); }, T(0), f);
}
template <class T, int N, class F> FAJIT_INLINE T reduce_prod(F f) {
  return reduce<T, N>([](T a, T b) { return T(mul(a, b)); }, T(1), f);
}
template <class T, int N, class F> FAJIT_INLINE T reduce_amax(F f) {
  return reduce<T, N>([](T a, T b) { return T(maximum(a, b)); }, f(0), f);
}
template <class T, int N, class F> FAJIT_INLINE T reduce_amin(F f) {
  return reduce<T, N>([](T a, T b) { return T(minimum(a, b)); }, f(0), f);
}
template <class T, int N, class F> FAJIT_INLINE T reduce_any(F f) {
  return reduce<T, N>([](T a, T b) { return T(a | b); }, T(false), f);
}
template <class T, int N, class F> FAJIT_INLINE T reduce_all(F f) {
  return reduce<T, N>([](T a, T b) { return T(a & b); }, T(true), f);
}

}  // namespace ops
}  // namespace fajit
