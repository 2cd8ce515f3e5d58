// flashattn_jit._C: loading and launching artifacts, CPU features, merging states.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bindings.h"
#include "copies.h"
#include "device/driver.h"
#include "errors.h"
#include "host/fork_guard.h"
#include "host/hardware.h"
#include "merge_states.h"
#include "module.h"
#include "python_values.h"
#include "tensors/torch_state.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

void raise_python(const char* class_name, const char* message) {
  const py::object error = py::module_::import("flashattn_jit.errors").attr(class_name);
  PyErr_SetString(error.ptr(), message);
}

void translate(std::exception_ptr caught) {
  try {
    if (caught) std::rethrow_exception(caught);
  } catch (const AbiError& error) {
    raise_python("AbiError", error.what());
  } catch (const LaunchError& error) {
    raise_python("LaunchError", error.what());
  } catch (const DriverError& error) {
    raise_python("LaunchError", error.what());
  } catch (const LoadError& error) {
    PyErr_SetString(PyExc_OSError, error.what());
  }
}

Dtype dtype_of(const std::string& name) {
  if (name == "float32") return Dtype::kFloat32;
  if (name == "bfloat16") return Dtype::kBfloat16;
  if (name == "float16") return Dtype::kFloat16;
  throw py::value_error("dtype must be float32, bfloat16 or float16, got " + name);
}

// merge_states with addresses as ints.
void merge_states_at(py::handle outs, py::handle out_strides, py::handle lses,
                     py::handle lse_strides, py::handle shape, int64_t head_dim_v, py::handle out,
                     py::handle out_stride, py::handle lse, py::handle lse_stride,
                     const std::string& dtype, py::handle mask, py::handle mask_stride,
                     int num_threads) {
  const auto address = [](py::handle value, const char* name) {
    void* const pointer = to_address(value);
    if (pointer == nullptr) throw py::value_error(std::string(name) + " has address 0");
    return static_cast<float*>(pointer);
  };
  std::array<int64_t, 3> dims{};
  to_int64s(shape, 3, dims.data(), "shape");
  if (dims[0] < 0 || dims[1] < 0 || dims[2] < 0 || head_dim_v < 1 || num_threads < 1) {
    throw py::value_error(
        "shape must not be negative; head_dim_v and num_threads must be positive");
  }
  const bool empty = dims[0] * dims[1] * dims[2] == 0;
  const Items out_items(outs, "outs"), out_stride_items(out_strides, "out_strides");
  const Items lse_items(lses, "lses"), lse_stride_items(lse_strides, "lse_strides");
  const size_t count = out_items.size();
  const bool sums = lse_items.size() == 0;
  if (count == 0) throw py::value_error("outs must have at least one state");
  if (out_stride_items.size() != count || lse_items.size() != lse_stride_items.size() ||
      (!sums && lse_items.size() != count)) {
    throw py::value_error("outs, out_strides, lses and lse_strides must have the same length");
  }
  if (empty) return;
  Merged merged{};
  merged.out = address(out, "out");
  merged.lse = sums ? nullptr : address(lse, "lse");
  merged.dtype = dtype_of(dtype);
  merged.mask = static_cast<const uint8_t*>(to_address(mask));
  to_int64s(mask_stride, 3, merged.mask_strides.data(), "mask_stride");
  to_int64s(out_stride, 3, merged.out_strides.data(), "out_stride");
  to_int64s(lse_stride, 3, merged.lse_strides.data(), "lse_stride");
  std::vector<State> states(count);
  for (size_t i = 0; i < count; ++i) {
    states[i].out = address(out_items[i], "a state's out");
    to_int64s(out_stride_items[i], 3, states[i].out_strides.data(), "out_strides");
    if (sums) continue;
    states[i].lse = address(lse_items[i], "a state's lse");
    to_int64s(lse_stride_items[i], 3, states[i].lse_strides.data(), "lse_strides");
  }
  py::gil_scoped_release no_gil;
  merge_states(states, merged, dims, head_dim_v, num_threads);
}

// copy_pieces with addresses in buffers of int64.
void copy_pieces_at(const py::buffer& sources, const py::buffer& destinations, int64_t piece_bytes,
                    int num_threads) {
  const auto addresses = [](const py::buffer& buffer, const char* name) {
    py::buffer_info info = buffer.request();
    const bool fits = info.ndim == 1 && info.itemsize == 8 &&
                      (info.size < 2 || info.strides[0] == 8) &&
                      (info.format == "l" || info.format == "q");
    if (!fits) throw py::value_error(std::string(name) + " must be contiguous int64 addresses");
    return info;
  };
  const py::buffer_info from = addresses(sources, "sources");
  const py::buffer_info to = addresses(destinations, "destinations");
  if (from.size != to.size || piece_bytes < 0 || num_threads < 1) {
    throw py::value_error(
        "sources and destinations must be equally many; piece_bytes must not be negative; "
        "num_threads must be positive");
  }
  const auto* source = static_cast<const int64_t*>(from.ptr);
  const auto* destination = static_cast<const int64_t*>(to.ptr);
  for (py::ssize_t i = 0; i < from.size; ++i) {
    if (source[i] == 0 || destination[i] == 0) throw py::value_error("a piece has address 0");
  }
  py::gil_scoped_release no_gil;
  copy_pieces(source, destination, from.size, piece_bytes, num_threads);
}

// copy_rows with pages and slots in buffers of int32, and each copy as the ints of a RowCopy.
void copy_rows_at(const py::buffer& pages, const py::buffer& slots, int64_t num_kv_heads,
                  py::handle copies, int num_threads) {
  const auto indices = [](const py::buffer& buffer, const char* name) {
    py::buffer_info info = buffer.request();
    if (info.ndim != 1 || info.itemsize != 4 || info.format != "i" ||
        (info.size > 1 && info.strides[0] != 4)) {
      throw py::value_error(std::string(name) + " must be contiguous int32 entries");
    }
    return info;
  };
  const py::buffer_info page = indices(pages, "pages"), slot = indices(slots, "slots");
  const Items given(copies, "copies");
  if (page.size != slot.size || num_kv_heads < 0 || num_threads < 1) {
    throw py::value_error("pages and slots must be equally many; num_threads must be positive");
  }
  std::vector<RowCopy> rows(given.size());
  for (size_t i = 0; i < given.size(); ++i) {
    std::array<int64_t, 8> x{};
    to_int64s(given[i], 8, x.data(), "copies");
    if (x[0] == 0 || x[1] == 0 || x[7] < 0) throw py::value_error("a copy has address 0");
    rows[i] = {reinterpret_cast<const char*>(x[0]),
               reinterpret_cast<char*>(x[1]),
               x[2],
               x[3],
               x[4],
               x[5],
               x[6],
               x[7]};
  }
  py::gil_scoped_release no_gil;
  copy_rows(rows.data(), static_cast<int>(rows.size()), static_cast<const int32_t*>(page.ptr),
            static_cast<const int32_t*>(slot.ptr), page.size, num_kv_heads, num_threads);
}

py::list as_tuples(const std::vector<Residency>& kernels) {
  py::list found;
  for (const Residency& one : kernels)
    found.append(py::make_tuple(one.kernel, one.planned_blocks, one.blocks));
  return found;
}

void bind_module(py::module_& m) {
  py::class_<Module, std::shared_ptr<Module>>(m, "Module")
      .def(py::init<const std::string&>(), py::arg("path"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("path", &Module::path)
      .def_property_readonly("description", &Module::description)
      .def_property_readonly("is_cuda", &Module::is_cuda)
      .def_property_readonly("last_run", &Module::last_run)
      .def("note_run", &Module::note_run)
      .def("load", &Module::load, py::arg("device"), py::call_guard<py::gil_scoped_release>())
      .def(
          "residency",
          [](const Module& module, int device) { return as_tuples(module.residency(device)); },
          py::arg("device"))
      .def(
          "probe",
          [](const Module& module, int device) {
            std::vector<Residency> found;
            {
              py::gil_scoped_release no_gil;
              found = module.probe(device);
            }
            return as_tuples(found);
          },
          py::arg("device"));
}

void bind_driver(py::module_& m) {
  m.attr("RELAXED_CAPTURES") = cu::kCaptureModeRelaxed;
  m.def("use_driver", &use_driver, py::arg("library"));
  m.def("driver_version", &driver_version, py::call_guard<py::gil_scoped_release>());
  m.def(
      "driver_encodes_tensor_maps",
      [] {
        try {
          return driver().encodes_tensor_maps();
        } catch (const DriverError&) {
          return false;
        }
      },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "exchange_capture_mode", [](int mode) { return exchange_capture_mode(driver(), mode); },
      py::arg("mode"));
}

}  // namespace
}  // namespace fajit::runtime

PYBIND11_MODULE(_C, m) {
  namespace rt = fajit::runtime;
  m.doc() = "Runtime of flashattn_jit: loads and launches compiled artifacts.";
  py::register_local_exception_translator(&rt::translate);
  m.attr("ABI_VERSION") = FAJIT_ABI_VERSION;
  m.attr("WRITE_LSE") = static_cast<int>(FAJIT_WRITE_LSE);
  m.attr("PARTIAL") = static_cast<int>(FAJIT_PARTIAL);
  m.def("cpu_features", [] {
    py::list names;
    for (const std::string& name : rt::cpu_features()) names.append(name);
    return names;
  });
  m.def("refuse_stranded", &rt::refuse_stranded);
  m.def("target_variable", []() -> py::object {
    const char* value = rt::target_variable();
    if (value == nullptr) return py::none();
    return py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(value));
  });
  m.def("begin_run_epoch", &rt::begin_run_epoch);
  m.def("cache_sizes", [] {
    const auto sizes = rt::cache_sizes();
    return py::make_tuple(sizes[0], sizes[1], sizes[2]);
  });
  m.def("merge_states", &rt::merge_states_at, py::arg("outs"), py::arg("out_strides"),
        py::arg("lses"), py::arg("lse_strides"), py::arg("shape"), py::arg("head_dim_v"),
        py::arg("out"), py::arg("out_stride"), py::arg("lse"), py::arg("lse_stride"),
        py::arg("dtype"), py::arg("mask"), py::arg("mask_stride"), py::arg("num_threads"));
  m.def("copy_pieces", &rt::copy_pieces_at, py::arg("sources"), py::arg("destinations"),
        py::arg("piece_bytes"), py::arg("num_threads"));
  m.def("copy_rows", &rt::copy_rows_at, py::arg("pages"), py::arg("slots"), py::arg("num_kv_heads"),
        py::arg("copies"), py::arg("num_threads"));
  rt::bind_torch_state(m);
  rt::bind_module(m);
  rt::bind_driver(m);
  fajit::scheduler::bind_scheduler(m);
  rt::bind_batch(m);
  rt::bind_repeats(m);
  fajit::form::bind_interval_form(m);
}
