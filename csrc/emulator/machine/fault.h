// A fault of a kernel: what happened, and where.
#pragma once
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>

namespace fajit::emulator {

inline std::string triple_text(const uint32_t (&v)[3]) {
  return "(" + std::to_string(v[0]) + ", " + std::to_string(v[1]) + ", " + std::to_string(v[2]) +
         ")";
}

struct FaultInfo {
  std::string kind;    // "out of bounds", "race", "deadlock" ...
  std::string detail;  // a sentence
  std::string kernel;
  std::string source;  // file:line, with the line it was inlined at
  std::string instruction;
  uint32_t block[3] = {0, 0, 0};
  uint32_t thread[3] = {0, 0, 0};
  uint32_t linear_thread = 0;
  bool has_address = false;
  uint64_t address = 0;
  std::string allocation;  // the nearest one; empty if none is near
  int64_t offset = 0;      // of the address in the allocation

  std::string text() const;
};

inline std::string FaultInfo::text() const {
  std::string result = kind + ": " + detail + "\n  kernel " + kernel;
  if (!source.empty()) result += " at " + source;
  if (!instruction.empty()) result += "\n  instruction " + instruction;
  result += "\n  block " + triple_text(block) + " thread " + triple_text(thread);
  if (has_address) {
    char hex[32];
    std::snprintf(hex, sizeof hex, "0x%llx", static_cast<unsigned long long>(address));
    result += "\n  address " + std::string(hex);
    if (!allocation.empty())
      result += ", " + allocation + (offset < 0 ? " " : " + ") + std::to_string(offset) + " bytes";
  }
  return result;
}

struct Fault : std::exception {
  explicit Fault(FaultInfo information) : info(std::move(information)), message(info.text()) {}
  const char* what() const noexcept override { return message.c_str(); }
  FaultInfo info;
  std::string message;
};

}  // namespace fajit::emulator
