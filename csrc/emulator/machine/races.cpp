#include "machine/races.h"

#include <algorithm>

namespace fajit::emulator {
namespace {

constexpr uint8_t kAtomic = 0x80;
constexpr uint32_t kLastClock = (1u << 26) - (1u << 20);
// Of a byte's use; smaller values count asynchronous readers.
constexpr uint16_t kReserved = 0xfffe, kWriting = 0xffff;

}  // namespace

void Clocks::clear() {
  std::fill(std::begin(all_), std::end(all_), 0u);
  std::fill(single_.begin(), single_.end(), 0u);
}

void Clocks::join(const Clocks& other) {
  for (int i = 0; i < kAgents; ++i) all_[i] = std::max(all_[i], other.all_[i]);
  if (other.single_.empty()) return;
  single_.resize(other.single_.size());
  for (size_t i = 0; i < single_.size(); ++i) single_[i] = std::max(single_[i], other.single_[i]);
  // The lanes may have come one by one.
  for (uint32_t warp = 0; warp < kMaxWarps; ++warp) raise_common(warp);
}

void Clocks::raise_lane(uint32_t warp, uint32_t lane, uint32_t clock) {
  single_.resize(kMaxWarps * kLaneCodes);
  uint32_t& value = single_[warp * kLaneCodes + lane];
  value = std::max(value, clock);
}

void Clocks::raise_common(uint32_t warp) {
  const auto first = single_.begin() + warp * kLaneCodes;
  raise(warp, *std::min_element(first, first + kLaneCodes));
}

void SharedHistory::resize(uint32_t bytes, uint32_t warps, bool races) {
  races_ = races;
  bytes_ = bytes;
  warps_ = warps;
  begin_ = 1;
  states_.assign(warps, WarpState{});
  write_stamp_.assign(bytes, 0);
  write_pc_.assign(bytes, 0);
  write_agent_.assign(bytes, 0);
  use_.assign(bytes, 0);
  read_stamp_.assign(static_cast<size_t>(bytes) * warps, 0);
  read_pc_.assign(static_cast<size_t>(bytes) * warps, 0);
}

// Stamps are not cleared; instead, the clocks of a block start above all earlier clocks.
void SharedHistory::start() {
  uint32_t latest = begin_;
  for (const WarpState& state : states_) latest = std::max(latest, state.clock);
  for (const uint32_t clock : phases_) latest = std::max(latest, clock);
  if (latest > kLastClock) {
    resize(bytes_, warps_, races_);
    latest = begin_;
  }
  begin_ = latest + 1;
  std::fill(use_.begin(), use_.end(), uint16_t{0});
  std::fill(std::begin(phases_), std::end(phases_), begin_);
  fences_ = false;
  for (WarpState& state : states_) {
    state.clock = begin_;
    state.known.clear();
    state.fenced.clear();
    state.lanes_known = begin_ - 1;
    state.partial = false;
  }
}

Conflict SharedHistory::with_write(Conflict::Kind kind, uint32_t at) const {
  const uint32_t writer = write_agent_[at] & ~uint32_t{kAtomic};
  return {kind, true, writer, write_stamp_[at] & 63, write_pc_[at], at};
}

Conflict SharedHistory::with_use(uint32_t at) const {
  if (use_[at] == kWriting) return with_write(Conflict::Kind::in_flight, at);
  if (use_[at] == kReserved) return with_write(Conflict::Kind::mbarrier, at);
  Conflict result{Conflict::Kind::in_flight, false, 0, kAnyLane, 0, at};
  uint64_t latest = 0;  // an asynchronous read, if ordinary ones have not replaced it
  for (uint32_t warp = 0; warp < warps_; ++warp) {
    const size_t index = static_cast<size_t>(warp) * bytes_ + at;
    const uint32_t stamp = read_stamp_[index];
    const uint64_t rank = uint64_t{(stamp & 63) == kAsyncLane} << 32 | stamp;
    if (rank < latest) continue;
    latest = rank;
    result.warp = warp;
    result.pc = read_pc_[index];
  }
  return result;
}

Conflict SharedHistory::read(uint32_t warp, uint32_t lane, uint32_t pc, uint32_t offset,
                             uint32_t bytes) {
  const WarpState& state = states_[warp];
  uint32_t* stamps = read_stamp_.data() + static_cast<size_t>(warp) * bytes_;
  uint32_t* pcs = read_pc_.data() + static_cast<size_t>(warp) * bytes_;
  const uint32_t own = state.clock << 6 | lane;
  Conflict result;
  for (uint32_t at = offset; at < offset + bytes; ++at) {
    const uint32_t stamp = write_stamp_[at];
    if (use_[at] >= kReserved) return with_use(at);
    if (stamp >> 6 < begin_) {
      if (result.kind == Conflict::Kind::none)
        result.kind = Conflict::Kind::unwritten, result.byte = at;
    } else if (races_ && !ordered(state, warp, lane, write_agent_[at] & ~kAtomic, stamp)) {
      result.kind = Conflict::Kind::race;
    }
    if (result.kind > Conflict::Kind::unwritten) return with_write(result.kind, at);
    const uint32_t before = stamps[at];
    stamps[at] = (before ^ own) >> 6 == 0 && before != own ? own | kAnyLane : own;
    pcs[at] = pc;
  }
  return result;
}

Conflict SharedHistory::write(uint32_t warp, uint32_t lane, uint32_t pc, uint32_t offset,
                              uint32_t bytes, bool atomic) {
  const WarpState& state = states_[warp];
  const uint32_t own = state.clock << 6 | lane;
  for (uint32_t at = offset; at < offset + bytes; ++at) {
    const uint32_t stamp = write_stamp_[at];
    const uint8_t writer = write_agent_[at];
    if (use_[at] != 0) return with_use(at);
    if (races_ && stamp >> 6 >= begin_ && !(atomic && (writer & kAtomic) != 0) &&
        !ordered(state, warp, lane, writer & ~kAtomic, stamp))
      return with_write(Conflict::Kind::race, at);
    for (uint32_t other = 0; races_ && other < warps_; ++other) {
      const size_t index = static_cast<size_t>(other) * bytes_ + at;
      const uint32_t seen = read_stamp_[index];
      if (seen >> 6 < begin_ || ordered(state, warp, lane, other, seen)) continue;
      return {Conflict::Kind::race, false, other, seen & 63, read_pc_[index], at};
    }
    write_stamp_[at] = own;
    write_agent_[at] = static_cast<uint8_t>(warp | (atomic ? kAtomic : 0));
    write_pc_[at] = pc;
  }
  return Conflict{};
}

Conflict SharedHistory::launch(uint32_t warp, uint32_t lane, uint32_t pc, uint32_t offset,
                               uint32_t bytes) {
  const Conflict result = write(warp, lane, pc, offset, bytes, false);
  if (races_) std::fill_n(use_.begin() + offset, bytes, kWriting);
  return result;
}

void SharedHistory::land(uint32_t warp, uint32_t lane, uint32_t clock, uint32_t pc, uint32_t offset,
                         uint32_t bytes) {
  std::fill_n(use_.begin() + offset, bytes, uint16_t{0});
  std::fill_n(write_stamp_.begin() + offset, bytes, clock << 6 | lane);
  std::fill_n(write_agent_.begin() + offset, bytes, static_cast<uint8_t>(warp));
  std::fill_n(write_pc_.begin() + offset, bytes, pc);
}

// Of an access of the warp's asynchronous operation after one by an agent.
Conflict::Kind SharedHistory::conflict(uint32_t warp, uint32_t lane, uint32_t agent,
                                       uint32_t stamp) const {
  const WarpState& state = states_[warp];
  if (!races_ || stamp >> 6 < begin_) return Conflict::Kind::none;
  if (!ordered(state, warp, lane, agent, stamp)) return Conflict::Kind::race;
  const bool asynchronous = agent >= kMaxWarps || (stamp & 63) == kAsyncLane;
  return asynchronous || fenced(state, agent, stamp) ? Conflict::Kind::none : Conflict::Kind::proxy;
}

Conflict SharedHistory::begin_async_read(uint32_t warp, uint32_t pc, uint32_t offset,
                                         uint32_t bytes, uint32_t lane) {
  Conflict result;
  uint64_t last = 0;  // most bytes were written like the ones before them
  for (uint32_t at = offset; at < offset + bytes; ++at) {
    const uint32_t stamp = write_stamp_[at], writer = write_agent_[at] & ~uint32_t{kAtomic};
    const uint64_t written = uint64_t{stamp} << 32 | writer;
    if (use_[at] >= kReserved) return with_use(at);
    if (stamp >> 6 < begin_ && result.kind == Conflict::Kind::none)
      result.kind = Conflict::Kind::unwritten, result.byte = at;
    if (written != last) {
      const Conflict::Kind kind = conflict(warp, lane, writer, stamp);
      if (kind != Conflict::Kind::none) return with_write(kind, at);
    }
    last = written;
  }
  note_async_read(warp, pc, offset, bytes, 1);
  return result;
}

void SharedHistory::end_async_read(uint32_t warp, uint32_t pc, uint32_t offset, uint32_t bytes) {
  note_async_read(warp, pc, offset, bytes, -1);
}

void SharedHistory::note_async_read(uint32_t warp, uint32_t pc, uint32_t offset, uint32_t bytes,
                                    int change) {
  const size_t index = static_cast<size_t>(warp) * bytes_ + offset;
  std::fill_n(read_stamp_.begin() + static_cast<ptrdiff_t>(index), bytes,
              states_[warp].clock << 6 | kAsyncLane);
  std::fill_n(read_pc_.begin() + static_cast<ptrdiff_t>(index), bytes, pc);
  uint16_t* uses = use_.data() + offset;
  for (uint32_t i = 0; races_ && i < bytes; ++i) uses[i] = static_cast<uint16_t>(uses[i] + change);
}

Conflict SharedHistory::begin_async_write(uint32_t warp, uint32_t lane, uint32_t pc,
                                          uint32_t offset, uint32_t bytes) {
  for (uint32_t at = offset; at < offset + bytes; ++at) {
    if (use_[at] != 0) return with_use(at);
    const uint32_t writer = write_agent_[at] & ~uint32_t{kAtomic};
    const Conflict::Kind kind = conflict(warp, lane, writer, write_stamp_[at]);
    if (kind != Conflict::Kind::none) return with_write(kind, at);
  }
  for (uint32_t other = 0; other < warps_; ++other) {
    const size_t first = static_cast<size_t>(other) * bytes_;
    uint32_t last = 0;
    for (uint32_t at = offset; at < offset + bytes; last = read_stamp_[first + at++]) {
      const uint32_t seen = read_stamp_[first + at];
      if (seen == last) continue;
      const Conflict::Kind kind = conflict(warp, lane, other, seen);
      if (kind != Conflict::Kind::none)
        return {kind, false, other, seen & 63, read_pc_[first + at], at};
    }
  }
  land(warp, lane, states_[warp].clock, pc, offset, bytes);
  if (races_) std::fill_n(use_.begin() + offset, bytes, kWriting);
  return Conflict{};
}

void SharedHistory::end_async_write(uint32_t agent, uint32_t pc, uint32_t offset, uint32_t bytes) {
  land(agent, kAnyLane, phases_[agent], pc, offset, bytes);
}

void SharedHistory::reserve(uint32_t offset) {
  if (races_) std::fill_n(use_.begin() + offset, kMbarrierBytes, kReserved);
}

void SharedHistory::release(uint32_t offset) {
  std::fill_n(use_.begin() + offset, kMbarrierBytes, uint16_t{0});
}

// An ordinary read of the mbarrier's bytes, and one by the asynchronous proxy.
Conflict SharedHistory::use(uint32_t warp, uint32_t lane, uint32_t pc, uint32_t offset,
                            bool asynchronous) {
  release(offset);
  const Conflict result = read(warp, lane, pc, offset, kMbarrierBytes);
  reserve(offset);
  const bool ready = !races_ || fenced(states_[warp], write_agent_[offset], write_stamp_[offset]);
  if (result.kind != Conflict::Kind::none || !asynchronous || ready) return result;
  return with_write(Conflict::Kind::proxy, offset);
}

void SharedHistory::complete(uint32_t agent, Order& phase) {
  phase.known.raise(agent, phases_[agent]++);
}

void SharedHistory::meet(uint32_t warp, uint32_t lanes) {
  WarpState& state = states_[warp];
  const uint32_t clock = state.clock++;
  if (lanes == kEveryLane) {
    state.lanes_known = clock;
    state.partial = false;
    return;
  }
  if (!state.partial) {
    for (auto& row : state.by_lane) std::fill_n(row, 32, 0u);
    state.partial = true;
  }
  uint32_t joined[32] = {};
  for (int i = 0; i < 32; ++i) {
    if ((lanes >> i & 1) == 0) continue;
    for (int j = 0; j < 32; ++j) joined[j] = std::max(joined[j], state.by_lane[i][j]);
    joined[i] = clock;
  }
  for (int i = 0; i < 32; ++i)
    if ((lanes >> i & 1) != 0) std::copy_n(joined, 32, state.by_lane[i]);
}

void SharedHistory::arrive(uint32_t warp, uint32_t lanes, Order& barrier) {
  if (fences_) barrier.fenced.join(states_[warp].fenced);
  share(warp, lanes, barrier.known);
}

void SharedHistory::leave(uint32_t warp, const Order& barrier) {
  WarpState& state = states_[warp];
  state.known.join(barrier.known);
  state.lanes_known = std::max(state.lanes_known, barrier.known.of(warp));
  if (fences_) state.fenced.join(barrier.fenced);
}

void SharedHistory::fence(uint32_t warp, uint32_t lanes) {
  fences_ = true;
  share(warp, lanes, states_[warp].fenced);
}

void SharedHistory::share(uint32_t warp, uint32_t lanes, Clocks& clocks) {
  WarpState& state = states_[warp];
  clocks.join(state.known);
  const uint32_t clock = state.clock++;
  if (lanes == kEveryLane) return clocks.raise(warp, clock);
  clocks.raise(warp, state.lanes_known);
  clocks.raise_lane(warp, kAsyncLane, clock);
  for (uint32_t i = 0; i < 32; ++i) {
    if ((lanes >> i & 1) == 0) continue;
    clocks.raise_lane(warp, i, clock);
    for (uint32_t j = 0; state.partial && j < 32; ++j)
      clocks.raise_lane(warp, j, state.by_lane[i][j]);
  }
  clocks.raise_common(warp);
}

}  // namespace fajit::emulator
