// Entry points of artifacts with one kernel that is no attention: launches as data, and launches.
//
// A utility `U` has kThreads, a `Params` that fits a kernel's parameters, and
//   static int fill(const fajit_args* args, Params& params, uint32_t& blocks);
// The function is launched as FAJIT_KERNEL_ATTENTION; there is no merge.
#pragma once
#include <fajit/cuda/launch.h>

namespace fajit::cuda {

template <class U>
int plan_utility(const fajit_args* a, int kernel, const KernelEntry (&entries)[2],
                 fajit_launch* launch) {
  if (a == nullptr || a->abi_version != FAJIT_ABI_VERSION || a->args_bytes != sizeof(fajit_args))
    return FAJIT_BAD_ABI;
  if (kernel != FAJIT_KERNEL_ATTENTION || launch == nullptr) return FAJIT_BAD_ARGS;
  using P = typename U::Params;
  static_assert(sizeof(P) <= sizeof(launch->params), "the parameters of a CUDA kernel");
  P params{};
  uint32_t blocks = 0;
  if (const int status = U::fill(a, params, blocks)) return status;
  launch->kernel = entries[0].name;
  launch->grid[0] = blocks;
  launch->grid[1] = launch->grid[2] = 1;
  launch->block[0] = entries[0].threads;
  launch->block[1] = launch->block[2] = 1;
  launch->shared_bytes = entries[0].shared_bytes;
  launch->params_bytes = sizeof(P);
  __builtin_memcpy(launch->params, &params, sizeof(P));
  return FAJIT_OK;
}

template <class U>
int launch_utility(const fajit_args* a, const KernelEntry (&entries)[2]) {
  fajit_launch launch;
  if (const int status = plan_utility<U>(a, FAJIT_KERNEL_ATTENTION, entries, &launch))
    return status;
  if (launch.grid[0] == 0) return FAJIT_OK;
  const DeviceGuard guard(a->device);
  if (const int status = check(guard.status(), "cudaSetDevice", launch.kernel)) return status;
  void* kernel_args[] = {launch.params};
  return check(
      cudaLaunchKernel(entries[0].function, dim3(launch.grid[0]), dim3(launch.block[0]),
                       kernel_args, launch.shared_bytes, static_cast<cudaStream_t>(a->stream)),
      "launch", launch.kernel);
}

}  // namespace fajit::cuda
