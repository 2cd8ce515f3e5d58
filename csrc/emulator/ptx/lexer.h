// Splits PTX text into tokens.
#pragma once
#include <cctype>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace fajit::emulator {

// The emulator cannot run the program: the message names what is not supported, and where.
struct EmulatorError : std::runtime_error { using std::runtime_error::runtime_error; };

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

inline void Lexer::fail(const std::string& message) const {
  throw EmulatorError("PTX line " + std::to_string(token_.line) + ": " + message);
}

inline void Lexer::expect(std::string_view expected) {
  if (!accept(expected)) {
    const std::string found =
        token_.kind == Token::Kind::end ? "the end" : std::string(token_.text);
    fail("expected '" + std::string(expected) + "', found '" + found + "'");
  }
}

inline void Lexer::skip_blanks() {
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c == '\n') {
      ++line_;
      ++at_;
    } else if (std::isspace(static_cast<unsigned char>(c))) {
      ++at_;
    } else if (text_.compare(at_, 2, "//") == 0) {
      while (at_ < text_.size() && text_[at_] != '\n') ++at_;
    } else if (text_.compare(at_, 2, "/*") == 0) {
      const size_t end = text_.find("*/", at_ + 2);
      const size_t stop = end == std::string_view::npos ? text_.size() : end + 2;
      for (; at_ < stop; ++at_) line_ += text_[at_] == '\n';
    } else {
      return;
    }
  }
}

// Words may contain dots and double colons, so that `ld.global.L1::no_allocate.f32` and `%tid.x`
// are one token each; a single colon, which ends a label, is punctuation.
inline void Lexer::advance() {
  skip_blanks();
  token_.line = line_;
  const size_t begin = at_;
  if (at_ >= text_.size()) {
    token_.kind = Token::Kind::end;
    token_.text = {};
    return;
  }
  auto is_word = [&](size_t i) {
    const unsigned char c = static_cast<unsigned char>(text_[i]);
    return std::isalnum(c) || c == '_' || c == '$' || c == '.' || c == '%';
  };
  const char first = text_[at_];
  if (first == '"') {
    const size_t end = text_.find('"', at_ + 1);
    at_ = end == std::string_view::npos ? text_.size() : end + 1;
    token_.kind = Token::Kind::string;
    token_.text = text_.substr(begin + 1, at_ - begin - 2);
    return;
  }
  if (std::isdigit(static_cast<unsigned char>(first))) {
    token_.kind = Token::Kind::number;
    while (at_ < text_.size() &&
           (is_word(at_) || ((text_[at_] == '+' || text_[at_] == '-') &&
                             (text_[at_ - 1] == 'e' || text_[at_ - 1] == 'E') &&
                             text_.substr(begin, at_ - begin).find('.') != std::string_view::npos)))
      ++at_;
  } else if (is_word(at_)) {
    token_.kind = Token::Kind::word;
    while (at_ < text_.size()) {
      if (is_word(at_)) ++at_;
      else if (text_.compare(at_, 2, "::") == 0) at_ += 2;
      else break;
    }
  } else {
    token_.kind = Token::Kind::punctuation;
    ++at_;
  }
  token_.text = text_.substr(begin, at_ - begin);
}

}  // namespace fajit::emulator
