// A planned batch, bound to strides of tensors: prefill work, few-row work, then the merge.
#pragma once

#include <fajit/abi.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "launch/batch_work.h"
#include "launch/launch_values.h"
#include "launch/launches.h"
#include "module.h"

namespace fajit::runtime {

// Immutable, so any number of threads may launch it at once. On CPUs one team of any number of
// threads processes the lists of both kinds. On CUDA a thread block processes a list; launches are
// enqueued on one stream, and nothing is read, allocated or synchronised.
class BatchCall {
 public:
  using Modules = std::array<std::shared_ptr<const Module>, 2>;

  // The modules of prefill and few-row work; null where the plan has no such work. With limits, a
  // module is launched whether or not this plan has work for it.
  BatchCall(std::shared_ptr<const scheduler::BatchPlan> plan,
            std::shared_ptr<const scheduler::Lengths> lengths, Modules modules,
            const BatchShape& shape);

  // A copy with strides (of q, k, v, out, lse; each of request, head, row, or with pages of page,
  // head, slot; in elements), params, flags and a block mask (sizes, strides, q_block, kv_block; or
  // None). kv_requests, kv_rows: extents of k and v as in fajit_args; with pages they follow from
  // num_pages and the page size.
  std::shared_ptr<BatchCall> bind(pybind11::handle strides, pybind11::handle layouts,
                                  const std::string& scalar_kinds, int32_t num_pages, int32_t flags,
                                  pybind11::handle block_mask, int32_t kv_requests,
                                  int32_t kv_rows) const;

  const BatchWork& work() const { return *work_; }
  bool is_cuda() const;

  // Runs with the GIL released on CPUs, or enqueues on a CUDA stream. Throws LaunchError.
  void launch(const LaunchValues& values) const;
  // The launches of `launch` as data: see Launches::as_data.
  pybind11::list plan_launches(const LaunchValues& values) const;

 private:
  struct OnDevice {  // argument blocks and the launches that read them
    fajit_args shared, of_kind[2];
    Launches launches;
  };
  void fill_on_device(const LaunchValues& values, const Params& params, OnDevice& on) const;
  void launch_on_cpu(const fajit_args& args) const;
  const std::shared_ptr<const Module>& merger() const {
    return modules_[0] ? modules_[0] : modules_[1];
  }

  std::shared_ptr<const BatchWork> work_;
  Modules modules_;
  ParamLayouts params_;
  Accesses accesses_;
  fajit_args args_{};
};

}  // namespace fajit::runtime
