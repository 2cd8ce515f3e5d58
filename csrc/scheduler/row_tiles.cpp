#include "row_tiles.h"

#include <algorithm>

#include "extents.h"
#include "rounding.h"

namespace fajit::scheduler {
namespace {

// Tiles of a mask without contiguous rows that may have 64 cells each; more tiles have fewer cells.
// MaskExtents divides the cells of a plan among the tiles that it is told of, 64 to each of 128.
constexpr int64_t kTilesOfManyCells = 1024;
constexpr int64_t kToldOfManyCells = 128;

}  // namespace

std::vector<RowTile> make_row_tiles(const Lengths& lengths, const runtime::Module* module,
                                    const PlanOptions& options, const fajit_args& mask_args,
                                    int32_t tile_q, int32_t tile_kv) {
  if (tile_q < 1 || tile_kv < 1) fail("tile_q and tile_kv of row tiles must be positive");
  if (lengths.num_groups > 0) fail("row tiles have no levels of shared keys");
  fajit_args args = mask_args;
  args.num_requests = lengths.num_requests;
  args.num_q_heads = options.num_q_heads;
  args.num_kv_heads = options.num_kv_heads;
  args.head_dim_v = options.head_dim_v;
  lengths.fill(args);
  int64_t count = 0;
  for (const int32_t rows : lengths.q_len) count += ceil_div(rows, tile_q);
  const int64_t told = std::max<int64_t>(count / kTilesOfManyCells * kToldOfManyCells - 1, 0);
  MaskExtents extents(options.classify ? module : nullptr, args, options, told);
  std::vector<RowTile> tiles;
  tiles.reserve(static_cast<size_t>(count));
  for (int32_t b = 0; b < lengths.num_requests; ++b) {
    const size_t at = static_cast<size_t>(b);
    const int32_t rows = lengths.q_len[at], offset = lengths.q_offset[at];
    for (int32_t row = 0; row < rows; row += tile_q) {
      const int32_t end = static_cast<int32_t>(std::min<int64_t>(int64_t{row} + tile_q, rows));
      const Extent e = extents.of(b, offset + row, offset + end - 1, 0, lengths.kv_len[at], tile_kv);
      const int64_t visited = e.empty() ? 0 : e.visited(e.begin, e.end);
      tiles.push_back({b, row, end, e.begin, e.end, e.base, e.cell, static_cast<int32_t>(visited),
                       e.cells});
      if (end == rows) break;
    }
  }
  return tiles;
}

}  // namespace fajit::scheduler
