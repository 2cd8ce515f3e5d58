// Barriers in shared memory (mbarriers): their phases, and the checks of their use. Their state is
// kept beside the memory; its bytes are opaque to programs.
#include <algorithm>

#include "machine/machine.h"

namespace fajit::emulator {
void Block::init_mbarrier(Warp& warp, int lane, uint32_t offset, uint32_t count) {
  if (count < 1 || count > kMostArrivals)
    fault(warp, lane, "mbarrier", "an mbarrier for " + std::to_string(count) + " arrivals");
  shared_inside(warp, lane, offset, kMbarrierBytes, "an mbarrier");
  Mbarrier* found = nullptr;
  for (Mbarrier& mbarrier : mbarriers_) {
    if (mbarrier.offset == offset)
      fault_at(warp, lane, "mbarrier",
               "init of an mbarrier that is one already: " + describe(mbarrier),
               kSharedWindow + offset);
    if (mbarrier.offset == 0) found = &mbarrier;
  }
  if (found == nullptr) {
    if (mbarriers_.size() == kAgents - kMaxWarps)
      fault(warp, lane, "mbarrier",
            "a block has no more than " + std::to_string(mbarriers_.size()) + " mbarriers here");
    mbarriers_.emplace_back();
    found = &mbarriers_.back();
  }
  shared_at(warp, lane, offset, kMbarrierBytes, Access::write);
  *found = Mbarrier{};
  found->offset = offset;
  found->expected = found->pending = count;
  found->initialiser = warp.index * kLanes + static_cast<uint32_t>(lane);
  if (track_) history_.reserve(offset);
}

void Block::invalidate_mbarrier(Warp& warp, int lane, uint32_t offset) {
  Mbarrier& mbarrier = initialised(warp, lane, offset);
  if (track_) history_.release(offset);
  shared_at(warp, lane, offset, kMbarrierBytes, Access::write);
  complete_phase(mbarrier);  // who waits for it finds no mbarrier
  mbarrier.offset = 0;
}

Mbarrier& Block::initialised(const Warp& warp, int lane, uint32_t offset) {
  for (Mbarrier& mbarrier : mbarriers_)
    if (mbarrier.offset == offset && offset != 0) return mbarrier;
  fault_at(warp, lane, "mbarrier", "no mbarrier has been initialised there",
           kSharedWindow + offset);
}

Mbarrier& Block::use_mbarrier(Warp& warp, int lane, uint32_t offset, bool asynchronous) {
  Mbarrier& mbarrier = initialised(warp, lane, offset);
  if (!track_) return mbarrier;
  const Conflict conflict = history_.use(warp.index, static_cast<uint32_t>(lane), warp.current,
                                         offset, asynchronous && !mbarrier.fenced);
  if (conflict.kind == Conflict::Kind::proxy)
    fault_at(warp, lane, "proxy",
             "an asynchronous copy completes the mbarrier: fence.mbarrier_init or "
             "fence.proxy.async is missing after its init at " +
                 source_of(conflict.pc),
             kSharedWindow + offset);
  report(warp, lane, conflict, "a use of the mbarrier");
  return mbarrier;
}

void Block::fence_mbarriers(const Warp& warp, uint32_t mask) {
  for (Mbarrier& mbarrier : mbarriers_) {
    const uint32_t thread = mbarrier.initialiser;
    if (thread / kLanes == warp.index && (mask >> thread % kLanes & 1) != 0) mbarrier.fenced = true;
  }
}

void Block::count_bytes(const Warp& warp, int lane, Mbarrier& mbarrier, int64_t bytes) {
  const int64_t total = mbarrier.bytes + bytes;
  if (std::abs(total) > kMostArrivals)
    fault_at(warp, lane, "mbarrier", "a tx-count of " + std::to_string(total) + " is out of range",
             kSharedWindow + mbarrier.offset);
  mbarrier.bytes = static_cast<int32_t>(total);
  if (mbarrier.pending == 0 && total == 0) complete_phase(mbarrier);
}

void Block::count_arrivals(const Warp& warp, int lane, Mbarrier& mbarrier, uint32_t count) {
  if (count > mbarrier.pending)
    fault_at(warp, lane, "mbarrier",
             "more arrivals than the phase lacks: " + std::to_string(count) + " at " +
                 describe(mbarrier),
             kSharedWindow + mbarrier.offset);
  mbarrier.pending -= count;
  if (mbarrier.pending == 0 && mbarrier.bytes == 0) complete_phase(mbarrier);
}

void Block::complete_phase(Mbarrier& mbarrier) {
  const uint32_t index = static_cast<uint32_t>(&mbarrier - mbarriers_.data());
  history_.complete(kMaxWarps + index, mbarrier.order);
  mbarrier.completed = std::move(mbarrier.order);
  mbarrier.order = Order{};
  mbarrier.pending = mbarrier.expected;
  ++mbarrier.phase;
  // Who waits asks again, as threads may be resumed after a later phase.
  for (Warp& warp : warps_) wake(warp, Wait::mbarrier, index);
}

void Block::suspend(Warp& warp, uint32_t mask, const Mbarrier& mbarrier) {
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    warp.wait[__builtin_ctz(rest)] = Wait::mbarrier;
    warp.barrier[__builtin_ctz(rest)] = static_cast<uint32_t>(&mbarrier - mbarriers_.data());
  }
  warp.blocked |= mask;
}

std::string Block::describe(const Mbarrier& mbarrier) const {
  const Variable& variable = *shared_variable(mbarrier.offset);
  return "mbarrier " + variable.name + " + " + std::to_string(mbarrier.offset - variable.offset) +
         ", " + std::to_string(mbarrier.pending) + " of " + std::to_string(mbarrier.expected) +
         " arrivals pending, tx-count " + std::to_string(mbarrier.bytes) + ", phase " +
         std::to_string(mbarrier.phase);
}

}  // namespace fajit::emulator
