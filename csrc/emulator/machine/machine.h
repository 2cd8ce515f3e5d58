// A running thread block: its warps, their registers, and their memory.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "machine/fault.h"
#include "machine/memory.h"
#include "machine/races.h"
#include "machine/warpgroups.h"
#include "ptx/insn.h"

namespace fajit::emulator {

// When asynchronous operations take effect: as late as waits allow, when they are issued, or at
// drawn moments. Warps run in a drawn order too in the last case.
enum class Completion : uint8_t { late, early, random };

struct Options {
  Completion completion = Completion::late;
  uint64_t seed = 0;  // of random completion
  bool check_races = true;
  bool check_uninitialised = true;         // report reads of shared memory that was never written
  uint64_t step_limit = 4'000'000'000ull;  // warp instructions of one block
};

struct Launch {
  const Kernel* kernel = nullptr;
  const GlobalMemory* memory = nullptr;
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {1, 1, 1};
  uint32_t dynamic_shared = 0;
  std::vector<uint8_t> params;
  std::vector<std::string> files;  // by the index of .file
  bool overlaps = false;           // starts while the kernel before it runs
  Options options;
};

enum class Access : uint8_t { read, write, atomic };

enum class Wait : uint8_t { none, rendezvous, barrier, mbarrier, registers };

struct AsyncCopy {
  uint8_t lane;
  uint8_t bytes, source_bytes;
  uint32_t group;
  uint32_t pc;
  uint32_t serial;  // in the warp
  uint32_t shared;  // offset
  uint64_t source;
  bool performed;  // the bytes are written; the copy may still be in flight for who reads them
};

// cp.async.mbarrier.arrive: lanes that arrive when the copies that they issued before are complete.
struct CopyArrival {
  uint32_t warp, lanes;
  uint32_t before;  // serial of the copies that come later
  uint32_t pc;
  uint32_t mbarrier;  // offset
  uint32_t clock;     // of the warp, when it was issued
  Order order;
};

// A box of a tensor in global memory; or a run of bytes, which has one dimension.
struct Box {
  uint64_t base = 0;
  uint64_t strides[4] = {};  // bytes, of dims 1 ...
  uint32_t sizes[5] = {};    // elements
  uint32_t box[5] = {};
  int32_t at[5] = {};    // coordinates
  uint32_t element = 1;  // bytes
  uint32_t rank = 1;
  uint32_t swizzle = 0;  // address bits that it changes
};

// cp.async.bulk: a load, which completes an mbarrier, or a store.
struct BulkCopy {
  Box box;
  uint32_t shared;    // offset
  uint32_t mbarrier;  // offset
  uint32_t warp, pc;
  uint32_t group;
  int lane;
  bool performed;
};

class Block;

struct Warp {
  Block* block = nullptr;
  uint32_t* registers = nullptr;
  uint32_t index = 0;
  uint32_t existing = 0;  // lanes that the block has
  uint32_t alive = 0;     // lanes that have not exited
  uint32_t blocked = 0;   // lanes that wait
  uint32_t early = 0;     // lanes that may run beside the kernel before this one
  uint32_t current = 0;   // pc of the running instruction
  uint32_t pc[kLanes] = {};
  Wait wait[kLanes] = {};
  uint32_t barrier[kLanes] = {};  // barrier or mbarrier that a lane waits at
  std::vector<AsyncCopy> copies;  // not yet complete, in order of issue
  uint32_t issued = 0;            // copies
  uint32_t committed[kLanes] = {};
  WarpProducts products;
  uint32_t register_count = 0;  // of a thread, as set by setmaxnreg
  uint32_t bulk_committed[kLanes] = {};

  uint32_t* words(uint32_t slot) const { return registers + slot; }
  uint64_t* longs(uint32_t slot) const { return reinterpret_cast<uint64_t*>(registers + slot); }
  uint32_t& predicate(uint32_t slot) const { return registers[slot]; }
};

struct Barrier {
  uint32_t arrived = 0;   // threads, including the missing lanes of the last warp
  uint32_t threads = 0;   // existing threads
  uint32_t expected = 0;  // 0: no thread waits
  uint32_t votes = 0;     // threads whose predicate is true
  uint32_t pc = 0;        // of the first arrival
  Order order;            // joined clocks of the warps that arrived
};

inline constexpr int kBarriers = 16;

struct Mbarrier {
  uint32_t offset = 0;    // in shared memory; 0: none
  uint32_t expected = 0;  // arrivals of a phase
  uint32_t pending = 0;   // arrivals that the current phase lacks
  int32_t bytes = 0;      // that it expects asynchronous copies to write (tx-count)
  uint32_t phase = 0;
  uint32_t initialiser = 0;  // thread
  bool fenced = false;       // fence.mbarrier_init followed
  Order order, completed;    // joined clocks of who arrived in this phase and in the one before
};

inline constexpr uint32_t kMostArrivals = (1u << 20) - 1;  // and bytes

inline constexpr std::align_val_t kRegisterAlignment{64};  // for vector loads

struct FreeRegisters {
  void operator()(uint32_t* registers) const { operator delete[](registers, kRegisterAlignment); }
};

// Runs blocks of a launch one after another; each host thread has one Block.
class Block {
 public:
  explicit Block(const Launch& launch);

  void run(uint32_t x, uint32_t y, uint32_t z);

  const Kernel& kernel() const { return *launch_.kernel; }

  // Return the host address of a lane's access of `bytes` bytes, after checks. align: 0 for the
  // size.
  uint8_t* global_at(Warp& warp, int lane, uint64_t address, unsigned bytes, Access access,
                     unsigned align = 0);
  // for_all_lanes: a row of ldmatrix or stmatrix.
  uint8_t* shared_at(Warp& warp, int lane, uint64_t address, unsigned bytes, Access access,
                     bool for_all_lanes = false);
  const uint8_t* shared_memory() const { return shared_.data(); }
  uint8_t* local_at(Warp& warp, int lane, uint64_t address, unsigned bytes);
  uint8_t* param_at(Warp& warp, int lane, uint64_t address, unsigned bytes);
  uint8_t* at(Warp& warp, Space space, int lane, uint64_t address, unsigned bytes, Access access);

  void issue_copy(Warp& warp, const AsyncCopy& copy);
  void commit_copies(Warp& warp, uint32_t mask);
  void wait_copies(Warp& warp, uint32_t mask, uint32_t pending);
  void wait_all_copies(Warp& warp, uint32_t mask);

  // warpgroups.cpp
  void execute_together(Warp& warp, const GroupEvent& event);
  void issue_product(Warp& warp, const Insn& insn, Product product);
  void wait_products(Warp& warp, uint64_t pending);  // groups that may still be in flight

  // The arrival of the lanes when the copies that they have issued are complete. counted: it is
  // one more than the mbarrier was initialised for.
  void arrive_after_copies(Warp& warp, uint32_t mask, Mbarrier& mbarrier, bool counted);

  Box tensor_box(Warp& warp, int lane, uint64_t map, uint32_t rank);
  void issue_load(Warp& warp, int lane, const Box& box, uint32_t shared, uint32_t mbarrier);
  void issue_store(Warp& warp, int lane, const Box& box, uint32_t shared);
  void commit_stores(Warp& warp, uint32_t mask);
  void wait_stores(Warp& warp, uint32_t mask, uint32_t pending);

  // The offset of an address of shared memory.
  uint32_t shared_offset(const Warp& warp, int lane, Space space, uint64_t address) const;

  void init_mbarrier(Warp& warp, int lane, uint32_t offset, uint32_t count);
  void invalidate_mbarrier(Warp& warp, int lane, uint32_t offset);
  void fence_mbarriers(const Warp& warp, uint32_t mask);  // fence.mbarrier_init
  // An mbarrier that the lane uses, itself or by an asynchronous copy.
  Mbarrier& use_mbarrier(Warp& warp, int lane, uint32_t offset, bool asynchronous = false);
  // Count bytes and arrivals, and complete the phase where nothing is missing.
  void count_bytes(const Warp& warp, int lane, Mbarrier& mbarrier, int64_t bytes);
  void count_arrivals(const Warp& warp, int lane, Mbarrier& mbarrier, uint32_t count);
  // Passes what the lanes did and know to who waits for the phase, and the other way.
  void release_to(Warp& warp, uint32_t mask, Mbarrier& mbarrier) {
    history_.arrive(warp.index, mask == warp.alive ? kEveryLane : mask, mbarrier.order);
  }
  void acquire_from(Warp& warp, const Mbarrier& mbarrier) {
    history_.leave(warp.index, mbarrier.completed);
  }
  // The lanes wait until the current phase is complete, or have only asked whether it is.
  void suspend(Warp& warp, uint32_t mask, const Mbarrier& mbarrier);
  void count_poll() { ++polls_; }

  void sync_warp(Warp& warp, uint32_t mask);     // bar.warp.sync: orders the accesses of its lanes
  void fence_proxy(Warp& warp, uint32_t mask) {  // fence.proxy.async
    history_.fence(warp.index, mask == warp.alive ? kEveryLane : mask);
  }

  // Whether an asynchronous operation that is issued now takes effect at once.
  bool completes_at_issue();
  uint32_t draw(uint32_t n);  // a number below n, from the seed and the block's position

  [[noreturn]] void fault(const Warp& warp, int lane, const std::string& kind,
                          const std::string& detail) const;
  [[noreturn]] void fault_at(const Warp& warp, int lane, const std::string& kind,
                             const std::string& detail, uint64_t address) const;
  std::string source_of(uint32_t pc) const;  // file:line of an instruction
  std::string thread_name(const Warp& warp, uint32_t lane) const;

 private:
  // scheduler.cpp
  bool run_warp(Warp& warp);  // returns whether it made progress
  void leave(Warp& warp, uint32_t mask);
  void wake(Warp& warp, Wait waits, uint32_t mbarrier = 0);  // the lanes that wait so
  void rendezvous(Warp& warp, const Insn& insn, uint32_t mask);
  void arrive(Warp& warp, const Insn& insn, uint32_t mask);
  void release(uint32_t barrier);
  [[noreturn]] void report_deadlock();
  bool complete_one();  // of the asynchronous operations that are pending; false: none is
  // mbarriers.cpp
  Mbarrier& initialised(const Warp& warp, int lane, uint32_t offset);
  void complete_phase(Mbarrier& mbarrier);
  std::string describe(const Mbarrier& mbarrier) const;
  // tensor_copies.cpp
  void finish_load(size_t index);
  void perform(const BulkCopy& store);
  void check_copies_at_exit(Warp& warp, uint32_t mask) const;
  void check_copies_at_end();
  // warpgroups.cpp
  void reset_warpgroups();
  void check_warpgroups_at_end();
  void check_registers(Warp& warp);  // that the current instruction shares with some wgmma
  void hold_registers(Warp& warp, const Insn& insn, uint32_t serial);
  void perform_products(Warp& warp, size_t count);
  void step_products(Warp& warp);
  bool set_register_count(Warp& warp, const Insn& insn);  // false: it has to wait
  [[noreturn]] void fault_held(const Warp& warp, uint32_t serial, const std::string& access) const;
  // block.cpp
  void reset(uint32_t x, uint32_t y, uint32_t z);
  void fill_specials(Warp& warp);
  void thread_position(const Warp& warp, uint32_t lane, uint32_t (&thread)[3]) const;
  void perform(const AsyncCopy& copy);
  template <class Done> void finish_copies(Warp& warp, uint32_t clock, Done done);
  void finish_copy_arrival(size_t index);
  FaultInfo describe(const Warp& warp, int lane, const std::string& kind,
                     const std::string& detail) const;
  uint8_t* shared_inside(const Warp& warp, int lane, uint64_t address, unsigned bytes,
                         const char* access);
  void report(const Warp& warp, int lane, const Conflict& conflict, const char* access);
  const Variable* shared_variable(uint64_t address) const;

  bool random() const { return launch_.options.completion == Completion::random; }

  const Launch& launch_;
  uint32_t position_[3] = {0, 0, 0};
  uint32_t num_threads_ = 0;
  uint32_t shared_end_ = 0;
  size_t local_stride_ = 0;  // of a thread
  std::vector<Warp> warps_;
  std::unique_ptr<uint32_t[], FreeRegisters> registers_;
  std::vector<uint8_t> shared_, local_;
  std::vector<Variable> variables_;  // shared variables; the dynamic array has its actual size
  Barrier barriers_[kBarriers];
  std::vector<Warpgroup> warpgroups_;
  int64_t free_registers_ = 0;  // for setmaxnreg.inc
  std::vector<Mbarrier> mbarriers_;
  std::vector<CopyArrival> copy_arrivals_;
  std::vector<BulkCopy> loads_, stores_;  // not yet complete, in order of issue
  uint64_t polls_ = 0;                    // tests of phases that were not complete
  SharedHistory history_;
  bool track_ = false;
  uint32_t global_hint_ = 0;
  uint64_t steps_ = 0;
  uint64_t generator_ = 0;
  std::vector<uint32_t> turns_;  // warps, in the order in which they run
};

}  // namespace fajit::emulator
