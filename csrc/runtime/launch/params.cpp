#include "launch/params.h"

#include <algorithm>
#include <cstring>

#include "python_values.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

fajit_tensor read_tensor_layout(py::handle layout) {
  const Items pair(layout, "a tensor layout");
  if (pair.size() != 2) throw py::value_error("a tensor layout must be (sizes, strides)");
  fajit_tensor tensor{};
  const py::object sizes = pair[0], strides = pair[1];
  const size_t rank = Items(sizes, "sizes").size();
  if (rank > FAJIT_MAX_RANK) {
    throw py::value_error("a param tensor has rank " + std::to_string(rank) + ", at most " +
                          std::to_string(FAJIT_MAX_RANK) + " are supported");
  }
  to_int64s(sizes, rank, tensor.sizes, "sizes");
  to_int64s(strides, rank, tensor.strides, "strides");
  for (size_t i = 0; i < rank; ++i) {
    if (tensor.sizes[i] < 0) throw py::value_error("sizes must not be negative");
  }
  // Dims past the rank have size 1, so that the product of all sizes is the number of entries.
  std::fill(tensor.sizes + rank, tensor.sizes + FAJIT_MAX_RANK, int64_t{1});
  return tensor;
}

}  // namespace

ParamLayouts::ParamLayouts(py::handle tensors, std::string scalar_kinds)
    : scalar_kinds_(std::move(scalar_kinds)) {
  for (const char kind : scalar_kinds_) {
    if (kind != 'i' && kind != 'f') {
      throw py::value_error("scalar_kinds must be made of 'i' (int64) and 'f' (float64), got '" +
                            scalar_kinds_ + "'");
    }
  }
  const Items layouts(tensors, "tensors");
  tensors_.reserve(layouts.size());
  for (size_t i = 0; i < layouts.size(); ++i) tensors_.push_back(read_tensor_layout(layouts[i]));
}

void ParamLayouts::fill_counts(fajit_args& args) const {
  args.num_tensors = narrow(static_cast<int64_t>(tensors_.size()), "num_tensors");
  args.num_scalars = narrow(static_cast<int64_t>(scalar_kinds_.size()), "num_scalars");
}

Params::Params(const ParamLayouts& param_layouts, py::handle addresses, py::handle scalars) {
  const std::vector<fajit_tensor>& layouts = param_layouts.tensors();
  const Items address_items(addresses, "tensors");
  if (address_items.size() != layouts.size()) {
    throw py::value_error("tensors must have " + std::to_string(layouts.size()) +
                          " addresses, got " + std::to_string(address_items.size()));
  }
  tensors_ = layouts;
  for (size_t i = 0; i < layouts.size(); ++i) {
    tensors_[i].ptr = to_address(address_items[i]);
    const bool has_entries = std::all_of(layouts[i].sizes, layouts[i].sizes + FAJIT_MAX_RANK,
                                         [](int64_t n) { return n > 0; });
    if (tensors_[i].ptr == nullptr && has_entries) {
      throw py::value_error("param tensor " + std::to_string(i) + " has address 0");
    }
  }

  const std::string& kinds = param_layouts.scalar_kinds();
  const Items scalar_items = exactly(scalars, kinds.size(), "scalars");
  scalars_.resize(kinds.size());
  for (size_t i = 0; i < kinds.size(); ++i) {
    const py::object item = scalar_items[i];
    if (kinds[i] == 'i') {
      const int64_t value = to_int64(item, "an int scalar");
      std::memcpy(&scalars_[i], &value, sizeof(value));
    } else {
      const double value = PyFloat_AsDouble(item.ptr());
      if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
      std::memcpy(&scalars_[i], &value, sizeof(value));
    }
  }
}

}  // namespace fajit::runtime
