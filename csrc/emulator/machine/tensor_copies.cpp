// Bulk copies by the tensor memory accelerator: boxes of tensors, and runs of bytes. Loads complete
// a phase of an mbarrier, stores are waited for in groups.
#include <algorithm>

#include "fajit/tensor_map.h"
#include "machine/machine.h"

namespace fajit::emulator {
namespace {

constexpr uint32_t kChunk = 16;  // bytes that a swizzle keeps together

// Bytes of an element, by CUtensorMapDataType.
constexpr uint32_t kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};

// Calls body(offset, address, skipped, count) for each chunk of the box in shared memory: `count`
// bytes behind the first `skipped` are in the tensor, at the address; the others are outside it.
template <class Body> void for_chunks(const Box& box, uint32_t shared, Body body) {
  const int64_t chunk = kChunk, row_bytes = int64_t{box.sizes[0]} * box.element;
  const int64_t begin = int64_t{box.at[0]} * box.element;
  const int64_t end = begin + int64_t{box.box[0]} * box.element;
  uint32_t index[5] = {};
  for (;;) {
    int64_t row = static_cast<int64_t>(box.base);
    bool inside = true;
    for (uint32_t d = 1; d < box.rank; ++d) {
      const int64_t at = int64_t{box.at[d]} + index[d];
      inside = inside && at >= 0 && at < int64_t{box.sizes[d]};
      row += at * static_cast<int64_t>(box.strides[d - 1]);
    }
    for (int64_t x = begin; x < end; x += chunk, shared += kChunk) {
      const int64_t first = std::clamp<int64_t>(-x, 0, chunk);
      const int64_t last = inside ? std::clamp<int64_t>(row_bytes - x, first, chunk) : first;
      // A swizzle exchanges chunks of 128 bytes by the bits of the address above them.
      const uint32_t offset = shared ^ (shared >> 7 & ((1u << box.swizzle) - 1)) << 4;
      body(offset, static_cast<uint64_t>(row + x + first), static_cast<uint32_t>(first),
           static_cast<unsigned>(last - first));
    }
    uint32_t d = 1;
    for (; d < box.rank && ++index[d] == box.box[d]; ++d) index[d] = 0;
    if (d >= box.rank) return;
  }
}

int64_t bytes_of(const Box& box) {
  int64_t bytes = box.element;
  for (uint32_t d = 0; d < box.rank; ++d) bytes *= box.box[d];
  return bytes;
}

}  // namespace

bool Block::in_tensor_map(uint64_t param) const {
  const std::vector<uint8_t>& params = launch_.params;
  uint64_t magic = 0;
  for (const uint64_t begin : {param / 64 * 64, param / 64 * 64 - 64})
    if (begin + sizeof magic <= params.size() && magic != FAJIT_TENSOR_MAP_MAGIC)
      std::memcpy(&magic, params.data() + begin, sizeof magic);
  return magic == FAJIT_TENSOR_MAP_MAGIC;
}

Box Block::tensor_box(Warp& warp, int lane, uint64_t address, uint32_t rank) {
  auto require = [&](bool holds, const std::string& what) {
    if (!holds) fault_at(warp, lane, "tensor map", what, address);
  };
  fajit_tensor_map map;
  if (const uint64_t offset = address - kParamWindow; offset < launch_.params.size()) {
    require(offset % 64 == 0 && offset + sizeof map <= launch_.params.size(),
            "the parameters hold no tensor map there, aligned to 64 bytes");
    std::memcpy(&map, launch_.params.data() + offset, sizeof map);
  } else {
    std::memcpy(&map, global_at(warp, lane, address, sizeof map, Access::read, 64), sizeof map);
  }
  require(map.magic == FAJIT_TENSOR_MAP_MAGIC, "what lies there is no tensor map");
  require(map.rank == rank, "a map of " + std::to_string(map.rank) + " dimensions");
  require(map.element < std::size(kElementBytes) && map.swizzle <= 3 && map.promotion <= 3,
          "an unknown element, swizzle or promotion");
  Box box;
  box.base = reinterpret_cast<uint64_t>(map.base);
  box.rank = rank;
  box.element = kElementBytes[map.element];
  box.swizzle = map.swizzle;
  const uint32_t inner = map.box[0] * box.element;
  require(box.base % 16 == 0, "the base is not aligned to 16 bytes");
  require(inner % 16 == 0, "rows of " + std::to_string(inner) + " bytes: not a multiple of 16");
  require(map.swizzle == 0 || inner <= 16u << map.swizzle,
          "rows of " + std::to_string(inner) + " bytes are longer than the swizzle's " +
              std::to_string(16u << map.swizzle));
  for (uint32_t d = 0; d < rank; ++d) {
    require(map.sizes[d] >= 1 && map.box[d] >= 1 && map.box[d] <= 256,
            "a box of " + std::to_string(map.box[d]) + " of " + std::to_string(map.sizes[d]) +
                " elements in dimension " + std::to_string(d));
    require(d == 0 || (map.strides[d - 1] % 16 == 0 && map.strides[d - 1] >> 40 == 0),
            "a stride of " + std::to_string(map.strides[d == 0 ? 0 : d - 1]) + " bytes");
    box.sizes[d] = map.sizes[d];
    box.box[d] = map.box[d];
    if (d > 0) box.strides[d - 1] = map.strides[d - 1];
  }
  return box;
}

void Block::issue_load(Warp& warp, int lane, const Box& box, uint32_t shared, uint32_t mbarrier) {
  use_mbarrier(warp, lane, mbarrier, true);
  for_chunks(box, shared, [&](uint32_t offset, uint64_t address, uint32_t, unsigned count) {
    if (count > 0) global_at(warp, lane, address, count, Access::read, 1);
    shared_inside(warp, lane, offset, kChunk, "a copy");
    if (!track_) return;
    const uint32_t by = static_cast<uint32_t>(lane);
    const Conflict found = history_.begin_async_write(warp.index, by, warp.current, offset, kChunk);
    report(warp, lane, found, "a copy into bytes");
  });
  loads_.push_back({box, shared, mbarrier, warp.index, warp.current, 0, lane, false});
  if (completes_at_issue()) finish_load(loads_.size() - 1);
}

void Block::finish_load(size_t index) {
  const BulkCopy copy = loads_[index];
  loads_.erase(loads_.begin() + static_cast<ptrdiff_t>(index));
  Warp& warp = warps_[copy.warp];
  warp.current = copy.pc;
  Mbarrier& mbarrier = initialised(warp, copy.lane, copy.mbarrier);
  const uint32_t agent = kMaxWarps + static_cast<uint32_t>(&mbarrier - mbarriers_.data());
  for_chunks(copy.box, copy.shared,
             [&](uint32_t offset, uint64_t address, uint32_t skipped, unsigned count) {
               uint8_t* to = shared_.data() + offset;
               std::memset(to, 0, kChunk);
               std::memcpy(to + skipped, reinterpret_cast<const void*>(address), count);
               if (track_) history_.end_async_write(agent, copy.pc, offset, kChunk);
             });
  count_bytes(warp, copy.lane, mbarrier, -bytes_of(copy.box));
}

void Block::issue_store(Warp& warp, int lane, const Box& box, uint32_t shared) {
  for_chunks(box, shared, [&](uint32_t offset, uint64_t address, uint32_t skipped, unsigned count) {
    shared_inside(warp, lane, offset, kChunk, "a copy");
    if (count == 0) return;
    global_at(warp, lane, address, count, Access::write, 1);
    if (!track_) return;
    const Conflict found = history_.begin_async_read(warp.index, warp.current, offset + skipped,
                                                     count, static_cast<uint32_t>(lane));
    report(warp, lane, found, "a copy of bytes");
  });
  const uint32_t group = warp.bulk_committed[lane];
  stores_.push_back({box, shared, 0, warp.index, warp.current, group, lane, completes_at_issue()});
  if (stores_.back().performed) perform(stores_.back());
}

void Block::perform(const BulkCopy& store) {
  for_chunks(store.box, store.shared,
             [&](uint32_t offset, uint64_t address, uint32_t skipped, unsigned count) {
               std::memcpy(reinterpret_cast<void*>(address), shared_.data() + offset + skipped,
                           count);
             });
}

void Block::commit_stores(Warp& warp, uint32_t mask) {
  for (int lane = 0; lane < kLanes; ++lane) warp.bulk_committed[lane] += mask >> lane & 1;
}

void Block::wait_stores(Warp& warp, uint32_t mask, uint32_t pending) {
  auto kept = stores_.begin();
  for (const BulkCopy& store : stores_) {
    if (store.warp != warp.index || (mask >> store.lane & 1) == 0 ||
        store.group + pending >= warp.bulk_committed[store.lane]) {
      *kept++ = store;
      continue;
    }
    if (!store.performed) perform(store);
    for_chunks(store.box, store.shared,
               [&](uint32_t offset, uint64_t, uint32_t skipped, unsigned count) {
                 if (track_) history_.end_async_read(warp.index, store.pc, offset + skipped, count);
               });
  }
  stores_.erase(kept, stores_.end());
}

// Of threads that exit, or at the end of the block of all.
void Block::check_copies_at_exit(Warp& warp, uint32_t mask) const {
  for (const BulkCopy& store : stores_)
    if (store.warp == warp.index && (mask >> store.lane & 1) != 0)
      fault(warp, store.lane, "exit",
            "the thread ends while its copy, issued at " + source_of(store.pc) +
                ", may still be reading shared memory: cp.async.bulk.wait_group is missing");
}

void Block::check_copies_at_end() {
  if (loads_.empty()) return;
  const BulkCopy& copy = loads_.front();
  warps_[copy.warp].current = copy.pc;
  fault(warps_[copy.warp], copy.lane, "exit",
        "the block ends while this copy may still be writing: no thread waits for its mbarrier");
}

}  // namespace fajit::emulator
