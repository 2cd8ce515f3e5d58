// The keys that rows can see: the hull proven by the mask's interval form, found with few
// evaluations.
#pragma once

#include <fajit/abi.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "batch_plan.h"

namespace fajit::scheduler {

// Keys [begin, end), or positions of key lists. With cell > 0 only the cells whose bit is set are
// visited: bit i is for keys [base + i * cell, base + (i + 1) * cell).
struct Extent {
  int32_t begin = 0, end = 0;
  int32_t base = 0, cell = 0;
  uint64_t cells = 0;

  bool empty() const { return end <= begin; }
  // Clipped to the largest int32, because the last cell may end beyond it.
  int32_t end_of_cell(int32_t i) const {
    return static_cast<int32_t>(
        std::min<int64_t>(base + (int64_t{i} + 1) * cell, std::numeric_limits<int32_t>::max()));
  }
  // The number of visited keys in [from, to), which must be inside the extent.
  int64_t visited(int32_t from, int32_t to) const {
    return cell == 0 ? to - from : visited_cells(from, to);
  }
  int64_t visited_cells(int32_t from, int32_t to) const;
  // The largest end such that [from, end) visits at most `keys`.
  int32_t reach(int32_t from, int64_t keys) const;
};

// Evaluates the interval form of one plan's mask. Results depend only on the rows and their
// request; guesses from earlier rows only shorten the search.
class MaskExtents {
 public:
  // `module`: null if the mask is not evaluated. `args`: lengths and params.
  MaskExtents(const runtime::Module* module, const fajit_args& args, const PlanOptions& options,
              int64_t num_tiles);

  // The keys of [begin, end) that queries first..last (q_idx) of a request or group visit. Borders
  // are multiples of tile_kv, or `begin` and `end`. An empty extent is [begin, begin).
  Extent of(int32_t entity, int32_t first, int32_t last, int32_t begin, int32_t end,
            int32_t tile_kv);

 private:
  struct Known {
    int32_t first = 0, last = -1, begin = 0, end = 0, tile_kv = 0;  // tile_kv: borders depend on it
    Extent extent;
  };

  bool is_empty(int32_t from, int32_t to);
  Extent search(int32_t begin, int32_t end, int32_t tile_kv);
  Extent by_cells(int32_t begin, int32_t end, int32_t tile_kv);

  const runtime::Module* module_;
  fajit_classify_args call_{};
  bool contiguous_, reads_request_, failed_ = false;
  int32_t num_requests_;
  int32_t most_cells_;
  // Result of the last search relative to its first and last query: the same for a mask of
  // distances.
  int64_t low_from_first_ = 0, high_from_last_ = 0;
  bool low_at_begin_ = true, high_at_end_ = true;
  // The longest run of empty cells of earlier rows, which ends before their first query.
  int64_t gap_begin_ = std::numeric_limits<int32_t>::max();
  int64_t gap_to_query_ = std::numeric_limits<int32_t>::min();
  std::vector<Known> known_;
};

}  // namespace fajit::scheduler
