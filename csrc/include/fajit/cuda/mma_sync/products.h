// The two products of a tile, from shared memory and registers. See ptx/matrix.h for the layouts.
#pragma once
#include <fajit/cuda/ptx/matrix.h>
#include <fajit/cuda/ptx/warp.h>
#include <fajit/cuda/tile/element.h>
#include <fajit/cuda/tile/row_layout.h>

namespace fajit::cuda {

// Row and chunk of a lane for ldmatrix.x4 of a 16 x 16 block: A operands, and transposed B
// operands.
FAJIT_DEV int block_row(int lane) { return lane & 15; }
FAJIT_DEV int block_chunk(int lane) { return lane >> 4; }
// Row and chunk of a lane for two B operands of 8 columns each, stored as rows: matrices 0 and 1
// are the k halves of columns 0-7, matrices 2 and 3 those of columns 8-15.
FAJIT_DEV int pair_row(int lane) { return (lane & 7) | (lane >> 1 & 8); }
FAJIT_DEV int pair_chunk(int lane) { return lane >> 3 & 1; }

// s[m][n] = Q K^T for kM blocks of 16 rows at `q` and kN blocks of 8 keys at `k`: shared memory
// addresses of the tiles' first rows.
template <class Element, class Layout, int kM, int kN>
FAJIT_DEV void multiply_scores(float (&s)[kM][kN][4], uint32_t q, uint32_t k) {
  const int lane = ptx::lane_index();
  const uint32_t q_lane = compute_here(q + Layout::offset(block_row(lane), block_chunk(lane)));
  const uint32_t k_lane = compute_here(k + Layout::offset(pair_row(lane), pair_chunk(lane)));
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
#pragma unroll
  for (int chunk = 0; chunk < Layout::kDim / 8; chunk += 2) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
      ptx::load_matrices(a[m], Layout::step(q_lane, chunk) + m * 16 * Layout::kRowBytes);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ptx::load_matrices(b, Layout::step(k_lane, chunk) + n * 8 * Layout::kRowBytes);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::multiply_add<Element>(s[m][n], a[m], b[0], b[1]);
        ptx::multiply_add<Element>(s[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// o[m][n] += P V: P is s rounded to Element; the rows of `v` are kN blocks of 8 keys. The packed
// accumulators of two adjacent blocks of keys are one A operand.
template <class Element, class Layout, int kM, int kN>
FAJIT_DEV void multiply_values(float (&o)[kM][Layout::kDim / 8][4], const float (&s)[kM][kN][4],
                               uint32_t v) {
  const int lane = ptx::lane_index();
  const uint32_t v_lane = compute_here(v + Layout::offset(block_row(lane), block_chunk(lane)));
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      a[m][0] = Element::pack(s[m][n][0], s[m][n][1]);
      a[m][1] = Element::pack(s[m][n][2], s[m][n][3]);
      a[m][2] = Element::pack(s[m][n + 1][0], s[m][n + 1][1]);
      a[m][3] = Element::pack(s[m][n + 1][2], s[m][n + 1][3]);
    }
#pragma unroll
    for (int d = 0; d < Layout::kDim / 8; d += 2) {
      uint32_t b[4];
      ptx::load_matrices_transposed(b, Layout::step(v_lane, d) + n * 8 * Layout::kRowBytes);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::multiply_add<Element>(o[m][d], a[m], b[0], b[1]);
        ptx::multiply_add<Element>(o[m][d + 1], a[m], b[2], b[3]);
      }
    }
  }
}

}  // namespace fajit::cuda
