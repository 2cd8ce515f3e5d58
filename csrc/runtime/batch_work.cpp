#include "batch_work.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "python_values.h"
#include "work_checks.h"

namespace py = pybind11;

namespace fajit::runtime {
namespace {

constexpr const char* kKindNames[2] = {"prefill work", "few-row work"};

int64_t count_of(size_t size) { return static_cast<int64_t>(size); }

void require_positive(int32_t value, const char* name) {
  if (value < 1) {
    throw py::value_error(std::string(name) + "=" + std::to_string(value) + " must be positive");
  }
}

void require_fit(int64_t count, int64_t most, const char* name) {
  if (count > most) {
    throw py::value_error("the plan has " + std::to_string(count) + " " + name + ", but " +
                          std::to_string(most) + " are the most within its limits");
  }
}

// Writes `count` values at a section, repeats `padding` up to `size`, and zeroes what is left of
// its last 16 bytes: a block's bytes follow from its plan alone.
template <class T>
void put_all(char* block, int64_t begin, const T* values, int64_t count, int64_t size,
             const T& padding) {
  constexpr int64_t kBytes = sizeof(T);
  put_section(block, begin, values, std::min(count, size) * kBytes);
  for (int64_t i = count; i < size; ++i) put_section(block, begin + i * kBytes, &padding, kBytes);
  const int64_t end = begin + size * kBytes;
  std::memset(block + end, 0, static_cast<size_t>(round_up(end, kSectionAlignment) - end));
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
                            ", but no module for it");
    }
    // A captured launch is replayed for plans that have such work.
    launches_[kind] =
        has_kind[kind] && (has_work || (plan_->has_limits && plan_->capacity.work[kind] > 0));
  }
  const scheduler::Lengths& n = *lengths_;
  has_first_keys_ = std::any_of(n.kv_first.begin(), n.kv_first.end(), [](int x) { return x != 0; });
  sizes_ = sizes();
  fajit_args args{};
  fill(args);
  for (int kind = 0; kind < 2; ++kind) check_lists(kind);
  if (is_of_these_lengths()) {
    // The scheduler made the work of these very objects, which do not change.
    const bool has_work = !plan_->kinds[0].work.empty() || !plan_->kinds[1].work.empty();
    reads_queries_ = writes_out_ = has_work;
    reads_keys_ = has_work && (has_lists() ? shape_.num_key_blocks > 0 : n.max_kv_len > 0);
  } else {
    for (int kind = 0; kind < 2; ++kind) check_kind(kind, args);
    check_merges(args);
  }
  workspace_ = WorkspaceLayout(sizes_.partial_rows, shape_.head_dim_v);
  sections_ = sections();
}

void BatchWork::check_shape() const {
  require_positive(shape_.num_q_heads, "num_q_heads");
  require_positive(shape_.num_kv_heads, "num_kv_heads");
  require_positive(shape_.head_dim, "head_dim");
  require_positive(shape_.head_dim_v, "head_dim_v");
  if (shape_.num_q_heads % shape_.num_kv_heads != 0) {
    throw py::value_error("num_kv_heads=" + std::to_string(shape_.num_kv_heads) +
                          " does not divide num_q_heads=" + std::to_string(shape_.num_q_heads));
  }
  if (shape_.key_block < 0 || shape_.num_key_blocks < 0) {
    throw py::value_error("key_block and num_key_blocks must not be negative");
  }
}

BatchWork::Sizes BatchWork::sizes() const {
  const scheduler::Lengths& n = *lengths_;
  const scheduler::BatchPlan& p = *plan_;
  Sizes s{};
  s.requests = int64_t{n.num_requests} + n.num_groups;
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
                          " partial rows, more than 32 bits number");
  }
  if (!p.has_limits) return s;

  const scheduler::Capacity& most = p.capacity;
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
  s.requests = most.requests;
  s.row_tokens = s.row_requests = most.row_tokens;
  for (int kind = 0; kind < 2; ++kind) s.work[kind] = most.work[kind];
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
    reads_queries_ |= rows > 0;
    reads_keys_ |= rows > 0 && !none;
    writes_out_ |= rows > 0 && item.partial < 0;
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
    writes_out_ |= rows > 0;
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
  args.q_len = n.q_len.data();
  args.kv_len = n.kv_len.data();
  args.q_row0 = n.q_row0.data();
  args.kv_row0 = n.kv_row0.data();
  args.q_offset = n.q_offset.data();
  args.q_token0 = n.q_token0.data();
  args.kv_token0 = n.kv_token0.data();
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

BatchWork::Sections BatchWork::sections() const {
  constexpr int64_t kInt = sizeof(int32_t);
  Sections s{};
  SectionPlacer at;
  for (int64_t& section : s.per_request) section = at.place(sizes_.requests * kInt);
  s.page_indptr = at.place(is_paged() ? (sizes_.requests + 1) * kInt : 0);
  s.row_request = at.place(sizes_.row_requests * kInt);
  s.row_token = at.place(sizes_.row_tokens * kInt);
  for (int kind = 0; kind < 2; ++kind) {
    if (!launches_[kind]) continue;
    s.work[kind] = at.place(sizes_.work[kind] * int64_t{sizeof(fajit_work)});
    s.worker_indptr[kind] = at.place((sizes_.workers[kind] + 1) * kInt);
  }
  s.merge_work = at.place(sizes_.merge_work * int64_t{sizeof(fajit_merge_work)});
  s.merge_sources = at.place(sizes_.merge_sources * kInt);
  s.bytes = at.end();
  return s;
}

void BatchWork::write_block(char* block) const {
  const Sections& s = sections_;
  const scheduler::Lengths& n = *lengths_;
  const std::vector<int32_t>* const arrays[8] = {&n.q_len,     &n.kv_len,   &n.q_row0,
                                                 &n.kv_row0,   &n.q_offset, &n.q_token0,
                                                 &n.kv_token0, &n.kv_first};
  for (int i = 0; i < 8; ++i) {
    put_all(block, s.per_request[i], arrays[i]->data(), count_of(arrays[i]->size()),
            sizes_.requests, 0);
  }
  if (is_paged()) {
    put_all(block, s.page_indptr, n.page_indptr.data(), count_of(n.page_indptr.size()),
            sizes_.requests + 1, n.page_indptr.back());
  }
  if (sizes_.row_tokens > 0) {
    // Kernels of plans that may have groups find every row through these.
    std::vector<int32_t> requests = n.row_request, tokens = n.row_token;
    if (requests.empty()) {
      for (int32_t b = 0; b < n.num_requests; ++b) {
        requests.insert(requests.end(), static_cast<size_t>(n.q_len[static_cast<size_t>(b)]), b);
      }
    }
    if (tokens.empty()) {
      tokens.resize(requests.size());
      std::iota(tokens.begin(), tokens.end(), 0);
    }
    put_all(block, s.row_request, requests.data(), count_of(requests.size()), sizes_.row_requests,
            0);
    put_all(block, s.row_token, tokens.data(), count_of(tokens.size()), sizes_.row_tokens, 0);
  } else {
    put_all(block, s.row_request, n.row_request.data(), count_of(n.row_request.size()),
            sizes_.row_requests, 0);
  }
  const fajit_work no_work{-1, 0, 0, 0, 0, 0, 0, -1};
  for (int kind = 0; kind < 2; ++kind) {
    if (!launches_[kind]) continue;
    const scheduler::KindPlan& planned = plan_->kinds[kind];
    put_all(block, s.work[kind], planned.work.data(), count_of(planned.work.size()),
            sizes_.work[kind], no_work);
    put_all(block, s.worker_indptr[kind], planned.worker_indptr.data(), sizes_.workers[kind] + 1,
            sizes_.workers[kind] + 1, 0);
  }
  const fajit_merge_work no_merge{-1, 0, 0, 0, 0, 0, 0, 0};
  put_all(block, s.merge_work, plan_->merge_work.data(), count_of(plan_->merge_work.size()),
          sizes_.merge_work, no_merge);
  put_all(block, s.merge_sources, plan_->merge_sources.data(),
          count_of(plan_->merge_sources.size()), sizes_.merge_sources, 0);
}

void BatchWork::fill_on_device(const char* block, fajit_args& args) const {
  const Sections& s = sections_;
  const auto ints = [&](int64_t begin) { return reinterpret_cast<const int32_t*>(block + begin); };
  const bool fixed_groups = plan_->has_limits && sizes_.row_tokens > 0;
  args.num_requests = static_cast<int32_t>(sizes_.requests);
  args.q_len = ints(s.per_request[0]);
  args.kv_len = ints(s.per_request[1]);
  args.q_row0 = ints(s.per_request[2]);
  args.kv_row0 = ints(s.per_request[3]);
  args.q_offset = ints(s.per_request[4]);
  args.q_token0 = ints(s.per_request[5]);
  args.kv_token0 = ints(s.per_request[6]);
  args.kv_first = has_first_keys_ || fixed_groups ? ints(s.per_request[7]) : nullptr;
  if (is_paged()) args.page_indptr = ints(s.page_indptr);
  if (sizes_.row_requests > 0) args.row_request = ints(s.row_request);
  if (sizes_.row_tokens > 0) args.row_token = ints(s.row_token);
  args.merge_work = reinterpret_cast<const fajit_merge_work*>(block + s.merge_work);
  args.num_merge_work = static_cast<int32_t>(sizes_.merge_work);
  args.max_merge_rows = sizes_.max_merge_rows;
  if (sizes_.merge_sources > 0) args.merge_sources = ints(s.merge_sources);
}

void BatchWork::fill_kind_on_device(int kind, const char* block, fajit_args& args) const {
  args.work = reinterpret_cast<const fajit_work*>(block + sections_.work[kind]);
  args.num_work = static_cast<int32_t>(sizes_.work[kind]);
  args.worker_indptr = reinterpret_cast<const int32_t*>(block + sections_.worker_indptr[kind]);
  args.num_workers = static_cast<int32_t>(sizes_.workers[kind]);
}

}  // namespace fajit::runtime
