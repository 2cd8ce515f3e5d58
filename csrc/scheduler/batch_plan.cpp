#include "batch_plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "balance.h"
#include "merges.h"
#include "segments.h"
#include "units.h"

namespace fajit::scheduler {
namespace {

constexpr int32_t kLargestTile = 1 << 20;
constexpr double kHighestCost = 1e9;

// The first request at which the running sum of `lengths` is above `most`; -1 for none.
int64_t first_above(const std::vector<int32_t>& lengths, int64_t most, int32_t count) {
  int64_t sum = 0;
  for (int32_t b = 0; b < count; ++b) {
    if ((sum += lengths[static_cast<size_t>(b)]) > most) return b;
  }
  return -1;
}

void check_limits(const Lengths& l, const PlanOptions& o) {
  const Limits& most = o.limits;
  if (l.num_requests > most.max_requests) {
    fail("the batch has " + number(l.num_requests) +
         " requests, the limits allow max_requests=" + number(most.max_requests) + ": request " +
         number(most.max_requests) + " is the first beyond them");
  }
  if (l.num_q_tokens > most.max_q_tokens) {
    fail("the batch has " + number(l.num_q_tokens) +
         " query tokens, the limits allow max_q_tokens=" + number(most.max_q_tokens) +
         ": request " + number(first_above(l.q_len, most.max_q_tokens, l.num_requests)) +
         " goes beyond them");
  }
  for (int32_t b = 0; b < l.num_requests; ++b) {
    const int32_t kv_len = l.kv_len[static_cast<size_t>(b)];
    if (kv_len <= most.max_kv_len) continue;
    fail("request " + number(b) + " has kv_len=" + number(kv_len) +
         ", the limits allow max_kv_len=" + number(most.max_kv_len));
  }
  if (l.page_size > 0 && l.num_page_indices > most.max_pages) {
    int64_t b = 0;
    while (b < l.num_requests && l.page_indptr[static_cast<size_t>(b) + 1] <= most.max_pages) ++b;
    fail("the batch has " + number(l.num_page_indices) +
         " pages, the limits allow max_pages=" + number(most.max_pages) + ": " +
         (b < l.num_requests ? "request " + number(b) : "its shared levels") + " goes beyond them");
  }
  const int64_t groups = int64_t{most.max_requests} * o.num_levels;
  if (l.num_groups > groups) {
    fail("the batch has " + number(l.num_groups) + " groups of shared keys, the limits allow " +
         number(groups) + ": max_requests=" + number(most.max_requests) + " on each of " +
         number(o.num_levels) + " levels");
  }
}

// The capacity suffices for every plan within the limits, unless its lists or levels have an
// unusual form.
void check_capacity(const BatchPlan& plan) {
  const Capacity& most = plan.capacity;
  const auto check = [](int64_t has, int64_t allowed, const char* what) {
    if (has <= allowed) return;
    fail("the plan has " + number(has) + " " + what + ", its limits allow " + number(allowed) +
         ": key lists may not be longer than max_kv_len, nor the tokens of a request be spread "
         "over many groups of a level");
  };
  check(static_cast<int64_t>(plan.kinds[0].work.size()), most.work[0], "prefill items");
  check(static_cast<int64_t>(plan.kinds[1].work.size()), most.work[1], "few-row items");
  check(static_cast<int64_t>(plan.merge_work.size()), most.merge_work, "merge items");
  check(static_cast<int64_t>(plan.merge_sources.size()), most.merge_sources, "merge sources");
  check(plan.partial_rows, most.partial_rows, "partial rows");
}

// The work of `kind`, from a balance of its units or of the units of both kinds.
KindPlan make_kind(int kind, const std::vector<Unit>& units, const Balance& balance,
                   const PartialRows& rows, int32_t group_size) {
  const auto is_ours = [&](const Part& part) {
    return units[static_cast<size_t>(part.unit)].kind == kind;
  };
  // The first replica, by worker.
  const size_t workers = static_cast<size_t>(balance.workers);
  const size_t replicas = static_cast<size_t>(balance.replicas);
  std::vector<int32_t> next(workers + 1, 0);
  for (const Part& part : balance.parts) {
    if (is_ours(part)) ++next[static_cast<size_t>(part.worker) + 1];
  }
  for (size_t w = 0; w < workers; ++w) next[w + 1] += next[w];
  const size_t count = static_cast<size_t>(next[workers]);
  KindPlan plan;
  plan.worker_indptr.resize(replicas * workers + 1);
  for (size_t r = 0; r < replicas; ++r) {
    int32_t* const indptr = plan.worker_indptr.data() + r * workers;
    for (size_t w = 0; w <= workers; ++w) indptr[w] = static_cast<int32_t>(r * count) + next[w];
  }
  std::vector<fajit_work> work(count);
  plan.load_ns.resize(replicas * workers, 0.0f);
  std::vector<std::pair<size_t, int32_t>>
      states;  // (item, part) of the parts that write a partial state
  for (const int32_t id : balance.order) {
    const Part& part = balance.parts[static_cast<size_t>(id)];
    if (!is_ours(part)) continue;
    const size_t unit_index = static_cast<size_t>(part.unit);
    const Unit& unit = units[unit_index];
    const size_t at = static_cast<size_t>(next[static_cast<size_t>(part.worker)]++);
    const int32_t head = unit.head >= 0 ? unit.head : part.head;
    work[at] = {unit.entity,  head * group_size, group_size,  unit.row_begin,
                unit.row_end, part.kv_begin,     part.kv_end, -1};
    plan.load_ns[static_cast<size_t>(part.worker)] += part.cost_ns;
    if (unit.shared || !balance.is_whole(unit_index)) states.emplace_back(at, id);
  }

  plan.work.reserve(replicas * count);
  plan.work.insert(plan.work.end(), work.begin(), work.end());
  for (size_t r = 1; r < replicas; ++r) {
    for (fajit_work& item : work) item.head_begin += balance.heads * group_size;
    plan.work.insert(plan.work.end(), work.begin(), work.end());
    std::copy_n(plan.load_ns.data(), workers, plan.load_ns.data() + r * workers);
  }
  for (size_t r = 0; r < replicas; ++r) {
    for (const auto& [at, id] : states) {
      const Part& part = balance.parts[static_cast<size_t>(id)];
      const int32_t head = static_cast<int32_t>(r) * balance.heads + part.head;
      const int32_t first = rows.first(static_cast<size_t>(part.unit), head);
      if (first < 0) continue;  // other heads of the unit are cut
      const int32_t index = id - balance.part_of(part.unit, part.head);
      plan.work[r * count + at].partial =
          first + index * units[static_cast<size_t>(part.unit)].rows();
    }
  }
  return plan;
}

void sum_loads(const PlanOptions& options, const Balance (&balances)[2], BatchPlan& plan) {
  double together = 0;
  for (size_t w = 0; w < plan.kinds[0].load_ns.size() || w < plan.kinds[1].load_ns.size(); ++w) {
    double both = 0;
    for (int kind = 0; kind < 2; ++kind) {
      if (w >= plan.kinds[kind].load_ns.size()) continue;
      const double load = plan.kinds[kind].load_ns[w];
      both += load;
    }
    plan.total_ns += both;
    together = std::max(together, both);
  }
  plan.critical_ns = options.share_workers ? together : balances[0].end_ns + balances[1].end_ns;
}

void check_options(const Kind (&kinds)[2], const PlanOptions& o) {
  if (o.num_kv_heads < 1 || o.num_q_heads < 1 || o.num_q_heads % o.num_kv_heads != 0) {
    fail("num_kv_heads=" + number(o.num_kv_heads) +
         " does not divide num_q_heads=" + number(o.num_q_heads));
  }
  if (o.num_workers[0] < 1 || o.num_workers[1] < 1) fail("num_workers must be positive");
  if (o.share_workers && o.num_workers[0] != o.num_workers[1]) {
    fail("num_workers " + number(o.num_workers[0]) + " and " + number(o.num_workers[1]) +
         " differ, but both kinds share them");
  }
  for (int k = 0; k < 2; ++k) {
    const Kind& kind = kinds[k];
    if (kind.tile_q == 0) continue;
    if (kind.tile_q < 1 || kind.row_granule < 1 || kind.tile_kv < 1 || kind.min_chunk < 1) {
      fail("tile_q, row_granule, tile_kv and min_chunk of a kind must be positive");
    }
    if (std::max({kind.tile_q, kind.row_granule, kind.tile_kv, kind.min_chunk}) > kLargestTile) {
      fail("tile_q, row_granule, tile_kv and min_chunk of a kind must be at most " +
           number(kLargestTile));
    }
    for (const double cost :
         {kind.item_ns, kind.load_ns, kind.alone_ns, kind.pair_ns, kind.state_ns}) {
      if (!(cost >= 0 && cost <= kHighestCost)) {
        fail("costs of a kind must be from 0 to 1e9 ns, got " + std::to_string(cost));
      }
    }
    if (kind.alone_ns > kind.load_ns) fail("alone_ns of a kind must not be above load_ns");
    if (o.split_keys[k] < 0) fail("split_keys must not be negative");
  }
}

}  // namespace

BatchPlan plan_batch(const Lengths& lengths, const KeyLists& lists, const Kind (&kinds)[2],
                     const PlanOptions& options, const fajit_args& mask_args) {
  check_options(kinds, options);
  if (lists.q_block > 0 && options.num_levels > 0) {
    fail("key lists and levels of shared keys cannot be planned together");
  }
  const bool has_limits = options.limits.max_requests > 0;
  if (has_limits) check_limits(lengths, options);
  const fajit_args args = batch_args(lengths, options, mask_args);

  std::vector<Unit> units = make_units(lengths, lists, kinds, options, args);
  const int32_t group_size = options.num_q_heads / options.num_kv_heads;
  // A captured merge always or never has sources, so under limits this depends on the levels of the
  // limits, not on the groups of this batch.
  const bool has_sources = lengths.num_groups > 0 || (has_limits && options.num_levels > 0);
  Segments segments;
  if (has_sources) segments = make_segments(lengths, group_size, units);

  BatchPlan plan;
  plan.lengths_id = lengths.id;
  plan.num_q_heads = options.num_q_heads;
  plan.num_kv_heads = options.num_kv_heads;
  plan.key_block = lists.q_block > 0 ? lists.key_block : 0;
  plan.num_key_blocks = lists.q_block > 0 ? lists.num_key_blocks : 0;
  Balance balance_of[2];
  Balances balances{{&balance_of[0], &balance_of[options.share_workers ? 0 : 1]}};
  balance_of[0] =
      balance(units, options.share_workers ? -1 : 0, kinds, options, options.num_workers[0]);
  if (!options.share_workers) {
    balance_of[1] = balance(units, 1, kinds, options, options.num_workers[1]);
  }
  const PartialRows rows(units, balances, options.num_kv_heads);
  plan.partial_rows = rows.count();
  make_merges(units, balances, rows, has_sources ? &segments : nullptr, options, plan);
  for (int kind = 0; kind < 2; ++kind) {
    plan.kinds[kind] = make_kind(kind, units, *balances.of_kind[kind], rows, group_size);
  }
  sum_loads(options, balance_of, plan);

  if (has_limits) {
    plan.has_limits = true;
    plan.capacity = capacity_of(kinds, options, lists.q_block);
    check_capacity(plan);
    plan.max_merge_rows = plan.capacity.max_merge_rows;
  } else {
    Capacity& c = plan.capacity;
    c.requests = static_cast<int64_t>(lengths.q_len.size());
    for (int kind = 0; kind < 2; ++kind) {
      c.work[kind] = static_cast<int64_t>(plan.kinds[kind].work.size());
    }
    c.merge_work = static_cast<int64_t>(plan.merge_work.size());
    c.merge_sources = static_cast<int64_t>(plan.merge_sources.size());
    c.row_tokens = static_cast<int64_t>(lengths.row_token.size());
    c.partial_rows = plan.partial_rows;
    c.max_merge_rows = plan.max_merge_rows;
  }
  plan.workspace_bytes = workspace_bytes(plan.capacity.partial_rows, options.head_dim_v);
  return plan;
}

BatchPlan plan_of_work(int kind, std::vector<fajit_work> work,
                       std::vector<fajit_merge_work> merge_work, std::vector<int32_t> merge_sources,
                       int64_t partial_rows) {
  BatchPlan plan;
  KindPlan& planned = plan.kinds[kind];
  planned.work = std::move(work);
  planned.worker_indptr.resize(planned.work.size() + 1);
  std::iota(planned.worker_indptr.begin(), planned.worker_indptr.end(), 0);
  plan.merge_work = std::move(merge_work);
  plan.merge_sources = std::move(merge_sources);
  plan.partial_rows = partial_rows;
  for (const fajit_merge_work& item : plan.merge_work) {
    const int64_t rows = int64_t{item.row_end} - item.row_begin;  // not checked yet
    if (rows > plan.max_merge_rows) {
      plan.max_merge_rows = static_cast<int32_t>(std::min<int64_t>(rows, INT32_MAX));
    }
    plan.most_splits = std::max(plan.most_splits, item.num_splits);
  }
  return plan;
}

}  // namespace fajit::scheduler
