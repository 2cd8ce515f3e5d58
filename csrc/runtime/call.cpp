#include "call.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "errors.h"
#include "fork_guard.h"
#include "python_values.h"
#include "work_checks.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

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
  args_.flags = checked_flags(flags);
  if (partial_rows < 0 || partial_rows > INT32_MAX) {
    throw py::value_error("partial_rows=" + std::to_string(partial_rows) + " is out of range");
  }
  check_work(args_, problem_->block_mask(), partial_rows, work_);
  check_merge_work(args_, partial_rows, merge_work_);
  for (const fajit_work& item : work_) accesses_.add(item);
  for (const fajit_merge_work& item : merge_work_) {
    accesses_.add(item);
    args_.max_merge_rows = std::max(args_.max_merge_rows, item.row_end - item.row_begin);
  }
  accesses_.states = problem_->block_mask() != nullptr;
  accesses_.pages = problem_->is_paged();
  accesses_.workspace = WorkspaceLayout(partial_rows, args_.head_dim_v);
  args_.work = work_.data();
  args_.merge_work = merge_work_.data();
  args_.num_work = narrow(static_cast<int64_t>(work_.size()), "num_work");
  args_.num_merge_work = narrow(static_cast<int64_t>(merge_work_.size()), "num_merge_work");
  block_ = PlanBlock(sizes());
}

PlanSizes Call::sizes() const {
  PlanSizes sizes;
  sizes.requests = args_.num_requests;
  sizes.page_indptr = problem_->is_paged() ? sizes.requests + 1 : 0;
  sizes.row_requests = static_cast<int64_t>(problem_->row_request().size());
  sizes.work[0] = args_.num_work;
  sizes.merge_work = args_.num_merge_work;
  return sizes;
}

py::bytes Call::device_block() const {
  std::string block(static_cast<size_t>(block_.bytes()), '\0');
  block_.write(block.data(), args_, sizes());
  block_.write_kind(0, block.data(), args_);
  return py::bytes(block);
}

void Call::fill(const LaunchValues& values, const Params& params, fajit_args& args) const {
  fill_values(values, params, accesses_, args);
  if (!module_->is_cuda() || args.num_work == 0) return;
  const char* const block = checked_block(values.device_block);
  block_.point(block, args);
  block_.point_kind(0, block, args);
}

Launches Call::launches(const fajit_args& args) const {
  Launches all;
  if (args.num_work > 0) all.add(module_, FAJIT_KERNEL_ATTENTION, args);
  if (args.num_merge_work > 0) all.add(module_, FAJIT_KERNEL_MERGE, args);
  return all;
}

void Call::launch(const LaunchValues& values) const {
  fajit_args args = args_;
  const Params params(problem_->params(), values.tensors, values.scalars);
  fill(values, params, args);
  // Splits are merged by as many threads as computed them, so this is the merge's region too.
  if (!module_->is_cuda() && args.num_threads > 1 && args.num_work > 1) before_parallel_region();
  launches(args).run();
}

py::list Call::plan_launches(const LaunchValues& values) const {
  require_cuda(*module_);
  fajit_args args = args_;
  const Params params(problem_->params(), values.tensors, values.scalars);
  fill(values, params, args);
  return launches(args).as_data();
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
