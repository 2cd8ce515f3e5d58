// Tags for the dtypes of a variant's params, and the types that store and hold their elements.
#pragma once
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

template <class A, class B> inline constexpr bool same = false;
template <class A> inline constexpr bool same<A, A> = true;

template <class D> struct storage { using type = typename D::type; };
template <> struct storage<dt::b1> { using type = uint8_t; };
template <> struct storage<dt::u8> { using type = uint8_t; };
template <> struct storage<dt::i8> { using type = int8_t; };
template <> struct storage<dt::i16> { using type = int16_t; };
template <> struct storage<dt::f16> { using type = uint16_t; };
template <> struct storage<dt::bf16> { using type = uint16_t; };
template <> struct storage<dt::e4m3> { using type = uint8_t; };
template <> struct storage<dt::e5m2> { using type = uint8_t; };

}  // namespace ops
}  // namespace fajit
