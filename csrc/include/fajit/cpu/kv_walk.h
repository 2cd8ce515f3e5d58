// The key tiles that a group of query rows visits, and what the mask says about each.
//
// The interval form of the mask classifies a run of tiles first: a run that is empty or full as a
// whole costs one evaluation, so a causal tile over 64k keys costs tens of evaluations, not
// hundreds. With a block mask the byte map decides, and tiles end at block boundaries.
#pragma once
#include <fajit/context.h>
#include <fajit/cpu/vec.h>
#include <fajit/interval.h>

namespace fajit {

// Query rows of one request as the mask sees them: inclusive ranges of logical indices.
struct RowSpan {
  int32_t b, h_first, h_last, q_first, q_last;
};

struct KvTile {
  int32_t begin, end;
  int state;  // fajit_tile_state, never empty
};

template <class Hooks>
FAJIT_INLINE int classify_span(const Context& c, const RowSpan& r, int32_t k0, int32_t k1) {
  return Hooks::classify(c, Interval{r.b, r.b}, Interval{r.h_first, r.h_last},
                         Interval{r.q_first, r.q_last}, Interval{k0, k1 - 1});
}

template <class Config, class Hooks>
class KvWalk {
 public:
  static constexpr int32_t kRun = 8;  // tiles classified at once

  // `q_row`: first row of the span in its request, which selects the block mask's row.
  KvWalk(const Context& c, const RowSpan& rows, int32_t q_row, int32_t begin, int32_t end)
      : c_(c), rows_(rows), at_(begin), end_(end) {
    if constexpr (Config::kBlockMask) {
      const fajit_block_mask& m = c.args->block_mask;
      states_ = m.states + rows.b * m.strides[0] + rows.h_first * m.strides[1] +
                q_row / m.q_block * m.strides[2];
    }
  }

  // The next tile that is not empty; false at the end.
  bool next(KvTile& tile) {
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
      tile = {at_, stop, state};
      at_ = stop;
      if (state != FAJIT_TILE_EMPTY) return true;
    }
    return false;
  }

 private:
  int classify(int32_t k0, int32_t k1) const {
    if constexpr (Hooks::kMask) {
      return classify_span<Hooks>(c_, rows_, k0, k1);
    } else {
      return FAJIT_TILE_FULL;
    }
  }

  const Context c_;
  const RowSpan rows_;
  int32_t at_, end_;
  int32_t run_end_ = INT32_MIN;
  int run_state_ = FAJIT_TILE_PARTIAL;
  const uint8_t* states_ = nullptr;
};

}  // namespace fajit
