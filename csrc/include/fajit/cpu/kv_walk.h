// The key tiles that a group of query rows visits, and what the mask says about each.
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
  int32_t begin, end;  // logical positions; of a list: 0 and how many keys
  int state;  // fajit_tile_state, never empty
};

template <class Hooks>
FAJIT_INLINE int classify_span(const Context& c, const RowSpan& r, int32_t k0, int32_t k1) {
  return Hooks::classify(c, Interval{r.b_first, r.b_last}, Interval{r.h_first, r.h_last},
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
      states_ = m.states + rows.b_first * m.strides[0] + rows.h_first * m.strides[1] +
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

// The same in an indirect kernel: brings the rows of each tile into a table, and goes through the
// tiles of a key list. A list's tile is classified by the hull of its positions.
template <class Config, class Hooks, class Table>
class TableWalk {
 public:
  TableWalk(const Context& c, const RowSpan& rows, Table& table, int32_t begin, int32_t end)
      : c_(c), rows_(rows), table_(table), walk_(c, rows, 0, begin, end) {}

  bool next(KvTile& tile) {
    if (!table_.listed()) {
      if (!walk_.next(tile)) return false;
      table_.seek(tile.begin, tile.end - tile.begin);
      return true;
    }
    while (const int count = table_.next()) {
      int state = FAJIT_TILE_FULL;
      if constexpr (Hooks::kMask) {
        int32_t low, high;
        table_.hull(0, count, low, high);
        state = classify_span<Hooks>(c_, rows_, low, high + 1);
        if (state == FAJIT_TILE_EMPTY) continue;
      }
      tile = {0, count, state};
      return true;
    }
    return false;
  }

 private:
  const Context c_;
  const RowSpan rows_;
  Table& table_;
  KvWalk<Config, Hooks> walk_;
};

// The part of an item's positions that is of its request. Positions of a list are not cut.
struct KeyRange {
  int32_t begin, end;
};
FAJIT_INLINE KeyRange key_range(const fajit_args& a, const fajit_work& w, bool indirect) {
  KeyRange range{w.kv_begin, w.kv_end};
  if (indirect && a.key_blocks != nullptr) return range;
  const int32_t kv_len = a.kv_len[w.request];
  if (kv_len < range.end) range.end = kv_len;
  if (indirect && a.kv_first != nullptr && range.begin < a.kv_first[w.request])
    range.begin = a.kv_first[w.request];
  return range;
}

}  // namespace fajit
