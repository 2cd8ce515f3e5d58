#include "batch_call.h"

#include "cpu_team.h"
#include "errors.h"
#include "launches.h"
#include "python_values.h"
#include "work_checks.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

constexpr double kRegionNs = 4000.0;  // twice what opening a parallel region costs

}  // namespace

BatchCall::BatchCall(std::shared_ptr<const scheduler::BatchPlan> plan,
                     std::shared_ptr<const scheduler::Lengths> lengths, Modules modules,
                     const BatchShape& shape)
    : work_(std::make_shared<BatchWork>(
          std::move(plan), std::move(lengths),
          std::array<bool, 2>{modules[0] != nullptr, modules[1] != nullptr}, shape)),
      modules_(std::move(modules)) {
  if (modules_[0] && modules_[1] && modules_[0]->is_cuda() != modules_[1]->is_cuda()) {
    throw py::value_error("the modules are of a CUDA target and of a CPU target");
  }
  if (work_->merges() && !merger()) throw py::value_error("the plan has merges, but no module");
  work_->fill(args_);
}

bool BatchCall::is_cuda() const { return merger() && merger()->is_cuda(); }

std::shared_ptr<BatchCall> BatchCall::bind(py::handle strides, py::handle layouts,
                                           const std::string& scalar_kinds, int32_t num_pages,
                                           int32_t flags) const {
  if ((flags & ~(FAJIT_WRITE_LSE | FAJIT_PARTIAL)) != 0) {
    throw py::value_error("flags=" + std::to_string(flags) + " has unknown bits");
  }
  if (num_pages < 0) throw py::value_error("num_pages must not be negative");
  auto call = std::make_shared<BatchCall>(*this);
  call->params_ = ParamLayouts(layouts, scalar_kinds);
  fajit_args& args = call->args_;
  call->params_.fill_counts(args);
  args.flags = flags;
  args.num_pages = num_pages;
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
  return call;
}

void BatchCall::fill(const BatchValues& values, const Params& params, fajit_args& args) const {
  params.fill(args);
  args.q = to_address(values.q);
  args.k = to_address(values.k);
  args.v = to_address(values.v);
  args.out = to_address(values.out);
  args.lse = static_cast<float*>(to_address(values.lse));
  args.scale = static_cast<float>(values.scale);
  args.num_threads = values.num_threads;
  args.page_indices = static_cast<const int32_t*>(to_address(values.page_indices));
  args.key_blocks = static_cast<const int32_t*>(to_address(values.key_blocks));
  args.stream = to_address(values.stream);
  args.device = values.device;
  char* const space = static_cast<char*>(to_address(values.workspace));

  if (args.num_threads < 1) {
    throw py::value_error("num_threads=" + std::to_string(args.num_threads) + " must be positive");
  }
  if (work_->reads_queries()) require(args.q, "q");
  if (work_->reads_keys()) {
    require(args.k, "k");
    require(args.v, "v");
    if (work_->is_paged()) require(args.page_indices, "page_indices");
    if (work_->has_lists()) require(args.key_blocks, "key_blocks");
  }
  if (work_->writes_out()) {
    require(args.out, "out");
    if (args.flags & FAJIT_WRITE_LSE) require(args.lse, "lse");
  }
  if (!(args.flags & FAJIT_WRITE_LSE)) args.lse = nullptr;
  if (work_->workspace().bytes > 0) {
    require(space, "workspace");
    args.partial_out = reinterpret_cast<float*>(space);
    args.partial_lse = reinterpret_cast<float*>(space + work_->workspace().lse_begin);
  }
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
      status = merger()->merge(args);
    }
  }
  if (status == FAJIT_OK) return;
  const bool merging = kernel == FAJIT_KERNEL_MERGE;
  check_launch(merging ? *merger() : *team[0].module, args, kernel, status);
}

struct BatchCall::Launches {
  struct One {
    const std::shared_ptr<const Module>* module;
    int kernel;
    fajit_args args;
  };
  One all[3];
  int count = 0;
};

BatchCall::Launches BatchCall::launches(const BatchValues& values, const Params& params) const {
  Launches result;
  fajit_args args = args_;
  fill(values, params, args);
  if (!work_->launches(0) && !work_->launches(1) && !work_->merges()) return result;
  const char* const block = checked_block(values.device_block);
  work_->fill_on_device(block, args);
  // Launches that a plan has no rows or keys for are made all the same under limits. Their tensors
  // may be empty, at address 0, which kernels refuse; nothing is read there.
  for (const void** tensor : {&args.q, &args.k, &args.v}) {
    if (*tensor == nullptr) *tensor = block;
  }
  for (int kind = 0; kind < 2; ++kind) {
    if (!work_->launches(kind)) continue;
    Launches::One& one = result.all[result.count++];
    one = {&modules_[kind], FAJIT_KERNEL_ATTENTION, args};
    work_->fill_kind_on_device(kind, block, one.args);
  }
  if (work_->merges()) result.all[result.count++] = {&merger(), FAJIT_KERNEL_MERGE, args};
  return result;
}

void BatchCall::launch(const BatchValues& values) const {
  const Params params(params_, values.tensors, values.scalars);
  if (!is_cuda()) {
    fajit_args args = args_;
    fill(values, params, args);
    launch_on_cpu(args);
    return;
  }
  const Launches planned = launches(values, params);
  const Launches::One* failed = nullptr;
  int status = FAJIT_OK;
  {
    py::gil_scoped_release no_gil;
    for (int i = 0; i < planned.count && status == FAJIT_OK; ++i) {
      const Launches::One& one = planned.all[i];
      const Module& module = **one.module;
      status =
          one.kernel == FAJIT_KERNEL_MERGE ? module.merge(one.args) : module.attention(one.args);
      failed = &one;
    }
  }
  if (status != FAJIT_OK) check_launch(**failed->module, failed->args, failed->kernel, status);
}

py::list BatchCall::plan_launches(const BatchValues& values) const {
  py::list result;
  if (!merger()) return result;
  if (!is_cuda()) {
    throw py::value_error("artifact " + merger()->path() + " is of no CUDA target");
  }
  const Params params(params_, values.tensors, values.scalars);
  const Launches planned = launches(values, params);
  for (int i = 0; i < planned.count; ++i) {
    const Launches::One& one = planned.all[i];
    const auto module = std::const_pointer_cast<Module>(*one.module);
    result.append(py::make_tuple(module, launch_as_data(*module, one.args, one.kernel)));
  }
  return result;
}

}  // namespace fajit::runtime
