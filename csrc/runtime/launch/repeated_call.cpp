#include "launch/repeated_call.h"

#include <pybind11/gil_safe_call_once.h>

#include <algorithm>
#include <cstring>

#include "launch/dlpack.h"
#include "python_values.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

// The types of torch's plain tensors, and how they are described: null where torch has no such
// function. All live as long as the process.
struct Torch {
  py::handle tensor, parameter;
  int (*describe)(void*, dlpack::DLTensor*) = nullptr;

  Torch() {
    const py::module_ torch = py::module_::import("torch");
    tensor = torch.attr("Tensor").cast<py::object>().release();
    parameter = torch.attr("nn").attr("Parameter").cast<py::object>().release();
    const py::object capsule = py::getattr(tensor, "__dlpack_c_exchange_api__", py::none());
    const auto* api = static_cast<const dlpack::DLPackExchangeAPI*>(
        PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsuleName)
            ? PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName)
            : nullptr);
    while (api != nullptr && api->major != dlpack::kMajorVersion) api = api->prev_api;
    if (api != nullptr) describe = api->dltensor_from_py_object_no_sync;
  }
};

const Torch& torch() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Torch> loaded;
  return loaded.call_once_and_store_result([] { return Torch(); }).get_stored();
}

// False for what is not a plain tensor in host memory, or has a dtype that DLPack has not.
bool describe(py::handle tensor, dlpack::DLTensor& found) {
  const Torch& known = torch();
  const py::handle type = py::type::handle_of(tensor);
  if (known.describe == nullptr || (!type.is(known.tensor) && !type.is(known.parameter)))
    return false;
  if (known.describe(tensor.ptr(), &found) == 0) return found.device.device_type == dlpack::kDLCPU;
  PyErr_Clear();
  return false;
}

uint32_t word_of(const dlpack::DLDataType& dtype) {
  uint32_t word;
  std::memcpy(&word, &dtype, sizeof word);
  return word;
}

// Whether two ranges of addresses have a byte in common.
bool overlap(const char* a, int64_t a_bytes, const char* b, int64_t b_bytes) {
  return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

RepeatedCall::RepeatedCall(std::shared_ptr<const BatchCall> call, py::handle layouts,
                           std::vector<int64_t> param_bytes)
    : call_(std::move(call)), param_bytes_(std::move(param_bytes)) {
  if (call_->is_cuda()) throw py::value_error("calls on devices are not repeated");
  const Items given = exactly(layouts, kTensors, "layouts");
  for (int i = 0; i < kTensors; ++i) {
    const py::object one = given[i];
    if (i == kLse && one.is_none()) continue;
    const Items parts = exactly(one, 3, "a layout");
    const py::object shape = parts[0], strides = parts[1];
    Layout& layout = layouts_[i];
    const size_t ndim = Items(shape, "a shape").size();
    if (ndim > 4) throw py::value_error("a tensor has at most 4 dims");
    to_int64s(shape, ndim, layout.shape, "a shape");
    to_int64s(strides, ndim, layout.strides, "strides");
    layout.ndim = static_cast<int32_t>(ndim);
    dlpack::DLTensor example{};
    readable_ &= describe(parts[2], example);
    layout.dtype = word_of(example.dtype);
    layout.bytes = (example.dtype.bits * example.dtype.lanes + 7) / 8;
    int64_t last = 0;
    for (size_t d = 0; d < ndim; ++d) {
      last += (layout.shape[d] - 1) * layout.strides[d];
      if (layout.shape[d] == 0) layout.bytes = 0;
    }
    layout.bytes *= last + 1;
  }
}

bool RepeatedCall::fits(int i, py::handle tensor, char*& data) const {
  const Layout& own = layouts_[i];
  if (own.ndim < 0) return tensor.is_none();
  dlpack::DLTensor found{};
  if (!describe(tensor, found)) return false;
  data = static_cast<char*>(found.data) + found.byte_offset;
  return found.ndim == own.ndim && word_of(found.dtype) == own.dtype &&
         std::equal(own.shape, own.shape + own.ndim, found.shape) &&
         std::equal(own.strides, own.strides + own.ndim, found.strides);
}

bool RepeatedCall::fits(const Tensors& tensors) const {
  if (!readable_) return false;
  for (int i = 0; i < kTensors; ++i) {
    char* data = nullptr;
    const bool to_be_made = i >= kOut && tensors[i].is_none();
    if (!to_be_made && !fits(i, tensors[i], data)) return false;
  }
  return true;
}

bool RepeatedCall::launch(const Tensors& tensors, LaunchValues values) const {
  if (!readable_) return false;
  char* data[kTensors] = {};
  for (int i = 0; i < kTensors; ++i) {
    if (!fits(i, tensors[i], data[i])) return false;
    if (data[i] == nullptr && layouts_[i].bytes > 0) return false;
  }
  const Items params(values.tensors, "tensors");  // the user's, then tables that were made of them
  if (params.size() < param_bytes_.size()) return false;
  for (const int written : {kOut, kLse}) {
    const int64_t bytes = layouts_[written].bytes;
    for (int i = 0; i < kTensors; ++i) {
      if (i != written && overlap(data[written], bytes, data[i], layouts_[i].bytes)) return false;
    }
    for (size_t i = 0; i < param_bytes_.size(); ++i) {
      const char* const param = static_cast<const char*>(to_address(params[i]));
      if (overlap(data[written], bytes, param, param_bytes_[i])) return false;
    }
  }
  values.q = data[kQ];
  // Tensors without entries may have address 0, which kernels refuse; this address is never read.
  values.k = data[kK] == nullptr ? data[kQ] : data[kK];
  values.v = data[kV] == nullptr ? data[kQ] : data[kV];
  values.out = data[kOut];
  values.lse = data[kLse];
  call_->launch(values);
  return true;
}

}  // namespace fajit::runtime
