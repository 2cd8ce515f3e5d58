// What surrounds the matrix products of a warpgroup (wgmma), and the division of registers among
// warpgroups. Each function is one instruction. The products themselves, whose operand lists depend
// on the tile, are rendered (templates/cuda/_wgmma.cu.j2).
#pragma once
#include <fajit/cuda/ptx/device.h>

namespace fajit::ptx {

constexpr int kGroupWarps = 4, kGroupThreads = 128, kGroupRows = 64;

// Before the first of several products: registers that other instructions wrote may be read.
FAJIT_DEV void start_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FAJIT_DEV void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most the kPending latest groups of products are in flight.
template <int kPending>
FAJIT_DEV void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// After a wait: keeps the compiler from reading accumulators before it.
template <int kM, int kN>
FAJIT_DEV void read_after_wait(float (&d)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[m][n][i])::"memory");
}

// Registers of each thread from here on; all warps of a warpgroup call the same one.
template <int kRegisters>
FAJIT_DEV void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
FAJIT_DEV void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A named barrier of `threads` threads: those that wait for it, and those that only arrive.
FAJIT_DEV void wait_named(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
FAJIT_DEV void arrive_named(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

}  // namespace fajit::ptx
