// A call that is made again, with other tensors of the same layouts.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "launch/batch_call.h"
#include "tensors/torch_state.h"

namespace fajit::runtime {

// A layout that tensors in host memory are compared with.
struct TensorLayout {
  int32_t ndim = -1;  // of no tensor
  uint32_t dtype = 0;
  int64_t bytes = 0;  // from the first entry to the end of the last one
  std::vector<int64_t> shape, strides;

  bool is_of(const dlpack::DLTensor& tensor) const;
};

// A bound call on the host and the layouts that it was bound to. Immutable, so any number of
// threads may launch it at once.
//
// Tensors are read by the C functions that torch has for DLPack; where it has none, no tensor fits.
class RepeatedCall {
 public:
  enum { kQ, kK, kV, kOut, kLse, kTensors };
  using Tensors = std::array<pybind11::object, kTensors>;

  // Objects of Python that a call holds. plan: owns the memory of the addresses in Options.
  // workspace: has `borrow` and `give_back`. captured: see
  // `Captured` in variants/binding.py, or None; planned: per tensor that it reads, the plan's own
  // in place of it, or None; scalars: of the kernel.
  struct Held {
    pybind11::object plan, workspace, captured, planned, scalars;
    template <class Visit>
    int visit(Visit&& each) {
      for (pybind11::object* one : {&plan, &workspace, &captured, &planned, &scalars}) {
        if (const int stopped = each(*one)) return stopped;
      }
      return 0;
    }
  };

  struct Options {
    int64_t workspace_bytes;
    void *page_indices, *key_blocks;
    double scale;     // the default; NaN if there is none
    bool packed[2];   // whether k and v are codes of 4 bits, which are read as bytes
    int num_threads;  // that it was planned for; 0: any
    // Whether the target is that of FLASHATTN_JIT_TARGET, and what this held (empty: unset).
    bool by_variable;
    std::string variable;
    bool return_lse, partial, has_out, has_lse;  // of the call that run_again() repeats
  };

  // layouts: of q, k, v, out and lse, each (shape, strides, a tensor of the dtype), or None for a
  // call without lse. params: of the tensors that the variant reads, likewise; param_bytes: their
  // extents.
  RepeatedCall(std::shared_ptr<const BatchCall> call, pybind11::handle layouts,
               pybind11::handle params, std::vector<int64_t> param_bytes, Held held,
               Options options);

  // Launches and returns (out, lse). Returns None, having done nothing, unless all tensors have
  // these layouts and memory, none has derivatives, and out and lse share no memory with another.
  // out and lse may be None, and are made; lse stays None in a call without. params, scalars:
  // addresses and values.
  pybind11::object run(const Tensors& given, double scale, pybind11::handle params,
                       pybind11::handle scalars) const;

  // As run(), but first sees whether the call is the same in all other respects: options, torch's
  // state, and what the variant is bound to. Returns out, or (out, lse). params: a dict, by name.
  pybind11::object run_again(const Tensors& given, pybind11::handle scale,
                             pybind11::handle return_lse, pybind11::handle partial,
                             pybind11::handle params) const;

  bool can_run_again() const { return readable_ && !held_.captured.is_none(); }
  Held& held() { return held_; }

 private:
  struct Read;  // the tensors of a call, and their addresses

  bool read(Read& call) const;
  bool read_params(Read& call) const;
  bool unpack(Read& call) const;
  pybind11::object values_of(pybind11::handle params) const;
  bool read_captured(const TorchState& torch, pybind11::handle params, Read& call) const;
  bool has_derivatives(const TorchState& torch, const Read& call) const;
  bool is_apart(const Read& call) const;
  bool launch(Read& call, double scale, pybind11::handle scalars) const;

  std::shared_ptr<const BatchCall> call_;
  std::array<TensorLayout, kTensors> layouts_;
  std::array<pybind11::object, kTensors> new_layouts_, new_options_;  // for `torch.empty_strided`
  std::vector<TensorLayout> params_;
  std::vector<int64_t> param_bytes_;
  Held held_;
  Options options_;
  bool readable_ = true;
};

}  // namespace fajit::runtime
