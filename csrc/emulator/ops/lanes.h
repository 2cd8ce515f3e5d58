// Loops over the lanes of a warp, and the representation of values in a register's lanes.
#pragma once
#include <type_traits>

#include "machine/machine.h"
#include "ops/formats.h"
#include "ptx/decoder.h"

namespace fajit::emulator {

struct Half { uint16_t bits; };
struct Bf16 { uint16_t bits; };

inline float to_float(Half value) { return half_to_float(value.bits); }
inline float to_float(Bf16 value) { return bf16_to_float(value.bits); }
inline float to_float(float value) { return value; }
inline double to_float(double value) { return value; }

// The word of a lane that holds a T.
template <class T> using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T> inline T from_word(Word<T> word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));  // little endian: the low bytes
  return value;
}

template <class T> inline Word<T> to_word(T value) {
  Word<T> word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}

template <class T> inline Word<T>* lanes_of(const Warp& warp, uint32_t slot) {
  return reinterpret_cast<Word<T>*>(warp.registers + slot);
}

inline void set_bits(uint32_t& predicate, uint32_t mask, uint32_t value) {
  predicate = (predicate & ~mask) | (value & mask);
}

template <class Body> inline void for_lanes(uint32_t mask, Body body) {
  if (mask == kAllLanes) {
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) body(lane);
  } else {
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) body(__builtin_ctz(rest));
  }
}

// The address of a slot's operand: base plus offset.
inline uint64_t address_of(const Warp& warp, const Insn& insn, int slot, int lane) {
  const uint32_t at = insn.slots[slot];
  const bool wide = (insn.flags & kWideAddress) != 0;
  return (wide ? warp.longs(at)[lane] : warp.words(at)[lane]) +
         static_cast<uint64_t>(insn.immediate);
}

// An address of Decoder::list_address.
inline uint64_t listed_address(const Warp& warp, const uint32_t* list, int lane) {
  const uint64_t base = list[1] != 0 ? warp.longs(list[0])[lane] : warp.words(list[0])[lane];
  return base + static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(list[2])));
}

inline void check_policy(const Warp& warp, uint32_t slot, int lane) {
  if (warp.longs(slot)[lane] != kCachePolicy)
    warp.block->fault(warp, lane, "cache policy",
                      "the policy of the copy is not one of createpolicy");
}

// slots: destination, sources.
template <class R, class A, R (*Function)(A)>
void unary(Warp& warp, const Insn& insn, uint32_t mask) {
  auto* d = lanes_of<R>(warp, insn.slots[0]);
  const auto* a = lanes_of<A>(warp, insn.slots[1]);
  for_lanes(mask, [&](int l) { d[l] = to_word<R>(Function(from_word<A>(a[l]))); });
}

template <class R, class A, class B, R (*Function)(A, B)>
void binary(Warp& warp, const Insn& insn, uint32_t mask) {
  auto* d = lanes_of<R>(warp, insn.slots[0]);
  const auto* a = lanes_of<A>(warp, insn.slots[1]);
  const auto* b = lanes_of<B>(warp, insn.slots[2]);
  for_lanes(mask,
            [&](int l) { d[l] = to_word<R>(Function(from_word<A>(a[l]), from_word<B>(b[l]))); });
}

template <class R, class A, class B, class C, R (*Function)(A, B, C)>
void ternary(Warp& warp, const Insn& insn, uint32_t mask) {
  auto* d = lanes_of<R>(warp, insn.slots[0]);
  const auto* a = lanes_of<A>(warp, insn.slots[1]);
  const auto* b = lanes_of<B>(warp, insn.slots[2]);
  const auto* c = lanes_of<C>(warp, insn.slots[3]);
  for_lanes(mask, [&](int l) {
    d[l] = to_word<R>(Function(from_word<A>(a[l]), from_word<B>(b[l]), from_word<C>(c[l])));
  });
}

// Calls `form` with a zero of the C++ type of an integer or bit type; null for other types.
template <class Form> Exec by_integer(Type type, Form form) {
  switch (type) {
    case Type::b8:
    case Type::u8: return form(uint8_t{});
    case Type::b16:
    case Type::u16: return form(uint16_t{});
    case Type::b32:
    case Type::u32: return form(uint32_t{});
    case Type::b64:
    case Type::u64: return form(uint64_t{});
    case Type::s8: return form(int8_t{});
    case Type::s16: return form(int16_t{});
    case Type::s32: return form(int32_t{});
    case Type::s64: return form(int64_t{});
    default: return nullptr;
  }
}
template <class Form> Exec by_float(Type type, Form form) {
  switch (type) {
    case Type::f16: return form(Half{});
    case Type::bf16: return form(Bf16{});
    case Type::f32: return form(float{});
    case Type::f64: return form(double{});
    default: return nullptr;
  }
}
template <class Form> Exec by_type(Type type, Form form) {
  return is_float(type) ? by_float(type, form) : by_integer(type, form);
}
template <class Form> Exec by_width(Type type, Form form) {  // of 16, 32 or 64 bits
  switch (bytes_of(type)) {
    case 2: return form(uint16_t{});
    case 4: return form(uint32_t{});
    case 8: return form(uint64_t{});
    default: return nullptr;
  }
}

// Instantiations, by type, of function templates with one type.
#define FAJIT_UNARY(function) \
  [](auto zero) -> Exec { return unary<decltype(zero), decltype(zero), function<decltype(zero)>>; }
#define FAJIT_BINARY(function)           \
  [](auto zero) -> Exec {                \
    using T = decltype(zero);            \
    return binary<T, T, T, function<T>>; \
  }
#define FAJIT_TERNARY(function)              \
  [](auto zero) -> Exec {                    \
    using T = decltype(zero);                \
    return ternary<T, T, T, T, function<T>>; \
  }

// Decodes .sync.aligned: all 32 lanes execute the instruction together.
inline void decode_collective(Decoder& d) {
  if (!d.accept("sync") || !d.accept("aligned")) d.fail("expected .sync.aligned");
  d.insn.flow = Flow::rendezvous;
  d.insn.flags |= kCollective;
}

// Decodes the operands of `op d, a, ...`.
inline void decode_operands(Decoder& d, Type result, std::initializer_list<Type> sources) {
  d.expect_operands(sources.size() + 1);
  d.insn.slots[0] = d.destination(0, result);
  size_t index = 1;
  for (const Type type : sources) {
    d.insn.slots[index] = d.source(index, type);
    ++index;
  }
}

// Decodes `op d, a` of integers; `result`: the type of d, if not that of a.
template <class Form> void decode_unary(Decoder& d, Form form, Type result = Type::none) {
  const Type type = d.type();
  decode_operands(d, result == Type::none ? type : result, {type});
  d.set_exec(by_integer(type, form));
}

}  // namespace fajit::emulator
