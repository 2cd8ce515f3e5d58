// How the kernels of an artifact are loaded and launched, whatever they compute.
#pragma once
#include <fajit/abi.h>

namespace fajit::cuda {

// One kernel of the artifact.
struct KernelEntry {
  const void* function;
  const char* name;
  uint32_t threads, shared_bytes;
};

inline char* error_text() {
  static thread_local char text[512] = "";
  return text;
}

// FAJIT_CUDA_ERROR with the failed call in `error_text`, or FAJIT_OK.
inline int check(cudaError_t status, const char* call, const char* kernel) {
  if (status == cudaSuccess) return FAJIT_OK;
  __builtin_snprintf(error_text(), 512, "%s of %s: %s (%s)", call, kernel, cudaGetErrorString(status),
           cudaGetErrorName(status));
  cudaGetLastError();  // it is reported: the next call starts clean
  return FAJIT_CUDA_ERROR;
}

// Selects a device and restores the previous one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    status_ = cudaGetDevice(&previous_);
    if (status_ == cudaSuccess && previous_ != device) {
      status_ = cudaSetDevice(device);
      changed_ = status_ == cudaSuccess;
    }
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t status() const { return status_; }

 private:
  int previous_ = 0;
  bool changed_ = false;
  cudaError_t status_ = cudaSuccess;
};

// Loads the kernels on a device, which CUDA would do at the first launch, and lets them have more
// than 48 KiB of shared memory.
inline int load_kernels(int device, const KernelEntry (&entries)[2]) {
  const DeviceGuard guard(device);
  if (const int status = check(guard.status(), "cudaSetDevice", entries[0].name)) return status;
  for (const KernelEntry& entry : entries) {
    cudaFuncAttributes attributes;
    if (const int status = check(cudaFuncGetAttributes(&attributes, entry.function),
                                 "cudaFuncGetAttributes", entry.name))
      return status;
    if (const int status = check(
            cudaFuncSetAttribute(entry.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(entry.shared_bytes)),
            "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)", entry.name))
      return status;
  }
  return FAJIT_OK;
}

}  // namespace fajit::cuda
