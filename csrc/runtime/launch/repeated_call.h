// A call that is made again, with other tensors of the same layouts.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "launch/batch_call.h"

namespace fajit::runtime {

// A bound call on the host, and the layouts that it was bound to. Immutable, so any number of
// threads may launch it at once.
//
// Tensors are read by the C functions that torch has for DLPack (see dlpack.h); where it has none,
// no tensor fits.
class RepeatedCall {
 public:
  enum { kQ, kK, kV, kOut, kLse, kTensors };
  using Tensors = std::array<pybind11::handle, kTensors>;

  // layouts: of q, k, v, out and lse, each (shape, strides, a tensor of the dtype), or None for a
  // call without lse. param_bytes: extents of the user's params.
  RepeatedCall(std::shared_ptr<const BatchCall> call, pybind11::handle layouts,
               std::vector<int64_t> param_bytes);

  // Whether all are plain tensors in host memory with these layouts. out and lse may be None, if
  // the caller has yet to make them.
  bool fits(const Tensors& tensors) const;

  // Launches and returns true. Compares again what fits() may have compared: another thread can
  // rebind a tensor in between. Returns false, having done nothing, if a tensor does not fit, has
  // entries but no memory, or if out or lse shares memory with another tensor. values: scale,
  // threads, params and addresses besides those of the tensors.
  bool launch(const Tensors& tensors, LaunchValues values) const;

 private:
  struct Layout {
    int32_t ndim = -1;  // none
    uint32_t dtype = 0;
    int64_t bytes = 0;  // from the first entry to the end of the last one
    int64_t shape[4] = {}, strides[4] = {};
  };
  bool fits(int i, pybind11::handle tensor, char*& data) const;

  std::shared_ptr<const BatchCall> call_;
  std::array<Layout, kTensors> layouts_;
  std::vector<int64_t> param_bytes_;
  bool readable_ = true;
};

}  // namespace fajit::runtime
