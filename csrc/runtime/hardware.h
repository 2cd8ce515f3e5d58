// What this machine's CPU can do.
#pragma once

#include <array>
#include <cstdint>

namespace fajit::runtime {

// The highest CPU target of this machine without its "cpu:" prefix: "amx_bf16" (that below with
// AMX_TILE and AMX_BF16, where the kernel lets this process use tiles), "avx512_bf16" (x86-64-v4
// with AVX512_BF16 and AVX512_VNNI), "avx512" (x86-64-v4), "avx2" (x86-64-v3) or "generic". A
// feature counts only where the operating system saves its registers (XCR0).
const char* cpu_isa();

// FLASHATTN_JIT_TARGET of the process environment, null where it is not set. Calls without a target
// read it every time: os.environ.get takes 1.5 us, this 0.1 us with its binding. Needs the GIL,
// under which os.environ writes.
const char* target_variable();

// Bytes of one core's L1 data, L2 and L3 cache; 0 where unknown.
std::array<int64_t, 3> cache_sizes();

}  // namespace fajit::runtime
