// Splits PTX text into tokens.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace fajit::emulator {

// The program is not one that this emulator can run: names what it does not know, and where.
struct EmulatorError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Token {
  enum class Kind : uint8_t { end, word, number, string, punctuation };
  Kind kind = Kind::end;
  std::string_view text;
  uint32_t line = 0;

  bool is(std::string_view expected) const { return text == expected && kind != Kind::string; }
};

class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) { advance(); }

  const Token& peek() const { return token_; }
  Token next() {
    Token result = token_;
    advance();
    return result;
  }
  bool accept(std::string_view expected) {
    if (!token_.is(expected)) return false;
    advance();
    return true;
  }
  void expect(std::string_view expected);
  [[noreturn]] void fail(const std::string& message) const;

 private:
  void advance();
  void skip_blanks();

  std::string_view text_;
  size_t at_ = 0;
  uint32_t line_ = 1;
  Token token_;
};

}  // namespace fajit::emulator
