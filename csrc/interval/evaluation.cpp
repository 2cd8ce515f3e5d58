#include "evaluation.h"

#include <algorithm>
#include <utility>

#include "../runtime/python_values.h"

namespace py = pybind11;

namespace fajit::form {
namespace {

constexpr const char* kLengths[] = {"q_len", "kv_len", "q_offset", "q_token0", "kv_token0"};

// A tensor with its dims as in a View.
fajit_tensor in_view(const fajit_tensor& tensor, const Gather& gather) {
  fajit_tensor view{tensor.ptr, {}, {}};
  std::fill_n(view.sizes, FAJIT_MAX_RANK, int64_t{1});
  int next = FAJIT_MAX_RANK - gather.rank;
  for (int d = 0; d < gather.rank; ++d) {
    const int place = d == gather.dim ? FAJIT_MAX_RANK - 1 : next++;
    view.sizes[place] = tensor.sizes[d];
    view.strides[place] = tensor.strides[d];
  }
  return view;
}

View view_of(const fajit_tensor* tensors, const Gather& gather) {
  View view{
      in_view(tensors[gather.slot], gather), {}, false, std::vector<View::Known>(View::kKnown)};
  if (gather.table < 0 || tensors[gather.table].ptr == nullptr) return view;
  view.has_tables = true;
  constexpr int kScan = FAJIT_MAX_RANK - 1;
  fajit_tensor expected = view.tensor;
  expected.sizes[kScan] = (expected.sizes[kScan] + interval::kBlock - 1) / interval::kBlock;
  for (int side = 0; side < 2; ++side) {
    fajit_tensor& table = view.tables[side] = in_view(tensors[gather.table + side], gather);
    if (table.ptr == nullptr || !std::equal(table.sizes, std::end(table.sizes), expected.sizes)) {
      throw py::value_error("a table has another size than its tensor");
    }
  }
  return view;
}

}  // namespace

Arguments::Arguments(const Program& program, py::handle tensors, py::handle tensor_layouts,
                     py::handle scalars, py::handle request_lengths)
    : layouts(tensor_layouts, program.scalar_kinds), params(layouts, tensors, scalars) {
  if (layouts.tensors().size() != program.num_tensors()) {
    throw py::value_error("the interval form reads " + std::to_string(program.num_tensors()) +
                          " tensors and tables, got " + std::to_string(layouts.tensors().size()));
  }
  layouts.fill_counts(args);
  params.fill(args);
  const runtime::Items items(request_lengths, "lengths");
  if (items.size() != std::size(kLengths)) throw py::value_error("lengths must have 5 entries");
  const py::object first = items[0];
  const size_t requests = runtime::Items(first, kLengths[0]).size();
  args.num_requests = runtime::narrow(static_cast<int64_t>(requests), "num_requests");
  std::vector<int64_t> values(requests);
  for (size_t i = 0; i < std::size(kLengths); ++i) {
    runtime::to_int64s(items[i], requests, values.data(), kLengths[i]);
    for (const int64_t x : values) lengths.push_back(runtime::narrow(x, kLengths[i]));
  }
  args.q_len = lengths.data();
  args.kv_len = args.q_len + requests;
  args.q_offset = args.kv_len + requests;
  args.q_token0 = args.q_offset + requests;
  args.kv_token0 = args.q_token0 + requests;
  for (const Gather& gather : program.gathers) views.push_back(view_of(args.tensors, gather));
}

Lanes run(const Block& block, Frame& frame, Lanes lanes) {
  for (const Operation& operation : block) {
    if (lanes == 0) break;
    lanes = operation.run(operation, frame, lanes);
  }
  return lanes;
}

Lanes run_any(const std::vector<Block>& clauses, Frame& frame, Lanes lanes) {
  Lanes holds = 0;
  for (const Block& clause : clauses) holds |= run(clause, frame, lanes & ~holds);
  return holds;
}

Evaluation::Evaluation(const Program& program, const Arguments& arguments)
    : program_(program), frame_{Context(&arguments.args), arguments.views, {}} {
  frame_.registers.resize(program.num_registers);
  run(program.once, frame_, ~Lanes{0});
}

void Evaluation::classify(const Box* boxes, size_t count, uint8_t* states) {
  for (size_t i = 0; i < count; i += kLanes) {
    const size_t some = std::min<size_t>(kLanes, count - i);
    batch(boxes + i, some, states + i);
    if (!program_.periods.empty()) split(boxes + i, some, states + i);
  }
}

void Evaluation::batch(const Box* boxes, size_t count, uint8_t* states) {
  Lanes real = 0, known = 0;
  for (size_t i = 0; i < count; ++i) {
    const Box& box = boxes[i];
    frame_.lanes(kB)[i].i = box.b;
    frame_.lanes(kH)[i].i = box.h;
    frame_.lanes(kQ)[i].i = box.q;
    frame_.lanes(kK)[i].i = box.k;
    const bool is_real = box.q.lo <= box.q.hi && box.k.lo <= box.k.hi;
    real |= Lanes{is_real} << i;
    known |= Lanes{is_real && interval::positions(box.q) && interval::positions(box.k)} << i;
  }
  known = run(program_.guards, frame_, known);
  const Lanes keep = run_any(program_.keep, frame_, known);
  const Lanes drop = run_any(program_.drop, frame_, keep);
  const Lanes full = keep & ~drop, empty = ~real | (known & ~keep);
  for (size_t i = 0; i < count; ++i) {
    const auto in = [i](Lanes lanes) { return (lanes >> i & 1) != 0; };
    states[i] = in(full) ? FAJIT_TILE_FULL : in(empty) ? FAJIT_TILE_EMPTY : FAJIT_TILE_PARTIAL;
  }
}

// Looks at partial boxes again, period by period. `interval::by_parts` asks for the parts of a box
// one after the other; here it is called once to hear which, and once to be told their states.
void Evaluation::split(const Box* boxes, size_t count, uint8_t* states) {
  std::vector<Box> parts;
  std::vector<size_t> first;  // of the parts of each partial box
  for (size_t i = 0; i < count; ++i) {
    if (states[i] != FAJIT_TILE_PARTIAL) continue;
    first.push_back(parts.size());
    bool whole = true;
    by_parts(boxes[i], [&](Interval q, Interval k) -> int {
      if (!whole) parts.push_back({boxes[i].b, boxes[i].h, q, k});
      return std::exchange(whole, false) ? FAJIT_TILE_PARTIAL : FAJIT_TILE_FULL;
    });
  }
  std::vector<uint8_t> found(parts.size());
  for (size_t i = 0; i < parts.size(); i += kLanes) {
    batch(parts.data() + i, std::min<size_t>(kLanes, parts.size() - i), found.data() + i);
  }
  auto next = first.begin();
  for (size_t i = 0; i < count; ++i) {
    if (states[i] != FAJIT_TILE_PARTIAL) continue;
    size_t part = *next++;
    bool whole = true;
    states[i] = static_cast<uint8_t>(by_parts(boxes[i], [&](Interval, Interval) -> int {
      return std::exchange(whole, false) ? states[i] : found[part++];
    }));
  }
}

template <class F>
int Evaluation::by_parts(const Box& box, F ask) {
  Interval parts[2][3] = {{box.q}, {box.k}};
  int counts[2] = {1, 1};
  for (const auto& [index, offset, divisor] : program_.periods) {
    const int axis = index == kQ ? 0 : 1;
    counts[axis] = interval::periods(parts[axis][0], frame_.lanes(offset)[0].i,
                                     frame_.lanes(divisor)[0].i, parts[axis]);
  }
  return interval::by_parts(ask, box.q, box.k, parts[0], counts[0], parts[1], counts[1]);
}

}  // namespace fajit::form
