// The table of supported opcodes.
#pragma once
#include <string_view>
#include <vector>

namespace fajit::emulator {

class Decoder;

struct OpcodeRow {
  std::string_view name;
  std::string_view types;  // and forms
  void (*decode)(Decoder&);
  std::string_view semantics;  // one line
  // `mnemonic operands = result` cases separated by ';', or `test: name` where the row needs
  // memory, other lanes or control flow.
  std::string_view vector;
};

const std::vector<OpcodeRow>& opcode_table();
const OpcodeRow* find_opcode(std::string_view name);  // null: not in the table

// Decode functions in ops/float.cpp that ops/integer.cpp calls for float types.
void decode_fma(Decoder& d);
void decode_float_add(Decoder& d, bool subtract);
void decode_float_product(Decoder& d, bool divide);
void decode_float_sign(Decoder& d, bool negate);
void decode_float_minmax(Decoder& d, bool maximum);

// The forms of cp.async in files of their own, which decode_cp calls.
void decode_copy_arrival(Decoder& d);  // cp.async.mbarrier.arrive
void decode_bulk_copy(Decoder& d);     // cp.async.bulk

}  // namespace fajit::emulator
