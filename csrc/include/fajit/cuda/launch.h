// Loading and launching the kernels of an artifact, attention or utility.
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
  __builtin_snprintf(error_text(), 512, "%s of %s: %s (%s)", call, kernel,
                     cudaGetErrorString(status), cudaGetErrorName(status));
  cudaGetLastError();  // clears the error, which is reported here
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

// Loads the kernels on a device, which CUDA would otherwise do at the first launch, and allows them
// more than 48 KiB of shared memory.
inline int load_kernels(int device, const KernelEntry (&entries)[2]) {
  const DeviceGuard guard(device);
  if (const int status = check(guard.status(), "cudaSetDevice", entries[0].name)) return status;
  for (const KernelEntry& entry : entries) {
    cudaFuncAttributes attributes;
    if (const int status = check(cudaFuncGetAttributes(&attributes, entry.function),
                                 "cudaFuncGetAttributes", entry.name))
      return status;
    if (const int status =
            check(cudaFuncSetAttribute(entry.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(entry.shared_bytes)),
                  "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)", entry.name))
      return status;
  }
  return FAJIT_OK;
}

// Fills the launch of a kernel on x by y blocks with its one parameter; x is 0 if there is no work.
template <class P>
void fill_launch(const KernelEntry& entry, uint32_t x, uint32_t y, const P& params,
                 fajit_launch* launch) {
  static_assert(sizeof(P) <= sizeof(launch->params), "too many param tensors for a CUDA kernel");
  launch->kernel = entry.name;
  launch->grid[0] = x;
  launch->grid[1] = y;
  launch->block[0] = entry.threads;
  launch->grid[2] = launch->block[1] = launch->block[2] = 1;
  launch->shared_bytes = entry.shared_bytes;
  launch->params_bytes = sizeof(P);
  __builtin_memcpy(launch->params, &params, sizeof(P));
}

// Launches `entry` as filled in `launch`, on the device and stream of `a`.
inline int run_launch(const fajit_args* a, const KernelEntry& entry, fajit_launch& launch) {
  if (launch.grid[0] == 0) return FAJIT_OK;
  const DeviceGuard guard(a->device);
  if (const int status = check(guard.status(), "cudaSetDevice", launch.kernel)) return status;
  void* kernel_args[] = {launch.params};
  return check(
      cudaLaunchKernel(entry.function, dim3(launch.grid[0], launch.grid[1]), dim3(launch.block[0]),
                       kernel_args, launch.shared_bytes, static_cast<cudaStream_t>(a->stream)),
      "launch", launch.kernel);
}

}  // namespace fajit::cuda
