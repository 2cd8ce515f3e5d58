// Python binding of the scheduler: `_C.schedule`.
#include "bindings.h"

#include "../runtime/module.h"
#include "../runtime/problem.h"
#include "schedule.h"

namespace py = pybind11;

namespace fajit::scheduler {
namespace {

py::dict schedule_problem(const runtime::Module* module, const runtime::Problem& problem,
                          int32_t tile_q, int32_t row_granule, int32_t tile_kv, int32_t min_chunk,
                          int32_t num_workers, bool share_heads, bool classify, bool allow_splits,
                          bool device, const py::object& tensors, const py::object& scalars) {
  if (tile_q < 1 || row_granule < 1 || tile_kv < 1 || min_chunk < 1 || num_workers < 1) {
    throw py::value_error(
        "schedule: tile_q, row_granule, tile_kv, min_chunk and num_workers must "
        "be at least 1");
  }
  if (classify && module == nullptr) {
    throw py::value_error("schedule: classify needs a module");
  }
  fajit_args args = problem.args();
  Schedule s;
  const Options options{tile_q,      row_granule, tile_kv,      min_chunk, num_workers,
                        share_heads, classify,    allow_splits, device};
  if (classify) {
    const runtime::Params params(problem.params(), tensors, scalars);
    params.fill(args);
    py::gil_scoped_release release;
    s = schedule(module, args, options);
  } else {
    s = schedule(nullptr, args, options);
  }
  py::dict out;
  out["work"] = to_bytes(s.work);
  out["merge_work"] = to_bytes(s.merge_work);
  out["num_work"] = s.work.size();
  out["partial_rows"] = s.partial_rows;
  out["total_cost"] = s.total_cost;
  out["critical_cost"] = s.critical_cost;
  out["most_splits"] = s.most_splits;
  return out;
}

}  // namespace

void bind_scheduler(py::module_& m) {
  m.def("schedule", &schedule_problem, py::arg("module").none(true), py::arg("problem"),
        py::kw_only(), py::arg("tile_q"), py::arg("row_granule"), py::arg("tile_kv"),
        py::arg("min_chunk"), py::arg("num_workers"), py::arg("share_heads") = true,
        py::arg("classify") = false, py::arg("allow_splits") = true, py::arg("device") = false,
        py::arg("tensors") = py::tuple(), py::arg("scalars") = py::tuple());
  bind_batch_plans(m);
}

}  // namespace fajit::scheduler
