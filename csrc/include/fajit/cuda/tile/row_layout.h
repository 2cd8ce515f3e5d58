// The layout of a tile's rows in shared memory, in chunks of 16 bytes.
//
// ldmatrix reads the same chunk of 8 consecutive rows at once, without bank conflicts when the 8
// chunks are in 8 different 16-byte columns of a 128-byte line:
//
//   row length       chunks a row   column of (row, chunk)
//   multiple of 128 B     8 k       chunk ^ (row & 7), within each line of 8
//   64 B                  4         chunk ^ (row / 2 & 3)
//   32 B                  2         chunk ^ (row / 4 & 1)
//   any other             n         rows padded to an odd number of chunks
#pragma once
#include <fajit/cuda/ptx/device.h>

namespace fajit::cuda {

// Prevents the compiler from hoisting computations with this address out of a loop: the few
// additions cost less than the registers for their results.
FAJIT_DEV uint32_t compute_here(uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}

template <int Dim>
struct RowLayout {
  static_assert(Dim % 16 == 0, "rows are padded to whole k16 steps");
  static constexpr int kDim = Dim;
  // Whether codes are widened in several parts of the columns. Warps that multiply have no
  // registers for the addresses of them.
  static constexpr bool kInParts = false;
  static constexpr int kChunks = Dim / 8;
  static constexpr int kMask = kChunks % 8 == 0 ? 7 : kChunks == 4 ? 3 : kChunks == 2 ? 1 : 0;
  static constexpr int kShift = kMask == 3 ? 1 : kMask == 1 ? 2 : 0;
  static constexpr int kPitch = kMask != 0 ? kChunks : kChunks | 1;  // chunks
  static constexpr int kRowBytes = kPitch * 16;

  // Byte offset of a chunk.
  static FAJIT_DEV uint32_t offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ (row >> kShift & kMask)) << 4);
  }
  // The address of (row, c + chunk) from that of (row, c), for a constant `chunk` that has no bit
  // in common with c: one XOR or addition. The tile starts at a multiple of 128 bytes. Of rows that
  // are a multiple of 8 apart, one has the address of the other plus a constant, which loads add
  // for free.
  static FAJIT_DEV uint32_t step(uint32_t address, int chunk) {
    if constexpr (kMask == 0) return address + chunk * 16;
    return (address ^ ((chunk & kMask) << 4)) + (chunk & ~kMask) * 16;
  }
  // The address of (row + rows, chunk) from that of (row, chunk), for a constant `rows` that has no
  // bit in common with `row` modulo 8.
  static FAJIT_DEV uint32_t down(uint32_t address, int rows) {
    return (address ^ ((rows >> kShift & kMask) << 4)) + rows * kRowBytes;
  }
  // Byte offset of one 16-bit element.
  static FAJIT_DEV uint32_t element(int row, int i) { return offset(row, i >> 3) + (i & 7) * 2; }
};

}  // namespace fajit::cuda
