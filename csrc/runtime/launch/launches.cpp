#include "launch/launches.h"

#include <memory>
#include <string>

#include "errors.h"
#include "launch/sections.h"
#include "launch/work_checks.h"
#include "python_values.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

std::string dims(const char* name, const uint32_t* n) {
  return std::string(name) + " (" + std::to_string(n[0]) + ", " + std::to_string(n[1]) + ", " +
         std::to_string(n[2]) + ")";
}

}  // namespace

void check_launch(const Module& module, const fajit_args& args, int kernel, int status) {
  const bool merges = kernel == FAJIT_KERNEL_MERGE;
  if (status != FAJIT_CUDA_ERROR) {
    check_status(status, merges ? "fajit_merge" : "fajit_attention", module.path());
    return;
  }
  const std::string reason = module.cuda_error();
  std::string what = merges ? "the merge kernel" : "the kernel";
  auto launch = std::make_unique<fajit_launch>();
  if (module.plan_launch(args, kernel, *launch) == FAJIT_OK) {
    what = std::string(launch->kernel) + " with " + dims("grid", launch->grid) + ", " +
           dims("block", launch->block) + " and " + std::to_string(launch->shared_bytes) +
           " bytes of shared memory";
  }
  throw LaunchError(what + " failed on device " + std::to_string(args.device) + ": " + reason +
                    "\n  artifact: " + module.path());
}

void Launches::run() const {
  const One* last = nullptr;
  int status = FAJIT_OK;
  {
    py::gil_scoped_release no_gil;
    for (int i = 0; i < count_ && status == FAJIT_OK; ++i) {
      last = &all_[i];
      const Module& module = **last->module;
      status = last->kernel == FAJIT_KERNEL_MERGE ? module.merge(*last->args)
                                                  : module.attention(*last->args);
    }
  }
  if (status != FAJIT_OK) check_launch(**last->module, *last->args, last->kernel, status);
}

py::list Launches::as_data() const {
  const auto three = [](const uint32_t* n) { return py::make_tuple(n[0], n[1], n[2]); };
  auto launch = std::make_unique<fajit_launch>();
  py::list result;
  for (int i = 0; i < count_; ++i) {
    const One& one = all_[i];
    const auto module = std::const_pointer_cast<Module>(*one.module);
    const int status = module->plan_launch(*one.args, one.kernel, *launch);
    check_launch(*module, *one.args, one.kernel, status);
    const py::bytes params(reinterpret_cast<const char*>(launch->params), launch->params_bytes);
    result.append(
        py::make_tuple(module, py::make_tuple(launch->kernel, three(launch->grid),
                                              three(launch->block), launch->shared_bytes, params)));
  }
  return result;
}

void require_cuda(const Module& module) {
  if (!module.is_cuda()) {
    throw py::value_error("artifact " + module.path() + " has no CUDA target");
  }
}

const char* checked_block(py::handle device_block) {
  const char* const block = static_cast<const char*>(to_address(device_block));
  require(block, "device_block");
  if (reinterpret_cast<uintptr_t>(block) % kSectionAlignment != 0) {
    throw py::value_error("device_block must be aligned to " + std::to_string(kSectionAlignment) +
                          " bytes");
  }
  return block;
}

}  // namespace fajit::runtime
