// Evaluates a program: states of boxes and of tiles.
#pragma once

#include <vector>

#include "../runtime/launch/params.h"
#include "program.h"

namespace fajit::form {

// Intervals of the indices, both ends included.
struct Box { Interval b, h, q, k; };

// The arguments of one call: params and lengths.
struct Arguments {
  // Addresses, (sizes, strides) and scalars as for a launch, of host tensors followed by their
  // tables. lengths: q_len, kv_len, q_offset, q_token0 and kv_token0, with one entry per request
  // each; without requests, all lengths are possible.
  Arguments(const Program& program, pybind11::handle tensors, pybind11::handle layouts,
            pybind11::handle scalars, pybind11::handle lengths);

  runtime::ParamLayouts layouts;
  runtime::Params params;
  std::vector<int32_t> lengths;
  fajit_args args{};
  std::vector<View> views;
};

// The state of one call, for one thread.
class Evaluation {
 public:
  Evaluation(const Program& program, const Arguments& arguments);

  // A fajit_tile_state, the same as that of compiled `Hooks::classify`.
  int classify(const Box& box);

 private:
  int classify_part(const Box& box);

  const Program& program_;
  Frame frame_;
};

// Positions [begin, end) in tiles; the last tile is clipped.
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

}  // namespace fajit::form
