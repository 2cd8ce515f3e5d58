// The key tiles that a group of query rows visits, with the mask's state for each.
//
// The interval form of the mask classifies a run of tiles first: a run that is empty or full as a
// whole costs one evaluation, so a causal tile over 64k keys costs tens of evaluations, not
// hundreds. With a block mask the byte map decides, and tiles end at block boundaries.
//
// Sums over keys are blocked: those of a sum block of kSumKeys keys are computed on their own and
// then added to the totals, so that small weights are not added one by one to a large sum. Where
// one key has nearly all of the weight and 100,000 keys the rest, the error of few rows was 2.6e-4
// with one running sum and is up to 6e-6 with sum blocks of 512 keys; that of a prefill was 4.3e-5
// and is 4e-6 with blocks of about 4,096 (fp32, by hand).
#pragma once
#include <fajit/context.h>
#include <fajit/cpu/key_rows.h>
#include <fajit/interval.h>

namespace fajit {

struct KvTile {
  int32_t begin, end;  // logical positions; of a list: 0 and the number of keys
  int state;           // fajit_tile_state, never empty
  bool follows;        // its first key is the one after the last tile's
  bool ends_sums;      // a sum block begins: the sums of the tiles before go to the totals
};

template <class Hooks>
FAJIT_INLINE int classify_span(const Context& c, const RowSpan& r, int32_t k0, int32_t k1) {
  return Hooks::classify(c, Interval{r.b_first, r.b_last}, Interval{r.h_first, r.h_last},
                         Interval{r.q_first, r.q_last}, Interval{k0, k1 - 1});
}

// Each tile is passed to `keys.seek`, which in an indirect kernel fills the table of row addresses.
// Tiles of key lists are classified by the hull of their positions. Tiles end at multiples of
// kTileKv positions at the latest, as runs and sum blocks do (of a list: after as many tiles): no
// tile reaches beyond a run, and which keys are of a sum block does not depend on the tiles that
// other rows need.
template <class Config, class Hooks, class Keys, int SumKeys>
class KvWalk {
 public:
  static constexpr int32_t kRun = 8;  // tiles classified at once
  static constexpr int32_t kSumKeys = round_up(SumKeys, Config::kTileKv);

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
      const int32_t sum_block = at_ / kSumKeys, most = Config::kTileKv - at_ % Config::kTileKv;
      int32_t stop = end_ - at_ < most ? end_ : at_ + most;
      if constexpr (Config::kBlockMask) {
        const fajit_block_mask& m = c_.args->block_mask;
        const int32_t kv_block = at_ / m.kv_block;
        const int32_t left = m.kv_block - at_ % m.kv_block;
        const int32_t block_end = left < end_ - at_ ? at_ + left : end_;
        state = states_[kv_block * m.strides[3]];
        if (state == FAJIT_TILE_EMPTY) {
          at_ = block_end;
          continue;
        }
        stop = stop < block_end ? stop : block_end;
        if (state == FAJIT_TILE_PARTIAL) state = classify(at_, stop);
      } else if constexpr (Hooks::kMask) {
        if (at_ >= run_end_) {
          const int32_t run = most + (kRun - 1) * Config::kTileKv;
          run_end_ = end_ - at_ < run ? end_ : at_ + run;
          run_state_ = classify(at_, run_end_);
          if (run_state_ == FAJIT_TILE_EMPTY) {
            at_ = run_end_;
            continue;
          }
        }
        state = run_state_ == FAJIT_TILE_FULL ? FAJIT_TILE_FULL : classify(at_, stop);
      }
      tile = {at_, stop, state, at_ == reached_, begins(sum_block)};
      at_ = stop;
      if (state == FAJIT_TILE_EMPTY) continue;
      sum_block_ = sum_block;
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
      const int32_t sum_block = tiles_++ / (kSumKeys / Config::kTileKv);
      tile = {0, count, classify(low, high + 1), reached_ == 0, begins(sum_block)};
      reached_ = 0;
      if (tile.state == FAJIT_TILE_EMPTY) continue;
      sum_block_ = sum_block;
      return true;
    }
    return false;
  }

  // Whether the sum block is not that of the last tile; false before the first tile.
  bool begins(int32_t sum_block) const { return sum_block_ >= 0 && sum_block != sum_block_; }

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
  int32_t reached_ = -1;    // end of the last tile; of lists: 0 after the first
  int32_t sum_block_ = -1;  // of the last tile; -1 before the first
  int32_t tiles_ = 0;       // of a list, so far
  int32_t run_end_ = INT32_MIN;
  int run_state_ = FAJIT_TILE_PARTIAL;
  const uint8_t* states_ = nullptr;
};

}  // namespace fajit
