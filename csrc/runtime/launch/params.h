// A variant's params: their layouts, and their values for one launch.
#pragma once

#include <fajit/abi.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fajit::runtime {

// Sizes and strides of the param tensors in slot order, and the scalars' kinds. Immutable.
class ParamLayouts {
 public:
  ParamLayouts() = default;
  // `tensors`: (sizes, strides) each; `scalar_kinds`: 'i' (int64) or 'f' (float64) each.
  ParamLayouts(pybind11::handle tensors, std::string scalar_kinds);

  const std::vector<fajit_tensor>& tensors() const { return tensors_; }
  const std::string& scalar_kinds() const { return scalar_kinds_; }
  void fill_counts(fajit_args& args) const;

 private:
  std::vector<fajit_tensor> tensors_;
  std::string scalar_kinds_;
};

// The values of a variant's params for one call, which `fajit_args::tensors` and `::scalars` point
// to.
class Params {
 public:
  // Throws if the counts differ from the layouts', or a tensor with entries has address 0.
  Params(const ParamLayouts& layouts, pybind11::handle addresses, pybind11::handle scalars);
  Params(const Params&) = delete;
  Params& operator=(const Params&) = delete;

  void fill(fajit_args& args) const {
    args.tensors = tensors_.data();
    args.scalars = scalars_.data();
  }

 private:
  std::vector<fajit_tensor> tensors_;
  std::vector<uint64_t> scalars_;
};

}  // namespace fajit::runtime
