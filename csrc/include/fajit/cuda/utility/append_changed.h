// Writes new rows of K and V into the pages of a cache, changed by key_mod and value_mod, quantised
// where the cache holds codes.
//
// Items of work, pages and arguments are those of append_paged_kv.h; the tensors k, v and the two
// caches, as bytes, follow those of the variant, and then what the codes of each cache have:
// scales, zero points, a codebook (`BesideCodes`). A warp changes one row at a time. A row without
// a hook is copied; one that becomes codes goes through shared memory as floats.
#pragma once
#include <fajit/cuda/hooks/row_hooks.h>
#include <fajit/cuda/tile/hook_rows.h>
#include <fajit/cuda/utility/append_paged_kv.h>
#include <fajit/cuda/utility/quantize.h>
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
  using KeyCodes = typename Config::KeyCodes;
  using ValueCodes = typename Config::ValueCodes;
  using Plain = AppendPagedKv<1>;
  static constexpr int kThreads = Plain::kThreads, kWarps = kThreads / 32;
  // Floats of a row that becomes codes.
  static constexpr int kRow =
      larger(kIsCode<KeyCodes> ? Config::kHeadDim : 1, kIsCode<ValueCodes> ? Config::kHeadDimV : 1);

  struct Params {
    typename Plain::Params plain;
    fajit_args args;
    fajit_tensor tensors[Config::kTensors > 0 ? Config::kTensors : 1];
    uint64_t scalars[Config::kScalars > 0 ? Config::kScalars : 1];
    typename Hooks::Uniforms uniforms;
    BesideCodes codes[2];
  };

  static int fill(const fajit_args* a, Params& p, uint32_t& blocks) {
    if (a->num_tensors != Config::kTensors + 10 || a->num_scalars != Config::kScalars)
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
    for (int i = 0; i < 2; ++i) p.codes[i] = BesideCodes::of(rows.tensors + 4 + 3 * i);
    return FAJIT_OK;
  }

  static FAJIT_DEV void run(const Params& p) {
    __shared__ float scratch[kWarps][Hooks::kRowTemps > 0 ? Hooks::kRowTemps : 1];
    __shared__ float floats[kWarps][kRow];
    __shared__ Codebook books[2];
    const Context c(&p.args, p.tensors, p.scalars, &p.uniforms);
    const typename Plain::Params& a = p.plain;
    const fajit_work item = a.work[blockIdx.x];
    const int32_t* const pages = a.page_indices + a.page_indptr[item.request];
    const int64_t first_token = a.q_row0[item.request];
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = ptx::lane_index();
    float* const temps = scratch[warp];
    if constexpr (same<KeyCodes, Int4Codes> || same<ValueCodes, Int4Codes>) {
      if (warp < 2) books[warp].sort(p.codes[warp].book, lane);
      __syncthreads();
    }
    const Quantizer<KeyCodes> k_codes(p.codes[0], books[0]);
    const Quantizer<ValueCodes> v_codes(p.codes[1], books[1]);
    for (int32_t row = item.row_begin; row < item.row_end; ++row) {
      const int32_t key = item.kv_begin + (row - item.row_begin);
      const int32_t page = pages[key / a.page_size], slot = key % a.page_size;
      if (page < 0 || page >= a.num_pages) continue;
      for (int32_t head = warp; head < a.num_kv_heads; head += kWarps) {
        const Place place{first_token + row, page, slot, head};
        put<Hooks::kKeyMod, Config::kHeadDim>(
            a.rows[0], k_codes, place, floats[warp], lane, [&](const auto& k) {
              if constexpr (Hooks::kKeyMod)
                Hooks::key_mod(c, k, temps, lane, item.request, head, key);
            });
        put<Hooks::kValueMod, Config::kHeadDimV>(
            a.rows[1], v_codes, place, floats[warp], lane, [&](const auto& v) {
              if constexpr (Hooks::kValueMod)
                Hooks::value_mod(c, v, temps, lane, item.request, head, key);
            });
      }
    }
  }

 private:
  struct Place { int64_t token, page, slot, head; };

  template <bool kChanged, int kDim, class Codes, class Change>
  static FAJIT_DEV void put(const typename Plain::Rows& r, const Quantizer<Codes>& codes,
                            const Place& at, float* floats, int lane, Change change) {
    const auto* const from =
        reinterpret_cast<const uint16_t*>(r.from + at.token * r.from_token + at.head * r.from_head);
    unsigned char* const to =
        r.to + at.page * r.to_page + at.slot * r.to_slot + at.head * r.to_head;
    if constexpr (kIsCode<Codes>) {
      __syncwarp();  // all of the row before this one is read
      for (int i = lane; i < kDim; i += 32) floats[i] = Element::to_float(from[i]);
      __syncwarp();
      change(FloatRow{floats});
      if constexpr (kChanged) __syncwarp();
      codes.template store_row<kDim>(floats, to, at.page, at.slot, at.head, lane);
    } else {
      const MovedRow<Element> row{from, reinterpret_cast<uint16_t*>(to)};
      change(row);
      if constexpr (!kChanged)
        for (int i = lane; i < kDim; i += 32) row.to[i] = from[i];
    }
  }
};

}  // namespace fajit::cuda
