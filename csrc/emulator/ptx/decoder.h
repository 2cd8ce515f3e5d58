// Converts the statements of a kernel to instructions: assigns slots to operands and checks
// modifiers.
#pragma once
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ptx/insn.h"
#include "ptx/lexer.h"

namespace fajit::emulator {

// Host addresses of module variables (.global and .const).
using Symbols = std::unordered_map<std::string, uint64_t>;

inline constexpr size_t kListed = 3;  // entries of list_address

// Passed to the decode function of an opcode: the statement, and the instruction to fill. Modifiers
// are accepted in any order; one that is not accepted is an error.
class Decoder {
 public:
  Decoder(const Module& module, const Entry& entry, const Symbols& symbols);
  Kernel decode();

  Insn insn;
  // Sets insn.exec; null: the opcode does not support the type.
  void set_exec(Exec exec) {
    if (exec == nullptr) fail("not for this type");
    insn.exec = exec;
  }

  bool accept(std::string_view modifier);
  // The index of the first of `names` among the modifiers; -1 if there is none.
  int accept_one(std::initializer_list<std::string_view> names);
  // accept_one(), but an error if there is none.
  int expect_one(std::initializer_list<std::string_view> names);
  Type type();  // the first type among the modifiers; an error if there is none
  bool has_float_type() const;
  bool has_modifier(std::string_view modifier) const;
  Round rounding(Round otherwise);                                // .rn .rz .rm .rp
  Space space();                                                  // generic if there is none
  void ignore(std::initializer_list<std::string_view> prefixes);  // cache hints and the like

  const std::string& opcode() const { return statement_->opcode; }
  size_t num_operands() const { return statement_->operands.size(); }
  const Operand& operand(size_t index) const;
  void expect_operands(size_t least, size_t most);
  void expect_operands(size_t count) { expect_operands(count, count); }
  // An error unless the module is of at least a version of the PTX ISA (78: 7.8) and a target (90).
  // specific: the target is sm_90a and no other.
  void require_target(int version, int target, bool specific = false) const;

  uint32_t source(size_t index, Type type) { return source(operand(index), type); }
  uint32_t source(const Operand& operand, Type type);
  uint32_t destination(size_t index, Type type) { return destination(operand(index), type); }
  uint32_t destination(const Operand& operand, Type type);
  // source() and destination() for operands that may have more bits than the type (ld, st, cvt).
  uint32_t wide_source(const Operand& operand, Type type, bool& wide);
  uint32_t wide_destination(const Operand& operand, Type type, bool& wide);
  uint32_t constant(uint64_t bits, bool wide);
  // The number in an operand, from `least` to `most`.
  int64_t literal(size_t index, int64_t least, int64_t most) const;
  // Appends the slots of an operand with `count` registers: {%r1, %r2}, or one without the braces.
  void add_registers(size_t index, size_t count, Type type, bool written,
                     std::vector<uint32_t>& slots);

  // [address]: slots[slot] becomes the base, insn.immediate the offset, kWideAddress is set.
  void address(size_t index, int slot);
  // For instructions with several addresses: adds the slot of the base, whether that has 64 bits,
  // and the offset.
  void list_address(const Operand& address, std::vector<uint32_t>& list);

  uint32_t add_list(const std::vector<uint32_t>& slots);
  uint32_t label(const Operand& operand) const;
  const std::vector<std::string>* branch_table(const std::string& name) const;
  uint32_t label_of(const std::string& name) const;

  [[noreturn]] void fail(const std::string& message) const;

 private:
  void layout();
  void decode_statement();
  void find_uses();
  void append(uint32_t location, uint32_t text_line, std::string mnemonic);
  std::string mnemonic() const;
  uint32_t slot_of(uint32_t reg);
  uint32_t allocate(unsigned bytes);
  uint32_t special(const std::string& name, bool& wide);
  uint64_t symbol_address(const Operand& operand) const;
  uint32_t address_base(const Operand& address, bool& wide);

  const Module& module_;
  const Entry& entry_;
  const Symbols& symbols_;
  const Statement* statement_ = nullptr;
  Kernel kernel_;
  std::vector<bool> taken_;  // modifiers
  std::vector<uint32_t> slots_;
  std::vector<uint32_t> uses_;  // of the statement
  std::map<std::pair<uint64_t, bool>, uint32_t> constants_;
  std::map<std::string, uint32_t> specials_;
  std::unordered_map<std::string, Variable> variables_;  // shared, local, params
};

}  // namespace fajit::emulator
