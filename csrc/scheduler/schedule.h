// Turns a problem into the work of one launch: who computes which rows over which keys.
//
// Units are (request, head group, packed row range). Their costs come from the interval form of the
// mask, so keys that are masked out for a whole unit cost nothing. Where the units alone cannot be
// spread evenly over the workers, long key ranges are cut into chunks of equal length and merged.
// Work is listed longest first; workers take items in order (the classical LPT bound, 4/3).
//
// Workers are threads, or slots of a device: the thread blocks that it runs at once. A device pays
// more for a partial state, whose rows go through memory twice and take one more launch, and hides
// nothing behind it. So there the fewest chunks that fill the slots are cut, only where the most
// loaded slot gains by it.
//
// The schedule depends on lengths, on tile sizes, on the worker count and on the mask's scalars
// alone, so equal inputs give equal bits whatever ran before.
#pragma once

#include <fajit/abi.h>

#include <cstdint>
#include <vector>

#include "../runtime/module.h"

namespace fajit::scheduler {

struct Options {
  int32_t tile_q = 0;           // most packed rows of an item
  int32_t row_granule = 1;      // items get a multiple of this many rows (the vector width)
  int32_t tile_kv = 0;          // chunks are cut at multiples of this
  int32_t min_chunk = 0;        // no chunk is shorter than this many keys
  int32_t num_workers = 1;      // threads, or slots of a device
  bool share_heads = true;      // pack the query heads of one kv head into an item
  bool classify = false;        // ask the mask's interval form for costs
  bool allow_splits = true;
  bool device = false;          // workers are slots
};

struct Schedule {
  std::vector<fajit_work> work;
  std::vector<fajit_merge_work> merge_work;
  int32_t partial_rows = 0;
  int64_t total_cost = 0;       // sum over items of rows * keys that are visited
  int64_t critical_cost = 0;    // the most loaded worker's share, workers taking items in order
  int32_t most_splits = 1;
};

// `args` holds shapes, lengths and params; its work list is ignored.
Schedule schedule(const runtime::Module* module, const fajit_args& args, const Options& options);

}  // namespace fajit::scheduler
