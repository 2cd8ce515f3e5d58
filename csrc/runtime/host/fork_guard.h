// Prevents OpenMP parallel regions in forked children, where they would hang.
#pragma once

namespace fajit::runtime {

// Called before a parallel region of several threads is opened.
//
// libgomp keeps a pool of threads for each thread that opens regions. A fork copies the record of
// the pool without its threads, so the next region of the copied thread waits for them forever.
// Throws LaunchError in such a child. Threads that the child starts itself may open regions.
void before_parallel_region();

// Called before operations of torch that may run on several threads. Throws LaunchError in a forked
// child if the thread that called fork() had opened a parallel region of ours.
void refuse_stranded();

}  // namespace fajit::runtime
