#include "launch/repeated_call.h"

#include <pybind11/gil_safe_call_once.h>

#include <algorithm>
#include <cstring>

#include "launch/dlpack.h"
#include "python_values.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

// What torch exports, and the types of its plain tensors. They live as long as the process.
struct Torch {
  const dlpack::ExchangeApi* api;
  py::handle tensor, parameter;

  Torch() {
    const py::module_ torch = py::module_::import("torch");
    tensor = torch.attr("Tensor").cast<py::object>().release();
    parameter = torch.attr("nn").attr("Parameter").cast<py::object>().release();
    const py::object capsule = tensor.attr("__dlpack_c_exchange_api__");
    api = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule));
    if (api == nullptr) throw py::error_already_set();
    while (api != nullptr && api->major != dlpack::kMajor) api = api->older;
    if (api == nullptr || api->describe == nullptr) {
      throw py::type_error("this torch describes no tensors by DLPack 1");
    }
  }
};

const Torch& torch() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Torch> loaded;
  return loaded.call_once_and_store_result([] { return Torch(); }).get_stored();
}

// Whether two ranges of addresses have a byte in common.
bool overlap(const char* a, int64_t a_bytes, const char* b, int64_t b_bytes) {
  return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

bool RepeatedCall::read(py::handle tensor, Layout& layout, char*& data) {
  dlpack::Tensor found{};
  const py::handle type = py::type::handle_of(tensor);
  if (!type.is(torch().tensor) && !type.is(torch().parameter)) return false;
  if (torch().api->describe(tensor.ptr(), &found) != 0) {
    PyErr_Clear();
    return false;
  }
  if (found.device.type != dlpack::kHost || found.ndim > 4) return false;
  layout.ndim = found.ndim;
  std::memcpy(&layout.dtype, &found.dtype, sizeof layout.dtype);
  data = static_cast<char*>(found.data) + found.byte_offset;
  int64_t last = 0;
  bool empty = false;
  for (int i = 0; i < found.ndim; ++i) {
    layout.shape[i] = found.shape[i];
    layout.strides[i] = found.strides[i];
    empty |= found.shape[i] == 0;
    last += (found.shape[i] - 1) * found.strides[i];
  }
  layout.bytes = empty ? 0 : (last + 1) * ((found.dtype.bits * found.dtype.lanes + 7) / 8);
  return true;
}

RepeatedCall::RepeatedCall(std::shared_ptr<const BatchCall> call, const Tensors& tensors,
                           std::vector<int64_t> param_bytes)
    : call_(std::move(call)), param_bytes_(std::move(param_bytes)) {
  if (call_->is_cuda()) throw py::value_error("calls on devices are not repeated");
  for (int i = 0; i < kTensors; ++i) {
    char* data;
    if (i != kLse || !tensors[i].is_none()) readable_ &= read(tensors[i], layouts_[i], data);
  }
}

bool RepeatedCall::is_like(int i, py::handle tensor, char*& data) const {
  const Layout& own = layouts_[i];
  if (own.ndim < 0) return tensor.is_none();
  Layout found;
  return read(tensor, found, data) && found.ndim == own.ndim && found.dtype == own.dtype &&
         std::equal(own.shape, own.shape + own.ndim, found.shape) &&
         std::equal(own.strides, own.strides + own.ndim, found.strides);
}

bool RepeatedCall::launch(const Tensors& tensors, LaunchValues values) const {
  if (!readable_) return false;
  char* data[kTensors] = {};
  for (int i = 0; i < kTensors; ++i) {
    if (!is_like(i, tensors[i], data[i])) return false;
  }
  const Items params(values.tensors, "tensors");
  if (params.size() != param_bytes_.size()) return false;
  for (const int written : {kOut, kLse}) {
    const int64_t bytes = layouts_[written].bytes;
    for (int i = 0; i < kTensors; ++i) {
      if (i != written && overlap(data[written], bytes, data[i], layouts_[i].bytes)) return false;
    }
    for (size_t i = 0; i < params.size(); ++i) {
      const char* const param = static_cast<const char*>(to_address(params[i]));
      if (overlap(data[written], bytes, param, param_bytes_[i])) return false;
    }
  }
  values.q = data[kQ];
  // Without keys their address may be 0, which kernels refuse; this address is never read.
  values.k = data[kK] == nullptr ? data[kQ] : data[kK];
  values.v = data[kV] == nullptr ? data[kQ] : data[kV];
  values.out = data[kOut];
  values.lse = data[kLse];
  call_->launch(values);
  return true;
}

}  // namespace fajit::runtime
