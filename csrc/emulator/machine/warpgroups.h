// Warpgroups, which are four consecutive warps: the products (wgmma) that each warp has in flight,
// the registers that these hold, and whether the four warps execute the same instructions.
//
// Each warp computes its own 16 rows, and waits for no other one. Instead, what a warpgroup
// executes is recorded by the warp that is ahead, and the others must repeat it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

namespace fajit::emulator {

struct Warp;
struct Insn;

inline constexpr uint32_t kGroupWarps = 4;
inline constexpr uint32_t kOperandChunk = 16;  // adjacent bytes of an operand in shared memory

// What all four warps must execute: an instruction, scale-d, and the descriptors of A and B.
using GroupEvent = std::tuple<uint32_t, bool, uint64_t, uint64_t>;

struct Warpgroup {
  std::vector<GroupEvent> events;  // that not all four warps have executed
  uint32_t executed[kGroupWarps] = {};
};

// A wgmma of a warp that no wait has covered.
struct Product {
  void (*perform)(Warp& warp, const Insn& insn, const Product& product) = nullptr;
  bool accumulate = false;
  uint32_t pc = 0;
  uint32_t serial = 0;  // from 1
  uint32_t group = 0;   // number of groups committed before it
  uint64_t due = 0;  // performed when the warp has run so many instructions with products in flight
  std::vector<uint32_t> chunks;  // addresses of its operands in shared memory
};

// A register that is an accumulator or an A operand of some wgmma of the kernel.
struct HeldRegister {
  uint32_t accumulating = 0;  // serial of the last product in flight that it accumulates; 0: none
  uint32_t reading = 0;       // serial of the last product in flight that reads it
  uint32_t accessed = 0;      // number of fences before its last access by another instruction
  uint32_t pc = 0;            // of that access
};

struct WarpProducts {
  std::vector<Product> in_flight;  // in order of issue
  size_t performed = 0;            // of those in flight, the first ones
  bool drawing = false;            // some will be performed at a drawn moment
  uint64_t steps = 0;
  uint32_t issued = 0, committed = 0, fences = 0;
  std::vector<HeldRegister> held;  // by slot / 32
};

}  // namespace fajit::emulator
