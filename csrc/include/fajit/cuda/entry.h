// The bodies of a CUDA artifact's entry points: checks, launches as data, launches.
#pragma once
#include <fajit/classify.h>
#include <fajit/cuda/attention/merge.h>
#include <fajit/cuda/launch.h>
#include <fajit/cuda/params.h>

namespace fajit::cuda {

// Rows of a merge item that one block of the merge kernel takes.
constexpr int kMergeRows = 4;

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
  // Workers have their lists, which may all be empty.
  const bool workers = !merge && a->worker_indptr != nullptr;
  const int32_t blocks = merge ? a->num_merge_work : workers ? a->num_workers : a->num_work;
  if (blocks > 0) {
    if (merge ? a->merge_work == nullptr || a->partial_out == nullptr || a->max_merge_rows < 1
              : a->work == nullptr || a->q == nullptr || a->k == nullptr || a->v == nullptr)
      return FAJIT_BAD_ARGS;
    if (!merge && Config::kSparse &&
        (a->key_block < 1 || (a->key_blocks == nullptr && a->num_key_blocks > 0)))
      return FAJIT_BAD_ARGS;
  }
  launch->kernel = entry.name;
  launch->grid[0] = blocks > 0 ? static_cast<uint32_t>(blocks) : 0;
  launch->grid[1] =
      merge && blocks > 0 ? static_cast<uint32_t>((a->max_merge_rows + kMergeRows - 1) / kMergeRows)
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
  params.uniforms = Hooks::uniforms(Context(a));
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

}  // namespace fajit::cuda
