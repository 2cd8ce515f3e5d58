// AMX: tiles of 16 rows of 64 bytes in eight registers, and their product of bf16 pairs.
//
//   C[16][16] += A[16][32] B[32][16]     A: rows of bf16. B: words of two values adjacent in depth,
//                                        [16 words][16 columns]. C: fp32.
//
// A product takes 16 clocks, a load 8. Two by two tiles in registers, four products for four loads,
// reach the peak of 1,024 FLOP a clock: 3.1 TFLOP/s a core, where `vdpbf16ps` reaches 0.1 and fp32
// FMAs 0.2 (measured on a 4th generation Xeon).
#pragma once
#include <fajit/cpu/microkernel.h>

namespace fajit {

template <int N>
struct Tiles {
  static constexpr int value = N;
};

constexpr int kTileDepth = 32;  // elements that one tile product sums over

// Configures this thread's tile registers as 16 rows of 64 bytes for the lifetime of the object.
// The destructor releases them: with tiles in use, every context switch saves 8 KB.
// csrc/runtime/host/hardware.cpp asks the kernel for permission to use them.
class TileUnit {
 public:
  TileUnit() { configure(16); }

  // Gives tiles 1, 3 and 7 `rows` rows, the others 16, and zeroes all. A product takes a clock for
  // each row of A, and loads and stores take their rows.
  static void configure(int rows) {
    alignas(64) uint8_t config[64] = {1};  // palette 1
    for (int i = 0; i < 8; ++i) {
      config[16 + 2 * i] = 64;  // bytes of a row
      config[48 + i] = static_cast<uint8_t>(i == 1 || i == 3 || i == 7 ? rows : 16);
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }

  ~TileUnit() { asm volatile("tilerelease"); }
  TileUnit(const TileUnit&) = delete;
  TileUnit& operator=(const TileUnit&) = delete;

 private:
  FlushDenormals flush_;
};

template <int T>
FAJIT_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
// `stride`: bytes between rows.
template <int T>
FAJIT_INLINE void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
FAJIT_INLINE void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
// tile C += tile A times tile B.
template <int C, int A, int B>
FAJIT_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// Zero, load or store the tiles that `multiply_tiles` accumulates into. `stride`: bytes between
// rows; `second`: from the tiles of A's first rows to those of its second.
template <int NA, int NB>
FAJIT_INLINE void zero_tiles() {
  tile_zero<0>();
  if constexpr (NB == 2) tile_zero<1>();
  if constexpr (NA == 2) tile_zero<2>();
  if constexpr (NA == 2 && NB == 2) tile_zero<3>();
}
template <int NA, int NB>
FAJIT_INLINE void load_tiles(const float* c, int64_t stride, int64_t second) {
  const char* at = reinterpret_cast<const char*>(c);
  tile_load<0>(at, stride);
  if constexpr (NB == 2) tile_load<1>(at + 64, stride);
  if constexpr (NA == 2) tile_load<2>(at + second, stride);
  if constexpr (NA == 2 && NB == 2) tile_load<3>(at + second + 64, stride);
}
template <int NA, int NB>
FAJIT_INLINE void load_tiles(const float* c, int64_t stride) {
  load_tiles<NA, NB>(c, stride, 16 * stride);
}
template <int NA, int NB>
FAJIT_INLINE void store_tiles(float* c, int64_t stride, int64_t second) {
  char* at = reinterpret_cast<char*>(c);
  tile_store<0>(at, stride);
  if constexpr (NB == 2) tile_store<1>(at + 64, stride);
  if constexpr (NA == 2) tile_store<2>(at + second, stride);
  if constexpr (NA == 2 && NB == 2) tile_store<3>(at + second + 64, stride);
}
template <int NA, int NB>
FAJIT_INLINE void store_tiles(float* c, int64_t stride) {
  store_tiles<NA, NB>(c, stride, 16 * stride);
}

// Address of the first of 16 rows of a tile, and the bytes between rows.
struct TileRows {
  const char* first;
  int64_t stride;
};

// Bytes from a row to the next of rows [n, n + 16) of K or V where a tile can load them in place:
// bf16, evenly spaced. Otherwise 0.
template <class Rows>
FAJIT_INLINE int64_t even_stride(const Rows& rows, int n) {
  if (!same<typename Rows::Element, bfloat16_t>) return 0;
  const auto* const first = rows(n);
  const int64_t stride = rows(n + 1) - first;
  int64_t uneven = 0;
  for (int i = 2; i < 16; ++i) uneven |= (rows(n + i) - first) ^ (i * stride);
  return uneven == 0 ? stride * 2 : 0;
}

// C += A B for NA x NB tiles, C in registers 0..3 row by row, over `steps` of depth. A step
// advances A by 64 bytes and B by 16 rows; the NB tiles of B are 64 bytes apart. `between()` is
// called at each step.
template <int NA, int NB, class Between>
FAJIT_INLINE void multiply_tiles(TileRows a, TileRows a1, TileRows b, int steps, Between between) {
#pragma GCC unroll 1
  for (int k = 0; k < steps; ++k) {
    tile_load<4>(a.first, a.stride);
    tile_load<6>(b.first, b.stride);
    tile_multiply<0, 4, 6>();
    if constexpr (NB == 2) {
      tile_load<7>(b.first + 64, b.stride);
      tile_multiply<1, 4, 7>();
    }
    if constexpr (NA == 2) {
      tile_load<5>(a1.first, a1.stride);
      tile_multiply<2, 5, 6>();
      if constexpr (NB == 2) tile_multiply<3, 5, 7>();
      a1.first += 64;
    }
    a.first += 64;
    b.first += 16 * b.stride;
    between();
  }
}

}  // namespace fajit
