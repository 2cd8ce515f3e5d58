// Types of hooks: tags for dtypes, the types of stored elements and of values, and the result types
// of operations.
//
// A value is a scalar or, on CPUs, a vector with one value per lane; fajit/cpu/hooks/hook_vectors.h
// specialises these templates for vectors. Register types by IR dtype: bool; int8, uint8, int16,
// int32 -> int32_t; int64; float32 -> float; float64 -> double.
#pragma once
#include <fajit/function.h>
#include <fajit/types.h>
#include <stdint.h>

namespace fajit {

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

template <class D> struct storage { using type = typename D::type; };
template <> struct storage<dt::b1> { using type = uint8_t; };
template <> struct storage<dt::u8> { using type = uint8_t; };
template <> struct storage<dt::i8> { using type = int8_t; };
template <> struct storage<dt::i16> { using type = int16_t; };
template <> struct storage<dt::f16> { using type = uint16_t; };
template <> struct storage<dt::bf16> { using type = uint16_t; };
template <> struct storage<dt::e4m3> { using type = uint8_t; };
template <> struct storage<dt::e5m2> { using type = uint8_t; };

template <class T> struct value_of { using type = T; };
template <class T> struct value_of<const T> { using type = T; };
template <class T> struct value_of<T&> : value_of<T> {};
template <class T> using Value = typename value_of<T>::type;

template <class T> inline constexpr bool is_vector = false;

// The type of a vector's lane; the type of a vector of such scalars.
template <class T> struct lane_of { using type = T; };
template <class T> using Lane = typename lane_of<T>::type;
template <class T> struct vector_of;
template <class T> using Vector = typename vector_of<T>::type;

template <class T> inline constexpr bool is_float = same<Lane<T>, float> || same<Lane<T>, double>;

template <class T> struct unsigned_of { using type = T; };
template <> struct unsigned_of<int32_t> { using type = uint32_t; };
template <> struct unsigned_of<int64_t> { using type = uint64_t; };
template <class T> using Unsigned = typename unsigned_of<T>::type;

// The type of an operation's result: a vector if any operand is one, else the type of the first
// operand, unless that is bool or the second is wider.
template <class A, class B> struct wide_of { using type = A; };
template <class B> struct wide_of<bool, B> { using type = B; };
template <> struct wide_of<int32_t, int64_t> { using type = int64_t; };
template <> struct wide_of<uint32_t, int64_t> { using type = int64_t; };
template <> struct wide_of<float, double> { using type = double; };
template <class A, class B>
using Wide = Choose<is_vector<B>, B, typename wide_of<A, B>::type>;

template <class W, class T> FAJIT_FN W widen(T x) {
  if constexpr (!is_vector<W> || same<W, T>) return W(x);
  else if constexpr (same<T, bool>) return W{} - Lane<W>(x);  // a mask lane is 0 or -1
  else return Lane<W>(x) - W{};                               // keeps the sign of zero
}

template <class T> FAJIT_FN auto lane(T x, int i) {
  if constexpr (is_vector<T>) return x[i];
  else return x;
}

// Calls `f`, lane by lane if any argument is a vector: for rare operations. A mask lane is 0 or -1.
template <class F, class... A> FAJIT_FN auto each_lane(F f, A... a) {
  using R = decltype(f(lane(a, 0)...));
  if constexpr ((is_vector<A> || ...)) {
    Vector<R> r;
    for (int i = 0; i < int(sizeof(r) / sizeof(r[0])); ++i)
      r[i] = same<R, bool> ? -int32_t(f(lane(a, i)...)) : f(lane(a, i)...);
    return r;
  } else {
    return f(a...);
  }
}

}  // namespace ops
}  // namespace fajit
