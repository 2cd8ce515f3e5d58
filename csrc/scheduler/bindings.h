// Python bindings of the scheduler.
#pragma once

#include <pybind11/pybind11.h>

namespace fajit::scheduler {

void bind_scheduler(pybind11::module_& m);
void bind_batch_plans(pybind11::module_& m);  // after the runtime's Module

}  // namespace fajit::scheduler
