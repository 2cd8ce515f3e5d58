// Set-up of a block, checked memory accesses, and the source locations in fault messages.
#include <algorithm>
#include <numeric>

#include "machine/machine.h"

namespace fajit::emulator {

Block::Block(const Launch& launch) : launch_(launch) {
  const Kernel& kernel = *launch.kernel;
  num_threads_ = launch.block[0] * launch.block[1] * launch.block[2];
  const uint32_t num_warps = (num_threads_ + kLanes - 1) / kLanes;
  const size_t stride = (kernel.register_words + 31) / 32 * 32;
  registers_.reset(new (kRegisterAlignment) uint32_t[stride * num_warps]());
  warps_.resize(num_warps);
  turns_.resize(num_warps);
  variables_ = kernel.shared;
  shared_end_ = std::max(kernel.static_shared_end, kSharedBase);
  for (Variable& variable : variables_) {
    if (!variable.dynamic) continue;
    variable.bytes = launch.dynamic_shared;
    shared_end_ = std::max(shared_end_, static_cast<uint32_t>(variable.offset + variable.bytes));
  }
  shared_.resize(shared_end_);
  track_ = launch.options.check_races || launch.options.check_uninitialised;
  history_.resize(track_ ? shared_end_ : 0, num_warps, launch.options.check_races);
  local_stride_ = (kernel.local_bytes + 15) / 16 * 16;
  local_.resize(local_stride_ * num_threads_);
  for (uint32_t i = 0; i < num_warps; ++i) {
    Warp& warp = warps_[i];
    warp.block = this;
    warp.index = i;
    warp.registers = registers_.get() + stride * i;
    const uint32_t lanes = std::min<uint32_t>(kLanes, num_threads_ - i * kLanes);
    warp.existing = lanes == kLanes ? kAllLanes : (1u << lanes) - 1;
    warp.copies.reserve(4096);
    for (const auto& [slot, value] : kernel.constants32)
      std::fill_n(warp.words(slot), kLanes, static_cast<uint32_t>(value));
    for (const auto& [slot, value] : kernel.constants64)
      std::fill_n(warp.longs(slot), kLanes, value);
  }
}

void Block::reset(uint32_t x, uint32_t y, uint32_t z) {
  position_[0] = x;
  position_[1] = y;
  position_[2] = z;
  steps_ = 0;
  history_.start();
  generator_ = launch_.options.seed;
  for (const uint32_t at : position_) generator_ = (generator_ ^ at) * 0xd1342543de82ef95ull + 1;
  std::iota(turns_.begin(), turns_.end(), 0u);
  std::fill(std::begin(barriers_), std::end(barriers_), Barrier{});
  mbarriers_.clear();
  copy_arrivals_.clear();
  loads_.clear();
  stores_.clear();
  std::fill(shared_.begin(), shared_.end(), uint8_t{0xcd});
  std::fill(local_.begin(), local_.end(), uint8_t{0xcd});
  for (Warp& warp : warps_) {
    warp.alive = warp.existing;
    warp.blocked = 0;
    warp.early = launch_.overlaps ? warp.existing : 0;
    std::fill_n(warp.pc, kLanes, 0u);
    std::fill_n(warp.wait, kLanes, Wait::none);
    std::fill_n(warp.committed, kLanes, 0u);
    std::fill_n(warp.bulk_committed, kLanes, 0u);
    warp.copies.clear();
    warp.issued = 0;
    fill_specials(warp);
  }
  reset_warpgroups();
}

void Block::fill_specials(Warp& warp) {
  ThreadPosition position = {};
  position.warp = warp.index;
  position.num_warps = static_cast<uint32_t>(warps_.size());
  position.dynamic_shared = launch_.dynamic_shared;
  std::copy_n(position_, 3, position.block);
  std::copy_n(launch_.block, 3, position.block_size);
  std::copy_n(launch_.grid, 3, position.grid_size);
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    position.lane = lane;
    thread_position(warp, lane, position.thread);
    for (const auto& [special, slot] : kernel().specials)
      if ((slot & kWideSlot) != 0) warp.longs(slot & ~kWideSlot)[lane] = special(position);
      else warp.words(slot)[lane] = static_cast<uint32_t>(special(position));
  }
}

void Block::thread_position(const Warp& warp, uint32_t lane, uint32_t (&thread)[3]) const {
  const uint32_t linear = warp.index * kLanes + lane;
  thread[0] = linear % launch_.block[0];
  thread[1] = linear / launch_.block[0] % launch_.block[1];
  thread[2] = linear / launch_.block[0] / launch_.block[1];
}

uint8_t* Block::global_at(Warp& warp, int lane, uint64_t address, unsigned bytes, Access access,
                          unsigned align) {
  if (address % (align == 0 ? bytes : align) != 0)
    fault_at(warp, lane, "misaligned", "an access of " + std::to_string(bytes) + " bytes", address);
  const Allocation* found = launch_.memory->find(address, bytes, global_hint_);
  if (found == nullptr)
    fault_at(warp, lane, "out of bounds",
             std::string(access == Access::read ? "a read" : "a write") + " of " +
                 std::to_string(bytes) + " bytes in no allocation",
             address);
  if (access != Access::read && !found->writable)
    fault_at(warp, lane, "read-only", "a write to memory that the kernel may only read", address);
  if ((warp.early >> lane & 1) != 0 && (access != Access::read || found->pending))
    fault_at(warp, lane, "dependency",
             access == Access::read
                 ? "a read of memory that the kernel before may still write: it is not waited for"
                 : "a write while the kernel before may still run: it is not waited for",
             address);
  if (found->written) {
    uint8_t* written = found->written.get() + (address - found->begin);
    if (access == Access::write) {
      std::memset(written, 1, bytes);
    } else if (std::memchr(written, 0, bytes) != nullptr) {
      fault_at(warp, lane, "uninitialised", "a read of memory that nothing has written", address);
    }
  }
  return reinterpret_cast<uint8_t*>(address);
}

const Variable* Block::shared_variable(uint64_t address) const {
  for (const Variable& variable : variables_)
    if (address >= variable.offset && address - variable.offset < variable.bytes) return &variable;
  return nullptr;
}

uint32_t Block::shared_offset(const Warp& warp, int lane, Space space, uint64_t address) const {
  const uint64_t offset = space == Space::generic ? address - kSharedWindow : address;
  if (offset != static_cast<uint32_t>(offset))
    fault_at(warp, lane, "out of bounds", "the address is not one of shared memory", address);
  return static_cast<uint32_t>(offset);
}

uint8_t* Block::shared_inside(const Warp& warp, int lane, uint64_t address, unsigned bytes,
                              const char* access) {
  if (address % bytes != 0)
    fault_at(warp, lane, "misaligned",
             std::string(access) + " of " + std::to_string(bytes) + " bytes",
             kSharedWindow + address);
  const Variable* variable = shared_variable(address);
  if (variable == nullptr || variable->offset + variable->bytes - address < bytes)
    fault_at(warp, lane, "out of bounds",
             std::string(access) + " of " + std::to_string(bytes) +
                 " bytes of shared memory in no variable",
             kSharedWindow + address);
  return shared_.data() + address;
}

uint8_t* Block::shared_at(Warp& warp, int lane, uint64_t address, unsigned bytes, Access access,
                          bool for_all_lanes) {
  const bool reads = access == Access::read;
  uint8_t* at = shared_inside(warp, lane, address, bytes, reads ? "a read" : "a write");
  if (track_) {
    const uint32_t offset = static_cast<uint32_t>(address);
    const uint32_t by = for_all_lanes ? kAnyLane : static_cast<uint32_t>(lane);
    const Conflict conflict = reads ? history_.read(warp.index, by, warp.current, offset, bytes)
                                    : history_.write(warp.index, by, warp.current, offset, bytes,
                                                     access == Access::atomic);
    report(warp, lane, conflict, reads ? "a read" : "a write");
  }
  return at;
}

void Block::report(const Warp& warp, int lane, const Conflict& conflict, const char* access) {
  if (conflict.kind == Conflict::Kind::none) return;
  const uint64_t address = kSharedWindow + conflict.byte;
  if (conflict.kind == Conflict::Kind::unwritten) {
    if (!launch_.options.check_uninitialised) return;
    fault_at(warp, lane, "uninitialised", "a read of shared memory that nothing has written",
             address);
  }
  const std::string where = source_of(conflict.pc);
  std::string by = conflict.lane < kLanes
                       ? "thread " + thread_name(warps_[conflict.warp], conflict.lane)
                       : "warp " + std::to_string(conflict.warp);
  if (conflict.kind == Conflict::Kind::in_flight)
    fault_at(warp, lane, "in flight",
             std::string(access) + " of bytes that " +
                 (conflict.with_write ? "a copy by " : "an asynchronous operation of ") + by +
                 ", issued at " + where + ", may still be " +
                 (conflict.with_write ? "writing" : "reading") + ": a wait is missing",
             address);
  if (conflict.kind == Conflict::Kind::mbarrier)
    fault_at(warp, lane, "mbarrier",
             std::string(access) + " of bytes of the mbarrier that was initialised at " + where,
             address);
  if (conflict.kind == Conflict::Kind::proxy)
    fault_at(warp, lane, "proxy",
             std::string(access) +
                 " by the asynchronous proxy: fence.proxy.async is missing after " +
                 (conflict.with_write ? "the write" : "the read") + " by " + by + " at " + where,
             address);
  if (conflict.warp >= kMaxWarps)
    fault_at(warp, lane, "race",
             std::string(access) + " of bytes of the copy issued at " + where +
                 ", with no wait for the mbarrier that it completes",
             address);
  const bool same_warp = conflict.warp == warp.index;
  fault_at(warp, lane, "race",
           std::string(access) + " with no " + (same_warp ? "__syncwarp" : "barrier") + " since " +
               (conflict.with_write ? "the write" : "the read") + " by " + by + " at " + where,
           address);
}

uint8_t* Block::local_at(Warp& warp, int lane, uint64_t address, unsigned bytes) {
  if (address % bytes != 0)
    fault_at(warp, lane, "misaligned", "a local access", kLocalWindow + address);
  if (address + bytes > kernel().local_bytes)
    fault_at(warp, lane, "out of bounds", "a local access outside the thread's memory",
             kLocalWindow + address);
  return local_.data() + local_stride_ * (warp.index * kLanes + lane) + address;
}

uint8_t* Block::param_at(Warp& warp, int lane, uint64_t address, unsigned bytes) {
  if (address % bytes != 0)
    fault_at(warp, lane, "misaligned", "an access of parameters", kParamWindow + address);
  if (address + bytes > launch_.params.size())
    fault_at(warp, lane, "out of bounds", "an access outside the kernel's parameters",
             kParamWindow + address);
  if (in_tensor_map(address))
    fault_at(warp, lane, "tensor map", "a read of a tensor map, whose bytes are the driver's",
             kParamWindow + address);
  for (const Variable& param : kernel().params) {
    if (address >= param.offset && address < param.offset + param.bytes && bytes > param.align) {
      fault_at(warp, lane, "misaligned",
               "an access of " + std::to_string(bytes) + " bytes of parameter " + param.name +
                   ", which is aligned to " + std::to_string(param.align),
               kParamWindow + address);
    }
  }
  return const_cast<uint8_t*>(launch_.params.data()) + address;
}

uint8_t* Block::at(Warp& warp, Space space, int lane, uint64_t address, unsigned bytes,
                   Access access) {
  const uint64_t window = address & kWindowMask;
  if (space == Space::generic && window != 0) {
    space = window == kSharedWindow  ? Space::shared
            : window == kLocalWindow ? Space::local
            : window == kParamWindow ? Space::param
                                     : Space::global;
    if (space != Space::global) address -= window;
  }
  switch (space) {
    case Space::shared: return shared_at(warp, lane, address, bytes, access);
    case Space::local: return local_at(warp, lane, address, bytes);
    case Space::param: return param_at(warp, lane, address, bytes);
    default: return global_at(warp, lane, address, bytes, access);
  }
}

void Block::sync_warp(Warp& warp, uint32_t mask) { history_.meet(warp.index, mask); }

std::string Block::source_of(uint32_t pc) const {
  const Location& where = kernel().source_locations[kernel().locations[pc]];
  auto name = [&](uint32_t file, uint32_t line) {
    const std::string path = file < launch_.files.size() ? launch_.files[file] : "";
    return (path.empty() ? "file " + std::to_string(file) : path) + ":" + std::to_string(line);
  };
  if (where.line == 0) return "PTX line " + std::to_string(kernel().text_lines[pc]);
  std::string result = name(where.file, where.line);
  if (where.inlined_line != 0)
    result += " (inlined at " + name(where.inlined_file, where.inlined_line) + ")";
  return result;
}

std::string Block::thread_name(const Warp& warp, uint32_t lane) const {
  uint32_t thread[3];
  thread_position(warp, lane, thread);
  return triple_text(thread);
}

FaultInfo Block::describe(const Warp& warp, int lane, const std::string& kind,
                          const std::string& detail) const {
  FaultInfo info;
  info.kind = kind;
  info.detail = detail;
  info.kernel = kernel().name;
  info.source = source_of(warp.current);
  info.instruction = kernel().mnemonics[warp.current];
  std::copy_n(position_, 3, info.block);
  info.linear_thread = warp.index * kLanes + static_cast<uint32_t>(lane);
  thread_position(warp, static_cast<uint32_t>(lane), info.thread);
  return info;
}

void Block::fault(const Warp& warp, int lane, const std::string& kind,
                  const std::string& detail) const {
  throw Fault(describe(warp, lane, kind, detail));
}

void Block::fault_at(const Warp& warp, int lane, const std::string& kind, const std::string& detail,
                     uint64_t address) const {
  FaultInfo info = describe(warp, lane, kind, detail);
  info.has_address = true;
  info.address = address;
  if ((address & kWindowMask) == kSharedWindow) {
    const int64_t offset = static_cast<int64_t>(address - kSharedWindow);
    const Variable* best = nullptr;
    for (const Variable& variable : variables_)
      if (best == nullptr || offset >= static_cast<int64_t>(variable.offset)) best = &variable;
    info.allocation = best == nullptr ? "shared memory" : "shared " + best->name;
    info.offset = best == nullptr ? offset : offset - static_cast<int64_t>(best->offset);
  } else if ((address & kWindowMask) == kLocalWindow) {
    info.allocation = "local memory";
    info.offset = static_cast<int64_t>(address - kLocalWindow);
  } else if ((address & kWindowMask) == kParamWindow) {
    info.allocation = "parameters";
    info.offset = static_cast<int64_t>(address - kParamWindow);
  } else if (const Allocation* near = launch_.memory->nearest(address)) {
    info.allocation = near->name + " (" + std::to_string(near->bytes) + " bytes)";
    info.offset = static_cast<int64_t>(address - near->begin);
  }
  throw Fault(std::move(info));
}

}  // namespace fajit::emulator
