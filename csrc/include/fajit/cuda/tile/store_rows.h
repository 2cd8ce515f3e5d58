// Writes rows of a tile to global memory, each at any address, 16 bytes per lane.
#pragma once
#include <fajit/cuda/ptx/warp.h>
#include <fajit/cuda/tile/row_layout.h>

namespace fajit::cuda {

// One warp writes the first `count` of kRows rows of HeadDim 16-bit values, in a layout at
// `tile`. Lane r holds the address of row r, which is valid also for rows that
// do not exist. Called by all lanes; addresses and rows are multiples of 16 bytes.
template <int HeadDim, class Layout, int kRows>
FAJIT_DEV void store_rows(uint16_t* own, int count, const unsigned char* tile) {
  static_assert(HeadDim % 8 == 0 && kRows <= 32, "whole chunks; a lane holds one row's address");
  constexpr int kChunks = HeadDim / 8;
#pragma unroll 4
  for (int j = 0; j < kRows * kChunks; j += 32) {
    const int i = j + ptx::lane_index(), r = i / kChunks, chunk = i % kChunks;
    uint16_t* const row = ptx::pointer_from_lane(own, r < kRows ? r : 0);
    if (r < kRows && r < count)
      *reinterpret_cast<uint4*>(row + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile + Layout::offset(r, chunk));
  }
}

}  // namespace fajit::cuda
