#include "repeats/repeated_append.h"

#include <utility>

#include "python_values.h"
#include "tensors/torch_state.h"

namespace py = pybind11;

namespace fajit::runtime {

RepeatedAppend::RepeatedAppend(std::shared_ptr<const BatchCall> call, py::handle layouts,
                               std::array<bool, 2> packed, py::handle params, py::handle captured,
                               Held held, void* page_indices)
    : call_(std::move(call)),
      packed_(packed),
      bound_(captured),
      held_(std::move(held)),
      page_indices_(page_indices) {
  if (call_->is_cuda()) throw py::value_error("appends on devices are not repeated");
  const Items given = exactly(layouts, layouts_.size(), "layouts");
  for (size_t i = 0; i < layouts_.size(); ++i) {
    const py::object one = given[i];
    if (i >= kTensors && one.is_none()) continue;
    layouts_[i] = TensorLayout::of(one);
    readable_ &= layouts_[i].ndim >= 0;
  }
  const Items own_params(params, "params");
  for (size_t i = 0; i < own_params.size(); ++i) params_.push_back(TensorLayout::of(own_params[i]));
}

bool RepeatedAppend::is_written(size_t i) {
  if (i < kTensors) return i >= kKPages;
  return (i - kTensors) % 3 != 2;  // scales and zeros, but no codebook: see kBeside
}

bool RepeatedAppend::is_apart(const Addresses& data) const {
  for (size_t i = 0; i < data.size(); ++i) {
    if (!is_written(i)) continue;
    for (size_t j = 0; j < data.size(); ++j) {
      // Pages may lie between each other: `check_memory` of ops/arguments/new_rows.py sees it.
      if (i != j && layouts_[i].ndim >= 0 && layouts_[j].ndim >= 0 &&
          overlap(data[i], layouts_[i].bytes, data[j], layouts_[j].bytes)) {
        return false;
      }
    }
  }
  return true;
}

bool RepeatedAppend::run(py::handle variant, py::handle given, py::handle params) const {
  const TorchState& torch = TorchState::get();
  if (!is_readable() || !torch.is_quiet() || torch.has_tangents()) return false;
  std::vector<py::object> captured;
  if (!bound_.fits(variant, params, captured) || captured.size() != params_.size()) return false;
  const bool grads = torch.is_grad_enabled();
  // From here on torch's code alone runs.
  const Items tensors = exactly(given, layouts_.size(), "given");
  std::array<py::object, kTensors + kBeside> kept;
  Addresses data{};
  for (size_t i = 0; i < kept.size(); ++i) {
    kept[i] = tensors[i];
    if (layouts_[i].ndim < 0) {
      if (!kept[i].is_none()) return false;
      continue;
    }
    if (!torch.is_plain(kept[i]) || (grads && TorchState::requires_grad(kept[i]))) return false;
    if (i >= kKPages && i < kTensors && packed_[i - kKPages]) {
      kept[i] = torch.as_bytes(kept[i]);
      if (!kept[i]) return false;
    }
    if (!layouts_[i].fits(kept[i], data[i])) return false;
  }
  if (!is_apart(data)) return false;
  const size_t num_params = params_.size();
  const py::tuple addresses(num_params + data.size());
  for (size_t i = 0; i < num_params; ++i) {
    char* own = nullptr;
    if ((grads && TorchState::requires_grad(captured[i])) || !params_[i].fits(captured[i], own))
      return false;
    addresses[i] = py::int_(reinterpret_cast<uintptr_t>(params_[i].bytes == 0 ? nullptr : own));
  }
  for (size_t i = 0; i < data.size(); ++i)
    addresses[num_params + i] = py::int_(reinterpret_cast<uintptr_t>(data[i]));
  LaunchValues values{};
  values.q = data[kK];
  values.k = values.out = data[kKPages];
  values.v = data[kVPages];
  values.scale = 1.0;
  values.num_threads = torch.num_threads();
  values.tensors = addresses;
  values.scalars = held_.scalars;
  values.page_indices = page_indices_;
  call_->launch(values);
  return true;
}

}  // namespace fajit::runtime
