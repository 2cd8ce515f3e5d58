// One planned call: a problem, the module that computes it, and who does which part of the work.
#pragma once

#include <fajit/abi.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "module.h"
#include "problem.h"

namespace fajit::runtime {

// Immutable once built, so any number of threads may launch it at once. A steady call passes only
// addresses and values; everything that could make a kernel read or write outside its tensors
// (requests, heads, rows, key ranges, partial rows) was checked when it was built.
class Call {
 public:
  Call(std::shared_ptr<const Module> module, std::shared_ptr<const Problem> problem,
       const pybind11::buffer& work, const pybind11::buffer& merge_work, int64_t partial_rows,
       int32_t flags);

  // Bytes that `launch(workspace=)` must provide: partial_out [partial_rows, head_dim_v] and, from
  // the next multiple of 64, partial_lse [partial_rows], fp32. 0 when no row is split.
  int64_t workspace_bytes() const { return workspace_bytes_; }

  // Runs `attention`, then `merge` where rows are split, with the GIL released.
  void launch(pybind11::handle q, pybind11::handle k, pybind11::handle v, pybind11::handle out,
              pybind11::handle lse, double scale, int num_threads, pybind11::handle tensors,
              pybind11::handle scalars, pybind11::handle states, pybind11::handle workspace) const;

 private:
  std::shared_ptr<const Module> module_;
  std::shared_ptr<const Problem> problem_;
  std::vector<fajit_work> work_;
  std::vector<fajit_merge_work> merge_work_;
  fajit_args args_;
  int64_t partial_out_bytes_ = 0;
  int64_t workspace_bytes_ = 0;
  bool reads_queries_ = false, reads_keys_ = false, writes_out_ = false;
};

// States of a grid of tiles into `states`, a writable uint8 buffer: see fajit_classify_args.
void classify(const Module& module, const Problem& problem, int32_t request, int32_t head_begin,
              int32_t head_end, int32_t q_begin, int32_t q_end, int32_t tile_q, int32_t kv_begin,
              int32_t kv_end, int32_t tile_kv, const pybind11::buffer& states,
              pybind11::handle tensors, pybind11::handle scalars);

}  // namespace fajit::runtime
