#include "batch_bindings.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "batch_call.h"
#include "python_values.h"
#include "work_checks.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

// A method of `BatchCall` that takes the values of one launch.
template <class Result>
void def_launch(py::class_<BatchCall, std::shared_ptr<BatchCall>>& call, const char* name,
                Result (BatchCall::*method)(const BatchValues&) const) {
  const py::tuple none = py::make_tuple();
  call.def(
      name,
      [method](const BatchCall& self, py::handle q, py::handle k, py::handle v, py::handle out,
               py::handle lse, double scale, int num_threads, py::handle tensors,
               py::handle scalars, py::handle workspace, py::handle page_indices,
               py::handle key_blocks, py::handle device_block, py::handle stream, int device) {
        return (self.*method)({q, k, v, out, lse, scale, num_threads, tensors, scalars, workspace,
                               page_indices, key_blocks, device_block, stream, device});
      },
      py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("lse"), py::arg("scale"),
      py::arg("num_threads"), py::arg("tensors") = none, py::arg("scalars") = none,
      py::arg("workspace") = 0, py::arg("page_indices") = 0, py::arg("key_blocks") = 0,
      py::arg("device_block") = 0, py::arg("stream") = 0, py::arg("device") = 0);
}

}  // namespace

void bind_batch(py::module_& m) {
  using Plan = std::shared_ptr<scheduler::BatchPlan>;
  using LengthsPtr = std::shared_ptr<scheduler::Lengths>;
  using ModulePtr = std::shared_ptr<Module>;
  py::class_<BatchCall, std::shared_ptr<BatchCall>> call(m, "BatchCall");
  call.def(py::init([](const Plan& plan, const LengthsPtr& lengths,
                       const std::pair<ModulePtr, ModulePtr>& modules, int32_t num_q_heads,
                       int32_t num_kv_heads, int32_t head_dim, int32_t head_dim_v,
                       int32_t key_block, int32_t num_key_blocks) {
             return std::make_shared<BatchCall>(plan, lengths,
                                                BatchCall::Modules{modules.first, modules.second},
                                                BatchShape{num_q_heads, num_kv_heads, head_dim,
                                                           head_dim_v, key_block, num_key_blocks});
           }),
           py::arg("plan").none(false), py::arg("lengths").none(false), py::arg("modules"),
           py::kw_only(), py::arg("num_q_heads"), py::arg("num_kv_heads"), py::arg("head_dim"),
           py::arg("head_dim_v"), py::arg("key_block") = 0, py::arg("num_key_blocks") = 0)
      .def("bind", &BatchCall::bind, py::kw_only(), py::arg("strides"),
           py::arg("layouts") = py::make_tuple(), py::arg("scalar_kinds") = "",
           py::arg("num_pages") = 0, py::arg("flags") = 0)
      .def_property_readonly("is_cuda", &BatchCall::is_cuda)
      .def_property_readonly("workspace_bytes",
                             [](const BatchCall& self) { return self.work().workspace().bytes; })
      .def_property_readonly("block_bytes",
                             [](const BatchCall& self) { return self.work().block_bytes(); })
      .def("device_block",
           [](const BatchCall& self) {
             std::string block(static_cast<size_t>(self.work().block_bytes()), '\0');
             self.work().write_block(block.data());
             return py::bytes(block);
           })
      .def(
          "write_block",
          [](const BatchCall& self, py::handle address, int64_t bytes) {
            void* const block = to_address(address);
            if (self.work().block_bytes() == 0) return;
            require(block, "block");
            if (bytes < self.work().block_bytes()) {
              throw py::value_error("the block has " + std::to_string(bytes) + " bytes, but " +
                                    std::to_string(self.work().block_bytes()) + " are written");
            }
            self.work().write_block(static_cast<char*>(block));
          },
          py::arg("address"), py::arg("bytes"));
  def_launch(call, "launch", &BatchCall::launch);
  def_launch(call, "plan_launches", &BatchCall::plan_launches);
}

}  // namespace fajit::runtime
