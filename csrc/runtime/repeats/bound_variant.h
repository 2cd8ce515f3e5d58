// How a variant was bound to a call, to see whether it would be bound so again.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <vector>

#include "tensors/tensor_layout.h"

namespace fajit::runtime {

// What `bind` reads at every call, parsed from a `Captured` of variants/binding.py: its fields have
// their meanings there. Immutable. It holds no tensor of the user's.
class BoundVariant {
 public:
  explicit BoundVariant(pybind11::handle captured);

  // Whether DLPack describes all its tensors.
  bool is_readable() const { return readable_; }

  // Whether a variant of the same shape (`shape_of`), with params given by name, would be bound so;
  // then the tensors of the kernel are added to `tensors`. Runs Python code.
  bool fits(pybind11::handle variant, pybind11::handle given,
            std::vector<pybind11::object>& tensors) const;

  template <class Visit>
  int visit(Visit&& each) {
    for (pybind11::object* one : {&extract_, &key_, &numbers_, &default_dtype_}) {
      if (const int stopped = each(*one)) return stopped;
    }
    for (Param& param : params_) {
      for (pybind11::object* one : {&param.declaration, &param.name, &param.value}) {
        if (const int stopped = each(*one)) return stopped;
      }
    }
    return 0;
  }

 private:
  enum Source { kGiven, kOwn, kDefault, kFixed };  // as in variants/binding.py
  struct Param {
    pybind11::object declaration, name, value;  // value: None for a tensor that is given or own
    Source source;
    TensorLayout layout;  // of a tensor that is given or own
  };

  bool read_param(const Param& param, pybind11::handle declared, pybind11::handle given,
                  pybind11::object& value) const;

  pybind11::object extract_, key_, numbers_, default_dtype_;
  std::vector<Param> params_;
  size_t num_given_ = 0;
  std::vector<TensorLayout> tensors_;  // that are extracted
  std::vector<size_t> selected_;
  bool readable_ = true;
};

}  // namespace fajit::runtime
