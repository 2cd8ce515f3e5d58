// The work items of a thread block: one, or a worker's list.
//
// The loop over a list is free because it holds no register while an item runs: the item and the
// index in the list are in shared memory, at constant addresses. Measured over all tiles of plain
// causal attention (nvcc 13.0), against one item a block read from global memory: with the item and
// the index in registers, up to 6 more registers on sm_75 to sm_90 and up to 31 more on sm_100 and
// sm_120; with both in shared memory, 4 fewer to 2 more, and up to 17 fewer on sm_100 and sm_120
// (see ptx::lane_index). One tile, 128 x 32 at head_dim 128 on sm_86, takes 18 more in registers
// and 13 more in shared memory, of the 21 that it had left. No kernel spills.
#pragma once
#include <fajit/context.h>
#include <fajit/cuda/ptx/device.h>

namespace fajit::cuda {

// Shared memory after the kernel's own: the item, then the next index of the list and its end.
constexpr int kItemBytes = sizeof(fajit_work) + 8;

// Runs the items of this block, one after another. All items use the same shared memory.
template <class Kernel, class Params>
FAJIT_DEV void run_items(const Params& params, unsigned char* shared) {
  constexpr int kWords = sizeof(fajit_work) / 4;
  static_assert(Kernel::kSharedBytes % 4 == 0 && Kernel::kThreads >= kWords, "copied as words");
  const Context c = params.context();
  const fajit_args& a = params.args;
  int32_t* const words = reinterpret_cast<int32_t*>(shared + Kernel::kSharedBytes);
  const fajit_work& item = *reinterpret_cast<const fajit_work*>(words);
  const int thread = static_cast<int>(threadIdx.x);
  int32_t i = static_cast<int32_t>(blockIdx.x), end = i + 1;
  if (a.worker_indptr != nullptr) {
    end = a.worker_indptr[i + 1];
    i = a.worker_indptr[i];
  }
  while (i < end) {
    if (thread < kWords) words[thread] = reinterpret_cast<const int32_t*>(a.work + i)[thread];
    if (thread == 0) {
      words[kWords] = i + 1;
      words[kWords + 1] = end;
    }
    __syncthreads();
    if (item.request >= 0) Kernel(c, params.units, params.divisors, shared, item).run();
    asm volatile("" ::: "memory");  // forces a reload instead of keeping registers
    i = words[kWords];
    end = words[kWords + 1];
    if (i < end) __syncthreads();  // all warps have finished with the item and the kernel's memory
  }
}

}  // namespace fajit::cuda
