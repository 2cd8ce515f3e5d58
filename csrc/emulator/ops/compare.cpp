// setp, selp, slct.
#include <array>

#include "ops/lanes.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

constexpr int kEq = 0, kNe = 1, kLt = 2, kLe = 3, kGt = 4, kGe = 5;
constexpr int kEqu = 6, kNeu = 7, kLtu = 8, kLeu = 9, kGtu = 10, kGeu = 11, kNum = 12;
constexpr int kUnordered = kNum + 1, kComparisons = kUnordered + 1;
enum Combine : uint8_t { kNoCombine, kCombineAnd, kCombineOr, kCombineXor };

template <int comparison, class T> bool holds(T a, T b) {
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

// The mask of the lanes for which the comparison holds; all lanes at once, so that it vectorises.
template <int comparison, class T> uint32_t compare(const Word<T>* a, const Word<T>* b, bool ftz) {
  uint8_t flags[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const T x = from_word<T>(a[l]), y = from_word<T>(b[l]);
    if constexpr (std::is_same_v<T, float>)
      flags[l] = ftz ? holds<comparison>(flush(x), flush(y)) : holds<comparison>(x, y);
    else if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Bf16>)
      flags[l] = holds<comparison>(to_float(x), to_float(y));
    else flags[l] = holds<comparison>(x, y);
  }
  uint32_t result = 0;
  for (int l = 0; l < kLanes; ++l) result |= static_cast<uint32_t>(flags[l]) << l;
  return result;
}

uint32_t combined(uint32_t value, uint32_t other, uint8_t combine) {
  return combine == kCombineAnd   ? value & other
         : combine == kCombineOr  ? value | other
         : combine == kCombineXor ? value ^ other
                                  : value;
}

// slots: p, q (or none), a, b, c (or none). count: combination; immediate: c negated.
template <int comparison, class T> void set_predicate(Warp& warp, const Insn& insn, uint32_t mask) {
  const uint32_t value = compare<comparison, T>(
      lanes_of<T>(warp, insn.slots[2]), lanes_of<T>(warp, insn.slots[3]), (insn.flags & kFtz) != 0);
  uint32_t other = 0;
  if (insn.slots[4] != kNoSlot)
    other = warp.predicate(insn.slots[4]) ^ (insn.immediate != 0 ? ~0u : 0u);
  set_bits(warp.predicate(insn.slots[0]), mask, combined(value, other, insn.count));
  if (insn.slots[1] != kNoSlot)
    set_bits(warp.predicate(insn.slots[1]), mask, combined(~value, other, insn.count));
}

template <class T, size_t... comparison>
constexpr std::array<Exec, kComparisons> forms(std::index_sequence<comparison...>) {
  return {set_predicate<static_cast<int>(comparison), T>...};
}

template <class T> void select(Warp& warp, const Insn& insn, uint32_t mask) {
  auto* d = lanes_of<T>(warp, insn.slots[0]);
  const auto* a = lanes_of<T>(warp, insn.slots[1]);
  const auto* b = lanes_of<T>(warp, insn.slots[2]);
  const uint32_t p = warp.predicate(insn.slots[3]) ^ (insn.immediate != 0 ? ~0u : 0u);
  for_lanes(mask, [&](int l) { d[l] = (p >> l & 1) != 0 ? a[l] : b[l]; });
}

template <class T, class C> void select_sign(Warp& warp, const Insn& insn, uint32_t mask) {
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
  int comparison = d.expect_one({"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu",
                                 "gtu", "geu", "num", "nan", "lo", "ls", "hi", "hs"});
  if (comparison >= kComparisons) comparison = kLt + (comparison - kComparisons);
  d.insn.count = static_cast<uint8_t>(1 + d.accept_one({"and", "or", "xor"}));
  if (d.accept("ftz")) d.insn.flags |= kFtz;
  const Type type = d.type();
  d.expect_operands(d.insn.count != kNoCombine ? 4 : 3);
  const Operand& result = d.operand(0);
  const bool pair = result.kind == Operand::Kind::pair;
  d.insn.slots[0] = d.destination(pair ? result.elements[0] : result, Type::pred);
  if (pair) d.insn.slots[1] = d.destination(result.elements[1], Type::pred);
  d.insn.slots[2] = d.source(1, type);
  d.insn.slots[3] = d.source(2, type);
  if (d.insn.count != kNoCombine) {
    d.insn.slots[4] = d.source(3, Type::pred);
    d.insn.immediate = d.operand(3).negated;
  }
  d.set_exec(by_type(type, [&](auto zero) -> Exec {
    static constexpr auto kForms = forms<decltype(zero)>(std::make_index_sequence<kComparisons>());
    return kForms[static_cast<size_t>(comparison)];
  }));
}

void decode_selp(Decoder& d) {
  const Type type = d.type();
  decode_operands(d, type, {type, type, Type::pred});
  d.insn.immediate = d.operand(3).negated;
  d.insn.exec = is_wide(type) ? select<uint64_t> : select<uint32_t>;
}

void decode_slct(Decoder& d) {
  if (d.accept("ftz")) d.insn.flags |= kFtz;
  const Type type = d.type(), condition = d.type();
  decode_operands(d, type, {type, type, condition});
  if (condition == Type::f32)
    d.insn.exec = is_wide(type) ? select_sign<uint64_t, float> : select_sign<uint32_t, float>;
  else
    d.insn.exec = is_wide(type) ? select_sign<uint64_t, int32_t> : select_sign<uint32_t, int32_t>;
}

}  // namespace fajit::emulator
