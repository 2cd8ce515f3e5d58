// Use of the host's floating-point unit: rounding modes, and FMA instructions.
#pragma once
#include <cfenv>

#include "ops/formats.h"

// Compiles the function for machines with FMA too; the loader selects one. The rest of the emulator
// is baseline x86-64, so that a wheel runs anywhere.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define FAJIT_CLONES __attribute__((target_clones("fma", "default")))
#else
#define FAJIT_CLONES
#endif

namespace fajit::emulator {

// Sets the rounding mode, for .rz, .rm and .rp. Operands and results of the computations in its
// scope must be volatile, because the compiler does not model the mode.
class HostRounding {
 public:
  explicit HostRounding(Round round) {
    std::fesetround(round == Round::zero   ? FE_TOWARDZERO
                    : round == Round::down ? FE_DOWNWARD
                    : round == Round::up   ? FE_UPWARD
                                           : FE_TONEAREST);
  }
  ~HostRounding() { std::fesetround(FE_TONEAREST); }
  HostRounding(const HostRounding&) = delete;
  HostRounding& operator=(const HostRounding&) = delete;
};

}  // namespace fajit::emulator
