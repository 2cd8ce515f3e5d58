// How csrc/interval runs a mask's interval form: statement by statement, one box at a time.
//
//   program.cpp     reads the statements that variants/interval/statements.py writes, and checks
//   them functions.cpp   the functions of fajit/interval*.h, by the names that statements call them
//   by gathers.cpp     the same of those that read a param tensor evaluation.cpp  states of boxes,
//   as compiled `Hooks::classify` gives them tile_runs.cpp   states of all tiles of a grid, from
//   large boxes to small ones
//
// Here is what they share.
#pragma once

#include <fajit/interval.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fajit::form {

// What a register holds. Which of the four is known when the program is read.
union Value {
  Interval i;
  FInterval f;
  Tri t;
  interval::Bits b;
};

// Registers that every program has: the box. (`INDICES` of interval/statements.py)
enum : int { kB, kH, kQ, kK, kIndices };

// Where a gather looks: the slots of its tensor and of its lo table (-1: none), the dim it scans.
struct Gather { int slot, table, dim, rank; };

// The same for one call: the tensor and its tables with the scanned dim last, and dims of one entry
// in front. What was read last is remembered: the tiles of a row or column read the same elements.
struct View {
  struct Known {
    Interval at[FAJIT_MAX_RANK];
    Value value;
    bool some;
  };
  static constexpr int kKnownBits = 6;

  fajit_tensor tensor, tables[2];
  bool has_tables;
  std::array<Known, 1 << kKnownBits> known;  // by where the scanned range begins
};

// What the operations of one thread's call work on.
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
  // False where the clause does not hold: what a compiled kernel leaves by `break`.
  using Run = bool (*)(const Operation&, Frame&);

  Run run = nullptr;
  int result = -1;
  std::vector<int> operands;
  std::vector<Number> numbers;
  int view = -1;                                // of gathers
  std::vector<std::vector<Operation>> clauses;  // of `any`
};
using Block = std::vector<Operation>;

// What a statement calls. Kinds: i Interval, f FInterval, t Tri, b Bits.
struct Function {
  Operation::Run run;
  std::string operands;  // their kinds
  std::string numbers;   // n: an integer, d: a double
  char result;           // its kind; '?' where it only says whether the clause holds
};
const std::map<std::string, Function>& functions();

// i_gather, t_gather, f_gather and gather_bits, of all their dims with the scanned one last, and
// i_searchsorted, of (slot, right), by dtype; null where there is none.
Operation::Run gather(const std::string& name, const std::string& dtype);
Operation::Run searchsorted(const std::string& dtype, bool right);

// Whether one of the clauses holds.
bool run_any(const std::vector<Block>& clauses, Frame& frame);

// A mask's interval form: `Code` of interval/statements.py, whose names these are. Whatever is
// asked of it stays within its registers, its tensors and its scalars. Immutable.
struct Program {
  // tensors: (dtype, rank) of each param; `num_tables` pairs of lo and hi tables follow them in a
  // call. Throws ValueError or TypeError for what is no such code.
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
