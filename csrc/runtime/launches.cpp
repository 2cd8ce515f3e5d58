#include "launches.h"

#include <memory>
#include <string>

#include "errors.h"
#include "python_values.h"
#include "sections.h"
#include "work_checks.h"

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

py::tuple launch_as_data(const Module& module, const fajit_args& args, int kernel) {
  auto launch = std::make_unique<fajit_launch>();
  check_launch(module, args, kernel, module.plan_launch(args, kernel, *launch));
  const auto three = [](const uint32_t* n) { return py::make_tuple(n[0], n[1], n[2]); };
  return py::make_tuple(
      launch->kernel, three(launch->grid), three(launch->block), launch->shared_bytes,
      py::bytes(reinterpret_cast<const char*>(launch->params), launch->params_bytes));
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
