// Where partial states lie and how they are merged, once the parts of all units are known.
#pragma once

#include "balance.h"
#include "segments.h"

namespace fajit::scheduler {

// The balances of both kinds' units; the same where the kinds share workers.
struct Balances {
  const Balance* of_kind[2] = {nullptr, nullptr};

  const Balance& of(const Unit& unit) const { return *of_kind[unit.kind]; }
};

// First partial row of units' states: the i-th part's state of unit u and kv head h begins at
// first(u, h) + i * rows. -1 where the unit is computed whole and its result is final.
class PartialRows {
 public:
  // Throws where there are more than 32 bits can number.
  PartialRows(const std::vector<Unit>& units, const Balances& balances, int32_t num_kv_heads);

  int64_t count() const { return count_; }
  int32_t first(size_t unit, int32_t head) const {
    if (first_.empty()) return -1;  // no unit writes a state
    return first_[unit * heads_ + (heads_ > 1 ? static_cast<size_t>(head) : 0)];
  }

 private:
  size_t heads_;  // of a unit
  std::vector<int32_t> first_;
  int64_t count_ = 0;
};

// Fills merge_work, merge_sources, max_merge_rows and most_splits of the plan. `segments`: null
// without groups; then the states of a merge lie one after another and need no sources.
void make_merges(const std::vector<Unit>& units, const Balances& balances, const PartialRows& rows,
                 const Segments* segments, const PlanOptions& options, BatchPlan& plan);

}  // namespace fajit::scheduler
