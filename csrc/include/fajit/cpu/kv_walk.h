// The key tiles that a group of query rows visits, with the mask's state for each.
//
// The interval form of the mask classifies a run of tiles first: a run that is empty or full as a
// whole costs one evaluation, so a causal tile over 64k keys costs tens of evaluations, not
// hundreds. With a block mask the byte map decides, and tiles end at block boundaries.
#pragma once
#include <fajit/context.h>
#include <fajit/cpu/key_rows.h>
#include <fajit/interval.h>

namespace fajit {

struct KvTile {
  int32_t begin, end;  // logical positions; of a list: 0 and the number of keys
  int state;           // fajit_tile_state, never empty
  bool follows;        // its first key is the one after the last tile's
};

template <class Hooks>
FAJIT_INLINE int classify_span(const Context& c, const RowSpan& r, int32_t k0, int32_t k1) {
  return Hooks::classify(c, Interval{r.b_first, r.b_last}, Interval{r.h_first, r.h_last},
                         Interval{r.q_first, r.q_last}, Interval{k0, k1 - 1});
}

// Each tile is passed to `keys.seek`, which in an indirect kernel fills the table of row addresses.
// Tiles of key lists are classified by the hull of their positions. Where the mask keeps a part of
// the keys, tiles have PartialKv of them.
template <class Config, class Hooks, class Keys, int PartialKv = Config::kTileKv>
class KvWalk {
 public:
  static constexpr int32_t kRun = 8;  // tiles classified at once

  // `rows`: the span of the packed rows from `row0` on; the first row selects the row of the block
  // mask.
  KvWalk(const Context& c, const fajit_work& w, const RowSpan& rows, int32_t row0, Keys& keys)
      : c_(c), rows_(rows), keys_(keys), at_(w.kv_begin), end_(w.kv_end) {
    const fajit_args& a = *c.args;
    // Clip to the keys of the request. Positions in key lists are not clipped.
    if (!Config::kIndirect || a.key_blocks == nullptr) {
      if (a.kv_len[w.request] < end_) end_ = a.kv_len[w.request];
      if (Config::kIndirect && a.kv_first != nullptr && at_ < a.kv_first[w.request])
        at_ = a.kv_first[w.request];
    }
    keys.open(a, w, w.head_begin / c.group_size(), at_, end_);
    if constexpr (Config::kBlockMask) {
      const fajit_block_mask& m = a.block_mask;
      states_ = m.states + rows.b_first * m.strides[0] + rows.h_first * m.strides[1] +
                row0 / w.head_count / m.q_block * m.strides[2];
    }
  }

  // The next tile that is not empty; false at the end.
  bool next(KvTile& tile) {
    if constexpr (Config::kIndirect)
      if (keys_.listed()) return next_listed(tile);
    while (at_ < end_) {
      int state = FAJIT_TILE_FULL;
      int32_t stop = end_ - at_ < Config::kTileKv ? end_ : at_ + Config::kTileKv;
      if constexpr (Config::kBlockMask) {
        const fajit_block_mask& m = c_.args->block_mask;
        const int32_t block = at_ / m.kv_block;
        const int32_t left = m.kv_block - at_ % m.kv_block;
        const int32_t block_end = left < end_ - at_ ? at_ + left : end_;
        state = states_[block * m.strides[3]];
        if (state == FAJIT_TILE_EMPTY) {
          at_ = block_end;
          continue;
        }
        stop = stop < block_end ? stop : block_end;
        if (state == FAJIT_TILE_PARTIAL) state = classify(at_, stop);
      } else if constexpr (Hooks::kMask) {
        if (at_ >= run_end_) {
          run_end_ = end_ - at_ < kRun * Config::kTileKv ? end_ : at_ + kRun * Config::kTileKv;
          run_state_ = classify(at_, run_end_);
          if (run_state_ == FAJIT_TILE_EMPTY) {
            at_ = run_end_;
            continue;
          }
        }
        state = run_state_ == FAJIT_TILE_FULL ? FAJIT_TILE_FULL : classify(at_, stop);
      }
      if (PartialKv < Config::kTileKv && state == FAJIT_TILE_PARTIAL && stop - at_ > PartialKv) {
        stop = at_ + PartialKv;
        state = classify(at_, stop);
      }
      tile = {at_, stop, state, at_ == reached_};
      at_ = stop;
      if (state == FAJIT_TILE_EMPTY) continue;
      reached_ = stop;
      keys_.seek(tile.begin, tile.end - tile.begin);
      return true;
    }
    return false;
  }

  // Keys after the tile that may be visited; of lists, one tile.
  int left() const {
    if constexpr (Config::kIndirect)
      if (keys_.listed()) return Config::kTileKv;
    return end_ - at_;
  }

 private:
  bool next_listed(KvTile& tile) {
    while (const int count = keys_.next()) {
      int32_t low, high;
      keys_.hull(0, count, low, high);
      tile = {0, count, classify(low, high + 1), reached_ == 0};
      reached_ = 0;
      if (tile.state != FAJIT_TILE_EMPTY) return true;
    }
    return false;
  }

  int classify(int32_t k0, int32_t k1) const {
    if constexpr (Hooks::kMask) {
      return classify_span<Hooks>(c_, rows_, k0, k1);
    } else {
      return FAJIT_TILE_FULL;
    }
  }

  const Context c_;
  const RowSpan rows_;
  Keys& keys_;
  int32_t at_, end_;
  int32_t reached_ = -1;  // end of the last tile; of lists: 0 after the first
  int32_t run_end_ = INT32_MIN;
  int run_state_ = FAJIT_TILE_PARTIAL;
  const uint8_t* states_ = nullptr;
};

}  // namespace fajit
