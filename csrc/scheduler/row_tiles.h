// Tiles of query rows with the keys that they visit: what is dealt out to ranks of several machines.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "batch_plan.h"

namespace fajit::scheduler {

// Query rows [row_begin, row_end) of a request, and the keys of their `Extent` (extents.h). Results
// depend on the lengths and the mask alone, not on the machine that computes them.
struct RowTile {
  int32_t request, row_begin, row_end;
  int32_t kv_begin, kv_end;
  int32_t base, cell;
  int32_t visited;  // keys
  uint64_t cells;
};
static_assert(sizeof(RowTile) == 40, "read by numpy");

// Tiles of at most `tile_q` rows of each request, in order. `module`: evaluates the mask where
// options.classify is set. `num_q_heads`: of the call, all of which a tile covers. Throws
// std::invalid_argument unless the tiles are positive and the lengths without groups.
std::vector<RowTile> make_row_tiles(const Lengths& lengths, const runtime::Module* module,
                                    const PlanOptions& options, const fajit_args& mask_args,
                                    int32_t tile_q, int32_t tile_kv);

}  // namespace fajit::scheduler
