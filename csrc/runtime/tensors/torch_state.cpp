#include "tensors/torch_state.h"

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>

namespace py = pybind11;

namespace fajit::runtime {
namespace {

py::object checked(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

py::object called(py::handle function) { return checked(PyObject_CallNoArgs(function.ptr())); }

bool is_true(const py::object& value) {
  const int found = PyObject_IsTrue(value.ptr());
  if (found < 0) throw py::error_already_set();
  return found == 1;
}

py::object attribute(py::handle object, const char* name) {
  return checked(PyObject_GetAttrString(object.ptr(), name));
}

uint64_t raw(const py::object& keys) {
  static PyObject* const name = PyUnicode_InternFromString("raw_repr");
  const py::object number = checked(PyObject_CallMethodNoArgs(keys.ptr(), name));
  const unsigned long long bits = PyLong_AsUnsignedLongLong(number.ptr());
  if (PyErr_Occurred()) throw py::error_already_set();
  return bits;
}

bool has(const std::vector<uint64_t>& keys, uint64_t key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

}  // namespace

TorchState& TorchState::get() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<TorchState> loaded;
  return loaded.call_once_and_store_result([] { return TorchState(); }).get_stored();
}

TorchState::TorchState() {
  const py::module_ torch = py::module_::import("torch");
  const py::object internal = torch.attr("_C"), autograd = torch.attr("autograd");
  const auto kept = [](const py::object& value) { return py::object(value).release(); };
  tensor_ = kept(torch.attr("Tensor"));
  parameter_ = kept(torch.attr("nn").attr("Parameter"));
  function_modes_ = kept(internal.attr("_len_torch_function_stack"));
  included_keys_ = kept(internal.attr("_dispatch_tls_local_include_set"));
  tensor_keys_ = kept(internal.attr("_dispatch_keys"));
  profiling_ = kept(autograd.attr("_profiler_enabled"));
  grad_enabled_ = kept(torch.attr("is_grad_enabled"));
  forward_ad_ = kept(autograd.attr("forward_ad"));
  threads_ = kept(torch.attr("get_num_threads"));
  default_dtype_ = kept(torch.attr("get_default_dtype"));
  empty_strided_ = kept(torch.attr("empty_strided"));
  codes4_ = kept(torch.attr("bits4x2"));
  uint8_ = kept(torch.attr("uint8"));
  increment_version_ = kept(internal.attr("_increment_version"));
  const py::object capsule = py::getattr(tensor_, "__dlpack_c_exchange_api__", py::none());
  const auto* api = static_cast<const dlpack::DLPackExchangeAPI*>(
      PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsuleName)
          ? PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName)
          : nullptr);
  while (api != nullptr && api->major != dlpack::kMajorVersion) api = api->prev_api;
  if (api != nullptr) describe_ = api->dltensor_from_py_object_no_sync;
}

bool TorchState::is_own_class(Tensor tensor) const {
  const py::handle type = py::type::handle_of(tensor);
  return type.is(tensor_) || type.is(parameter_);
}

bool TorchState::is_quiet(bool functions) const {
  if (!functions && is_true(called(function_modes_))) return false;
  return has(quiet_keys_, raw(called(included_keys_)));
}

bool TorchState::is_plain(Tensor tensor) const {
  return is_own_class(tensor) &&
         has(plain_keys_, raw(checked(PyObject_CallOneArg(tensor_keys_.ptr(), tensor.ptr()))));
}

bool TorchState::are_plain(const py::tuple& tensors) const {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](py::handle tensor) { return is_plain(tensor); });
}

void TorchState::learn_plain(const std::vector<uint64_t>& keys) {
  for (const uint64_t key : keys) {
    if (!has(plain_keys_, key)) plain_keys_.push_back(key);
  }
}

bool TorchState::is_profiling() const { return is_true(called(profiling_)); }

bool TorchState::has_tangents() const {
  return attribute(forward_ad_, "_current_level").cast<long>() >= 0;
}

bool TorchState::is_grad_enabled() const { return is_true(called(grad_enabled_)); }

bool TorchState::requires_grad(Tensor tensor) {
  return is_true(attribute(tensor, "requires_grad"));
}

bool TorchState::describe(Tensor tensor, dlpack::DLTensor& found) const {
  if (describe_ == nullptr || !is_own_class(tensor)) return false;
  if (describe_(tensor.ptr(), &found) == 0) return found.device.device_type == dlpack::kDLCPU;
  PyErr_Clear();
  return false;
}

py::object TorchState::as_bytes(Tensor codes) const {
  if (py::type::handle_of(codes).is(tensor_) && attribute(codes, "dtype").is(codes4_))
    return codes.attr("view")(uint8_);
  return py::object();
}

void TorchState::note_written(const Tensor* tensors, size_t count) const {
  const auto given = std::count_if(tensors, tensors + count, [](Tensor t) { return !t.is_none(); });
  if (given == 0) return;
  const py::tuple written(given);
  for (size_t i = 0, at = 0; i < count; ++i) {
    if (tensors[i].is_none()) continue;
    PyTuple_SET_ITEM(written.ptr(), static_cast<Py_ssize_t>(at++), tensors[i].inc_ref().ptr());
  }
  checked(PyObject_CallOneArg(increment_version_.ptr(), written.ptr()));
}

int TorchState::num_threads() const { return called(threads_).cast<int>(); }

py::object TorchState::default_dtype() const { return called(default_dtype_); }

py::object TorchState::new_tensor(py::handle layout, py::handle options) const {
  return checked(PyObject_Call(empty_strided_.ptr(), layout.ptr(), options.ptr()));
}

void bind_torch_state(py::module_& m) {
  m.def(
      "learn_quiet",
      [](std::vector<uint64_t> keys) { TorchState::get().learn_quiet(std::move(keys)); },
      py::arg("keys"));
  m.def(
      "learn_plain", [](const std::vector<uint64_t>& keys) { TorchState::get().learn_plain(keys); },
      py::arg("keys"));
  m.def(
      "is_quiet", [](bool functions) { return TorchState::get().is_quiet(functions); },
      py::arg("functions") = false);
  m.def("are_plain", [](const py::args& tensors) { return TorchState::get().are_plain(tensors); });
  m.def("is_direct", [](const py::args& tensors) {
    const TorchState& torch = TorchState::get();
    return !torch.is_profiling() && torch.is_quiet() && torch.are_plain(tensors);
  });
  m.def("is_profiling", [] { return TorchState::get().is_profiling(); });
}

}  // namespace fajit::runtime
