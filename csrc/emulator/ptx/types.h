// PTX scalar types, and the storage of their registers.
//
// A register is an array over the 32 lanes of a warp. Types of up to 32 bits are stored in uint32_t
// lanes (narrow ones zero-extended), 64-bit types in uint64_t lanes, .b128 in two uint64_t arrays;
// a predicate is one uint32_t with one bit per lane.
#pragma once
#include <cstdint>
#include <cstring>
#include <string_view>

namespace fajit::emulator {

inline constexpr int kLanes = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

// clang-format off
enum class Type : uint8_t {
  none, pred,
  b8, b16, b32, b64, b128,
  u8, u16, u32, u64,
  s8, s16, s32, s64,
  f16, bf16, f16x2, bf16x2, f32, f64,
};
// clang-format on

struct TypeInfo {
  std::string_view name;
  Type type;
  uint8_t bytes;
};

inline constexpr TypeInfo kTypes[] = {
    {"pred", Type::pred, 0}, {"b8", Type::b8, 1},       {"b16", Type::b16, 2},
    {"b32", Type::b32, 4},   {"b64", Type::b64, 8},     {"b128", Type::b128, 16},
    {"u8", Type::u8, 1},     {"u16", Type::u16, 2},     {"u32", Type::u32, 4},
    {"u64", Type::u64, 8},   {"s8", Type::s8, 1},       {"s16", Type::s16, 2},
    {"s32", Type::s32, 4},   {"s64", Type::s64, 8},     {"f16", Type::f16, 2},
    {"bf16", Type::bf16, 2}, {"f16x2", Type::f16x2, 4}, {"bf16x2", Type::bf16x2, 4},
    {"f32", Type::f32, 4},   {"f64", Type::f64, 8},
};

inline Type type_of(std::string_view name) {
  for (const TypeInfo& info : kTypes)
    if (info.name == name) return info.type;
  return Type::none;
}

inline const TypeInfo& info_of(Type type) { return kTypes[static_cast<int>(type) - 1]; }
inline unsigned bytes_of(Type type) { return type == Type::none ? 0 : info_of(type).bytes; }
inline bool is_float(Type type) { return type >= Type::f16; }
inline bool is_wide(Type type) { return bytes_of(type) == 8; }

template <class To, class From> inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace fajit::emulator
