// Python bindings of planned batches: `_C.BatchCall`.
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "launch/batch_call.h"
#include "launch/work_checks.h"
#include "python_values.h"

namespace py = pybind11;

namespace fajit::runtime {

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
           py::arg("num_pages") = 0, py::arg("flags") = 0, py::arg("block_mask") = py::none(),
           py::arg("kv_requests") = 0, py::arg("kv_rows") = 0)
      .def_property_readonly("is_cuda", &BatchCall::is_cuda)
      .def_property_readonly(
          "workspace_bytes",
          [](const BatchCall& self) { return self.work().accesses().workspace.bytes; })
      .def_property_readonly("block_bytes",
                             [](const BatchCall& self) { return self.work().block_bytes(); })
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
