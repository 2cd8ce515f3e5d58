// The result of parsing PTX text: variables, registers, and instructions of each kernel.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ptx/types.h"

namespace fajit::emulator {

struct Operand {
  enum class Kind : uint8_t {
    reg,      // reg: index into Entry::registers
    special,  // name: %tid.x
    integer,  // bits
    real,     // bits of an fp64 (is_f32: of an fp32)
    symbol,   // name: a variable, a label, a branch table
    address,  // [elements[0] + bits], of a tensor [elements[0] + bits, elements[1]]
    vector,   // {elements}
    pair,     // elements[0] | elements[1]
    sink,     // _
  };
  Kind kind = Kind::sink;
  bool negated = false;  // !%p
  bool is_f32 = false;
  uint32_t reg = 0;
  int64_t bits = 0;
  std::string name;
  std::vector<Operand> elements;
};

struct Location {
  uint32_t file = 0, line = 0;
  uint32_t inlined_file = 0, inlined_line = 0;  // 0: not inlined
};

struct Statement {
  std::string opcode;                  // first word
  std::vector<std::string> modifiers;  // the others
  std::vector<Operand> operands;
  int guard = -1;  // register
  bool guard_negated = false;
  uint32_t scope = 0;
  uint32_t location = 0;
  uint32_t text_line = 0;  // in the PTX
};

enum class Space : uint8_t { generic, global, shared, local, constant, param };

struct Variable {
  std::string name;
  Space space = Space::global;
  uint64_t bytes = 0;
  uint64_t align = 1;
  uint64_t offset = 0;   // shared, local, param
  bool dynamic = false;  // an extern shared array
  std::vector<uint8_t> initial;
};

struct Register {
  std::string name;
  Type type = Type::none;
};

struct Entry {
  std::string name;
  std::vector<Variable> params;
  std::vector<Variable> variables;  // shared and local ones of this kernel
  std::vector<Register> registers;
  std::vector<Statement> statements;
  std::vector<uint32_t> scope_parents;  // scope 0 is the body
  std::map<std::pair<uint32_t, std::string>, uint32_t> labels;
  std::map<std::string, std::vector<std::string>> branch_tables;
  std::vector<Location> locations;  // 0: unknown
  uint32_t min_blocks = 1;          // .minnctapersm
};

struct Module {
  int version = 0, target = 0;  // 78 for .version 7.8, 90 for .target sm_90 or sm_90a
  bool specific = false;        // sm_90a
  std::vector<Variable> variables;
  std::vector<Entry> entries;
  std::map<uint32_t, std::string> files;
};

// Parses PTX text as written by nvcc (and hand-written text of the same forms). Throws
// EmulatorError with the PTX line of what it cannot parse. Bodies of functions other than kernels
// are skipped; a kernel that calls one is rejected.
Module parse(std::string_view text);

}  // namespace fajit::emulator
