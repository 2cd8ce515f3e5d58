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

// s[m][n] += Q K^T of the columns of `chunks` chunks from `first` on, for kM blocks of 16 rows at
// `q_lane` and kN blocks of 8 keys at `k_lane`: shared memory addresses of the lane.
template <class Element, class Layout, int kM, int kN>
FAJIT_DEV void add_scores(float (&s)[kM][kN][4], uint32_t q_lane, uint32_t k_lane, int first,
                          int chunks) {
#pragma unroll
  for (int chunk = first; chunk < first + chunks; chunk += 2) {
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

template <int kM, int kN>
FAJIT_DEV void clear(float (&s)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
}

// The factors of a lane's two keys of block n: entries of a row of factors in shared memory.
FAJIT_DEV float2 factors_of(const float* row, int n) {
  return *reinterpret_cast<const float2*>(row + n * 8 + ptx::lane_index() % 4 * 2);
}

// s[m][n] = Q K^T for kM blocks of 16 rows at `q` and kN blocks of 8 keys at `k`: shared memory
// addresses of the tiles' first rows. kGroups: groups of columns whose part of a score is
// multiplied by factors[group][key]; 0: none.
template <class Element, class Layout, int kGroups = 0, int kM, int kN>
FAJIT_DEV void multiply_scores(float (&s)[kM][kN][4], uint32_t q, uint32_t k,
                               [[maybe_unused]] const float* factors = nullptr) {
  const int lane = ptx::lane_index();
  const uint32_t q_lane = compute_here(q + Layout::offset(block_row(lane), block_chunk(lane)));
  const uint32_t k_lane = compute_here(k + Layout::offset(pair_row(lane), pair_chunk(lane)));
  constexpr int kChunks = Layout::kDim / 8, kParts = kGroups > 0 ? kGroups : 1;
  clear(s);
  if constexpr (kGroups <= 1) add_scores<Element, Layout>(s, q_lane, k_lane, 0, kChunks);
  if constexpr (kGroups == 0) return;
#pragma unroll
  for (int g = 0; g < kParts; ++g) {
    float part[kM][kN][4];
    if constexpr (kGroups > 1) {
      clear(part);
      add_scores<Element, Layout>(part, q_lane, k_lane, g * kChunks / kParts, kChunks / kParts);
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 factor = factors_of(factors + g * kN * 8, n);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float own = i % 2 == 0 ? factor.x : factor.y;
          s[m][n][i] = kGroups > 1 ? fmaf(part[m][n][i], own, s[m][n][i]) : s[m][n][i] * own;
        }
    }
  }
}

// s = Q K^T of 16 rows at `q` and 8 keys at `k`, with the even and the odd steps of 16 columns in
// accumulators of their own: in one, each product would wait for the one before it.
template <class Element, class Layout>
FAJIT_DEV void multiply_narrow_scores(float (&s)[4], uint32_t q, uint32_t k) {
  const int lane = ptx::lane_index();
  const uint32_t q_lane = compute_here(q + Layout::offset(block_row(lane), block_chunk(lane)));
  const uint32_t k_lane = compute_here(k + Layout::offset(lane & 7, lane >> 3));  // of 4 chunks
  constexpr int kChunks = Layout::kDim / 8, kWhole = kChunks / 4 * 4;
  float odd[4] = {};
  s[0] = s[1] = s[2] = s[3] = 0.0f;
#pragma unroll
  for (int chunk = 0; chunk < kWhole; chunk += 4) {
    uint32_t a[4], b[4];
    ptx::load_matrices(b, Layout::step(k_lane, chunk));
    ptx::load_matrices(a, Layout::step(q_lane, chunk));
    ptx::multiply_add<Element>(s, a, b[0], b[1]);
    ptx::load_matrices(a, Layout::step(q_lane, chunk + 2));
    ptx::multiply_add<Element>(odd, a, b[2], b[3]);
  }
  if constexpr (kWhole < kChunks) {
    uint32_t a[4], b[4];
    ptx::load_matrices(a, Layout::step(q_lane, kWhole));
    ptx::load_matrices(b, k + Layout::offset(lane & 7, kWhole + (lane >> 3 & 1)));
    ptx::multiply_add<Element>(s, a, b[0], b[1]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] += odd[i];
}

// o[m][n] += P V: P is s rounded to Element; the rows of `v` are kN blocks of 8 keys. The packed
// accumulators of two adjacent blocks of keys are one A operand. kGroups: groups of columns for
// which P is multiplied by factors[group][key] first; 0: none.
template <class Element, class Layout, int kGroups = 0, int kM, int kN>
FAJIT_DEV void multiply_values(float (&o)[kM][Layout::kDim / 8][4], const float (&s)[kM][kN][4],
                               uint32_t v, [[maybe_unused]] const float* factors = nullptr) {
  const int lane = ptx::lane_index();
  const uint32_t v_lane = compute_here(v + Layout::offset(block_row(lane), block_chunk(lane)));
  constexpr int kParts = kGroups > 0 ? kGroups : 1, kBlocks = Layout::kDim / 8 / kParts;
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
#pragma unroll
    for (int g = 0; g < kParts; ++g) {
      float2 low{1.0f, 1.0f}, high{1.0f, 1.0f};
      if constexpr (kGroups > 0) {
        low = factors_of(factors + g * kN * 8, n);
        high = factors_of(factors + g * kN * 8, n + 1);
      }
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if constexpr (kGroups > 0) {
          a[m][0] = Element::pack(s[m][n][0] * low.x, s[m][n][1] * low.y);
          a[m][1] = Element::pack(s[m][n][2] * low.x, s[m][n][3] * low.y);
          a[m][2] = Element::pack(s[m][n + 1][0] * high.x, s[m][n + 1][1] * high.y);
          a[m][3] = Element::pack(s[m][n + 1][2] * high.x, s[m][n + 1][3] * high.y);
        } else {
          a[m][0] = Element::pack(s[m][n][0], s[m][n][1]);
          a[m][1] = Element::pack(s[m][n][2], s[m][n][3]);
          a[m][2] = Element::pack(s[m][n + 1][0], s[m][n + 1][1]);
          a[m][3] = Element::pack(s[m][n + 1][2], s[m][n + 1][3]);
        }
      }
#pragma unroll
      for (int d = g * kBlocks; d < (g + 1) * kBlocks; d += 2) {
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
}

}  // namespace fajit::cuda
