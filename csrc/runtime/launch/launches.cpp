#include "launch/launches.h"

#include <memory>

#include "errors.h"
#include "launch/sections.h"
#include "launch/work_checks.h"
#include "python_values.h"

namespace py = pybind11;

namespace fajit::runtime {

void Launches::run() const {
  py::gil_scoped_release no_gil;
  for (int i = 0; i < count_; ++i) (*all_[i].module)->launch(*all_[i].args, all_[i].kernel);
}

py::list Launches::as_data() const {
  const auto three = [](const uint32_t* n) { return py::make_tuple(n[0], n[1], n[2]); };
  auto launch = std::make_unique<fajit_launch>();
  py::list result;
  for (int i = 0; i < count_; ++i) {
    const One& one = all_[i];
    const auto module = std::const_pointer_cast<Module>(*one.module);
    check_status(module->plan_launch(*one.args, one.kernel, *launch), "fajit_plan_launch",
                 module->path());
    const py::bytes params(reinterpret_cast<const char*>(launch->params), launch->params_bytes);
    result.append(py::make_tuple(
        module, py::make_tuple(launch->kernel, three(launch->grid), three(launch->block),
                               launch->shared_bytes, params, launch->waits != 0)));
  }
  return result;
}

void require_cuda(const Module& module) {
  if (!module.is_cuda()) {
    throw py::value_error("artifact " + module.path() + " has no CUDA target");
  }
}

const char* checked_block(const void* device_block) {
  const char* const block = static_cast<const char*>(device_block);
  require(block, "device_block");
  if (reinterpret_cast<uintptr_t>(block) % kSectionAlignment != 0) {
    throw py::value_error("device_block must be aligned to " + std::to_string(kSectionAlignment) +
                          " bytes");
  }
  return block;
}

}  // namespace fajit::runtime
