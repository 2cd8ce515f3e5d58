// NaN among codes of e4m3 whose products are those of finite numbers.
#pragma once
#include <fajit/cpu/vector/load_row.h>

namespace fajit {

#if FAJIT_AVX
// Which bytes are a NaN of e4m3: seven bits of ones.
class NanCodes {
 public:
  FAJIT_INLINE void add(vi codes) {
    const vi magnitudes = codes | splat(static_cast<int32_t>(0x80808080u));
    asm("vpmaxub %1, %0, %0" : "+v"(highest_) : "v"(magnitudes));
  }
  FAJIT_INLINE bool found() const { return any(words()); }
  // NaN in the lanes of words that have one, else 0.
  FAJIT_INLINE vf value() const { return as_float(words() & 0x7fc00000); }
  // Makes elements NaN in `count` rows of floats, `stride` apart.
  FAJIT_INLINE void put(float* rows, int count, int stride) const {
    put(highest_, rows, count, stride);
  }

 private:
  FAJIT_INLINE vi words() const {
    const vi carry = (highest_ & 0x7f7f7f7f) + 0x01010101;
    return (carry & static_cast<int32_t>(0x80808080u)) != 0;
  }
  // By value: the sums of a caller whose address were taken would not stay in registers.
  __attribute__((noinline, cold)) static void put(vi highest, float* rows, int count, int stride) {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(&highest);
    for (int i = 0; i < 4 * kLanes; ++i)
      if (bytes[i] == 0xff)
        for (int r = 0; r < count; ++r) rows[r * stride + i] = __builtin_nanf("");
  }

  vi highest_{};
};
#endif

}  // namespace fajit
