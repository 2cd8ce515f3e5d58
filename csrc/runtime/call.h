// One planned call: a problem, the module that computes it, and who does which part of the work.
#pragma once

#include <fajit/abi.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "launch_values.h"
#include "launches.h"
#include "module.h"
#include "plan_block.h"
#include "problem.h"

namespace fajit::runtime {

// Immutable once built, so any number of threads may launch it at once. A steady call passes only
// addresses and values; everything that could make a kernel read or write outside its tensors
// (requests, heads, rows, key ranges, partial rows, pages of a request) was checked when it was
// built.
//
// A CUDA artifact reads the plan (per-request arrays, work) from device memory: `device_block()`
// gives it as bytes, which the caller puts there once; launches are told where.
class Call {
 public:
  Call(std::shared_ptr<const Module> module, std::shared_ptr<const Problem> problem,
       const pybind11::buffer& work, const pybind11::buffer& merge_work, int64_t partial_rows,
       int32_t flags);

  // Bytes that `launch(workspace=)` must provide: partial_out [partial_rows, head_dim_v] and, from
  // the next multiple of 64, partial_lse [partial_rows], fp32. 0 when no row is split.
  int64_t workspace_bytes() const { return accesses_.workspace.bytes; }

  // What `launch(device_block=)` must hold, its sections at multiples of 16 bytes.
  pybind11::bytes device_block() const;

  // Runs `attention`, then `merge` where rows are split, with the GIL released. CUDA artifacts are
  // enqueued on `stream` of `device`: nothing is read, allocated or waited for. Throws LaunchError.
  void launch(const LaunchValues& values) const;

  // The same launches as data, for the emulator: see Launches::as_data.
  pybind11::list plan_launches(const LaunchValues& values) const;

 private:
  PlanSizes sizes() const;
  void fill(const LaunchValues& values, const Params& params, fajit_args& args) const;
  Launches launches(const fajit_args& args) const;

  std::shared_ptr<const Module> module_;
  std::shared_ptr<const Problem> problem_;
  std::vector<fajit_work> work_;
  std::vector<fajit_merge_work> merge_work_;
  fajit_args args_;
  PlanBlock block_;
  Accesses accesses_;
};

// States of a grid of tiles into `states`, a writable uint8 buffer: see fajit_classify_args.
void classify(const Module& module, const Problem& problem, int32_t request, int32_t head_begin,
              int32_t head_end, int32_t q_begin, int32_t q_end, int32_t tile_q, int32_t kv_begin,
              int32_t kv_end, int32_t tile_kv, const pybind11::buffer& states,
              pybind11::handle tensors, pybind11::handle scalars);

}  // namespace fajit::runtime
