#include "machine/races.h"

#include <algorithm>

namespace fajit::emulator {
namespace {

constexpr uint8_t kAtomic = 0x80;
constexpr uint32_t kLastClock = (1u << 26) - (1u << 20);

}  // namespace

void SharedHistory::resize(uint32_t bytes, uint32_t warps, bool races) {
  races_ = races;
  bytes_ = bytes;
  warps_ = warps;
  begin_ = 1;
  states_.assign(warps, WarpState{});
  write_stamp_.assign(bytes, 0);
  write_pc_.assign(bytes, 0);
  write_warp_.assign(bytes, 0);
  in_flight_.assign(bytes, 0);
  read_stamp_.assign(static_cast<size_t>(bytes) * warps, 0);
  read_pc_.assign(static_cast<size_t>(bytes) * warps, 0);
}

// Stamps are not cleared; instead, the clocks of a block start above all earlier clocks.
void SharedHistory::start() {
  uint32_t latest = begin_;
  for (const WarpState& state : states_) latest = std::max(latest, state.clock);
  if (latest > kLastClock) {
    resize(bytes_, warps_, races_);
    latest = begin_;
  }
  begin_ = latest + 1;
  std::fill(in_flight_.begin(), in_flight_.end(), uint8_t{0});
  for (WarpState& state : states_) {
    state.clock = begin_;
    std::fill_n(state.known, kMaxWarps, begin_ - 1);
    state.lanes_known = begin_ - 1;
    state.partial = false;
  }
}

Conflict SharedHistory::with_write(Conflict::Kind kind, uint32_t at) const {
  const uint32_t writer = write_warp_[at] & ~uint32_t{kAtomic};
  return {kind, true, writer, write_stamp_[at] & 63, write_pc_[at], at};
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
    if (in_flight_[at] != 0) {
      result.kind = Conflict::Kind::in_flight;
    } else if (stamp >> 6 < begin_) {
      if (result.kind == Conflict::Kind::none)
        result.kind = Conflict::Kind::unwritten, result.byte = at;
    } else if (races_ && !ordered(state, warp, lane, write_warp_[at] & ~kAtomic, stamp)) {
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
    const uint8_t writer = write_warp_[at];
    if (in_flight_[at] != 0) return with_write(Conflict::Kind::in_flight, at);
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
    write_warp_[at] = static_cast<uint8_t>(warp | (atomic ? kAtomic : 0));
    write_pc_[at] = pc;
  }
  return Conflict{};
}

Conflict SharedHistory::launch(uint32_t warp, uint32_t lane, uint32_t pc, uint32_t offset,
                               uint32_t bytes) {
  const Conflict result = write(warp, lane, pc, offset, bytes, false);
  if (races_) std::fill_n(in_flight_.begin() + offset, bytes, uint8_t{1});
  return result;
}

void SharedHistory::land(uint32_t warp, uint32_t lane, uint32_t pc, uint32_t offset,
                         uint32_t bytes) {
  std::fill_n(in_flight_.begin() + offset, bytes, uint8_t{0});
  std::fill_n(write_stamp_.begin() + offset, bytes, states_[warp].clock << 6 | lane);
  std::fill_n(write_warp_.begin() + offset, bytes, static_cast<uint8_t>(warp));
  std::fill_n(write_pc_.begin() + offset, bytes, pc);
}

void SharedHistory::meet(uint32_t warp, uint32_t lanes) {
  WarpState& state = states_[warp];
  const uint32_t clock = state.clock++;
  if (lanes == 0xffffffffu) {
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

void SharedHistory::arrive(uint32_t warp, Clocks& barrier) {
  WarpState& state = states_[warp];
  for (uint32_t other = 0; other < warps_; ++other)
    barrier.values[other] = std::max(barrier.values[other], state.known[other]);
  barrier.values[warp] = std::max(barrier.values[warp], state.clock);
  ++state.clock;
}

void SharedHistory::leave(uint32_t warp, const Clocks& barrier) {
  WarpState& state = states_[warp];
  for (uint32_t other = 0; other < warps_; ++other)
    state.known[other] = std::max(state.known[other], barrier.values[other]);
  state.lanes_known = std::max(state.lanes_known, barrier.values[warp]);
}

}  // namespace fajit::emulator
