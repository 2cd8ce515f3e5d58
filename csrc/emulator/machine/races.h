// What happened to each byte of shared memory: who wrote it and who read it last, and whether a
// barrier lies between that and the next access.
//
// Warps have vector clocks. A warp's clock advances when it arrives at a barrier or meets at
// bar.warp.sync; a barrier makes the clocks of those that arrived known to those that waited. Two
// accesses of one byte, at least one a write, race unless the second knows the first's clock.
// Between lanes of one warp only barriers and bar.warp.sync order accesses: shfl, vote, mma and
// ldmatrix do not, as in PTX's memory model. Programs that rely on lanes running in step are
// reported.
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
  bool with_write = false;  // the other access
  uint32_t warp = 0, lane = 0, pc = 0;
  uint32_t byte = 0;
};

class SharedHistory {
 public:
  // races: else only reads of unwritten bytes are found.
  void resize(uint32_t bytes, uint32_t warps, bool races);
  void start();  // of a block: forgets everything

  // A read, or a write (atomic: one that may meet other atomic ones), of [offset, offset + bytes).
  Conflict read(uint32_t warp, uint32_t lane, uint32_t pc, uint32_t offset, uint32_t bytes);
  Conflict write(uint32_t warp, uint32_t lane, uint32_t pc, uint32_t offset, uint32_t bytes,
                 bool atomic);
  // A copy is issued: as a write, and the bytes are in flight until it lands.
  Conflict launch(uint32_t warp, uint32_t lane, uint32_t pc, uint32_t offset, uint32_t bytes);
  void land(uint32_t warp, uint32_t lane, uint32_t pc, uint32_t offset, uint32_t bytes);

  void meet(uint32_t warp, uint32_t lanes);          // bar.warp.sync
  void arrive(uint32_t warp, Clocks& barrier);       // adds what the warp knows
  void leave(uint32_t warp, const Clocks& barrier);  // learns it

 private:
  struct WarpState {
    uint32_t clock = 0;
    uint32_t known[kMaxWarps] = {};  // clocks of other warps
    uint32_t lanes_known = 0;        // of its own, by every lane
    bool partial = false;            // some lanes met without the others:
    uint32_t by_lane[32][32] = {};   // what lane i knows of lane j
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

  Conflict with_write(Conflict::Kind kind, uint32_t at) const;  // the last one of a byte

  uint32_t bytes_ = 0, warps_ = 0;
  bool races_ = true;
  uint32_t begin_ = 0;  // clocks below are of earlier blocks
  std::vector<WarpState> states_;
  // A stamp is clock << 6 | lane.
  std::vector<uint32_t> write_stamp_, write_pc_;
  std::vector<uint8_t> write_warp_, in_flight_;  // write_warp_: high bit: atomic
  std::vector<uint32_t> read_stamp_, read_pc_;   // of each warp in turn
};

}  // namespace fajit::emulator
