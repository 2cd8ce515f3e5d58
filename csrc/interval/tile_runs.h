// The non-empty tiles of a grid, as runs of neighbouring tiles of one state.
#pragma once

#include <vector>

#include "evaluation.h"

namespace fajit::form {

// Queries q_begin..q_end (exclusive) in tiles of tile_q, keys likewise; the last tiles end with the
// range. `b` and `h`: the intervals of the request and the head, a row of tiles for each pair.
struct Grid {
  int64_t q_begin, q_end, tile_q, kv_begin, kv_end, tile_kv;
  std::vector<Interval> b, h;

  int64_t q_tiles() const { return tiles(q_begin, q_end, tile_q); }
  int64_t kv_tiles() const { return tiles(kv_begin, kv_end, tile_kv); }
  static int64_t tiles(int64_t begin, int64_t end, int64_t tile) {
    return end <= begin ? 0 : (end - begin - 1) / tile + 1;
  }
};

// Row r, of (b, h, query tile) in that order, has the runs indptr[r]..indptr[r + 1]. Run i covers
// the key tiles begin[i]..end[i] (exclusive), which are all partial or all full.
struct TileRuns {
  std::vector<int64_t> indptr, begin, end;
  std::vector<uint8_t> state;
};

// Time and memory follow the border of the mask, not the number of tiles.
TileRuns tile_runs(Evaluation& evaluation, const Grid& grid);

}  // namespace fajit::form
