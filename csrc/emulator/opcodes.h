// The table of opcodes: all that a kernel may consist of.
#pragma once
#include <string_view>
#include <vector>

namespace fajit::emulator {

class Decoder;

struct OpcodeRow {
  std::string_view name;
  std::string_view types;      // and forms
  std::string_view semantics;  // one line
  // `opcode inputs = outputs` cases separated by ';', operands as type:value; or `test: name` where
  // the row needs memory, other lanes or control flow.
  std::string_view vector;
  void (*decode)(Decoder&);
};

const std::vector<OpcodeRow>& opcode_table();
const OpcodeRow* find_opcode(std::string_view name);  // null: not in the table

}  // namespace fajit::emulator
