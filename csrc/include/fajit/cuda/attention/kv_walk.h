// The key tiles that a work item visits, and what the mask says about each.
//
// Every lane classifies one tile by the mask's interval form (and the block mask), so one
// evaluation serves 32 tiles: a tile proven empty is never loaded, one proven full runs no mask
// code. Every warp does it for itself, which needs no shared memory and no barrier.
#pragma once
#include <fajit/cuda/attention/packed_rows.h>
#include <fajit/interval.h>

namespace fajit::cuda {

struct KvTile {
  int32_t begin, end;  // key positions; none when begin >= end
  bool full;           // every pair is kept: neither mask nor bounds
  FAJIT_DEV bool valid() const { return begin < end; }
};

// Tiles of kKeys keys of an item that start at begin, begin + kStep, ... and end at `end`.
template <class Config, class Hooks, int kKeys, int kStep>
class KvWalk {
 public:
  FAJIT_DEV KvWalk(const Context& c, const fajit_work& item, int32_t begin, int32_t end)
      : c_(c), item_(item), end_(end), group_(begin) {
    classify_group();
  }

  // The next tile that is not empty; one that is not valid at the end, and ever after.
  FAJIT_DEV KvTile next() {
    while (visit_ == 0) {
      if (end_ - group_ <= 32 * kStep) return {0, 0, false};
      group_ += 32 * kStep;
      classify_group();
    }
    const int i = __ffs(static_cast<int>(visit_)) - 1;
    visit_ &= visit_ - 1;
    const int32_t first = group_ + i * kStep;
    const int32_t last = min(end_, first + kKeys);
    return {first, last, (full_ >> i & 1) != 0 && last - first == kKeys};
  }

  // State of the block that holds a key: see fajit_tile_state.
  FAJIT_DEV int block_state(int32_t key) const {
    const fajit_block_mask& m = c_.args->block_mask;
    return block_states()[key / m.kv_block * m.strides[3]];
  }

 private:
  // What the rows are is worked out anew for every 32 tiles: between, it would hold registers that
  // the loop over the keys wants.
  FAJIT_DEV void classify_group() {
    const RowSpan rows = row_span<Config::kMixedRows>(*c_.args, item_, item_.row_begin, item_.row_end);
    int state = FAJIT_TILE_EMPTY;
    // Positions fit int32, but not every lane's tile exists.
    const int64_t first = int64_t{group_} + int64_t{ptx::lane_index()} * kStep;
    if (first < end_) {
      const int32_t k0 = static_cast<int32_t>(first);
      state = classify(rows, k0, end_ - k0 < kKeys ? end_ : k0 + kKeys);
    }
    visit_ = __ballot_sync(ptx::kAllLanes, state != FAJIT_TILE_EMPTY);
    full_ = __ballot_sync(ptx::kAllLanes, state == FAJIT_TILE_FULL);
  }

  FAJIT_DEV int classify([[maybe_unused]] const RowSpan& rows, [[maybe_unused]] int32_t k0,
                         [[maybe_unused]] int32_t k1) const {
    if constexpr (Config::kBlockMask) {
      const int blocks = covered_state(k0, k1);
      if (blocks != FAJIT_TILE_PARTIAL) return blocks;
      // Of several blocks, some may be full whatever mask_mod says.
      const int32_t size = c_.args->block_mask.kv_block;
      if (k0 / size != (k1 - 1) / size) return FAJIT_TILE_PARTIAL;
    }
    if constexpr (Hooks::kMask) {
      return Hooks::classify(c_, Interval{rows.b_first, rows.b_last},
                             Interval{rows.h_first, rows.h_last},
                             Interval{rows.q_first, rows.q_last}, Interval{k0, k1 - 1});
    }
    return FAJIT_TILE_FULL;
  }

  // The block mask's states of the item's rows, which lie in one block of queries.
  FAJIT_DEV const uint8_t* block_states() const {
    const fajit_block_mask& m = c_.args->block_mask;
    return m.states + item_.request * m.strides[0] + item_.head_begin * m.strides[1] +
           item_.row_begin / item_.head_count / m.q_block * m.strides[2];
  }

  // Of all blocks that [k0, k1) touches: empty or full where all are, else partial.
  FAJIT_DEV int covered_state(int32_t k0, int32_t k1) const {
    const fajit_block_mask& m = c_.args->block_mask;
    const uint8_t* const states = block_states();
    const int32_t last = (k1 - 1) / m.kv_block;
    const int state = states[k0 / m.kv_block * m.strides[3]];
    for (int32_t block = k0 / m.kv_block + 1; block <= last; ++block)
      if (states[block * m.strides[3]] != state) return FAJIT_TILE_PARTIAL;
    return state;
  }

  const Context c_;
  const fajit_work& item_;
  const int32_t end_;
  int32_t group_;  // first key of the 32 tiles that visit_ and full_ are about
  uint32_t visit_ = 0, full_ = 0;
};

}  // namespace fajit::cuda
