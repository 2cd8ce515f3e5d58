// Python binding of the interval form: `_C.IntervalForm`.
#include "../runtime/bindings.h"
#include "../runtime/python_values.h"
#include "evaluation.h"

namespace py = pybind11;

namespace fajit::form {
namespace {

using runtime::to_bytes;

static_assert(sizeof(Box) == 8 * sizeof(int64_t));

py::bytes classify(const Program& self, const py::buffer& boxes, py::handle tensors,
                   py::handle layouts, py::handle scalars, py::handle lengths) {
  const py::buffer_info info = boxes.request();
  if (info.ndim != 2 || !info.item_type_is_equivalent_to<int64_t>() || info.shape[1] != 8 ||
      (info.size > 0 && (info.strides[1] != 8 || info.strides[0] != sizeof(Box)))) {
    throw py::value_error("boxes must be contiguous int64 [N, 8]: b, h, q and k as lo, hi");
  }
  const Arguments arguments(self, tensors, layouts, scalars, lengths);
  std::vector<uint8_t> states(static_cast<size_t>(info.shape[0]));
  {
    py::gil_scoped_release no_gil;
    Evaluation evaluation(self, arguments);
    const Box* box = static_cast<const Box*>(info.ptr);
    for (uint8_t& state : states) state = static_cast<uint8_t>(evaluation.classify(*box++));
  }
  return to_bytes(states);
}

// Reads (first, last) pairs.
std::vector<Interval> intervals(py::handle source, const char* name) {
  const runtime::Items items(source, name);
  std::vector<Interval> made(items.size());
  for (size_t i = 0; i < items.size(); ++i) runtime::to_int64s(items[i], 2, &made[i].lo, name);
  return made;
}

py::tuple runs_of(const Program& self, int32_t q_begin, int32_t q_end, int32_t tile_q,
                  int32_t kv_begin, int32_t kv_end, int32_t tile_kv, py::handle b, py::handle h,
                  py::handle tensors, py::handle layouts, py::handle scalars, py::handle lengths) {
  if (tile_q < 1 || tile_kv < 1) throw py::value_error("tile_q and tile_kv must be at least 1");
  const std::vector<Interval> requests = intervals(b, "b"), heads = intervals(h, "h");
  const Arguments arguments(self, tensors, layouts, scalars, lengths);
  TileRuns runs;
  {
    py::gil_scoped_release no_gil;
    Evaluation evaluation(self, arguments);
    runs = tile_runs(evaluation, {q_begin, q_end, tile_q}, {kv_begin, kv_end, tile_kv}, requests,
                     heads);
  }
  return py::make_tuple(to_bytes(runs.indptr), to_bytes(runs.begin), to_bytes(runs.end),
                        to_bytes(runs.state));
}

}  // namespace

void bind_interval_form(py::module_& m) {
  m.def("interval_functions", [] {
    py::list names;
    for (const auto& named : functions()) names.append(named.first);
    return names;
  });
  py::class_<Program>(m, "IntervalForm")
      .def(py::init<py::handle, py::handle, size_t, std::string>(), py::arg("code"), py::kw_only(),
           py::arg("tensors"), py::arg("num_tables"), py::arg("scalar_kinds"))
      .def("classify", &classify, py::arg("boxes"), py::kw_only(), py::arg("tensors"),
           py::arg("layouts"), py::arg("scalars"), py::arg("lengths"))
      .def("tile_runs", &runs_of, py::kw_only(), py::arg("q_begin"), py::arg("q_end"),
           py::arg("tile_q"), py::arg("kv_begin"), py::arg("kv_end"), py::arg("tile_kv"),
           py::arg("b"), py::arg("h"), py::arg("tensors"), py::arg("layouts"), py::arg("scalars"),
           py::arg("lengths"));
}

}  // namespace fajit::form
