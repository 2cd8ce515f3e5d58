// The bodies of a CUDA artifact's entry points: checks, and launches as data.
#pragma once
#include <fajit/check_args.h>
#include <fajit/classify.h>
#include <fajit/cuda/common/merge.h>
#include <fajit/cuda/launch.h>
#include <fajit/cuda/params.h>
#include <fajit/cuda/wgmma/maps.h>

namespace fajit::cuda {

// Rows of a merge item that one block of the merge kernel merges.
constexpr int kMergeRows = 4;

// Fills the launch of one kernel; a grid of 0 blocks means that there is nothing to do.
template <class Config, class Hooks>
int plan_launch(const fajit_args* a, int kernel, const KernelEntry (&entries)[2],
                fajit_launch* launch) {
  if (const int status = check_args<Config>(a)) return status;
  if (a->num_tensors != Config::kTensors || a->num_scalars != Config::kScalars)
    return FAJIT_BAD_ARGS;
  const bool merge = kernel == FAJIT_KERNEL_MERGE;
  if ((kernel != FAJIT_KERNEL_ATTENTION && !merge) || launch == nullptr) return FAJIT_BAD_ARGS;
  // With workers, the lists may all be empty.
  const bool workers = !merge && a->worker_indptr != nullptr;
  const int32_t blocks = merge ? a->num_merge_work : workers ? a->num_workers : a->num_work;
  if (blocks > 0) {
    if (merge ? a->merge_work == nullptr || a->partial_out == nullptr || a->max_merge_rows < 1
              : a->work == nullptr || a->q == nullptr || a->k == nullptr || a->v == nullptr)
      return FAJIT_BAD_ARGS;
    if (!merge && Config::kSparse &&
        (a->key_block < 1 || (a->key_blocks == nullptr && a->num_key_blocks > 0)))
      return FAJIT_BAD_ARGS;
    if (!merge && Config::kTensorMaps && !has_maps<Config>(*a)) return FAJIT_BAD_ARGS;
  }
  Params<Config, Hooks> params{};
  params.args = *a;
  params.args.tensors = nullptr;  // the kernel has copies in its parameters
  params.args.scalars = nullptr;
  for (int i = 0; i < Config::kTensors; ++i) params.tensors[i] = a->tensors[i];
  for (int i = 0; i < Config::kScalars; ++i) params.scalars[i] = a->scalars[i];
  params.uniforms = Hooks::uniforms(Context(a));
  params.units = units_of<Hooks>(a->scale, Context(a, a->tensors, a->scalars, &params.uniforms));
  params.divisors = KeyDivisors(*a);
  const int32_t parts = merge && blocks > 0 ? (a->max_merge_rows + kMergeRows - 1) / kMergeRows : 1;
  if constexpr (Config::kTensorMaps)
    if (!merge && blocks > 0) describe_keys<Config>(*a, params);
  fill_launch(entries[kernel], blocks > 0 ? static_cast<uint32_t>(blocks) : 0,
              static_cast<uint32_t>(parts), params, launch);
  if constexpr (Config::kTensorMaps) {
    if (!merge && blocks > 0) {
      launch->num_tensor_maps = 2;
      launch->tensor_maps[0] = offsetof(KvMaps, k);
      launch->tensor_maps[1] = offsetof(KvMaps, v);
    }
  }
  return FAJIT_OK;
}

}  // namespace fajit::cuda
