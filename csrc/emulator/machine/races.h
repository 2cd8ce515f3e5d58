// Race detection: the last write and reads of each byte of shared memory, and whether a barrier
// orders them before the next access.
//
// Warps have vector clocks. A warp's clock advances when it arrives at a barrier, and at
// bar.warp.sync; a barrier passes the clocks of the warps that arrived to the warps that waited.
// Two accesses to one byte, at least one of them a write, race unless the second warp's vector
// clock includes the first access. Between lanes of one warp only barriers and bar.warp.sync order
// accesses: shfl, vote, mma and ldmatrix do not, as in PTX's memory model. Programs that rely on
// lockstep execution of lanes are reported.
//
// Asynchronous operations (tensor copies, wgmma) access memory through another proxy: before such
// an access to a byte, fence.proxy.async must follow the ordinary accesses of it. So warps have a
// second vector clock, of the accesses that a fence has followed, which barriers exchange likewise.
// What an asynchronous copy wrote is ordered by the phase of the mbarrier that it completes: each
// mbarrier has a clock as warps do, which its phases advance.
#pragma once
#include <cstdint>
#include <vector>

namespace fajit::emulator {

inline constexpr uint32_t kMbarrierBytes = 8;
inline constexpr int kMaxWarps = 32;
inline constexpr int kAgents = 128;  // warps, then mbarriers
inline constexpr uint32_t kEveryLane = 0xffffffffu;
inline constexpr uint32_t kAnyLane = 63;  // several lanes, or the whole warp at once
// Of reads by asynchronous operations that the warp waited for: every lane knows them.
inline constexpr uint32_t kAsyncLane = 32;

class Clocks {
 public:
  void clear();
  void join(const Clocks& other);
  void raise(uint32_t agent, uint32_t clock) {
    all_[agent] = clock > all_[agent] ? clock : all_[agent];
  }
  void raise_lane(uint32_t warp, uint32_t lane, uint32_t clock);
  void raise_common(uint32_t warp);  // to what all lanes have reached one by one
  uint32_t of(uint32_t agent) const { return all_[agent]; }
  bool covers(uint32_t agent, uint32_t lane, uint32_t clock) const {
    if (clock <= all_[agent]) return true;
    return !single_.empty() && agent < kMaxWarps && lane <= kAsyncLane &&
           clock <= single_[agent * kLaneCodes + lane];
  }

 private:
  static constexpr uint32_t kLaneCodes = kAsyncLane + 1;
  uint32_t all_[kAgents] = {};    // of all lanes of a warp
  std::vector<uint32_t> single_;  // [warp][lane], if single lanes came without the others
};

// What a barrier passes from those who arrive to those who wait.
struct Order { Clocks known, fenced; };

struct Conflict {
  enum class Kind : uint8_t { none, unwritten, in_flight, mbarrier, race, proxy };
  Kind kind = Kind::none;
  bool with_write = false;  // the other access was a write
  uint32_t warp = 0;        // or agent
  uint32_t lane = 0, pc = 0;
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
  // The write then counts as one of the lane at this clock.
  void land(uint32_t warp, uint32_t lane, uint32_t clock, uint32_t pc, uint32_t offset,
            uint32_t bytes);

  // An asynchronous operation that the warp issues reads the bytes from begin to end: no write may
  // come between. From then on it is a read by the warp.
  Conflict begin_async_read(uint32_t warp, uint32_t pc, uint32_t offset, uint32_t bytes,
                            uint32_t lane = kAnyLane);
  void end_async_read(uint32_t warp, uint32_t pc, uint32_t offset, uint32_t bytes);
  // An asynchronous copy writes the bytes from begin to end: no access may come between. From then
  // on it is a write by the agent, an mbarrier: known to whoever knows the phase that it completes.
  Conflict begin_async_write(uint32_t warp, uint32_t lane, uint32_t pc, uint32_t offset,
                             uint32_t bytes);
  void end_async_write(uint32_t agent, uint32_t pc, uint32_t offset, uint32_t bytes);

  // The 8 bytes are an mbarrier: from reserve() to release() only its instructions use them.
  void reserve(uint32_t offset);
  void release(uint32_t offset);
  Conflict use(uint32_t warp, uint32_t lane, uint32_t pc, uint32_t offset, bool asynchronous);

  // `lanes`: those that take part; kEveryLane if none that has not exited is missing.
  void meet(uint32_t warp, uint32_t lanes);                    // bar.warp.sync
  void arrive(uint32_t warp, uint32_t lanes, Order& barrier);  // joins clocks into the barrier's
  void leave(uint32_t warp, const Order& barrier);  // joins the barrier's into the warp's
  void fence(uint32_t warp, uint32_t lanes);        // fence.proxy.async
  void complete(uint32_t agent, Order& phase);      // ends the phase of an mbarrier
  uint32_t clock_of(uint32_t warp) const { return states_[warp].clock; }

 private:
  struct WarpState {
    uint32_t clock = 0;
    Clocks known;                   // clocks of other agents
    Clocks fenced;                  // clocks, the own one included, that a proxy fence followed
    uint32_t lanes_known = 0;       // own clock that every lane knows
    bool partial = false;           // some lanes synchronised without the others
    uint32_t by_lane[32][32] = {};  // clock of lane j that lane i knows
  };

  bool ordered(const WarpState& state, uint32_t warp, uint32_t lane, uint32_t agent,
               uint32_t stamp) const {
    const uint32_t clock = stamp >> 6, other_lane = stamp & 63;
    if (agent != warp) return state.known.covers(agent, other_lane, clock);
    if (clock <= state.lanes_known || other_lane == kAsyncLane) return true;
    if (other_lane == lane && lane != kAnyLane) return true;
    if (state.partial && lane < 32 && other_lane < 32 && clock <= state.by_lane[lane][other_lane])
      return true;
    return state.known.covers(warp, other_lane, clock);  // through an mbarrier
  }
  static bool fenced(const WarpState& state, uint32_t agent, uint32_t stamp) {
    return state.fenced.covers(agent, stamp & 63, stamp >> 6);
  }

  Conflict with_write(Conflict::Kind kind, uint32_t at) const;  // with the last write of a byte
  Conflict with_use(uint32_t at) const;  // with the asynchronous operation that uses a byte
  Conflict::Kind conflict(uint32_t warp, uint32_t lane, uint32_t agent, uint32_t stamp) const;
  // Changes the number of asynchronous readers, by 1 or -1.
  void note_async_read(uint32_t warp, uint32_t pc, uint32_t offset, uint32_t bytes, int change);
  // Joins what the lanes know into `clocks`, and their own accesses so far.
  void share(uint32_t warp, uint32_t lanes, Clocks& clocks);

  uint32_t bytes_ = 0, warps_ = 0;
  bool races_ = true;
  bool fences_ = false;  // a fence was executed
  uint32_t begin_ = 0;   // smaller clocks are of earlier blocks
  std::vector<WarpState> states_;
  uint32_t phases_[kAgents] = {};  // clocks of mbarriers
  // A stamp is clock << 6 | lane.
  std::vector<uint32_t> write_stamp_, write_pc_;
  std::vector<uint8_t> write_agent_;  // high bit: atomic
  std::vector<uint16_t> use_;         // number of asynchronous readers, or kWriting, kReserved
  std::vector<uint32_t> read_stamp_, read_pc_;  // [warp][byte]
};

}  // namespace fajit::emulator
