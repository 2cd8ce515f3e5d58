// The body of `fajit_classify`, which runs on the host for every target.
#pragma once
#include <fajit/context.h>
#include <fajit/interval.h>

namespace fajit {

template <class Hooks>
int run_classify(const fajit_classify_args* g) {
  if (g == nullptr || g->args == nullptr || g->tile_q < 1 || g->tile_kv < 1) return FAJIT_BAD_ARGS;
  const Context c{g->args};
  uint8_t* out = g->states;
  for (int64_t q = g->q_begin; q < g->q_end; q += g->tile_q) {
    const int64_t q_last = q + g->tile_q < g->q_end ? q + g->tile_q - 1 : g->q_end - 1;
    for (int64_t k = g->kv_begin; k < g->kv_end; k += g->tile_kv) {
      const int64_t k_last = k + g->tile_kv < g->kv_end ? k + g->tile_kv - 1 : g->kv_end - 1;
      *out++ = static_cast<uint8_t>(Hooks::classify(c, Interval{g->request, g->request},
                                                    Interval{g->head_begin, g->head_end - 1},
                                                    Interval{q, q_last}, Interval{k, k_last}));
    }
  }
  return FAJIT_OK;
}

}  // namespace fajit
