// A mask's interval form, read from Python and checked: whatever is asked of it afterwards stays
// within its registers, its tensors and its scalars.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "batch.h"
#include "gathers.h"

namespace fajit::form {

// See `Code` in variants/bounds_code.py, whose names these are. Immutable.
struct Program {
  // code: a `Code`. tensors: (dtype, rank) of each param; `num_tables` pairs of lo and hi tables
  // follow them in a call. Throws ValueError or TypeError for what is no such code.
  Program(pybind11::handle code, pybind11::handle tensors, int num_tables,
          std::string scalar_kinds);

  size_t num_tensors() const { return dtypes.size() + 2 * static_cast<size_t>(num_tables); }

  std::vector<std::string> dtypes;
  std::vector<int> ranks;
  int num_tables;
  std::string scalar_kinds;

  struct Period {
    int index, offset, divisor;
  };
  Block once, guards;
  std::vector<Block> keep, drop;
  std::vector<Period> periods;

  std::vector<Gather> gathers;  // what the views of a call show
  int num_registers = 0;
};

}  // namespace fajit::form
