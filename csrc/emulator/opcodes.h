// The table of opcodes: all that a kernel may consist of.
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

// Decode functions of the rows, one for each opcode or family.
using Decode = void(Decoder& d);
Decode decode_add, decode_sub, decode_mul, decode_mad, decode_div, decode_rem, decode_abs,
    decode_neg, decode_min, decode_max, decode_and, decode_or, decode_xor, decode_not, decode_shl,
    decode_shr, decode_shf, decode_bfe, decode_bfi, decode_bfind, decode_brev, decode_popc,
    decode_clz, decode_prmt, decode_lop3, decode_fma, decode_copysign, decode_rcp, decode_sqrt,
    decode_rsqrt, decode_sin, decode_cos, decode_lg2, decode_ex2, decode_tanh, decode_setp,
    decode_selp, decode_slct, decode_cvt, decode_mov, decode_cvta, decode_ld, decode_st,
    decode_atom, decode_red, decode_nothing, decode_createpolicy, decode_cp, decode_mma,
    decode_ldmatrix, decode_shfl, decode_vote, decode_redux, decode_activemask, decode_bra,
    decode_brx, decode_exit, decode_trap, decode_bar;

// Forms of opcodes that ops_integer.cpp hands on to ops_float.cpp.
void decode_float_add(Decoder& d, bool subtract);
void decode_float_product(Decoder& d, bool divide);
void decode_float_sign(Decoder& d, bool negate);
void decode_float_minmax(Decoder& d, bool maximum);

}  // namespace fajit::emulator
