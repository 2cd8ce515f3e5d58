// Python bindings of batch plans: `_C.BatchLengths`, `_C.Kind`, `_C.BatchPlan`.
#include <pybind11/stl.h>

#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "../runtime/bindings.h"
#include "../runtime/launch/params.h"
#include "../runtime/python_values.h"
#include "batch_plan.h"
#include "units.h"

namespace py = pybind11;

namespace fajit::scheduler {
namespace {

using runtime::exactly;
using runtime::Items;
using runtime::to_bytes;

int32_t to_int32(py::handle value, const char* name) {
  return runtime::narrow(runtime::to_int64(value, name), name);
}

// (address, entries, bytes of an entry); None is an absent array.
Array read_array(py::handle source, const char* name) {
  Array array;
  if (source.is_none()) return array;
  const Items items = exactly(source, 3, name);
  array.data = runtime::to_address(items[0]);
  array.size = runtime::to_int64(items[1], name);
  array.item_bytes = to_int32(items[2], name);
  if (array.size < 0 || (array.item_bytes != 4 && array.item_bytes != 8)) {
    throw py::value_error(std::string(name) + " must be (address, entries, 4 or 8)");
  }
  if (array.data == nullptr && array.size > 0) {
    throw py::value_error(std::string(name) + " has address 0");
  }
  // An empty array is present, unlike None.
  static const int64_t none = 0;
  if (array.data == nullptr) array.data = &none;
  return array;
}

StorageArrays read_storage(py::handle source) {
  const Items items(source, "storage");
  if (items.size() != 5 && items.size() != 6) {
    throw py::value_error("storage must have 5 or 6 entries, got " + std::to_string(items.size()));
  }
  StorageArrays storage;
  storage.elsewhere = items.size() == 6 && py::cast<bool>(items[5]);
  storage.kv_indptr = read_array(items[0], "kv_indptr");
  storage.page_indptr = read_array(items[1], "page_indptr");
  storage.last_page_len = read_array(items[2], "last_page_len");
  storage.page_size = to_int32(items[3], "page_size");
  storage.num_page_indices = runtime::to_int64(items[4], "the number of page indices");
  return storage;
}

void read_whole(py::handle source, Lengths& lengths) {
  const Array whole = read_array(source, "whole_q_len");
  if (whole.data == nullptr) return;
  if (whole.size != lengths.num_requests || lengths.num_groups > 0) {
    throw py::value_error("whole_q_len must have an entry a request, without levels");
  }
  for (int64_t b = 0; b < whole.size; ++b) {
    const int64_t rows = whole.at(b);
    if (rows < lengths.q_len[static_cast<size_t>(b)]) {
      throw py::value_error("whole_q_len[" + std::to_string(b) + "]=" + std::to_string(rows) +
                            " is less than the q_len of its part");
    }
    lengths.whole_q_len.push_back(runtime::narrow(rows, "whole_q_len"));
  }
}

std::shared_ptr<Lengths> make_lengths(py::handle q_indptr, py::handle storage, py::handle q_offset,
                                      py::handle levels, py::handle whole_q_len, int32_t group_size,
                                      int64_t max_q_tokens) {
  std::vector<LevelArrays> level_arrays;
  const Items level_items(levels, "levels");
  for (size_t i = 0; i < level_items.size(); ++i) {
    const py::object level = level_items[i];
    const Items items = exactly(level, 3, "a level");
    level_arrays.push_back(
        {read_array(items[0], "q_indptr"), read_array(items[1], "tokens"), read_storage(items[2])});
  }
  const Array rows = read_array(q_indptr, "q_indptr");
  try {
    auto lengths = std::make_shared<Lengths>(
        read_lengths(rows, read_storage(storage), read_array(q_offset, "q_offset"), level_arrays,
                     {group_size, max_q_tokens}));
    read_whole(whole_q_len, *lengths);
    return lengths;
  } catch (const std::bad_alloc&) {
    throw py::value_error("q_indptr ends at " +
                          std::to_string(rows.size > 0 ? rows.at(rows.size - 1) : 0) +
                          " packed tokens: the host has no memory left to plan them");
  }
}

// Prefill and few-row; None if there is no such kind.
using Kinds = std::array<std::shared_ptr<Kind>, 2>;

void read_kinds(const Kinds& source, Kind (&kinds)[2]) {
  for (size_t i = 0; i < 2; ++i) {
    if (source[i] != nullptr) kinds[i] = *source[i];
  }
}

Kind make_kind(std::shared_ptr<runtime::Module> module, int32_t tile_q, int32_t row_granule,
               int32_t tile_kv, int32_t min_chunk, double item_ns, double load_ns, double pair_ns,
               double state_ns, std::optional<double> alone_ns, double cached_keys) {
  if (tile_q < 1) throw py::value_error("tile_q of a kind must be positive");
  return {std::move(module),          tile_q,  row_granule, tile_kv,    min_chunk, item_ns, load_ns,
          alone_ns.value_or(load_ns), pair_ns, state_ns,    cached_keys};
}

void bind_kind(py::module_& m) {
  py::class_<Kind, std::shared_ptr<Kind>>(m, "Kind")
      .def(py::init(&make_kind), py::arg("module"), py::arg("tile_q"), py::arg("row_granule"),
           py::arg("tile_kv"), py::arg("min_chunk"), py::arg("item_ns"), py::arg("load_ns"),
           py::arg("pair_ns"), py::arg("state_ns"), py::arg("alone_ns") = py::none(),
           py::arg("cached_keys") = 0.0)
      .def_readonly("tile_q", &Kind::tile_q)
      .def_readonly("tile_kv", &Kind::tile_kv)
      .def_readonly("min_chunk", &Kind::min_chunk)
      .def(
          "rows_of_tile", [](const Kind& self, int64_t span) { return rows_of_tile(span, self); },
          py::arg("span"));
}

KeyLists read_lists(py::handle source) {
  KeyLists lists;
  if (source.is_none()) return lists;
  const Items items = exactly(source, 6, "lists");
  lists.q_block = to_int32(items[0], "q_block");
  lists.key_block = to_int32(items[1], "key_block");
  lists.per_head = py::cast<bool>(items[2]);
  lists.begin = read_array(items[3], "begin");
  lists.count = read_array(items[4], "count");
  lists.num_key_blocks = runtime::to_int64(items[5], "num_key_blocks");
  if (lists.q_block < 1) throw py::value_error("q_block of key lists must be positive");
  return lists;
}

Limits read_limits(py::handle source) {
  if (source.is_none()) return {};
  std::array<int64_t, 4> values{};
  runtime::to_int64s(source, 4, values.data(), "limits");
  for (const int64_t value : values) {
    if (value < 0) throw py::value_error("limits must not be negative");
  }
  if (values[0] == 0) throw py::value_error("limits: max_requests must be positive");
  return {runtime::narrow(values[0], "max_requests"), runtime::narrow(values[1], "max_q_tokens"),
          runtime::narrow(values[2], "max_kv_len"), runtime::narrow(values[3], "max_pages")};
}

PlanOptions make_options(int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim_v,
                         int32_t few_rows, std::array<int32_t, 2> num_workers, bool share_workers,
                         bool batch_invariant, std::array<int32_t, 2> split_keys, double merge_ns,
                         py::handle limits, int32_t num_levels, int32_t row_block,
                         bool heads_apart) {
  if (row_block < 0) throw py::value_error("row_block must not be negative");
  PlanOptions options;
  options.num_q_heads = num_q_heads;
  options.num_kv_heads = num_kv_heads;
  options.head_dim_v = head_dim_v;
  options.few_rows = few_rows;
  options.share_workers = share_workers;
  options.heads_apart = heads_apart;
  options.batch_invariant = batch_invariant;
  options.merge_ns = merge_ns;
  options.limits = read_limits(limits);
  options.num_levels = num_levels;
  options.row_block = row_block;
  for (size_t i = 0; i < 2; ++i) {
    options.num_workers[i] = num_workers[i];
    options.split_keys[i] = split_keys[i];
  }
  return options;
}

constexpr const char* kKindRule = "kind is 0 (prefill) or 1 (few-row)";

const KindPlan& kind_at(const BatchPlan& plan, int kind) {
  if (kind != 0 && kind != 1) throw py::value_error(kKindRule);
  return plan.kinds[kind];
}

py::tuple count_kinds(const Lengths& lengths, int32_t group_size, int32_t few_rows,
                      int32_t q_block) {
  int64_t counts[2] = {0, 0}, most = 0;
  for (size_t e = 0; e < lengths.q_len.size(); ++e) {
    int32_t q_len = lengths.q_len[e];
    if (q_len == 0) continue;
    if (!lengths.whole_q_len.empty()) q_len = lengths.whole_q_len[e];
    ++counts[kind_of(q_len, q_block, group_size, few_rows)];
    most = std::max(most, int64_t{q_len} * group_size);
  }
  return py::make_tuple(counts[0], counts[1], most);
}

// One int for all requests, or a tuple or list with one for each.
std::vector<int32_t> read_each(py::handle source, int32_t count, const char* name) {
  if (PyLong_Check(source.ptr())) {
    return std::vector<int32_t>(static_cast<size_t>(count), to_int32(source, name));
  }
  const Items items = exactly(source, static_cast<size_t>(count), name);
  std::vector<int32_t> out;
  for (size_t i = 0; i < items.size(); ++i) out.push_back(to_int32(items[i], name));
  return out;
}

std::shared_ptr<Lengths> make_dense_lengths(int32_t num_requests, int32_t q_len, int32_t kv_rows,
                                            py::handle kv_len, py::handle q_offset) {
  if (num_requests < 0) throw py::value_error("num_requests must not be negative");
  std::vector<int32_t> lengths(static_cast<size_t>(num_requests), kv_rows);
  if (!kv_len.is_none()) lengths = read_each(kv_len, num_requests, "kv_len");
  return std::make_shared<Lengths>(dense_lengths(q_len, kv_rows, std::move(lengths),
                                                 read_each(q_offset, num_requests, "q_offset")));
}

void bind_lengths(py::module_& m) {
  m.def(
      "page_range",
      [](py::handle indices, py::handle page_indptr) {
        return page_range(read_array(indices, "page_indices"),
                          read_array(page_indptr, "page_indptr"));
      },
      py::arg("indices"), py::arg("page_indptr"));
  py::class_<Lengths, std::shared_ptr<Lengths>>(m, "BatchLengths")
      .def(py::init(&make_lengths), py::arg("q_indptr"), py::arg("storage"),
           py::arg("q_offset") = py::none(), py::arg("levels") = py::make_tuple(),
           py::arg("whole_q_len") = py::none(), py::arg("group_size") = 0,
           py::arg("max_q_tokens") = std::numeric_limits<int32_t>::max())
      .def_static("dense", &make_dense_lengths, py::arg("num_requests"), py::arg("q_len"),
                  py::arg("kv_rows"), py::arg("kv_len") = py::none(), py::arg("q_offset") = 0)
      .def_readonly("num_requests", &Lengths::num_requests)
      .def_readonly("num_groups", &Lengths::num_groups)
      .def_readonly("num_q_tokens", &Lengths::num_q_tokens)
      .def_readonly("num_kv_tokens", &Lengths::num_kv_tokens)
      .def_readonly("num_page_indices", &Lengths::num_page_indices)
      .def_readonly("max_q_len", &Lengths::max_q_len)
      .def_readonly("max_kv_len", &Lengths::max_kv_len)
      .def_readonly("q_len", &Lengths::q_len)
      .def_readonly("kv_len", &Lengths::kv_len)
      .def_readonly("q_offset", &Lengths::q_offset)
      .def_readonly("kv_first", &Lengths::kv_first)
      .def("tile_kinds", &count_kinds, py::arg("group_size"), py::arg("few_rows"),
           py::arg("q_block") = 0);
}

// The mask whose interval form estimates work: its params as `args`, and what `options` says of it.
class Mask {
 public:
  Mask(py::handle source, PlanOptions& options) {
    args_.abi_version = FAJIT_ABI_VERSION;
    args_.args_bytes = sizeof(args_);
    options.classify = !source.is_none();
    if (!options.classify) return;
    const Items items = exactly(source, 6, "mask");
    layouts_.emplace(items[1], py::cast<std::string>(items[3]));
    params_.emplace(*layouts_, items[0], items[2]);
    layouts_->fill_counts(args_);
    params_->fill(args_);
    options.mask_is_contiguous = py::cast<bool>(items[4]);
    options.mask_reads_request = py::cast<bool>(items[5]);
  }

  const fajit_args& args() const { return args_; }

 private:
  fajit_args args_{};
  std::optional<runtime::ParamLayouts> layouts_;
  std::optional<runtime::Params> params_;
};

std::shared_ptr<BatchPlan> make_plan(const Lengths& lengths, const Kinds& both_kinds,
                                     PlanOptions options, py::handle lists_source,
                                     py::handle mask_source) {
  Kind kinds[2];
  read_kinds(both_kinds, kinds);
  const KeyLists lists = read_lists(lists_source);
  const Mask mask(mask_source, options);
  const py::gil_scoped_release no_gil;
  return std::make_shared<BatchPlan>(plan_batch(lengths, lists, kinds, options, mask.args()));
}

py::bytes row_tiles(const Lengths& lengths, const std::shared_ptr<runtime::Module>& module,
                    PlanOptions options, int32_t tile_q, int32_t tile_kv, py::handle mask_source) {
  const Mask mask(mask_source, options);
  std::vector<RowTile> tiles;
  {
    const py::gil_scoped_release no_gil;
    tiles = make_row_tiles(lengths, module.get(), options, mask.args(), tile_q, tile_kv);
  }
  return to_bytes(tiles);
}

// Copies the bytes of a contiguous buffer as items of type T.
template <class T>
std::vector<T> read_items(const py::buffer& source, const char* name) {
  const py::buffer_info info = source.request();
  int64_t expected_stride = info.itemsize;
  for (py::ssize_t i = info.ndim - 1; i >= 0; --i) {
    if (info.shape[i] > 1 && info.strides[i] != expected_stride) {
      throw py::value_error(std::string(name) + " must be contiguous");
    }
    expected_stride *= info.shape[i];
  }
  const size_t bytes = static_cast<size_t>(info.size) * static_cast<size_t>(info.itemsize);
  if (bytes % sizeof(T) != 0) {
    throw py::value_error(std::string(name) + " has " + std::to_string(bytes) +
                          " bytes, which is not a multiple of the item size " +
                          std::to_string(sizeof(T)));
  }
  std::vector<T> items(bytes / sizeof(T));
  if (bytes > 0) std::memcpy(items.data(), info.ptr, bytes);
  return items;
}

std::shared_ptr<BatchPlan> make_plan_of_work(const py::buffer& work, int kind,
                                             const py::buffer& merge_work,
                                             const std::vector<int32_t>& merge_sources,
                                             int64_t partial_rows) {
  if (kind != 0 && kind != 1) throw py::value_error(kKindRule);
  return std::make_shared<BatchPlan>(plan_of_work(
      kind, read_items<fajit_work>(work, "work"),
      read_items<fajit_merge_work>(merge_work, "merge_work"), merge_sources, partial_rows));
}

int64_t workspace_bound(const Kinds& both_kinds, const PlanOptions& options, int32_t q_block) {
  Kind kinds[2];
  read_kinds(both_kinds, kinds);
  return workspace_bytes(capacity_of(kinds, options, q_block).partial_rows, options.head_dim_v);
}

void bind_plan(py::module_& m) {
  py::class_<PlanOptions>(m, "PlanOptions")
      .def(py::init(&make_options), py::kw_only(), py::arg("num_q_heads"), py::arg("num_kv_heads"),
           py::arg("head_dim_v"), py::arg("few_rows"), py::arg("num_workers"),
           py::arg("share_workers") = false, py::arg("batch_invariant") = false,
           py::arg("split_keys") = std::array<int32_t, 2>{0, 0}, py::arg("merge_ns") = 0.0,
           py::arg("limits") = py::none(), py::arg("num_levels") = 0, py::arg("row_block") = 0,
           py::arg("heads_apart") = false);
  m.def("row_tiles", &row_tiles, py::arg("lengths"), py::arg("module"), py::arg("options"),
        py::kw_only(), py::arg("tile_q"), py::arg("tile_kv"), py::arg("mask") = py::none());
  const auto of_kind = [](auto member) {
    return [member](const BatchPlan& self, int kind) { return kind_at(self, kind).*member; };
  };
  py::class_<BatchPlan, std::shared_ptr<BatchPlan>>(m, "BatchPlan")
      .def(py::init(&make_plan), py::arg("lengths"), py::arg("kinds"), py::arg("options"),
           py::arg("lists") = py::none(), py::arg("mask") = py::none())
      .def_static("of_work", &make_plan_of_work, py::arg("work"), py::kw_only(),
                  py::arg("kind") = 0, py::arg("merge_work") = py::bytes(""),
                  py::arg("merge_sources") = std::vector<int32_t>{}, py::arg("partial_rows") = 0)
      .def_readonly("workspace_bytes", &BatchPlan::workspace_bytes)
      .def_readonly("partial_rows", &BatchPlan::partial_rows)
      .def_readonly("most_splits", &BatchPlan::most_splits)
      .def_property_readonly("num_work",
                             [](const BatchPlan& self) {
                               return self.kinds[0].work.size() + self.kinds[1].work.size();
                             })
      .def_property_readonly("num_merges",
                             [](const BatchPlan& self) { return self.merge_work.size(); })
      .def_readonly("total_ns", &BatchPlan::total_ns)
      .def_readonly("critical_ns", &BatchPlan::critical_ns)
      .def(
          "work",
          [](const BatchPlan& self, int kind) { return to_bytes(kind_at(self, kind).work); },
          py::arg("kind"))
      .def("worker_indptr", of_kind(&KindPlan::worker_indptr), py::arg("kind"))
      .def("load_ns", of_kind(&KindPlan::load_ns), py::arg("kind"))
      .def_property_readonly("merge_work",
                             [](const BatchPlan& self) { return to_bytes(self.merge_work); })
      .def_readonly("merge_sources", &BatchPlan::merge_sources)
      .def_property_readonly(
          "capacity",
          [](const BatchPlan& self) {
            const Capacity& c = self.capacity;
            return py::dict(
                py::arg("requests") = c.requests,
                py::arg("work") = py::make_tuple(c.work[0], c.work[1]),
                py::arg("merge_work") = c.merge_work, py::arg("merge_sources") = c.merge_sources,
                py::arg("row_tokens") = c.row_tokens, py::arg("partial_rows") = c.partial_rows,
                py::arg("max_merge_rows") = c.max_merge_rows);
          })
      .def_static("workspace_bound", &workspace_bound, py::arg("kinds"), py::arg("options"),
                  py::arg("q_block") = 0);
}

}  // namespace

void bind_scheduler(py::module_& m) {
  bind_lengths(m);
  bind_kind(m);
  bind_plan(m);
}

}  // namespace fajit::scheduler
