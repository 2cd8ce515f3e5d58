// atom and red. Global accesses are atomic between host threads, because blocks may run on several.
#include <algorithm>

#include "ops/lanes.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

enum Operation : uint8_t { kAdd, kMin, kMax, kAnd, kOr, kXor, kExch, kCas, kInc, kDec };

template <class T> T combine(T old, T b, uint8_t operation) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
    switch (operation) {
      case kMin: return std::min(old, b);
      case kMax: return std::max(old, b);
      case kExch: return b;
      default: return old + b;
    }
  } else {
    using U = std::make_unsigned_t<T>;
    switch (operation) {
      case kAdd: return static_cast<T>(static_cast<U>(old) + static_cast<U>(b));
      case kMin: return std::min(old, b);
      case kMax: return std::max(old, b);
      case kAnd: return static_cast<T>(old & b);
      case kOr: return static_cast<T>(old | b);
      case kXor: return static_cast<T>(old ^ b);
      case kInc: return old >= b ? T{0} : static_cast<T>(old + 1);
      case kDec: return old == 0 || old > b ? b : static_cast<T>(old - 1);
      default: return b;
    }
  }
}

// slots: address, d or none, b, c or none.
template <class T> void atomic(Warp& warp, const Insn& insn, uint32_t mask) {
  Block& block = *warp.block;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    Word<T>* word = reinterpret_cast<Word<T>*>(
        block.at(warp, insn.space, l, address_of(warp, insn, 0, l), sizeof(T), Access::atomic));
    auto operand = [&](uint32_t slot) { return lanes_of<T>(warp, slot)[l]; };
    const Word<T> b = operand(insn.slots[2]);
    Word<T> old = __atomic_load_n(word, __ATOMIC_SEQ_CST), next;
    do {
      if (insn.mode == kCas) next = old == b ? operand(insn.slots[3]) : old;
      else next = to_word<T>(combine(from_word<T>(old), from_word<T>(b), insn.mode));
    } while (
        !__atomic_compare_exchange_n(word, &old, next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    if (insn.slots[1] != kNoSlot) lanes_of<T>(warp, insn.slots[1])[l] = old;
  }
}

void decode_atomic(Decoder& d, bool has_result) {
  for (const char* hint :
       {"relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "noftz"})
    d.accept(hint);
  const bool policy = d.accept("L2::cache_hint");
  d.insn.space = d.space();
  d.insn.mode = static_cast<uint8_t>(
      d.expect_one({"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"}));
  const Type type = d.type();
  const size_t first = has_result ? 1 : 0;
  const size_t count = first + (d.insn.mode == kCas ? 3 : 2);
  d.expect_operands(count, count + (policy ? 1 : 0));
  if (has_result && d.operand(0).kind != Operand::Kind::sink)
    d.insn.slots[1] = d.destination(0, type);
  d.address(first, 0);
  d.insn.slots[2] = d.source(first + 1, type);
  if (d.insn.mode == kCas) d.insn.slots[3] = d.source(first + 2, type);
  if (bytes_of(type) < 4) d.fail("not for this type");
  d.set_exec(by_type(type, [](auto zero) -> Exec {
    if constexpr (sizeof(zero) >= 4) return atomic<decltype(zero)>;
    else return nullptr;
  }));
}

}  // namespace

void decode_atom(Decoder& d) { decode_atomic(d, true); }
void decode_red(Decoder& d) { decode_atomic(d, false); }

}  // namespace fajit::emulator
