// Assigns units to workers: longest first, to the least loaded worker, cut where a worker is full.
#pragma once

#include <cstdint>
#include <vector>

#include "units.h"

namespace fajit::scheduler {

// Keys [begin, end) of a unit and kv head, with the worker that computes them.
struct Part {
  int32_t unit, head;  // head: of the replica
  int32_t kv_begin, kv_end;
  int32_t worker;  // of the replica
  float cost_ns;
};

// Every kv head costs the same, so the heads may be planned as `replicas` equal parts: replica r
// has kv heads [r * heads, (r + 1) * heads) and workers [r * workers, (r + 1) * workers).
struct Balance {
  int32_t heads = 1, workers = 1, replicas = 1;
  std::vector<Part> parts;          // sorted by unit, head, keys
  std::vector<int32_t> first_part;  // [units * heads + 1]; units of another kind have no parts
  std::vector<int32_t> order;       // part numbers in the order in which workers process them
  std::vector<double> load_ns;      // [workers], while all are active
  double end_ns = 0;                // until the last worker ends

  int32_t part_of(int64_t unit, int32_t head) const {
    return first_part[static_cast<size_t>(unit * heads + head % heads)];
  }
  // Whether a unit is one part, for every head.
  bool is_whole(size_t unit) const {
    const size_t i = unit * static_cast<size_t>(heads);
    return first_part[i + static_cast<size_t>(heads)] - first_part[i] == heads;
  }
  int32_t parts_of(int64_t unit, int32_t head) const {
    const size_t i = static_cast<size_t>(unit * heads + head % heads);
    return first_part[i + 1] - first_part[i];
  }
};

// `kind`: the kind of units; -1: all units, on workers that both kinds share. There a few-row unit
// is of all kv heads, one after another, if the loads allow it and options.heads_apart does not say
// that heads are apart in memory. Makes at most `num_workers` cuts, of one head or of all, so at
// most twice as many partial tiles of each head of units that are not shared; in batch-invariant
// mode the cuts depend on each unit alone.
Balance balance(const std::vector<Unit>& units, int kind, const Kind (&kinds)[2],
                const PlanOptions& options, int32_t num_workers);

}  // namespace fajit::scheduler
