// Attributes of functions that kernels and the host share.
#pragma once

// FAJIT_FN is always inlined. FAJIT_SHARED is too in CUDA kernels, where a call would cost
// registers and a stack; elsewhere the compiler decides.
#if defined(__CUDACC__)
#define FAJIT_FN __host__ __device__ __forceinline__
#define FAJIT_SHARED __host__ __device__ __forceinline__
#define FAJIT_ROLLED _Pragma("unroll 1")  // before a loop: do not unroll it
#else
#define FAJIT_FN inline __attribute__((always_inline))
#define FAJIT_SHARED inline
#define FAJIT_ROLLED
#endif
