// What a call asks of torch, from C: the state of the thread, and tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "tensors/dlpack.h"

namespace fajit::runtime {

// Functions of torch's Python API, found at the first use. Exceptions of theirs pass through.
class TorchState {
 public:
  using Tensor = pybind11::handle;

  static TorchState& get();

  // Whether no mode or transform is active in this thread; with functions, torch-function modes do
  // not count. learn_quiet: the keys (`DispatchKeySet.raw_repr()`) of threads without any.
  bool is_quiet(bool functions = false) const;
  void learn_quiet(std::vector<uint64_t> keys) { quiet_keys_ = std::move(keys); }

  // Whether it is a tensor of torch's own classes with dispatch keys that were learned.
  bool is_plain(Tensor tensor) const;
  bool are_plain(const pybind11::tuple& tensors) const;
  void learn_plain(const std::vector<uint64_t>& keys);

  bool is_profiling() const;

  bool has_tangents() const;  // whether a level of forward-mode derivatives is open
  bool is_grad_enabled() const;
  static bool requires_grad(Tensor tensor);

  // Describes a tensor in host memory. False for what is no tensor of torch's own classes, or has a
  // dtype that DLPack does not have; where this torch has no functions for DLPack, for all.
  bool describe(Tensor tensor, dlpack::DLTensor& found) const;

  // The bytes of a tensor of codes of 4 bits, as a view; null for another object.
  pybind11::object as_bytes(Tensor codes) const;

  // Raises the version counters, which autograd compares, of tensors that a call was given to
  // write. A tensor may be None. Those of inference mode have no counter.
  void note_written(const Tensor* tensors, size_t count) const;

  int num_threads() const;
  pybind11::object default_dtype() const;

  // An uninitialised tensor in host memory. layout: (shape, strides); options: a dict with dtype
  // and device.
  pybind11::object new_tensor(pybind11::handle layout, pybind11::handle options) const;

 private:
  TorchState();
  bool is_own_class(Tensor tensor) const;

  // They live as long as the process.
  pybind11::handle tensor_, parameter_, function_modes_, included_keys_, tensor_keys_, profiling_,
      grad_enabled_, forward_ad_, threads_, default_dtype_, empty_strided_, codes4_, uint8_,
      increment_version_;
  int (*describe_)(void*, dlpack::DLTensor*) = nullptr;
  std::vector<uint64_t> quiet_keys_, plain_keys_;
};

void bind_torch_state(pybind11::module_& m);

}  // namespace fajit::runtime
