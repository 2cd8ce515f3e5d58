// The bodies of an artifact's entry points: checks, threads and the order of work.
#pragma once
#include <fajit/check_args.h>
#include <fajit/classify.h>
#include <fajit/cpu/merge.h>
#include <fajit/cpu/scratch.h>
#include <fajit/cpu/work_list.h>

namespace fajit {

// How many of the items from `w` on run together: those of the kv heads after that of `w`, with the
// same rows and keys, where the heads of a token are adjacent in memory. At most 64 rows, whose
// state stays in L2.
template <class Config, int Most>
int items_together(const fajit_args& a, const fajit_work* w, int32_t left) {
  if (Most == 1 || w->request < 0 || left < 2) return 1;
  if (a.k_stride[1] != elements_of<typename Config::K>(Config::kHeadDim) ||
      a.v_stride[1] != elements_of<typename Config::V>(Config::kHeadDimV))
    return 1;
  const int32_t group = a.num_q_heads / a.num_kv_heads, rows = w->row_end - w->row_begin;
  int n = 1;
  while (n < Most && n < left && (n + 1) * rows <= 64) {
    const fajit_work& next = w[n];
    const bool same = next.request == w->request && next.row_begin == w->row_begin &&
                      next.row_end == w->row_end && next.kv_begin == w->kv_begin &&
                      next.kv_end == w->kv_end && next.head_count == w->head_count &&
                      next.head_begin == w->head_begin + n * group;
    if (!same) break;
    ++n;
  }
  return n;
}

// A thread that cannot allocate scratch claims no items, so other threads can still do its list.
template <class Config, class Kernel>
int run_attention(const fajit_args* a) {
  if (const int status = check_args<Config>(a)) return status;
  if (a->num_work <= 0 && a->cursors == nullptr) return FAJIT_OK;
  if (a->q == nullptr || a->k == nullptr || a->v == nullptr || !WorkList::is_valid(a))
    return FAJIT_BAD_ARGS;
  WorkList list(a);
  if (list.is_done()) return FAJIT_OK;

  Carver counter{nullptr};
  Kernel(Context{}, counter);
  const Scratch scratch(counter.used);
  if (scratch.data() == nullptr) return FAJIT_OUT_OF_MEMORY;
  Carver carver{scratch.data()};
  [[maybe_unused]] const typename Kernel::Session session;
  Kernel kernel(Context{a}, carver);
  const auto together = [a](const fajit_work* first, int32_t left) {
    return items_together<Config, Kernel::kMaxHeads>(*a, first, left);
  };
  int items = 0;
  while (const fajit_work* w = list.take(items, together)) {
    if (w->request < 0) continue;  // padding
    for (int32_t row = w->row_begin; row < w->row_end; row += Config::kTileQ) {
      const int32_t left = w->row_end - row;
      const bool is_last = left <= Config::kTileQ;
      kernel.run_tile(w, items, row, is_last ? left : Config::kTileQ,
                      is_last ? list.after(w, items) : nullptr);
    }
  }
  return FAJIT_OK;
}

template <class Config, class Hooks>
int run_merge(const fajit_args* a) {
  if (const int status = check_args<Config>(a)) return status;
  if (a->num_merge_work <= 0) return FAJIT_OK;
  if (a->partial_out == nullptr || a->merge_work == nullptr ||
      (!Hooks::kPointwise && a->partial_lse == nullptr))
    return FAJIT_BAD_ARGS;
  // A parallel region costs 1-2 us, in which one thread merges a few rows.
  int64_t values = 0;
  for (int32_t i = 0; i < a->num_merge_work; ++i) {
    const fajit_merge_work& w = a->merge_work[i];
    values += int64_t{w.row_end - w.row_begin} * w.num_splits * Config::kHeadDimV;
  }
  const Merge<Config, Hooks> merge(Context{a});
  if (values < 65536 || a->num_threads <= 1 || a->num_merge_work == 1) {
    for (int32_t i = 0; i < a->num_merge_work; ++i) merge.run(a->merge_work[i]);
    return FAJIT_OK;
  }
#pragma omp parallel for num_threads(a->num_threads) schedule(dynamic)
  for (int32_t i = 0; i < a->num_merge_work; ++i) merge.run(a->merge_work[i]);
  return FAJIT_OK;
}

}  // namespace fajit
