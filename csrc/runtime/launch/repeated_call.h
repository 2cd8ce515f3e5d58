// A call that is made again, with other tensors of the same layouts.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "launch/batch_call.h"

namespace fajit::runtime {

// A bound call on the host, and the layouts of the tensors that it was bound for. Immutable, so any
// number of threads may launch it at once.
//
// Tensors are read through the C functions that torch has for DLPack. Reading their attributes in
// Python, and looking the call up by them, runs much more code, which a kernel before has evicted
// from the caches.
class RepeatedCall {
 public:
  enum { kQ, kK, kV, kOut, kLse, kTensors };
  using Tensors = std::array<pybind11::handle, kTensors>;

  // tensors: those of a call that was checked; lse may be None. param_bytes: extents of the params.
  RepeatedCall(std::shared_ptr<const BatchCall> call, const Tensors& tensors,
               std::vector<int64_t> param_bytes);

  // Launches and returns true; or returns false, having done nothing, if a tensor has another
  // layout, dtype or device, or if out or lse shares memory with another one. values: of all other
  // tensors.
  bool launch(const Tensors& tensors, LaunchValues values) const;

 private:
  struct Layout {
    int32_t ndim = -1;  // none
    uint32_t dtype = 0;
    int64_t bytes = 0;  // from the first entry to the end of the last one
    int64_t shape[4] = {}, strides[4] = {};
  };
  // False for what is not a plain tensor in host memory, or has a dtype that DLPack does not have.
  static bool read(pybind11::handle tensor, Layout& layout, char*& data);
  // Whether tensor i has the layout of the one before; `data` is then its address.
  bool is_like(int i, pybind11::handle tensor, char*& data) const;

  std::shared_ptr<const BatchCall> call_;
  std::array<Layout, kTensors> layouts_;
  std::vector<int64_t> param_bytes_;
  bool readable_ = true;
};

}  // namespace fajit::runtime
