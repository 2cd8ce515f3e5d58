// csrc/interval interprets a mask's interval form, statement by statement, one box at a time.
//
//   program.cpp      reads and checks the statements that variants/interval/statements.py writes
//   functions.cpp    the table of the functions of fajit/interval/*.h, by name
//   gathers.cpp      the functions that read a param tensor
//   evaluation.cpp   states of boxes, the same as those of compiled `Hooks::classify`
//   tile_runs.cpp    states of all tiles of a grid, from large boxes to small ones
//
// This header has the types that they share.
#pragma once

#include <fajit/interval.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fajit::form {

// The value of a register. Which member is valid is known when the program is read.
union Value {
  Interval i;
  FInterval f;
  Tri t;
  interval::Bits b;
};

// Registers that every program has: the box. (`INDICES` of interval/statements.py)
enum : int { kB, kH, kQ, kK, kIndices };

// The operands of a gather: the slots of its tensor and of its lo table (-1: none), the scanned
// dim.
struct Gather { int slot, table, dim, rank; };

// A Gather in one call: the tensor and its tables with the scanned dim last, after dims of size 1.
// Results are cached, because the tiles of a row or column read the same elements.
struct View {
  struct Known {
    Interval at[FAJIT_MAX_RANK];
    Value value;
    bool some;
  };
  static constexpr int kKnownBits = 6;

  fajit_tensor tensor, tables[2];
  bool has_tables;
  std::array<Known, 1 << kKnownBits> known;  // cache, by the begin of the scanned range
};

// The data of the operations in one thread's call.
struct Frame {
  Context context;
  std::vector<View> views;
  std::vector<Value> registers;

  Value& at(int reg) { return registers[static_cast<size_t>(reg)]; }
};

struct Number {
  int64_t whole;
  double real;
  bool is_whole;
};

struct Operation {
  // Returns false if the clause does not hold (in a compiled kernel: `break`).
  using Run = bool (*)(const Operation&, Frame&);

  Run run = nullptr;
  int result = -1;
  std::vector<int> operands;
  std::vector<Number> numbers;
  int view = -1;                                // of gathers
  std::vector<std::vector<Operation>> clauses;  // of `any`
};
using Block = std::vector<Operation>;

// The function of a statement. Kinds: i Interval, f FInterval, t Tri, b Bits.
struct Function {
  Operation::Run run;
  std::string operands;  // their kinds
  std::string numbers;   // n: an integer, d: a double
  char result;           // its kind; '?': none, only whether the clause holds
};
const std::map<std::string, Function>& functions();

// The functions of i_gather, t_gather, f_gather and gather_bits (operands: all dims, the scanned
// one last), and of i_searchsorted (slot, right), for a dtype; null if the dtype is not supported.
Operation::Run gather(const std::string& name, const std::string& dtype);
Operation::Run searchsorted(const std::string& dtype, bool right);

// Whether one of the clauses holds.
bool run_any(const std::vector<Block>& clauses, Frame& frame);

// A mask's interval form: `Code` of interval/statements.py, with the same names. Checked, so that
// evaluating it never accesses other registers, tensors or scalars. Immutable.
struct Program {
  // tensors: (dtype, rank) of each param; `num_tables` pairs of lo and hi tables follow them in a
  // call. Throws ValueError or TypeError for invalid code.
  Program(pybind11::handle code, pybind11::handle tensors, size_t num_tables,
          std::string scalar_kinds);

  size_t num_tensors() const { return dtypes.size() + 2 * num_tables; }

  std::vector<std::string> dtypes;
  std::vector<size_t> ranks;
  size_t num_tables;
  std::string scalar_kinds;

  Block once, guards;
  std::vector<Block> keep, drop;
  std::vector<std::array<int, 3>> periods;  // index, offset, divisor
  std::vector<Gather> gathers;
  size_t num_registers = kIndices;
};

}  // namespace fajit::form
