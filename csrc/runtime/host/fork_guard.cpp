#include "host/fork_guard.h"

#include <pthread.h>

#include "errors.h"

namespace fajit::runtime {
namespace {

// This thread, or the one that it was forked from, has opened a parallel region.
thread_local bool opened = false;
// This thread is a fork's copy of one that had opened a region, whose threads do not exist here.
thread_local bool stranded = false;

// Runs in the only thread of a forked child, the copy of the thread that called fork().
void after_fork_in_child() { stranded = opened; }

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, after_fork_in_child);

}  // namespace

void refuse_stranded() {
  if (stranded) {
    throw LaunchError(
        "this process was forked after kernels ran on several threads, and OpenMP's threads do not "
        "survive a fork: this call would wait for them forever, and so would operations of torch; "
        "call torch.set_num_threads(1) in the child, fork before the first call, or start "
        "processes with the start method \"spawn\"");
  }
}

void before_parallel_region() {
  refuse_stranded();
  opened = true;
}

}  // namespace fajit::runtime
