// Integer division in few instructions on GPUs.
//
// A GPU has no integer division instruction: 32 bits take some twenty instructions, 64 bits over a
// hundred, inlined at each use. Nearly all operands fit in 32 bits, so 64-bit operands use a
// compact loop here.
#pragma once
#include <fajit/function.h>
#include <stdint.h>

namespace fajit {

// a / b truncated, for b != 0 and not INT64_MIN / -1.
FAJIT_SHARED int64_t quotient(int64_t a, int64_t b) {
#if defined(__CUDA_ARCH__)
  if (a == int32_t(a) && b == int32_t(b)) {
    const uint32_t q =
        (a < 0 ? 0u - uint32_t(a) : uint32_t(a)) / (b < 0 ? 0u - uint32_t(b) : uint32_t(b));
    return (a < 0) != (b < 0) ? -int64_t(q) : int64_t(q);
  }
  uint64_t rest = a < 0 ? 0 - uint64_t(a) : uint64_t(a), q = 0;
  const uint64_t divisor = b < 0 ? 0 - uint64_t(b) : uint64_t(b);
  uint64_t part = 0;
  FAJIT_ROLLED
  for (int i = 0; i < 64; ++i) {
    part = (part << 1) | (rest >> 63);
    rest <<= 1;
    q <<= 1;
    if (part >= divisor) {
      part -= divisor;
      q |= 1;
    }
  }
  return int64_t((a < 0) != (b < 0) ? 0 - q : q);
#else
  return a / b;
#endif
}
#if !defined(__CUDACC__)
FAJIT_SHARED int32_t quotient(int32_t a, int32_t b) { return a / b; }
#endif

// A divisor known before a launch: n / divisor = n * magic >> (32 + shift) for 0 <= n <= 2^31, with
// magic = ceil(2^(32 + shift) / divisor) and shift = ceil(log2(divisor)) - 1. The host computes it.
// (Granlund and Montgomery 1994: the error magic * divisor - 2^(32 + shift) is below 2^(shift + 1),
// so that n times it stays below 2^(32 + shift).)
struct Divisor {
  int32_t value;
  uint32_t magic;  // 0 for divisors 0, 1 and -1
  int32_t shift;

  Divisor() = default;
  FAJIT_FN explicit Divisor(int32_t v) : value(v), magic(0), shift(0) {
    const uint32_t d = v < 0 ? 0u - uint32_t(v) : uint32_t(v);
    if (d < 2) return;
    while ((uint64_t(2) << shift) < d) ++shift;
    magic = uint32_t(((uint64_t(1) << (32 + shift)) + d - 1) / d);
  }

  // n / |value| for 0 <= n <= 2^31; 0 for a value of 0.
  FAJIT_FN uint32_t divide(uint32_t n) const {
#if defined(__CUDA_ARCH__)
    const uint32_t q = __umulhi(n, magic) >> shift;
#else
    const uint32_t q = uint32_t((uint64_t(n) * magic) >> 32) >> shift;
#endif
    return magic != 0 ? q : (value != 0 ? n : 0);
  }
};

}  // namespace fajit
