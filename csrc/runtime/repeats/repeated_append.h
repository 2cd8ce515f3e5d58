// An append of rows that hooks change or quantise, made again with other tensors of the same
// layouts.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "launch/batch_call.h"
#include "repeats/bound_variant.h"
#include "tensors/tensor_layout.h"

namespace fajit::runtime {

// A bound append on the host and the layouts that it was bound to. Immutable, so any number of
// threads may launch it at once. See RepeatedCall.
class RepeatedAppend {
 public:
  enum { kK, kV, kKPages, kVPages, kTensors };
  // Beside the codes of k, then of v: scales, zeros, codebook.
  static constexpr int kBeside = 6;

  // Objects of Python that a call holds. page_indices: owns the memory of the address.
  struct Held { pybind11::object page_indices, scalars; };

  // layouts: of k, v, k_pages, v_pages and of what is beside codes, each (shape, strides, a tensor
  // of the dtype), or None for what does not exist. packed: whether pages are codes of 4 bits,
  // which are read as bytes. params: layouts of the tensors that the variant reads.
  RepeatedAppend(std::shared_ptr<const BatchCall> call, pybind11::handle layouts,
                 std::array<bool, 2> packed, pybind11::handle params, pybind11::handle captured,
                 Held held, void* page_indices);

  // Whether DLPack describes all tensors.
  bool is_readable() const { return readable_ && bound_.is_readable(); }

  // Writes the rows. False, with nothing done, unless the thread is in no mode, the tensors are
  // plain ones with these layouts, none has derivatives, none that is written shares memory with
  // another, and the variant would be bound as before. given: as layouts; params: a dict, by name.
  bool run(pybind11::handle variant, pybind11::handle given, pybind11::handle params) const;

  // For the garbage collector.
  template <class Visit>
  int visit(Visit&& each) {
    for (pybind11::object* one : {&held_.page_indices, &held_.scalars}) {
      if (const int stopped = each(*one)) return stopped;
    }
    return bound_.visit(each);
  }

 private:
  using Addresses = std::array<char*, kTensors + kBeside>;
  static bool is_written(size_t i);
  bool is_apart(const Addresses& data) const;

  std::shared_ptr<const BatchCall> call_;
  std::array<TensorLayout, kTensors + kBeside> layouts_;  // of no tensor: does not exist
  std::array<bool, 2> packed_;
  std::vector<TensorLayout> params_;
  BoundVariant bound_;
  Held held_;
  void* page_indices_;
  bool readable_ = true;
};

}  // namespace fajit::runtime
