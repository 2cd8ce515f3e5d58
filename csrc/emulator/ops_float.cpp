// Floating-point arithmetic. fp32 and fp64 are IEEE; fp16 and bf16 are computed in a wider type and
// rounded once. A NaN result is the canonical one of its type, as on devices.
#include <cfenv>
#include <cmath>

#include "clones.h"
#include "lanes.h"
#include "ops.h"

namespace fajit::emulator {
namespace {

enum Arithmetic : uint8_t { kMul, kDiv, kAdd, kSub };

template <class T>
T canonical(T value) {
  if constexpr (sizeof(T) == 4) return value == value ? value : bits_as<float>(0x7fffffffu);
  else return value == value ? value : bits_as<double>(uint64_t{0x7ff8000000000000});
}

template <class T>
T saturated(T value) {  // NaN becomes 0
  return value > T{0} ? (value < T{1} ? value : T{1}) : T{0};
}

// kFtz and kSaturate are tested outside of the loops: all four forms vectorise.
template <int operation, bool ftz, bool sat>
void arithmetic32(Warp& warp, const Insn& insn, uint32_t mask) {
  uint32_t* d = warp.words(insn.slots[0]);
  const uint32_t* a = warp.words(insn.slots[1]);
  const uint32_t* b = warp.words(insn.slots[2]);
  for_lanes(mask, [&](int l) {
    float x = bits_as<float>(a[l]), y = bits_as<float>(b[l]);
    if (ftz) x = flush(x), y = flush(y);
    float r = operation == kMul ? x * y : operation == kDiv ? x / y : operation == kAdd ? x + y : x - y;
    r = canonical(r);
    if (ftz) r = flush(r);
    if (sat) r = saturated(r);
    d[l] = bits_as<uint32_t>(r);
  });
}

template <int operation>
double compute(double x, double y) {
  return operation == kMul ? x * y : operation == kDiv ? x / y : operation == kAdd ? x + y : x - y;
}
template <int operation>
double compute64(double x, double y) {
  return canonical(compute<operation>(x, y));
}

// fp16 and bf16: fp32 holds products and sums of two exactly enough that rounding twice is harmless.
template <class T, int operation>
T narrow(T a, T b) {
  const float x = to_float(a), y = to_float(b);
  return FromFloat<T>::of(operation == kMul ? x * y : operation == kAdd ? x + y : x - y);
}
template <class T, T (*Function)(T, T)>
uint32_t packed(uint32_t a, uint32_t b) {
  const T low = Function(T{static_cast<uint16_t>(a)}, T{static_cast<uint16_t>(b)});
  const T high = Function(T{static_cast<uint16_t>(a >> 16)}, T{static_cast<uint16_t>(b >> 16)});
  return low.bits | static_cast<uint32_t>(high.bits) << 16;
}
template <class T>
T narrow_fma(T a, T b, T c) {
  const double r = double{to_float(a)} * to_float(b) + to_float(c);
  return T{static_cast<uint16_t>(std::is_same_v<T, Half> ? double_to_half(r, Round::nearest)
                                                         : double_to_bf16(r, Round::nearest))};
}
template <class T>
T narrow_fma_relu(T a, T b, T c) {
  const T r = narrow_fma(a, b, c);
  return to_float(r) > 0 ? r : to_float(r) != to_float(r) ? r : T{0};
}
template <class T, T (*Function)(T, T, T)>
uint32_t packed3(uint32_t a, uint32_t b, uint32_t c) {
  const T low = Function(T{static_cast<uint16_t>(a)}, T{static_cast<uint16_t>(b)},
                         T{static_cast<uint16_t>(c)});
  const T high = Function(T{static_cast<uint16_t>(a >> 16)}, T{static_cast<uint16_t>(b >> 16)},
                          T{static_cast<uint16_t>(c >> 16)});
  return low.bits | static_cast<uint32_t>(high.bits) << 16;
}
// .sat of fp16: clamped to [0, 1] after rounding.
template <class T, T (*Function)(T, T)>
T narrow_saturated(T a, T b) {
  return FromFloat<T>::of(saturated(to_float(Function(a, b))));
}
template <class T, T (*Function)(T, T, T)>
T narrow_saturated3(T a, T b, T c) {
  return FromFloat<T>::of(saturated(to_float(Function(a, b, c))));
}

// .rz .rm .rp: the host's rounding mode. volatile keeps the operation between the two calls.
int host_mode(Round round) {
  return round == Round::zero ? FE_TOWARDZERO : round == Round::down ? FE_DOWNWARD : FE_UPWARD;
}
template <class T>
void directed(Warp& warp, const Insn& insn, uint32_t mask) {
  auto* d = lanes_of<T>(warp, insn.slots[0]);
  const auto* a = lanes_of<T>(warp, insn.slots[1]);
  const auto* b = lanes_of<T>(warp, insn.slots[2]);
  const auto* c = lanes_of<T>(warp, insn.slots[insn.slots[3] == kNoSlot ? 2 : 3]);
  const bool ftz = (insn.flags & kFtz) != 0;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    T x = from_word<T>(a[l]), y = from_word<T>(b[l]), z = from_word<T>(c[l]);
    if constexpr (sizeof(T) == 4)
      if (ftz) x = flush(x), y = flush(y), z = flush(z);
    volatile T vx = x, vy = y, vz = z, r;
    std::fesetround(host_mode(insn.round));
    if (insn.slots[3] != kNoSlot) r = std::fma(T(vx), T(vy), T(vz));
    else if (insn.mode == kMul) r = vx * vy;
    else if (insn.mode == kDiv) r = vx / vy;
    else if (insn.mode == kAdd) r = vx + vy;
    else r = vx - vy;
    std::fesetround(FE_TONEAREST);
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
  for_lanes(mask, [&](int l) {
    const float r = __builtin_fmaf(bits_as<float>(a[l]), bits_as<float>(b[l]), bits_as<float>(c[l]));
    d[l] = bits_as<uint32_t>(canonical(r));
  });
}

FAJIT_CLONES void fma32_special(Warp& warp, const Insn& insn, uint32_t mask) {  // .ftz, .sat
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

FAJIT_CLONES void fma64(Warp& warp, const Insn& insn, uint32_t mask) {
  uint64_t* d = warp.longs(insn.slots[0]);
  const uint64_t* a = warp.longs(insn.slots[1]);
  const uint64_t* b = warp.longs(insn.slots[2]);
  const uint64_t* c = warp.longs(insn.slots[3]);
  for_lanes(mask, [&](int l) {
    const double r = __builtin_fma(bits_as<double>(a[l]), bits_as<double>(b[l]), bits_as<double>(c[l]));
    d[l] = bits_as<uint64_t>(canonical(r));
  });
}

// A pair of fp32 in 64 bits (sm_100): both halves as the fp32 instruction would.
template <int operation>
void pair32(Warp& warp, const Insn& insn, uint32_t mask) {
  uint64_t* d = warp.longs(insn.slots[0]);
  const uint64_t* a = warp.longs(insn.slots[1]);
  const uint64_t* b = warp.longs(insn.slots[2]);
  const uint64_t* c = warp.longs(insn.slots[insn.slots[3] == kNoSlot ? 2 : 3]);
  const bool ftz = (insn.flags & kFtz) != 0, fused = insn.slots[3] != kNoSlot;
  for_lanes(mask, [&](int l) {
    uint64_t result = 0;
    for (int shift = 0; shift < 64; shift += 32) {
      float x = bits_as<float>(static_cast<uint32_t>(a[l] >> shift));
      float y = bits_as<float>(static_cast<uint32_t>(b[l] >> shift));
      float z = bits_as<float>(static_cast<uint32_t>(c[l] >> shift));
      if (ftz) x = flush(x), y = flush(y), z = flush(z);
      float r = canonical(fused ? std::fma(x, y, z)
                          : operation == kMul ? x * y
                          : operation == kAdd ? x + y
                                              : x - y);
      if (ftz) r = flush(r);
      result |= static_cast<uint64_t>(bits_as<uint32_t>(r)) << shift;
    }
    d[l] = result;
  });
}

template <int operation>
Exec pick32(uint8_t flags) {
  const bool ftz = (flags & kFtz) != 0, sat = (flags & kSaturate) != 0;
  return ftz ? (sat ? Exec{arithmetic32<operation, true, true>} : Exec{arithmetic32<operation, true, false>})
             : (sat ? Exec{arithmetic32<operation, false, true>} : Exec{arithmetic32<operation, false, false>});
}

template <class T, int operation>
Exec pick_narrow(bool pair, bool sat) {
  if (sat)
    return pair ? Exec{binary<uint32_t, uint32_t, uint32_t, packed<T, narrow_saturated<T, narrow<T, operation>>>>}
                : Exec{binary<T, T, T, narrow_saturated<T, narrow<T, operation>>>};
  return pair ? Exec{binary<uint32_t, uint32_t, uint32_t, packed<T, narrow<T, operation>>>}
              : Exec{binary<T, T, T, narrow<T, operation>>};
}

template <int operation>
void decode_arithmetic(Decoder& d) {
  if (d.accept("ftz")) d.insn.flags |= kFtz;
  if (d.accept("sat")) d.insn.flags |= kSaturate;
  const bool approximate = operation == kDiv && d.accept_one({"approx", "full"}) >= 0;
  d.insn.round = d.rounding(Round::nearest);
  (void)approximate;  // the correctly rounded quotient is within every error bound
  d.insn.mode = operation;
  if (d.accept("f32x2")) {
    decode_operands(d, Type::b64, {Type::b64, Type::b64});
    d.insn.exec = pair32<operation>;
    return;
  }
  const Type type = d.insn.type == Type::none ? d.type() : d.insn.type;
  d.insn.type = type;
  decode_operands(d, type, {type, type});
  const bool sat = (d.insn.flags & kSaturate) != 0;
  if (d.insn.round != Round::nearest) {
    if (type != Type::f32 && type != Type::f64) d.fail("this rounding is not for this type");
    d.insn.exec = type == Type::f32 ? Exec{directed<float>} : Exec{directed<double>};
    return;
  }
  switch (type) {
    case Type::f32: d.insn.exec = pick32<operation>(d.insn.flags); return;
    case Type::f64: d.insn.exec = binary<double, double, double, compute64<operation>>; return;
    default: break;
  }
  if constexpr (operation != kDiv) {
    switch (type) {
      case Type::f16: d.insn.exec = pick_narrow<Half, operation>(false, sat); return;
      case Type::f16x2: d.insn.exec = pick_narrow<Half, operation>(true, sat); return;
      case Type::bf16: d.insn.exec = pick_narrow<Bf16, operation>(false, sat); return;
      case Type::bf16x2: d.insn.exec = pick_narrow<Bf16, operation>(true, sat); return;
      default: break;
    }
  }
  d.fail("not for this type");
}

// Signs: bits only, so that NaNs pass through.
template <class T, T clear, T flip>
T sign_bits(T a) {
  return static_cast<T>((a & static_cast<T>(~clear)) ^ flip);
}
template <uint32_t clear, uint32_t flip>
uint32_t sign_flushed(uint32_t a) {
  return bits_as<uint32_t>(flush(bits_as<float>((a & ~clear) ^ flip)));
}

template <class T>
T copied_sign(T a, T b) {  // the sign of a, the size of b
  constexpr T sign = T{1} << (8 * sizeof(T) - 1);
  return (b & ~sign) | (a & sign);
}

// min and max: a number wins over NaN unless .NaN; -0 is less than +0.
struct Extreme {
  bool maximum, nan, absolute, xor_sign;
};
template <class T>
T extreme(T x, T y, const Extreme& form) {
  const bool sign = std::signbit(x) != std::signbit(y);
  if (form.absolute) x = std::fabs(x), y = std::fabs(y);
  T r;
  if (x != x || y != y) {
    r = form.nan || (x != x && y != y) ? canonical(x != x ? x : y) : x != x ? y : x;
  } else if (x == y) {
    r = std::signbit(x) == form.maximum ? y : x;
  } else {
    r = (x < y) == form.maximum ? y : x;
  }
  return form.xor_sign && r == r ? std::copysign(r, sign ? T{-1} : T{1}) : r;
}

template <class T>
void extremes(Warp& warp, const Insn& insn, uint32_t mask) {
  const Extreme form{insn.mode == 1, (insn.flags & kNan) != 0, (insn.flags & kAbs) != 0,
                     (insn.flags & kXorSign) != 0};
  auto* d = lanes_of<T>(warp, insn.slots[0]);
  const bool ftz = (insn.flags & kFtz) != 0;
  auto load = [&](uint32_t slot, int l) {
    auto value = to_float(from_word<T>(lanes_of<T>(warp, slot)[l]));
    if constexpr (std::is_same_v<T, float>)
      if (ftz) value = flush(value);
    return value;
  };
  for_lanes(mask, [&](int l) {
    auto r = extreme(load(insn.slots[1], l), load(insn.slots[2], l), form);
    if (insn.slots[3] != kNoSlot) r = extreme(r, load(insn.slots[3], l), form);
    d[l] = to_word<T>(FromFloat<T>::of(r));
  });
}

template <class T>
void extremes_packed(Warp& warp, const Insn& insn, uint32_t mask) {
  const Extreme form{insn.mode == 1, (insn.flags & kNan) != 0, (insn.flags & kAbs) != 0,
                     (insn.flags & kXorSign) != 0};
  uint32_t* d = warp.words(insn.slots[0]);
  const uint32_t* a = warp.words(insn.slots[1]);
  const uint32_t* b = warp.words(insn.slots[2]);
  for_lanes(mask, [&](int l) {
    uint32_t result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
      const float x = to_float(T{static_cast<uint16_t>(a[l] >> shift)});
      const float y = to_float(T{static_cast<uint16_t>(b[l] >> shift)});
      result |= static_cast<uint32_t>(FromFloat<T>::of(extreme(x, y, form)).bits) << shift;
    }
    d[l] = result;
  });
}

template <class T>
void test_property(Warp& warp, const Insn& insn, uint32_t mask) {
  const auto* a = lanes_of<T>(warp, insn.slots[1]);
  uint32_t& result = warp.predicate(insn.slots[0]);
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const T x = from_word<T>(a[l]);
    const int kind = std::fpclassify(x);
    const bool holds = insn.mode == 0   ? kind != FP_NAN && kind != FP_INFINITE
                       : insn.mode == 1 ? kind == FP_INFINITE
                       : insn.mode == 2 ? kind != FP_NAN
                       : insn.mode == 3 ? kind == FP_NAN
                       : insn.mode == 4 ? kind == FP_NORMAL
                                        : kind == FP_SUBNORMAL;
    result = holds ? result | 1u << l : result & ~(1u << l);
  }
}

}  // namespace

// Takes add and sub if the type is a floating-point one.
bool decode_float_add(Decoder& d, bool subtract) {
  if (!d.has_float_type()) return false;
  subtract ? decode_arithmetic<kSub>(d) : decode_arithmetic<kAdd>(d);
  return true;
}

void decode_float_arithmetic(Decoder& d, int operation) {
  operation == kMul ? decode_arithmetic<kMul>(d) : decode_arithmetic<kDiv>(d);
}

void decode_fma(Decoder& d) {
  if (d.accept("ftz")) d.insn.flags |= kFtz;
  if (d.accept("sat")) d.insn.flags |= kSaturate;
  const bool relu = d.accept("relu");
  d.insn.round = d.rounding(Round::nearest);
  if (d.accept("f32x2")) {
    decode_operands(d, Type::b64, {Type::b64, Type::b64, Type::b64});
    d.insn.exec = pair32<kMul>;
    return;
  }
  const Type type = d.type();
  d.insn.type = type;
  decode_operands(d, type, {type, type, type});
  if (d.insn.round != Round::nearest) {
    if (type != Type::f32 && type != Type::f64) d.fail("this rounding is not for this type");
    d.insn.exec = type == Type::f32 ? Exec{directed<float>} : Exec{directed<double>};
    return;
  }
  const bool sat = (d.insn.flags & kSaturate) != 0;
#define FAJIT_FMA(T)                                                                             \
  (sat    ? Exec{ternary<T, T, T, T, narrow_saturated3<T, narrow_fma<T>>>}                       \
   : relu ? Exec{ternary<T, T, T, T, narrow_fma_relu<T>>}                                        \
          : Exec{ternary<T, T, T, T, narrow_fma<T>>})
#define FAJIT_FMA2(T)                                                                                       \
  (sat    ? Exec{ternary<uint32_t, uint32_t, uint32_t, uint32_t, packed3<T, narrow_saturated3<T, narrow_fma<T>>>>} \
   : relu ? Exec{ternary<uint32_t, uint32_t, uint32_t, uint32_t, packed3<T, narrow_fma_relu<T>>>}           \
          : Exec{ternary<uint32_t, uint32_t, uint32_t, uint32_t, packed3<T, narrow_fma<T>>>})
  switch (type) {
    case Type::f32: d.insn.exec = (d.insn.flags & (kFtz | kSaturate)) != 0 ? fma32_special : fma32; break;
    case Type::f64: d.insn.exec = fma64; break;
    case Type::f16: d.insn.exec = FAJIT_FMA(Half); break;
    case Type::bf16: d.insn.exec = FAJIT_FMA(Bf16); break;
    case Type::f16x2: d.insn.exec = FAJIT_FMA2(Half); break;
    case Type::bf16x2: d.insn.exec = FAJIT_FMA2(Bf16); break;
    default: d.fail("not for this type");
  }
#undef FAJIT_FMA
#undef FAJIT_FMA2
}

void decode_float_sign(Decoder& d, bool negate) {
  const Type type = d.insn.type;
  decode_operands(d, type, {type});
  const bool ftz = (d.insn.flags & kFtz) != 0;
  switch (type) {
    case Type::f16:
    case Type::bf16:
      d.insn.exec = negate ? Exec{unary<uint16_t, uint16_t, sign_bits<uint16_t, 0, 0x8000>>}
                           : Exec{unary<uint16_t, uint16_t, sign_bits<uint16_t, 0x8000, 0>>};
      break;
    case Type::f16x2:
    case Type::bf16x2:
      d.insn.exec = negate ? Exec{unary<uint32_t, uint32_t, sign_bits<uint32_t, 0, 0x80008000>>}
                           : Exec{unary<uint32_t, uint32_t, sign_bits<uint32_t, 0x80008000, 0>>};
      break;
    case Type::f32:
      if (ftz)
        d.insn.exec = negate ? Exec{unary<uint32_t, uint32_t, sign_flushed<0, 0x80000000>>}
                             : Exec{unary<uint32_t, uint32_t, sign_flushed<0x80000000, 0>>};
      else
        d.insn.exec = negate ? Exec{unary<uint32_t, uint32_t, sign_bits<uint32_t, 0, 0x80000000>>}
                             : Exec{unary<uint32_t, uint32_t, sign_bits<uint32_t, 0x80000000, 0>>};
      break;
    default:
      d.insn.exec = negate ? Exec{unary<uint64_t, uint64_t, sign_bits<uint64_t, 0, uint64_t{1} << 63>>}
                           : Exec{unary<uint64_t, uint64_t, sign_bits<uint64_t, uint64_t{1} << 63, 0>>};
  }
}

void decode_copysign(Decoder& d) {
  const Type type = d.type();
  decode_operands(d, type, {type, type});
  d.insn.exec = is_wide(type) ? Exec{binary<uint64_t, uint64_t, uint64_t, copied_sign<uint64_t>>}
                              : Exec{binary<uint32_t, uint32_t, uint32_t, copied_sign<uint32_t>>};
}

void decode_float_minmax(Decoder& d, bool maximum) {
  if (d.accept("ftz")) d.insn.flags |= kFtz;
  if (d.accept("NaN")) d.insn.flags |= kNan;
  if (d.accept("abs")) d.insn.flags |= kAbs;
  if (d.accept("xorsign")) d.insn.flags |= kXorSign;
  d.insn.mode = maximum;
  const Type type = d.insn.type;
  if (d.num_operands() == 4) {
    decode_operands(d, type, {type, type, type});
  } else {
    decode_operands(d, type, {type, type});
  }
  switch (type) {
    case Type::f32: d.insn.exec = extremes<float>; break;
    case Type::f64: d.insn.exec = extremes<double>; break;
    case Type::f16: d.insn.exec = extremes<Half>; break;
    case Type::bf16: d.insn.exec = extremes<Bf16>; break;
    case Type::f16x2: d.insn.exec = extremes_packed<Half>; break;
    case Type::bf16x2: d.insn.exec = extremes_packed<Bf16>; break;
    default: d.fail("not for this type");
  }
}

void decode_testp(Decoder& d) {
  d.insn.mode = static_cast<uint8_t>(
      d.expect_one({"finite", "infinite", "number", "notanumber", "normal", "subnormal"}));
  const Type type = d.type();
  decode_operands(d, Type::pred, {type});
  d.insn.exec = type == Type::f64 ? Exec{test_property<double>} : Exec{test_property<float>};
}

}  // namespace fajit::emulator
