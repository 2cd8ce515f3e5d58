#include "ptx/ast.h"

#include <cstdlib>
#include <unordered_map>

#include "ptx/lexer.h"

namespace fajit::emulator {
namespace {

class Parser {
 public:
  explicit Parser(std::string_view text) : lexer_(text) {}

  Module parse() {
    while (lexer_.peek().kind != Token::Kind::end) top_level();
    return std::move(module_);
  }

 private:
  using Names = std::unordered_map<std::string, uint32_t>;

  void top_level() {
    const Token word = lexer_.next();
    const std::string_view text = word.text;
    if (text == ".version") {
      module_.version = digits(lexer_.next().text);
    } else if (text == ".address_size") {
      lexer_.next();
    } else if (text == ".target") {
      const std::string_view target = lexer_.next().text;
      module_.target = digits(target);
      module_.specific = target.back() == 'a';
      while (lexer_.accept(",")) lexer_.next();
    } else if (text == ".file") {
      file();
    } else if (text == ".section") {
      lexer_.next();
      skip_braces();
    } else if (text == ".entry") {
      entry();
    } else if (text == ".func") {
      if (Entry function; find_body(function)) skip_braces();
    } else if (text == ".global" || text == ".const" || text == ".shared") {
      module_.variables.push_back(variable(text));
    } else if (text == ".pragma" || text == ".alias") {
      skip_to(";");
    } else if (text != ".visible" && text != ".extern" && text != ".weak" && text != ".common") {
      lexer_.fail("unknown directive '" + std::string(text) + "'");
    }
  }

  static int digits(std::string_view text) {  // 78 of 7.8, 90 of sm_90a
    int value = 0;
    for (const char c : text)
      if (c >= '0' && c <= '9') value = value * 10 + (c - '0');
    return value;
  }

  void skip_to(std::string_view end) {
    while (!lexer_.accept(end)) {
      if (lexer_.peek().kind == Token::Kind::end) lexer_.fail("unexpected end of text");
      lexer_.next();
    }
  }

  void skip_braces() {
    int depth = 0;
    do {
      const Token token = lexer_.next();
      if (token.kind == Token::Kind::end) lexer_.fail("unexpected end of text");
      depth += token.is("{") - token.is("}");
    } while (depth > 0);
  }

  // Past .maxntid 128, 1, 1 and the like; false for a declaration.
  bool find_body(Entry& entry) {
    while (!lexer_.peek().is("{")) {
      if (lexer_.accept(";")) return false;
      if (lexer_.accept(".minnctapersm")) {
        entry.min_blocks = static_cast<uint32_t>(integer());
        continue;
      }
      if (lexer_.next().kind == Token::Kind::end) lexer_.fail("unexpected end of text");
    }
    return true;
  }

  void file() {
    const uint32_t index = static_cast<uint32_t>(integer());
    module_.files[index] = std::string(lexer_.next().text);
    while (lexer_.accept(",")) lexer_.next();  // time stamp and size
  }

  int64_t integer() {
    const Operand value = number();
    if (value.kind != Operand::Kind::integer) lexer_.fail("expected an integer");
    return value.bits;
  }

  uint64_t alignment() {
    const int64_t value = integer();
    if (value < 1 || (value & (value - 1)) != 0) lexer_.fail("an alignment is a power of two");
    return static_cast<uint64_t>(value);
  }

  Type type_name() {
    const Token word = lexer_.next();
    const Type type = type_of(word.text.substr(1));
    if (type == Type::none) lexer_.fail("unknown type '" + std::string(word.text) + "'");
    return type;
  }

  // `.align 4 .b8 name[16] = {...}` after the state space.
  Variable variable(std::string_view space) {
    Variable result;
    result.space = space == ".shared"  ? Space::shared
                   : space == ".local" ? Space::local
                   : space == ".const" ? Space::constant
                   : space == ".param" ? Space::param
                                       : Space::global;
    uint64_t vector = 1;
    result.align = 0;
    for (;;) {
      if (lexer_.accept(".align")) result.align = alignment();
      else if (lexer_.accept(".v2")) vector = 2;
      else if (lexer_.accept(".v4")) vector = 4;
      else break;
    }
    const Type type = type_name();
    // Of a pointer: the state space and alignment of the target.
    for (const char* word : {".ptr", ".global", ".shared", ".const"}) lexer_.accept(word);
    if (lexer_.accept(".align")) integer();
    result.name = std::string(lexer_.next().text);
    uint64_t count = vector;
    bool unsized = false;
    while (lexer_.accept("[")) {
      if (lexer_.peek().is("]")) unsized = true;
      else count *= static_cast<uint64_t>(integer());
      lexer_.expect("]");
    }
    const uint64_t element = bytes_of(type);
    result.bytes = unsized ? 0 : element * count;
    result.dynamic = unsized && result.space == Space::shared;
    if (result.align == 0) result.align = element * vector;
    if (result.space == Space::param && result.align < element * vector)
      lexer_.fail("parameter " + result.name + " is aligned to less than an element");
    if (lexer_.accept("=")) initialiser(result, element, type);
    if (result.space != Space::param) lexer_.expect(";");
    return result;
  }

  void initialiser(Variable& variable, uint64_t element, Type type) {
    if (lexer_.accept("{")) {
      for (; !lexer_.accept("}"); lexer_.accept(",")) initialiser(variable, element, type);
      return;
    }
    if (lexer_.peek().kind == Token::Kind::word)
      lexer_.fail("an initialiser with the address of '" + std::string(lexer_.peek().text) + "'");
    const Operand value = number();
    uint64_t bits = static_cast<uint64_t>(value.bits);
    if (value.kind == Operand::Kind::real && !value.is_f32 && type == Type::f32)
      bits = bits_as<uint32_t>(static_cast<float>(bits_as<double>(bits)));
    for (uint64_t i = 0; i < element; ++i)
      variable.initial.push_back(static_cast<uint8_t>(bits >> (8 * i)));
  }

  Operand number() {
    const bool negative = lexer_.accept("-");
    const Token token = lexer_.next();
    const std::string text(token.text);
    Operand result;
    char* end = nullptr;
    if (text.size() == 10 && text[0] == '0' && (text[1] == 'f' || text[1] == 'F')) {
      result.kind = Operand::Kind::real;
      result.is_f32 = true;
      result.bits = static_cast<int64_t>(std::strtoull(text.c_str() + 2, &end, 16));
      if (negative) result.bits ^= 0x80000000ll;
    } else if (text.size() == 18 && text[0] == '0' && (text[1] == 'd' || text[1] == 'D')) {
      result.kind = Operand::Kind::real;
      uint64_t bits = std::strtoull(text.c_str() + 2, &end, 16);
      if (negative) bits ^= 1ull << 63;
      result.bits = static_cast<int64_t>(bits);
    } else if (text.find('.') != std::string::npos) {
      result.kind = Operand::Kind::real;
      const double value = std::strtod(text.c_str(), &end);
      result.bits = bits_as<int64_t>(negative ? -value : value);
    } else {
      result.kind = Operand::Kind::integer;
      const uint64_t value = std::strtoull(text.c_str(), &end, 0);
      if (*end == 'U') ++end;
      result.bits = static_cast<int64_t>(negative ? 0 - value : value);
    }
    if (token.kind != Token::Kind::number || end == nullptr || *end != '\0')
      lexer_.fail("expected a number, found '" + text + "'");
    return result;
  }

  void entry() {
    Entry result;
    result.name = std::string(lexer_.next().text);
    result.locations.emplace_back();
    entry_ = &result;
    names_.assign(1, {});
    scopes_.assign(1, 0);
    result.scope_parents.assign(1, 0);
    location_ = 0;
    if (lexer_.accept("(")) {
      uint64_t offset = 0;
      while (!lexer_.accept(")")) {
        lexer_.expect(".param");
        Variable param = variable(".param");
        offset = (offset + param.align - 1) / param.align * param.align;
        param.offset = offset;
        offset += param.bytes;
        result.params.push_back(std::move(param));
        lexer_.accept(",");
      }
    }
    if (!find_body(result)) return;
    lexer_.expect("{");
    while (!scopes_.empty()) statement();
    module_.entries.push_back(std::move(result));
    entry_ = nullptr;
  }

  void statement() {
    if (lexer_.accept("{")) {
      scopes_.push_back(static_cast<uint32_t>(entry_->scope_parents.size()));
      entry_->scope_parents.push_back(scopes_[scopes_.size() - 2]);
      names_.emplace_back();
      return;
    }
    if (lexer_.accept("}")) {
      scopes_.pop_back();
      names_.pop_back();
      return;
    }
    if (lexer_.accept(";")) return;
    const Token word = lexer_.peek();
    if (word.kind == Token::Kind::end) lexer_.fail("unexpected end of text");
    if (word.text[0] == '.') return directive();
    if (word.kind == Token::Kind::word) {
      lexer_.next();
      if (lexer_.accept(":")) return label(std::string(word.text));
      return instruction(word, -1, false);
    }
    if (lexer_.accept("@")) {
      const bool negated = lexer_.accept("!");
      const Token guard = lexer_.next();
      const int reg = find_register(std::string(guard.text));
      if (reg < 0) lexer_.fail("unknown guard '" + std::string(guard.text) + "'");
      return instruction(lexer_.next(), reg, negated);
    }
    lexer_.fail("unexpected '" + std::string(word.text) + "'");
  }

  void label(const std::string& name) {
    if (lexer_.accept(".branchtargets")) {
      auto& table = entry_->branch_tables[name];
      do table.emplace_back(lexer_.next().text);
      while (lexer_.accept(","));
      lexer_.expect(";");
      return;
    }
    if (lexer_.peek().is(".callprototype")) return skip_to(";");
    entry_->labels[{scopes_.back(), name}] = static_cast<uint32_t>(entry_->statements.size());
  }

  void directive() {
    const Token word = lexer_.next();
    if (word.is(".reg")) return registers();
    if (word.is(".loc")) return loc();
    if (word.is(".shared") || word.is(".local")) {
      entry_->variables.push_back(variable(word.text));
    } else if (word.is(".pragma")) {
      skip_to(";");
    } else {
      lexer_.fail("unknown directive '" + std::string(word.text) + "' in a kernel");
    }
  }

  void registers() {
    const Type type = type_name();
    do {
      const std::string name(lexer_.next().text);
      if (lexer_.accept("<")) {
        const int64_t count = integer();
        lexer_.expect(">");
        for (int64_t i = 0; i < count; ++i) declare(name + std::to_string(i), type);
      } else {
        declare(name, type);
      }
    } while (lexer_.accept(","));
    lexer_.expect(";");
  }

  void declare(const std::string& name, Type type) {
    names_.back()[name] = static_cast<uint32_t>(entry_->registers.size());
    entry_->registers.push_back({name, type});
  }

  int find_register(const std::string& name) const {
    for (size_t i = names_.size(); i-- > 0;) {
      const auto found = names_[i].find(name);
      if (found != names_[i].end()) return static_cast<int>(found->second);
    }
    return -1;
  }

  void loc() {
    Location location;
    location.file = static_cast<uint32_t>(integer());
    location.line = static_cast<uint32_t>(integer());
    integer();  // column
    while (lexer_.accept(",")) {
      if (lexer_.accept("inlined_at")) {
        location.inlined_file = static_cast<uint32_t>(integer());
        location.inlined_line = static_cast<uint32_t>(integer());
        integer();
      } else {
        lexer_.expect("function_name");
        lexer_.next();
        if (lexer_.accept("+")) integer();
      }
    }
    if (location.line == 0) return;  // line 0: keep the location before
    location_ = static_cast<uint32_t>(entry_->locations.size());
    entry_->locations.push_back(location);
  }

  void instruction(const Token& word, int guard, bool negated) {
    Statement result;
    result.guard = guard;
    result.guard_negated = negated;
    result.scope = scopes_.back();
    result.location = location_;
    result.text_line = word.line;
    std::string_view rest = word.text;
    for (bool first = true; !rest.empty(); first = false) {
      const size_t dot = rest.find('.');
      const std::string part(rest.substr(0, dot));
      if (first) result.opcode = part;
      else result.modifiers.push_back(part);
      rest = dot == std::string_view::npos ? std::string_view() : rest.substr(dot + 1);
    }
    if (result.opcode == "call") {
      lexer_.fail("a call: only kernels whose functions are all inlined can be emulated");
    }
    while (!lexer_.accept(";")) {
      result.operands.push_back(operand());
      if (!lexer_.accept(",") && !lexer_.peek().is(";"))
        lexer_.fail("expected ',' or ';', found '" + std::string(lexer_.peek().text) + "'");
    }
    entry_->statements.push_back(std::move(result));
  }

  Operand operand() {
    Operand first = simple_operand();
    if (!lexer_.accept("|")) return first;
    Operand result;
    result.kind = Operand::Kind::pair;
    result.elements.push_back(std::move(first));
    result.elements.push_back(simple_operand());
    return result;
  }

  Operand simple_operand() {
    Operand result;
    if (lexer_.accept("{")) {
      result.kind = Operand::Kind::vector;
      while (!lexer_.accept("}")) {
        result.elements.push_back(simple_operand());
        lexer_.accept(",");
      }
      return result;
    }
    if (lexer_.accept("[")) {
      result.kind = Operand::Kind::address;
      result.elements.push_back(simple_operand());
      if (lexer_.accept("+")) result.bits = integer();
      else if (lexer_.peek().is("-")) result.bits = integer();
      if (lexer_.accept(",")) result.elements.push_back(simple_operand());
      lexer_.expect("]");
      return result;
    }
    if (lexer_.accept("!")) {
      result = simple_operand();
      result.negated = true;
      return result;
    }
    if (lexer_.peek().is("-") || lexer_.peek().kind == Token::Kind::number) return number();
    const Token word = lexer_.next();
    if (word.kind != Token::Kind::word) lexer_.fail("unexpected '" + std::string(word.text) + "'");
    result.name = std::string(word.text);
    if (result.name == "_") return result;
    const int reg = find_register(result.name);
    if (reg >= 0) {
      result.kind = Operand::Kind::reg;
      result.reg = static_cast<uint32_t>(reg);
    } else if (result.name[0] == '%') {
      result.kind = Operand::Kind::special;
    } else {
      result.kind = Operand::Kind::symbol;
      if (lexer_.accept("+")) result.bits = integer();
    }
    return result;
  }

  Lexer lexer_;
  Module module_;
  Entry* entry_ = nullptr;
  std::vector<Names> names_;      // of the open scopes
  std::vector<uint32_t> scopes_;  // their indices
  uint32_t location_ = 0;
};

}  // namespace

Module parse(std::string_view text) { return Parser(text).parse(); }

}  // namespace fajit::emulator
