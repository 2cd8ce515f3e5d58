#include "tensors/tensor_layout.h"

#include <algorithm>
#include <cstring>

#include "python_values.h"
#include "tensors/torch_state.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

uint32_t word_of(const dlpack::DLDataType& dtype) {
  uint32_t word;
  std::memcpy(&word, &dtype, sizeof word);
  return word;
}

}  // namespace

TensorLayout TensorLayout::of(py::handle described) {
  const Items parts = exactly(described, 3, "a layout");
  const size_t ndim = Items(parts[0], "a shape").size();
  TensorLayout made;
  made.shape.resize(ndim);
  made.strides.resize(ndim);
  to_int64s(parts[0], ndim, made.shape.data(), "a shape");
  to_int64s(parts[1], ndim, made.strides.data(), "strides");
  dlpack::DLTensor example{};
  if (!TorchState::get().describe(parts[2], example)) return TensorLayout();
  made.ndim = static_cast<int32_t>(ndim);
  made.dtype = word_of(example.dtype);
  int64_t last = 0;
  bool empty = false;
  for (size_t d = 0; d < ndim; ++d) {
    last += (made.shape[d] - 1) * made.strides[d];
    empty |= made.shape[d] == 0;
  }
  const int64_t entry = (example.dtype.bits * example.dtype.lanes + 7) / 8;
  made.bytes = empty ? 0 : entry * (last + 1);
  return made;
}

bool TensorLayout::fits(py::handle tensor, char*& data) const {
  dlpack::DLTensor found{};
  if (ndim < 0 || !TorchState::get().describe(tensor, found)) return false;
  if (found.ndim != ndim || word_of(found.dtype) != dtype ||
      !std::equal(shape.begin(), shape.end(), found.shape) ||
      !std::equal(strides.begin(), strides.end(), found.strides)) {
    return false;
  }
  data = static_cast<char*>(found.data) + found.byte_offset;
  return data != nullptr || bytes == 0;
}

}  // namespace fajit::runtime
