#include "evaluation.h"

#include <algorithm>

#include "../runtime/python_values.h"

namespace py = pybind11;

namespace fajit::form {
namespace {

constexpr const char* kLengths[] = {"q_len", "kv_len", "q_offset", "q_token0", "kv_token0"};

// A tensor with its dims in the order of a View.
fajit_tensor in_view(const fajit_tensor& tensor, const Gather& gather) {
  fajit_tensor view{tensor.ptr, {}, {}};
  std::fill_n(view.sizes, FAJIT_MAX_RANK, int64_t{1});
  int next = FAJIT_MAX_RANK - gather.rank;
  for (int d = 0; d < gather.rank; ++d) {
    const int position = d == gather.dim ? FAJIT_MAX_RANK - 1 : next++;
    view.sizes[position] = tensor.sizes[d];
    view.strides[position] = tensor.strides[d];
  }
  return view;
}

View view_of(const fajit_tensor* tensors, const Gather& gather) {
  View view{in_view(tensors[gather.slot], gather), {}, false, {}};
  if (gather.table < 0 || tensors[gather.table].ptr == nullptr) return view;
  view.has_tables = true;
  constexpr int kScan = FAJIT_MAX_RANK - 1;
  fajit_tensor expected = view.tensor;
  expected.sizes[kScan] = (expected.sizes[kScan] + interval::kBlock - 1) / interval::kBlock;
  for (int side = 0; side < 2; ++side) {
    fajit_tensor& table = view.tables[side] = in_view(tensors[gather.table + side], gather);
    if (table.ptr == nullptr || !std::equal(table.sizes, std::end(table.sizes), expected.sizes)) {
      throw py::value_error("the size of a table does not match its tensor");
    }
  }
  return view;
}

// Runs the operations of a block; false at the first that does not hold.
bool run(const Block& block, Frame& frame) {
  return std::all_of(block.begin(), block.end(),
                     [&](const Operation& operation) { return operation.run(operation, frame); });
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
  const runtime::Items items = runtime::exactly(request_lengths, std::size(kLengths), "lengths");
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

bool run_any(const std::vector<Block>& clauses, Frame& frame) {
  return std::any_of(clauses.begin(), clauses.end(),
                     [&](const Block& clause) { return run(clause, frame); });
}

Evaluation::Evaluation(const Program& program, const Arguments& arguments)
    : program_(program), frame_{Context(&arguments.args), arguments.views, {}} {
  frame_.registers.resize(program.num_registers);
  run(program.once, frame_);
}

int Evaluation::classify(const Box& box) {
  Interval parts[2][3] = {{box.q}, {box.k}};
  int counts[2] = {1, 1};
  for (const auto& [index, offset, divisor] : program_.periods) {
    const int axis = index == kQ ? 0 : 1;
    counts[axis] =
        interval::periods(parts[axis][0], frame_.at(offset).i, frame_.at(divisor).i, parts[axis]);
  }
  return interval::by_parts(
      [&](Interval q, Interval k) { return classify_part({box.b, box.h, q, k}); }, box.q, box.k,
      parts[0], counts[0], parts[1], counts[1]);
}

int Evaluation::classify_part(const Box& box) {
  if (box.q.lo > box.q.hi || box.k.lo > box.k.hi) return FAJIT_TILE_EMPTY;
  frame_.at(kB).i = box.b;
  frame_.at(kH).i = box.h;
  frame_.at(kQ).i = box.q;
  frame_.at(kK).i = box.k;
  if (!interval::positions(box.q) || !interval::positions(box.k)) return FAJIT_TILE_PARTIAL;
  if (!run(program_.guards, frame_)) return FAJIT_TILE_PARTIAL;
  if (!run_any(program_.keep, frame_)) return FAJIT_TILE_EMPTY;
  return run_any(program_.drop, frame_) ? FAJIT_TILE_PARTIAL : FAJIT_TILE_FULL;
}

}  // namespace fajit::form
