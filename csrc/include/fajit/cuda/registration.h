// The functions of the CUDA runtime that nvcc's host code calls, so that no runtime is linked.
//
// nvcc adds to each source a static constructor that registers the fat binary with the machine code
// and the names of the kernels, and for each kernel a host function that launches it. Here the
// first keeps the address of the fat binary for fajit_code(); the others do nothing, because
// flashattn_jit's own runtime launches kernels through the driver. The declarations are those of
// the toolkit's headers, CUDA 12.8 to 13.5, with __NV_LEGACY_LAUNCH.
#pragma once

namespace fajit::cuda {

// The argument of __cudaRegisterFatBinary, as in fatbinary_section.h.
struct FatBinaryWrapper {
  int magic, version;
  const void* image;
  void* reserved;
};

inline const void* device_image = nullptr;

}  // namespace fajit::cuda

#pragma GCC visibility push(hidden)
extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  fajit::cuda::device_image = static_cast<fajit::cuda::FatBinaryWrapper*>(wrapper)->image;
  static void* handle;
  return &handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void**) {}

char __cudaInitModule(void**) { return 0; }

void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {}

cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  return cudaErrorNotSupported;
}

cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}

}  // extern "C"
#pragma GCC visibility pop
