// Asynchronous copies (cp.async) of a warp: queued, and performed at issue or when waited for.
#include <algorithm>

#include "machine/machine.h"

namespace fajit::emulator {

void Block::perform(const AsyncCopy& copy) {
  uint8_t* destination = shared_.data() + copy.shared;
  if (copy.source_bytes > 0)
    std::memcpy(destination, reinterpret_cast<const void*>(copy.source), copy.source_bytes);
  std::memset(destination + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
}

void Block::issue_copy(Warp& warp, const AsyncCopy& copy) {
  if (copy.source_bytes > 0)
    global_at(warp, copy.lane, copy.source, copy.source_bytes, Access::read, copy.bytes);
  shared_inside(warp, copy.lane, copy.shared, copy.bytes, "a copy");
  if (track_)
    report(warp, copy.lane,
           history_.launch(warp.index, copy.lane, copy.pc, copy.shared, copy.bytes),
           "a copy into bytes");
  warp.copies.push_back(copy);
  warp.copies.back().group = warp.committed[copy.lane];
  warp.copies.back().serial = warp.issued++;
  warp.copies.back().performed = completes_at_issue();
  if (warp.copies.back().performed) perform(copy);
}

void Block::commit_copies(Warp& warp, uint32_t mask) {
  for (int lane = 0; lane < kLanes; ++lane) warp.committed[lane] += mask >> lane & 1;
}

template <class Done> void Block::finish_copies(Warp& warp, uint32_t clock, Done done) {
  auto kept = warp.copies.begin();
  for (AsyncCopy& copy : warp.copies) {
    if (done(copy)) {
      if (!copy.performed) perform(copy);
      if (track_) history_.land(warp.index, copy.lane, clock, copy.pc, copy.shared, copy.bytes);
    } else {
      *kept++ = copy;
    }
  }
  warp.copies.erase(kept, warp.copies.end());
}

void Block::wait_copies(Warp& warp, uint32_t mask, uint32_t pending) {
  finish_copies(warp, history_.clock_of(warp.index), [&](const AsyncCopy& copy) {
    return (mask >> copy.lane & 1) != 0 && copy.group + pending < warp.committed[copy.lane];
  });
}

void Block::wait_all_copies(Warp& warp, uint32_t mask) {
  finish_copies(warp, history_.clock_of(warp.index),
                [&](const AsyncCopy& copy) { return (mask >> copy.lane & 1) != 0; });
}

void Block::arrive_after_copies(Warp& warp, uint32_t mask, Mbarrier& mbarrier, bool counted) {
  CopyArrival arrival{
      warp.index, mask, warp.issued, warp.current, mbarrier.offset, history_.clock_of(warp.index),
      {}};
  history_.arrive(warp.index, mask == warp.alive ? kAllLanes : mask, arrival.order);
  // A count that the arrival takes away again keeps the phase from completing before it.
  if (counted) mbarrier.pending += static_cast<uint32_t>(__builtin_popcount(mask));
  copy_arrivals_.push_back(std::move(arrival));
  if (completes_at_issue()) finish_copy_arrival(copy_arrivals_.size() - 1);
}

void Block::finish_copy_arrival(size_t index) {
  Warp& warp = warps_[copy_arrivals_[index].warp];
  for (size_t i = 0; i <= index; ++i) {  // the copies of earlier arrivals are complete too
    const CopyArrival& of = copy_arrivals_[i];
    if (of.warp != warp.index) continue;
    finish_copies(warp, of.clock, [&](const AsyncCopy& copy) {
      return (of.lanes >> copy.lane & 1) != 0 && copy.serial < of.before;
    });
  }
  const CopyArrival arrival = std::move(copy_arrivals_[index]);
  copy_arrivals_.erase(copy_arrivals_.begin() + static_cast<ptrdiff_t>(index));
  const int lane = __builtin_ctz(arrival.lanes);
  warp.current = arrival.pc;
  Mbarrier& mbarrier = initialised(warp, lane, arrival.mbarrier);
  mbarrier.order.known.join(arrival.order.known);
  mbarrier.order.fenced.join(arrival.order.fenced);
  count_arrivals(warp, lane, mbarrier, static_cast<uint32_t>(__builtin_popcount(arrival.lanes)));
}

}  // namespace fajit::emulator
