#include "host/cpu_team.h"

#include <omp.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <new>

#include "host/fork_guard.h"

namespace fajit::runtime {
namespace {

constexpr int kLine = 16;  // each counter has its own cache line: no false sharing between threads

// The number of claimed items of each list. A few counters fit on the stack.
class Counters {
 public:
  explicit Counters(int64_t lists) {
    if (lists > kInline) {
      more_.reset(new (std::nothrow) int32_t[static_cast<size_t>(lists) * kLine]());
    }
    first_ = lists > kInline ? more_.get() : inline_;
  }
  Counters(const Counters&) = delete;
  Counters& operator=(const Counters&) = delete;
  bool is_good() const { return first_ != nullptr; }
  int32_t* of(int64_t list) { return first_ + list * kLine; }

 private:
  static constexpr int64_t kInline = 32;
  alignas(64) int32_t inline_[kInline * kLine] = {};
  std::unique_ptr<int32_t[]> more_;
  int32_t* first_ = nullptr;
};

class Team {
 public:
  Team(const TeamWork* launches, int count, Counters& counters)
      : launches_(launches), count_(count), counters_(counters) {}

  void work(int thread, int threads) {
    for (int i = 0; i < count_; ++i) {
      const int32_t lists = launches_[i].args.num_workers;
      for (int32_t list = thread; list < lists; list += threads) take(i, list);
    }
    for (int i = 0; i < count_; ++i) {
      const int32_t lists = launches_[i].args.num_workers;
      for (int32_t j = 1; j <= lists; ++j) take(i, (thread + j) % lists);
    }
  }

  int status() {
    if (const int failed = failed_.load()) return failed;
    for (int i = 0; i < count_; ++i) {
      for (int32_t list = 0; list < launches_[i].args.num_workers; ++list) {
        if (has_work(i, list)) return FAJIT_OUT_OF_MEMORY;
      }
    }
    return FAJIT_OK;
  }

 private:
  int32_t* counter(int launch, int32_t list) {
    return counters_.of((launch > 0 ? launches_[0].args.num_workers : 0) + int64_t{list});
  }
  bool has_work(int launch, int32_t list) {
    const int32_t* const indptr = launches_[launch].args.worker_indptr;
    return __atomic_load_n(counter(launch, list), __ATOMIC_RELAXED) <
           indptr[list + 1] - indptr[list];
  }
  void take(int launch, int32_t list) {
    if (!has_work(launch, list)) return;
    fajit_args args = launches_[launch].args;
    args.num_threads = 1;
    args.worker = list;
    args.cursors = counter(launch, list) - list;  // so that cursors[list] is the counter
    const int status = launches_[launch].module->attention(args);
    // A thread that cannot allocate memory leaves its work to the others.
    if (status != FAJIT_OK && status != FAJIT_OUT_OF_MEMORY) failed_.store(status);
  }

  const TeamWork* launches_;
  int count_;
  Counters& counters_;
  std::atomic<int> failed_{FAJIT_OK};
};

}  // namespace

int run_team(const TeamWork* launches, int count, int threads, bool parallel) {
  int64_t items = 0, lists = 0;
  for (int i = 0; i < count; ++i) {
    items += launches[i].args.num_work;
    lists += launches[i].args.num_workers;
  }
  if (threads > items) threads = static_cast<int>(items);
  if (threads <= 1 || !parallel) {
    for (int i = 0; i < count; ++i) {
      fajit_args args = launches[i].args;
      args.num_threads = 1;
      args.worker_indptr = nullptr;
      args.num_workers = 0;
      if (args.num_work == 0) continue;
      if (const int status = launches[i].module->attention(args)) return status;
    }
    return FAJIT_OK;
  }
  before_parallel_region();
  Counters counters(lists);
  if (!counters.is_good()) return FAJIT_OUT_OF_MEMORY;
  Team team(launches, count, counters);
#pragma omp parallel num_threads(threads)
  team.work(omp_get_thread_num(), omp_get_num_threads());
  return team.status();
}

}  // namespace fajit::runtime
