// A row in shared memory, as passed to row hooks: `row[i]` reads, `row.write(i, x)` rounds and
// stores.
#pragma once
#include <fajit/cuda/tile/element.h>
#include <fajit/cuda/tile/row_layout.h>

namespace fajit::cuda {

// Row `row` of a tile of 16-bit rows.
template <class Element, int Dim>
struct TileRow {
  unsigned char* tile;
  int row;

  FAJIT_DEV float operator[](int i) const {
    return Element::to_float(
        *reinterpret_cast<const uint16_t*>(tile + RowLayout<Dim>::element(row, i)));
  }
  FAJIT_DEV void write(int i, float x) const {
    *reinterpret_cast<uint16_t*>(tile + RowLayout<Dim>::element(row, i)) = round_to<Element>(x);
  }
};

// Multiplies rows of a tile by a factor. Called by all lanes of a warp.
template <class Element, int Dim>
FAJIT_DEV void multiply_rows(unsigned char* tile, int first_row, int rows, float factor) {
#pragma unroll 1
  for (int i = ptx::lane_index(); i < rows * Dim; i += 32) {
    const TileRow<Element, Dim> row{tile, first_row + i / Dim};
    row.write(i % Dim, row[i % Dim] * factor);
  }
}

// A row of contiguous floats.
struct FloatRow {
  float* values;

  FAJIT_DEV float operator[](int i) const { return values[i]; }
  FAJIT_DEV void write(int i, float x) const { values[i] = x; }
};

}  // namespace fajit::cuda
