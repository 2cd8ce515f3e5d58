// Launches of one entry point: their failures in words, and what would be launched as data.
#pragma once

#include <fajit/abi.h>
#include <pybind11/pybind11.h>

#include "module.h"

namespace fajit::runtime {

// Throws for a status other than FAJIT_OK; a CUDA failure is a LaunchError that names the kernel,
// its grid and the reason. `kernel` is a fajit_kernel.
void check_launch(const Module& module, const fajit_args& args, int kernel, int status);

// (kernel, grid, block, dynamic shared bytes, parameter bytes). Needs no driver.
pybind11::tuple launch_as_data(const Module& module, const fajit_args& args, int kernel);

// The device block at an address: not null, and aligned as its sections are.
const char* checked_block(pybind11::handle device_block);

}  // namespace fajit::runtime
