// Matrix descriptors of wgmma: where the 16-byte chunks of an operand in shared memory lie.
//
// An operand has `rows` rows (of M or N) and 16 columns (of k) of 16-bit elements. Its pattern is
// eight rows of 128, 64, 32 bytes, by the swizzle, or of 16 bytes without one (PTX ISA, "Canonical
// layouts"):
//   K-major   a row of the pattern is a row; `stride` is between groups of 8 rows. Without a
//             swizzle, `leading` is between the two chunks of a row, otherwise they are adjacent.
//   MN-major  a row of the pattern is a column. With a swizzle, `leading` is between patterns of
//             adjacent rows, `stride` between columns 0-7 and 8-15; without one, the other way.
// The swizzle is an exclusive or on the address, so it is the same wherever an operand begins.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace fajit::emulator {

struct MatrixDescriptor {
  uint32_t start, leading, stride;  // bytes
  uint32_t width;                   // of the pattern, in bytes
  bool mn_major;

  MatrixDescriptor(uint64_t bits, bool is_mn_major)
      : start(static_cast<uint32_t>(bits & 0x3fff) << 4),
        leading(static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4),
        stride(static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4),
        width(bits >> 62 == 0 ? 16 : 256u >> (bits >> 62)),
        mn_major(is_mn_major) {}

  // Appends the addresses of rows [begin, end): row by row, or, MN-major, column by column.
  void add_chunks(uint32_t begin, uint32_t end, std::vector<uint32_t>& chunks) const {
    const uint32_t in_pattern = width / 16;
    const bool swizzled = width > 16;
    const uint32_t across = swizzled ? leading : stride, down = swizzled ? stride : leading;
    const auto add = [&](uint32_t offset) {
      const uint32_t address = start + offset;
      chunks.push_back(address ^ (address >> 7 & (in_pattern - 1)) << 4);
    };
    for (uint32_t row = begin; !mn_major && row < end; ++row)
      for (uint32_t half = 0; half < 2; ++half)
        add(row % 8 * width + row / 8 * stride + half * (swizzled ? 16 : leading));
    for (uint32_t column = 0; mn_major && column < 16; ++column)
      for (uint32_t chunk = begin / 8; chunk < end / 8; ++chunk)
        add(column % 8 * width + column / 8 * down + chunk % in_pattern * 16 +
            chunk / in_pattern * across);
  }
};

// What is wrong with the descriptor of an operand with so many rows; empty if nothing is.
inline std::string descriptor_problem(uint64_t bits, bool mn_major, uint32_t rows) {
  constexpr uint64_t kUsed = 0xc00e'3fff'3fff'3fffull;
  const MatrixDescriptor d(bits, mn_major);
  if ((bits & ~kUsed) != 0) return "bits outside of its fields are set";
  if ((bits >> 49 & 7) != 0) return "a base offset other than 0 is not emulated";
  if (d.width == 16) return "";
  const uint32_t pattern = 8 * d.width, first = d.start % pattern;
  const std::string name = std::to_string(d.width) + "-byte swizzle";
  if (first >= d.width)
    return "with a " + name + " and base offset 0, the pattern must begin at a multiple of " +
           std::to_string(pattern) + " bytes, not at " + std::to_string(first) + " beyond one";
  const uint32_t span = mn_major ? std::min(2 * rows, d.width) : 32;
  if (first + span > d.width) return "the operand exceeds a row of the " + name;
  const bool across = mn_major && 2 * rows > d.width, down = mn_major || rows > 8;
  if ((across && d.leading % pattern != 0) || (down && d.stride % pattern != 0))
    return "with a " + name + ", byte offsets must be multiples of " + std::to_string(pattern);
  return "";
}

}  // namespace fajit::emulator
