// Python binding of interval forms: `_C.IntervalForm`.
#pragma once

#include <pybind11/pybind11.h>

namespace fajit::form {

void bind_interval_form(pybind11::module_& m);

}  // namespace fajit::form
