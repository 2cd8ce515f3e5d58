// Roots, reciprocals, and the approximate functions. They are computed in fp64 and rounded once, to
// fp32: the result of a GPU differs by its documented error, about 2^-22. tanh, whose documented
// error of 2^-11 matters to results, is rounded to 11 bits, so that it has an error of that size.
#include <cmath>

#include "ops/lanes.h"
#include "ptx/opcodes.h"

namespace fajit::emulator {
namespace {

using Function = double (*)(double);

double rcp(double x) { return 1.0 / x; }
double rsqrt(double x) { return 1.0 / std::sqrt(x); }
// x rounded to 11 significant bits, half to even; exact for 0, infinities and NaN.
double to_eleven_bits(double x) {
  constexpr double kShift = 0x1p42 + 1;  // Veltkamp's splitting: 53 - 11 bits are dropped
  if (!std::isfinite(x)) return x;
  const double c = kShift * x;
  return c - (c - x);
}

double short_tanh(double x) { return to_eleven_bits(std::tanh(x)); }

template <Function function> void apply32(Warp& warp, const Insn& insn, uint32_t mask) {
  uint32_t* d = warp.words(insn.slots[0]);
  const uint32_t* a = warp.words(insn.slots[1]);
  const bool ftz = (insn.flags & kFtz) != 0;
  for_lanes(mask, [&](int l) {
    const float x = bits_as<float>(a[l]);
    // The fp64 root and quotient of fp32 values, rounded to fp32, are the correctly rounded ones.
    const float r = canonical(static_cast<float>(function(ftz ? flush(x) : x)));
    d[l] = bits_as<uint32_t>(ftz ? flush(r) : r);
  });
}

template <Function function> double apply64(double a) { return canonical(function(a)); }
// rcp.approx.ftz.f64: uses only the upper words of the operand and the result.
template <Function function> double apply64_upper(double a) {
  const uint64_t kept = bits_as<uint64_t>(a) & 0xffffffff'00000000ull;
  double x = bits_as<double>(kept);
  if (std::fpclassify(x) == FP_SUBNORMAL) x = std::copysign(0.0, x);
  double r = apply64<function>(x);
  if (std::fpclassify(r) == FP_SUBNORMAL) r = std::copysign(0.0, r);
  return bits_as<double>(bits_as<uint64_t>(r) & 0xffffffff'00000000ull);
}

template <Function function> void decode_function(Decoder& d) {
  if (d.accept("ftz")) d.insn.flags |= kFtz;
  const bool approximate = d.accept("approx");
  d.insn.round = d.rounding(Round::nearest);
  const Type type = d.type();
  d.insn.type = type;
  decode_operands(d, type, {type});
  if (d.insn.round != Round::nearest) d.fail("only .rn and .approx are supported");
  switch (type) {
    case Type::f32: d.insn.exec = apply32<function>; break;
    case Type::f64:
      d.insn.exec = approximate && (d.insn.flags & kFtz) != 0
                        ? Exec{unary<double, double, apply64_upper<function>>}
                        : Exec{unary<double, double, apply64<function>>};
      break;
    default: d.fail("not for this type");
  }
}

}  // namespace

void decode_rcp(Decoder& d) { decode_function<rcp>(d); }
void decode_sqrt(Decoder& d) { decode_function<std::sqrt>(d); }
void decode_rsqrt(Decoder& d) { decode_function<rsqrt>(d); }
void decode_sin(Decoder& d) { decode_function<std::sin>(d); }
void decode_cos(Decoder& d) { decode_function<std::cos>(d); }
void decode_lg2(Decoder& d) { decode_function<std::log2>(d); }
void decode_ex2(Decoder& d) { decode_function<std::exp2>(d); }
void decode_tanh(Decoder& d) { decode_function<short_tanh>(d); }

}  // namespace fajit::emulator
