// mov with packing and unpacking, and cvta.
#include "ops/lanes.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

template <class T> T same(T a) { return a; }

// list: the parts of a packed move, lowest first; count: bits of each; mode: their number.
void pack(Warp& warp, const Insn& insn, uint32_t mask) {
  const uint32_t* parts = warp.block->kernel().lists.data() + insn.list;
  const unsigned width = insn.count;
  const bool wide = (insn.flags & kWideAddress) != 0;
  for_lanes(mask, [&](int l) {
    uint64_t bits = 0;
    for (uint32_t i = 0; i < insn.mode; ++i)
      bits |= (static_cast<uint64_t>(warp.words(parts[i])[l]) & ((uint64_t{1} << width) - 1))
              << (width * i);
    if (wide) warp.longs(insn.slots[0])[l] = bits;
    else warp.words(insn.slots[0])[l] = static_cast<uint32_t>(bits);
  });
}

void unpack(Warp& warp, const Insn& insn, uint32_t mask) {
  const uint32_t* parts = warp.block->kernel().lists.data() + insn.list;
  const unsigned width = insn.count;
  const bool wide = (insn.flags & kWideAddress) != 0;
  for_lanes(mask, [&](int l) {
    const uint64_t bits = wide ? warp.longs(insn.slots[1])[l] : warp.words(insn.slots[1])[l];
    for (uint32_t i = 0; i < insn.mode; ++i)
      if (parts[i] != kNoSlot)
        warp.words(parts[i])[l] =
            static_cast<uint32_t>(bits >> (width * i) & ((uint64_t{1} << width) - 1));
  });
}

void move_predicate(Warp& warp, const Insn& insn, uint32_t mask) {
  set_bits(warp.predicate(insn.slots[0]), mask, warp.predicate(insn.slots[1]));
}

template <class T> void add_window(Warp& warp, const Insn& insn, uint32_t mask) {
  auto* d = lanes_of<T>(warp, insn.slots[0]);
  const auto* a = lanes_of<T>(warp, insn.slots[1]);
  const T window = static_cast<T>(insn.immediate);
  for_lanes(mask, [&](int l) { d[l] = a[l] + window; });
}

uint64_t window_of(Space space) {
  switch (space) {
    case Space::shared: return kSharedWindow;
    case Space::local: return kLocalWindow;
    case Space::param: return kParamWindow;
    default: return 0;
  }
}

void decode_packed_move(Decoder& d, Type type) {
  const bool to_vector = d.operand(0).kind == Operand::Kind::vector;
  const Operand& vector = d.operand(to_vector ? 0 : 1);
  const unsigned bits = 8 * bytes_of(type);
  const size_t count = vector.elements.size();
  if (count < 2 || bits % count != 0 || bits / count > 32 || bits / count < 8)
    d.fail("cannot be split into " + std::to_string(count) + " parts");
  const unsigned width = bits / static_cast<unsigned>(count);
  const Type part = width == 32 ? Type::b32 : width == 16 ? Type::b16 : Type::b8;
  d.insn.count = static_cast<uint8_t>(width);
  d.insn.mode = static_cast<uint8_t>(count);
  if (is_wide(type)) d.insn.flags |= kWideAddress;
  std::vector<uint32_t> slots;
  for (const Operand& element : vector.elements) {
    if (element.kind == Operand::Kind::sink) slots.push_back(kNoSlot);
    else slots.push_back(to_vector ? d.destination(element, part) : d.source(element, part));
  }
  d.insn.list = d.add_list(slots);
  if (to_vector) d.insn.slots[1] = d.source(1, type);
  else d.insn.slots[0] = d.destination(0, type);
  d.insn.exec = to_vector ? unpack : pack;
}

}  // namespace

void decode_mov(Decoder& d) {
  const Type type = d.type();
  d.expect_operands(2);
  if (d.operand(0).kind == Operand::Kind::vector || d.operand(1).kind == Operand::Kind::vector)
    return decode_packed_move(d, type);
  d.insn.slots[0] = d.destination(0, type);
  d.insn.slots[1] = d.source(1, type);
  if (type == Type::pred) {
    d.insn.exec = move_predicate;
    if (d.operand(1).negated) d.fail("a negated operand is not supported");
    return;
  }
  d.insn.exec = is_wide(type) ? Exec{unary<uint64_t, uint64_t, same<uint64_t>>}
                              : Exec{unary<uint32_t, uint32_t, same<uint32_t>>};
}

void decode_cvta(Decoder& d) {
  const bool to = d.accept("to");
  const uint64_t window = window_of(d.space());
  const Type type = d.type();
  decode_operands(d, type, {type});
  d.insn.immediate = static_cast<int64_t>(to ? 0 - window : window);
  d.insn.exec = is_wide(type) ? Exec{add_window<uint64_t>} : Exec{add_window<uint32_t>};
}

}  // namespace fajit::emulator
