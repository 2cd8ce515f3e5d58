#include "launch/repeated_call.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "host/hardware.h"
#include "python_values.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

uint32_t word_of(const dlpack::DLDataType& dtype) {
  uint32_t word;
  std::memcpy(&word, &dtype, sizeof word);
  return word;
}

TensorLayout layout_of(const dlpack::DLDataType& dtype, std::vector<int64_t> shape,
                       std::vector<int64_t> strides) {
  TensorLayout made;
  made.ndim = static_cast<int32_t>(shape.size());
  made.dtype = word_of(dtype);
  made.bytes = (dtype.bits * dtype.lanes + 7) / 8;
  int64_t last = 0;
  bool empty = false;
  for (size_t d = 0; d < shape.size(); ++d) {
    last += (shape[d] - 1) * strides[d];
    empty |= shape[d] == 0;
  }
  made.bytes *= empty ? 0 : last + 1;
  made.shape = std::move(shape);
  made.strides = std::move(strides);
  return made;
}

// Whether two ranges of addresses have a byte in common.
bool overlap(const char* a, int64_t a_bytes, const char* b, int64_t b_bytes) {
  return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
}

bool is_bool(py::handle value, bool wanted) { return value.ptr() == (wanted ? Py_True : Py_False); }

// Whether two numbers that were captured have one type and one value; -0.0 is not 0.0.
bool is_same(py::handle a, py::handle b) {
  if (a.is(b)) return true;
  if (Py_TYPE(a.ptr()) != Py_TYPE(b.ptr())) return false;
  if (PyFloat_CheckExact(a.ptr())) {
    const double x = PyFloat_AS_DOUBLE(a.ptr()), y = PyFloat_AS_DOUBLE(b.ptr());
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  return PyLong_CheckExact(a.ptr()) && a.equal(b);
}

py::object item(py::handle tuple, Py_ssize_t i) {
  if (!PyTuple_Check(tuple.ptr()) || i >= PyTuple_GET_SIZE(tuple.ptr())) {
    throw py::type_error("a tuple of more items was expected");
  }
  return py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(tuple.ptr(), i));
}

size_t count(const py::object& tuple) { return Items(tuple, "captured").size(); }

}  // namespace

bool TensorLayout::is_of(const dlpack::DLTensor& tensor) const {
  return tensor.ndim == ndim && word_of(tensor.dtype) == dtype &&
         std::equal(shape.begin(), shape.end(), tensor.shape) &&
         std::equal(strides.begin(), strides.end(), tensor.strides);
}

struct RepeatedCall::Read {
  Tensors tensors;
  char* data[kTensors] = {};
  std::vector<py::object> captured;  // tensors; none where addresses are given
  py::object params;                 // addresses
};

RepeatedCall::RepeatedCall(std::shared_ptr<const BatchCall> call, py::handle layouts,
                           py::handle params, std::vector<int64_t> param_bytes, Held held,
                           Options options)
    : call_(std::move(call)),
      param_bytes_(std::move(param_bytes)),
      held_(std::move(held)),
      options_(options) {
  if (call_->is_cuda()) throw py::value_error("calls on devices are not repeated");
  const TorchState& torch = TorchState::get();
  // (shape, strides, a tensor of the dtype) as a layout; of no tensor if it cannot be read.
  const auto read = [&](const py::object& one) {
    const Items parts = exactly(one, 3, "a layout");
    const size_t ndim = Items(parts[0], "a shape").size();
    std::vector<int64_t> shape(ndim), strides(ndim);
    to_int64s(parts[0], ndim, shape.data(), "a shape");
    to_int64s(parts[1], ndim, strides.data(), "strides");
    dlpack::DLTensor found{};
    const bool described = torch.describe(parts[2], found);
    return described ? layout_of(found.dtype, std::move(shape), std::move(strides))
                     : TensorLayout();
  };
  const Items given = exactly(layouts, kTensors, "layouts");
  for (int i = 0; i < kTensors; ++i) {
    const py::object one = given[i];
    if (i == kLse && one.is_none()) continue;
    layouts_[i] = read(one);
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
  for (size_t i = 0; i < own_params.size(); ++i) params_.push_back(read(own_params[i]));
  if (param_bytes_.size() > params_.size()) throw py::value_error("param_bytes are too many");
}

bool RepeatedCall::read(Read& call) const {
  const TorchState& torch = TorchState::get();
  for (int i = 0; i < kTensors; ++i) {
    const TensorLayout& own = layouts_[i];
    const py::object& tensor = call.tensors[i];
    if (own.ndim < 0) {
      if (!tensor.is_none()) return false;
      continue;
    }
    if (i >= kOut && tensor.is_none()) continue;  // to be made
    dlpack::DLTensor found{};
    if (!torch.describe(tensor, found) || !own.is_of(found)) return false;
    call.data[i] = static_cast<char*>(found.data) + found.byte_offset;
    if (call.data[i] == nullptr && own.bytes > 0) return false;
  }
  return true;
}

bool RepeatedCall::read_params(Read& call) const {
  const TorchState& torch = TorchState::get();
  const py::tuple addresses(call.captured.size());
  for (size_t i = 0; i < call.captured.size(); ++i) {
    dlpack::DLTensor found{};
    const TensorLayout& own = params_[i];
    if (!torch.describe(call.captured[i], found) || !own.is_of(found)) return false;
    char* const data = static_cast<char*>(found.data) + found.byte_offset;
    if (data == nullptr && own.bytes > 0) return false;
    addresses[i] = py::int_(reinterpret_cast<uintptr_t>(own.bytes == 0 ? nullptr : data));
  }
  call.params = addresses;
  return true;
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

// The values of the declared params, those of `params` among them; null if these are others than
// the repeated call had.
py::object RepeatedCall::values_of(py::handle params) const {
  const py::object values = item(held_.captured, 2), given = item(held_.captured, 7);
  if (!PyDict_CheckExact(params.ptr()) ||
      static_cast<size_t>(PyDict_GET_SIZE(params.ptr())) != count(given)) {
    return py::object();
  }
  if (count(given) == 0) return values;
  const py::list now(values);
  for (size_t i = 0; i < count(given); ++i) {
    const py::object at = item(item(given, i), 0), name = item(item(given, i), 1);
    const py::handle value = PyDict_GetItemWithError(params.ptr(), name.ptr());
    if (!value && PyErr_Occurred()) throw py::error_already_set();
    const py::object before = now[at];
    const bool fits = value && (is_same(value, before) || (TorchState::get().is_plain(value) &&
                                                           TorchState::get().is_plain(before)));
    if (!fits) return py::object();
    now[at] = value;
  }
  return now;
}

bool RepeatedCall::read_captured(const TorchState& torch, py::handle given, Read& call) const {
  const py::object extract = item(held_.captured, 0), variant = item(held_.captured, 1),
                   key = item(held_.captured, 3), numbers = item(held_.captured, 4),
                   dtype = item(held_.captured, 5), params = item(held_.captured, 6),
                   selected = item(held_.captured, 8);
  if (!torch.default_dtype().is(dtype)) return false;
  for (size_t i = 0; i < count(params); ++i) {
    const py::object one = item(params, i);
    const py::dict attributes =
        py::reinterpret_steal<py::dict>(PyObject_GenericGetDict(item(one, 0).ptr(), nullptr));
    if (!attributes) throw py::error_already_set();
    const py::handle now = PyDict_GetItemWithError(attributes.ptr(), item(one, 1).ptr());
    if (!now && PyErr_Occurred()) throw py::error_already_set();
    const py::object before = item(one, 2);
    if (now ? !now.is(before) : !before.is_none()) return false;
  }
  const py::object values = values_of(given);
  if (!values) return false;
  const py::object found = extract(variant, values);
  if (found.is_none() || !item(found, 0).equal(key)) return false;
  const py::object tensors = item(found, 1), own_numbers = item(found, 2);
  if (count(selected) != params_.size() || count(own_numbers) != count(numbers)) return false;
  for (size_t i = 0; i < count(numbers); ++i) {
    if (!is_same(item(own_numbers, i), item(numbers, i))) return false;
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    const py::object planned = item(held_.planned, i);
    const size_t from = item(selected, i).cast<size_t>();
    call.captured.push_back(planned.is_none() ? item(tensors, from) : planned);
    if (!torch.is_plain(call.captured.back())) return false;
  }
  return true;
}

bool RepeatedCall::has_derivatives(const TorchState& torch, const Read& call) const {
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
    values.workspace = to_address(item(space, 1));
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
  const TorchState& torch = TorchState::get();
  Read call{given, {}, {}, py::reinterpret_borrow<py::object>(params)};
  if (!unpack(call) || !read(call) || has_derivatives(torch, call) || !launch(call, scale, scalars))
    return py::none();
  return py::make_tuple(call.tensors[kOut], call.tensors[kLse]);
}

py::object RepeatedCall::run_again(const Tensors& given, py::handle scale, py::handle return_lse,
                                   py::handle partial, py::handle params) const {
  if (!can_run_again()) return py::none();
  const TorchState& torch = TorchState::get();
  Read call{given, {}, {}, {}};
  if (given[kOut].is_none() == options_.has_out || given[kLse].is_none() == options_.has_lse ||
      !is_bool(return_lse, options_.return_lse) || !is_bool(partial, options_.partial)) {
    return py::none();
  }
  if (options_.num_threads > 0 && torch.num_threads() != options_.num_threads) return py::none();
  if (options_.by_variable) {
    const char* const now = target_variable();
    if (options_.variable != (now == nullptr ? "" : now)) return py::none();
  }
  double factor = options_.scale;
  if (!scale.is_none()) {
    if (!PyFloat_CheckExact(scale.ptr())) return py::none();
    factor = PyFloat_AS_DOUBLE(scale.ptr());
  }
  if (!std::isfinite(factor)) return py::none();
  const auto is_plain = [&](const py::object& tensor) {
    return tensor.is_none() || torch.is_plain(tensor);
  };
  if (torch.is_profiling() || !torch.is_quiet() ||
      !std::all_of(call.tensors.begin(), call.tensors.end(), is_plain) || !unpack(call) ||
      !read(call) || !read_captured(torch, params, call) || has_derivatives(torch, call) ||
      !launch(call, factor, held_.scalars)) {
    return py::none();
  }
  const py::object &out = call.tensors[kOut], &lse = call.tensors[kLse];
  return lse.is_none() ? out : py::object(py::make_tuple(out, lse));
}

}  // namespace fajit::runtime
