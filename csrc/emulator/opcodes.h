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

// Decode functions of the rows.
// ops_integer.cpp: integer forms; the float forms of the same opcodes are in ops_float.cpp.
void decode_add(Decoder& d);
void decode_sub(Decoder& d);
void decode_mul(Decoder& d);
void decode_mad(Decoder& d);
void decode_div(Decoder& d);
void decode_rem(Decoder& d);
void decode_abs(Decoder& d);
void decode_neg(Decoder& d);
void decode_min(Decoder& d);
void decode_max(Decoder& d);
// ops_bits.cpp
void decode_and(Decoder& d);
void decode_or(Decoder& d);
void decode_xor(Decoder& d);
void decode_not(Decoder& d);
void decode_shl(Decoder& d);
void decode_shr(Decoder& d);
void decode_shf(Decoder& d);
void decode_bfe(Decoder& d);
void decode_bfi(Decoder& d);
void decode_bfind(Decoder& d);
void decode_brev(Decoder& d);
void decode_popc(Decoder& d);
void decode_clz(Decoder& d);
void decode_prmt(Decoder& d);
void decode_lop3(Decoder& d);
// ops_float.cpp, ops_special.cpp (approximations and roots)
void decode_float_add(Decoder& d, bool subtract);
void decode_float_product(Decoder& d, bool divide);
void decode_fma(Decoder& d);
void decode_float_sign(Decoder& d, bool negate);
void decode_float_minmax(Decoder& d, bool maximum);
void decode_copysign(Decoder& d);
void decode_rcp(Decoder& d);
void decode_sqrt(Decoder& d);
void decode_rsqrt(Decoder& d);
void decode_sin(Decoder& d);
void decode_cos(Decoder& d);
void decode_lg2(Decoder& d);
void decode_ex2(Decoder& d);
void decode_tanh(Decoder& d);
// ops_compare.cpp
void decode_setp(Decoder& d);
void decode_selp(Decoder& d);
void decode_slct(Decoder& d);
// ops_convert.cpp
void decode_cvt(Decoder& d);
// ops_move.cpp
void decode_mov(Decoder& d);
void decode_cvta(Decoder& d);
// ops_memory.cpp, ops_atomic.cpp
void decode_ld(Decoder& d);
void decode_st(Decoder& d);
void decode_atom(Decoder& d);
void decode_red(Decoder& d);
void decode_nothing(Decoder& d);
void decode_createpolicy(Decoder& d);
// ops_async.cpp
void decode_cp(Decoder& d);
// ops_matrix.cpp
void decode_mma(Decoder& d);
void decode_ldmatrix(Decoder& d);
// ops_warp.cpp
void decode_shfl(Decoder& d);
void decode_vote(Decoder& d);
void decode_redux(Decoder& d);
void decode_activemask(Decoder& d);
// ops_control.cpp
void decode_bra(Decoder& d);
void decode_brx(Decoder& d);
void decode_exit(Decoder& d);
void decode_trap(Decoder& d);
void decode_bar(Decoder& d);

}  // namespace fajit::emulator
