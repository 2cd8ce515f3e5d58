// The work items of a thread block: one, or a worker's list.
//
// The loop over a list is free because it holds no register while an item runs: the item and the
// index in the list are in shared memory, at constant addresses. Measured over all tiles of plain
// causal attention (nvcc 13.0), against one item a block read from global memory: with the item and
// the index in registers, up to 6 more registers on sm_75 to sm_90 and up to 31 more on sm_100 and
// sm_120; with both in shared memory, 4 fewer to 2 more, and up to 17 fewer on sm_100 and sm_120
// (see ptx::lane_index). One tile, 128 x 32 at head_dim 128 on sm_86, takes 18 more in registers
// and 13 more in shared memory, of the 21 that it had left.
#pragma once
#include <fajit/context.h>
#include <fajit/cuda/ptx/dependents.h>

namespace fajit::cuda {

// Shared memory after the kernel's own: the item, then the next index of the list and its end.
constexpr int kItemBytes = sizeof(fajit_work) + 8;

// The items of a block, one at a time in shared memory: its worker's list, or the one of its index.
class ItemFeed {
 public:
  static constexpr int kWords = sizeof(fajit_work) / 4;

  FAJIT_DEV ItemFeed(const fajit_args& a, int32_t* words)
      : a_(a), words_(words), end_(static_cast<int32_t>(blockIdx.x) + 1), i_(end_ - 1) {
    if (a.worker_indptr != nullptr) {
      end_ = a.worker_indptr[i_ + 1];
      i_ = a.worker_indptr[i_];
    }
  }

  FAJIT_DEV bool more() const { return i_ < end_; }
  FAJIT_DEV const fajit_work& item() const { return *reinterpret_cast<const fajit_work*>(words_); }

  // Stores the next item, by the first threads of the block: all may read it after a barrier.
  FAJIT_DEV void put() const {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kWords) words_[thread] = reinterpret_cast<const int32_t*>(a_.work + i_)[thread];
    if (thread == 0) {
      words_[kWords] = i_ + 1;
      words_[kWords + 1] = end_;
    }
  }
  // Called when only the state of an item is left to write: with the last one, the merge may start.
  // If there is none, nothing is said to the next kernel, which is somebody else's.
  template <class Config>
  FAJIT_DEV void end_item() const {
    if constexpr (Config::kMergeWaits)
      if (a_.num_merge_work > 0 && words_[kWords] >= words_[kWords + 1]) ptx::allow_kernel_after();
  }
  // Goes on to the item after the stored one.
  FAJIT_DEV void advance() {
    asm volatile("" ::: "memory");  // forces a reload instead of keeping registers
    i_ = words_[kWords];
    end_ = words_[kWords + 1];
  }

 private:
  const fajit_args& a_;
  int32_t* const words_;
  int32_t end_, i_;
};

// Runs the items of this block, one after another. All items use the same shared memory.
template <class Kernel, class Params>
FAJIT_DEV void run_items(const Params& params, unsigned char* shared) {
  static_assert(Kernel::kSharedBytes % 4 == 0 && Kernel::kThreads >= ItemFeed::kWords,
                "copied as words");
  ItemFeed feed(params.args, reinterpret_cast<int32_t*>(shared + Kernel::kSharedBytes));
  const Context c = params.context();
  while (feed.more()) {
    feed.put();
    __syncthreads();
    if (feed.item().request >= 0)
      Kernel(c, params.units, params.divisors, shared, feed.item()).run(feed);
    feed.advance();
    if (feed.more()) __syncthreads();  // all warps have finished with the item and the memory
  }
}

}  // namespace fajit::cuda
