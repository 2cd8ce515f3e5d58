// Integer arithmetic. Results wrap; a division by zero gives all ones, as on GPUs.
#include <algorithm>

#include "ops/lanes.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

// An unsigned type of at least 32 bits for arithmetic that wraps without undefined behaviour.
template <class T> using Modular = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T> T add(T a, T b) { return static_cast<T>(Modular<T>(a) + Modular<T>(b)); }
template <class T> T sub(T a, T b) { return static_cast<T>(Modular<T>(a) - Modular<T>(b)); }
template <class T> T mul_lo(T a, T b) { return static_cast<T>(Modular<T>(a) * Modular<T>(b)); }
template <class T> T mul_hi(T a, T b) {
  using Narrow = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  using Long = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  using Wide = std::conditional_t<sizeof(T) == 8, Long, Narrow>;
  return static_cast<T>((static_cast<Wide>(a) * b) >> (8 * sizeof(T)));
}
template <class T> T divide(T a, T b) {
  if (b == 0) return static_cast<T>(~T{0});
  if constexpr (std::is_signed_v<T>)
    if (b == -1) return static_cast<T>(0 - Modular<T>(a));
  return static_cast<T>(a / b);
}
template <class T> T remainder(T a, T b) {
  if (b == 0) return a;
  if constexpr (std::is_signed_v<T>)
    if (b == -1) return 0;
  return static_cast<T>(a % b);
}
template <class T> T least(T a, T b) { return a < b ? a : b; }
template <class T> T greatest(T a, T b) { return a < b ? b : a; }
template <class T> T mad_lo(T a, T b, T c) { return add(mul_lo(a, b), c); }
template <class T> T mad_hi(T a, T b, T c) { return add(mul_hi(a, b), c); }
template <class T> T absolute(T a) {
  return static_cast<T>(std::is_signed_v<T> && a < T{0} ? 0 - Modular<T>(a) : Modular<T>(a));
}
template <class T> T negated(T a) { return static_cast<T>(0 - Modular<T>(a)); }

template <class W, class T> W mul_wide(T a, T b) { return static_cast<W>(a) * static_cast<W>(b); }
template <class W, class T> W mad_wide(T a, T b, W c) { return add<W>(mul_wide<W, T>(a, b), c); }
// The type of products of 16 and of 32 bits.
template <class T>
using Wider = std::conditional_t<
    sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                       void>>;

int32_t saturated(int64_t value) {
  return static_cast<int32_t>(std::clamp<int64_t>(value, INT32_MIN, INT32_MAX));
}
int32_t add_saturated(int32_t a, int32_t b) { return saturated(int64_t{a} + b); }
int32_t sub_saturated(int32_t a, int32_t b) { return saturated(int64_t{a} - b); }

template <class Form> void decode_binary(Decoder& d, Form form) {
  const Type type = d.type();
  decode_operands(d, type, {type, type});
  d.set_exec(by_integer(type, form));
}

template <class Form> void decode_sum(Decoder& d, Form form, Exec saturating) {
  const bool saturate = d.accept("sat");
  if (saturate && !d.has_modifier("s32")) d.fail(".sat is for .s32");
  decode_binary(d, form);
  if (saturate) d.insn.exec = saturating;
}

Type wider(Decoder& d, Type type) {
  switch (type) {
    case Type::u16: return Type::u32;
    case Type::s16: return Type::s32;
    case Type::u32: return Type::u64;
    case Type::s32: return Type::s64;
    default: d.fail("not for this type");
  }
}

}  // namespace

void decode_add(Decoder& d) {
  if (d.has_float_type()) return decode_float_add(d, false);
  decode_sum(d, FAJIT_BINARY(add), binary<int32_t, int32_t, int32_t, add_saturated>);
}

void decode_sub(Decoder& d) {
  if (d.has_float_type()) return decode_float_add(d, true);
  decode_sum(d, FAJIT_BINARY(sub), binary<int32_t, int32_t, int32_t, sub_saturated>);
}

void decode_mul(Decoder& d) {
  if (d.has_float_type()) return decode_float_product(d, false);
  const int part = d.expect_one({"lo", "hi", "wide"});
  if (part == 0) return decode_binary(d, FAJIT_BINARY(mul_lo));
  if (part == 1) return decode_binary(d, FAJIT_BINARY(mul_hi));
  const Type type = d.type();
  decode_operands(d, wider(d, type), {type, type});
  d.set_exec(by_integer(type, [](auto zero) -> Exec {
    using T = decltype(zero);
    using W = Wider<T>;
    if constexpr (std::is_void_v<W>) return nullptr;
    else return binary<W, T, T, mul_wide<W, T>>;
  }));
}

void decode_mad(Decoder& d) {
  if (d.has_float_type()) return decode_fma(d);
  const int part = d.expect_one({"lo", "hi", "wide"});
  const Type type = d.type(), result = part == 2 ? wider(d, type) : type;
  decode_operands(d, result, {type, type, result});
  if (part == 0) return d.set_exec(by_integer(type, FAJIT_TERNARY(mad_lo)));
  if (part == 1) return d.set_exec(by_integer(type, FAJIT_TERNARY(mad_hi)));
  d.set_exec(by_integer(type, [](auto zero) -> Exec {
    using T = decltype(zero);
    using W = Wider<T>;
    if constexpr (std::is_void_v<W>) return nullptr;
    else return ternary<W, T, T, W, mad_wide<W, T>>;
  }));
}

void decode_div(Decoder& d) {
  if (d.has_float_type()) return decode_float_product(d, true);
  decode_binary(d, FAJIT_BINARY(divide));
}

void decode_rem(Decoder& d) { decode_binary(d, FAJIT_BINARY(remainder)); }

void decode_min(Decoder& d) {
  if (d.has_float_type()) return decode_float_minmax(d, false);
  decode_binary(d, FAJIT_BINARY(least));
}

void decode_max(Decoder& d) {
  if (d.has_float_type()) return decode_float_minmax(d, true);
  decode_binary(d, FAJIT_BINARY(greatest));
}

void decode_abs(Decoder& d) {
  if (d.has_float_type()) return decode_float_sign(d, false);
  decode_unary(d, FAJIT_UNARY(absolute));
}

void decode_neg(Decoder& d) {
  if (d.has_float_type()) return decode_float_sign(d, true);
  decode_unary(d, FAJIT_UNARY(negated));
}

}  // namespace fajit::emulator
