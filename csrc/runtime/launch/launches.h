// The launches of one call: enqueued, or returned as data.
#pragma once

#include <fajit/abi.h>
#include <pybind11/pybind11.h>

#include <memory>

#include "module.h"

namespace fajit::runtime {

// At most three launches of CUDA artifacts, in order. Modules and argument blocks are not copied.
class Launches {
 public:
  void add(const std::shared_ptr<const Module>& module, int kernel, const fajit_args& args) {
    all_[count_++] = {&module, kernel, &args};
  }

  // Runs without the GIL; stops and throws at the first failure.
  void run() const;
  // A list of (module, (kernel, grid, block, dynamic shared bytes, parameter bytes, whether it may
  // overlap the one before it)). Needs no driver: tensor maps are descriptions.
  pybind11::list as_data() const;

 private:
  struct One {
    const std::shared_ptr<const Module>* module;
    int kernel;
    const fajit_args* args;
  };
  One all_[3];
  int count_ = 0;
};

// Throws for artifacts without a CUDA target.
void require_cuda(const Module& module);

// The device block at an address; throws if it is null or not aligned like its sections.
const char* checked_block(const void* device_block);

}  // namespace fajit::runtime
