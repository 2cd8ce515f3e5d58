#include "ptx/decoder.h"

#include <algorithm>

#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

struct SpecialName {
  std::string_view name;
  bool wide;
  Special value;
};

// (2u << 31 is 0: the masks below hold for lane 31 too.)
#define FAJIT_SPECIAL(expression) [](const ThreadPosition& p) -> uint64_t { return expression; }
constexpr SpecialName kSpecials[] = {
    {"%tid.x", false, FAJIT_SPECIAL(p.thread[0])},
    {"%tid.y", false, FAJIT_SPECIAL(p.thread[1])},
    {"%tid.z", false, FAJIT_SPECIAL(p.thread[2])},
    {"%ntid.x", false, FAJIT_SPECIAL(p.block_size[0])},
    {"%ntid.y", false, FAJIT_SPECIAL(p.block_size[1])},
    {"%ntid.z", false, FAJIT_SPECIAL(p.block_size[2])},
    {"%ctaid.x", false, FAJIT_SPECIAL(p.block[0])},
    {"%ctaid.y", false, FAJIT_SPECIAL(p.block[1])},
    {"%ctaid.z", false, FAJIT_SPECIAL(p.block[2])},
    {"%nctaid.x", false, FAJIT_SPECIAL(p.grid_size[0])},
    {"%nctaid.y", false, FAJIT_SPECIAL(p.grid_size[1])},
    {"%nctaid.z", false, FAJIT_SPECIAL(p.grid_size[2])},
    {"%laneid", false, FAJIT_SPECIAL(p.lane)},
    {"%warpid", false, FAJIT_SPECIAL(p.warp)},
    {"%nwarpid", false, FAJIT_SPECIAL(p.num_warps)},
    {"%lanemask_eq", false, FAJIT_SPECIAL(1u << p.lane)},
    {"%lanemask_lt", false, FAJIT_SPECIAL((1u << p.lane) - 1)},
    {"%lanemask_le", false, FAJIT_SPECIAL((2u << p.lane) - 1)},
    {"%lanemask_gt", false, FAJIT_SPECIAL(~((2u << p.lane) - 1))},
    {"%lanemask_ge", false, FAJIT_SPECIAL(~((1u << p.lane) - 1))},
    {"%dynamic_smem_size", false, FAJIT_SPECIAL(p.dynamic_shared)},
    {"%smid", false, FAJIT_SPECIAL(0u * p.lane)},
    {"%nsmid", false, FAJIT_SPECIAL(1u + 0u * p.lane)},
    {"%clock", false, FAJIT_SPECIAL(0u * p.lane)},  // time is not modelled
    {"%clock64", true, FAJIT_SPECIAL(0u * p.lane)},
    {"%globaltimer", true, FAJIT_SPECIAL(0u * p.lane)},
};
#undef FAJIT_SPECIAL

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

Decoder::Decoder(const Module& module, const Entry& entry, const Symbols& symbols)
    : module_(module), entry_(entry), symbols_(symbols) {
  kernel_.name = entry.name;
  kernel_.min_blocks = entry.min_blocks;
  kernel_.source_locations = entry.locations;
  slots_.assign(entry.registers.size(), kNoSlot);
  layout();
}

// Assigns offsets to variables; of shared variables, the dynamic array is last.
void Decoder::layout() {
  uint64_t shared = kSharedBase, local = 0;
  std::vector<Variable> dynamic;
  auto assign = [&](Variable variable) {
    const uint64_t align = std::max<uint64_t>(variable.align, 1);
    if (variable.space == Space::local) {
      variable.offset = round_up(local, align);
      local = variable.offset + variable.bytes;
      variables_[variable.name] = variable;
    } else if (variable.space == Space::shared && variable.dynamic) {
      dynamic.push_back(variable);
    } else if (variable.space == Space::shared) {
      variable.offset = round_up(shared, align);
      shared = variable.offset + variable.bytes;
      variables_[variable.name] = variable;
      kernel_.shared.push_back(variable);
    }
  };
  for (const Variable& variable : module_.variables) assign(variable);
  for (const Variable& variable : entry_.variables) assign(variable);
  kernel_.static_shared_end = static_cast<uint32_t>(shared);
  for (Variable& variable : dynamic) {  // all extern arrays begin at the same address
    uint64_t align = 16;
    for (const Variable& other : dynamic) align = std::max(align, other.align);
    variable.offset = round_up(shared, align);
    variables_[variable.name] = variable;
    kernel_.shared.push_back(variable);
  }
  kernel_.local_bytes = static_cast<uint32_t>(local);
  for (const Variable& param : entry_.params) {
    variables_[param.name] = param;
    kernel_.params.push_back(param);
    kernel_.param_bytes = static_cast<uint32_t>(param.offset + param.bytes);
  }
}

Kernel Decoder::decode() {
  for (const Statement& statement : entry_.statements) {
    statement_ = &statement;
    decode_statement();
  }
  insn = Insn();  // a kernel may end without ret
  insn.flow = Flow::exit;
  append(kernel_.locations.empty() ? 0 : kernel_.locations.back(), 0, "end of the kernel");
  find_uses();
  return std::move(kernel_);
}

void Decoder::decode_statement() {
  const OpcodeRow* row = find_opcode(statement_->opcode);
  if (row == nullptr) fail("unknown opcode");
  taken_.assign(statement_->modifiers.size(), false);
  insn = Insn();
  if (statement_->guard >= 0) {
    const uint32_t reg = static_cast<uint32_t>(statement_->guard);
    if (entry_.registers[reg].type != Type::pred) fail("the guard is not a predicate");
    insn.guard = slot_of(reg);
    insn.guard_negated = statement_->guard_negated;
  }
  row->decode(*this);
  for (size_t i = 0; i < taken_.size(); ++i)
    if (!taken_[i]) fail("unknown modifier '." + statement_->modifiers[i] + "'");
  append(statement_->location, statement_->text_line, mnemonic());
}

// Marks the instructions that share a register with some wgmma.
void Decoder::find_uses() {
  kernel_.held.resize(kernel_.register_words / kLanes);
  for (size_t pc = 0, at = 0; pc < kernel_.code.size(); ++pc)
    for (; at < kernel_.uses_end[pc]; ++at)
      if (kernel_.held[kernel_.uses[at] / kLanes] && (kernel_.code[pc].flags & kProduct) == 0)
        kernel_.code[pc].flags |= kSharesHeld;
}

void Decoder::append(uint32_t location, uint32_t text_line, std::string mnemonic) {
  kernel_.code.push_back(insn);
  kernel_.locations.push_back(location);
  kernel_.text_lines.push_back(text_line);
  kernel_.mnemonics.push_back(std::move(mnemonic));
  kernel_.uses.insert(kernel_.uses.end(), uses_.begin(), uses_.end());
  kernel_.uses_end.push_back(static_cast<uint32_t>(kernel_.uses.size()));
  for (const uint32_t use : uses_) {
    if ((insn.flags & kProduct) == 0) break;
    kernel_.held.resize(std::max<size_t>(kernel_.held.size(), use / kLanes + 1));
    kernel_.held[use / kLanes] = true;
  }
  uses_.clear();
}

std::string Decoder::mnemonic() const {
  std::string text = statement_->opcode;
  for (const std::string& modifier : statement_->modifiers) text += "." + modifier;
  return text;
}

void Decoder::fail(const std::string& message) const {
  throw EmulatorError("PTX line " + std::to_string(statement_->text_line) + ", kernel " +
                      entry_.name + ", instruction " + mnemonic() + ": " + message);
}

bool Decoder::accept(std::string_view modifier) {
  for (size_t i = 0; i < taken_.size(); ++i) {
    if (taken_[i] || statement_->modifiers[i] != modifier) continue;
    taken_[i] = true;
    return true;
  }
  return false;
}

int Decoder::accept_one(std::initializer_list<std::string_view> names) {
  int index = 0;
  for (const std::string_view name : names) {
    if (accept(name)) return index;
    ++index;
  }
  return -1;
}

int Decoder::expect_one(std::initializer_list<std::string_view> names) {
  const int index = accept_one(names);
  if (index >= 0) return index;
  std::string text = "expected one of";
  for (const std::string_view name : names) text += " ." + std::string(name);
  fail(text);
}

Type Decoder::type() {
  for (size_t i = 0; i < taken_.size(); ++i) {
    const Type type = type_of(statement_->modifiers[i]);
    if (taken_[i] || type == Type::none) continue;
    taken_[i] = true;
    return type;
  }
  fail("no type");
}

bool Decoder::has_float_type() const {
  for (const std::string& modifier : statement_->modifiers)
    if (is_float(type_of(modifier)) || modifier == "f32x2") return true;
  return false;
}

bool Decoder::has_modifier(std::string_view modifier) const {
  return std::find(statement_->modifiers.begin(), statement_->modifiers.end(), modifier) !=
         statement_->modifiers.end();
}

Round Decoder::rounding(Round otherwise) {
  static constexpr Round kRounds[] = {Round::nearest, Round::zero, Round::down, Round::up};
  const int index = accept_one({"rn", "rz", "rm", "rp"});
  return index < 0 ? otherwise : kRounds[index];
}

Space Decoder::space() {
  static constexpr Space kSpaces[] = {Space::global, Space::shared, Space::shared,  Space::local,
                                      Space::param,  Space::param,  Space::constant};
  const int index =
      accept_one({"global", "shared", "shared::cta", "local", "param", "param::entry", "const"});
  return index < 0 ? Space::generic : kSpaces[index];
}

void Decoder::ignore(std::initializer_list<std::string_view> prefixes) {
  for (size_t i = 0; i < taken_.size(); ++i)
    for (const std::string_view prefix : prefixes)
      if (statement_->modifiers[i].compare(0, prefix.size(), prefix) == 0) taken_[i] = true;
}

const Operand& Decoder::operand(size_t index) const {
  if (index >= statement_->operands.size()) fail("too few operands");
  return statement_->operands[index];
}

void Decoder::expect_operands(size_t least, size_t most) {
  if (num_operands() < least || num_operands() > most)
    fail("has " + std::to_string(num_operands()) + " operands");
}

void Decoder::require_target(int version, int target, bool specific) const {
  const bool fits =
      specific ? module_.target == target && module_.specific : module_.target >= target;
  if (module_.version < version || !fits)
    fail("needs PTX ISA " + std::to_string(version / 10) + "." + std::to_string(version % 10) +
         " and sm_" + std::to_string(target) + (specific ? "a" : ""));
}

uint32_t Decoder::allocate(unsigned bytes) {
  const uint32_t slot = kernel_.register_words;
  kernel_.register_words += bytes == 0 ? 32 : bytes <= 4 ? 32 : bytes == 8 ? 64 : 128;
  return slot;
}

uint32_t Decoder::slot_of(uint32_t reg) {
  if (slots_[reg] == kNoSlot) slots_[reg] = allocate(bytes_of(entry_.registers[reg].type));
  return slots_[reg];
}

uint32_t Decoder::constant(uint64_t bits, bool wide) {
  if (!wide) bits &= 0xffffffffu;
  const auto [found, is_new] = constants_.try_emplace({bits, wide}, 0);
  if (is_new) {
    found->second = allocate(wide ? 8 : 4);
    (wide ? kernel_.constants64 : kernel_.constants32).emplace_back(found->second, bits);
  }
  return found->second;
}

uint32_t Decoder::special(const std::string& name, bool& wide) {
  for (const SpecialName& known : kSpecials) {
    if (known.name != name) continue;
    wide = known.wide;
    const auto [found, is_new] = specials_.try_emplace(name, 0);
    if (is_new) {
      found->second = allocate(wide ? 8 : 4);
      kernel_.specials.emplace_back(known.value, found->second | (wide ? kWideSlot : 0));
    }
    return found->second;
  }
  fail("unknown register '" + name + "'");
}

uint64_t Decoder::symbol_address(const Operand& operand) const {
  const auto variable = variables_.find(operand.name);
  // An offset in the variable's window, which cvta converts to a generic address.
  if (variable != variables_.end())
    return variable->second.offset + static_cast<uint64_t>(operand.bits);
  const auto global = symbols_.find(operand.name);
  if (global == symbols_.end()) fail("unknown name '" + operand.name + "'");
  return global->second + static_cast<uint64_t>(operand.bits);
}

uint32_t Decoder::wide_source(const Operand& operand, Type type, bool& wide) {
  wide = is_wide(type);
  switch (operand.kind) {
    case Operand::Kind::reg: {
      const Type held = entry_.registers[operand.reg].type;
      if ((held == Type::pred) != (type == Type::pred))
        fail("'" + operand.name + "' is not of the expected kind");
      if (bytes_of(held) < bytes_of(type)) fail("'" + operand.name + "' is too narrow");
      wide = is_wide(held);
      if (bytes_of(held) == 4) uses_.push_back(slot_of(operand.reg));
      return slot_of(operand.reg);
    }
    case Operand::Kind::special: return special(operand.name, wide);
    case Operand::Kind::symbol: return constant(symbol_address(operand), wide);
    case Operand::Kind::integer:
      if (type == Type::pred) return constant(operand.bits != 0 ? kAllLanes : 0, false);
      if (type == Type::f32)
        return constant(bits_as<uint32_t>(static_cast<float>(operand.bits)), false);
      if (type == Type::f64)
        return constant(bits_as<uint64_t>(static_cast<double>(operand.bits)), true);
      if (bytes_of(type) == 2) return constant(static_cast<uint64_t>(operand.bits) & 0xffff, false);
      return constant(static_cast<uint64_t>(operand.bits), wide);
    case Operand::Kind::real:
      if (operand.is_f32 || wide) {
        if (operand.is_f32 && wide) fail("a 32-bit literal where 64 bits are expected");
        return constant(static_cast<uint64_t>(operand.bits), wide);
      }
      return constant(bits_as<uint32_t>(static_cast<float>(bits_as<double>(operand.bits))), false);
    default: fail("an operand of this kind is not expected here");
  }
}

uint32_t Decoder::source(const Operand& operand, Type type) {
  bool wide = false;
  const uint32_t slot = wide_source(operand, type, wide);
  if (wide != is_wide(type)) fail("'" + operand.name + "' has another width than the type");
  return slot;
}

uint32_t Decoder::wide_destination(const Operand& operand, Type type, bool& wide) {
  wide = is_wide(type);
  if (operand.kind == Operand::Kind::sink) return allocate(bytes_of(type));
  if (operand.kind != Operand::Kind::reg) fail("the destination is not a register");
  const Type held = entry_.registers[operand.reg].type;
  if ((held == Type::pred) != (type == Type::pred) || bytes_of(held) < bytes_of(type))
    fail("'" + operand.name + "' cannot hold the result");
  wide = is_wide(held);
  if (bytes_of(held) == 4) uses_.push_back(slot_of(operand.reg) | kWriteUse);
  return slot_of(operand.reg);
}

uint32_t Decoder::destination(const Operand& operand, Type type) {
  bool wide = false;
  const uint32_t slot = wide_destination(operand, type, wide);
  if (wide != is_wide(type)) fail("'" + operand.name + "' has another width than the type");
  return slot;
}

uint32_t Decoder::address_base(const Operand& address, bool& wide) {
  if (address.kind != Operand::Kind::address) fail("expected [address]");
  const Operand& base = address.elements[0];
  wide = true;
  if (base.kind == Operand::Kind::integer) return constant(static_cast<uint64_t>(base.bits), true);
  return wide_source(base, base.kind == Operand::Kind::symbol ? Type::u64 : Type::u32, wide);
}

int64_t Decoder::literal(size_t index, int64_t least, int64_t most) const {
  const Operand& found = operand(index);
  if (found.kind != Operand::Kind::integer || found.bits < least || found.bits > most)
    fail("operand " + std::to_string(index) + " is not a constant from " + std::to_string(least) +
         " to " + std::to_string(most));
  return found.bits;
}

void Decoder::add_registers(size_t index, size_t count, Type type, bool written,
                            std::vector<uint32_t>& slots) {
  const Operand& whole = operand(index);
  const bool vector = whole.kind == Operand::Kind::vector;
  const std::vector<Operand> elements = vector ? whole.elements : std::vector{whole};
  if (elements.size() != count)
    fail("operand " + std::to_string(index) + " has " + std::to_string(elements.size()) +
         " registers, not " + std::to_string(count));
  for (const Operand& element : elements)
    slots.push_back(written ? destination(element, type) : source(element, type));
}

void Decoder::address(size_t index, int slot) {
  bool wide = false;
  insn.slots[slot] = address_base(operand(index), wide);
  insn.immediate = operand(index).bits;
  if (operand(index).elements.size() > 1) fail("coordinates are not expected here");
  if (wide) insn.flags |= kWideAddress;
}

void Decoder::list_address(const Operand& address, std::vector<uint32_t>& list) {
  bool wide = false;
  const uint32_t base = address_base(address, wide);
  list.insert(list.end(), {base, wide, static_cast<uint32_t>(address.bits)});
}

uint32_t Decoder::add_list(const std::vector<uint32_t>& slots) {
  const uint32_t first = static_cast<uint32_t>(kernel_.lists.size());
  kernel_.lists.insert(kernel_.lists.end(), slots.begin(), slots.end());
  return first;
}

uint32_t Decoder::label_of(const std::string& name) const {
  for (uint32_t scope = statement_->scope;; scope = entry_.scope_parents[scope]) {
    const auto found = entry_.labels.find({scope, name});
    if (found != entry_.labels.end()) return found->second;
    if (scope == 0) break;
  }
  fail("unknown label '" + name + "'");
}

uint32_t Decoder::label(const Operand& operand) const {
  if (operand.kind != Operand::Kind::symbol) fail("expected a label");
  return label_of(operand.name);
}

const std::vector<std::string>* Decoder::branch_table(const std::string& name) const {
  const auto found = entry_.branch_tables.find(name);
  return found == entry_.branch_tables.end() ? nullptr : &found->second;
}

}  // namespace fajit::emulator
