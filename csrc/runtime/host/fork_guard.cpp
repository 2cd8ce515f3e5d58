#include "host/fork_guard.h"

#include <pthread.h>

#include "errors.h"

namespace fajit::runtime {
namespace {

thread_local bool opened = false;    // by this thread, or by the one that it is the copy of
thread_local bool stranded = false;  // the region's threads stayed in the process before the fork

// Runs in the only thread of a forked child, the copy of the one that forked.
void after_fork_in_child() { stranded = opened; }

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, after_fork_in_child);

}  // namespace

void refuse_stranded() {
  if (stranded) {
    throw LaunchError(
        "this process was forked after kernels ran on several threads, and OpenMP's threads do not "
        "outlive a fork: this call would wait for them for ever, and so would operations of torch; "
        "call torch.set_num_threads(1) in the child, fork before the first call, or start "
        "processes with the start method \"spawn\"");
  }
}

void before_parallel_region() {
  refuse_stranded();
  opened = true;
}

}  // namespace fajit::runtime
