// The layout of a tile's rows in shared memory for wgmma and TMA: panels of 64 columns, in which a
// row is a line of 128 bytes whose 16-byte chunks are swizzled, chunk ^ (row & 7).
#pragma once
#include <fajit/cuda/ptx/device.h>

namespace fajit::cuda {

constexpr int kPanelColumns = 64, kPanelRowBytes = 128;

// Rows of Dim 16-bit values in panels of kRows rows. A tile begins at a multiple of 1024 bytes, and
// a panel has a multiple of 8 rows.
template <int Dim, int kRows>
struct PanelLayout {
  static_assert(Dim % 8 == 0 && kRows % 8 == 0, "whole chunks, whole swizzle patterns");
  static constexpr int kDim = Dim;
  static constexpr bool kInParts = true;  // see `widen`
  static constexpr int kPanels = (Dim + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;

  // Byte offset of a chunk.
  static FAJIT_DEV uint32_t offset(int row, int chunk) {
    return chunk / 8 * kPanelBytes + row * kPanelRowBytes + ((chunk % 8 ^ (row & 7)) << 4);
  }
  // The address of (row + rows, chunk) from that of (row, chunk), for a constant `rows` that has no
  // bit in common with `row` modulo 8.
  static FAJIT_DEV uint32_t down(uint32_t address, int rows) {
    return (address ^ ((rows & 7) << 4)) + rows * kPanelRowBytes;
  }
  // Byte offset of one 16-bit element.
  static FAJIT_DEV uint32_t element(int row, int i) { return offset(row, i >> 3) + (i & 7) * 2; }
};

}  // namespace fajit::cuda
