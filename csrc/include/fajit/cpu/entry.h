// The bodies of an artifact's entry points: checks, threads and the order of work.
#pragma once
#include <fajit/classify.h>
#include <fajit/cpu/kv_walk.h>
#include <fajit/cpu/merge.h>
#include <fajit/cpu/scratch.h>

namespace fajit {

template <class Config>
int check_args(const fajit_args* a) {
  if (a == nullptr || a->abi_version != FAJIT_ABI_VERSION || a->args_bytes != sizeof(fajit_args))
    return FAJIT_BAD_ABI;
  if (a->head_dim != Config::kHeadDim || a->head_dim_v != Config::kHeadDimV ||
      a->num_kv_heads < 1 || a->num_q_heads % a->num_kv_heads != 0)
    return FAJIT_BAD_ARGS;
  if ((a->flags & FAJIT_WRITE_LSE) != 0 && a->lse == nullptr) return FAJIT_BAD_ARGS;
  return FAJIT_OK;
}

// Hands out the indices [0, count) to up to `threads` threads, which take the next one when they
// are free: items are listed longest first. `worker(take)` holds a thread's own state and calls
// take(i) until it is false. One item or one thread: no parallel region is opened, which would cost
// 1-2 us.
template <class Worker>
void for_each_index(int32_t count, int32_t threads, Worker worker) {
  int32_t next = 0;
  auto take = [&](int32_t& i) {
    i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    return i < count;
  };
  if (threads > count) threads = count;
  if (threads <= 1) {
    worker(take);
    return;
  }
#pragma omp parallel num_threads(threads)
  worker(take);
}

// Items of the list of `worker`, claimed one by one: other threads may be in the same list. A
// thread without memory claims nothing and leaves its list to others.
template <class Kernel>
int run_list(const fajit_args* a) {
  if (a->worker_indptr == nullptr || a->worker < 0 || a->worker >= a->num_workers)
    return FAJIT_BAD_ARGS;
  int32_t* cursor = a->cursors + a->worker;
  const int32_t begin = a->worker_indptr[a->worker];
  const int32_t count = a->worker_indptr[a->worker + 1] - begin;
  if (__atomic_load_n(cursor, __ATOMIC_RELAXED) >= count) return FAJIT_OK;
  const Scratch scratch(Kernel::scratch_bytes());
  if (scratch.data() == nullptr) return FAJIT_OUT_OF_MEMORY;
  Carver carver{scratch.data()};
  [[maybe_unused]] const typename Kernel::Session session;
  Kernel kernel(Context{a}, carver);
  for (int32_t i; (i = __atomic_fetch_add(cursor, 1, __ATOMIC_RELAXED)) < count;) {
    const fajit_work& w = a->work[begin + i];
    if (w.request >= 0) kernel.run(w);  // else padding
  }
  return FAJIT_OK;
}

template <class Config, class Kernel>
int run_attention(const fajit_args* a) {
  if (const int status = check_args<Config>(a)) return status;
  if (a->num_work <= 0 && a->cursors == nullptr) return FAJIT_OK;
  if (a->q == nullptr || a->k == nullptr || a->v == nullptr || a->work == nullptr)
    return FAJIT_BAD_ARGS;
  if (a->cursors != nullptr) return run_list<Kernel>(a);
  int32_t done = 0;
  for_each_index(a->num_work, a->num_threads, [&](auto take) {
    const Scratch scratch(Kernel::scratch_bytes());
    // A thread without memory leaves its work to the others.
    if (scratch.data() == nullptr) return;
    Carver carver{scratch.data()};
    [[maybe_unused]] const typename Kernel::Session session;
    Kernel kernel(Context{a}, carver);
    for (int32_t i; take(i);) {
      if (a->work[i].request >= 0) kernel.run(a->work[i]);  // else padding
      __atomic_fetch_add(&done, 1, __ATOMIC_RELAXED);
    }
  });
  return done == a->num_work ? FAJIT_OK : FAJIT_OUT_OF_MEMORY;
}

template <class Config, class Hooks>
int run_merge(const fajit_args* a) {
  if (const int status = check_args<Config>(a)) return status;
  if (a->num_merge_work <= 0) return FAJIT_OK;
  if (a->partial_out == nullptr || a->merge_work == nullptr ||
      (!Hooks::kPointwise && a->partial_lse == nullptr))
    return FAJIT_BAD_ARGS;
  // A merge of few rows ends before a second thread would have started.
  int64_t values = 0;
  for (int32_t i = 0; i < a->num_merge_work; ++i) {
    const fajit_merge_work& w = a->merge_work[i];
    values += int64_t{w.row_end - w.row_begin} * w.num_splits * Config::kHeadDimV;
  }
  const int32_t threads = values < 65536 ? 1 : a->num_threads;
  for_each_index(a->num_merge_work, threads, [&](auto take) {
    const Merge<Config, Hooks> merge(Context{a});
    for (int32_t i; take(i);) merge.run(a->merge_work[i]);
  });
  return FAJIT_OK;
}

}  // namespace fajit
