// cvt: between integers and floating-point types, with rounding and saturation.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/host.h"
#include "ops/lanes.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

enum Rounding : uint8_t {
  kNone,
  kToFloat,
  kToInteger
};  // Insn::mode: the kind of rounding modifier, .rn or .rni

template <class T>
constexpr bool kIsFloat = std::is_same_v<T, float> || std::is_same_v<T, double> ||
                          std::is_same_v<T, Half> || std::is_same_v<T, Bf16>;

double integral(double value, Round round) {
  switch (round) {
    case Round::zero: return std::trunc(value);
    case Round::down: return std::floor(value);
    case Round::up: return std::ceil(value);
    default: return std::nearbyint(value);  // nearest even
  }
}

// Saturates. NaN gives 0, or the top bit if either type has 64 bits.
template <class R> R float_to_integer(double value, Round round, bool from_double) {
  using Limits = std::numeric_limits<R>;
  if (value != value) {
    if (!from_double && sizeof(R) < 8) return 0;
    return std::is_signed_v<R> ? Limits::min() : static_cast<R>(Limits::max() / 2 + 1);
  }
  const double whole = integral(value, round);
  if (whole <= static_cast<double>(Limits::min())) return Limits::min();
  if (whole >= std::ldexp(1.0, Limits::digits)) return Limits::max();
  return static_cast<R>(whole);
}

// Converts to a floating-point type in any rounding mode; volatile keeps the conversion between the
// changes of the mode.
template <class R, class S> R converted_in_mode(S value, Round round) {
  volatile S from = value;
  volatile R result;
  const HostRounding mode(round);
  result = static_cast<R>(from);
  return result;
}

template <class R> R narrow_float(double value, Round round) {
  if constexpr (std::is_same_v<R, Half>)
    return {static_cast<uint16_t>(double_to_half(value, round))};
  else if constexpr (std::is_same_v<R, Bf16>)
    return {static_cast<uint16_t>(double_to_bf16(value, round))};
  else if constexpr (std::is_same_v<R, float>) {
    if (value != value) return bits_as<float>(0x7fffffffu);
    return round == Round::nearest ? static_cast<float>(value)
                                   : converted_in_mode<float>(value, round);
  } else {
    return value;
  }
}

// The integer as a double; above 2^53, bits that do not fit become a 1 in the last place that does.
// Rounding that to 16 bits rounds as if the integer itself were rounded.
template <class S> double sticky_double(S value) {
  if constexpr (sizeof(S) == 8) {
    constexpr uint64_t kLost = 0x7ff;  // the bits of 64 that the 53 of a double leave out
    const bool negative = value < 0;
    uint64_t size = negative ? 0 - static_cast<uint64_t>(value) : static_cast<uint64_t>(value);
    if (size >> 53) size = (size & ~kLost) | (size & kLost ? kLost + 1 : 0);
    return negative ? -static_cast<double>(size) : static_cast<double>(size);
  } else {
    return static_cast<double>(value);
  }
}

template <class R, class S> R integer_to_float(S value, Round round) {
  if constexpr (std::is_same_v<R, float> || std::is_same_v<R, double>)
    return round == Round::nearest ? static_cast<R>(value) : converted_in_mode<R>(value, round);
  else return narrow_float<R>(sticky_double(value), round);
}

template <class R, class S> R saturated_integer(S value) {
  const __int128 low = std::numeric_limits<R>::min(), high = std::numeric_limits<R>::max();
  return static_cast<R>(std::clamp<__int128>(value, low, high));
}

template <class R, class S> R convert(S from, const Insn& insn) {
  const bool saturate = (insn.flags & kSaturate) != 0, ftz = (insn.flags & kFtz) != 0;
  if constexpr (kIsFloat<S>) {
    double value = to_float(from);
    if constexpr (std::is_same_v<S, float>)
      if (ftz) value = flush(from);
    if constexpr (!kIsFloat<R>) {
      return float_to_integer<R>(value, insn.round, std::is_same_v<S, double>);
    } else {
      if (insn.mode == kToInteger) value = integral(value, insn.round);
      if (saturate) value = value > 0 ? (value < 1 ? value : 1.0) : 0.0;
      if ((insn.flags & kRelu) != 0 && !(value > 0) && value == value) value = 0.0;
      R result = narrow_float<R>(value, insn.mode == kToFloat ? insn.round : Round::nearest);
      if constexpr (std::is_same_v<R, float>)
        if (ftz) result = flush(result);
      return result;
    }
  } else if constexpr (kIsFloat<R>) {
    R result = integer_to_float<R>(from, insn.round);
    if (saturate) {
      const double value = to_float(result);
      result = narrow_float<R>(value > 0 ? (value < 1 ? value : 1.0) : 0.0, Round::nearest);
    }
    return result;
  } else {
    return saturate ? saturated_integer<R>(from) : static_cast<R>(from);
  }
}

template <class R, class S> void convert_lanes(Warp& warp, const Insn& insn, uint32_t mask) {
  // Registers may be wider than the types: integers are extended to the destination.
  const bool wide_source = insn.count & 1, wide_result = insn.count & 2;
  const uint32_t* a32 = warp.words(insn.slots[1]);
  const uint64_t* a64 = warp.longs(insn.slots[1]);
  uint32_t* d32 = warp.words(insn.slots[0]);
  uint64_t* d64 = warp.longs(insn.slots[0]);
  for_lanes(mask, [&](int l) {
    S from;
    if (wide_source) std::memcpy(&from, &a64[l], sizeof from);
    else from = from_word<S>(static_cast<Word<S>>(a32[l]));
    const R result = convert<R, S>(from, insn);
    uint64_t bits = to_word<R>(result);
    if constexpr (std::is_integral_v<R> && std::is_signed_v<R>)
      bits = static_cast<uint64_t>(static_cast<int64_t>(result));
    if (wide_result) d64[l] = bits;
    else d32[l] = static_cast<uint32_t>(sizeof(R) == 2 ? bits & 0xffff : bits);
  });
}

// Packs two fp32 values as halves: a in the high half, b in the low half.
template <class T> void pack_lanes(Warp& warp, const Insn& insn, uint32_t mask) {
  uint32_t* d = warp.words(insn.slots[0]);
  const uint32_t* a = warp.words(insn.slots[1]);
  const uint32_t* b = warp.words(insn.slots[2]);
  const bool relu = (insn.flags & kRelu) != 0, nearest = insn.round == Round::nearest;
  auto half = [&](uint32_t bits) -> uint32_t {
    float value = bits_as<float>(bits);
    if (relu && value < 0) value = 0;
    if (!nearest) return narrow_float<T>(value, insn.round).bits;
    return std::is_same_v<T, Half> ? float_to_half(value) : float_to_bf16(value);
  };
  for_lanes(mask, [&](int l) { d[l] = half(a[l]) << 16 | half(b[l]); });
}

void decode_packed(Decoder& d, Type result) {
  d.expect_operands(3);
  d.insn.slots[0] = d.destination(0, result);
  d.insn.slots[1] = d.source(1, Type::f32);
  d.insn.slots[2] = d.source(2, Type::f32);
  d.insn.exec = result == Type::f16x2 ? pack_lanes<Half> : pack_lanes<Bf16>;
}

}  // namespace

void decode_cvt(Decoder& d) {
  const int integer = d.accept_one({"rni", "rzi", "rmi", "rpi"});
  bool rounded = false;
  if (integer >= 0) {
    static constexpr Round kRounds[] = {Round::nearest, Round::zero, Round::down, Round::up};
    d.insn.round = kRounds[integer];
    d.insn.mode = kToInteger;
  } else {
    for (const char* name : {"rn", "rz", "rm", "rp"}) rounded = rounded || d.has_modifier(name);
    d.insn.round = d.rounding(Round::nearest);
    d.insn.mode = rounded ? kToFloat : kNone;
  }
  if (d.accept("ftz")) d.insn.flags |= kFtz;
  if (d.accept("sat")) d.insn.flags |= kSaturate;
  if (d.accept("relu")) d.insn.flags |= kRelu;
  const Type result = d.type(), source = d.type();
  if (result == Type::f16x2 || result == Type::bf16x2) {
    if (source != Type::f32) d.fail("packed halves come from f32");
    return decode_packed(d, result);
  }
  d.expect_operands(2);
  bool wide_source = false, wide_result = false;
  d.insn.slots[0] = d.wide_destination(d.operand(0), result, wide_result);
  d.insn.slots[1] = d.wide_source(d.operand(1), source, wide_source);
  d.insn.count = static_cast<uint8_t>((wide_source ? 1 : 0) | (wide_result ? 2 : 0));
  d.set_exec(by_type(result, [&](auto to) {
    return by_type(source,
                   [](auto from) -> Exec { return convert_lanes<decltype(to), decltype(from)>; });
  }));
}

}  // namespace fajit::emulator
