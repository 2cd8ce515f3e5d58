// IEEE arithmetic of fp32 and fp64. A NaN result is the canonical NaN, as on GPUs. For 16-bit types
// only conversions (cvt) and matrix products (mma) are supported, no arithmetic.
#include <cmath>
#include <limits>

#include "ops/host.h"
#include "ops/lanes.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

enum FloatOperation : uint8_t { kFloatMul, kFloatDiv, kFloatAdd, kFloatSub };

template <class T> T compute(int operation, T x, T y) {
  return operation == kFloatMul   ? x * y
         : operation == kFloatDiv ? x / y
         : operation == kFloatAdd ? x + y
                                  : x - y;
}

template <int operation, bool ftz, bool sat>
void arithmetic32(Warp& warp, const Insn& insn, uint32_t mask) {
  uint32_t* d = warp.words(insn.slots[0]);
  const uint32_t* a = warp.words(insn.slots[1]);
  const uint32_t* b = warp.words(insn.slots[2]);
  for_lanes(mask, [&](int l) {
    float x = bits_as<float>(a[l]), y = bits_as<float>(b[l]);
    if (ftz) x = flush(x), y = flush(y);
    float r = canonical(compute(operation, x, y));
    if (ftz) r = flush(r);
    if (sat) r = saturated(r);
    d[l] = bits_as<uint32_t>(r);
  });
}

template <int operation> double arithmetic64(double x, double y) {
  return canonical(compute(operation, x, y));
}

// Rounding modes .rz .rm .rp; slots[3] is used by fma only.
template <class T> void directed(Warp& warp, const Insn& insn, uint32_t mask) {
  auto* d = lanes_of<T>(warp, insn.slots[0]);
  const bool ftz = (insn.flags & kFtz) != 0, fma = insn.slots[3] != kNoSlot;
  auto load = [&](uint32_t slot, int l) {
    const T value = from_word<T>(lanes_of<T>(warp, slot)[l]);
    if constexpr (sizeof(T) == 4) return ftz ? flush(value) : value;
    else return value;
  };
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    volatile T x = load(insn.slots[1], l), y = load(insn.slots[2], l);
    volatile T z = fma ? load(insn.slots[3], l) : T{0}, r;
    {
      const HostRounding mode(insn.round);
      r = fma ? std::fma(T(x), T(y), T(z)) : compute<T>(insn.mode, x, y);
    }
    T result = canonical(T(r));
    if constexpr (sizeof(T) == 4) {
      if (ftz) result = flush(result);
      if ((insn.flags & kSaturate) != 0) result = saturated(result);
    }
    d[l] = to_word<T>(result);
  }
}

FAJIT_CLONES void fma32(Warp& warp, const Insn& insn, uint32_t mask) {
  uint32_t* d = warp.words(insn.slots[0]);
  const uint32_t* a = warp.words(insn.slots[1]);
  const uint32_t* b = warp.words(insn.slots[2]);
  const uint32_t* c = warp.words(insn.slots[3]);
  const bool ftz = (insn.flags & kFtz) != 0, sat = (insn.flags & kSaturate) != 0;
  for_lanes(mask, [&](int l) {
    float x = bits_as<float>(a[l]), y = bits_as<float>(b[l]), z = bits_as<float>(c[l]);
    if (ftz) x = flush(x), y = flush(y), z = flush(z);
    float r = canonical(__builtin_fmaf(x, y, z));
    if (ftz) r = flush(r);
    if (sat) r = saturated(r);
    d[l] = bits_as<uint32_t>(r);
  });
}

// a b + c in a double that rounds to 16 bits as the exact value does: where it is inexact, of the
// two doubles around it the one whose last bit is 1.
double fma_to_odd(double a, double b, double c) {
  const double product = a * b, sum = product + c, c_part = sum - product;  // the product is exact
  const double lost = (product - (sum - c_part)) + (c - c_part);
  uint64_t bits = bits_as<uint64_t>(sum);
  if (lost != 0 && std::isfinite(sum) && (bits & 1) == 0) bits += (lost > 0) == (sum > 0) ? 1 : -1;
  return bits_as<double>(bits);
}

// On two halves each.
template <class T> void fma_pairs(Warp& warp, const Insn& insn, uint32_t mask) {
  for_lanes(mask, [&](int l) {
    uint32_t result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
      auto at = [&](int i) {
        return to_float(T{static_cast<uint16_t>(warp.words(insn.slots[i])[l] >> shift)});
      };
      const double value = fma_to_odd(at(1), at(2), at(3));
      const bool half = std::is_same_v<T, Half>;
      result |=
          (half ? double_to_half(value, Round::nearest) : double_to_bf16(value, Round::nearest))
          << shift;
    }
    warp.words(insn.slots[0])[l] = result;
  });
}

double fma64(double x, double y, double z) { return canonical(__builtin_fma(x, y, z)); }

void take_flags(Decoder& d) {
  if (d.accept("ftz")) d.insn.flags |= kFtz;
  if (d.accept("sat")) d.insn.flags |= kSaturate;
  d.insn.round = d.rounding(Round::nearest);
}

// Decodes .rz, .rm and .rp; false for other rounding.
bool decode_directed(Decoder& d, Type type) {
  if (d.insn.round == Round::nearest) return false;
  if (type != Type::f32 && type != Type::f64) d.fail("this rounding is not for this type");
  d.insn.exec = type == Type::f32 ? directed<float> : directed<double>;
  return true;
}

template <int operation> void decode_arithmetic(Decoder& d) {
  take_flags(d);
  // The correctly rounded quotient is within the error that .approx and .full allow.
  if (operation == kFloatDiv) d.accept_one({"approx", "full"});
  d.insn.mode = operation;
  const Type type = d.type();
  decode_operands(d, type, {type, type});
  if (decode_directed(d, type)) return;
  const bool ftz = (d.insn.flags & kFtz) != 0, sat = (d.insn.flags & kSaturate) != 0;
  static constexpr Exec kForms[2][2] = {
      {arithmetic32<operation, false, false>, arithmetic32<operation, false, true>},
      {arithmetic32<operation, true, false>, arithmetic32<operation, true, true>}};
  if (type == Type::f32) return d.set_exec(kForms[ftz][sat]);
  const bool plain = type == Type::f64 && !ftz && !sat;
  d.set_exec(plain ? binary<double, double, double, arithmetic64<operation>> : nullptr);
}

// Sign operations change only bits, so NaNs are preserved.
template <class T, uint64_t clear, uint64_t flip> T sign_bits(T a) {
  return static_cast<T>((a & static_cast<T>(~clear)) ^ static_cast<T>(flip));
}
template <uint32_t clear, uint32_t flip> uint32_t sign_flushed(uint32_t a) {
  return bits_as<uint32_t>(flush(bits_as<float>((a & ~clear) ^ flip)));
}

template <class T> T copied_sign(T a, T b) {  // the sign of a, the size of b
  constexpr T sign = T{1} << (8 * sizeof(T) - 1);
  return (b & ~sign) | (a & sign);
}

// Of a number and NaN the result is the number, unless .NaN; -0 is less than +0.
template <class T> T extreme(T x, T y, bool maximum, bool nan) {
  if (x != x || y != y)
    return nan || (x != x && y != y) ? canonical(std::numeric_limits<T>::quiet_NaN())
           : x != x                  ? y
                                     : x;
  const bool second = x == y ? std::signbit(x) == maximum : (x < y) == maximum;
  return second ? y : x;
}

template <class T> void extremes(Warp& warp, const Insn& insn, uint32_t mask) {
  auto* d = lanes_of<T>(warp, insn.slots[0]);
  const bool maximum = insn.mode == 1, nan = (insn.flags & kNan) != 0;
  const bool ftz = (insn.flags & kFtz) != 0;
  auto load = [&](uint32_t slot, int l) {
    T value = from_word<T>(lanes_of<T>(warp, slot)[l]);
    if constexpr (std::is_same_v<T, float>) value = ftz ? flush(value) : value;
    return value;
  };
  for_lanes(mask, [&](int l) {
    auto r = extreme(load(insn.slots[1], l), load(insn.slots[2], l), maximum, nan);
    if (insn.slots[3] != kNoSlot) r = extreme(r, load(insn.slots[3], l), maximum, nan);
    d[l] = to_word<T>(r);
  });
}

}  // namespace

void decode_float_add(Decoder& d, bool subtract) {
  subtract ? decode_arithmetic<kFloatSub>(d) : decode_arithmetic<kFloatAdd>(d);
}

void decode_float_product(Decoder& d, bool divide) {
  divide ? decode_arithmetic<kFloatDiv>(d) : decode_arithmetic<kFloatMul>(d);
}

void decode_fma(Decoder& d) {
  take_flags(d);
  const Type type = d.type();
  decode_operands(d, type, {type, type, type});
  if (decode_directed(d, type)) return;
  if (type == Type::f32) return d.set_exec(fma32);
  if (type == Type::f16x2 && d.insn.flags == 0) return d.set_exec(fma_pairs<Half>);
  if (type == Type::bf16x2 && d.insn.flags == 0) return d.set_exec(fma_pairs<Bf16>);
  const bool plain = type == Type::f64 && d.insn.flags == 0;
  d.set_exec(plain ? ternary<double, double, double, double, fma64> : nullptr);
}

void decode_float_sign(Decoder& d, bool negate) {
  const bool ftz = d.accept("ftz");
  const Type type = d.type();
  decode_operands(d, type, {type});
  constexpr uint64_t k32 = 0x80000000, k64 = uint64_t{1} << 63;
  using W = uint32_t;
  using L = uint64_t;
  static constexpr Exec kForms[3][2] = {
      {unary<W, W, sign_bits<W, k32, 0>>, unary<W, W, sign_bits<W, 0, k32>>},
      {unary<W, W, sign_flushed<k32, 0>>, unary<W, W, sign_flushed<0, k32>>},
      {unary<L, L, sign_bits<L, k64, 0>>, unary<L, L, sign_bits<L, 0, k64>>}};
  d.set_exec(bytes_of(type) < 4 ? nullptr : kForms[is_wide(type) ? 2 : ftz][negate]);
}

void decode_copysign(Decoder& d) {
  const Type type = d.type();
  decode_operands(d, type, {type, type});
  d.set_exec(is_wide(type) ? binary<uint64_t, uint64_t, uint64_t, copied_sign<uint64_t>>
                           : Exec{binary<uint32_t, uint32_t, uint32_t, copied_sign<uint32_t>>});
}

void decode_float_minmax(Decoder& d, bool maximum) {
  if (d.accept("ftz")) d.insn.flags |= kFtz;
  if (d.accept("NaN")) d.insn.flags |= kNan;
  d.insn.mode = maximum;
  const Type type = d.type();
  if (d.num_operands() == 4) decode_operands(d, type, {type, type, type});  // since sm_100
  else decode_operands(d, type, {type, type});
  d.set_exec(type == Type::f32 ? extremes<float> : type == Type::f64 ? extremes<double> : nullptr);
}

}  // namespace fajit::emulator
