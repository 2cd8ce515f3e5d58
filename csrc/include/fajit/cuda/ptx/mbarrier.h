// Barriers in shared memory (mbarrier), on which threads and copies arrive and threads wait.
//
// A phase ends when as many threads have arrived as the barrier was made for, and as many bytes
// have been copied as were announced. Phases have parities 0, 1, 0, ...; a wait for a parity
// returns when a phase of it has ended and the next one has not, so on a new barrier a wait for
// parity 1 returns at once. Each function is one instruction, or a loop over one.
#pragma once
#include <fajit/cuda/ptx/device.h>

namespace fajit::ptx {

constexpr int kBarrierBytes = 8;

FAJIT_DEV void make_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes new barriers visible to copies; other threads see them after a barrier of the block.
FAJIT_DEV void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

FAJIT_DEV void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and announces copies of `bytes` bytes.
FAJIT_DEV void arrive_for_copies(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives when the copies that this thread has started by copy_async are complete.
FAJIT_DEV void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
FAJIT_DEV void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Orders this thread's accesses of shared memory, and those that it knows of through barriers,
// before accesses by wgmma and TMA (the asynchronous proxy).
FAJIT_DEV void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace fajit::ptx
