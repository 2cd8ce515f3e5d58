// The shapes and lengths of one call, before planning.
#pragma once

#include <fajit/abi.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "params.h"

namespace fajit::runtime {

// Blocks that the states of a block mask cover; checked against the work of a call.
struct BlockMaskLayout {
  std::array<int64_t, 4> sizes{};
  std::array<int64_t, 4> strides{};
  int32_t q_block = 0, kv_block = 0;
};

// Immutable once built. Everything that comes from Python is copied and checked, so that an
// argument block filled from it reads inside its own arrays.
class Problem {
 public:
  Problem(int32_t num_requests, int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim,
          int32_t head_dim_v, pybind11::handle q_len, pybind11::handle kv_len,
          pybind11::handle q_row0, pybind11::handle kv_row0, pybind11::handle q_offset,
          pybind11::handle q_token0, pybind11::handle kv_token0, pybind11::handle q_stride,
          pybind11::handle k_stride, pybind11::handle v_stride, pybind11::handle out_stride,
          pybind11::handle lse_stride, pybind11::handle tensors, const std::string& scalar_kinds,
          pybind11::handle block_mask, pybind11::handle page_indptr, int32_t page_size,
          int32_t num_pages, pybind11::handle row_request);

  // Every field but the addresses, the scalars, the work and the flags.
  const fajit_args& args() const { return args_; }
  const ParamLayouts& params() const { return params_; }
  const BlockMaskLayout* block_mask() const { return has_block_mask_ ? &block_mask_ : nullptr; }
  bool is_paged() const { return args_.page_indptr != nullptr; }
  // Requests of the packed tokens, where an item's rows may be of several; else none.
  const std::vector<int32_t>& row_request() const { return row_request_; }

 private:
  void read_pages(pybind11::handle page_indptr);
  void read_row_requests(pybind11::handle row_request);

  fajit_args args_{};
  std::vector<int32_t> per_request_;  // q_len, kv_len, q_row0, kv_row0, q_offset, q_, kv_token0
  std::vector<int32_t> page_indptr_, row_request_;
  ParamLayouts params_;
  BlockMaskLayout block_mask_;
  bool has_block_mask_ = false;
};

}  // namespace fajit::runtime
