// Python bindings of planned batches: `_C.BatchCall`, `_C.RepeatedCall`.
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "launch/batch_call.h"
#include "launch/repeated_call.h"
#include "launch/work_checks.h"
#include "python_values.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

// Objects of Python that a RepeatedCall holds may refer to it: the garbage collector visits them.
void collect_held(PyHeapTypeObject* heap_type) {
  PyTypeObject* const type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!py::detail::is_holder_constructed(self)) return 0;
    return py::cast<RepeatedCall&>(py::handle(self)).visit([&](py::object& held) {
      Py_VISIT(held.ptr());
      return 0;
    });
  };
  type->tp_clear = [](PyObject* self) {
    return py::cast<RepeatedCall&>(py::handle(self)).visit([](py::object& held) {
      held = py::none();
      return 0;
    });
  };
}

void bind_repeated_call(py::module_& m) {
  using Options = RepeatedCall::Options;
  py::class_<RepeatedCall>(m, "RepeatedCall", py::custom_type_setup(collect_held))
      .def(
          py::init([](const std::shared_ptr<BatchCall>& call, py::handle layouts, py::handle params,
                      std::vector<int64_t> param_bytes, py::object plan, py::object workspace,
                      int64_t workspace_bytes, py::handle page_indices, py::handle key_blocks,
                      double scale, const std::array<bool, 2>& packed, int num_threads,
                      const std::optional<std::string>& variable, const std::array<bool, 4>& asked,
                      py::handle captured, py::object planned, py::object scalars) {
            RepeatedCall::Held held{std::move(plan), std::move(workspace), std::move(planned),
                                    std::move(scalars)};
            Options options{};
            options.workspace_bytes = workspace_bytes;
            options.page_indices = to_address(page_indices);
            options.key_blocks = to_address(key_blocks);
            options.scale = scale;
            options.packed[0] = packed[0];
            options.packed[1] = packed[1];
            options.num_threads = num_threads;
            options.by_variable = variable.has_value();
            options.variable = variable.value_or("");
            options.return_lse = asked[0];
            options.partial = asked[1];
            options.has_out = asked[2];
            options.has_lse = asked[3];
            return std::make_unique<RepeatedCall>(call, layouts, params, std::move(param_bytes),
                                                  captured, std::move(held), std::move(options));
          }),
          py::arg("call").none(false), py::arg("layouts"), py::kw_only(), py::arg("params"),
          py::arg("param_bytes"), py::arg("plan"), py::arg("workspace"), py::arg("workspace_bytes"),
          py::arg("page_indices"), py::arg("key_blocks"), py::arg("scale"), py::arg("packed"),
          py::arg("num_threads"), py::arg("variable"), py::arg("asked"), py::arg("captured"),
          py::arg("planned"), py::arg("scalars"))
      .def(
          "run",
          [](const RepeatedCall& self, py::object q, py::object k, py::object v, py::object out,
             py::object lse, double scale, py::handle params, py::handle scalars) {
            return self.run(
                {std::move(q), std::move(k), std::move(v), std::move(out), std::move(lse)}, scale,
                params, scalars);
          },
          py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("lse"),
          py::arg("scale"), py::arg("params"), py::arg("scalars"))
      .def_property_readonly("can_run_again", &RepeatedCall::can_run_again)
      .def(
          "run_again",
          [](const RepeatedCall& self, py::handle variant, py::object q, py::object k, py::object v,
             py::object out, py::object lse, py::handle scale, py::handle return_lse,
             py::handle partial, py::handle params) {
            return self.run_again(
                variant, {std::move(q), std::move(k), std::move(v), std::move(out), std::move(lse)},
                scale, return_lse, partial, params);
          },
          py::arg("variant"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"),
          py::arg("lse"), py::arg("scale"), py::arg("return_lse"), py::arg("partial"),
          py::arg("params"));
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

  bind_repeated_call(m);
}

}  // namespace fajit::runtime
