// Global allocations of a launch: host memory at its host addresses, with names for messages.
#pragma once
#include <algorithm>
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
  bool pending = false;  // a kernel that this one overlaps may write it
  // A flag for each byte, if reads before the first write are reported; otherwise null.
  std::shared_ptr<uint8_t[]> written;

  uint64_t end() const { return begin + bytes; }
};

class GlobalMemory {
 public:
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
  // The allocation whose end or begin is nearest, for messages.
  const Allocation* nearest(uint64_t address) const;

 private:
  const Allocation* search(uint64_t address, uint64_t bytes, uint32_t& hint) const;
  std::vector<Allocation> sorted_;
};

inline GlobalMemory::GlobalMemory(std::vector<Allocation> allocations)
    : sorted_(std::move(allocations)) {
  // Empty tensors have no bytes, and may have any address.
  sorted_.erase(std::remove_if(sorted_.begin(), sorted_.end(),
                               [](const Allocation& a) { return a.bytes == 0; }),
                sorted_.end());
  std::stable_sort(sorted_.begin(), sorted_.end(),
                   [](const Allocation& a, const Allocation& b) { return a.begin < b.begin; });
  // Allocations may overlap (k and v as one tensor): merge them.
  std::vector<Allocation> merged;
  for (Allocation& next : sorted_) {
    if (!merged.empty() && next.begin < merged.back().end()) {
      Allocation& last = merged.back();
      const uint64_t end = std::max(last.end(), next.end());
      if (last.name != next.name) last.name += "/" + next.name;
      last.bytes = end - last.begin;
      last.writable = last.writable || next.writable;
      last.pending = last.pending || next.pending;
      last.written = nullptr;
    } else {
      merged.push_back(std::move(next));
    }
  }
  sorted_ = std::move(merged);
}

inline const Allocation* GlobalMemory::search(uint64_t address, uint64_t bytes,
                                              uint32_t& hint) const {
  const auto after = std::upper_bound(
      sorted_.begin(), sorted_.end(), address,
      [](uint64_t value, const Allocation& allocation) { return value < allocation.begin; });
  if (after == sorted_.begin()) return nullptr;
  const Allocation& found = *(after - 1);
  if (bytes > found.bytes || address - found.begin > found.bytes - bytes) return nullptr;
  hint = static_cast<uint32_t>(after - 1 - sorted_.begin());
  return &found;
}

inline const Allocation* GlobalMemory::nearest(uint64_t address) const {
  const Allocation* best = nullptr;
  uint64_t best_distance = ~0ull;
  for (const Allocation& allocation : sorted_) {
    const uint64_t distance = address < allocation.begin    ? allocation.begin - address
                              : address >= allocation.end() ? address - allocation.end()
                                                            : 0;
    if (distance < best_distance) {
      best_distance = distance;
      best = &allocation;
    }
  }
  return best_distance <= (1ull << 32) ? best : nullptr;
}

}  // namespace fajit::emulator
