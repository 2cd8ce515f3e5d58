#include "merges.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace fajit::scheduler {
namespace {

void note(const fajit_merge_work& item, BatchPlan& plan) {
  plan.max_merge_rows = std::max(plan.max_merge_rows, item.row_end - item.row_begin);
  plan.most_splits = std::max(plan.most_splits, item.num_splits);
}

void merge_units(const std::vector<Unit>& units, const Balances& balances, const PartialRows& rows,
                 const PlanOptions& options, BatchPlan& plan) {
  const int32_t group = options.num_q_heads / options.num_kv_heads;
  for (size_t u = 0; u < units.size(); ++u) {
    const Unit& unit = units[u];
    if (balances.of(unit).is_whole(u)) continue;
    const int32_t first_head = std::max(unit.head, 0);
    const int32_t last_head = unit.head >= 0 ? unit.head : options.num_kv_heads - 1;
    for (int32_t head = first_head; head <= last_head; ++head) {
      const int32_t first = rows.first(u, head);
      if (first < 0) continue;
      const int32_t parts = balances.of(unit).parts_of(static_cast<int64_t>(u), head);
      plan.merge_work.push_back(
          {unit.entity, head * group, group, unit.row_begin, unit.row_end, first, parts, 0});
      note(plan.merge_work.back(), plan);
    }
  }
}

void merge_segments(const std::vector<Unit>& units, const Balances& balances,
                    const PartialRows& rows, const Segments& segments, const PlanOptions& options,
                    BatchPlan& plan) {
  const int32_t group = options.num_q_heads / options.num_kv_heads;
  for (const Segment& s : segments.segments) {
    for (int32_t head = 0; head < options.num_kv_heads; ++head) {
      fajit_merge_work item{s.request, head * group,
                            group,     s.row_begin,
                            s.row_end, static_cast<int32_t>(plan.merge_sources.size()),
                            0,         0};
      for (int32_t c = s.first_cover; c < s.last_cover; ++c) {
        const Cover& cover = segments.covers[static_cast<size_t>(c)];
        const size_t u = static_cast<size_t>(cover.unit);
        const int32_t first = rows.first(u, head);
        if (first < 0) continue;  // a final result: the only cover, and not cut
        const int32_t parts = balances.of(units[u]).parts_of(cover.unit, head);
        for (int32_t i = 0; i < parts; ++i) {
          plan.merge_sources.push_back(first + cover.first_row + i * units[u].rows());
        }
        item.num_splits += parts;
      }
      if (item.num_splits == 0) continue;
      plan.merge_work.push_back(item);
      note(item, plan);
    }
  }
}

}  // namespace

PartialRows::PartialRows(const std::vector<Unit>& units, const Balances& balances,
                         int32_t num_kv_heads) {
  const bool per_head = !units.empty() && units.front().head >= 0;
  heads_ = per_head ? 1 : static_cast<size_t>(num_kv_heads);
  for (size_t u = 0; u < units.size(); ++u) {
    if (units[u].dropped) continue;
    const Balance& balance = balances.of(units[u]);
    if (!units[u].shared && balance.is_whole(u)) continue;
    if (first_.empty()) first_.assign(units.size() * heads_, -1);
    for (size_t head = 0; head < heads_; ++head) {
      const int32_t parts = balance.parts_of(static_cast<int64_t>(u), static_cast<int32_t>(head));
      if (parts == 1 && !units[u].shared) continue;
      first_[u * heads_ + head] = static_cast<int32_t>(count_);
      count_ += int64_t{parts} * units[u].rows();
      if (count_ > std::numeric_limits<int32_t>::max()) {
        throw std::invalid_argument(
            "the plan needs more partial rows than 32 bits can number: plan fewer requests at "
            "once, or larger split_keys");
      }
    }
  }
}

void make_merges(const std::vector<Unit>& units, const Balances& balances, const PartialRows& rows,
                 const Segments* segments, const PlanOptions& options, BatchPlan& plan) {
  if (rows.count() == 0) return;
  if (segments == nullptr) {
    merge_units(units, balances, rows, options, plan);
  } else {
    merge_segments(units, balances, rows, *segments, options, plan);
  }
}

}  // namespace fajit::scheduler
