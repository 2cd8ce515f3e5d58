// How csrc/interval runs a mask's interval form: statement by statement, 64 boxes at a time.
//
//   program.h      reads the statements that variants/bounds_code.py writes, and checks them
//   functions.h    the functions of fajit/interval*.h, by the names that statements call them by
//   gathers.h      the same of those that read a param tensor
//   evaluation.h   states of boxes, as compiled `Hooks::classify` gives them
//   tile_runs.h    states of all tiles of a grid, from large boxes to small ones
//
// Here is what they share. A register holds a value for each box of a batch. An operation computes
// its result for the boxes of a set, and returns those for which its clause may still hold: what a
// compiled kernel leaves by `break`, a box leaves by dropping out of the set. No operation looks at
// a box that is not in its set.
#pragma once

#include <fajit/interval.h>

#include <array>
#include <cstdint>
#include <vector>

namespace fajit::form {

constexpr int kLanes = 64;
using Lanes = uint64_t;  // a set of the boxes of a batch, one bit each

template <class F> void each(Lanes lanes, F f) {
  for (; lanes != 0; lanes &= lanes - 1) f(__builtin_ctzll(lanes));
}

// What a register holds of one box. Which of the four is known when the program is read.
union Value {
  Interval i;
  FInterval f;
  Tri t;
  interval::Bits b;
};

// Registers that every program has.
enum : int { kB, kH, kQ, kK, kZero, kFirstFree };

// A param tensor as a gather reads it: the scanned dim last, and dims of one entry in front where
// the gather is compiled for a higher rank. What was read is remembered: the tiles of a row and of a
// column read the same elements, and the clauses of a mask do.
struct View {
  struct Known {
    Value value;
    bool some = false;
    Interval at[FAJIT_MAX_RANK];
  };
  static constexpr size_t kKnown = 256;  // a power of two

  fajit_tensor tensor;
  fajit_tensor tables[2];  // lo, hi
  bool has_tables;
  std::vector<Known> known;
};

// What the operations of one call work on.
struct Frame {
  Context context;
  std::vector<View> views;
  std::vector<std::array<Value, kLanes>> registers;

  Value* lanes(int reg) { return registers[static_cast<size_t>(reg)].data(); }
};

struct Number {
  int64_t whole;
  double real;
};

struct Operation {
  using Run = Lanes (*)(const Operation&, Frame&, Lanes);

  Run run = nullptr;
  int result = -1;
  std::vector<int> operands;
  std::vector<Number> numbers;
  int view = -1;                                // of gathers
  std::vector<std::vector<Operation>> clauses;  // of `any`
};
using Block = std::vector<Operation>;

// The boxes of `lanes` for which every operation holds.
inline Lanes run(const Block& block, Frame& frame, Lanes lanes) {
  for (const Operation& operation : block) {
    if (lanes == 0) break;
    lanes = operation.run(operation, frame, lanes);
  }
  return lanes;
}

// The boxes of `lanes` for which one of the clauses holds.
inline Lanes run_any(const std::vector<Block>& clauses, Frame& frame, Lanes lanes) {
  Lanes holds = 0;
  for (const Block& clause : clauses) holds |= run(clause, frame, lanes & ~holds);
  return holds;
}

}  // namespace fajit::form
