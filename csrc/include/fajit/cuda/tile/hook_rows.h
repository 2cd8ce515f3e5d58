// A row in shared memory, as passed to row hooks: `row[i]` reads, `row.write(i, x)` rounds and
// stores.
#pragma once
#include <fajit/cuda/ptx/warp.h>
#include <fajit/cuda/tile/element.h>
#include <fajit/cuda/tile/row_layout.h>

namespace fajit::cuda {

// Row `row` of a tile of 16-bit rows.
template <class Element, class Layout>
struct TileRow {
  unsigned char* tile;
  int row;

  FAJIT_DEV float operator[](int i) const {
    return Element::to_float(*reinterpret_cast<const uint16_t*>(tile + Layout::element(row, i)));
  }
  FAJIT_DEV void write(int i, float x) const {
    *reinterpret_cast<uint16_t*>(tile + Layout::element(row, i)) = round_to<Element>(x);
  }
};

// Multiplies rows of a tile by a factor. Called by all lanes of a warp.
template <class Element, class Layout>
FAJIT_DEV void multiply_rows(unsigned char* tile, int first_row, int rows, float factor) {
  constexpr int kDim = Layout::kDim;
#pragma unroll 1
  for (int i = ptx::lane_index(); i < rows * kDim; i += 32) {
    const TileRow<Element, Layout> row{tile, first_row + i / kDim};
    row.write(i % kDim, row[i % kDim] * factor);
  }
}

// A row of contiguous floats.
struct FloatRow {
  float* values;

  FAJIT_DEV float operator[](int i) const { return values[i]; }
  FAJIT_DEV void write(int i, float x) const { values[i] = x; }
};

}  // namespace fajit::cuda
