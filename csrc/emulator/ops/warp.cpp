// Instructions that exchange values between the lanes of a warp: shfl, vote, redux, elect,
// activemask. All but activemask wait for the lanes of their member mask, slots[0].
#include <algorithm>

#include "ops/lanes.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

enum Shuffle : uint8_t { kUp, kDown, kBfly, kIdx };

// slots: members, d, p or none, a, b, c.
void shuffle(Warp& warp, const Insn& insn, uint32_t mask) {
  uint32_t* d = warp.words(insn.slots[1]);
  uint32_t a[kLanes];
  std::copy_n(warp.words(insn.slots[3]), kLanes, a);
  const uint32_t* b = warp.words(insn.slots[4]);
  const uint32_t* c = warp.words(insn.slots[5]);
  uint32_t in_range = 0, result[kLanes];
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    const int by = static_cast<int>(b[lane] & 31), clamp = static_cast<int>(c[lane] & 31);
    const int segment = static_cast<int>(c[lane] >> 8 & 31);
    const int last = (lane & segment) | (clamp & ~segment);
    const int first = lane & segment;
    int from = 0;
    switch (insn.mode) {
      case kUp: from = lane - by; break;
      case kDown: from = lane + by; break;
      case kBfly: from = lane ^ by; break;
      default: from = first | (by & ~segment); break;
    }
    if (insn.mode == kUp ? from < last : from > last) from = lane;
    else in_range |= 1u << lane;
    if ((mask >> from & 1) == 0)
      warp.block->fault(warp, lane, "shuffle",
                        "lane " + std::to_string(lane) + " reads from lane " +
                            std::to_string(from) + ", which does not take part");
    result[lane] = a[from];
  }
  for_lanes(mask, [&](int l) { d[l] = result[l]; });
  if (insn.slots[2] != kNoSlot) set_bits(warp.predicate(insn.slots[2]), mask, in_range);
}

enum Vote : uint8_t { kAll, kAny, kUniform, kBallot };

// slots: members, d, a. immediate: a negated.
void vote(Warp& warp, const Insn& insn, uint32_t mask) {
  const uint32_t a = (warp.predicate(insn.slots[2]) ^ (insn.immediate != 0 ? ~0u : 0u)) & mask;
  if (insn.mode == kBallot) {
    uint32_t* d = warp.words(insn.slots[1]);
    for_lanes(mask, [&](int l) { d[l] = a; });
    return;
  }
  const bool value = insn.mode == kAll   ? a == mask
                     : insn.mode == kAny ? a != 0
                                         : a == 0 || a == mask;
  set_bits(warp.predicate(insn.slots[1]), mask, value ? ~0u : 0u);
}

enum Reduction : uint8_t { kReduceAdd, kReduceMin, kReduceMax, kReduceAnd, kReduceOr, kReduceXor };

// slots: members, d, a. type: of the comparison.
void reduce(Warp& warp, const Insn& insn, uint32_t mask) {
  const uint32_t* a = warp.words(insn.slots[2]);
  uint32_t total = a[__builtin_ctz(mask)];
  auto less = [&](uint32_t x, uint32_t y) {
    return insn.type == Type::s32 ? static_cast<int32_t>(x) < static_cast<int32_t>(y) : x < y;
  };
  for (uint32_t rest = mask & (mask - 1); rest != 0; rest &= rest - 1) {
    const uint32_t value = a[__builtin_ctz(rest)];
    switch (insn.mode) {
      case kReduceAdd: total += value; break;
      case kReduceMin: total = less(value, total) ? value : total; break;
      case kReduceMax: total = less(total, value) ? value : total; break;
      case kReduceAnd: total &= value; break;
      case kReduceOr: total |= value; break;
      default: total ^= value; break;
    }
  }
  uint32_t* d = warp.words(insn.slots[1]);
  for_lanes(mask, [&](int l) { d[l] = total; });
}

void active_mask(Warp& warp, const Insn& insn, uint32_t mask) {
  uint32_t* d = warp.words(insn.slots[0]);
  for_lanes(mask, [&](int l) { d[l] = mask; });
}

// slots: members, d or none, p.
void elect(Warp& warp, const Insn& insn, uint32_t mask) {
  const uint32_t leader = mask & (~mask + 1);
  set_bits(warp.predicate(insn.slots[2]), mask, leader);
  if (insn.slots[1] == kNoSlot) return;
  uint32_t* d = warp.words(insn.slots[1]);
  for_lanes(mask, [&](int l) { d[l] = static_cast<uint32_t>(__builtin_ctz(leader)); });
}

void expect_sync(Decoder& d) {
  if (!d.accept("sync")) d.fail("expected .sync: the forms without it were removed in sm_70");
  d.insn.flow = Flow::rendezvous;
}

}  // namespace

void decode_shfl(Decoder& d) {
  expect_sync(d);
  d.insn.mode = static_cast<uint8_t>(d.expect_one({"up", "down", "bfly", "idx"}));
  const Type type = d.type();
  d.expect_operands(5);
  const Operand& result = d.operand(0);
  const bool pair = result.kind == Operand::Kind::pair;
  d.insn.slots[1] = d.destination(pair ? result.elements[0] : result, type);
  if (pair) d.insn.slots[2] = d.destination(result.elements[1], Type::pred);
  d.insn.slots[3] = d.source(1, type);
  d.insn.slots[4] = d.source(2, Type::u32);
  d.insn.slots[5] = d.source(3, Type::u32);
  d.insn.slots[0] = d.source(4, Type::u32);
  d.insn.exec = shuffle;
}

void decode_vote(Decoder& d) {
  expect_sync(d);
  d.insn.mode = static_cast<uint8_t>(d.expect_one({"all", "any", "uni", "ballot"}));
  const Type type = d.type();
  d.expect_operands(3);
  d.insn.slots[1] = d.destination(0, type);
  d.insn.slots[2] = d.source(1, Type::pred);
  d.insn.immediate = d.operand(1).negated;
  d.insn.slots[0] = d.source(2, Type::u32);
  if ((d.insn.mode == kBallot) != (type == Type::b32)) d.fail("not for this type");
  d.insn.exec = vote;
}

void decode_redux(Decoder& d) {
  expect_sync(d);
  d.insn.mode = static_cast<uint8_t>(d.expect_one({"add", "min", "max", "and", "or", "xor"}));
  d.insn.type = d.type();
  d.expect_operands(3);
  d.insn.slots[1] = d.destination(0, d.insn.type);
  d.insn.slots[2] = d.source(1, d.insn.type);
  d.insn.slots[0] = d.source(2, Type::u32);
  if (is_float(d.insn.type)) d.fail("not for this type");
  d.insn.exec = reduce;
}

void decode_elect(Decoder& d) {
  d.require_target(80, 90);
  expect_sync(d);
  d.expect_operands(2);
  const Operand& result = d.operand(0);
  if (result.kind != Operand::Kind::pair) d.fail("expected d|p");
  if (result.elements[0].kind != Operand::Kind::sink)
    d.insn.slots[1] = d.destination(result.elements[0], Type::b32);
  d.insn.slots[2] = d.destination(result.elements[1], Type::pred);
  d.insn.slots[0] = d.source(1, Type::u32);
  d.insn.exec = elect;
}

void decode_activemask(Decoder& d) {
  decode_operands(d, d.type(), {});
  d.insn.exec = active_mask;
}

}  // namespace fajit::emulator
