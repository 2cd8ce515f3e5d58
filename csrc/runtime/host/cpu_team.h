// Runs the work lists of a batch's launches on one team of threads.
#pragma once

#include <fajit/abi.h>

#include "module.h"

namespace fajit::runtime {

struct TeamWork {
  const Module* module;
  fajit_args args;  // with work and worker_indptr
};

// Thread t processes its lists of every launch (t, t + threads, ...), then takes items that are
// left in other lists (work stealing). Lists are planned to take equally long; stealing compensates
// errors of the prediction. Results do not depend on which thread computes an item. With one thread
// or one item, or with `parallel` false (the work is too short), no parallel region is opened.
//
// Returns a fajit_status: FAJIT_OUT_OF_MEMORY if no thread could allocate memory for some of the
// work. Throws LaunchError for a parallel region in a forked child: see fork_guard.h.
int run_team(const TeamWork* launches, int count, int threads, bool parallel);

}  // namespace fajit::runtime
