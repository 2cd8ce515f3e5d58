#include <algorithm>

#include "../runtime/python_values.h"
#include "program.h"

namespace py = pybind11;

namespace fajit::form {
namespace {

using runtime::Items;
using runtime::to_int64;

constexpr size_t kMostRegisters = 1 << 16;
constexpr int kDeepest = 256;  // nesting of clauses

void require(bool holds, const std::string& what) {
  if (!holds) throw py::value_error("no interval form: " + what);
}

size_t below(int64_t value, size_t end, const char* what) {
  require(value >= 0 && static_cast<uint64_t>(value) < end,
          std::string(what) + " " + std::to_string(value));
  return static_cast<size_t>(value);
}

std::string text(py::handle value, const char* name) {
  if (!PyUnicode_Check(value.ptr())) throw py::type_error(std::string(name) + " must be a str");
  return value.cast<std::string>();
}

// --- statements without a function in the headers ----------------------------------------------

// numbers: how many of the operands after the first are lower bounds, then the constant bounds.
bool meet(const Operation& operation, Frame& frame) {
  const std::vector<int>& operands = operation.operands;
  const size_t first_high = 1 + static_cast<size_t>(operation.numbers[0].whole);
  int64_t lo = operation.numbers[1].whole, hi = operation.numbers[2].whole;
  for (size_t i = 1; i < operands.size(); ++i) {
    const Interval limit = frame.at(operands[i]).i;
    if (i < first_high) {
      lo = interval::larger(lo, limit.lo);
    } else {
      hi = interval::smaller(hi, limit.hi);
    }
  }
  Interval value = frame.at(operands[0]).i;
  const bool some = interval::meet(value, lo, hi);
  frame.at(operation.result).i = value;
  return some;
}

bool any(const Operation& operation, Frame& frame) { return run_any(operation.clauses, frame); }

// --- reading -------------------------------------------------------------------------------------

// Reads statements in order; the type of a register is that of the last value written to it.
class Reader {
 public:
  explicit Reader(Program& program) : program_(program), kinds_(kIndices, 'i') {}

  Block block(py::handle statements, int depth = 0) {
    const Items items(statements, "statements");
    Block block;
    for (size_t i = 0; i < items.size(); ++i) block.push_back(statement(items[i], depth));
    return block;
  }

  std::vector<Block> clauses(py::handle clauses, int depth = 0) {
    require(depth < kDeepest, "clauses are nested too deeply");
    const Items items(clauses, "clauses");
    std::vector<Block> made;
    for (size_t i = 0; i < items.size(); ++i) {
      made.push_back(block(items[i].attr("statements"), depth));
    }
    return made;
  }

  int operand(py::handle source, char kind) const {
    const size_t reg = below(to_int64(source, "operands"), kinds_.size(), "register");
    require(kinds_[reg] == kind, "register " + std::to_string(reg) + " holds no " + kind);
    return static_cast<int>(reg);
  }

 private:
  Operation statement(py::handle source, int depth) {
    const std::string name = text(source.attr("name"), "name");
    const py::object listed = source.attr("operands"), constants = source.attr("numbers");
    const Items operands(listed, "operands"), numbers(constants, "numbers");
    Operation made;
    for (size_t i = 0; i < numbers.size(); ++i) {
      const bool real = PyFloat_Check(numbers[i].ptr());
      const int64_t whole = real ? 0 : to_int64(numbers[i], "numbers");
      made.numbers.push_back({whole, real ? numbers[i].cast<double>() : double(whole), !real});
    }
    const Function called = function(name, made.numbers, operands.size());
    require(called.run != nullptr, name + " does not read this dtype");
    require(numbers.size() == called.numbers.size(), name + " takes other numbers");
    require(operands.size() == called.operands.size(), name + " takes other operands");
    for (size_t i = 0; i < numbers.size(); ++i) {
      require(made.numbers[i].is_whole || called.numbers[i] == 'd', name + " takes integers");
    }
    for (size_t i = 0; i < operands.size(); ++i) {
      made.operands.push_back(operand(operands[i], called.operands[i]));
    }
    made.run = called.run;
    check(name, made);
    if (name == "any") made.clauses = clauses(source.attr("clauses"), depth + 1);
    if (called.result != '?') {
      made.result = define(to_int64(source.attr("result"), "result"), called.result);
    }
    return made;
  }

  // The function of a statement, from its name and, if it reads a tensor, the slot.
  Function function(const std::string& name, const std::vector<Number>& numbers,
                    size_t num_operands) const {
    const auto found = functions().find(name);
    if (found != functions().end()) return found->second;
    if (name == "any") return {any, "", "", '?'};
    if (name == "meet") {
      return {meet, std::string(std::max<size_t>(num_operands, 1), 'i'), "nnn", 'i'};
    }
    const size_t slot =
        below(numbers.empty() ? -1 : numbers[0].whole, program_.dtypes.size(), "slot");
    const std::string &dtype = program_.dtypes[slot], at(program_.ranks[slot], 'i');
    if (name == "i_searchsorted") {
      const bool right = numbers.size() > 1 && numbers[1].whole != 0;
      return {at == "i" ? searchsorted(dtype, right) : nullptr, "i", "nn", 'i'};
    }
    if (name == "i_gather") return {gather(name, dtype), at, "nnnnn", 'i'};
    if (name == "gather_bits") return {gather(name, dtype), at, "nn", 'b'};
    require(name == "t_gather" || name == "f_gather", name + " is unknown");
    return {gather(name, dtype), at, "nnn", name[0]};
  }

  // Checks numbers that are indices: of scalars, tensors, dims, operands.
  void check(const std::string& name, Operation& made) {
    const std::vector<Number>& numbers = made.numbers;
    const auto index = [&](size_t i, size_t end) { return below(numbers[i].whole, end, "index"); };
    if (name == "i_scalar" || name == "f_scalar") {
      const size_t slot = index(0, program_.scalar_kinds.size());
      require(program_.scalar_kinds[slot] == name[0], "the kind of a scalar does not match");
    } else if (name == "i_places" || name == "i_ranks") {
      index(0, program_.dtypes.size());
      if (name == "i_places") index(1, FAJIT_MAX_RANK);
    } else if (name == "meet") {
      index(0, made.operands.size());
    } else if (name.find("gather") != std::string::npos) {
      const size_t rank = made.operands.size();
      const bool bits = name == "gather_bits";
      const size_t dim = index(bits ? 1 : 2, std::max<size_t>(rank, 1));
      int table = -1;
      if (!bits && numbers[1].whole != -1) {
        table = static_cast<int>(index(1, program_.num_tensors() - 1));
        require(numbers[1].whole >= static_cast<int64_t>(program_.dtypes.size()), "no table");
      }
      made.view = static_cast<int>(program_.gathers.size());
      program_.gathers.push_back({static_cast<int>(numbers[0].whole), table, static_cast<int>(dim),
                                  static_cast<int>(rank)});
      if (rank > 0) {  // the scanned dim last
        const auto scanned = made.operands.begin() + static_cast<std::ptrdiff_t>(dim);
        std::rotate(scanned, scanned + 1, made.operands.end());
      }
    }
  }

  int define(int64_t number, char kind) {
    const size_t reg = below(number, kMostRegisters, "register");
    require(reg >= kIndices, "a result in the register of an index");
    if (reg >= kinds_.size()) kinds_.resize(reg + 1, '\0');
    kinds_[reg] = kind;
    program_.num_registers = kinds_.size();
    return static_cast<int>(reg);
  }

  Program& program_;
  std::string kinds_;  // kinds of the values in registers
};

}  // namespace

Program::Program(py::handle code, py::handle tensors, size_t num_table_pairs, std::string kinds)
    : num_tables(num_table_pairs), scalar_kinds(std::move(kinds)) {
  const Items items(tensors, "tensors");
  for (size_t i = 0; i < items.size(); ++i) {
    const py::object pair = items[i];
    const Items tensor = runtime::exactly(pair, 2, "a tensor (dtype, rank)");
    dtypes.push_back(text(tensor[0], "dtype"));
    ranks.push_back(below(to_int64(tensor[1], "rank"), FAJIT_MAX_RANK + 1, "rank"));
  }
  require(num_tables <= 1 << 16, "num_tables");
  Reader reader(*this);
  once = reader.block(code.attr("once"));
  const py::object listed = code.attr("periods");
  const Items period_items(listed, "periods");
  for (size_t i = 0; i < period_items.size(); ++i) {
    const py::object source = period_items[i];
    const Items period = runtime::exactly(source, 3, "a period (index, offset, divisor)");
    periods.push_back({reader.operand(period[0], 'i'), reader.operand(period[1], 'i'),
                       reader.operand(period[2], 'i')});
    require(periods.back()[0] == kQ || periods.back()[0] == kK, "a period is of q or k");
  }
  guards = reader.block(code.attr("guards"));
  keep = reader.clauses(code.attr("keep"));
  drop = reader.clauses(code.attr("drop"));
}

}  // namespace fajit::form
