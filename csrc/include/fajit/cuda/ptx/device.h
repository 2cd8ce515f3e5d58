// The attributes of device functions, and the architecture that is compiled for.
#pragma once
#include <stdint.h>

#define FAJIT_DEV __device__ __forceinline__

namespace fajit::ptx {

// 0 in the host pass.
#if defined(__CUDA_ARCH__)
constexpr int kArch = __CUDA_ARCH__ / 10;
#else
constexpr int kArch = 0;
#endif
constexpr bool kAsyncCopies = kArch >= 80;  // cp.async

}  // namespace fajit::ptx
