// Writes new rows of K and V into the pages of a cache, changed by key_mod and value_mod.
//
// Items of work, pages and arguments are those of append_paged_kv.h; the tensors k, v and the two
// caches, as bytes, follow those of the variant. A warp changes one row at a time; a row without a
// hook is copied.
#pragma once
#include <fajit/cuda/hooks/row_hooks.h>
#include <fajit/cuda/tile/element.h>
#include <fajit/cuda/utility/append_paged_kv.h>
#include <fajit/interval.h>

namespace fajit::cuda {

// A row of 16-bit elements that is read at one place and written to another, as row hooks take it.
template <class Element>
struct MovedRow {
  const uint16_t* from;
  uint16_t* to;

  FAJIT_DEV float operator[](int i) const { return Element::to_float(from[i]); }
  FAJIT_DEV void write(int i, float x) const { to[i] = round_to<Element>(x); }
};

template <class Config, class Hooks>
struct AppendChanged {
  using Element = typename Config::Element;
  using Plain = AppendPagedKv<2>;
  static constexpr int kThreads = Plain::kThreads, kWarps = kThreads / 32;

  struct Params {
    typename Plain::Params plain;
    fajit_args args;
    fajit_tensor tensors[Config::kTensors > 0 ? Config::kTensors : 1];
    uint64_t scalars[Config::kScalars > 0 ? Config::kScalars : 1];
    typename Hooks::Uniforms uniforms;
  };

  static int fill(const fajit_args* a, Params& p, uint32_t& blocks) {
    if (a->num_tensors != Config::kTensors + 4 || a->num_scalars != Config::kScalars)
      return FAJIT_BAD_ARGS;
    fajit_args rows = *a;
    rows.tensors += Config::kTensors;
    rows.num_tensors = 4;
    if (const int status = Plain::fill(&rows, p.plain, blocks)) return status;
    p.args = *a;
    p.args.tensors = nullptr;  // the kernel has copies in its parameters
    p.args.scalars = nullptr;
    for (int i = 0; i < Config::kTensors; ++i) p.tensors[i] = a->tensors[i];
    for (int i = 0; i < Config::kScalars; ++i) p.scalars[i] = a->scalars[i];
    p.uniforms = Hooks::uniforms(Context(a));
    return FAJIT_OK;
  }

  static FAJIT_DEV void run(const Params& p) {
    __shared__ float scratch[kWarps][Hooks::kRowTemps > 0 ? Hooks::kRowTemps : 1];
    const Context c(&p.args, p.tensors, p.scalars, &p.uniforms);
    const typename Plain::Params& a = p.plain;
    const fajit_work item = a.work[blockIdx.x];
    const int32_t* const pages = a.page_indices + a.page_indptr[item.request];
    const int64_t first_token = a.q_row0[item.request];
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = ptx::lane_index();
    float* const temps = scratch[warp];
    for (int32_t row = item.row_begin; row < item.row_end; ++row) {
      const int32_t key = item.kv_begin + (row - item.row_begin);
      const int32_t page = pages[key / a.page_size], slot = key % a.page_size;
      if (page < 0 || page >= a.num_pages) continue;
      for (int32_t head = warp; head < a.num_kv_heads; head += kWarps) {
        const MovedRow<Element> k = moved(a.rows[0], first_token + row, page, slot, head);
        if constexpr (Hooks::kKeyMod) {
          Hooks::key_mod(c, k, temps, lane, item.request, head, key);
        } else {
          copy<Config::kHeadDim>(k, lane);
        }
        const MovedRow<Element> v = moved(a.rows[1], first_token + row, page, slot, head);
        if constexpr (Hooks::kValueMod) {
          Hooks::value_mod(c, v, temps, lane, item.request, head, key);
        } else {
          copy<Config::kHeadDimV>(v, lane);
        }
      }
    }
  }

 private:
  static FAJIT_DEV MovedRow<Element> moved(const typename Plain::Rows& r, int64_t token,
                                           int64_t page, int64_t slot, int64_t head) {
    return {r.from + token * r.from_token + head * r.from_head,
            r.to + page * r.to_page + slot * r.to_slot + head * r.to_head};
  }
  template <int kDim>
  static FAJIT_DEV void copy(const MovedRow<Element>& row, int lane) {
    for (int i = lane; i < kDim; i += 32) row.to[i] = row.from[i];
  }
};

}  // namespace fajit::cuda
