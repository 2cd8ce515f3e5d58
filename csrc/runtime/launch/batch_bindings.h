// Python binding of planned batches: `_C.BatchCall`.
#pragma once

#include <pybind11/pybind11.h>

namespace fajit::runtime {

// Called after the scheduler's classes are bound.
void bind_batch(pybind11::module_& m);

}  // namespace fajit::runtime
