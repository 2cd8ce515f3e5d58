#include "launch/batch_call.h"

#include "errors.h"
#include "host/cpu_team.h"
#include "python_values.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

constexpr double kRegionNs = 4000.0;  // twice what opening a parallel region costs

// Reads the layout of a block mask: (sizes, strides, q_block, kv_block), sizes and strides each of
// request, head, q block and kv block. Checks that its blocks cover the rows and keys of every
// request.
void read_block_mask(py::handle source, const scheduler::Lengths& lengths, fajit_args& args) {
  const Items items(source, "block_mask");
  if (items.size() != 4) {
    throw py::value_error("block_mask must be (sizes, strides, q_block, kv_block)");
  }
  fajit_block_mask& mask = args.block_mask;
  int64_t sizes[4];
  to_int64s(items[0], 4, sizes, "block_mask sizes");
  to_int64s(items[1], 4, mask.strides, "block_mask strides");
  mask.q_block = narrow(to_int64(items[2], "q_block"), "q_block");
  mask.kv_block = narrow(to_int64(items[3], "kv_block"), "kv_block");
  if (mask.q_block < 1 || mask.kv_block < 1) {
    throw py::value_error("q_block and kv_block must be positive");
  }
  const int64_t needed[2] = {args.num_requests, args.num_q_heads};
  for (int i = 0; i < 4; ++i) {
    if (sizes[i] < 0) throw py::value_error("block_mask sizes must not be negative");
    if (i < 2 && mask.strides[i] != 0 && sizes[i] < needed[i]) {
      throw py::value_error(std::string("block_mask has ") + std::to_string(sizes[i]) +
                            (i == 0 ? " requests, the call " : " heads, the call ") +
                            std::to_string(needed[i]) + ": a broadcast dim has stride 0");
    }
  }
  if (lengths.max_q_len > sizes[2] * mask.q_block ||
      lengths.max_kv_len > sizes[3] * mask.kv_block) {
    throw py::value_error("the block mask covers " + std::to_string(sizes[2] * mask.q_block) +
                          " query rows and " + std::to_string(sizes[3] * mask.kv_block) +
                          " keys, but requests have up to " + std::to_string(lengths.max_q_len) +
                          " and " + std::to_string(lengths.max_kv_len));
  }
}

}  // namespace

BatchCall::BatchCall(std::shared_ptr<const scheduler::BatchPlan> plan,
                     std::shared_ptr<const scheduler::Lengths> lengths, Modules modules,
                     const BatchShape& shape)
    : work_(std::make_shared<BatchWork>(
          std::move(plan), std::move(lengths),
          std::array<bool, 2>{modules[0] != nullptr, modules[1] != nullptr}, shape)),
      modules_(std::move(modules)) {
  if (modules_[0] && modules_[1] && modules_[0]->is_cuda() != modules_[1]->is_cuda()) {
    throw py::value_error("one module has a CUDA target and the other a CPU target");
  }
  if (work_->merges() && !merger())
    throw py::value_error("the plan has merges, but there is no module");
  work_->fill(args_);
  accesses_ = work_->accesses();
}

bool BatchCall::is_cuda() const { return merger() && merger()->is_cuda(); }

std::shared_ptr<BatchCall> BatchCall::bind(py::handle strides, py::handle layouts,
                                           const std::string& scalar_kinds, int32_t num_pages,
                                           int32_t flags, py::handle block_mask,
                                           int32_t kv_requests, int32_t kv_rows) const {
  checked_flags(flags);
  if (num_pages < 0) throw py::value_error("num_pages must not be negative");
  if (kv_requests < 0 || kv_rows < 0) {
    throw py::value_error("kv_requests and kv_rows must not be negative");
  }
  auto call = std::make_shared<BatchCall>(*this);
  call->params_ = ParamLayouts(layouts, scalar_kinds);
  fajit_args& args = call->args_;
  call->params_.fill_counts(args);
  args.flags = flags;
  args.num_pages = num_pages;
  const bool paged = args.page_size > 0;
  args.kv_requests = paged ? num_pages : kv_requests;
  args.kv_rows = paged ? args.page_size : kv_rows;
  const Items items(strides, "strides");
  if (items.size() != 5) {
    throw py::value_error("strides must have 5 entries (q, k, v, out, lse), got " +
                          std::to_string(items.size()));
  }
  to_int64s(items[0], 3, args.q_stride, "strides of q");
  to_int64s(items[1], 3, args.k_stride, "strides of k");
  to_int64s(items[2], 3, args.v_stride, "strides of v");
  to_int64s(items[3], 3, args.out_stride, "strides of out");
  to_int64s(items[4], 3, args.lse_stride, "strides of lse");
  if (!block_mask.is_none()) {
    read_block_mask(block_mask, work_->lengths(), args);
    call->accesses_.states = true;
  }
  return call;
}

void BatchCall::launch_on_cpu(const fajit_args& args) const {
  TeamWork team[2];
  int count = 0;
  for (int kind = 0; kind < 2; ++kind) {
    if (!work_->launches(kind)) continue;
    team[count].module = modules_[kind].get();
    team[count].args = args;
    work_->fill_kind(kind, team[count++].args);
  }
  const double gain = work_->parallel_gain_ns();
  const bool parallel = gain < 0 || gain > kRegionNs;
  int kernel = FAJIT_KERNEL_ATTENTION, status = FAJIT_OK;
  {
    py::gil_scoped_release no_gil;
    status = run_team(team, count, args.num_threads, parallel);
    if (status == FAJIT_OK && args.num_merge_work > 0) {
      kernel = FAJIT_KERNEL_MERGE;
      fajit_args merge = args;
      if (!parallel) merge.num_threads = 1;  // too little work for a parallel region
      status = merger()->merge(merge);
    }
  }
  if (status == FAJIT_OK) return;
  const bool merging = kernel == FAJIT_KERNEL_MERGE;
  check_status(status, merging ? "fajit_merge" : "fajit_attention",
               (merging ? *merger() : *team[0].module).path());
}

void BatchCall::fill_on_device(const LaunchValues& values, const Params& params,
                               OnDevice& on) const {
  fajit_args& args = on.shared = args_;
  fill_values(values, params, accesses_, args);
  if (!work_->launches(0) && !work_->launches(1) && !work_->merges()) return;
  const char* const block = checked_block(values.device_block);
  work_->point(block, args);
  // Plans with limits launch a kernel even without rows or keys for it. Its tensors may be empty,
  // with address 0, which kernels refuse: pass another address, which is not read.
  for (const void** tensor : {&args.q, &args.k, &args.v}) {
    if (*tensor == nullptr) *tensor = block;
  }
  for (int kind = 0; kind < 2; ++kind) {
    if (!work_->launches(kind)) continue;
    on.of_kind[kind] = args;
    work_->point_kind(kind, block, on.of_kind[kind]);
    on.launches.add(modules_[kind], FAJIT_KERNEL_ATTENTION, on.of_kind[kind]);
  }
  if (work_->merges()) on.launches.add(merger(), FAJIT_KERNEL_MERGE, args);
}

void BatchCall::launch(const LaunchValues& values) const {
  const Params params(params_, values.tensors, values.scalars);
  if (!is_cuda()) {
    fajit_args args = args_;
    fill_values(values, params, accesses_, args);
    launch_on_cpu(args);
    return;
  }
  OnDevice on;
  fill_on_device(values, params, on);
  on.launches.run();
}

py::list BatchCall::plan_launches(const LaunchValues& values) const {
  if (!merger()) return py::list();
  require_cuda(*merger());
  const Params params(params_, values.tensors, values.scalars);
  OnDevice on;
  fill_on_device(values, params, on);
  return on.launches.as_data();
}

}  // namespace fajit::runtime
