// Writes new rows of K and V into the pages of a cache, changed by key_mod and value_mod, quantised
// where the cache holds codes.
//
// Items of work, pages and arguments are those of fajit/cuda/utility/append_paged_kv.h; the tensors
// k, v and the two caches, as bytes, follow those of the variant, and then what the codes of each
// cache have: scales, zero points (`NumberPages`), a codebook. A row without a hook is copied.
#pragma once
#include <fajit/check_args.h>
#include <fajit/context.h>
#include <fajit/cpu/pack.h>
#include <fajit/cpu/vector/quantize.h>
#include <fajit/cpu/work_list.h>
#include <fajit/interval.h>

namespace fajit {

template <class Config, class Hooks>
class Append {
 public:
  explicit Append(const fajit_args* a)
      : c_(a),
        k_(a->tensors + Config::kTensors, 0),
        v_(a->tensors + Config::kTensors, 1),
        k_codes_(a->tensors + Config::kTensors + 4),
        v_codes_(a->tensors + Config::kTensors + 7) {}

  void run(const fajit_work& item) const {
    put_rows<typename Config::K, Hooks::kKeyMod, Config::kHeadDim>(
        k_, k_codes_, item, [&](const float* x, float* y, int32_t head, int32_t key) {
          if constexpr (Hooks::kKeyMod) Hooks::key_mod(c_, x, y, item.request, head, key);
        });
    put_rows<typename Config::V, Hooks::kValueMod, Config::kHeadDimV>(
        v_, v_codes_, item, [&](const float* x, float* y, int32_t head, int32_t key) {
          if constexpr (Hooks::kValueMod) Hooks::value_mod(c_, x, y, item.request, head, key);
        });
  }

 private:
  // Of a cache of T: what it has beside codes.
  template <class T, bool = kIsCode<T>>
  struct Codes : Quantizer<T> {
    explicit Codes(const fajit_tensor* t) : Quantizer<T>(t[0], t[1], t[2]) {}
  };
  template <class T>
  struct Codes<T, false> {
    explicit Codes(const fajit_tensor*) {}
  };

  // New rows [token, head] and their places [page, slot, head]; strides in bytes.
  struct Rows {
    const fajit_tensor& from;
    const fajit_tensor& to;

    Rows(const fajit_tensor* tensors, int i) : from(tensors[i]), to(tensors[2 + i]) {}

    template <class T>
    const T* source(int64_t token, int64_t head) const {
      const int64_t* s = from.strides;
      return reinterpret_cast<const T*>(static_cast<const char*>(from.ptr) + token * s[0] +
                                        head * s[1]);
    }
    template <class T>
    T* target(int64_t page, int64_t slot, int64_t head) const {
      const int64_t* s = to.strides;
      char* const first = static_cast<char*>(const_cast<void*>(to.ptr));
      return reinterpret_cast<T*>(first + page * s[0] + slot * s[1] + head * s[2]);
    }
  };

  // Calls each(token, page, slot, head, key) for the rows of an item that have a page.
  template <class Each>
  FAJIT_INLINE void each_row(const fajit_work& item, Each each) const {
    const fajit_args& a = *c_.args;
    const int32_t* const pages = a.page_indices + a.page_indptr[item.request];
    for (int32_t row = item.row_begin; row < item.row_end; ++row) {
      const int32_t key = item.kv_begin + (row - item.row_begin);
      const int32_t page = pages[key / a.page_size], slot = key % a.page_size;
      if (page < 0 || page >= a.num_pages) continue;
      const int64_t token = int64_t{a.q_row0[item.request]} + row;
      for (int32_t head = 0; head < a.num_kv_heads; ++head) each(token, page, slot, head, key);
    }
  }

  // Rows as codes, some at a time. row(from, at, head, key): the E that those of a new row are, the
  // at-th of its batch.
  template <class E, class Stored, int N, class Row>
  FAJIT_INLINE void put_codes(const Rows& rows, const Codes<Stored>& codes, const fajit_work& item,
                              Row row) const {
    using New = typename Config::New;
    using Q = Quantizer<Stored>;
    const E* found[Q::kRows];
    typename Q::Place places[Q::kRows];
    int count = 0;
    // From a row to one that is read at least a batch later, or lies behind the last row.
    const int64_t to_later = rows.from.strides[0] * ((Q::kRows - 1) / c_.args->num_kv_heads + 1);
    each_row(item, [&](int64_t token, int32_t page, int32_t slot, int32_t head, int32_t key) {
      const New* const from = rows.template source<New>(token, head);
      const char* const later = reinterpret_cast<const char*>(from) + to_later;
      for (int i = 0; i < N * int{sizeof(New)}; i += 64) __builtin_prefetch(later + i);
      found[count] = row(from, count, head, key);
      Stored* const target = rows.template target<Stored>(page, slot, head);
      places[count++] = codes.place(target, page, slot, head);
      if (count < Q::kRows) return;
      codes.template store_rows<N>(found, places, count);
      count = 0;
    });
    codes.template store_rows<N>(found, places, count);
  }

  template <class Stored, bool Modified, int N, class Mod>
  FAJIT_INLINE void put_rows(const Rows& rows, const Codes<Stored>& codes, const fajit_work& item,
                             Mod mod) const {
    if constexpr (kIsCode<Stored>) {
      using New = typename Config::New;
      if constexpr (!Modified) {
        if (codes.template reads_whole<N>())
          return put_codes<New, Stored, N>(
              rows, codes, item, [](const New* from, int, int32_t, int32_t) { return from; });
      }
      using Q = Quantizer<Stored>;
      constexpr int stride = Q::template kStride<N>;
      alignas(64) float values[Q::kRows * stride];
      put_codes<float, Stored, N>(rows, codes, item,
                                  [&](const New* from, int at, int32_t head, int32_t key) {
                                    float* const to = values + at * stride;
                                    if constexpr (Modified) {
                                      alignas(64) float row[round_up(N, kLanes)];
                                      load_row<New, N>(from, row);
                                      mod(static_cast<const float*>(row), to, head, key);
                                    } else {
                                      load_row<New, N>(from, to);
                                    }
                                    return to;
                                  });
    } else {
      each_row(item, [&](int64_t token, int32_t page, int32_t slot, int32_t head, int32_t key) {
        convert_row<Modified, N, N>(rows.template source<Stored>(token, head),
                                    rows.template target<Stored>(page, slot, head),
                                    [&](const float* x, float* y) { mod(x, y, head, key); });
      });
    }
  }

  Context c_;
  Rows k_, v_;
  Codes<typename Config::K> k_codes_;
  Codes<typename Config::V> v_codes_;
};

template <class Config, class Hooks>
int run_append(const fajit_args* a) {
  if (const int status = check_layout(a)) return status;
  if (a->num_work <= 0 && a->cursors == nullptr) return FAJIT_OK;
  if (a->num_tensors != Config::kTensors + 10 || a->head_dim != Config::kHeadDim ||
      a->head_dim_v != Config::kHeadDimV || a->page_indptr == nullptr ||
      a->page_indices == nullptr || a->page_size < 1 || a->num_kv_heads < 1 ||
      !WorkList::is_valid(a))
    return FAJIT_BAD_ARGS;
  WorkList list(a);
  const Append<Config, Hooks> append(a);
  int items = 0;
  while (const fajit_work* item = list.take(items, [](const fajit_work*, int32_t) { return 1; }))
    if (item->request >= 0) append.run(*item);
  return FAJIT_OK;
}

}  // namespace fajit
