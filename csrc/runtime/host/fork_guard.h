// Keeps forked children out of OpenMP's parallel regions, which would never end there.
#pragma once

namespace fajit::runtime {

// To be called before a parallel region of several threads is opened.
//
// libgomp keeps the threads of its regions for each thread that opens some. A fork copies that
// record without the threads, so that the next region of the copied thread waits for them for ever.
// Throws LaunchError in such a child; regions of threads that the child starts itself are sound.
void before_parallel_region();

// To be called before operations of torch that may run on several threads: throws LaunchError in a
// child whose parent opened regions of ours in the thread that forked.
void refuse_stranded();

}  // namespace fajit::runtime
