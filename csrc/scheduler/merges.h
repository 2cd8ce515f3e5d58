// The rows of partial states, and the merges, once the parts of all units are known.
#pragma once

#include "balance.h"
#include "segments.h"

namespace fajit::scheduler {

// The balances of the units of both kinds; the same object if the kinds share workers.
struct Balances {
  const Balance* of_kind[2] = {nullptr, nullptr};

  const Balance& of(const Unit& unit) const { return *of_kind[unit.kind]; }
};

// First partial rows of units: the state of the i-th part of unit u and kv head h begins at
// first(u, h) + i * rows. -1 if the unit is not cut and its result is final.
class PartialRows {
 public:
  // Throws if the number of rows does not fit 32 bits.
  PartialRows(const std::vector<Unit>& units, const Balances& balances, int32_t num_kv_heads);

  int64_t count() const { return count_; }
  int32_t first(size_t unit, int32_t head) const {
    if (first_.empty()) return -1;  // no unit writes a state
    return first_[unit * heads_ + (heads_ > 1 ? static_cast<size_t>(head) : 0)];
  }

 private:
  size_t heads_;  // entries of a unit in first_
  std::vector<int32_t> first_;
  int64_t count_ = 0;
};

// Fills merge_work, merge_sources, max_merge_rows and most_splits of the plan. `segments`: null
// without groups; then the states of a merge are contiguous and need no sources.
void make_merges(const std::vector<Unit>& units, const Balances& balances, const PartialRows& rows,
                 const Segments* segments, const PlanOptions& options, BatchPlan& plan);

}  // namespace fajit::scheduler
