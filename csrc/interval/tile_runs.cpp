#include "tile_runs.h"

#include <algorithm>

namespace fajit::form {
namespace {

constexpr int64_t kColumns = 8;
static_assert(kColumns * kColumns == kLanes);

struct Run {
  int64_t begin, end;
  uint8_t state;
};

// The tiles of one request and head. A square of tiles that is partial is cut into 8 x 8 smaller
// ones, which are one batch; what is empty or full is done.
class Refiner {
 public:
  Refiner(Evaluation& evaluation, const Grid& grid, Interval b, Interval h)
      : evaluation_(evaluation), grid_(grid), b_(b), h_(h),
        rows_(static_cast<size_t>(grid.q_tiles())) {
    int64_t span = kColumns;
    while (span < std::max(grid.q_tiles(), grid.kv_tiles())) span *= kColumns;
    if (!rows_.empty() && grid.kv_tiles() > 0) refine(0, 0, span);
  }

  const std::vector<std::vector<Run>>& rows() const { return rows_; }

 private:
  // The tiles from (row, column) on, `span` in each direction. Columns of one row are met in order.
  void refine(int64_t row, int64_t column, int64_t span) {
    const int64_t step = span / kColumns;
    Box boxes[kLanes];  // those beyond the grid hold no pair and are empty
    uint8_t states[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int64_t top = row + i / kColumns * step, left = column + i % kColumns * step;
      boxes[i] = {b_, h_, positions(grid_.q_begin, grid_.q_end, grid_.tile_q, top, step),
                  positions(grid_.kv_begin, grid_.kv_end, grid_.tile_kv, left, step)};
    }
    evaluation_.classify(boxes, kLanes, states);
    for (int i = 0; i < kLanes; ++i) {
      const int64_t top = row + i / kColumns * step, left = column + i % kColumns * step;
      if (states[i] == FAJIT_TILE_PARTIAL && step > 1) {
        refine(top, left, step);
      } else if (states[i] != FAJIT_TILE_EMPTY) {
        add(top, std::min(top + step, grid_.q_tiles()), left,
            std::min(left + step, grid_.kv_tiles()), states[i]);
      }
    }
  }

  // Of `tiles` tiles from tile `from` on.
  static Interval positions(int64_t begin, int64_t end, int64_t tile, int64_t from, int64_t tiles) {
    const int64_t lo = begin + from * tile;
    return {lo, std::min(lo + tiles * tile, end) - 1};
  }

  void add(int64_t top, int64_t bottom, int64_t left, int64_t right, uint8_t state) {
    for (int64_t row = top; row < bottom; ++row) {
      std::vector<Run>& runs = rows_[static_cast<size_t>(row)];
      if (!runs.empty() && runs.back().end == left && runs.back().state == state) {
        runs.back().end = right;
      } else {
        runs.push_back({left, right, state});
      }
    }
  }

  Evaluation& evaluation_;
  const Grid& grid_;
  const Interval b_, h_;
  std::vector<std::vector<Run>> rows_;
};

}  // namespace

TileRuns tile_runs(Evaluation& evaluation, const Grid& grid) {
  TileRuns all;
  all.indptr.push_back(0);
  for (const Interval b : grid.b) {
    for (const Interval h : grid.h) {
      const Refiner refiner(evaluation, grid, b, h);
      for (const std::vector<Run>& row : refiner.rows()) {
        for (const Run& run : row) {
          all.begin.push_back(run.begin);
          all.end.push_back(run.end);
          all.state.push_back(run.state);
        }
        all.indptr.push_back(static_cast<int64_t>(all.begin.size()));
      }
    }
  }
  return all;
}

}  // namespace fajit::form
