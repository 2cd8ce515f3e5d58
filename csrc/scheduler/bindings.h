// Python bindings of the scheduler.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

namespace fajit::scheduler {

template <class T>
inline pybind11::bytes to_bytes(const std::vector<T>& items) {
  return pybind11::bytes(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T));
}

void bind_scheduler(pybind11::module_& m);  // after the runtime's Module

}  // namespace fajit::scheduler
