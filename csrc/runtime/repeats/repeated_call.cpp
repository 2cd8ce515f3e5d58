#include "repeats/repeated_call.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "host/hardware.h"
#include "python_values.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

bool is_bool(py::handle value, bool wanted) { return value.ptr() == (wanted ? Py_True : Py_False); }

}  // namespace

// Of results that were given: `launch` puts new ones in place of the others.
void RepeatedCall::note_results(const Tensors& given) {
  const TorchState::Tensor results[] = {given[kOut], given[kLse]};
  TorchState::get().note_written(results, 2);
}

struct RepeatedCall::Read {
  Tensors tensors;
  char* data[kTensors] = {};
  std::vector<py::object> captured;  // tensors; none where addresses are given
  py::object params;                 // addresses
};

RepeatedCall::RepeatedCall(std::shared_ptr<const BatchCall> call, py::handle layouts,
                           py::handle params, std::vector<int64_t> param_bytes, py::handle captured,
                           Held held, Options options)
    : call_(std::move(call)),
      param_bytes_(std::move(param_bytes)),
      bound_(captured.is_none() ? nullptr : std::make_unique<BoundVariant>(captured)),
      held_(std::move(held)),
      options_(std::move(options)) {
  if (call_->is_cuda()) throw py::value_error("calls on devices are not repeated");
  const Items given = exactly(layouts, kTensors, "layouts");
  for (int i = 0; i < kTensors; ++i) {
    const py::object one = given[i];
    if (i == kLse && one.is_none()) continue;
    layouts_[i] = TensorLayout::of(one);
    readable_ &= layouts_[i].ndim >= 0;
    if (i < kOut || !readable_) continue;
    const Items parts(one, "a layout");
    new_layouts_[i] = py::make_tuple(parts[0], parts[1]);
    py::dict kind;
    kind["dtype"] = parts[2].attr("dtype");
    kind["device"] = parts[2].attr("device");
    new_options_[i] = std::move(kind);
  }
  const Items own_params(params, "params");
  for (size_t i = 0; i < own_params.size(); ++i) params_.push_back(TensorLayout::of(own_params[i]));
  if (param_bytes_.size() > params_.size() ||
      Items(held_.planned, "planned").size() != params_.size()) {
    throw py::value_error("params, param_bytes and planned are of the same tensors");
  }
}

// Codes of 4 bits as bytes: DLPack has no dtype for them.
bool RepeatedCall::unpack(Read& call) const {
  for (const int i : {kK, kV}) {
    if (!options_.packed[i - kK]) continue;
    call.tensors[i] = TorchState::get().as_bytes(call.tensors[i]);
    if (!call.tensors[i]) return false;
  }
  return true;
}

bool RepeatedCall::read(Read& call) const {
  for (int i = 0; i < kTensors; ++i) {
    const py::object& tensor = call.tensors[i];
    if (tensor.is_none() && (i >= kOut || layouts_[i].ndim < 0)) continue;  // to be made, or none
    if (!layouts_[i].fits(tensor, call.data[i])) return false;
  }
  return true;
}

bool RepeatedCall::read_params(Read& call) const {
  if (call.captured.size() != params_.size()) return false;
  const py::tuple addresses(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    char* data = nullptr;
    if (!params_[i].fits(call.captured[i], data)) return false;
    addresses[i] = py::int_(reinterpret_cast<uintptr_t>(params_[i].bytes == 0 ? nullptr : data));
  }
  call.params = addresses;
  return true;
}

bool RepeatedCall::has_derivatives(const Read& call) {
  const TorchState& torch = TorchState::get();
  if (torch.has_tangents()) return true;
  if (!torch.is_grad_enabled()) return false;
  const auto has = [](const py::object& tensor) {
    return !tensor.is_none() && TorchState::requires_grad(tensor);
  };
  return std::any_of(call.tensors.begin(), call.tensors.end(), has) ||
         std::any_of(call.captured.begin(), call.captured.end(), has);
}

bool RepeatedCall::is_apart(const Read& call) const {
  const Items params(call.params, "params");  // the user's, then tables that were made of them
  if (params.size() < param_bytes_.size()) return false;
  for (const int written : {kOut, kLse}) {
    const int64_t bytes = layouts_[written].bytes;
    for (int i = 0; i < kTensors; ++i) {
      if (i != written && overlap(call.data[written], bytes, call.data[i], layouts_[i].bytes))
        return false;
    }
    for (size_t i = 0; i < param_bytes_.size(); ++i) {
      const char* const param = static_cast<const char*>(to_address(params[i]));
      if (overlap(call.data[written], bytes, param, param_bytes_[i])) return false;
    }
  }
  return true;
}

bool RepeatedCall::launch(Read& call, double scale, py::handle scalars) const {
  const TorchState& torch = TorchState::get();
  for (const int made : {kOut, kLse}) {
    if (call.tensors[made].is_none() && layouts_[made].ndim >= 0)
      call.tensors[made] = torch.new_tensor(new_layouts_[made], new_options_[made]);
  }
  LaunchValues values{};
  values.scale = scale;
  values.num_threads = torch.num_threads();
  py::object space;
  if (options_.workspace_bytes > 0) {
    space = held_.workspace.attr("borrow")(options_.workspace_bytes);
    values.workspace = to_address(exactly(space, 2, "borrowed")[1]);
  }
  // Again, as Python code has run: another thread may have rebound a tensor.
  const bool fits = read(call) && (call.params || read_params(call)) && is_apart(call);
  if (fits) {
    values.tensors = call.params;
    values.scalars = scalars;
    values.page_indices = options_.page_indices;
    values.key_blocks = options_.key_blocks;
    values.q = call.data[kQ];
    // Tensors without entries may have address 0, which kernels refuse; this one is never read.
    values.k = call.data[kK] == nullptr ? call.data[kQ] : call.data[kK];
    values.v = call.data[kV] == nullptr ? call.data[kQ] : call.data[kV];
    values.out = call.data[kOut];
    values.lse = call.data[kLse];
    call_->launch(values);
  }
  if (space) held_.workspace.attr("give_back")(*py::reinterpret_borrow<py::tuple>(space));
  return fits;
}

py::object RepeatedCall::run(const Tensors& given, double scale, py::handle params,
                             py::handle scalars) const {
  if (!readable_) return py::none();
  Read call{given, {}, {}, py::reinterpret_borrow<py::object>(params)};
  if (!unpack(call) || !read(call) || has_derivatives(call) || !launch(call, scale, scalars))
    return py::none();
  note_results(given);
  return py::make_tuple(call.tensors[kOut], call.tensors[kLse]);
}

py::object RepeatedCall::run_again(py::handle variant, const Tensors& given, py::handle scale,
                                   py::handle return_lse, py::handle partial,
                                   py::handle params) const {
  if (!can_run_again()) return py::none();
  if (given[kOut].is_none() == options_.has_out || given[kLse].is_none() == options_.has_lse ||
      !is_bool(return_lse, options_.return_lse) || !is_bool(partial, options_.partial)) {
    return py::none();
  }
  const int num_threads = options_.num_threads;
  if (num_threads > 0 && TorchState::get().num_threads() != num_threads) return py::none();
  if (options_.by_variable) {
    const char* const now = target_variable();
    if (options_.variable != (now == nullptr ? "" : now)) return py::none();
  }
  double factor = options_.scale;
  if (PyFloat_CheckExact(scale.ptr())) {
    factor = PyFloat_AS_DOUBLE(scale.ptr());
  } else if (!scale.is_none()) {
    return py::none();
  }
  // As `check_scale` of ops/arguments/checks.py, which refuses others; NaN as well.
  if (!(std::abs(factor) <= std::numeric_limits<float>::max())) return py::none();
  Read call{given, {}, {}, {}};
  if (!unpack(call) || !read(call) || !bound_->fits(variant, params, call.captured))
    return py::none();
  const Items planned(held_.planned, "planned");
  for (size_t i = 0; i < call.captured.size() && i < planned.size(); ++i) {
    if (!planned[i].is_none()) call.captured[i] = planned[i];
  }
  if (has_derivatives(call) || !launch(call, factor, held_.scalars)) return py::none();
  note_results(given);
  return py::make_tuple(call.tensors[kOut], call.tensors[kLse]);
}

}  // namespace fajit::runtime
