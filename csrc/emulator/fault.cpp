#include "fault.h"

#include <cstdio>

namespace fajit::emulator {

std::string FaultInfo::text() const {
  auto triple = [](const uint32_t (&v)[3]) {
    return "(" + std::to_string(v[0]) + ", " + std::to_string(v[1]) + ", " + std::to_string(v[2]) +
           ")";
  };
  std::string result = kind + ": " + detail + "\n  kernel " + kernel;
  if (!source.empty()) result += " at " + source;
  if (!instruction.empty()) result += "\n  instruction " + instruction;
  result += "\n  block " + triple(block) + " thread " + triple(thread);
  if (has_address) {
    char hex[32];
    std::snprintf(hex, sizeof hex, "0x%llx", static_cast<unsigned long long>(address));
    result += "\n  address " + std::string(hex);
    if (!allocation.empty())
      result += ", " + allocation + (offset < 0 ? " " : " + ") + std::to_string(offset) + " bytes";
  }
  return result;
}

}  // namespace fajit::emulator
