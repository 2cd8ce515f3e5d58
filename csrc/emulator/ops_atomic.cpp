// atom and red. Global ones are atomic among host threads, as blocks may run on several.
#include <algorithm>

#include "lanes.h"
#include "ops.h"

namespace fajit::emulator {
namespace {

enum Operation : uint8_t { kAdd, kMin, kMax, kAnd, kOr, kXor, kExch, kCas, kInc, kDec };

template <class T>
T combine(T old, T b, uint8_t operation) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
    switch (operation) {
      case kMin: return std::min(old, b);
      case kMax: return std::max(old, b);
      case kExch: return b;
      default: return old + b;
    }
  } else if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Bf16>) {
    return FromFloat<T>::of(to_float(old) + to_float(b));
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

// slots: address, d or none, b, c or none. T packed: two halves in a word.
template <class T, bool packed>
void atomic(Warp& warp, const Insn& insn, uint32_t mask) {
  Block& block = *warp.block;
  using W = std::conditional_t<packed, uint32_t,
                               std::conditional_t<sizeof(T) == 8, uint64_t,
                                                  std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>>;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const uint64_t base = (insn.flags & kWideAddress) != 0 ? warp.longs(insn.slots[0])[l] : warp.words(insn.slots[0])[l];
    uint8_t* at = block.at(warp, insn.space, l, base + static_cast<uint64_t>(insn.immediate), sizeof(W), Access::atomic);
    W* word = reinterpret_cast<W*>(at);
    auto operand = [&](uint32_t slot) {
      return static_cast<W>(sizeof(W) == 8 ? warp.longs(slot)[l] : warp.words(slot)[l]);
    };
    const W b = operand(insn.slots[2]);
    const W c = insn.slots[3] == kNoSlot ? W{0} : operand(insn.slots[3]);
    W old = __atomic_load_n(word, __ATOMIC_SEQ_CST), next;
    do {
      if (insn.mode == kCas) {
        next = old == b ? c : old;
      } else if constexpr (packed) {
        next = 0;
        for (int shift = 0; shift < 32; shift += 16) {
          const T sum = combine(T{static_cast<uint16_t>(old >> shift)}, T{static_cast<uint16_t>(b >> shift)}, insn.mode);
          next |= static_cast<W>(sum.bits) << shift;
        }
      } else {
        next = bits_as<W>(combine(bits_as<T>(old), bits_as<T>(b), insn.mode));
      }
    } while (!__atomic_compare_exchange_n(word, &old, next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    if (insn.slots[1] == kNoSlot) continue;
    if (sizeof(W) == 8) warp.longs(insn.slots[1])[l] = old;
    else warp.words(insn.slots[1])[l] = static_cast<uint32_t>(old);
  }
}

void decode_atomic(Decoder& d, bool has_result) {
  for (const char* hint : {"relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "noftz"})
    d.accept(hint);
  const bool policy = d.accept("L2::cache_hint");
  static constexpr Space kSpaces[] = {Space::global, Space::shared, Space::shared};
  const int space = d.accept_one({"global", "shared", "shared::cta"});
  d.insn.space = space < 0 ? Space::generic : kSpaces[space];
  d.insn.mode = static_cast<uint8_t>(d.expect_one({"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"}));
  const Type type = d.type();
  const size_t first = has_result ? 1 : 0;
  const size_t count = first + (d.insn.mode == kCas ? 3 : 2);
  d.expect_operands(count, count + (policy ? 1 : 0));
  if (has_result && d.operand(0).kind != Operand::Kind::sink) d.insn.slots[1] = d.destination(0, type);
  d.address(first, 0);
  d.insn.slots[2] = d.source(first + 1, type);
  if (d.insn.mode == kCas) d.insn.slots[3] = d.source(first + 2, type);
  switch (type) {
    case Type::b16:
    case Type::u16: d.insn.exec = atomic<uint16_t, false>; break;
    case Type::b32:
    case Type::u32: d.insn.exec = atomic<uint32_t, false>; break;
    case Type::b64:
    case Type::u64: d.insn.exec = atomic<uint64_t, false>; break;
    case Type::s32: d.insn.exec = atomic<int32_t, false>; break;
    case Type::s64: d.insn.exec = atomic<int64_t, false>; break;
    case Type::f32: d.insn.exec = atomic<float, false>; break;
    case Type::f64: d.insn.exec = atomic<double, false>; break;
    case Type::f16: d.insn.exec = atomic<Half, false>; break;
    case Type::bf16: d.insn.exec = atomic<Bf16, false>; break;
    case Type::f16x2: d.insn.exec = atomic<Half, true>; break;
    case Type::bf16x2: d.insn.exec = atomic<Bf16, true>; break;
    default: d.fail("not for this type");
  }
}

}  // namespace

void decode_atom(Decoder& d) { decode_atomic(d, true); }
void decode_red(Decoder& d) { decode_atomic(d, false); }

}  // namespace fajit::emulator
