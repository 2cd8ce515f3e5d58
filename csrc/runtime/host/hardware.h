// Features and cache sizes of this machine's CPU.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace fajit::runtime {

// Features of this machine's CPU beyond its architecture's baseline, by the names in the table of
// CPU targets (codegen/targets.py): "x86-64-v3", "x86-64-v4", "avx512_vnni", "avx512_fp16",
// "avx512_bf16", "fast_avx512_bf16" (its products are faster than those of fp32), "amx_tile" and
// "amx_bf16" (where the kernel lets this process use tiles). A feature counts only if the operating
// system saves its registers (XCR0).
const std::vector<std::string>& cpu_features();

// FLASHATTN_JIT_TARGET of the process environment, null if not set. Calls without a target read it
// every time: os.environ.get takes 1.5 us, this 0.1 us with its binding. Needs the GIL, because
// os.environ writes the environment under it.
const char* target_variable();

// Bytes of one core's L1 data, L2 and L3 cache; 0 where unknown.
std::array<int64_t, 3> cache_sizes();

}  // namespace fajit::runtime
