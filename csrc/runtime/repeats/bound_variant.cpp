#include "repeats/bound_variant.h"

#include <cstring>
#include <utility>

#include "python_values.h"
#include "tensors/torch_state.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

// Whether two values have one type and are equal; -0.0 is not 0.0. False for other objects.
bool is_same(py::handle a, py::handle b) {
  if (a.is(b)) return true;
  if (Py_TYPE(a.ptr()) != Py_TYPE(b.ptr())) return false;
  if (PyFloat_CheckExact(a.ptr())) {
    const double x = PyFloat_AS_DOUBLE(a.ptr()), y = PyFloat_AS_DOUBLE(b.ptr());
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  return (PyLong_CheckExact(a.ptr()) || PyUnicode_CheckExact(a.ptr())) && a.equal(b);
}

// The value of a key of a dict, or null.
py::object value_of(py::handle dict, py::handle key) {
  PyObject* const found = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (found == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return py::reinterpret_borrow<py::object>(found);
}

}  // namespace

BoundVariant::BoundVariant(py::handle captured) {
  const Items fields = exactly(captured, 7, "captured");
  extract_ = fields[0];
  key_ = fields[1];
  numbers_ = fields[2];
  default_dtype_ = fields[3];
  const py::object params = fields[4], tensors = fields[5], selected = fields[6];
  const Items declared(params, "params");
  for (size_t i = 0; i < declared.size(); ++i) {
    const Items one = exactly(declared[i], 5, "a param");
    const int64_t source = to_int64(one[2], "a source");
    if (source < kGiven || source > kFixed) throw py::value_error("a source is unknown");
    Param param{one[0], one[1], one[3], static_cast<Source>(source), {}};
    if (!one[4].is_none()) {
      param.layout = TensorLayout::of(one[4]);
      readable_ &= param.layout.ndim >= 0;
    }
    num_given_ += param.source == kGiven;
    params_.push_back(std::move(param));
  }
  const Items layouts(tensors, "tensors");
  for (size_t i = 0; i < layouts.size(); ++i) {
    tensors_.push_back(TensorLayout::of(layouts[i]));
    readable_ &= tensors_.back().ndim >= 0;
  }
  const Items chosen(selected, "selected");
  for (size_t i = 0; i < chosen.size(); ++i) {
    const int64_t at = to_int64(chosen[i], "selected");
    if (at < 0 || at >= static_cast<int64_t>(tensors_.size()))
      throw py::value_error("selected must be among the tensors");
    selected_.push_back(static_cast<size_t>(at));
  }
}

bool BoundVariant::read_param(const Param& param, py::handle declared, py::handle given,
                              py::object& value) const {
  const Items one = exactly(declared, 3, "a declared param");  // (name, declaration, owner)
  if (!one[1].is(param.declaration)) return false;
  if (param.source == kFixed) {
    value = param.value;
    return true;
  }
  if (param.source == kGiven) {
    value = value_of(given, one[0]);
  } else {
    const py::object attributes =
        py::reinterpret_steal<py::object>(PyObject_GenericGetDict(one[2].ptr(), nullptr));
    if (!attributes) throw py::error_already_set();
    value = value_of(attributes, param.name);
    if (param.source == kDefault) {
      if (value) return false;
      value = param.value;
      return true;
    }
  }
  if (!value) return false;
  if (param.layout.ndim < 0) return is_same(value, param.value);
  char* data = nullptr;
  return TorchState::get().is_plain(value) && param.layout.fits(value, data);
}

bool BoundVariant::fits(py::handle variant, py::handle given,
                        std::vector<py::object>& tensors) const {
  const TorchState& torch = TorchState::get();
  if (!PyDict_CheckExact(given.ptr()) || !torch.default_dtype().is(default_dtype_) ||
      static_cast<size_t>(PyDict_GET_SIZE(given.ptr())) != num_given_) {
    return false;
  }
  py::tuple values(params_.size());
  if (!params_.empty()) {
    const py::object all = variant.attr("_declared");
    const Items declared(all, "declared params");
    if (declared.size() != params_.size()) return false;
    for (size_t i = 0; i < params_.size(); ++i) {
      py::object value;
      if (!read_param(params_[i], declared[i], given, value)) return false;
      values[i] = std::move(value);
    }
  }
  const py::object found = extract_(variant, values);
  if (found.is_none()) return false;
  const Items parts = exactly(found, 3, "what was extracted");
  const py::object all = parts[1], read = parts[2];
  if (!parts[0].equal(key_)) return false;
  const Items extracted(all, "tensors"), now(read, "numbers"), before(numbers_, "numbers");
  if (extracted.size() != tensors_.size() || now.size() != before.size()) return false;
  for (size_t i = 0; i < now.size(); ++i) {
    if (!is_same(now[i], before[i])) return false;
  }
  // All of them: numbers may follow from the sizes of tensors that the kernel does not read.
  for (size_t i = 0; i < tensors_.size(); ++i) {
    char* data = nullptr;
    if (!torch.is_plain(extracted[i]) || !tensors_[i].fits(extracted[i], data)) return false;
  }
  for (const size_t i : selected_) tensors.push_back(extracted[i]);
  return true;
}

}  // namespace fajit::runtime
