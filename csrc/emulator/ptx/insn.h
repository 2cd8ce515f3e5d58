// One decoded instruction. Operands are offsets, in 32-bit words, into the warp's register file;
// immediates and special registers have slots there too, so that all operands are arrays.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "ops/formats.h"
#include "ptx/ast.h"

namespace fajit::emulator {

struct Warp;
struct Insn;

// Runs one instruction for the lanes of `mask`.
using Exec = void (*)(Warp& warp, const Insn& insn, uint32_t mask);

inline constexpr uint32_t kNoSlot = 0xffffffffu;
inline constexpr uint32_t kWideSlot = 0x80000000u;
inline constexpr uint32_t kWriteUse = 1;  // of Kernel::uses; slots are multiples of 32

// How the scheduler handles an instruction.
enum class Flow : uint8_t {
  straight,  // exec, next
  branch,    // to `target` for the lanes whose guard holds
  table,     // brx.idx
  exit,
  rendezvous,  // waits for the lanes of a member mask, then exec
  barrier,     // waits for the other warps of the block
  registers,   // setmaxnreg: a rendezvous that also waits for registers
  wait,        // exec suspends lanes, or moves their program counters on
};

enum InsnFlags : uint8_t {
  kFtz = 1,
  kSaturate = 2,
  kNan = 4,
  kProduct = 8,      // wgmma.mma_async
  kSharesHeld = 16,  // has a register that is an operand of some wgmma
  kRelu = 32,
  kWideAddress = 64,  // the address register has 64 bits
  kCollective = 128   // all 32 lanes must take part
};

struct Insn {
  Exec exec = nullptr;
  uint32_t guard = kNoSlot;
  bool guard_negated = false;
  Flow flow = Flow::straight;
  uint8_t flags = 0;
  Type type = Type::none;
  Space space = Space::generic;
  Round round = Round::nearest;
  uint8_t count = 1;  // vector elements, matrices
  uint8_t mode = 0;   // of the opcode: comparison, shuffle, reduction ...
  uint32_t slots[6] = {kNoSlot, kNoSlot, kNoSlot, kNoSlot, kNoSlot, kNoSlot};
  uint32_t list = 0;    // first of further slots in Kernel::lists
  uint32_t target = 0;  // branch target; first target of a table
  int64_t immediate = 0;
};

// The position of a thread, from which special registers are computed.
struct ThreadPosition {
  uint32_t lane, warp, num_warps, thread[3], block[3], block_size[3], grid_size[3], dynamic_shared;
};
using Special = uint64_t (*)(const ThreadPosition& position);

struct Kernel {
  std::string name;
  std::vector<Insn> code;
  std::vector<uint32_t> lists;
  std::vector<uint32_t> locations;     // of each instruction, into `source_locations`
  std::vector<uint32_t> text_lines;    // of each instruction, in the PTX
  std::vector<std::string> mnemonics;  // of each instruction
  // Slots of the 32-bit registers that an instruction accesses, with kWriteUse; uses_end: the end
  // of each instruction's. held: by slot / 32, whether a register is an operand of some wgmma.
  std::vector<uint32_t> uses, uses_end;
  std::vector<bool> held;
  std::vector<Location> source_locations;
  std::vector<Variable> params;
  std::vector<Variable> shared;                        // with offsets in the shared window
  std::vector<std::pair<Special, uint32_t>> specials;  // and their slots, kWideSlot for 64 bits
  std::vector<std::pair<uint32_t, uint64_t>> constants32, constants64;  // slot, value
  uint32_t register_words = 0;
  uint32_t param_bytes = 0;
  uint32_t static_shared_end = 0;
  uint32_t local_bytes = 0;
  uint32_t min_blocks = 1;  // that a multiprocessor holds
};

// Windows of the generic address space outside host memory: no host address has these upper bits.
inline constexpr uint64_t kSharedWindow = 0xf5000000'00000000ull;
inline constexpr uint64_t kLocalWindow = 0xf6000000'00000000ull;
inline constexpr uint64_t kParamWindow = 0xf7000000'00000000ull;
inline constexpr uint64_t kWindowMask = 0xff000000'00000000ull;
// What createpolicy gives; its bits are not documented.
inline constexpr uint64_t kCachePolicy = 0xf0110c1e'5eed0001ull;
// Offset of the first shared variable, so that address 0 is out of bounds.
inline constexpr uint32_t kSharedBase = 1024;

}  // namespace fajit::emulator
