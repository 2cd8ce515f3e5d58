// Layouts of tensors in host memory, to compare others with.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "tensors/dlpack.h"

namespace fajit::runtime {

struct TensorLayout {
  int32_t ndim = -1;  // of no tensor
  uint32_t dtype = 0;
  int64_t bytes = 0;  // from the first entry to the end of the last one
  std::vector<int64_t> shape, strides;

  // From (shape, strides, a tensor of the dtype); of no tensor if DLPack does not describe that.
  static TensorLayout of(pybind11::handle described);

  // The address of a tensor with this layout. False for other objects and layouts, and for a tensor
  // that has entries but no memory.
  bool fits(pybind11::handle tensor, char*& data) const;
};

// Whether two ranges of addresses have a byte in common.
inline bool overlap(const char* a, int64_t a_bytes, const char* b, int64_t b_bytes) {
  return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
}

}  // namespace fajit::runtime
