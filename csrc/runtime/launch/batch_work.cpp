#include "launch/batch_work.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "launch/work_checks.h"
#include "python_values.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

constexpr const char* kKindNames[2] = {"prefill work", "few-row work"};

int64_t count_of(size_t size) { return static_cast<int64_t>(size); }

void require_fit(int64_t count, int64_t most, const char* name) {
  if (count > most) {
    throw py::value_error("the plan has " + std::to_string(count) + " " + name + ", but " +
                          std::to_string(most) + " are the most that its limits allow");
  }
}

}  // namespace

BatchWork::BatchWork(std::shared_ptr<const scheduler::BatchPlan> plan,
                     std::shared_ptr<const scheduler::Lengths> lengths,
                     const std::array<bool, 2>& has_kind, const BatchShape& shape)
    : plan_(std::move(plan)), lengths_(std::move(lengths)), shape_(shape) {
  check_shape();
  for (int kind = 0; kind < 2; ++kind) {
    const bool has_work = !plan_->kinds[kind].work.empty();
    if (has_work && !has_kind[kind]) {
      throw py::value_error(std::string("the plan has ") + kKindNames[kind] +
                            ", but there is no module for it");
    }
    // Under limits the launch may be captured in a graph and replayed for plans that have such
    // work.
    launches_[kind] =
        has_kind[kind] && (has_work || (plan_->has_limits && plan_->capacity.work[kind] > 0));
  }
  const scheduler::Lengths& n = *lengths_;
  has_first_keys_ = std::any_of(n.kv_first.begin(), n.kv_first.end(), [](int x) { return x != 0; });
  sizes_ = with_room(planned());
  fajit_args args{};
  fill(args);
  for (int kind = 0; kind < 2; ++kind) check_lists(kind);
  if (is_of_these_lengths()) {
    // The scheduler made the work from these objects, which are immutable: no check is needed.
    const bool has_work = !plan_->kinds[0].work.empty() || !plan_->kinds[1].work.empty();
    accesses_.queries = accesses_.out = has_work;
    accesses_.keys = has_work && (has_lists() ? shape_.num_key_blocks > 0 : n.max_kv_len > 0);
  } else {
    for (int kind = 0; kind < 2; ++kind) check_kind(kind, args);
    check_merges(args);
  }
  accesses_.pages = is_paged();
  accesses_.key_lists = has_lists();
  accesses_.workspace = WorkspaceLayout(sizes_.partial_rows, shape_.head_dim_v);
  block_ = PlanBlock(sizes_);
}

void BatchWork::check_shape() const {
  check_dims(shape_.num_q_heads, shape_.num_kv_heads, shape_.head_dim, shape_.head_dim_v);
  if (shape_.key_block < 0 || shape_.num_key_blocks < 0) {
    throw py::value_error("key_block and num_key_blocks must not be negative");
  }
}

BatchWork::Sizes BatchWork::planned() const {
  const scheduler::Lengths& n = *lengths_;
  const scheduler::BatchPlan& p = *plan_;
  Sizes s{};
  s.requests = int64_t{n.num_requests} + n.num_groups;
  s.first_keys = has_first_keys_ ? s.requests : 0;
  s.page_indptr = is_paged() ? s.requests + 1 : 0;
  s.row_requests = count_of(n.row_request.size());
  s.row_tokens = count_of(n.row_token.size());
  for (int kind = 0; kind < 2; ++kind) {
    s.work[kind] = count_of(p.kinds[kind].work.size());
    s.workers[kind] = std::max<int64_t>(count_of(p.kinds[kind].worker_indptr.size()) - 1, 0);
  }
  s.merge_work = count_of(p.merge_work.size());
  s.merge_sources = count_of(p.merge_sources.size());
  s.partial_rows = p.partial_rows;
  s.max_merge_rows = p.max_merge_rows;
  if (s.partial_rows < 0 || s.partial_rows > INT32_MAX) {
    throw py::value_error("the plan has " + std::to_string(s.partial_rows) +
                          " partial rows, which does not fit 32 bits");
  }
  return s;
}

BatchWork::Sizes BatchWork::with_room(const Sizes& planned) const {
  Sizes s = planned;
  for (int kind = 0; kind < 2; ++kind) {
    if (!launches_[kind]) s.work[kind] = s.workers[kind] = 0;
  }
  s.first_keys = s.requests;
  if (!plan_->has_limits) return s;

  const scheduler::Capacity& most = plan_->capacity;
  require_fit(s.requests, most.requests, "requests");
  require_fit(s.row_tokens, most.row_tokens, "rows of groups");
  require_fit(s.row_requests, std::max(most.row_tokens, s.row_tokens), "tokens");
  for (int kind = 0; kind < 2; ++kind) {
    if (launches_[kind]) require_fit(s.work[kind], most.work[kind], "items of work");
  }
  require_fit(s.merge_work, most.merge_work, "merges");
  require_fit(s.merge_sources, most.merge_sources, "sources of merges");
  require_fit(s.partial_rows, most.partial_rows, "partial rows");
  require_fit(s.max_merge_rows, most.max_merge_rows, "rows of a merge");
  s.requests = s.first_keys = most.requests;
  s.page_indptr = is_paged() ? s.requests + 1 : 0;
  s.row_tokens = s.row_requests = most.row_tokens;
  for (int kind = 0; kind < 2; ++kind) {
    if (launches_[kind]) s.work[kind] = most.work[kind];
  }
  s.merge_work = most.merge_work;
  s.merge_sources = most.merge_sources;
  s.partial_rows = most.partial_rows;
  s.max_merge_rows = most.max_merge_rows;
  return s;
}

bool BatchWork::is_of_these_lengths() const {
  const scheduler::BatchPlan& p = *plan_;
  return p.lengths_id == lengths_->id && p.num_q_heads == shape_.num_q_heads &&
         p.num_kv_heads == shape_.num_kv_heads && p.key_block == shape_.key_block &&
         p.num_key_blocks == shape_.num_key_blocks;
}

void BatchWork::check_lists(int kind) const {
  const scheduler::KindPlan& planned = plan_->kinds[kind];
  const std::vector<int32_t>& indptr = planned.worker_indptr;
  const char* const name = kKindNames[kind];
  const int64_t num_work = count_of(planned.work.size());
  if (num_work > INT32_MAX) throw py::value_error(std::string(name) + " does not fit 32 bits");
  if (launches_[kind] && (indptr.size() < 2 || indptr.front() != 0 || indptr.back() != num_work ||
                          !std::is_sorted(indptr.begin(), indptr.end()))) {
    throw py::value_error(std::string(name) + " is not divided among workers");
  }
}

void BatchWork::check_kind(int kind, const fajit_args& args) {
  const scheduler::KindPlan& planned = plan_->kinds[kind];
  const char* const name = kKindNames[kind];
  const int64_t listed = int64_t{shape_.num_key_blocks} * shape_.key_block;
  for (size_t i = 0; i < planned.work.size(); ++i) {
    const fajit_work& item = planned.work[i];
    check_rows(args, item, name, i);
    const size_t request = static_cast<size_t>(item.request);
    const int64_t first =
        has_lists() || lengths_->kv_first.empty() ? 0 : lengths_->kv_first[request];
    const int64_t end = has_lists() ? listed : lengths_->kv_len[request];
    const bool none = item.kv_begin == item.kv_end;  // rows that see no key
    if (item.kv_end < item.kv_begin || item.kv_begin < 0 ||
        (!none && (item.kv_begin < first || item.kv_end > end))) {
      bad_item(name, i,
               range("keys", item.kv_begin, item.kv_end) + " of " + range("keys", first, end));
    }
    const int64_t rows = item.row_end - item.row_begin;
    if (item.partial != -1) {
      check_partial_rows(item.partial, item.partial + rows, plan_->partial_rows, name, i);
    }
    accesses_.add(item);
  }
}

void BatchWork::check_merges(const fajit_args& args) {
  const char* const name = "merge work";
  const std::vector<int32_t>& sources = plan_->merge_sources;
  for (size_t i = 0; i < plan_->merge_work.size(); ++i) {
    const fajit_merge_work& item = plan_->merge_work[i];
    check_rows(args, item, name, i);
    const int64_t rows = item.row_end - item.row_begin;
    const int64_t first = item.first_partial, splits = item.num_splits;
    if (splits < 1) bad_item(name, i, "it has no splits");
    if (rows > sizes_.max_merge_rows) {
      bad_item(name, i,
               std::to_string(rows) +
                   " rows, more than max_merge_rows=" + std::to_string(sizes_.max_merge_rows));
    }
    accesses_.add(item);
    if (sizes_.merge_sources == 0) {
      check_partial_rows(first, first + rows * splits, plan_->partial_rows, name, i);
      continue;
    }
    if (first < 0 || first + splits > count_of(sources.size())) {
      bad_item(name, i,
               range("sources", first, first + splits) + " of " + std::to_string(sources.size()));
    }
    for (int64_t s = first; s < first + splits; ++s) {
      const int64_t source = sources[static_cast<size_t>(s)];
      check_partial_rows(source, source + rows, plan_->partial_rows, name, i);
    }
  }
}

double BatchWork::parallel_gain_ns() const {
  return plan_->total_ns > 0 ? plan_->total_ns - plan_->critical_ns : -1.0;
}

void BatchWork::fill(fajit_args& args) const {
  const scheduler::Lengths& n = *lengths_;
  args.abi_version = FAJIT_ABI_VERSION;
  args.args_bytes = sizeof(fajit_args);
  args.num_requests = n.num_requests + n.num_groups;
  args.num_q_heads = shape_.num_q_heads;
  args.num_kv_heads = shape_.num_kv_heads;
  args.head_dim = shape_.head_dim;
  args.head_dim_v = shape_.head_dim_v;
  n.fill(args);
  args.kv_first = has_first_keys_ ? n.kv_first.data() : nullptr;
  args.page_size = n.page_size;
  args.page_indptr = is_paged() ? n.page_indptr.data() : nullptr;
  args.row_request = n.row_request.empty() ? nullptr : n.row_request.data();
  args.row_token = n.row_token.empty() ? nullptr : n.row_token.data();
  args.key_block = shape_.key_block;
  args.num_key_blocks = shape_.num_key_blocks;
  args.merge_work = plan_->merge_work.data();
  args.num_merge_work = static_cast<int32_t>(plan_->merge_work.size());
  args.merge_sources = sizes_.merge_sources > 0 ? plan_->merge_sources.data() : nullptr;
  args.max_merge_rows = plan_->max_merge_rows;
}

void BatchWork::fill_kind(int kind, fajit_args& args) const {
  const scheduler::KindPlan& planned = plan_->kinds[kind];
  args.work = planned.work.data();
  args.num_work = static_cast<int32_t>(planned.work.size());
  args.worker_indptr = planned.worker_indptr.data();
  args.num_workers = static_cast<int32_t>(sizes_.workers[kind]);
}

void BatchWork::write_block(char* block) const {
  const scheduler::Lengths& n = *lengths_;
  fajit_args host{};
  fill(host);
  PlanSizes filled = planned();
  std::vector<int32_t> requests, tokens;
  if (sizes_.row_tokens > 0) {
    // Kernels of plans that may have groups read every row through these arrays.
    if (host.row_request == nullptr) {
      for (int32_t b = 0; b < n.num_requests; ++b) {
        requests.insert(requests.end(), static_cast<size_t>(n.q_len[static_cast<size_t>(b)]), b);
      }
      host.row_request = requests.data();
      filled.row_requests = count_of(requests.size());
    }
    if (host.row_token == nullptr) {
      tokens.resize(static_cast<size_t>(filled.row_requests));
      std::iota(tokens.begin(), tokens.end(), 0);
      host.row_token = tokens.data();
      filled.row_tokens = filled.row_requests;
    }
  }
  block_.write(block, host, filled);
  for (int kind = 0; kind < 2; ++kind) {
    if (!launches_[kind]) continue;
    fill_kind(kind, host);
    block_.write_kind(kind, block, host);
  }
}

void BatchWork::point(const char* block, fajit_args& args) const {
  block_.point(block, args);
  // A captured launch also runs later plans, which may have first keys.
  const bool may_have_groups = plan_->has_limits && sizes_.row_tokens > 0;
  if (!has_first_keys_ && !may_have_groups) args.kv_first = nullptr;
  args.max_merge_rows = sizes_.max_merge_rows;
}

}  // namespace fajit::runtime
