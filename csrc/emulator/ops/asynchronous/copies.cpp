// cp.async and its groups.
#include "ops/lanes.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

// slots: destination address, source address, source bytes or none, cache policy or none.
// kWideAddress: of the destination.
void copy(Warp& warp, const Insn& insn, uint32_t mask) {
  Block& block = *warp.block;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    AsyncCopy item;
    item.lane = static_cast<uint8_t>(l);
    item.bytes = insn.count;
    item.shared = block.shared_offset(warp, l, Space::shared, address_of(warp, insn, 0, l));
    item.source = warp.longs(insn.slots[1])[l] + insn.target;
    const uint32_t asked = insn.slots[2] == kNoSlot ? insn.count : warp.words(insn.slots[2])[l];
    if (asked > insn.count)
      block.fault(warp, l, "copy",
                  "the source size " + std::to_string(asked) + " exceeds the copy's " +
                      std::to_string(insn.count) + " bytes");
    item.source_bytes = static_cast<uint8_t>(asked);
    if (insn.slots[3] != kNoSlot) check_policy(warp, insn.slots[3], l);
    item.pc = warp.current;
    block.issue_copy(warp, item);
  }
}

void commit(Warp& warp, const Insn&, uint32_t mask) { warp.block->commit_copies(warp, mask); }
void wait_group(Warp& warp, const Insn& insn, uint32_t mask) {
  warp.block->wait_copies(warp, mask, static_cast<uint32_t>(insn.immediate));
}
void wait_all(Warp& warp, const Insn&, uint32_t mask) { warp.block->wait_all_copies(warp, mask); }

}  // namespace

void decode_cp(Decoder& d) {
  if (!d.accept("async")) d.fail("only cp.async is known");
  if (d.accept("bulk")) return decode_bulk_copy(d);
  if (d.accept("mbarrier")) return decode_copy_arrival(d);
  if (const int form = d.accept_one({"commit_group", "wait_group", "wait_all"}); form >= 0) {
    d.expect_operands(form == 1 ? 1 : 0);
    if (form == 1) d.insn.immediate = d.literal(0, 0, INT32_MAX);
    d.insn.exec = form == 0 ? commit : form == 1 ? wait_group : wait_all;
    return;
  }
  const bool bypass = d.expect_one({"ca", "cg"}) == 1;
  if (d.accept_one({"shared", "shared::cta"}) < 0 || !d.accept("global"))
    d.fail("copies go from global to shared memory");
  const size_t policies = d.accept("L2::cache_hint") ? 1 : 0;
  d.ignore({"L2::"});
  d.expect_operands(3 + policies, 4 + policies);
  const Operand& size = d.operand(2);
  if (size.kind != Operand::Kind::integer ||
      (size.bits != 4 && size.bits != 8 && size.bits != 16) || (bypass && size.bits != 16))
    d.fail("copies are of 4, 8 or 16 bytes (.cg: 16)");
  d.insn.count = static_cast<uint8_t>(size.bits);
  d.address(1, 1);
  if ((d.insn.flags & kWideAddress) == 0) d.fail("the source address has 32 bits");
  if (d.insn.immediate < 0) d.fail("a negative offset of the source");
  d.insn.target = static_cast<uint32_t>(d.insn.immediate);
  d.insn.flags = 0;
  d.address(0, 0);
  d.insn.exec = copy;
  if (d.num_operands() > 3 + policies) d.insn.slots[2] = d.source(3, Type::u32);
  if (policies > 0) d.insn.slots[3] = d.source(d.num_operands() - 1, Type::b64);
}

}  // namespace fajit::emulator
