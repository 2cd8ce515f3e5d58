#include "evaluation.h"

#include <algorithm>
#include <utility>

#include "../runtime/python_values.h"

namespace py = pybind11;

namespace fajit::form {
namespace {

constexpr const char* kLengths[] = {"q_len", "kv_len", "q_offset", "q_token0", "kv_token0"};

// The dims of `tensor` in the order of a View.
fajit_tensor in_view(const fajit_tensor& tensor, const Gather& gather) {
  fajit_tensor view{};
  view.ptr = tensor.ptr;
  std::fill_n(view.sizes, gather.compiled_rank, int64_t{1});
  int next = gather.compiled_rank - std::max(gather.rank, 1);
  for (int d = 0; d < gather.rank; ++d) {
    const int place = d == gather.dim ? gather.compiled_rank - 1 : next++;
    view.sizes[place] = tensor.sizes[d];
    view.strides[place] = tensor.strides[d];
  }
  return view;
}

View view_of(const fajit_tensor* tensors, const Gather& gather) {
  View view{in_view(tensors[gather.slot], gather), {}, false, {}};
  if (gather.table < 0 || tensors[gather.table].ptr == nullptr) return view;
  view.has_tables = true;
  for (int side = 0; side < 2; ++side) {
    fajit_tensor& table = view.tables[side] = in_view(tensors[gather.table + side], gather);
    bool fits = table.ptr != nullptr;
    for (int d = 0; d < gather.compiled_rank; ++d) {
      const int64_t size = view.tensor.sizes[d], block = interval::kBlock;
      fits = fits && table.sizes[d] == (d + 1 < gather.compiled_rank ? size
                                                                    : (size + block - 1) / block);
    }
    if (!fits) throw py::value_error("a table has another size than its tensor");
  }
  return view;
}

}  // namespace

Arguments::Arguments(const Program& program, py::handle tensors, py::handle layouts,
                     py::handle scalars, py::handle lengths)
    : layouts_(layouts, program.scalar_kinds), params_(layouts_, tensors, scalars) {
  if (layouts_.tensors().size() != program.num_tensors()) {
    throw py::value_error("the interval form reads " + std::to_string(program.num_tensors()) +
                          " tensors and tables, got " + std::to_string(layouts_.tensors().size()));
  }
  layouts_.fill_counts(args_);
  params_.fill(args_);
  const runtime::Items items(lengths, "lengths");
  if (items.size() != std::size(kLengths)) throw py::value_error("lengths must have 5 entries");
  const py::object first = items[0];
  const size_t requests = runtime::Items(first, kLengths[0]).size();
  args_.num_requests = runtime::narrow(static_cast<int64_t>(requests), "num_requests");
  for (size_t i = 0; i < std::size(kLengths); ++i) {
    std::vector<int64_t> values(requests);
    runtime::to_int64s(items[i], requests, values.data(), kLengths[i]);
    for (const int64_t x : values) lengths_.push_back(runtime::narrow(x, kLengths[i]));
  }
  args_.q_len = lengths_.data();
  args_.kv_len = args_.q_len + requests;
  args_.q_offset = args_.kv_len + requests;
  args_.q_token0 = args_.q_offset + requests;
  args_.kv_token0 = args_.q_token0 + requests;
  for (const Gather& gather : program.gathers) views_.push_back(view_of(args_.tensors, gather));
}

Evaluation::Evaluation(const Program& program, const Arguments& arguments)
    : program_(program),
      frame_{Context(&arguments.args()), arguments.views(),
             std::vector<std::array<Value, kLanes>>(static_cast<size_t>(program.num_registers))} {
  for (Value& zero : frame_.registers[kZero]) zero.i = {0, 0};
  for (View& view : frame_.views) view.known.resize(View::kKnown);
  run(program.once, frame_, ~Lanes{0});
}

void Evaluation::classify(const Box* boxes, size_t count, uint8_t* states) {
  for (size_t i = 0; i < count; i += kLanes) {
    const int some = static_cast<int>(std::min<size_t>(kLanes, count - i));
    batch(boxes + i, some, states + i);
    if (!program_.periods.empty()) split(boxes + i, some, states + i);
  }
}

void Evaluation::batch(const Box* boxes, int count, uint8_t* states) {
  Lanes real = 0, known = 0;
  for (int i = 0; i < count; ++i) {
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
  for (int i = 0; i < count; ++i) {
    const auto in = [i](Lanes lanes) { return (lanes >> i & 1) != 0; };
    const bool empty = !in(real) || (in(known) && !in(keep));
    states[i] = empty                       ? FAJIT_TILE_EMPTY
                : in(known) && !in(drop) ? FAJIT_TILE_FULL
                                         : FAJIT_TILE_PARTIAL;
  }
}

// Looks at partial boxes again, period by period. `interval::by_parts` asks for the parts of a box
// one after the other. It is called once to hear which, and once to be told their states.
void Evaluation::split(const Box* boxes, int count, uint8_t* states) {
  std::vector<Box> parts;
  std::vector<size_t> first;  // of the parts of each partial box
  for (int i = 0; i < count; ++i) {
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
    const int some = static_cast<int>(std::min<size_t>(kLanes, parts.size() - i));
    batch(parts.data() + i, some, found.data() + i);
  }
  auto next_first = first.begin();
  for (int i = 0; i < count; ++i) {
    if (states[i] != FAJIT_TILE_PARTIAL) continue;
    size_t part = *next_first++;
    bool whole = true;
    states[i] = static_cast<uint8_t>(by_parts(boxes[i], [&](Interval, Interval) -> int {
      return std::exchange(whole, false) ? states[i] : found[part++];
    }));
  }
}

template <class F> int Evaluation::by_parts(const Box& box, F ask) {
  Interval parts[2][3] = {{box.q}, {box.k}};
  int counts[2] = {1, 1};
  for (const Program::Period& p : program_.periods) {
    const int axis = p.index == kQ ? 0 : 1;
    counts[axis] = interval::periods(axis == 0 ? box.q : box.k, frame_.lanes(p.offset)[0].i,
                                     frame_.lanes(p.divisor)[0].i, parts[axis]);
  }
  return interval::by_parts(ask, box.q, box.k, parts[0], counts[0], parts[1], counts[1]);
}

}  // namespace fajit::form
