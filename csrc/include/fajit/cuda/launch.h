// Launches of an artifact's kernels as data, attention or utility.
#pragma once
#include <fajit/abi.h>
#include <fajit/cuda/registration.h>

namespace fajit::cuda {

using KernelEntry = fajit_kernel_entry;

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
  launch->waits = entry.waits;
  launch->num_tensor_maps = 0;
  __builtin_memcpy(launch->params, &params, sizeof(P));
}

}  // namespace fajit::cuda
