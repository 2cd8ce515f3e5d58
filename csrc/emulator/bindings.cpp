// flashattn_jit._emulator: the Python face of the emulator.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstring>
#include <tuple>

#include "opcodes.h"
#include "program.h"

namespace py = pybind11;

namespace fajit::emulator {
namespace {

using Triple = std::array<uint32_t, 3>;

void run(Program& program, const std::string& kernel, const Triple& grid, const Triple& block,
         uint32_t shared_bytes, const py::bytes& params, const std::vector<py::tuple>& allocations,
         const std::string& async_copies, bool check_races, int num_threads, bool uninitialised,
         uint64_t step_limit) {
  Program::Request request;
  request.kernel = kernel;
  std::copy(grid.begin(), grid.end(), request.grid);
  std::copy(block.begin(), block.end(), request.block);
  request.shared_bytes = shared_bytes;
  const std::string bytes = params;
  request.params.assign(bytes.begin(), bytes.end());
  for (const py::tuple& item : allocations) {
    if (item.size() != 4 && item.size() != 5)
      throw py::value_error("an allocation is (name, address, nbytes, writable[, initialised])");
    Allocation allocation;
    allocation.name = item[0].cast<std::string>();
    allocation.begin = item[1].cast<uint64_t>();
    allocation.bytes = item[2].cast<uint64_t>();
    allocation.writable = item[3].cast<bool>();
    if (item.size() == 5 && !item[4].cast<bool>())
      allocation.written.reset(new uint8_t[allocation.bytes]());
    request.allocations.push_back(std::move(allocation));
  }
  if (async_copies != "late" && async_copies != "early")
    throw py::value_error("async_copies is 'late' or 'early', not '" + async_copies + "'");
  request.options.late_copies = async_copies == "late";
  request.options.check_races = check_races;
  request.options.check_uninitialised = uninitialised;
  request.options.step_limit = step_limit;
  request.num_threads = num_threads;
  const py::gil_scoped_release release;
  program.run(std::move(request));
}

py::object error_class(const char* name) {
  return py::module_::import("flashattn_jit.errors").attr(name);
}

void translate(const Fault& fault) {
  const FaultInfo& info = fault.info;
  const py::object type = error_class("EmulatorFault");
  py::object error =
      type(fault.message, py::arg("kind") = info.kind, py::arg("kernel") = info.kernel,
           py::arg("source") = info.source,
           py::arg("block") = py::make_tuple(info.block[0], info.block[1], info.block[2]),
           py::arg("thread") = info.linear_thread,
           py::arg("address") = info.has_address ? py::object(py::int_(info.address)) : py::none(),
           py::arg("allocation") = info.allocation);
  PyErr_SetObject(type.ptr(), error.ptr());
}

}  // namespace
}  // namespace fajit::emulator

PYBIND11_MODULE(_emulator, m) {
  using namespace fajit::emulator;
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Fault& fault) {
      translate(fault);
    } catch (const EmulatorError& error) {
      PyErr_SetString(error_class("EmulatorError").ptr(), error.what());
    }
  });
  py::class_<Program>(m, "Program")
      .def(py::init<const std::string&>(), py::arg("ptx"))
      .def_property_readonly("kernels", &Program::kernel_names)
      .def_property_readonly("target", &Program::target)
      .def(
          "local_bytes",
          [](Program& self, const std::string& name) { return self.kernel(name).local_bytes; },
          py::arg("kernel"))
      .def(
          "num_instructions",
          [](Program& self, const std::string& name) { return self.kernel(name).code.size(); },
          py::arg("kernel"))
      .def("run", &run, py::arg("kernel"), py::arg("grid"), py::arg("block"),
           py::arg("shared_bytes"), py::arg("params"), py::arg("allocations"), py::kw_only(),
           py::arg("async_copies") = "late", py::arg("check_races") = true,
           py::arg("num_threads") = 0, py::arg("uninitialised") = true,
           py::arg("step_limit") = Options().step_limit);
  m.def("opcodes", [] {
    py::list rows;
    for (const OpcodeRow& row : opcode_table())
      rows.append(py::make_tuple(row.name, row.types, row.semantics, row.vector));
    return rows;
  });
}
