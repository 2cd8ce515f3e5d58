// Python bindings of calls that are made again: `_C.RepeatedCall`, `_C.RepeatedAppend`.
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "python_values.h"
#include "repeats/repeated_append.h"
#include "repeats/repeated_call.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

// Objects of Python that a repeated call holds may refer to it: the garbage collector visits them.
template <class Call>
void collect_held(PyHeapTypeObject* heap_type) {
  PyTypeObject* const type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!py::detail::is_holder_constructed(self)) return 0;
    return py::cast<Call&>(py::handle(self)).visit([&](py::object& held) {
      Py_VISIT(held.ptr());
      return 0;
    });
  };
  type->tp_clear = [](PyObject* self) {
    return py::cast<Call&>(py::handle(self)).visit([](py::object& held) {
      held = py::none();
      return 0;
    });
  };
}

void bind_repeated_call(py::module_& m) {
  using Options = RepeatedCall::Options;
  py::class_<RepeatedCall>(m, "RepeatedCall", py::custom_type_setup(collect_held<RepeatedCall>))
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

void bind_repeated_append(py::module_& m) {
  py::class_<RepeatedAppend>(m, "RepeatedAppend",
                             py::custom_type_setup(collect_held<RepeatedAppend>))
      .def(py::init([](const std::shared_ptr<BatchCall>& call, py::handle layouts,
                       const std::array<bool, 2>& packed, py::handle params, py::handle captured,
                       py::object page_indices, py::handle address, py::object scalars) {
             return std::make_unique<RepeatedAppend>(
                 call, layouts, packed, params, captured,
                 RepeatedAppend::Held{std::move(page_indices), std::move(scalars)},
                 to_address(address));
           }),
           py::arg("call").none(false), py::arg("layouts"), py::kw_only(), py::arg("packed"),
           py::arg("params"), py::arg("captured"), py::arg("page_indices"), py::arg("address"),
           py::arg("scalars"))
      .def_property_readonly("is_readable", &RepeatedAppend::is_readable)
      .def("run", &RepeatedAppend::run, py::arg("variant"), py::arg("given"), py::arg("params"));
}

}  // namespace

void bind_repeats(py::module_& m) {
  bind_repeated_call(m);
  bind_repeated_append(m);
}

}  // namespace fajit::runtime
