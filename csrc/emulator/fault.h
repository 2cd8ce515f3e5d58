// What went wrong while a kernel ran, and where.
#pragma once
#include <cstdint>
#include <exception>
#include <string>

namespace fajit::emulator {

struct FaultInfo {
  std::string kind;     // "out of bounds", "race", "deadlock" ...
  std::string detail;   // a sentence
  std::string kernel;
  std::string source;   // file:line, with the line it was inlined at
  std::string instruction;
  uint32_t block[3] = {0, 0, 0};
  uint32_t thread[3] = {0, 0, 0};
  uint32_t linear_thread = 0;
  bool has_address = false;
  uint64_t address = 0;
  std::string allocation;  // empty: none is near
  int64_t offset = 0;      // of the address in the allocation

  std::string text() const;
};

struct Fault : std::exception {
  explicit Fault(FaultInfo information) : info(std::move(information)), message(info.text()) {}
  const char* what() const noexcept override { return message.c_str(); }
  FaultInfo info;
  std::string message;
};

}  // namespace fajit::emulator
