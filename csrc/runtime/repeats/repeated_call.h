// A call that is made again, with other tensors of the same layouts.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "launch/batch_call.h"
#include "repeats/bound_variant.h"
#include "tensors/tensor_layout.h"
#include "tensors/torch_state.h"

namespace fajit::runtime {

// A bound call on the host and the layouts that it was bound to. Immutable, so any number of
// threads may launch it at once.
//
// Tensors are read by the C functions that torch has for DLPack; where it has none, no tensor fits.
class RepeatedCall {
 public:
  enum { kQ, kK, kV, kOut, kLse, kTensors };
  using Tensors = std::array<pybind11::object, kTensors>;

  // Objects of Python that a call holds. plan: owns the memory of the addresses in Options.
  // workspace: has `borrow` and `give_back`. planned: per tensor that the variant reads, the plan's
  // own in place of it, or None. scalars: of the kernel.
  struct Held { pybind11::object plan, workspace, planned, scalars; };

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
  // call without lse. params: of the tensors that the variant reads, likewise; param_bytes: the
  // extents of those that are the user's, which come first. captured: for run_again(), or None.
  RepeatedCall(std::shared_ptr<const BatchCall> call, pybind11::handle layouts,
               pybind11::handle params, std::vector<int64_t> param_bytes, pybind11::handle captured,
               Held held, Options options);

  // Launches and returns (out, lse). Returns None, having done nothing, unless all tensors have
  // these layouts and memory, none has derivatives, and out and lse share no memory with another.
  // out and lse may be None, and are made; lse stays None in a call without. params, scalars:
  // addresses and values.
  pybind11::object run(const Tensors& given, double scale, pybind11::handle params,
                       pybind11::handle scalars) const;

  // As run(), for plain tensors in a thread without modes, but first sees whether the call is the
  // same in all other respects: options, and what the variant is bound to. params: a dict, by name.
  pybind11::object run_again(pybind11::handle variant, const Tensors& given, pybind11::handle scale,
                             pybind11::handle return_lse, pybind11::handle partial,
                             pybind11::handle params) const;

  bool can_run_again() const { return readable_ && bound_ && bound_->is_readable(); }

  // For the garbage collector.
  template <class Visit>
  int visit(Visit&& each) {
    for (pybind11::object* one : {&held_.plan, &held_.workspace, &held_.planned, &held_.scalars}) {
      if (const int stopped = each(*one)) return stopped;
    }
    return bound_ ? bound_->visit(each) : 0;
  }

 private:
  struct Read;  // the tensors of a call, and their addresses

  bool unpack(Read& call) const;
  bool read(Read& call) const;
  bool read_params(Read& call) const;
  static bool has_derivatives(const Read& call);
  static void note_results(const Tensors& given);
  bool is_apart(const Read& call) const;
  bool launch(Read& call, double scale, pybind11::handle scalars) const;

  std::shared_ptr<const BatchCall> call_;
  std::array<TensorLayout, kTensors> layouts_;
  std::array<pybind11::object, kTensors> new_layouts_, new_options_;  // for `torch.empty_strided`
  std::vector<TensorLayout> params_;
  std::vector<int64_t> param_bytes_;
  std::unique_ptr<BoundVariant> bound_;
  Held held_;
  Options options_;
  bool readable_ = true;
};

}  // namespace fajit::runtime
