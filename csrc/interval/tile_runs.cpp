#include <algorithm>

#include "evaluation.h"

namespace fajit::form {
namespace {

constexpr int64_t kCuts = 8;  // parts per side

struct Run {
  int64_t begin, end;
  uint8_t state;
};

// The tiles of one request and head. A partial square of tiles is divided into 8 x 8 smaller ones;
// an empty or full one is not. So time and memory grow with the border of the mask, not with the
// number of tiles.
struct Refiner {
  Evaluation& evaluation;
  const Axis &q, &k;
  const Interval b, h;
  std::vector<std::vector<Run>> rows;  // of query tiles

  // Processes `span` x `span` tiles from (row, column) on. Columns of a row are visited in order.
  void refine(int64_t row, int64_t column, int64_t span) {
    const int64_t step = span / kCuts, last_row = std::min(row + span, q.tiles()),
                  last_column = std::min(column + span, k.tiles());
    for (int64_t top = row; top < last_row; top += step) {
      for (int64_t left = column; left < last_column; left += step) {
        const int state =
            evaluation.classify({b, h, positions(q, top, step), positions(k, left, step)});
        if (state == FAJIT_TILE_PARTIAL && step > 1) {
          refine(top, left, step);
        } else if (state != FAJIT_TILE_EMPTY) {
          const int64_t bottom = std::min(top + step, last_row);
          for (int64_t r = top; r < bottom; ++r) {
            add(rows[static_cast<size_t>(r)],
                {left, std::min(left + step, last_column), static_cast<uint8_t>(state)});
          }
        }
      }
    }
  }

  static Interval positions(const Axis& axis, int64_t from, int64_t tiles) {
    const int64_t lo = axis.begin + from * axis.tile;
    return {lo, std::min(lo + tiles * axis.tile, axis.end) - 1};
  }

  static void add(std::vector<Run>& runs, const Run& run) {
    const bool joins =
        !runs.empty() && runs.back().end == run.begin && runs.back().state == run.state;
    if (joins) runs.back().end = run.end;
    else runs.push_back(run);
  }
};

}  // namespace

TileRuns tile_runs(Evaluation& evaluation, const Axis& q, const Axis& k,
                   const std::vector<Interval>& b, const std::vector<Interval>& h) {
  int64_t span = kCuts;
  while (span < std::max(q.tiles(), k.tiles())) span *= kCuts;
  TileRuns all;
  all.indptr.push_back(0);
  for (size_t i = 0; i < b.size() * h.size(); ++i) {
    Refiner refiner{evaluation, q, k, b[i / h.size()], h[i % h.size()], {}};
    refiner.rows.resize(static_cast<size_t>(q.tiles()));
    refiner.refine(0, 0, span);
    for (const std::vector<Run>& row : refiner.rows) {
      for (const Run& run : row) {
        all.begin.push_back(run.begin);
        all.end.push_back(run.end);
        all.state.push_back(run.state);
      }
      all.indptr.push_back(static_cast<int64_t>(all.begin.size()));
    }
  }
  return all;
}

}  // namespace fajit::form
