// setp, set, selp, slct.
#include <cmath>

#include "lanes.h"
#include "ops.h"

namespace fajit::emulator {
namespace {

enum Comparison : uint8_t { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan_ };
enum Combine : uint8_t { kNoCombine, kAnd, kOr, kXor };

template <int comparison, class T>
bool holds(T a, T b) {
  switch (comparison) {
    case kEq: return a == b;
    case kNe: return a < b || b < a;  // false for NaN
    case kLt: return a < b;
    case kLe: return a <= b;
    case kGt: return a > b;
    case kGe: return a >= b;
    case kEqu: return !(a < b || b < a);
    case kNeu: return !(a == b);
    case kLtu: return !(a >= b);
    case kLeu: return !(a > b);
    case kGtu: return !(a <= b);
    case kGeu: return !(a < b);
    case kNum: return a == a && b == b;
    default: return a != a || b != b;
  }
}

// Compares all lanes at once: the mask of those for which the comparison holds.
template <int comparison, class T>
uint32_t compare_all(const Word<T>* a, const Word<T>* b, bool ftz) {
  uint8_t flags[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    auto x = from_word<T>(a[l]), y = from_word<T>(b[l]);
    if constexpr (std::is_same_v<T, float>) {
      flags[l] = ftz ? holds<comparison>(flush(x), flush(y)) : holds<comparison>(x, y);
    } else if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Bf16>) {
      flags[l] = holds<comparison>(to_float(x), to_float(y));
    } else {
      flags[l] = holds<comparison>(x, y);
    }
  }
  uint32_t result = 0;
  for (int l = 0; l < kLanes; ++l) result |= static_cast<uint32_t>(flags[l]) << l;
  return result;
}

uint32_t combined(uint32_t value, uint32_t other, uint8_t combine) {
  return combine == kAnd ? value & other : combine == kOr ? value | other : combine == kXor ? value ^ other : value;
}

// slots: p, q (or none), a, b, c (or none). count: combination; immediate: c negated.
template <int comparison, class T>
void set_predicate(Warp& warp, const Insn& insn, uint32_t mask) {
  const uint32_t value = compare_all<comparison, T>(lanes_of<T>(warp, insn.slots[2]),
                                                    lanes_of<T>(warp, insn.slots[3]),
                                                    (insn.flags & kFtz) != 0);
  uint32_t other = 0;
  if (insn.slots[4] != kNoSlot)
    other = warp.predicate(insn.slots[4]) ^ (insn.immediate != 0 ? ~0u : 0u);
  uint32_t& p = warp.predicate(insn.slots[0]);
  const uint32_t first = combined(value, other, insn.count);
  const uint32_t second = combined(~value, other, insn.count);
  p = (p & ~mask) | (first & mask);
  if (insn.slots[1] != kNoSlot) {
    uint32_t& q = warp.predicate(insn.slots[1]);
    q = (q & ~mask) | (second & mask);
  }
}

// setp of packed halves: p for the lower, q for the upper.
template <int comparison, class T>
void set_predicates_packed(Warp& warp, const Insn& insn, uint32_t mask) {
  uint32_t low[2][kLanes];
  for (int half = 0; half < 2; ++half) {
    const uint32_t* a = warp.words(insn.slots[2]);
    const uint32_t* b = warp.words(insn.slots[3]);
    uint32_t x[kLanes], y[kLanes];
    for (int l = 0; l < kLanes; ++l) x[l] = a[l] >> (16 * half) & 0xffff, y[l] = b[l] >> (16 * half) & 0xffff;
    low[half][0] = compare_all<comparison, T>(x, y, false);
  }
  uint32_t other = 0;
  if (insn.slots[4] != kNoSlot)
    other = warp.predicate(insn.slots[4]) ^ (insn.immediate != 0 ? ~0u : 0u);
  for (int half = 0; half < 2; ++half) {
    if (insn.slots[half] == kNoSlot) continue;
    uint32_t& p = warp.predicate(insn.slots[half]);
    p = (p & ~mask) | (combined(low[half][0], other, insn.count) & mask);
  }
}

// slots: d, a, b, c. mode: of the result: 0 all ones, 1 fp32 1.0, 2 halves of 1.0, 3 bf16 1.0.
template <int comparison, class T>
void set_value(Warp& warp, const Insn& insn, uint32_t mask) {
  uint32_t value = compare_all<comparison, T>(lanes_of<T>(warp, insn.slots[1]),
                                              lanes_of<T>(warp, insn.slots[2]),
                                              (insn.flags & kFtz) != 0);
  if (insn.slots[3] != kNoSlot)
    value = combined(value, warp.predicate(insn.slots[3]) ^ (insn.immediate != 0 ? ~0u : 0u), insn.count);
  static constexpr uint32_t kTrue[] = {0xffffffffu, 0x3f800000u, 0x3c00u, 0x3f80u, 0xffffu};
  uint32_t* d = warp.words(insn.slots[0]);
  for_lanes(mask, [&](int l) { d[l] = (value >> l & 1) != 0 ? kTrue[insn.mode] : 0; });
}
template <int comparison, class T>
void set_value_packed(Warp& warp, const Insn& insn, uint32_t mask) {
  static constexpr uint32_t kTrue[] = {0xffffffffu, 0x3f800000u, 0x3c00u, 0x3f80u, 0xffffu};
  uint32_t* d = warp.words(insn.slots[0]);
  const uint32_t* a = warp.words(insn.slots[1]);
  const uint32_t* b = warp.words(insn.slots[2]);
  for_lanes(mask, [&](int l) {
    uint32_t result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
      const bool on = holds<comparison>(to_float(T{static_cast<uint16_t>(a[l] >> shift)}),
                                        to_float(T{static_cast<uint16_t>(b[l] >> shift)}));
      if (on) result |= kTrue[insn.mode] << shift;
    }
    d[l] = result;
  });
}

#define FAJIT_FORMS(name, T)                                                                     \
  static constexpr Exec name[] = {                                                               \
      Form<kEq, T>::exec,  Form<kNe, T>::exec,  Form<kLt, T>::exec,  Form<kLe, T>::exec,         \
      Form<kGt, T>::exec,  Form<kGe, T>::exec,  Form<kEqu, T>::exec, Form<kNeu, T>::exec,        \
      Form<kLtu, T>::exec, Form<kLeu, T>::exec, Form<kGtu, T>::exec, Form<kGeu, T>::exec,        \
      Form<kNum, T>::exec, Form<kNan_, T>::exec}

template <int comparison, class T>
struct ToPredicate {
  static constexpr Exec exec = set_predicate<comparison, T>;
};
template <int comparison, class T>
struct ToPredicates {
  static constexpr Exec exec = set_predicates_packed<comparison, T>;
};
template <int comparison, class T>
struct ToValue {
  static constexpr Exec exec = set_value<comparison, T>;
};
template <int comparison, class T>
struct ToValues {
  static constexpr Exec exec = set_value_packed<comparison, T>;
};

template <template <int, class> class Form, class T>
Exec pick_one(int comparison) {
  FAJIT_FORMS(forms, T);
  return forms[comparison];
}

template <template <int, class> class Form>
Exec pick(Type type, int comparison) {
  switch (type) {
    case Type::b16:
    case Type::u16: return pick_one<Form, uint16_t>(comparison);
    case Type::b32:
    case Type::u32: return pick_one<Form, uint32_t>(comparison);
    case Type::b64:
    case Type::u64: return pick_one<Form, uint64_t>(comparison);
    case Type::s16: return pick_one<Form, int16_t>(comparison);
    case Type::s32: return pick_one<Form, int32_t>(comparison);
    case Type::s64: return pick_one<Form, int64_t>(comparison);
    case Type::f16: return pick_one<Form, Half>(comparison);
    case Type::bf16: return pick_one<Form, Bf16>(comparison);
    case Type::f32: return pick_one<Form, float>(comparison);
    case Type::f64: return pick_one<Form, double>(comparison);
    default: return nullptr;
  }
}
template <template <int, class> class Form>
Exec pick_packed(Type type, int comparison) {
  return type == Type::f16x2 ? pick_one<Form, Half>(comparison) : pick_one<Form, Bf16>(comparison);
}
#undef FAJIT_FORMS

int comparison_of(Decoder& d) {
  static constexpr uint8_t kMeaning[] = {kEq,  kNe,  kLt,  kLe,  kGt,  kGe,  kEqu, kNeu, kLtu,
                                         kLeu, kGtu, kGeu, kNum, kNan_, kLt, kLe, kGt, kGe};
  return kMeaning[d.expect_one({"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu",
                                "geu", "num", "nan", "lo", "ls", "hi", "hs"})];
}

template <class T>
void select(Warp& warp, const Insn& insn, uint32_t mask) {
  auto* d = lanes_of<T>(warp, insn.slots[0]);
  const auto* a = lanes_of<T>(warp, insn.slots[1]);
  const auto* b = lanes_of<T>(warp, insn.slots[2]);
  const uint32_t p = warp.predicate(insn.slots[3]) ^ (insn.immediate != 0 ? ~0u : 0u);
  for_lanes(mask, [&](int l) { d[l] = (p >> l & 1) != 0 ? a[l] : b[l]; });
}

template <class T, class C>
void select_sign(Warp& warp, const Insn& insn, uint32_t mask) {
  auto* d = lanes_of<T>(warp, insn.slots[0]);
  const auto* a = lanes_of<T>(warp, insn.slots[1]);
  const auto* b = lanes_of<T>(warp, insn.slots[2]);
  const uint32_t* c = warp.words(insn.slots[3]);
  for_lanes(mask, [&](int l) {
    C value = from_word<C>(c[l]);
    if constexpr (std::is_same_v<C, float>)
      if ((insn.flags & kFtz) != 0) value = flush(value);
    d[l] = value >= C{0} ? a[l] : b[l];
  });
}

}  // namespace

void decode_setp(Decoder& d) {
  const int comparison = comparison_of(d);
  d.insn.count = static_cast<uint8_t>(1 + d.accept_one({"and", "or", "xor"}));
  if (d.accept("ftz")) d.insn.flags |= kFtz;
  const Type type = d.type();
  d.expect_operands(d.insn.count != kNoCombine ? 4 : 3);
  const Operand& result = d.operand(0);
  if (result.kind == Operand::Kind::pair) {
    d.insn.slots[0] = d.destination(result.elements[0], Type::pred);
    d.insn.slots[1] = d.destination(result.elements[1], Type::pred);
  } else {
    d.insn.slots[0] = d.destination(result, Type::pred);
  }
  d.insn.slots[2] = d.source(1, type);
  d.insn.slots[3] = d.source(2, type);
  if (d.insn.count != kNoCombine) {
    d.insn.slots[4] = d.source(3, Type::pred);
    d.insn.immediate = d.operand(3).negated;
  }
  const bool packed = type == Type::f16x2 || type == Type::bf16x2;
  d.insn.exec = packed ? pick_packed<ToPredicates>(type, comparison) : pick<ToPredicate>(type, comparison);
  if (d.insn.exec == nullptr) d.fail("not for this type");
}

void decode_set(Decoder& d) {
  const int comparison = comparison_of(d);
  d.insn.count = static_cast<uint8_t>(1 + d.accept_one({"and", "or", "xor"}));
  if (d.accept("ftz")) d.insn.flags |= kFtz;
  const Type result = d.type(), type = d.type();
  d.expect_operands(d.insn.count != kNoCombine ? 4 : 3);
  d.insn.slots[0] = d.destination(0, result);
  d.insn.slots[1] = d.source(1, type);
  d.insn.slots[2] = d.source(2, type);
  if (d.insn.count != kNoCombine) {
    d.insn.slots[3] = d.source(3, Type::pred);
    d.insn.immediate = d.operand(3).negated;
  }
  const bool packed = type == Type::f16x2 || type == Type::bf16x2;
  d.insn.mode = result == Type::f32 ? 1
                : result == Type::f16 || result == Type::f16x2 ? 2
                : result == Type::bf16 || result == Type::bf16x2 ? 3
                : packed || bytes_of(result) == 2 ? 4 : 0;
  if (packed && d.insn.count != kNoCombine) d.fail("no combination for packed types");
  d.insn.exec = packed ? pick_packed<ToValues>(type, comparison) : pick<ToValue>(type, comparison);
  if (d.insn.exec == nullptr || is_wide(result)) d.fail("not for this type");
}

void decode_selp(Decoder& d) {
  const Type type = d.type();
  decode_operands(d, type, {type, type, Type::pred});
  d.insn.immediate = d.operand(3).negated;
  d.insn.exec = is_wide(type) ? Exec{select<uint64_t>} : Exec{select<uint32_t>};
}

void decode_slct(Decoder& d) {
  if (d.accept("ftz")) d.insn.flags |= kFtz;
  const Type type = d.type(), condition = d.type();
  decode_operands(d, type, {type, type, condition});
  if (condition == Type::f32)
    d.insn.exec = is_wide(type) ? Exec{select_sign<uint64_t, float>} : Exec{select_sign<uint32_t, float>};
  else
    d.insn.exec = is_wide(type) ? Exec{select_sign<uint64_t, int32_t>} : Exec{select_sign<uint32_t, int32_t>};
}

}  // namespace fajit::emulator
