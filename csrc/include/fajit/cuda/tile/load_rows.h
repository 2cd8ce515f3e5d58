// Copies rows from global memory, each at any address, to a tile in shared memory, 16 bytes per
// lane.
//
// One lane computes the address of a row and passes it to the lanes that copy it, so a table
// look-up for every row (pages of one key) costs a warp as little as pages of 64 keys.
#pragma once
#include <fajit/cuda/ptx/copy.h>
#include <fajit/cuda/ptx/warp.h>
#include <fajit/cuda/tile/element.h>
#include <fajit/cuda/tile/row_layout.h>

namespace fajit::cuda {

// 8 values of an unaligned row; those from `count` on are zero.
FAJIT_DEV uint4 gather_chunk(const uint16_t* from, int count) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = 2 * i < count ? from[2 * i] : 0;
    const uint32_t high = 2 * i + 1 < count ? from[2 * i + 1] : 0;
    words[i] = low | high << 16;
  }
  return uint4{words[0], words[1], words[2], words[3]};
}

// Rows at a constant stride: computing addresses is cheaper than shuffles. Addresses past the last
// row are computed but not read.
struct StridedRows {
  const uint16_t* first;
  int64_t stride;  // elements
  FAJIT_DEV const uint16_t* row(int r) const { return first + r * stride; }
};

// Rows at any addresses: lane r holds the address of row r, which is valid also for rows that do
// not exist.
struct HeldRows {
  const uint16_t* own;
  FAJIT_DEV const uint16_t* row(int r) const { return ptx::pointer_from_lane(own, r); }
};

// One warp loads kRows rows of HeadDim values, padded with zeros to Layout::kDim, into rows
// [first_row, first_row + kRows) of `tile`; those from `count` on are zeros. Called by all lanes.
// Where the architecture has asynchronous copies they belong to the caller's group, else they are
// complete on return.
template <int HeadDim, class Layout, int kRows, bool kAligned, class Rows, bool kReadOnce = false>
FAJIT_DEV void load_rows(unsigned char* tile, int first_row, int count, Rows rows,
                         [[maybe_unused]] ptx::L2Policy<kReadOnce> policy = {}) {
  constexpr int kChunks = Layout::kDim / 8;
  constexpr int kSteps = (kRows * kChunks + 31) / 32;
  constexpr bool kWhole = kRows * kChunks % 32 == 0;
  const int lane = ptx::lane_index();
  if constexpr (kAligned && ptx::kAsyncCopies) {
    const uint32_t to = ptx::shared_address(tile);
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const int i = lane + 32 * j, r = i / kChunks, chunk = i % kChunks;
      const uint16_t* from = rows.row(kWhole || r < kRows ? r : 0);
      if (!kWhole && r >= kRows) continue;
      const bool inside = r < count && (Layout::kDim == HeadDim || chunk * 8 < HeadDim);
      ptx::copy_async(to + Layout::offset(first_row + r, chunk), from + (inside ? chunk * 8 : 0),
                      inside ? 16 : 0, policy);
    }
  } else {
    // Through registers, with a few loads in flight at a time. A loop over rows of more than 256
    // values is not unrolled: on sm_80 and sm_90 kernels of such rows needed 20 to 30 registers
    // more, and tiles of 32 rows spilled (nvcc 13.0).
    constexpr int kBatch = 4, kUnrolled = kChunks > 32 ? 1 : kSteps;
#pragma unroll kUnrolled
    for (int j0 = 0; j0 < kSteps; j0 += kBatch) {
      uint4 held[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = lane + 32 * (j0 + j), r = i / kChunks, chunk = i % kChunks;
        const uint16_t* from = rows.row(r < kRows ? r : 0);
        held[j] = uint4{0, 0, 0, 0};
        if (r >= kRows || r >= count) continue;
        if constexpr (kAligned) {
          if (chunk * 8 < HeadDim) held[j] = *reinterpret_cast<const uint4*>(from + chunk * 8);
        } else {
          held[j] = gather_chunk(from + chunk * 8, HeadDim - chunk * 8);
        }
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = lane + 32 * (j0 + j), r = i / kChunks, chunk = i % kChunks;
        if (r < kRows)
          *reinterpret_cast<uint4*>(tile + Layout::offset(first_row + r, chunk)) = held[j];
      }
    }
  }
}

// load_rows for aligned strided rows whose chunks divide a warp, with a `first_row` that is a
// multiple of 8. Every step advances all lanes by the same number of rows, so one address is kept
// and incremented. If each row's address were computed separately, the compiler would keep the
// addresses of all steps in registers across the loop over the keys.
template <int HeadDim, class Layout, int kRows, bool kReadOnce>
FAJIT_DEV void load_strided_rows(unsigned char* tile, int first_row, int count, StridedRows rows,
                                 ptx::L2Policy<kReadOnce> policy) {
  constexpr int kChunks = Layout::kDim / 8, kStep = 32 / kChunks;
  static_assert(32 % kChunks == 0 && kRows % kStep == 0, "whole steps");
  const int r = ptx::lane_index() / kChunks, chunk = ptx::lane_index() % kChunks;
  const uint32_t to =
      compute_here(ptx::shared_address(tile) + Layout::offset(first_row + r, chunk));
  const uint16_t* from = rows.row(r) + chunk * 8;
#pragma unroll
  for (int j = 0; j < kRows; j += kStep) {
    const bool inside = r + j < count && (Layout::kDim == HeadDim || chunk * 8 < HeadDim);
    ptx::copy_async(Layout::down(to, j), from, inside ? 16 : 0, policy);
    from += kStep * rows.stride;
  }
}

}  // namespace fajit::cuda
