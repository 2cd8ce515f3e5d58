#include "call.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "errors.h"
#include "launches.h"
#include "python_values.h"
#include "work_checks.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

template <class T>
int64_t bytes_of(const std::vector<T>& items) {
  return static_cast<int64_t>(items.size() * sizeof(T));
}

// A copy of a contiguous buffer seen as items of type T, whatever its item type is.
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
                          " bytes, which is no multiple of the item's " +
                          std::to_string(sizeof(T)));
  }
  std::vector<T> items(bytes / sizeof(T));
  if (bytes > 0) std::memcpy(items.data(), info.ptr, bytes);
  return items;
}

void check_work(const fajit_args& args, const BlockMaskLayout* mask, int64_t partial_rows,
                const std::vector<fajit_work>& work) {
  for (size_t i = 0; i < work.size(); ++i) {
    const fajit_work& item = work[i];
    check_rows(args, item, "work", i);
    const int32_t kv_len = args.kv_len[item.request];
    if (item.kv_begin < 0 || item.kv_end < item.kv_begin || item.kv_end > kv_len) {
      bad_item("work", i,
               range("keys", item.kv_begin, item.kv_end) + " of kv_len=" + std::to_string(kv_len));
    }
    const int64_t rows = item.row_end - item.row_begin;
    if (item.partial != -1) {
      check_partial_rows(item.partial, item.partial + rows, partial_rows, "work", i);
    }
    if (mask != nullptr && rows > 0) {
      const int64_t last_row = (item.row_end - 1) / item.head_count;
      if (last_row >= mask->sizes[2] * mask->q_block ||
          item.kv_end > mask->sizes[3] * mask->kv_block) {
        bad_item("work", i,
                 "it lies outside the block mask, which covers " +
                     std::to_string(mask->sizes[2] * mask->q_block) + " query rows and " +
                     std::to_string(mask->sizes[3] * mask->kv_block) + " keys");
      }
    }
  }
}

void check_merge_work(const fajit_args& args, int64_t partial_rows,
                      const std::vector<fajit_merge_work>& work) {
  for (size_t i = 0; i < work.size(); ++i) {
    const fajit_merge_work& item = work[i];
    check_rows(args, item, "merge_work", i);
    const int64_t rows = item.row_end - item.row_begin;
    const int64_t end = item.first_partial + rows * item.num_splits;
    // No splits are padding of plans with limits, which a call has not.
    const int64_t begin = item.num_splits < 1 ? -1 : item.first_partial;
    check_partial_rows(begin, end, partial_rows, "merge_work", i);
  }
}

}  // namespace

Call::Call(std::shared_ptr<const Module> module, std::shared_ptr<const Problem> problem,
           const py::buffer& work, const py::buffer& merge_work, int64_t partial_rows,
           int32_t flags)
    : module_(std::move(module)),
      problem_(std::move(problem)),
      work_(read_items<fajit_work>(work, "work")),
      merge_work_(read_items<fajit_merge_work>(merge_work, "merge_work")),
      args_(problem_->args()) {
  if ((flags & ~(FAJIT_WRITE_LSE | FAJIT_PARTIAL)) != 0) {
    throw py::value_error("flags=" + std::to_string(flags) + " has unknown bits");
  }
  if (partial_rows < 0 || partial_rows > INT32_MAX) {
    throw py::value_error("partial_rows=" + std::to_string(partial_rows) + " is out of range");
  }
  check_work(args_, problem_->block_mask(), partial_rows, work_);
  check_merge_work(args_, partial_rows, merge_work_);
  for (const fajit_work& item : work_) {
    reads_queries_ |= item.row_end > item.row_begin;
    reads_keys_ |= item.row_end > item.row_begin && item.kv_end > item.kv_begin;
    writes_out_ |= item.row_end > item.row_begin && item.partial < 0;
  }
  for (const fajit_merge_work& item : merge_work_) writes_out_ |= item.row_end > item.row_begin;

  args_.flags = flags;
  args_.work = work_.data();
  args_.merge_work = merge_work_.data();
  args_.num_work = narrow(static_cast<int64_t>(work_.size()), "num_work");
  args_.num_merge_work = narrow(static_cast<int64_t>(merge_work_.size()), "num_merge_work");
  workspace_ = WorkspaceLayout(partial_rows, args_.head_dim_v);
  for (const fajit_merge_work& item : merge_work_) {
    args_.max_merge_rows = std::max(args_.max_merge_rows, item.row_end - item.row_begin);
  }
  sections_ = sections();
}

Call::Sections Call::sections() const {
  Sections s{};
  SectionPlacer at;
  const int64_t requests = args_.num_requests;
  for (int64_t& section : s.per_request) section = at.place(requests * int64_t{sizeof(int32_t)});
  s.page_indptr = at.place(problem_->is_paged() ? (requests + 1) * int64_t{sizeof(int32_t)} : 0);
  s.row_request = at.place(bytes_of(problem_->row_request()));
  s.work = at.place(bytes_of(work_));
  s.merge_work = at.place(bytes_of(merge_work_));
  s.bytes = at.end();
  return s;
}

py::bytes Call::device_block() const {
  const Sections& s = sections_;
  std::string block(static_cast<size_t>(s.bytes), '\0');
  const auto put = [&](int64_t begin, const void* source, int64_t bytes) {
    put_section(block.data(), begin, source, bytes);
  };
  const int64_t requests = args_.num_requests;
  const int32_t* const arrays[] = {args_.q_len,    args_.kv_len,   args_.q_row0,   args_.kv_row0,
                                   args_.q_offset, args_.q_token0, args_.kv_token0};
  for (size_t i = 0; i < std::size(arrays); ++i) {
    put(s.per_request[i], arrays[i], requests * int64_t{sizeof(int32_t)});
  }
  if (problem_->is_paged()) {
    put(s.page_indptr, args_.page_indptr, (requests + 1) * int64_t{sizeof(int32_t)});
  }
  put(s.row_request, problem_->row_request().data(), bytes_of(problem_->row_request()));
  put(s.work, work_.data(), bytes_of(work_));
  put(s.merge_work, merge_work_.data(), bytes_of(merge_work_));
  return py::bytes(block);
}

void Call::fill(const LaunchValues& values, const Params& params, fajit_args& args) const {
  params.fill(args);
  args.q = to_address(values.q);
  args.k = to_address(values.k);
  args.v = to_address(values.v);
  args.out = to_address(values.out);
  args.lse = static_cast<float*>(to_address(values.lse));
  args.scale = static_cast<float>(values.scale);
  args.num_threads = values.num_threads;
  args.block_mask.states = static_cast<const uint8_t*>(to_address(values.states));
  args.page_indices = static_cast<const int32_t*>(to_address(values.page_indices));
  args.stream = to_address(values.stream);
  args.device = values.device;
  char* const space = static_cast<char*>(to_address(values.workspace));

  if (args.num_threads < 1) {
    throw py::value_error("num_threads=" + std::to_string(args.num_threads) + " must be positive");
  }
  if (reads_queries_) require(args.q, "q");
  if (reads_keys_) {
    require(args.k, "k");
    require(args.v, "v");
    if (problem_->block_mask() != nullptr) require(args.block_mask.states, "states");
    if (problem_->is_paged()) require(args.page_indices, "page_indices");
  }
  if (writes_out_) {
    require(args.out, "out");
    if (args.flags & FAJIT_WRITE_LSE) require(args.lse, "lse");
  }
  if (!(args.flags & FAJIT_WRITE_LSE)) args.lse = nullptr;
  if (workspace_.bytes > 0) {
    require(space, "workspace");
    args.partial_out = reinterpret_cast<float*>(space);
    args.partial_lse = reinterpret_cast<float*>(space + workspace_.lse_begin);
  }
  if (!module_->is_cuda()) return;

  if (args.num_work == 0) return;
  const char* const block = checked_block(values.device_block);
  const auto ints = [&](int64_t begin) { return reinterpret_cast<const int32_t*>(block + begin); };
  const Sections& s = sections_;
  args.q_len = ints(s.per_request[0]);
  args.kv_len = ints(s.per_request[1]);
  args.q_row0 = ints(s.per_request[2]);
  args.kv_row0 = ints(s.per_request[3]);
  args.q_offset = ints(s.per_request[4]);
  args.q_token0 = ints(s.per_request[5]);
  args.kv_token0 = ints(s.per_request[6]);
  if (args.page_indptr != nullptr) args.page_indptr = ints(s.page_indptr);
  if (args.row_request != nullptr) args.row_request = ints(s.row_request);
  args.work = reinterpret_cast<const fajit_work*>(block + s.work);
  args.merge_work = reinterpret_cast<const fajit_merge_work*>(block + s.merge_work);
}

void Call::launch(const LaunchValues& values) const {
  fajit_args args = args_;
  const Params params(problem_->params(), values.tensors, values.scalars);
  fill(values, params, args);
  int kernel = FAJIT_KERNEL_ATTENTION, status = FAJIT_OK;
  {
    py::gil_scoped_release no_gil;
    if (args.num_work > 0) status = module_->attention(args);
    if (status == FAJIT_OK && args.num_merge_work > 0) {
      kernel = FAJIT_KERNEL_MERGE;
      status = module_->merge(args);
    }
  }
  if (status != FAJIT_OK) check_launch(*module_, args, kernel, status);
}

py::list Call::plan_launches(const LaunchValues& values) const {
  if (!module_->is_cuda()) {
    throw py::value_error("artifact " + module_->path() + " is of no CUDA target");
  }
  fajit_args args = args_;
  const Params params(problem_->params(), values.tensors, values.scalars);
  fill(values, params, args);
  py::list launches;
  const auto plan = [&](int kernel) { launches.append(launch_as_data(*module_, args, kernel)); };
  if (args.num_work > 0) plan(FAJIT_KERNEL_ATTENTION);
  if (args.num_merge_work > 0) plan(FAJIT_KERNEL_MERGE);
  return launches;
}

void classify(const Module& module, const Problem& problem, int32_t request, int32_t head_begin,
              int32_t head_end, int32_t q_begin, int32_t q_end, int32_t tile_q, int32_t kv_begin,
              int32_t kv_end, int32_t tile_kv, const py::buffer& states, py::handle tensors,
              py::handle scalars) {
  fajit_args args = problem.args();
  const Params params(problem.params(), tensors, scalars);
  params.fill(args);
  if (request < 0 || request >= args.num_requests) {
    throw py::value_error("request " + std::to_string(request) +
                          " of num_requests=" + std::to_string(args.num_requests));
  }
  if (head_begin < 0 || head_end <= head_begin || head_end > args.num_q_heads) {
    throw py::value_error(range("heads", head_begin, head_end) +
                          " of num_q_heads=" + std::to_string(args.num_q_heads));
  }
  if (q_end < q_begin || kv_begin < 0 || kv_end < kv_begin || tile_q < 1 || tile_kv < 1) {
    throw py::value_error("classify needs " + range("q_idx", q_begin, q_end) + " and " +
                          range("kv_idx", kv_begin, kv_end) + " in order, and positive tiles");
  }
  const auto tiles = [](int64_t begin, int64_t end, int64_t tile) {
    return (end - begin + tile - 1) / tile;
  };
  const int64_t count = tiles(q_begin, q_end, tile_q) * tiles(kv_begin, kv_end, tile_kv);
  const py::buffer_info info = states.request(/*writable=*/true);
  if (info.itemsize != 1 || info.size < count ||
      (info.ndim == 1 && info.size > 1 && info.strides[0] != 1) || info.ndim != 1) {
    throw py::value_error("states must be a contiguous 1-d uint8 buffer of at least " +
                          std::to_string(count) + " entries");
  }
  const fajit_classify_args classify_args{&args,
                                          request,
                                          head_begin,
                                          head_end,
                                          q_begin,
                                          q_end,
                                          tile_q,
                                          kv_begin,
                                          kv_end,
                                          tile_kv,
                                          static_cast<uint8_t*>(info.ptr)};
  int status = FAJIT_OK;
  if (count > 0) {
    py::gil_scoped_release no_gil;
    status = module.classify(classify_args);
  }
  check_status(status, "fajit_classify", module.path());
}

}  // namespace fajit::runtime
