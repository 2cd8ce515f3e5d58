// Logic, shifts, and rearranging of bits.
#include <algorithm>

#include "lanes.h"
#include "ops.h"

namespace fajit::emulator {
namespace {

template <class T>
T bit_and(T a, T b) {
  return static_cast<T>(a & b);
}
template <class T>
T bit_or(T a, T b) {
  return static_cast<T>(a | b);
}
template <class T>
T bit_xor(T a, T b) {
  return static_cast<T>(a ^ b);
}
template <class T>
T bit_not(T a) {
  return static_cast<T>(~a);
}
template <class T>
T is_zero(T a) {
  return a == 0 ? 1 : 0;
}
// Amounts of the type's width and more shift everything out.
template <class T>
T shift_left(T a, uint32_t n) {
  return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << n);
}
template <class T>
T shift_right(T a, uint32_t n) {
  constexpr uint32_t width = 8 * sizeof(T);
  if (n >= width) return std::is_signed_v<T> ? static_cast<T>(a >> (width - 1)) : T{0};
  return static_cast<T>(a >> n);
}

template <class T>
T bit_field(T a, uint32_t position, uint32_t length) {
  constexpr uint32_t width = 8 * sizeof(T);
  using U = std::make_unsigned_t<T>;
  position &= 0xff;
  length &= 0xff;
  const uint32_t last = std::min(position + length - (length > 0), width - 1);
  const bool sign = std::is_signed_v<T> && length > 0 && (static_cast<U>(a) >> last & 1) != 0;
  U result = sign ? static_cast<U>(~U{0}) : U{0};
  for (uint32_t i = 0; i < length && i < width; ++i) {
    const U bit = position + i < width ? static_cast<U>(a) >> (position + i) & 1 : U{sign};
    result = static_cast<U>((result & ~(U{1} << i)) | bit << i);
  }
  return static_cast<T>(result);
}

template <class T>
void bit_insert(Warp& warp, const Insn& insn, uint32_t mask) {
  constexpr uint32_t width = 8 * sizeof(T);
  auto* d = lanes_of<T>(warp, insn.slots[0]);
  const auto* a = lanes_of<T>(warp, insn.slots[1]);
  const auto* b = lanes_of<T>(warp, insn.slots[2]);
  const uint32_t* position = warp.words(insn.slots[3]);
  const uint32_t* length = warp.words(insn.slots[4]);
  for_lanes(mask, [&](int l) {
    const uint32_t at = position[l] & 0xff, count = length[l] & 0xff;
    const T ones = count >= width ? ~T{0} : static_cast<T>((T{1} << count) - 1);
    const T field = at >= width ? T{0} : static_cast<T>(ones << at);
    const T value = at >= width ? T{0} : static_cast<T>(a[l] << at);
    d[l] = (b[l] & ~field) | (value & field);
  });
}

template <class T>
uint32_t find_top(T a) {
  using U = std::make_unsigned_t<T>;
  U value = static_cast<U>(a);
  if (std::is_signed_v<T> && a < 0) value = static_cast<U>(~value);
  for (int i = 8 * sizeof(T) - 1; i >= 0; --i)
    if ((value >> i & 1) != 0) return static_cast<uint32_t>(i);
  return 0xffffffffu;
}
template <class T>
uint32_t find_shift(T a) {
  const uint32_t top = find_top(a);
  return top == 0xffffffffu ? top : 8 * sizeof(T) - 1 - top;
}

template <class T>
T reversed(T a) {
  T result = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); ++i)
    result = static_cast<T>(result << 1 | (a >> i & 1));
  return result;
}
uint32_t count32(uint32_t a) { return static_cast<uint32_t>(__builtin_popcount(a)); }
uint32_t count64(uint64_t a) { return static_cast<uint32_t>(__builtin_popcountll(a)); }
uint32_t zeros32(uint32_t a) { return a == 0 ? 32 : static_cast<uint32_t>(__builtin_clz(a)); }
uint32_t zeros64(uint64_t a) { return a == 0 ? 64 : static_cast<uint32_t>(__builtin_clzll(a)); }

uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = selector >> (4 * i) & 0xf;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (pick & 7))) & 0xff;
    if ((pick & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;  // the sign, repeated
    result |= byte << (8 * i);
  }
  return result;
}

// prmt.f4e, .b4e, .rc8, .ecl, .ecr, .rc16: the byte picks that depend on two bits of the selector.
uint32_t picks_of(int mode, uint32_t n) {
  static constexpr uint32_t kPicks[6][4] = {
      {0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123},
      {0x0000, 0x1111, 0x2222, 0x3333}, {0x3210, 0x3211, 0x3222, 0x3333},
      {0x0000, 0x1110, 0x2210, 0x3210}, {0x1010, 0x3232, 0x1010, 0x3232}};
  return kPicks[mode][n & 3];
}
template <int mode>
uint32_t permuted_as(uint32_t a, uint32_t b, uint32_t selector) {
  return permuted(a, b, picks_of(mode, selector));
}

void logic3(Warp& warp, const Insn& insn, uint32_t mask) {
  uint32_t* d = warp.words(insn.slots[0]);
  const uint32_t* a = warp.words(insn.slots[1]);
  const uint32_t* b = warp.words(insn.slots[2]);
  const uint32_t* c = warp.words(insn.slots[3]);
  uint32_t minterm[8];
  for (int i = 0; i < 8; ++i) minterm[i] = (insn.immediate >> i & 1) != 0 ? ~0u : 0u;
  for_lanes(mask, [&](int l) {
    const uint32_t x = a[l], y = b[l], z = c[l];
    d[l] = (minterm[7] & x & y & z) | (minterm[6] & x & y & ~z) | (minterm[5] & x & ~y & z) |
           (minterm[4] & x & ~y & ~z) | (minterm[3] & ~x & y & z) | (minterm[2] & ~x & y & ~z) |
           (minterm[1] & ~x & ~y & z) | (minterm[0] & ~x & ~y & ~z);
  });
}

uint32_t funnel_left(uint32_t a, uint32_t b, uint32_t n) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  return static_cast<uint32_t>(both << n >> 32);
}
uint32_t funnel_right(uint32_t a, uint32_t b, uint32_t n) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  return static_cast<uint32_t>(both >> n);
}
template <bool left, bool wrap>
uint32_t funnel(uint32_t a, uint32_t b, uint32_t c) {
  const uint32_t n = wrap ? c & 31 : std::min(c, 32u);
  return left ? funnel_left(a, b, n) : funnel_right(a, b, n);
}

// Predicates are masks over the lanes: `operation` acts on all of them at once.
enum PredicateOp : uint8_t { kAnd, kOr, kXor, kNot };
void predicate_logic(Warp& warp, const Insn& insn, uint32_t mask) {
  const uint32_t a = warp.predicate(insn.slots[1]) ^ ((insn.immediate & 1) != 0 ? ~0u : 0u);
  const uint32_t b =
      insn.mode == kNot ? 0 : warp.predicate(insn.slots[2]) ^ ((insn.immediate & 2) != 0 ? ~0u : 0u);
  const uint32_t value = insn.mode == kAnd   ? a & b
                         : insn.mode == kOr  ? a | b
                         : insn.mode == kXor ? a ^ b
                                             : ~a;
  uint32_t& result = warp.predicate(insn.slots[0]);
  result = (result & ~mask) | (value & mask);
}

void decode_logic(Decoder& d, uint8_t operation, Exec narrow, Exec word, Exec wide) {
  const Type type = d.type();
  if (operation == kNot) {
    decode_operands(d, type, {type});
  } else {
    decode_operands(d, type, {type, type});
  }
  if (type == Type::pred) {
    d.insn.mode = operation;
    d.insn.exec = predicate_logic;
    d.insn.immediate = (d.operand(1).negated ? 1 : 0) |
                       (operation != kNot && d.operand(2).negated ? 2 : 0);
    return;
  }
  switch (bytes_of(type)) {
    case 2: d.insn.exec = narrow; break;
    case 4: d.insn.exec = word; break;
    case 8: d.insn.exec = wide; break;
    default: d.fail("not for this type");
  }
}

template <class T>
Exec shift(bool left) {
  return left ? Exec{binary<T, T, uint32_t, shift_left<T>>} : Exec{binary<T, T, uint32_t, shift_right<T>>};
}

void decode_shift(Decoder& d, bool left) {
  const Type type = d.type();
  decode_operands(d, type, {type, Type::u32});
  switch (type) {
    case Type::b16:
    case Type::u16: d.insn.exec = shift<uint16_t>(left); break;
    case Type::b32:
    case Type::u32: d.insn.exec = shift<uint32_t>(left); break;
    case Type::b64:
    case Type::u64: d.insn.exec = shift<uint64_t>(left); break;
    case Type::s16: d.insn.exec = shift<int16_t>(left); break;
    case Type::s32: d.insn.exec = shift<int32_t>(left); break;
    case Type::s64: d.insn.exec = shift<int64_t>(left); break;
    default: d.fail("not for this type");
  }
}

}  // namespace

#define FAJIT_LOGIC(name, operation, function)                                          \
  void name(Decoder& d) {                                                               \
    decode_logic(d, operation, binary<uint16_t, uint16_t, uint16_t, function<uint16_t>>, \
                 binary<uint32_t, uint32_t, uint32_t, function<uint32_t>>,              \
                 binary<uint64_t, uint64_t, uint64_t, function<uint64_t>>);             \
  }
FAJIT_LOGIC(decode_and, kAnd, bit_and)
FAJIT_LOGIC(decode_or, kOr, bit_or)
FAJIT_LOGIC(decode_xor, kXor, bit_xor)
#undef FAJIT_LOGIC

void decode_not(Decoder& d) {
  decode_logic(d, kNot, unary<uint16_t, uint16_t, bit_not<uint16_t>>,
               unary<uint32_t, uint32_t, bit_not<uint32_t>>,
               unary<uint64_t, uint64_t, bit_not<uint64_t>>);
}

void decode_cnot(Decoder& d) {
  decode_logic(d, kNot, unary<uint16_t, uint16_t, is_zero<uint16_t>>,
               unary<uint32_t, uint32_t, is_zero<uint32_t>>,
               unary<uint64_t, uint64_t, is_zero<uint64_t>>);
}

void decode_shl(Decoder& d) { decode_shift(d, true); }
void decode_shr(Decoder& d) { decode_shift(d, false); }

void decode_shf(Decoder& d) {
  const bool left = d.expect_one({"l", "r"}) == 0;
  const bool wrap = d.expect_one({"clamp", "wrap"}) == 1;
  const Type type = d.type();
  decode_operands(d, type, {type, type, Type::u32});
  d.insn.exec = left ? (wrap ? Exec{ternary<uint32_t, uint32_t, uint32_t, uint32_t, funnel<true, true>>}
                             : Exec{ternary<uint32_t, uint32_t, uint32_t, uint32_t, funnel<true, false>>})
                     : (wrap ? Exec{ternary<uint32_t, uint32_t, uint32_t, uint32_t, funnel<false, true>>}
                             : Exec{ternary<uint32_t, uint32_t, uint32_t, uint32_t, funnel<false, false>>});
}

void decode_bfe(Decoder& d) {
  const Type type = d.type();
  decode_operands(d, type, {type, Type::u32, Type::u32});
  switch (type) {
    case Type::u32: d.insn.exec = ternary<uint32_t, uint32_t, uint32_t, uint32_t, bit_field<uint32_t>>; break;
    case Type::s32: d.insn.exec = ternary<int32_t, int32_t, uint32_t, uint32_t, bit_field<int32_t>>; break;
    case Type::u64: d.insn.exec = ternary<uint64_t, uint64_t, uint32_t, uint32_t, bit_field<uint64_t>>; break;
    case Type::s64: d.insn.exec = ternary<int64_t, int64_t, uint32_t, uint32_t, bit_field<int64_t>>; break;
    default: d.fail("not for this type");
  }
}

void decode_bfi(Decoder& d) {
  const Type type = d.type();
  decode_operands(d, type, {type, type, Type::u32, Type::u32});
  d.insn.exec = is_wide(type) ? Exec{bit_insert<uint64_t>} : Exec{bit_insert<uint32_t>};
}

void decode_bfind(Decoder& d) {
  const bool shift_amount = d.accept("shiftamt");
  const Type type = d.type();
  decode_operands(d, Type::u32, {type});
#define FAJIT_FIND(T) \
  d.insn.exec = shift_amount ? Exec{unary<uint32_t, T, find_shift<T>>} : Exec{unary<uint32_t, T, find_top<T>>}
  switch (type) {
    case Type::u32: FAJIT_FIND(uint32_t); break;
    case Type::s32: FAJIT_FIND(int32_t); break;
    case Type::u64: FAJIT_FIND(uint64_t); break;
    case Type::s64: FAJIT_FIND(int64_t); break;
    default: d.fail("not for this type");
  }
#undef FAJIT_FIND
}

void decode_brev(Decoder& d) {
  const Type type = d.type();
  decode_operands(d, type, {type});
  d.insn.exec = is_wide(type) ? Exec{unary<uint64_t, uint64_t, reversed<uint64_t>>}
                              : Exec{unary<uint32_t, uint32_t, reversed<uint32_t>>};
}

void decode_popc(Decoder& d) {
  const Type type = d.type();
  decode_operands(d, Type::u32, {type});
  d.insn.exec = is_wide(type) ? Exec{unary<uint32_t, uint64_t, count64>}
                              : Exec{unary<uint32_t, uint32_t, count32>};
}

void decode_clz(Decoder& d) {
  const Type type = d.type();
  decode_operands(d, Type::u32, {type});
  d.insn.exec = is_wide(type) ? Exec{unary<uint32_t, uint64_t, zeros64>}
                              : Exec{unary<uint32_t, uint32_t, zeros32>};
}

void decode_prmt(Decoder& d) {
  const Type type = d.type();
  const int mode = d.accept_one({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"});
  decode_operands(d, type, {type, type, Type::u32});
  static constexpr Exec kModes[] = {
      ternary<uint32_t, uint32_t, uint32_t, uint32_t, permuted_as<0>>,
      ternary<uint32_t, uint32_t, uint32_t, uint32_t, permuted_as<1>>,
      ternary<uint32_t, uint32_t, uint32_t, uint32_t, permuted_as<2>>,
      ternary<uint32_t, uint32_t, uint32_t, uint32_t, permuted_as<3>>,
      ternary<uint32_t, uint32_t, uint32_t, uint32_t, permuted_as<4>>,
      ternary<uint32_t, uint32_t, uint32_t, uint32_t, permuted_as<5>>};
  d.insn.exec = mode < 0 ? Exec{ternary<uint32_t, uint32_t, uint32_t, uint32_t, permuted>} : kModes[mode];
}

void decode_lop3(Decoder& d) {
  const Type type = d.type();
  d.expect_operands(5);
  d.insn.slots[0] = d.destination(0, type);
  for (size_t i = 1; i < 4; ++i) d.insn.slots[i] = d.source(i, type);
  if (d.operand(4).kind != Operand::Kind::integer) d.fail("the table must be a number");
  d.insn.immediate = d.operand(4).bits;
  d.insn.exec = logic3;
}

}  // namespace fajit::emulator
