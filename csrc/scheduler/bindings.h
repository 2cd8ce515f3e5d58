// Python binding of the scheduler.
#pragma once

#include <pybind11/pybind11.h>

namespace fajit::scheduler {

void bind_scheduler(pybind11::module_& m);

}  // namespace fajit::scheduler
