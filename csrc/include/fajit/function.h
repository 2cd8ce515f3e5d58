// How functions that kernels and hosts share are declared.
#pragma once

#if defined(__CUDACC__)
#define FAJIT_FN __host__ __device__ __forceinline__
#else
#define FAJIT_FN inline __attribute__((always_inline))
#endif
