#include <algorithm>

#include "../runtime/python_values.h"
#include "batch.h"

namespace py = pybind11;

namespace fajit::form {
namespace {

using runtime::Items;
using runtime::to_int64;

constexpr int kMostRegisters = 1 << 16;
constexpr int kDeepest = 256;  // clauses inside of clauses

void require(bool holds, const std::string& what) {
  if (!holds) throw py::value_error("no interval form: " + what);
}

int index_below(int64_t value, size_t end, const char* what) {
  require(value >= 0 && static_cast<uint64_t>(value) < end,
          std::string(what) + " " + std::to_string(value));
  return static_cast<int>(value);
}

std::string text(py::handle value, const char* name) {
  if (!PyUnicode_Check(value.ptr())) throw py::type_error(std::string(name) + " must be a str");
  return value.cast<std::string>();
}

// numbers: how many of the operands behind the first are lows, then the constant ends.
Lanes meet(const Operation& operation, Frame& frame, Lanes lanes) {
  const std::vector<int>& operands = operation.operands;
  const size_t first_high = 1 + static_cast<size_t>(operation.numbers[0].whole);
  Lanes stay = lanes;
  each(lanes, [&](int lane) {
    int64_t lo = operation.numbers[1].whole, hi = operation.numbers[2].whole;
    for (size_t i = 1; i < operands.size(); ++i) {
      const Interval limit = frame.lanes(operands[i])[lane].i;
      if (i < first_high)
        lo = interval::larger(lo, limit.lo);
      else
        hi = interval::smaller(hi, limit.hi);
    }
    Interval value = frame.lanes(operands[0])[lane].i;
    if (!interval::meet(value, lo, hi)) stay &= ~(Lanes{1} << lane);
    frame.lanes(operation.result)[lane].i = value;
  });
  return stay;
}

Lanes any(const Operation& operation, Frame& frame, Lanes lanes) {
  return run_any(operation.clauses, frame, lanes);
}

// Reads statements in order; what a register holds is what was written to it last.
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
    const int reg = index_below(to_int64(source, "operands"), kinds_.size(), "register");
    require(kinds_[static_cast<size_t>(reg)] == kind,
            "register " + std::to_string(reg) + " holds no " + kind);
    return reg;
  }

 private:
  Operation statement(py::handle source, int depth) {
    const std::string name = text(source.attr("name"), "name");
    const py::object listed = source.attr("operands"), constants = source.attr("numbers");
    const Items operands(listed, "operands"), numbers(constants, "numbers");
    const auto number = [&](size_t i) {
      require(i < numbers.size(), name + " has too few numbers");
      return to_int64(numbers[i], "numbers");
    };
    const auto slot = [&] { return index_below(number(0), program_.dtypes.size(), "slot"); };

    Operation made;
    std::string kinds;  // of the operands
    char result = 'i';
    const bool bits = name == "gather_bits";
    if (const auto found = functions().find(name); found != functions().end()) {
      const Function& function = found->second;
      made.run = function.run;
      kinds = function.operands;
      result = function.result;
      require(numbers.size() == function.numbers.size(), name + " takes other numbers");
      for (size_t i = 0; i < numbers.size(); ++i) {
        made.numbers.push_back(function.numbers[i] == 'n' ? Number{number(i), 0}
                                                          : Number{0, real(numbers[i])});
      }
      if (name == "i_scalar" || name == "f_scalar") {
        const int scalar = index_below(number(0), program_.scalar_kinds.size(), "scalar");
        require(program_.scalar_kinds[static_cast<size_t>(scalar)] == result, "a scalar's kind");
      } else if (name == "i_places" || name == "i_ranks") {
        slot();
        if (name == "i_places") index_below(number(1), FAJIT_MAX_RANK, "dim");
      }
    } else if (name == "meet") {
      made.run = meet;
      kinds.assign(std::max(operands.size(), size_t{1}), 'i');
      index_below(number(0), kinds.size(), "lows:");
      for (size_t i = 0; i < 3; ++i) made.numbers.push_back({number(i), 0});
    } else if (name == "any") {
      made.run = any;
      result = '?';
      made.clauses = clauses(source.attr("clauses"), depth + 1);
    } else if (name == "i_searchsorted") {
      require(program_.ranks[static_cast<size_t>(slot())] == 1, "a sorted tensor has one dim");
      made.run = searchsorted(program_.dtypes[static_cast<size_t>(slot())], number(1) != 0);
      kinds = "i";
      made.numbers.push_back({slot(), 0});
    } else {
      require(bits || name == "i_gather" || name == "t_gather" || name == "f_gather",
              name + " is unknown");
      const size_t tensor = static_cast<size_t>(slot());
      const int rank = program_.ranks[tensor];
      const int dim =
          index_below(number(bits ? 1 : 2), static_cast<size_t>(std::max(rank, 1)), "dim");
      const int table = bits || number(1) == -1
                            ? -1
                            : index_below(number(1), program_.num_tensors() - 1, "table");
      require(table < 0 || static_cast<size_t>(table) >= program_.dtypes.size(),
              "a param as table");
      made.run = gather(name, program_.dtypes[tensor]);
      kinds.assign(static_cast<size_t>(rank), 'i');
      result = bits ? 'b' : name[0];
      if (result == 'i') made.numbers = {{number(3), 0}, {number(4), 0}};
      made.view = static_cast<int>(program_.gathers.size());
      program_.gathers.push_back({slot(), table, dim, rank});
    }
    require(made.run != nullptr, name + " does not read this dtype");
    require(operands.size() == kinds.size(), name + " takes another number of operands");
    for (size_t i = 0; i < kinds.size(); ++i) {
      made.operands.push_back(operand(operands[i], kinds[i]));
    }
    if (made.view >= 0 && !kinds.empty()) {  // the scanned dim last
      const auto scanned = made.operands.begin() + program_.gathers.back().dim;
      std::rotate(scanned, scanned + 1, made.operands.end());
    }
    if (result != '?') made.result = define(source.attr("result"), result);
    return made;
  }

  int define(py::handle source, char kind) {
    const int reg = index_below(to_int64(source, "result"), kMostRegisters, "register");
    require(reg >= kIndices, "a result in the place of an index");
    if (static_cast<size_t>(reg) >= kinds_.size()) kinds_.resize(static_cast<size_t>(reg) + 1);
    kinds_[static_cast<size_t>(reg)] = kind;
    program_.num_registers = static_cast<int>(kinds_.size());
    return reg;
  }

  static double real(py::handle value) {
    const double number = PyFloat_AsDouble(value.ptr());
    if (number == -1.0 && PyErr_Occurred()) throw py::error_already_set();
    return number;
  }

  Program& program_;
  std::string kinds_;  // of what registers hold
};

}  // namespace

Program::Program(py::handle code, py::handle tensors, int num_table_pairs, std::string kinds)
    : num_tables(num_table_pairs), scalar_kinds(std::move(kinds)) {
  const Items items(tensors, "tensors");
  for (size_t i = 0; i < items.size(); ++i) {
    const py::object pair = items[i];
    const Items tensor(pair, "a tensor");
    require(tensor.size() == 2, "a tensor is (dtype, rank)");
    dtypes.push_back(text(tensor[0], "dtype"));
    ranks.push_back(index_below(to_int64(tensor[1], "rank"), FAJIT_MAX_RANK + 1, "rank"));
  }
  require(num_tables >= 0 && num_tables <= 1 << 16, "num_tables");
  Reader reader(*this);
  once = reader.block(code.attr("once"));
  const py::object listed = code.attr("periods");
  const Items period_items(listed, "periods");
  for (size_t i = 0; i < period_items.size(); ++i) {
    const py::object source = period_items[i];
    const Items period(source, "a period");
    require(period.size() == 3, "a period is (index, offset, divisor)");
    periods.push_back({reader.operand(period[0], 'i'), reader.operand(period[1], 'i'),
                       reader.operand(period[2], 'i')});
    require(periods.back()[0] == kQ || periods.back()[0] == kK, "a period is of q or k");
  }
  guards = reader.block(code.attr("guards"));
  keep = reader.clauses(code.attr("keep"));
  drop = reader.clauses(code.attr("drop"));
}

}  // namespace fajit::form
