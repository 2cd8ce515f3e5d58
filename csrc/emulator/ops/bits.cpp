// Logic, shifts, bit fields and permutations.
#include <algorithm>

#include "ops/lanes.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

template <class T> T bit_and(T a, T b) { return static_cast<T>(a & b); }
template <class T> T bit_or(T a, T b) { return static_cast<T>(a | b); }
template <class T> T bit_xor(T a, T b) { return static_cast<T>(a ^ b); }
template <class T> T bit_not(T a) { return static_cast<T>(~a); }
// Shift amounts of at least the type's width give 0 or the sign.
template <class T> T shift_left(T a, uint32_t n) {
  return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << n);
}
template <class T> T shift_right(T a, uint32_t n) {
  constexpr uint32_t width = 8 * sizeof(T);
  if (n >= width) return std::is_signed_v<T> ? static_cast<T>(a >> (width - 1)) : T{0};
  return static_cast<T>(a >> n);
}

template <class T> T bit_field(T a, uint32_t position, uint32_t length) {
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

template <class T> void bit_insert(Warp& warp, const Insn& insn, uint32_t mask) {
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

template <class T> uint32_t count_ones(T a) {
  return static_cast<uint32_t>(__builtin_popcountll(static_cast<std::make_unsigned_t<T>>(a)));
}
template <class T> uint32_t leading_zeros(T a) {
  const uint64_t bits = static_cast<std::make_unsigned_t<T>>(a);
  const uint32_t top = bits == 0 ? 0 : 64 - static_cast<uint32_t>(__builtin_clzll(bits));
  return 8 * sizeof(T) - top;
}
template <class T> uint32_t find_top(T a) {  // for negative numbers, the highest 0 bit
  return 8 * sizeof(T) - 1 - leading_zeros(a < T{0} ? static_cast<T>(~a) : a);
}
template <class T> uint32_t find_shift(T a) {
  const uint32_t top = find_top(a);
  return top == 0xffffffffu ? top : 8 * sizeof(T) - 1 - top;
}
template <class T> T reversed(T a) {
  using U = std::make_unsigned_t<T>;
  U result = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); ++i)
    result = static_cast<U>(result << 1 | (static_cast<U>(a) >> i & 1));
  return static_cast<T>(result);
}

uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = selector >> (4 * i) & 0xf;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (pick & 7))) & 0xff;
    if ((pick & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;  // replicate the sign
    result |= byte << (8 * i);
  }
  return result;
}

void logic3(Warp& warp, const Insn& insn, uint32_t mask) {
  uint32_t* d = warp.words(insn.slots[0]);
  const uint32_t* a = warp.words(insn.slots[1]);
  const uint32_t* b = warp.words(insn.slots[2]);
  const uint32_t* c = warp.words(insn.slots[3]);
  for_lanes(mask, [&](int l) {
    const uint32_t x = a[l], y = b[l], z = c[l];
    uint32_t result = 0;
    for (unsigned i = 0; i < 8; ++i)
      if ((insn.immediate >> i & 1) != 0)
        result |= (i & 4 ? x : ~x) & (i & 2 ? y : ~y) & (i & 1 ? z : ~z);
    d[l] = result;
  });
}

template <bool left, bool wrap> uint32_t funnel(uint32_t a, uint32_t b, uint32_t c) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  const uint32_t n = wrap ? c & 31 : std::min(c, 32u);
  return static_cast<uint32_t>(left ? both << n >> 32 : both >> n);
}

// Predicates are masks over the lanes: `operation` acts on all of them at once.
enum PredicateOp : uint8_t { kPredAnd, kPredOr, kPredXor, kPredNot };
void predicate_logic(Warp& warp, const Insn& insn, uint32_t mask) {
  auto operand = [&](int i) {
    return warp.predicate(insn.slots[i]) ^ ((insn.immediate >> (i - 1) & 1) != 0 ? ~0u : 0u);
  };
  const uint32_t a = operand(1), b = insn.mode == kPredNot ? ~0u : operand(2);
  const uint32_t value = insn.mode == kPredAnd ? a & b : insn.mode == kPredOr ? a | b : a ^ b;
  set_bits(warp.predicate(insn.slots[0]), mask, value);
}

template <class Form> void decode_logic(Decoder& d, uint8_t operation, Form form) {
  const Type type = d.type();
  if (operation == kPredNot) decode_operands(d, type, {type});
  else decode_operands(d, type, {type, type});
  if (type != Type::pred) return d.set_exec(by_width(type, form));
  d.insn.mode = operation;
  d.insn.exec = predicate_logic;
  d.insn.immediate =
      (d.operand(1).negated ? 1 : 0) | (operation != kPredNot && d.operand(2).negated ? 2 : 0);
}

}  // namespace

void decode_and(Decoder& d) { decode_logic(d, kPredAnd, FAJIT_BINARY(bit_and)); }
void decode_or(Decoder& d) { decode_logic(d, kPredOr, FAJIT_BINARY(bit_or)); }
void decode_xor(Decoder& d) { decode_logic(d, kPredXor, FAJIT_BINARY(bit_xor)); }
void decode_not(Decoder& d) { decode_logic(d, kPredNot, FAJIT_UNARY(bit_not)); }

template <class Form> void decode_shift(Decoder& d, Form form) {
  const Type type = d.type();
  decode_operands(d, type, {type, Type::u32});
  d.set_exec(by_integer(type, form));
}
#define FAJIT_SHIFT(function)                   \
  [](auto zero) -> Exec {                       \
    using T = decltype(zero);                   \
    return binary<T, T, uint32_t, function<T>>; \
  }
void decode_shl(Decoder& d) { decode_shift(d, FAJIT_SHIFT(shift_left)); }
void decode_shr(Decoder& d) { decode_shift(d, FAJIT_SHIFT(shift_right)); }

void decode_shf(Decoder& d) {
  const int left = d.expect_one({"r", "l"}), wrap = d.expect_one({"clamp", "wrap"});
  const Type type = d.type();
  decode_operands(d, type, {type, type, Type::u32});
  using W = uint32_t;
  static constexpr Exec kForms[2][2] = {
      {ternary<W, W, W, W, funnel<false, false>>, ternary<W, W, W, W, funnel<false, true>>},
      {ternary<W, W, W, W, funnel<true, false>>, ternary<W, W, W, W, funnel<true, true>>}};
  d.insn.exec = kForms[left][wrap];
}

void decode_bfe(Decoder& d) {
  const Type type = d.type();
  decode_operands(d, type, {type, Type::u32, Type::u32});
  d.set_exec(by_integer(type, [](auto zero) -> Exec {
    using T = decltype(zero);
    return ternary<T, T, uint32_t, uint32_t, bit_field<T>>;
  }));
}

void decode_bfi(Decoder& d) {
  const Type type = d.type();
  decode_operands(d, type, {type, type, Type::u32, Type::u32});
  d.insn.exec = is_wide(type) ? bit_insert<uint64_t> : bit_insert<uint32_t>;
}

#define FAJIT_COUNT(function) \
  [](auto zero) -> Exec { return unary<uint32_t, decltype(zero), function<decltype(zero)>>; }
void decode_bfind(Decoder& d) {
  if (d.accept("shiftamt")) decode_unary(d, FAJIT_COUNT(find_shift), Type::u32);
  else decode_unary(d, FAJIT_COUNT(find_top), Type::u32);
}
void decode_popc(Decoder& d) { decode_unary(d, FAJIT_COUNT(count_ones), Type::u32); }
void decode_clz(Decoder& d) { decode_unary(d, FAJIT_COUNT(leading_zeros), Type::u32); }
void decode_brev(Decoder& d) { decode_unary(d, FAJIT_UNARY(reversed)); }

void decode_prmt(Decoder& d) {
  const Type type = d.type();
  decode_operands(d, type, {type, type, Type::u32});
  d.insn.exec = ternary<uint32_t, uint32_t, uint32_t, uint32_t, permuted>;
}

void decode_lop3(Decoder& d) {
  const Type type = d.type();
  d.expect_operands(5);
  d.insn.slots[0] = d.destination(0, type);
  for (size_t i = 1; i < 4; ++i) d.insn.slots[i] = d.source(i, type);
  d.insn.immediate = d.literal(4, 0, 255);
  d.insn.exec = logic3;
}

}  // namespace fajit::emulator
