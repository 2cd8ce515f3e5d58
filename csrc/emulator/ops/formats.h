// Conversions between fp32 and the 16-bit formats, written so that loops over lanes vectorise.
#pragma once
#include <cmath>
#include <cstdint>

#include "ptx/types.h"

namespace fajit::emulator {

enum class Round : uint8_t { nearest, zero, down, up };  // .rn .rz .rm .rp

inline float bf16_to_float(uint32_t bits) { return bits_as<float>(bits << 16); }

inline float half_to_float(uint32_t bits) {
  // The exponent is rebiased by a multiplication with 2^112, which is correct for subnormals too.
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t magnitude = (bits & 0x7fffu) << 13;
  const uint32_t scaled = bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7f800000u;  // infinity and NaN keep their fraction
  return bits_as<float>(sign | ((bits & 0x7c00u) == 0x7c00u ? special : scaled));
}

// Rounds a finite or infinite magnitude, given as fp64 bits, to a format with `fraction` fraction
// bits and exponents from `min_exponent` to `max_exponent`; Returns the code: sign, exponent and
// fraction.
inline uint32_t round_to_format(double value, int fraction, int min_exponent, int max_exponent,
                                Round round) {
  const uint32_t sign = std::signbit(value) ? 1u : 0u;
  const int bits = fraction + 1;
  int exponent_bits = 1;
  while ((1 << exponent_bits) - 2 < max_exponent - min_exponent + 1) ++exponent_bits;
  const uint32_t sign_bit = sign << (fraction + exponent_bits);
  const uint32_t infinity = ((1u << exponent_bits) - 1) << fraction;
  const double magnitude = std::fabs(value);
  if (std::isinf(value)) return sign_bit | infinity;
  if (magnitude == 0) return sign_bit;
  int exponent;
  std::frexp(magnitude, &exponent);  // magnitude = m * 2^exponent, m in [0.5, 1)
  int scale = exponent - bits;       // the unit in the last place is 2^scale
  const int min_scale = min_exponent - fraction;
  if (scale < min_scale) scale = min_scale;
  const double units = std::ldexp(magnitude, -scale);
  double whole = std::floor(units);
  const double rest = units - whole;
  bool up = false;
  switch (round) {
    case Round::nearest: up = rest > 0.5 || (rest == 0.5 && std::fmod(whole, 2.0) != 0); break;
    case Round::zero: break;
    case Round::down: up = sign && rest > 0; break;
    case Round::up: up = !sign && rest > 0; break;
  }
  if (up) whole += 1;
  // `whole` counts units from zero: the code of a normal number is its unit count plus 2^fraction
  // for each exponent above the smallest.
  const double largest = std::ldexp(2.0 - std::ldexp(1.0, -fraction), max_exponent);
  if (std::ldexp(whole, scale) > largest) {
    const bool to_infinity =
        round == Round::nearest || (round == Round::up && !sign) || (round == Round::down && sign);
    return sign_bit | (to_infinity ? infinity : infinity - 1);
  }
  return sign_bit |
         (static_cast<uint32_t>(whole) + (static_cast<uint32_t>(scale - min_scale) << fraction));
}

inline uint32_t double_to_half(double value, Round round) {
  if (std::isnan(value)) return 0x7fffu;
  return round_to_format(value, 10, -14, 15, round);
}

inline uint32_t double_to_bf16(double value, Round round) {
  if (std::isnan(value)) return 0x7fffu;
  return round_to_format(value, 7, -126, 127, round);
}

// Rounding to nearest even, the common case, without branches on the magnitude.
inline uint32_t float_to_bf16(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded;
}

inline uint32_t float_to_half(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Subnormal results: adding 0.5 lets the FPU round at 2^-24. Normal ones: rebias and round.
  const uint32_t small = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t finite = magnitude < 0x38800000u ? small : normal;
  const uint32_t result = magnitude >= 0x477ff000u ? 0x7c00u : finite;
  return magnitude > 0x7f800000u ? 0x7fffu : sign | result;
}

// Replaces a NaN by the canonical NaN of GPUs.
inline float canonical(float value) { return value == value ? value : bits_as<float>(0x7fffffffu); }
inline double canonical(double value) {
  return value == value ? value : bits_as<double>(uint64_t{0x7ff8000000000000});
}

template <class T> T saturated(T value) {  // to [0, 1]; NaN becomes 0
  return value > T{0} ? (value < T{1} ? value : T{1}) : T{0};
}

inline float flush(float value) {  // .ftz: a subnormal is zero with its sign
  const uint32_t bits = bits_as<uint32_t>(value);
  return bits_as<float>((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
}

}  // namespace fajit::emulator
