// States of boxes, from a program and what it reads at run time.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "../runtime/params.h"
#include "program.h"

namespace fajit::form {

// Intervals of the indices, both ends included.
struct Box {
  Interval b, h, q, k;
};

// What a mask reads in one call.
class Arguments {
 public:
  // Addresses, (sizes, strides) and scalars as for a launch, host tensors with their tables behind
  // them. lengths: q_len, kv_len, q_offset, q_token0 and kv_token0, one entry a request; without
  // requests, nothing is known of them.
  Arguments(const Program& program, pybind11::handle tensors, pybind11::handle layouts,
            pybind11::handle scalars, pybind11::handle lengths);

  const fajit_args& args() const { return args_; }
  const std::vector<View>& views() const { return views_; }

 private:
  runtime::ParamLayouts layouts_;
  runtime::Params params_;
  std::vector<int32_t> lengths_;
  fajit_args args_{};
  std::vector<View> views_;
};

// The states of boxes in one thread.
class Evaluation {
 public:
  Evaluation(const Program& program, const Arguments& arguments);

  // states[i] of boxes[i], a fajit_tile_state each, as compiled `Hooks::classify` gives it.
  void classify(const Box* boxes, size_t count, uint8_t* states);

 private:
  void batch(const Box* boxes, int count, uint8_t* states);
  void split(const Box* boxes, int count, uint8_t* states);
  template <class F> int by_parts(const Box& box, F ask);

  const Program& program_;
  Frame frame_;
};

}  // namespace fajit::form
