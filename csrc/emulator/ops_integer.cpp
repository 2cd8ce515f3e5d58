// Integer arithmetic. Results wrap; a division by zero gives all ones, as devices do.
#include <algorithm>

#include "lanes.h"
#include "ops.h"

namespace fajit::emulator {
namespace {

// Arithmetic is done in an unsigned type of at least 32 bits: wrapping without undefined behaviour.
template <class T>
using Modular = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
struct Add {
  static T of(T a, T b) { return static_cast<T>(Modular<T>(a) + Modular<T>(b)); }
};
template <class T>
struct Sub {
  static T of(T a, T b) { return static_cast<T>(Modular<T>(a) - Modular<T>(b)); }
};
template <class T>
struct MulLo {
  static T of(T a, T b) { return static_cast<T>(Modular<T>(a) * Modular<T>(b)); }
};
template <class T>
struct MulHi {
  static T of(T a, T b) {
    if constexpr (sizeof(T) == 8) {
      using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
      return static_cast<T>((static_cast<Wide>(a) * b) >> 64);
    } else {
      using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
      return static_cast<T>((static_cast<Wide>(a) * b) >> (8 * sizeof(T)));
    }
  }
};
template <class T>
struct Div {
  static T of(T a, T b) {
    if (b == 0) return static_cast<T>(~T{0});
    if constexpr (std::is_signed_v<T>)
      if (b == -1) return static_cast<T>(0 - Modular<T>(a));
    return static_cast<T>(a / b);
  }
};
template <class T>
struct Rem {
  static T of(T a, T b) {
    if (b == 0) return a;
    if constexpr (std::is_signed_v<T>)
      if (b == -1) return 0;
    return static_cast<T>(a % b);
  }
};
template <class T>
struct Min {
  static T of(T a, T b) { return a < b ? a : b; }
};
template <class T>
struct Max {
  static T of(T a, T b) { return a < b ? b : a; }
};

template <class W, class T>
W mul_wide(T a, T b) {
  return static_cast<W>(a) * static_cast<W>(b);
}
template <class W, class T>
W mad_wide(T a, T b, W c) {
  return static_cast<W>(Modular<W>(static_cast<W>(a) * static_cast<W>(b)) + Modular<W>(c));
}
template <class T>
T mad_lo(T a, T b, T c) {
  return Add<T>::of(MulLo<T>::of(a, b), c);
}
template <class T>
T mad_hi(T a, T b, T c) {
  return Add<T>::of(MulHi<T>::of(a, b), c);
}
template <class T>
T absolute(T a) {
  return static_cast<T>(a < 0 ? 0 - Modular<T>(a) : Modular<T>(a));
}
template <class T>
T negated(T a) {
  return static_cast<T>(0 - Modular<T>(a));
}
template <class T>
T sad(T a, T b, T c) {
  return Add<T>::of(a < b ? Sub<T>::of(b, a) : Sub<T>::of(a, b), c);
}

int32_t add_saturated(int32_t a, int32_t b) {
  const int64_t sum = int64_t{a} + b;
  return static_cast<int32_t>(std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX));
}
int32_t sub_saturated(int32_t a, int32_t b) {
  const int64_t sum = int64_t{a} - b;
  return static_cast<int32_t>(std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX));
}

template <template <class> class Op>
Exec pick(Type type) {
  switch (type) {
    case Type::b16:
    case Type::u16: return binary<uint16_t, uint16_t, uint16_t, Op<uint16_t>::of>;
    case Type::b32:
    case Type::u32: return binary<uint32_t, uint32_t, uint32_t, Op<uint32_t>::of>;
    case Type::b64:
    case Type::u64: return binary<uint64_t, uint64_t, uint64_t, Op<uint64_t>::of>;
    case Type::s16: return binary<int16_t, int16_t, int16_t, Op<int16_t>::of>;
    case Type::s32: return binary<int32_t, int32_t, int32_t, Op<int32_t>::of>;
    case Type::s64: return binary<int64_t, int64_t, int64_t, Op<int64_t>::of>;
    default: return nullptr;
  }
}

template <template <class> class Op>
void decode_binary(Decoder& d, Type type) {
  decode_operands(d, type, {type, type});
  d.insn.exec = pick<Op>(type);
  if (d.insn.exec == nullptr) d.fail("not for this type");
}

// min and max of .u16x2 and .s16x2 are written as two halves.
template <class T, T (*Function)(T, T)>
uint32_t halves(uint32_t a, uint32_t b) {
  const T low = Function(static_cast<T>(a), static_cast<T>(b));
  const T high = Function(static_cast<T>(a >> 16), static_cast<T>(b >> 16));
  return static_cast<uint16_t>(low) | static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16;
}

template <template <class> class Op>
bool decode_halves(Decoder& d) {
  const int kind = d.accept_one({"u16x2", "s16x2"});
  if (kind < 0) return false;
  decode_operands(d, Type::b32, {Type::b32, Type::b32});
  d.insn.exec = kind == 0 ? binary<uint32_t, uint32_t, uint32_t, halves<uint16_t, Op<uint16_t>::of>>
                          : binary<uint32_t, uint32_t, uint32_t, halves<int16_t, Op<int16_t>::of>>;
  return true;
}

enum Carry : uint8_t { kCarryOut = 1, kCarryIn = 2, kSubtract = 4, kMultiplyLow = 8, kMultiplyHigh = 16 };

// add.cc, addc, sub.cc, subc, mad.cc, madc: the carry flag is a predicate slot of the warp.
template <class T>
void carry(Warp& warp, const Insn& insn, uint32_t mask) {
  using Wide = std::conditional_t<sizeof(T) == 8, unsigned __int128, uint64_t>;
  auto* result = lanes_of<T>(warp, insn.slots[0]);
  const auto* a = lanes_of<T>(warp, insn.slots[1]);
  const auto* b = lanes_of<T>(warp, insn.slots[2]);
  const auto* c = lanes_of<T>(warp, insn.slots[3]);
  uint32_t& flag = warp.predicate(insn.slots[4]);
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const bool in = (insn.mode & kCarryIn) != 0 && (flag >> l & 1) != 0;
    T x = a[l], y = b[l];
    if ((insn.mode & (kMultiplyLow | kMultiplyHigh)) != 0) {
      const Wide product = static_cast<Wide>(x) * y;
      x = static_cast<T>((insn.mode & kMultiplyHigh) != 0 ? product >> (8 * sizeof(T)) : product);
      y = c[l];
    }
    const Wide total = (insn.mode & kSubtract) != 0 ? static_cast<Wide>(x) - y - in
                                                    : static_cast<Wide>(x) + y + in;
    result[l] = static_cast<T>(total);
    const bool out = (total >> (8 * sizeof(T)) & 1) != 0;
    if ((insn.mode & kCarryOut) != 0) flag = out ? flag | 1u << l : flag & ~(1u << l);
  }
}

void decode_with_carry(Decoder& d, uint8_t mode) {
  const Type type = d.type();
  if (is_wide(type) && (mode & kMultiplyHigh) != 0 && is_signed(type)) d.fail("not for this type");
  d.insn.mode = mode;
  d.insn.slots[0] = d.destination(0, type);
  d.insn.slots[1] = d.source(1, type);
  d.insn.slots[2] = d.source(2, type);
  d.insn.slots[3] = d.num_operands() > 3 ? d.source(3, type) : d.insn.slots[2];
  d.insn.slots[4] = d.carry_flag();
  d.insn.exec = is_wide(type) ? carry<uint64_t> : carry<uint32_t>;
}

}  // namespace

void decode_add(Decoder& d) {
  if (d.accept("cc")) return decode_with_carry(d, kCarryOut);
  if (decode_float_add(d, false) || decode_halves<Add>(d)) return;
  const bool saturate = d.accept("sat");
  decode_binary<Add>(d, d.type());
  if (saturate) d.insn.exec = binary<int32_t, int32_t, int32_t, add_saturated>;
}

void decode_sub(Decoder& d) {
  if (d.accept("cc")) return decode_with_carry(d, kCarryOut | kSubtract);
  if (decode_float_add(d, true)) return;
  const bool saturate = d.accept("sat");
  decode_binary<Sub>(d, d.type());
  if (saturate) d.insn.exec = binary<int32_t, int32_t, int32_t, sub_saturated>;
}

void decode_carry(Decoder& d) {
  uint8_t mode = kCarryIn | (d.accept("cc") ? kCarryOut : 0);
  if (d.opcode() == "subc") mode |= kSubtract;
  if (d.opcode() == "madc") mode |= d.expect_one({"lo", "hi"}) == 0 ? kMultiplyLow : kMultiplyHigh;
  decode_with_carry(d, mode);
}

void decode_mul(Decoder& d) {
  const int part = d.accept_one({"lo", "hi", "wide"});
  if (part < 0) return decode_float_arithmetic(d, 0);
  const Type type = d.type();
  if (part == 0) return decode_binary<MulLo>(d, type);
  if (part == 1) return decode_binary<MulHi>(d, type);
  switch (type) {
    case Type::u16:
      decode_operands(d, Type::u32, {type, type});
      d.insn.exec = binary<uint32_t, uint16_t, uint16_t, mul_wide<uint32_t, uint16_t>>;
      break;
    case Type::s16:
      decode_operands(d, Type::s32, {type, type});
      d.insn.exec = binary<int32_t, int16_t, int16_t, mul_wide<int32_t, int16_t>>;
      break;
    case Type::u32:
      decode_operands(d, Type::u64, {type, type});
      d.insn.exec = binary<uint64_t, uint32_t, uint32_t, mul_wide<uint64_t, uint32_t>>;
      break;
    case Type::s32:
      decode_operands(d, Type::s64, {type, type});
      d.insn.exec = binary<int64_t, int32_t, int32_t, mul_wide<int64_t, int32_t>>;
      break;
    default: d.fail("not for this type");
  }
}

void decode_mad(Decoder& d) {
  const int part = d.accept_one({"lo", "hi", "wide"});
  if (part < 0) return decode_fma(d);
  if (d.accept("cc"))
    return decode_with_carry(d, kCarryOut | (part == 0 ? kMultiplyLow : kMultiplyHigh));
  const Type type = d.type();
  const Type wide = type == Type::u16   ? Type::u32
                    : type == Type::s16 ? Type::s32
                    : type == Type::u32 ? Type::u64
                                        : Type::s64;
  const Type result = part == 2 ? wide : type;
  decode_operands(d, result, {type, type, result});
#define FAJIT_MAD(T, W)                                                       \
  d.insn.exec = part == 0   ? Exec{ternary<T, T, T, T, mad_lo<T>>}            \
                : part == 1 ? Exec{ternary<T, T, T, T, mad_hi<T>>}            \
                            : Exec{ternary<W, T, T, W, mad_wide<W, T>>}
  switch (type) {
    case Type::u16: FAJIT_MAD(uint16_t, uint32_t); break;
    case Type::s16: FAJIT_MAD(int16_t, int32_t); break;
    case Type::u32: FAJIT_MAD(uint32_t, uint64_t); break;
    case Type::s32: FAJIT_MAD(int32_t, int64_t); break;
    case Type::u64: FAJIT_MAD(uint64_t, uint64_t); break;
    case Type::s64: FAJIT_MAD(int64_t, int64_t); break;
    default: d.fail("not for this type");
  }
#undef FAJIT_MAD
  if (part == 2 && is_wide(type)) d.fail("not for this type");
}

void decode_div(Decoder& d) {
  const Type type = d.type();
  if (is_float(type)) {
    d.insn.type = type;
    return decode_float_arithmetic(d, 1);
  }
  decode_binary<Div>(d, type);
}

void decode_rem(Decoder& d) { decode_binary<Rem>(d, d.type()); }

void decode_abs(Decoder& d) {
  const bool ftz = d.accept("ftz");
  const Type type = d.type();
  if (ftz) d.insn.flags |= kFtz;
  d.insn.type = type;
  if (is_float(type)) return decode_float_sign(d, false);
  decode_operands(d, type, {type});
  d.insn.exec = type == Type::s16   ? Exec{unary<int16_t, int16_t, absolute<int16_t>>}
                : type == Type::s32 ? Exec{unary<int32_t, int32_t, absolute<int32_t>>}
                                    : Exec{unary<int64_t, int64_t, absolute<int64_t>>};
}

void decode_neg(Decoder& d) {
  const bool ftz = d.accept("ftz");
  const Type type = d.type();
  if (ftz) d.insn.flags |= kFtz;
  d.insn.type = type;
  if (is_float(type)) return decode_float_sign(d, true);
  decode_operands(d, type, {type});
  d.insn.exec = type == Type::s16   ? Exec{unary<int16_t, int16_t, negated<int16_t>>}
                : type == Type::s32 ? Exec{unary<int32_t, int32_t, negated<int32_t>>}
                                    : Exec{unary<int64_t, int64_t, negated<int64_t>>};
}

void decode_min(Decoder& d) {
  if (decode_halves<Min>(d)) return;
  const Type type = d.type();
  d.insn.type = type;
  if (is_float(type)) return decode_float_minmax(d, false);
  decode_binary<Min>(d, type);
}

void decode_max(Decoder& d) {
  if (decode_halves<Max>(d)) return;
  const Type type = d.type();
  d.insn.type = type;
  if (is_float(type)) return decode_float_minmax(d, true);
  decode_binary<Max>(d, type);
}

void decode_sad(Decoder& d) {
  const Type type = d.type();
  decode_operands(d, type, {type, type, type});
  d.insn.exec = type == Type::s32 ? Exec{ternary<int32_t, int32_t, int32_t, int32_t, sad<int32_t>>}
                                  : Exec{ternary<uint32_t, uint32_t, uint32_t, uint32_t, sad<uint32_t>>};
  if (type != Type::s32 && type != Type::u32) d.fail("not for this type");
}

}  // namespace fajit::emulator
