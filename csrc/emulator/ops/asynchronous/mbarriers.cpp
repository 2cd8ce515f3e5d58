// mbarrier, and cp.async.mbarrier.arrive. slots[0] is the address in all of them.
#include <algorithm>

#include "ops/lanes.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

enum MbarrierMode : uint8_t {
  kRelaxed = 1,
  kExpect = 2,
  kDrop = 4,
  kParity = 8,
  kSuspend = 16,
  kNoInc = 32
};

uint32_t offset_of(const Warp& warp, const Insn& insn, int lane) {
  return warp.block->shared_offset(warp, lane, insn.space, address_of(warp, insn, 0, lane));
}

// Calls body(mbarrier, lanes) for each mbarrier that lanes of the mask name.
template <class Body> void for_mbarriers(Warp& warp, const Insn& insn, uint32_t mask, Body body) {
  while (mask != 0) {
    const uint32_t offset = offset_of(warp, insn, __builtin_ctz(mask));
    uint32_t lanes = 0;
    Mbarrier* mbarrier = nullptr;
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      const int l = __builtin_ctz(rest);
      if (offset_of(warp, insn, l) != offset) continue;
      mbarrier = &warp.block->use_mbarrier(warp, l, offset);
      lanes |= 1u << l;
    }
    body(*mbarrier, lanes);
    mask &= ~lanes;
  }
}

// slots: count, or none to invalidate.
void initialise(Warp& warp, const Insn& insn, uint32_t mask) {
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const uint32_t offset = offset_of(warp, insn, l);
    if (insn.slots[1] == kNoSlot) warp.block->invalidate_mbarrier(warp, l, offset);
    else warp.block->init_mbarrier(warp, l, offset, warp.words(insn.slots[1])[l]);
  }
}

// slots: count, or bytes with kExpect, or none; the state before, or none.
void arrive_now(Warp& warp, const Insn& insn, uint32_t mask) {
  Block& block = *warp.block;
  const bool expects = (insn.mode & kExpect) != 0;
  const uint32_t* operand = insn.slots[1] == kNoSlot ? nullptr : warp.words(insn.slots[1]);
  auto count = [&](int l) { return expects || operand == nullptr ? 1 : operand[l]; };
  for_mbarriers(warp, insn, mask, [&](Mbarrier& mbarrier, uint32_t lanes) {
    uint32_t released = 0;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      const int l = __builtin_ctz(rest);
      if (expects) block.count_bytes(warp, l, mbarrier, operand[l]);
      if ((insn.mode & kRelaxed) == 0 && (released >> l & 1) == 0) {
        // Together with the lanes behind it that arrive in the same phase.
        uint64_t arrivals = 0;
        for (uint32_t more = rest; more != 0; more &= more - 1) {
          arrivals += count(__builtin_ctz(more));
          if (arrivals <= mbarrier.pending) released |= more & (~more + 1);
        }
        block.release_to(warp, released & rest, mbarrier);
      }
      if (insn.slots[2] != kNoSlot) warp.longs(insn.slots[2])[l] = mbarrier.phase;
      if ((insn.mode & kDrop) != 0) mbarrier.expected -= std::min(count(l), mbarrier.expected);
      block.count_arrivals(warp, l, mbarrier, count(l));
    }
  });
}

// slots: bytes. expect_tx has kExpect, complete_tx has not.
void count_bytes(Warp& warp, const Insn& insn, uint32_t mask) {
  for_mbarriers(warp, insn, mask, [&](Mbarrier& mbarrier, uint32_t lanes) {
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      const int l = __builtin_ctz(rest);
      const int64_t bytes = warp.words(insn.slots[1])[l];
      warp.block->count_bytes(warp, l, mbarrier, (insn.mode & kExpect) != 0 ? bytes : -bytes);
    }
  });
}

bool is_complete(const Warp& warp, const Insn& insn, int lane, const Mbarrier& mbarrier) {
  if ((insn.mode & kParity) != 0) {
    const uint32_t parity = warp.words(insn.slots[1])[lane];
    if (parity > 1)
      warp.block->fault(warp, lane, "mbarrier", "a parity of " + std::to_string(parity));
    return (mbarrier.phase & 1) != parity;
  }
  const uint32_t later = mbarrier.phase - static_cast<uint32_t>(warp.longs(insn.slots[1])[lane]);
  if (later > 1)
    warp.block->fault(warp, lane, "mbarrier",
                      "the state is neither of the current phase nor of the one before");
  return later == 1;
}

// slots: state or parity, result. try_wait suspends lanes until the phase is complete, as it may.
void await_phase(Warp& warp, const Insn& insn, uint32_t mask) {
  Block& block = *warp.block;
  const bool suspends = (insn.mode & kSuspend) != 0;
  for_mbarriers(warp, insn, mask, [&](const Mbarrier& mbarrier, uint32_t lanes) {
    uint32_t done = 0;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      const int l = __builtin_ctz(rest);
      if (is_complete(warp, insn, l, mbarrier)) done |= 1u << l;
    }
    if (done != 0 && (insn.mode & kRelaxed) == 0) block.acquire_from(warp, mbarrier);
    if (!suspends) {
      set_bits(warp.predicate(insn.slots[2]), lanes, done);
      if (done != lanes) block.count_poll();
      return;
    }
    set_bits(warp.predicate(insn.slots[2]), done, done);
    for (uint32_t rest = done; rest != 0; rest &= rest - 1) ++warp.pc[__builtin_ctz(rest)];
    block.suspend(warp, lanes & ~done, mbarrier);
  });
}

void arrive_after_copies(Warp& warp, const Insn& insn, uint32_t mask) {
  for_mbarriers(warp, insn, mask, [&](Mbarrier& mbarrier, uint32_t lanes) {
    warp.block->arrive_after_copies(warp, lanes, mbarrier, (insn.mode & kNoInc) == 0);
  });
}

void decode_space(Decoder& d) {
  const bool shared = d.accept_one({"shared", "shared::cta", "shared::cluster"}) >= 0;
  d.insn.space = shared ? Space::shared : Space::generic;
  if (!d.accept("b64")) d.fail("expected .b64");
}

}  // namespace

void decode_mbarrier(Decoder& d) {
  d.require_target(70, 80);
  enum { kInit, kInval, kArrive, kArriveDrop, kExpectTx, kCompleteTx, kTestWait, kTryWait };
  const int action = d.expect_one({"init", "inval", "arrive", "arrive_drop", "expect_tx",
                                   "complete_tx", "test_wait", "try_wait"});
  const bool arrives = action == kArrive || action == kArriveDrop;
  uint8_t mode = action == kArriveDrop ? kDrop : 0;
  if (action == kExpectTx || (arrives && d.accept("expect_tx"))) mode |= kExpect;
  if (action == kTryWait) mode |= kSuspend;
  if (action >= kTestWait && d.accept("parity")) mode |= kParity;
  if (action != kInit && action != kInval) {
    if (d.accept("relaxed")) mode |= kRelaxed;
    d.accept(action >= kTestWait ? "acquire" : "release");
    d.accept_one({"cta", "cluster"});
  }
  if ((mode & (kExpect | kSuspend)) != 0 || action == kCompleteTx) d.require_target(78, 90);
  decode_space(d);
  d.insn.mode = mode;
  const size_t at = arrives || action >= kTestWait ? 1 : 0;  // of the address
  d.address(at, 0);
  switch (action) {
    case kInit:
    case kInval:
    case kExpectTx:
    case kCompleteTx:
      d.expect_operands(action == kInval ? 1 : 2);
      if (action != kInval) d.insn.slots[1] = d.source(1, Type::u32);
      d.insn.exec = action <= kInval ? initialise : count_bytes;
      return;
    case kArrive:
    case kArriveDrop:
      d.expect_operands((mode & kExpect) != 0 ? 3 : 2, 3);
      if (d.num_operands() == 3) d.insn.slots[1] = d.source(2, Type::u32);
      if (d.operand(0).kind != Operand::Kind::sink) d.insn.slots[2] = d.destination(0, Type::b64);
      d.insn.exec = arrive_now;
      return;
    default:
      d.expect_operands(3, action == kTryWait ? 4 : 3);  // the fourth limits the time
      d.insn.slots[2] = d.destination(0, Type::pred);
      d.insn.slots[1] = d.source(2, (mode & kParity) != 0 ? Type::u32 : Type::b64);
      d.insn.flow = action == kTryWait ? Flow::wait : Flow::straight;
      d.insn.exec = await_phase;
  }
}

void decode_copy_arrival(Decoder& d) {
  if (!d.accept("arrive")) d.fail("expected .arrive");
  if (d.accept("noinc")) d.insn.mode = kNoInc;
  decode_space(d);
  d.expect_operands(1);
  d.address(0, 0);
  d.insn.exec = arrive_after_copies;
}

}  // namespace fajit::emulator
