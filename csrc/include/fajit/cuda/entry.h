// The bodies of a CUDA artifact's entry points: checks, launches as data, launches.
#pragma once
#include <fajit/classify.h>
#include <fajit/cuda/attention/merge.h>
#include <fajit/cuda/params.h>

namespace fajit::cuda {

// One kernel of the artifact.
struct KernelEntry {
  const void* function;
  const char* name;
  uint32_t threads, shared_bytes;
};

// Rows of a merge item that one block of the merge kernel takes.
constexpr int kMergeRows = 4;

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

template <class Config>
int check_args(const fajit_args* a) {
  if (a == nullptr || a->abi_version != FAJIT_ABI_VERSION || a->args_bytes != sizeof(fajit_args))
    return FAJIT_BAD_ABI;
  if (a->head_dim != Config::kHeadDim || a->head_dim_v != Config::kHeadDimV ||
      a->num_kv_heads < 1 || a->num_q_heads % a->num_kv_heads != 0)
    return FAJIT_BAD_ARGS;
  if (a->num_tensors != Config::kTensors || a->num_scalars != Config::kScalars)
    return FAJIT_BAD_ARGS;
  if ((a->flags & FAJIT_WRITE_LSE) != 0 && a->lse == nullptr) return FAJIT_BAD_ARGS;
  return FAJIT_OK;
}

// Fills the launch of one kernel; a grid of 0 blocks means that there is nothing to do.
template <class Config, class Hooks>
int plan_launch(const fajit_args* a, int kernel, const KernelEntry (&entries)[2],
                fajit_launch* launch) {
  if (const int status = check_args<Config>(a)) return status;
  const bool merge = kernel == FAJIT_KERNEL_MERGE;
  if ((kernel != FAJIT_KERNEL_ATTENTION && !merge) || launch == nullptr) return FAJIT_BAD_ARGS;
  const KernelEntry& entry = entries[kernel];
  const int32_t items = merge ? a->num_merge_work : a->num_work;
  if (items > 0) {
    if (merge ? a->merge_work == nullptr || a->partial_out == nullptr || a->max_merge_rows < 1
              : a->work == nullptr || a->q == nullptr || a->k == nullptr || a->v == nullptr)
      return FAJIT_BAD_ARGS;
  }
  launch->kernel = entry.name;
  launch->grid[0] = items > 0 ? static_cast<uint32_t>(items) : 0;
  launch->grid[1] =
      merge && items > 0 ? static_cast<uint32_t>((a->max_merge_rows + kMergeRows - 1) / kMergeRows)
                         : 1;
  launch->grid[2] = 1;
  launch->block[0] = entry.threads;
  launch->block[1] = launch->block[2] = 1;
  launch->shared_bytes = entry.shared_bytes;

  using P = Params<Config, Hooks>;
  static_assert(sizeof(P) <= sizeof(launch->params), "too many param tensors for a CUDA kernel");
  P params{};
  params.args = *a;
  params.args.tensors = nullptr;  // the kernel has its own
  params.args.scalars = nullptr;
  for (int i = 0; i < Config::kTensors; ++i) params.tensors[i] = a->tensors[i];
  for (int i = 0; i < Config::kScalars; ++i) params.scalars[i] = a->scalars[i];
  launch->params_bytes = sizeof(P);
  __builtin_memcpy(launch->params, &params, sizeof(P));
  return FAJIT_OK;
}

template <class Config, class Hooks>
int launch_kernel(const fajit_args* a, int kernel, const KernelEntry (&entries)[2]) {
  fajit_launch launch;
  if (const int status = plan_launch<Config, Hooks>(a, kernel, entries, &launch)) return status;
  if (launch.grid[0] == 0) return FAJIT_OK;
  const DeviceGuard guard(a->device);
  if (const int status = check(guard.status(), "cudaSetDevice", launch.kernel)) return status;
  void* kernel_args[] = {launch.params};
  return check(cudaLaunchKernel(entries[kernel].function,
                                dim3(launch.grid[0], launch.grid[1], launch.grid[2]),
                                dim3(launch.block[0]), kernel_args, launch.shared_bytes,
                                static_cast<cudaStream_t>(a->stream)),
               "launch", launch.kernel);
}

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
