// One team of threads over the lists of work of a batch's launches.
#pragma once

#include <fajit/abi.h>

#include "module.h"

namespace fajit::runtime {

struct TeamWork {
  const Module* module;
  fajit_args args;  // with work and worker_indptr
};

// Thread t works through its lists of every launch (t, t + threads, ...), then takes what is left
// of the others'. Lists are planned to end together; taking evens out what the prediction missed.
// Which thread computes an item changes no bit. One thread, or one item, opens no parallel region,
// nor does work too short to gain by it: `parallel` is false then.
//
// Returns a fajit_status: FAJIT_OUT_OF_MEMORY where no thread had memory for some of the work.
// Throws LaunchError for a parallel region in a forked child: see fork_guard.h.
int run_team(const TeamWork* launches, int count, int threads, bool parallel);

}  // namespace fajit::runtime
