// ld, st, and hints without effect.
#include "ops/lanes.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

// list: the slots of the elements; mode: bit i is set if the register of element i has 64 bits.
template <class T> void load(Warp& warp, const Insn& insn, uint32_t mask) {
  Block& block = *warp.block;
  const uint32_t* slots = block.kernel().lists.data() + insn.list;
  const unsigned bytes = sizeof(T) * insn.count;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const uint8_t* from =
        block.at(warp, insn.space, l, address_of(warp, insn, 0, l), bytes, Access::read);
    for (unsigned i = 0; i < insn.count; ++i) {
      T value;
      std::memcpy(&value, from + i * sizeof(T), sizeof(T));
      if (slots[i] == kNoSlot) continue;
      if ((insn.mode >> i & 1) != 0)
        warp.longs(slots[i])[l] = static_cast<uint64_t>(static_cast<int64_t>(value));
      else
        warp.words(slots[i])[l] =
            static_cast<uint32_t>(value) & (insn.type == Type::s16 ? 0xffffu : ~0u);
    }
  }
}

template <class T> void store(Warp& warp, const Insn& insn, uint32_t mask) {
  Block& block = *warp.block;
  const uint32_t* slots = block.kernel().lists.data() + insn.list;
  const unsigned bytes = sizeof(T) * insn.count;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    uint8_t* to = block.at(warp, insn.space, l, address_of(warp, insn, 0, l), bytes, Access::write);
    for (unsigned i = 0; i < insn.count; ++i) {
      const uint64_t word =
          (insn.mode >> i & 1) != 0 ? warp.longs(slots[i])[l] : warp.words(slots[i])[l];
      std::memcpy(to + i * sizeof(T), &word, sizeof(T));
    }
  }
}

constexpr Type kBits[] = {Type::b8, Type::b16, Type::b32, Type::b32,
                          Type::b64};  // index: bytes / 2

void nothing(Warp&, const Insn&, uint32_t) {}

void fence_proxy(Warp& warp, const Insn&, uint32_t mask) { warp.block->fence_proxy(warp, mask); }

void fence_mbarriers(Warp& warp, const Insn&, uint32_t mask) {
  warp.block->fence_mbarriers(warp, mask);
}

void create_policy(Warp& warp, const Insn& insn, uint32_t mask) {
  uint64_t* d = warp.longs(insn.slots[0]);
  for_lanes(mask, [&](int l) { d[l] = kCachePolicy; });
}

void decode_access(Decoder& d, bool is_load) {
  d.insn.space = d.space();
  // Ordering and cache hints are ignored: warps of a block run one at a time, so every access is
  // ordered.
  d.ignore({"L1::", "L2::", "level::"});
  for (const char* hint : {"weak", "volatile", "relaxed", "acquire", "release", "cta", "cluster",
                           "gpu", "sys", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "mmio"})
    d.accept(hint);
  const int vector = d.accept_one({"v2", "v4", "v8"});
  d.insn.count = static_cast<uint8_t>(vector < 0 ? 1 : 2 << vector);
  const Type type = d.type();
  d.insn.type = type;
  if (bytes_of(type) == 0 || bytes_of(type) > 8) d.fail("not for this type");
  d.expect_operands(2, 3);  // the third is a cache policy
  const Operand& value = d.operand(is_load ? 0 : 1);
  std::vector<Operand> elements;
  if (value.kind == Operand::Kind::vector) elements = value.elements;
  else elements.push_back(value);
  if (elements.size() != d.insn.count) d.fail("has another number of elements");
  std::vector<uint32_t> slots;
  for (size_t i = 0; i < elements.size(); ++i) {
    bool wide = false;
    const bool sink = elements[i].kind == Operand::Kind::sink;
    slots.push_back(sink      ? kNoSlot
                    : is_load ? d.wide_destination(elements[i], type, wide)
                              : d.wide_source(elements[i], type, wide));
    if (wide) d.insn.mode |= static_cast<uint8_t>(1 << i);
  }
  d.insn.list = d.add_list(slots);
  d.address(is_load ? 1 : 0, 0);
}

}  // namespace

void decode_ld(Decoder& d) {
  decode_access(d, true);
  // Floats are loaded as bits; signed integers are sign-extended.
  const Type type = is_float(d.insn.type) ? kBits[bytes_of(d.insn.type) / 2] : d.insn.type;
  d.set_exec(by_integer(type, [](auto zero) -> Exec { return load<decltype(zero)>; }));
}

void decode_st(Decoder& d) {
  decode_access(d, false);
  const Type bits = kBits[bytes_of(d.insn.type) / 2];
  d.set_exec(by_integer(bits, [](auto zero) -> Exec { return store<decltype(zero)>; }));
}

// prefetch, membar, nanosleep ...: accepted with any modifiers.
void decode_nothing(Decoder& d) {
  d.ignore({""});
  d.insn.exec = nothing;
}

// Warps of a block run one at a time, so only fences between the proxies of shared memory order
// anything.
void decode_fence(Decoder& d) {
  const bool proxy = d.accept("proxy") && d.accept("async") && !d.has_modifier("global");
  const bool init = d.accept("mbarrier_init");
  d.ignore({""});
  d.insn.exec = proxy ? fence_proxy : init ? fence_mbarriers : nothing;
}

void decode_createpolicy(Decoder& d) {
  d.ignore({""});
  d.insn.slots[0] = d.destination(0, Type::b64);
  d.insn.exec = create_policy;
}

}  // namespace fajit::emulator
