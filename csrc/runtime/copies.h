// Copies of many pieces of memory in one call, for caches of pages.
#pragma once

#include <cstdint>

namespace fajit::runtime {

// Copies `count` pieces of `piece_bytes` from sources[i] to destinations[i], in any order and by up
// to `num_threads` threads. No destination may overlap another piece.
// Throws LaunchError for several threads in a forked child: see fork_guard.h.
void copy_pieces(const int64_t* sources, const int64_t* destinations, int64_t count,
                 int64_t piece_bytes, int num_threads);

}  // namespace fajit::runtime
