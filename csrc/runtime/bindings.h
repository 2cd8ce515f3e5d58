// What each part of flashattn_jit._C binds. bindings.cpp calls these in this order, because a
// signature names only classes that are bound before it.
#pragma once

#include <pybind11/pybind11.h>

namespace fajit::scheduler {
void bind_scheduler(pybind11::module_& m);
}

namespace fajit::runtime {
void bind_batch(pybind11::module_& m);
void bind_repeats(pybind11::module_& m);
}  // namespace fajit::runtime

namespace fajit::form {
void bind_interval_form(pybind11::module_& m);
}
