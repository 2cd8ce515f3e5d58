// Race detection: the last write and reads of each byte of shared memory, and whether a barrier
// orders them before the next access.
//
// Warps have vector clocks. A warp's clock advances when it arrives at a barrier or at
// bar.warp.sync; a barrier passes the clocks of the warps that arrived to the warps that waited.
// Two accesses to one byte, at least one of them a write, race unless the second warp's vector
// clock includes the first access. Between lanes of one warp only barriers and bar.warp.sync order
// accesses: shfl, vote, mma and ldmatrix do not, as in PTX's memory model. Programs that rely on
// lockstep execution of lanes are reported.
#pragma once
#include <cstdint>
#include <vector>

namespace fajit::emulator {

inline constexpr int kMaxWarps = 32;
inline constexpr uint32_t kAnyLane = 63;  // several lanes, or the whole warp at once

struct Clocks { uint32_t values[kMaxWarps] = {}; };

struct Conflict {
  enum class Kind : uint8_t { none, unwritten, in_flight, race };
  Kind kind = Kind::none;
  bool with_write = false;  // the other access was a write
  uint32_t warp = 0, lane = 0, pc = 0;
  uint32_t byte = 0;
};

class SharedHistory {
 public:
  // races: false to find only reads of unwritten bytes.
  void resize(uint32_t bytes, uint32_t warps, bool races);
  void start();  // starts a new block

  // Record a read or a write (atomic: does not race with other atomic accesses) of [offset, offset
  // + bytes).
  Conflict read(uint32_t warp, uint32_t lane, uint32_t pc, uint32_t offset, uint32_t bytes);
  Conflict write(uint32_t warp, uint32_t lane, uint32_t pc, uint32_t offset, uint32_t bytes,
                 bool atomic);
  // launch: a copy is issued; it is a write, and the bytes are in flight until it lands.
  Conflict launch(uint32_t warp, uint32_t lane, uint32_t pc, uint32_t offset, uint32_t bytes);
  void land(uint32_t warp, uint32_t lane, uint32_t pc, uint32_t offset, uint32_t bytes);

  void meet(uint32_t warp, uint32_t lanes);          // bar.warp.sync
  void arrive(uint32_t warp, Clocks& barrier);       // joins the warp's clocks into the barrier's
  void leave(uint32_t warp, const Clocks& barrier);  // joins the barrier's clocks into the warp's

 private:
  struct WarpState {
    uint32_t clock = 0;
    uint32_t known[kMaxWarps] = {};  // clocks of other warps
    uint32_t lanes_known = 0;        // own clock that every lane knows
    bool partial = false;            // some lanes synchronised without the others
    uint32_t by_lane[32][32] = {};   // clock of lane j that lane i knows
  };

  bool ordered(const WarpState& state, uint32_t warp, uint32_t lane, uint32_t other_warp,
               uint32_t stamp) const {
    const uint32_t clock = stamp >> 6, other_lane = stamp & 63;
    if (other_warp != warp) return clock <= state.known[other_warp];
    if (clock <= state.lanes_known) return true;
    if (other_lane == lane && lane != kAnyLane) return true;
    return state.partial && lane < 32 && other_lane < 32 &&
           clock <= state.by_lane[lane][other_lane];
  }

  Conflict with_write(Conflict::Kind kind, uint32_t at) const;  // with the last write of a byte

  uint32_t bytes_ = 0, warps_ = 0;
  bool races_ = true;
  uint32_t begin_ = 0;  // smaller clocks are of earlier blocks
  std::vector<WarpState> states_;
  // A stamp is clock << 6 | lane.
  std::vector<uint32_t> write_stamp_, write_pc_;
  std::vector<uint8_t> write_warp_, in_flight_;  // write_warp_: high bit: atomic
  std::vector<uint32_t> read_stamp_, read_pc_;   // [warp][byte]
};

}  // namespace fajit::emulator
