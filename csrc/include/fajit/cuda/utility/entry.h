// Entry points of artifacts with one kernel that is not attention: launches as data.
//
// A utility `U` has kThreads, a `Params` that fits a kernel's parameters, and
//   static int fill(const fajit_args* args, Params& params, uint32_t& blocks);
// The function is launched as FAJIT_KERNEL_ATTENTION; there is no merge.
#pragma once
#include <fajit/check_args.h>
#include <fajit/cuda/launch.h>
#include <fajit/export.h>

namespace fajit::cuda {

template <class U>
int plan_utility(const fajit_args* a, int kernel, const KernelEntry& entry, fajit_launch* launch) {
  if (const int status = check_layout(a)) return status;
  if (kernel != FAJIT_KERNEL_ATTENTION || launch == nullptr) return FAJIT_BAD_ARGS;
  typename U::Params params{};
  uint32_t blocks = 0;
  if (const int status = U::fill(a, params, blocks)) return status;
  fill_launch(entry, blocks, 1, params, launch);
  return FAJIT_OK;
}

}  // namespace fajit::cuda
