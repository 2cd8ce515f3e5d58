// Exchanges within a warp, and the approximate functions of the special-function unit.
#pragma once
#include <fajit/cuda/ptx/device.h>

namespace fajit::ptx {

constexpr uint32_t kAllLanes = 0xffffffffu;

// The thread's index in its block, read again at each use, so that nothing computed from it stays
// in registers across a loop.
FAJIT_DEV int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// NVVM for sm_100 and later hoists everything computed from the lane out of all loops and keeps it
// in registers, up to 30 with a loop over work items (nvcc 13.0). There the index is read again at
// each use; ptxas keeps 13 to 22 of these reads in a kernel.
FAJIT_DEV int lane_index() {
#if __CUDA_ARCH__ >= 1000
  return thread_here() & 31;
#else
  return static_cast<int>(threadIdx.x & 31);
#endif
}
// Read with a shuffle, so that the compiler knows that it is uniform: branches on it then need no
// reconvergence, and shuffles inside them no calls.
FAJIT_DEV int warp_index() { return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x >> 5), 0); }

template <class T>
FAJIT_DEV T from_lane(T x, int lane) {
  return __shfl_sync(kAllLanes, x, lane);
}
// A value that all lanes have. The shuffle says so to the compiler: see warp_index.
template <class T>
FAJIT_DEV T uniform(T x) {
  return from_lane(x, 0);
}
// The same by a reduction, whose result ptxas keeps in a uniform register: what is computed from it
// alone, and addresses of shared memory beside it, stay out of the threads' registers. sm_80 on.
FAJIT_DEV uint32_t uniform_word(uint32_t x) {
  uint32_t y;
  asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}
// From lane 0 to 3 of the own quad.
template <class T>
FAJIT_DEV T from_quad_lane(T x, int lane) {
  return __shfl_sync(kAllLanes, x, lane, 4);
}
template <class T>
FAJIT_DEV T* pointer_from_lane(T* p, int lane) {
  const uint64_t bits = reinterpret_cast<uint64_t>(p);
  const uint32_t low = from_lane(static_cast<uint32_t>(bits), lane);
  const uint32_t high = from_lane(static_cast<uint32_t>(bits >> 32), lane);
  return reinterpret_cast<T*>(uint64_t{high} << 32 | low);
}

// Reductions over the four lanes that share the rows of an accumulator fragment.
FAJIT_DEV float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
FAJIT_DEV float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// 2^x: 2 ulp, subnormal results are 0; 2^-inf is 0.
FAJIT_DEV float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x: 1 ulp; x is normal.
FAJIT_DEV float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// log2(x): absolute error 2^-22 near 1, else 2 ulp.
FAJIT_DEV float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace fajit::ptx
