#include "program.h"

#include <algorithm>
#include <unordered_map>

#include "../runtime/python_values.h"
#include "functions.h"

namespace py = pybind11;

namespace fajit::form {
namespace {

using runtime::Items;
using runtime::to_int64;

constexpr size_t kMostRegisters = size_t{1} << 16;
constexpr int kDeepest = 256;  // clauses inside of clauses

void require(bool holds, const std::string& what) {
  if (!holds) throw py::value_error("no interval form: " + what);
}

std::string text(py::handle value, const char* name) {
  if (!PyUnicode_Check(value.ptr())) throw py::type_error(std::string(name) + " must be a str");
  return value.cast<std::string>();
}

int index_below(int64_t value, size_t end, const std::string& what) {
  require(value >= 0 && static_cast<uint64_t>(value) < end, what + " " + std::to_string(value));
  return static_cast<int>(value);
}

// --- operations that are no function of the headers ------------------------------------------------

// numbers: how many of the operands after the first are lows, then the constant ends.
Lanes meet(const Operation& operation, Frame& frame, Lanes lanes) {
  const std::vector<int>& operands = operation.operands;
  const size_t first_high = 1 + static_cast<size_t>(operation.numbers[0].whole);
  Value* const out = frame.lanes(operation.result);
  Lanes stay = lanes;
  each(lanes, [&](int lane) {
    int64_t lo = operation.numbers[1].whole, hi = operation.numbers[2].whole;
    for (size_t i = 1; i < operands.size(); ++i) {
      const Interval limit = frame.lanes(operands[i])[lane].i;
      if (i < first_high) lo = interval::larger(lo, limit.lo);
      else hi = interval::smaller(hi, limit.hi);
    }
    Interval value = frame.lanes(operands[0])[lane].i;
    if (interval::meet(value, lo, hi)) out[lane].i = value;
    else stay &= ~(Lanes{1} << lane);
  });
  return stay;
}

Lanes any(const Operation& operation, Frame& frame, Lanes lanes) {
  return run_any(operation.clauses, frame, lanes);
}

// --- reading ---------------------------------------------------------------------------------------

// Reads statements in order. A register is known from the statement that it is the result of to the
// end of that one's clause; the next clause may have its place.
class Reader {
 public:
  explicit Reader(Program& program) : program_(program) {
    for (int64_t index = 0; index <= kK; ++index) define(index, 'i');
    define(-1, 'i');  // kZero, which statements do not call by any number
    places_.erase(-1);
  }

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
      const size_t outer = kinds_.size();
      made.push_back(block(items[i].attr("statements"), depth));
      for (; kinds_.size() > outer; kinds_.pop_back()) places_.erase(numbers_.at(kinds_.size() - 1));
      numbers_.resize(outer);
    }
    return made;
  }

  // The place of a register whose value is known.
  int operand(int64_t number, char kind) const {
    const auto place = places_.find(number);
    require(place != places_.end(), "register " + std::to_string(number) + " is not known");
    require(kinds_[static_cast<size_t>(place->second)] == kind,
            "register " + std::to_string(number) + " is of another kind");
    return place->second;
  }

 private:
  int define(int64_t number, char kind) {
    const int place = static_cast<int>(kinds_.size());
    require(kinds_.size() < kMostRegisters, "too many registers");
    require(places_.emplace(number, place).second,
            "register " + std::to_string(number) + " has a value already");
    kinds_ += kind;
    numbers_.resize(kinds_.size(), -1);
    numbers_.back() = number;
    program_.num_registers = std::max(program_.num_registers, place + 1);
    return place;
  }

  Operation statement(py::handle source, int depth) {
    const std::string name = text(source.attr("name"), "name");
    const py::object listed = source.attr("operands"), constants = source.attr("numbers");
    const Items operands(listed, "operands"), numbers(constants, "numbers");
    const auto number = [&](size_t i) {
      require(i < numbers.size(), name + " has too few numbers");
      return to_int64(numbers[i], "numbers");
    };
    Operation made;
    // Kinds of the operands and of the result.
    std::string kinds;
    char result = 'i';
    if (const auto found = functions().find(name); found != functions().end()) {
      const Function& function = found->second;
      made.run = function.run;
      kinds = function.operands;
      result = function.result;
      require(numbers.size() == function.numbers.size(), name + " has other numbers");
      for (size_t i = 0; i < numbers.size(); ++i) {
        made.numbers.push_back(function.numbers[i] == 'n' ? Number{number(i), 0}
                                                          : Number{0, real(numbers[i])});
      }
      check_slots(name, made.numbers);
    } else if (name == "meet") {
      made.run = meet;
      kinds.assign(std::max(operands.size(), size_t{1}), 'i');
      index_below(number(0), kinds.size(), "meet has lows");
      for (size_t i = 0; i < 3; ++i) made.numbers.push_back({number(i), 0});
    } else if (name == "any") {
      made.run = any;
      result = '?';
      made.clauses = clauses(source.attr("clauses"), depth + 1);
    } else if (name == "i_searchsorted") {
      const int slot = index_below(number(0), program_.dtypes.size(), "slot");
      require(program_.ranks[slot] == 1, "a sorted tensor has one dim");
      made.run = searchsorted(program_.dtypes[slot], number(1) != 0);
      kinds = "i";
      made.numbers.push_back({slot, 0});
    } else {
      return read_gather(name, operands, number, source);
    }
    require(made.run != nullptr, name + " does not read this dtype");
    require(operands.size() == kinds.size(), name + " has another number of operands");
    for (size_t i = 0; i < kinds.size(); ++i) {
      made.operands.push_back(operand(to_int64(operands[i], "operands"), kinds[i]));
    }
    if (result != '?') made.result = define(to_int64(source.attr("result"), "result"), result);
    return made;
  }

  // Gathers scan the last of their operands: it is moved there, and zeros fill up the others.
  template <class F>
  Operation read_gather(const std::string& name, const Items& operands, F number,
                        py::handle source) {
    const bool integers = name == "i_gather", bits = name == "gather_bits";
    require(integers || bits || name == "t_gather" || name == "f_gather", name + " is unknown");
    const int slot = index_below(number(0), program_.dtypes.size(), "slot");
    const int rank = program_.ranks[static_cast<size_t>(slot)];
    const int compiled = compiled_rank(rank);
    const int dim = index_below(number(bits ? 1 : 2), static_cast<size_t>(std::max(rank, 1)), "dim");
    int table = -1;
    if (!bits && number(1) != -1) {
      table = index_below(number(1), program_.num_tensors() - 1, "table");
      require(static_cast<size_t>(table) >= program_.dtypes.size(), "a table is a param");
    }
    require(operands.size() == static_cast<size_t>(rank), name + " has another number of indices");
    Operation made;
    made.run = form::gather(name, program_.dtypes[static_cast<size_t>(slot)], compiled);
    require(made.run != nullptr, name + " does not read this dtype");
    made.operands.assign(static_cast<size_t>(compiled), kZero);
    auto next = made.operands.end() - std::max(rank, 1);
    for (int d = 0; d < rank; ++d) {
      const int index = operand(to_int64(operands[static_cast<size_t>(d)], "operands"), 'i');
      (d == dim ? made.operands.back() : *next++) = index;
    }
    if (integers) made.numbers = {{number(3), 0}, {number(4), 0}};
    const char kind = bits ? 'b' : name[0];
    const Gather gather{kind, slot, table, dim, rank, compiled};
    std::vector<Gather>& known = program_.gathers;
    const auto place = std::find(known.begin(), known.end(), gather);
    made.view = static_cast<int>(place - known.begin());
    if (place == known.end()) known.push_back(gather);
    made.result = define(to_int64(source.attr("result"), "result"), kind);
    return made;
  }

  // Numbers that are slots and dims.
  void check_slots(const std::string& name, const std::vector<Number>& numbers) const {
    if (name == "i_scalar" || name == "f_scalar") {
      const int slot = index_below(numbers[0].whole, program_.scalar_kinds.size(), "scalar");
      require(program_.scalar_kinds[static_cast<size_t>(slot)] == name[0], "a scalar's kind");
    } else if (name == "i_places" || name == "i_ranks") {
      index_below(numbers[0].whole, program_.dtypes.size(), "slot");
      if (name == "i_places") index_below(numbers[1].whole, FAJIT_MAX_RANK, "dim");
    }
  }

  static double real(py::handle value) {
    const double number = PyFloat_AsDouble(value.ptr());
    if (number == -1.0 && PyErr_Occurred()) throw py::error_already_set();
    return number;
  }

  Program& program_;
  std::string kinds_;                        // of the registers in use, by place
  std::vector<int64_t> numbers_;             // by which statements call them
  std::unordered_map<int64_t, int> places_;  // of registers, by number
};

}  // namespace

Program::Program(py::handle code, py::handle declared, int tables, std::string kinds)
    : num_tables(tables), scalar_kinds(std::move(kinds)) {
  const Items items(declared, "tensors");
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
  const py::object period_source = code.attr("periods");
  const Items period_items(period_source, "periods");
  for (size_t i = 0; i < period_items.size(); ++i) {
    const py::object source = period_items[i];
    int64_t numbers[3];
    runtime::to_int64s(source, 3, numbers, "a period");
    require(numbers[0] == kQ || numbers[0] == kK, "a period is of q_idx or kv_idx");
    periods.push_back({static_cast<int>(numbers[0]), reader.operand(numbers[1], 'i'),
                       reader.operand(numbers[2], 'i')});
  }
  guards = reader.block(code.attr("guards"));
  keep = reader.clauses(code.attr("keep"));
  drop = reader.clauses(code.attr("drop"));
}

}  // namespace fajit::form
