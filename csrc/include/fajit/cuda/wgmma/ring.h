// What the producer, the changers and the consumers of a block share: buffers, barriers, and a
// record of each tile.
//
// Tiles are counted over all items of the block. Turn n uses stage n % kStages of K and of V, whose
// barriers are then in phase n / kStages. K and V of a tile have barriers of their own, as K is
// needed a product earlier and free a product earlier.
//
//             full: 1 arrival, by the producer, and the bytes of the boxes
//             empty: an arrival by each warp of the consumers
//
// Under a mask, a warp of the producer finds the runs of tiles for the one that sends them, up to
// kRuns ahead, also those of later items: an evaluation of the mask's interval form takes longer
// than the tiles in the ring.
//
//             full, empty: 1 arrival, by the warp that finds, and by the one that sends
//
// Rows that are changed on their way (see changer.h) have a copy of their own: codes land in stages
// beside K and V, other rows in their stage of K or V. The changers hand the tile on.
//
//             described: 1 arrival, by the producer, when the changers' record is written
//             landed: 1 arrival, by the producer, and the bytes of the boxes
//             taken: of codes, an arrival by each warp of the changers
//             full: an arrival by each warp of the changers
//
// The changers' record of a tile is written before the producer waits for a stage, so changers can
// load the numbers of its codes before the bytes are there. Turn n uses record n % kLandings. The
// producer writes it after it has started the copies of K of turn n - 1 and of V of turn n - 2, for
// which it had waited until the changers were done with K of turn n - 1 - kStages, or with V of
// turn n - 2 - kStages. By then each of them had read the record of turn n - kLandings.
//
// Q of the block's n-th item is in stage n % kQueryStages. With two stages, the queries of an item
// are loaded while the one before is computed, and its results leave through its own stage.
#pragma once
#include <fajit/context.h>
#include <fajit/cuda/common/kv_walk.h>
#include <fajit/cuda/ptx/copy.h>
#include <fajit/cuda/ptx/mbarrier.h>
#include <fajit/cuda/ptx/warpgroup.h>
#include <fajit/cuda/tile/element.h>
#include <fajit/cuda/wgmma/changes.h>

namespace fajit::cuda {

// A tile as the producer describes it, or a run of them.
struct TileRecord {
  KvTile tile;
  bool last;    // of the item
  bool absent;  // the item has no tile, and nothing was loaded
};

// Which records: of the tiles that consumers read, of the tiles that changers read, of runs.
enum class Records { kTiles, kLandings, kRuns };

template <class Config, class Hooks>
struct Ring {
  using KeyChanges = Changes<Config, Hooks, true>;
  using ValueChanges = Changes<Config, Hooks, false>;
  static constexpr bool kChanges = KeyChanges::kAny || ValueChanges::kAny;
  static constexpr int kGroups = Config::kTileQ / ptx::kGroupRows;  // of consumers
  static constexpr int kConsumerWarps = kGroups * ptx::kGroupWarps;
  static constexpr int kStages = Config::kStages, kQueryStages = Config::kQueryStages;
  using QLayout = PanelLayout<Config::kDim, Config::kTileQ>;
  using KLayout = typename KeyChanges::Layout;
  using VLayout = typename ValueChanges::Layout;
  using Walk = KvWalk<Config, Hooks, Config::kTileKv, Config::kTileKv>;
  static constexpr int kRuns = Walk::kChunks ? 4 : 0;  // found ahead; 0: found where they are sent
  static constexpr int kLandings = kChanges ? 2 * kStages : 0;  // records of tiles for changers
  static_assert(!kChanges || kLandings >= kStages + 2, "see above");

  // Shared memory: Q stages, K stages, V stages, stages of their codes; then barriers, records of
  // tiles, of runs and of changers' tiles, the work item of each warp, the producer's walk, scratch
  // of row hooks, the numbers of the rows of each changer.
  static constexpr int kKBegin = kQueryStages * QLayout::kBytes;
  static constexpr int kVBegin = kKBegin + kStages * KLayout::kBytes;
  static constexpr int kKeyCodesBegin = kVBegin + kStages * VLayout::kBytes;
  static constexpr int kValueCodesBegin = kKeyCodesBegin + kStages * KeyChanges::kLandingBytes;
  static constexpr int kBarriersBegin = kValueCodesBegin + kStages * ValueChanges::kLandingBytes;
  static constexpr int kQueryBarriers = kGroups * kQueryStages;  // full, and as many empty
  static constexpr int kLanded = 4 * kStages + 2 * kQueryBarriers;
  static constexpr int kChangesBegin = kLanded + 1 + 2 * kRuns;
  static constexpr int kDescribed = kChangesBegin + 4 * kStages;
  static constexpr int kBarriers = kChanges ? kDescribed + kLandings : kChangesBegin;
  static constexpr int kRecordsBegin =
      round_up(kBarriersBegin + kBarriers * ptx::kBarrierBytes, 16);
  static constexpr int kItemsBegin = kRecordsBegin + (kStages + kRuns + kLandings) * 16;
  static constexpr int kWalkBegin = kItemsBegin + Config::kWarps * int{sizeof(fajit_work)};
  static constexpr int kTempsBegin = kWalkBegin + Walk::kSharedBytes;
  // Of changers: their warps, the rows of a tile that each changes, and floats of its numbers,
  // those of K first.
  static constexpr int kChangers = kChanges ? ptx::kGroupWarps : 0;
  static constexpr int kChangedRows = Config::kTileKv / ptx::kGroupWarps;
  static constexpr int kKeyNumbers = kChangedRows * KeyChanges::Widen::kNumbers;
  static constexpr int kNumbers = kKeyNumbers + kChangedRows * ValueChanges::Widen::kNumbers;
  static constexpr int kNumbersBegin =
      kTempsBegin + (kConsumerWarps + kChangers) * Hooks::kRowTemps * 4;
  static constexpr int kBytes = kNumbersBegin + kChangers * kNumbers * 4;

  unsigned char* shared;

  FAJIT_DEV uint32_t address(int offset) const { return ptx::shared_address(shared) + offset; }
  // Offset of the queries of the n-th item.
  static FAJIT_DEV uint32_t queries(uint32_t n) { return n % kQueryStages * QLayout::kBytes; }
  FAJIT_DEV uint32_t keys(uint32_t turn) const {
    return address(kKBegin) + turn % kStages * KLayout::kBytes;
  }
  FAJIT_DEV uint32_t values(uint32_t turn) const {
    return address(kVBegin) + turn % kStages * VLayout::kBytes;
  }

  FAJIT_DEV uint32_t full_keys(uint32_t turn) const { return barrier(turn % kStages); }
  FAJIT_DEV uint32_t full_values(uint32_t turn) const { return barrier(kStages + turn % kStages); }
  FAJIT_DEV uint32_t empty_keys(uint32_t turn) const {
    return barrier(2 * kStages + turn % kStages);
  }
  FAJIT_DEV uint32_t empty_values(uint32_t turn) const {
    return barrier(3 * kStages + turn % kStages);
  }
  FAJIT_DEV uint32_t full_queries(int group, uint32_t n) const {
    return barrier(4 * kStages + n % kQueryStages * kGroups + group);
  }
  FAJIT_DEV uint32_t empty_queries(int group, uint32_t n) const {
    return barrier(4 * kStages + kQueryBarriers + n % kQueryStages * kGroups + group);
  }
  static FAJIT_DEV uint32_t query_phase(uint32_t n) { return n / kQueryStages & 1; }
  FAJIT_DEV uint32_t landed() const { return barrier(kLanded); }  // see Producer
  static FAJIT_DEV uint32_t phase(uint32_t turn) { return turn / kStages & 1; }
  FAJIT_DEV uint32_t full_run(uint32_t n) const { return barrier(kLanded + 1 + n % kRuns); }
  FAJIT_DEV uint32_t empty_run(uint32_t n) const {
    return barrier(kLanded + 1 + kRuns + n % kRuns);
  }
  static FAJIT_DEV uint32_t run_phase(uint32_t n) { return n / kRuns & 1; }

  FAJIT_DEV uint32_t described(uint32_t turn) const {
    return barrier(kDescribed + turn % kLandings);
  }
  static FAJIT_DEV uint32_t description_phase(uint32_t turn) { return turn / kLandings & 1; }

  // Of K or of V (`Changes`), by turn. landed: its copies to changers are complete; taken: codes
  // have been read; copied: the barrier that copies complete; unused: that of stages to copy to.
  template <class Side>
  FAJIT_DEV uint32_t landed(uint32_t turn) const {
    return barrier(kChangesBegin + (Side::kKeys ? 0 : kStages) + turn % kStages);
  }
  template <class Side>
  FAJIT_DEV uint32_t taken(uint32_t turn) const {
    return barrier(kChangesBegin + (Side::kKeys ? 2 : 3) * kStages + turn % kStages);
  }
  template <class Side>
  FAJIT_DEV uint32_t full(uint32_t turn) const {
    return Side::kKeys ? full_keys(turn) : full_values(turn);
  }
  template <class Side>
  FAJIT_DEV uint32_t empty(uint32_t turn) const {
    return Side::kKeys ? empty_keys(turn) : empty_values(turn);
  }
  template <class Side>
  FAJIT_DEV uint32_t copied(uint32_t turn) const {
    return Side::kAny ? landed<Side>(turn) : full<Side>(turn);
  }
  template <class Side>
  FAJIT_DEV uint32_t unused(uint32_t turn) const {
    return Side::kCoded ? taken<Side>(turn) : empty<Side>(turn);
  }
  // A tile's codes.
  template <class Side>
  FAJIT_DEV uint32_t codes(uint32_t turn) const {
    return address(Side::kKeys ? kKeyCodesBegin : kValueCodesBegin) +
           turn % kStages * Side::kLandingBytes;
  }

  // By one thread, before any role starts.
  FAJIT_DEV void make_barriers() const {
#pragma unroll
    for (int i = 0; i < kBarriers; ++i) {
      const bool empties = i >= 2 * kStages && i < 4 * kStages;
      const bool of_queries = i >= 4 * kStages && i < kLanded;
      const bool of_changers = (i < kStages && KeyChanges::kAny) ||
                               (i >= kStages && i < 2 * kStages && ValueChanges::kAny) ||
                               (i >= kChangesBegin + 2 * kStages && i < kDescribed);
      const int arrivals = empties                            ? kConsumerWarps
                           : of_changers                      ? ptx::kGroupWarps
                           : !of_queries                      ? 1
                           : i < 4 * kStages + kQueryBarriers ? 32  // lanes of the warp that loads
                                                              : ptx::kGroupWarps;
      ptx::make_barrier(barrier(i), arrivals);
    }
    ptx::publish_barriers();
  }

  // The record of the tile of turn n, for consumers or changers, or of the n-th run.
  template <Records kOf = Records::kTiles>
  FAJIT_DEV void write_record(uint32_t n, const TileRecord& r) const {
    const uint32_t flags = r.tile.full | r.last << 1 | r.absent << 2;
    ptx::store_words(record<kOf>(n), static_cast<uint32_t>(r.tile.begin),
                     static_cast<uint32_t>(r.tile.end), flags, 0);
  }
  // After a wait for full_keys, described or full_run.
  template <Records kOf = Records::kTiles>
  FAJIT_DEV TileRecord read_record(uint32_t n) const {
    uint32_t words[4];
    ptx::load_words(words, record<kOf>(n));
    __syncwarp();  // before one lane lets another role overwrite it
    const uint32_t flags = ptx::uniform_word(words[2]);
    return {{static_cast<int32_t>(words[0]), static_cast<int32_t>(words[1]), (flags & 1) != 0},
            (flags & 2) != 0,
            (flags & 4) != 0};
  }

  // A warp's own copy of the block's i-th work item. Called by all lanes, when none reads the last
  // one any more.
  FAJIT_DEV const fajit_work& fetch_item(const fajit_args& a, int32_t i) const {
    constexpr int kWords = sizeof(fajit_work) / 4;
    const int lane = ptx::lane_index(), warp = static_cast<int>(threadIdx.x) / 32;
    int32_t* const words =
        reinterpret_cast<int32_t*>(shared + kItemsBegin + warp * int{sizeof(fajit_work)});
    __syncwarp();
    if (lane < kWords) words[lane] = reinterpret_cast<const int32_t*>(a.work + i)[lane];
    __syncwarp();
    return *reinterpret_cast<const fajit_work*>(words);
  }

 private:
  FAJIT_DEV uint32_t barrier(uint32_t i) const {
    return address(kBarriersBegin) + i * ptx::kBarrierBytes;
  }
  template <Records kOf>
  FAJIT_DEV uint32_t record(uint32_t n) const {
    if constexpr (kOf == Records::kRuns) return address(kRecordsBegin) + (kStages + n % kRuns) * 16;
    if constexpr (kOf == Records::kLandings)
      return address(kRecordsBegin) + (kStages + kRuns + n % kLandings) * 16;
    return address(kRecordsBegin) + n % kStages * 16;
  }
};

// Calls `handle` with each item of this block's worker, or with the block's own one.
template <class Ring, class Handle>
FAJIT_DEV void for_each_item(const fajit_args& a, const Ring& ring, const Handle& handle) {
  int32_t i = static_cast<int32_t>(blockIdx.x), end = i + 1;
  if (a.worker_indptr != nullptr) {
    end = ptx::uniform(a.worker_indptr[i + 1]);
    i = ptx::uniform(a.worker_indptr[i]);
  }
#pragma unroll 1
  for (; i < end; ++i) {
    const fajit_work& item = ring.fetch_item(a, i);
    if (ptx::uniform(item.request) >= 0) handle(item);
  }
}

}  // namespace fajit::cuda
