// What the host's floating-point unit is asked for: rounding modes, and fused instructions.
#pragma once
#include <cfenv>

#include "ops/formats.h"

// The function is compiled for FMA machines too, and the loader picks. The rest of the emulator is
// plain x86-64, so that a wheel runs anywhere.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define FAJIT_CLONES __attribute__((target_clones("arch=haswell", "default")))
#else
#define FAJIT_CLONES
#endif

namespace fajit::emulator {

// The rounding mode, for .rz, .rm and .rp. Operands and results of what is computed under it must
// be volatile: the compiler knows nothing of modes.
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
