// Global allocations of a launch: host memory at its own addresses, with names for reports.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fajit::emulator {

struct Allocation {
  std::string name;
  uint64_t begin = 0;
  uint64_t bytes = 0;
  bool writable = true;
  // One byte per byte where reads before the first write are to be reported; null otherwise.
  std::shared_ptr<uint8_t[]> written;

  uint64_t end() const { return begin + bytes; }
};

class GlobalMemory {
 public:
  // Allocations may touch but not overlap: where they do, the error names both.
  explicit GlobalMemory(std::vector<Allocation> allocations);

  // The allocation that holds all of [address, address + bytes); null if none does. `hint` is where
  // the last search ended.
  const Allocation* find(uint64_t address, uint64_t bytes, uint32_t& hint) const {
    if (hint < sorted_.size()) {
      const Allocation& last = sorted_[hint];
      if (address >= last.begin && bytes <= last.bytes &&
          address - last.begin <= last.bytes - bytes)
        return &last;
    }
    return search(address, bytes, hint);
  }
  // The allocation whose end or begin is nearest, for reports.
  const Allocation* nearest(uint64_t address) const;

 private:
  const Allocation* search(uint64_t address, uint64_t bytes, uint32_t& hint) const;
  std::vector<Allocation> sorted_;
};

}  // namespace fajit::emulator
