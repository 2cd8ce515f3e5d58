// States of boxes and of tiles, from a program and what it reads at run time.
#pragma once

#include <vector>

#include "../runtime/launch/params.h"
#include "program.h"

namespace fajit::form {

// Intervals of the indices, both ends included.
struct Box { Interval b, h, q, k; };

// What a mask reads in one call.
struct Arguments {
  // Addresses, (sizes, strides) and scalars as for a launch, of host tensors with their tables
  // behind them. lengths: q_len, kv_len, q_offset, q_token0 and kv_token0, an entry a request each;
  // without requests, nothing is known of them.
  Arguments(const Program& program, pybind11::handle tensors, pybind11::handle layouts,
            pybind11::handle scalars, pybind11::handle lengths);

  runtime::ParamLayouts layouts;
  runtime::Params params;
  std::vector<int32_t> lengths;
  fajit_args args{};
  std::vector<View> views;
};

// One thread's call.
class Evaluation {
 public:
  Evaluation(const Program& program, const Arguments& arguments);

  // A fajit_tile_state, as compiled `Hooks::classify` gives it.
  int classify(const Box& box);

 private:
  int classify_part(const Box& box);

  const Program& program_;
  Frame frame_;
};

// Positions begin..end (exclusive) in tiles, of which the last ends with the range.
struct Axis {
  int64_t begin, end, tile;

  int64_t tiles() const { return end <= begin ? 0 : (end - begin - 1) / tile + 1; }
};

// `TileRuns` of variants/interval/tile_runs.py.
struct TileRuns {
  std::vector<int64_t> indptr, begin, end;
  std::vector<uint8_t> state;
};

// The tiles of each request and head of `b` and `h`.
TileRuns tile_runs(Evaluation& evaluation, const Axis& q, const Axis& k,
                   const std::vector<Interval>& b, const std::vector<Interval>& h);

// `_C.IntervalForm`.
void bind_interval_form(pybind11::module_& m);

}  // namespace fajit::form
