#include "host/hardware.h"

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fajit::runtime {
namespace {

#if defined(__x86_64__)

struct Registers { unsigned eax = 0, ebx = 0, ecx = 0, edx = 0; };

Registers cpuid(unsigned leaf, unsigned subleaf = 0) {
  Registers r;
  if (!__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx)) r = {};
  return r;
}

// Extended control register 0: which register files the operating system saves.
uint64_t saved_registers() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

constexpr bool has(unsigned word, std::initializer_list<int> bits) {
  for (const int bit : bits) {
    if (!((word >> bit) & 1u)) return false;
  }
  return true;
}

// Requests permission to use AMX tiles from the kernel, for all threads of this process and its
// children (Linux 5.16, Documentation/arch/x86/xstate.rst). Permission is permanent; repeated
// requests are harmless.
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// On a Xeon of the fifth generation one `vdpbf16ps` takes as long as four fp32 multiply-adds, which
// have twice the products; of Intel's other CPUs that is assumed.
bool has_slow_bf16_products() { return cpuid(0).ebx == 0x756e6547; }  // "Genu" of GenuineIntel

std::vector<std::string> detect_features() {
  constexpr uint64_t kYmmState = 0x6, kZmmState = 0xe6, kTileState = 0x60000;
  const Registers basic = cpuid(1), extended = cpuid(7), amd = cpuid(0x80000001u);
  std::vector<std::string> found;
  // ecx of leaf 1: FMA 12, MOVBE 22, OSXSAVE 27, AVX 28, F16C 29. ebx of leaf 7: BMI1 3, AVX2 5,
  // BMI2 8. ecx of leaf 0x80000001: LZCNT 5. Together x86-64-v3.
  if (!has(basic.ecx, {12, 22, 27, 28, 29}) || !has(extended.ebx, {3, 5, 8}) || !has(amd.ecx, {5}))
    return found;
  const uint64_t saved = saved_registers();
  if ((saved & kYmmState) != kYmmState) return found;
  found.push_back("x86-64-v3");
  // ebx of leaf 7: AVX512 F 16, DQ 17, CD 28, BW 30, VL 31. Together x86-64-v4.
  if (!has(extended.ebx, {16, 17, 28, 30, 31}) || (saved & kZmmState) != kZmmState) return found;
  found.push_back("x86-64-v4");
  // ecx of leaf 7: AVX512_VNNI 11. edx: AVX512_FP16 23. eax of leaf 7, subleaf 1: AVX512_BF16 5.
  const bool vnni = has(extended.ecx, {11}), bf16 = has(cpuid(7, 1).eax, {5});
  if (vnni) found.push_back("avx512_vnni");
  if (has(extended.edx, {23})) found.push_back("avx512_fp16");
  if (bf16) found.push_back("avx512_bf16");
  if (bf16 && !has_slow_bf16_products()) found.push_back("fast_avx512_bf16");
  // edx of leaf 7: AMX_BF16 22, AMX_TILE 24. The kernel is asked last, and only where the CPU has
  // all other features.
  if (vnni && bf16 && has(extended.edx, {22, 24}) && (saved & kTileState) == kTileState &&
      may_use_tiles()) {
    found.push_back("amx_tile");
    found.push_back("amx_bf16");
  }
  return found;
}

#else

// Nothing beyond the architecture's baseline.
std::vector<std::string> detect_features() { return {}; }

#endif

// The first word of a file, empty where it cannot be read. By C's stdio: with torch 2.11 and g++
// 13, std::ifstream crashed in this library; the cause is not known.
std::string first_word(const std::string& path) {
  char word[32] = "";
  if (std::FILE* file = std::fopen(path.c_str(), "re")) {
    if (std::fscanf(file, "%31s", word) != 1) word[0] = '\0';
    std::fclose(file);
  }
  return word;
}

// "48K", "1024K" or "32M" of /sys as bytes; 0 of other texts.
int64_t bytes_of(const std::string& text) {
  char* unit = nullptr;
  const int64_t size = std::strtoll(text.c_str(), &unit, 10);
  return *unit == 'K' ? size << 10 : *unit == 'M' ? size << 20 : size;
}

std::array<int64_t, 3> detect_cache_sizes() {
  constexpr int kMostCaches = 16;
  std::array<int64_t, 3> sizes{};
  for (int i = 0; i < kMostCaches; ++i) {
    const std::string index = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i);
    const std::string level = first_word(index + "/level");
    if (level.empty()) break;
    if (level != "1" && level != "2" && level != "3") continue;
    if (first_word(index + "/type") == "Instruction") continue;
    sizes[static_cast<size_t>(level[0] - '1')] = bytes_of(first_word(index + "/size"));
  }
  return sizes;
}

}  // namespace

const std::vector<std::string>& cpu_features() {
  static const std::vector<std::string> features = detect_features();
  return features;
}

const char* target_variable() { return std::getenv("FLASHATTN_JIT_TARGET"); }

std::array<int64_t, 3> cache_sizes() {
  static const std::array<int64_t, 3> sizes = detect_cache_sizes();
  return sizes;
}

}  // namespace fajit::runtime
