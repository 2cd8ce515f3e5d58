// Per-thread scratch memory, kept between calls: no allocation in steady state.
//
// Buffers are kept in a small pool and exchanged atomically, so threads that end leak nothing. All
// artifacts of a process share one pool (an inline variable with default visibility), so hundreds
// of kernels do not need hundreds of buffers per thread.
#pragma once
#include <stdint.h>
#include <stdlib.h>

namespace fajit {

struct ScratchHeader { uint64_t bytes; };
constexpr uint64_t kScratchAlign = 4096;
constexpr int kPoolSlots = 256;

struct ScratchPool { ScratchHeader* slots[kPoolSlots]; };
__attribute__((visibility("default"))) inline ScratchPool scratch_pool_v1 = {};

// At least `bytes` of page-aligned memory, contents undefined; null when there is none.
class Scratch {
 public:
  explicit Scratch(uint64_t bytes) {
    const uint64_t need = (bytes + 2 * kScratchAlign - 1) / kScratchAlign * kScratchAlign;
    for (ScratchHeader*& slot : scratch_pool_v1.slots) {
      if (__atomic_load_n(&slot, __ATOMIC_RELAXED) == nullptr) continue;
      ScratchHeader* taken = __atomic_exchange_n(&slot, nullptr, __ATOMIC_ACQUIRE);
      if (taken != nullptr && taken->bytes >= need) {
        header_ = taken;
        return;
      }
      free(taken);  // too small
    }
    void* fresh = nullptr;
    if (posix_memalign(&fresh, kScratchAlign, need) == 0) {
      header_ = static_cast<ScratchHeader*>(fresh);
      header_->bytes = need;
    }
  }
  ~Scratch() {
    if (header_ == nullptr) return;
    for (ScratchHeader*& slot : scratch_pool_v1.slots) {
      ScratchHeader* empty = nullptr;
      if (__atomic_compare_exchange_n(&slot, &empty, header_, false, __ATOMIC_RELEASE,
                                      __ATOMIC_RELAXED))
        return;
    }
    free(header_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  char* data() const {
    return header_ == nullptr ? nullptr : reinterpret_cast<char*>(header_) + kScratchAlign;
  }

 private:
  ScratchHeader* header_ = nullptr;
};

// Allocates parts of a scratch buffer, each aligned for any vector. With a null base it only
// counts, so the same code computes the size and the layout.
struct Carver {
  char* base;
  uint64_t used = 0;

  template <class T>
  T* take(uint64_t count) {
    T* p = base == nullptr ? nullptr : reinterpret_cast<T*>(base + used);
    used += (count * sizeof(T) + 127) / 128 * 128;
    return p;
  }
};

}  // namespace fajit
