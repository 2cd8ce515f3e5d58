// Reads PTX text as nvcc writes it (and hand-written text in the same forms).
#pragma once
#include <string_view>

#include "ast.h"

namespace fajit::emulator {

// Throws EmulatorError with the PTX line of what it cannot read. Bodies of functions other than
// kernels are skipped: a kernel that calls one is refused when it is decoded.
Module parse(std::string_view text);

}  // namespace fajit::emulator
