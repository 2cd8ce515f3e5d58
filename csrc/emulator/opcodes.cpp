#include "opcodes.h"

#include <unordered_map>

#include "ops.h"

namespace fajit::emulator {

const std::vector<OpcodeRow>& opcode_table() {
  static const std::vector<OpcodeRow> rows = {
      {"add", "", "", "", decode_add},
      {"addc", "", "", "", decode_carry},
      {"sub", "", "", "", decode_sub},
      {"subc", "", "", "", decode_carry},
      {"mul", "", "", "", decode_mul},
      {"mad", "", "", "", decode_mad},
      {"madc", "", "", "", decode_carry},
      {"fma", "", "", "", decode_fma},
      {"div", "", "", "", decode_div},
      {"rem", "", "", "", decode_rem},
      {"abs", "", "", "", decode_abs},
      {"neg", "", "", "", decode_neg},
      {"min", "", "", "", decode_min},
      {"max", "", "", "", decode_max},
      {"sad", "", "", "", decode_sad},
      {"copysign", "", "", "", decode_copysign},
      {"testp", "", "", "", decode_testp},
      {"rcp", "", "", "", decode_rcp},
      {"sqrt", "", "", "", decode_sqrt},
      {"rsqrt", "", "", "", decode_rsqrt},
      {"sin", "", "", "", decode_sin},
      {"cos", "", "", "", decode_cos},
      {"lg2", "", "", "", decode_lg2},
      {"ex2", "", "", "", decode_ex2},
      {"tanh", "", "", "", decode_tanh},
      {"and", "", "", "", decode_and},
      {"or", "", "", "", decode_or},
      {"xor", "", "", "", decode_xor},
      {"not", "", "", "", decode_not},
      {"cnot", "", "", "", decode_cnot},
      {"shl", "", "", "", decode_shl},
      {"shr", "", "", "", decode_shr},
      {"shf", "", "", "", decode_shf},
      {"bfe", "", "", "", decode_bfe},
      {"bfi", "", "", "", decode_bfi},
      {"bfind", "", "", "", decode_bfind},
      {"brev", "", "", "", decode_brev},
      {"popc", "", "", "", decode_popc},
      {"clz", "", "", "", decode_clz},
      {"prmt", "", "", "", decode_prmt},
      {"lop3", "", "", "", decode_lop3},
      {"setp", "", "", "", decode_setp},
      {"set", "", "", "", decode_set},
      {"selp", "", "", "", decode_selp},
      {"slct", "", "", "", decode_slct},
      {"cvt", "", "", "", decode_cvt},
      {"mov", "", "", "", decode_mov},
      {"cvta", "", "", "", decode_cvta},
      {"isspacep", "", "", "", decode_isspacep},
      {"ld", "", "", "", decode_ld},
      {"ldu", "", "", "", decode_ld},
      {"st", "", "", "", decode_st},
      {"atom", "", "", "", decode_atom},
      {"red", "", "", "", decode_red},
      {"prefetch", "", "", "", decode_nothing},
      {"prefetchu", "", "", "", decode_nothing},
      {"membar", "", "", "", decode_nothing},
      {"fence", "", "", "", decode_nothing},
      {"griddepcontrol", "", "", "", decode_nothing},
      {"nanosleep", "", "", "", decode_nothing},
      {"discard", "", "", "", decode_nothing},
      {"applypriority", "", "", "", decode_nothing},
      {"createpolicy", "", "", "", decode_createpolicy},
      {"cp", "", "", "", decode_cp},
      {"mma", "", "", "", decode_mma},
      {"ldmatrix", "", "", "", decode_ldmatrix},
      {"movmatrix", "", "", "", decode_movmatrix},
      {"shfl", "", "", "", decode_shfl},
      {"vote", "", "", "", decode_vote},
      {"redux", "", "", "", decode_redux},
      {"match", "", "", "", decode_match},
      {"activemask", "", "", "", decode_activemask},
      {"elect", "", "", "", decode_elect},
      {"bra", "", "", "", decode_bra},
      {"brx", "", "", "", decode_brx},
      {"ret", "", "", "", decode_exit},
      {"exit", "", "", "", decode_exit},
      {"trap", "", "", "", decode_trap},
      {"bar", "", "", "", decode_bar},
      {"barrier", "", "", "", decode_bar},
  };
  return rows;
}

const OpcodeRow* find_opcode(std::string_view name) {
  static const auto* index = [] {
    auto* map = new std::unordered_map<std::string_view, const OpcodeRow*>;
    for (const OpcodeRow& row : opcode_table()) map->emplace(row.name, &row);
    return map;
  }();
  const auto found = index->find(name);
  return found == index->end() ? nullptr : found->second;
}

}  // namespace fajit::emulator
