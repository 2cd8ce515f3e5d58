// Few rows: decoding and other tiles of a few packed query rows, bound by memory.
//
//   for each tile of kTileQ packed rows (one request, one kv head)        Q kept in L1
//     for each key tile that the mask does not empty
//       S = Q K^T            few_scores: K from its place in memory, lanes over head_dim
//       hooks, mask, max, exp, sum of each row, keys on lanes
//       O = alpha O + P V    few_values: V from its place in memory, lanes over head_dim_v
//   normalise, sink, output_mod, cast
//
// Rows of K or V are copied to a buffer only when a key_mod or value_mod changes them, or when the
// head dim does not fill vectors (a load would reach past the row).
#pragma once
#include <fajit/cpu/few_row_kernel.h>
#include <fajit/cpu/kv_walk.h>
#include <fajit/cpu/pack.h>
#include <fajit/cpu/scratch.h>
#include <fajit/cpu/softmax.h>

namespace fajit {

template <class Config, class Hooks>
class FewRow {
  using Q = typename Config::Q;
  using K = typename Config::K;
  using V = typename Config::V;
  using Matrix = typename Config::Matrix;
  using Rows = decltype(Hooks::rows(Context{}, 0, int32_t{}, int32_t{}));
  using Keys = decltype(Hooks::keys(Context{}, 0, 0, vi{}));
  using Writer = RowWriter<Config, Hooks>;

  static constexpr int kDim = round_up(Config::kHeadDim, KeyVector<Matrix, Matrix>::kElements);
  static constexpr int kDimV =
      round_up(Config::kHeadDimV, kLanes * ValueStep<Matrix, Matrix>::kVectors);
  static constexpr bool kKeysInPlace = !Hooks::kKeyMod && kDim == Config::kHeadDim &&
                                       (same_type<Matrix, float> || same_type<K, Matrix>);
  static constexpr bool kValuesInPlace = !Hooks::kValueMod && kDimV == Config::kHeadDimV &&
                                         (same_type<Matrix, float> || same_type<V, Matrix>);
  static constexpr int kTileKv = round_up(Config::kTileKv, kLanes);
  // Rows beyond the last are zero, so that a group of three runs as one of four.
  static constexpr int kTileRows = round_up(Config::kTileQ, kFewRowGroup);
  static constexpr bool kPairHooks = Hooks::kScore || Hooks::kMask;

  // The type that a tile's rows have when the products read them.
  template <bool InPlace, class A, class B>
  struct Choose {
    using type = A;
  };
  template <class A, class B>
  struct Choose<false, A, B> {
    using type = B;
  };
  using Key = typename Choose<kKeysInPlace, K, Matrix>::type;
  using Value = typename Choose<kValuesInPlace, V, Matrix>::type;

 public:
  static uint64_t scratch_bytes() {
    Carver carver{nullptr};
    FewRow<Config, Hooks>(Context{}, carver);
    return carver.used;
  }

  FewRow(const Context& c, Carver& carver)
      : c_(c),
        q_(carver.take<Matrix>(uint64_t{kTileRows} * kDim)),
        o_(carver.take<float>(uint64_t{kTileRows} * kDimV)),
        s_(carver.take<float>(uint64_t{kTileRows} * kTileKv)),
        k_rows_(kKeysInPlace ? nullptr : carver.take<Matrix>(uint64_t{kTileKv} * kDim)),
        v_rows_(kValuesInPlace ? nullptr : carver.take<Matrix>(uint64_t{kTileKv} * kDimV)),
        base_(carver.take<float>(kTileRows + kLanes)),
        sums_(carver.take<float>(uint64_t{kTileRows} * kLanes)),
        h_(carver.take<int32_t>(kTileRows + kLanes)),
        q_idx_(carver.take<int32_t>(kTileRows)),
        rows_(carver.take<Rows>(kTileRows)) {}

  void run(const fajit_work& w) {
    for (int32_t row = w.row_begin; row < w.row_end; row += Config::kTileQ) {
      const int32_t left = w.row_end - row;
      run_tile(w, row, left < Config::kTileQ ? left : Config::kTileQ);
    }
  }

 private:
  void run_tile(const fajit_work& w, int32_t row0, int count) {
    const fajit_args& a = *c_.args;
    const int32_t b = w.request;
    __builtin_memset(q_, 0, sizeof(Matrix) * kTileRows * kDim);
    __builtin_memset(o_, 0, sizeof(float) * kTileRows * kDimV);
    for (int i = 0; i < count; ++i) {
      const int32_t p = row0 + i, row = p / w.head_count, h = w.head_begin + p % w.head_count;
      h_[i] = h;
      q_idx_[i] = a.q_offset[b] + row;
      base_[i] = -kInf;
      store(sums_ + i * kLanes, vf{});
      if constexpr (kPairHooks) rows_[i] = Hooks::rows(c_, b, h, q_idx_[i]);
      load_query(static_cast<const Q*>(a.q) + b * a.q_stride[0] + h * a.q_stride[1] +
                     (int64_t{a.q_row0[b]} + row) * a.q_stride[2],
                 q_ + i * kDim, b, h, q_idx_[i]);
    }
    const RowSpan span{b, w.head_begin, w.head_begin + w.head_count - 1, q_idx_[0],
                       q_idx_[count - 1]};
    const int32_t kv_len = a.kv_len[b];
    KvWalk<Config, Hooks> walk(c_, span, row0 / w.head_count, w.kv_begin,
                               w.kv_end < kv_len ? w.kv_end : kv_len);
    for (KvTile tile; walk.next(tile);) run_keys(w, tile, count);
    finish(w, row0, count);
  }

  FAJIT_INLINE void load_query(const Q* src, Matrix* dst, int32_t b, int32_t h, int32_t q_idx) {
    if constexpr (Hooks::kQueryMod) {
      convert_row<Matrix, Q, Config::kHeadDim, kDim>(
          src, dst, [&](const float* x, float* y) { Hooks::query_mod(c_, x, y, b, h, q_idx); });
    } else {
      convert_row<Matrix, Q, Config::kHeadDim, kDim>(src, dst, NoMod{});
    }
  }

  __attribute__((noinline)) void run_keys(const fajit_work& w, const KvTile& tile, int count) {
    const fajit_args& a = *c_.args;
    const int32_t b = w.request, kv_h = w.head_begin / c_.group_size();
    const int keys = tile.end - tile.begin;
    const int64_t row0 = int64_t{a.kv_row0[b]} + tile.begin;
    const K* k_src = static_cast<const K*>(a.k) + b * a.k_stride[0] + kv_h * a.k_stride[1] +
                     row0 * a.k_stride[2];
    const V* v_src = static_cast<const V*>(a.v) + b * a.v_stride[0] + kv_h * a.v_stride[1] +
                     row0 * a.v_stride[2];

    const Key* k;
    const Value* v;
    int64_t k_stride, v_stride;
    if constexpr (kKeysInPlace) {
      k = k_src;
      k_stride = a.k_stride[2];
    } else {
      for (int n = 0; n < keys; ++n)
        copy_key(k_src + n * a.k_stride[2], k_rows_ + n * kDim, b, kv_h, tile.begin + n);
      k = k_rows_;
      k_stride = kDim;
    }
    const float scale = kNaturalUnits<Hooks> ? a.scale : a.scale * kLog2e;
    for_each_group(count, [&](auto rows, int first) {
      few_scores<Matrix, Key, kDim, rows.count>(k, k_stride, keys, q_ + first * kDim, scale,
                                                s_ + first * kTileKv, kTileKv);
    });

    soften(b, kv_h, tile, count);

    if constexpr (kValuesInPlace) {
      v = v_src;
      v_stride = a.v_stride[2];
    } else {
      for (int n = 0; n < keys; ++n)
        copy_value(v_src + n * a.v_stride[2], v_rows_ + n * kDimV, b, kv_h, tile.begin + n);
      v = v_rows_;
      v_stride = kDimV;
    }
    for_each_group(count, [&](auto rows, int first) {
      few_values<Matrix, Value, kDimV, rows.count>(
          v, v_stride, keys, reinterpret_cast<const int32_t*>(s_ + first * kTileKv), kTileKv,
          o_ + first * kDimV);
    });
  }

  template <int N>
  struct GroupOf {
    static constexpr int count = N;
  };
  // Covers rows [0, count) with groups of 4, 2 and 1; three rows are a group of four.
  template <class F>
  FAJIT_INLINE void for_each_group(int count, F f) {
    int first = 0;
    for (; count - first >= 3; first += 4) f(GroupOf<4>{}, first);
    if (count - first == 2) f(GroupOf<2>{}, first);
    if (count - first == 1) f(GroupOf<1>{}, first);
  }

  FAJIT_INLINE void copy_key(const K* src, Matrix* dst, int32_t b, int32_t kv_h, int32_t kv_idx) {
    if constexpr (Hooks::kKeyMod) {
      convert_row<Matrix, K, Config::kHeadDim, kDim>(src, dst, [&](const float* x, float* y) {
        Hooks::key_mod(c_, x, y, b, kv_h, kv_idx);
      });
    } else {
      convert_row<Matrix, K, Config::kHeadDim, kDim>(src, dst, NoMod{});
    }
  }
  FAJIT_INLINE void copy_value(const V* src, Matrix* dst, int32_t b, int32_t kv_h, int32_t kv_idx) {
    if constexpr (Hooks::kValueMod) {
      convert_row<Matrix, V, Config::kHeadDimV, kDimV>(src, dst, [&](const float* x, float* y) {
        Hooks::value_mod(c_, x, y, b, kv_h, kv_idx);
      });
    } else {
      convert_row<Matrix, V, Config::kHeadDimV, kDimV>(src, dst, NoMod{});
    }
  }

  // Hooks and softmax: scores in s_ become weights in place, o_ is rescaled.
  __attribute__((flatten)) void soften(int32_t b, int32_t kv_h, const KvTile& tile, int count) {
    const int keys = tile.end - tile.begin, vectors = (keys + kLanes - 1) / kLanes;
    const bool masked = Hooks::kMask && tile.state != FAJIT_TILE_FULL;
    vf top[kTileRows];
    for (int r = 0; r < count; ++r) top[r] = splat(-kInf);
    for (int j = 0; j < vectors; ++j) {
      const vi at = iota() + j * kLanes;
      const vi inside = at < keys;
      const vi kv_idx = tile.begin + (inside ? at : splat(keys - 1));
      [[maybe_unused]] Keys key;
      if constexpr (kPairHooks) key = Hooks::keys(c_, b, kv_h, kv_idx);
      for (int r = 0; r < count; ++r) {
        float* s = s_ + r * kTileKv + j * kLanes;
        vf x = load(s);
        if constexpr (Hooks::kScore) {
          x = Hooks::score(c_, x, rows_[r], key);
          if constexpr (!Hooks::kPointwise) x = x * kLog2e;
        }
        if constexpr (Hooks::kPointwise) {
          x = Hooks::pointwise(c_, x);
          if constexpr (Hooks::kPointwiseScale)
            x = x * Hooks::pointwise_scale(c_, b, h_[r], q_idx_[r]);
        }
        const vf hidden = splat(Hooks::kPointwise ? 0.0f : -kInf);
        if constexpr (Hooks::kMask)
          if (masked) x = select(Hooks::mask(c_, rows_[r], key), x, hidden);
        x = select(inside, x, hidden);
        store(s, x);
        top[r] = max(top[r], x);
      }
    }
    for (int r = 0; r < count; ++r) {
      if constexpr (!Hooks::kPointwise) normalize_row(r, vectors, top[r]);
      pack_row_weights<Matrix, Value>(s_ + r * kTileKv, vectors * kLanes);
    }
  }

  // One row's scores of a tile become weights 2^(s - base). The base follows the row's maximum only
  // when that has grown by more than kSlack: weights up to 2^kSlack are as exact as weights up to
  // 1, and most tiles need neither a horizontal maximum nor rescaling (100 of 640 ns for 64 keys
  // and 4 rows, during which no row of K or V is fetched).
  FAJIT_INLINE void normalize_row(int r, int vectors, vf top) {
    constexpr float kSlack = 8.0f;
    if (any(top > base_[r] + kSlack)) {
      const float highest = max(base_[r], reduce_max(top));
      const float rescale = math::exp2(base_[r] - highest);
      base_[r] = highest;
      store(sums_ + r * kLanes, load(sums_ + r * kLanes) * rescale);
      for (int d = 0; d < kDimV; d += kLanes)
        store(o_ + r * kDimV + d, load(o_ + r * kDimV + d) * rescale);
    }
    // A row without a key so far: any finite base makes its weights 0.
    const float base = base_[r] == -kInf ? 0.0f : base_[r];
    vf sum = load(sums_ + r * kLanes);
    for (int j = 0; j < vectors; ++j) {
      float* s = s_ + r * kTileKv + j * kLanes;
      const vf x = weight_exp2<float>(load(s) - base);
      sum += x;
      store(s, x);
    }
    store(sums_ + r * kLanes, sum);
  }

  void finish(const fajit_work& w, int32_t row0, int count) {
    const Writer writer{c_, w.request,
                        w.partial >= 0                        ? Emit::kSplit
                        : (c_.args->flags & FAJIT_PARTIAL) != 0 ? Emit::kUnfinalized
                                                                : Emit::kFinal};
    for (int first = 0; first < count; first += kLanes) {
      vf sum{};
      for (int i = 0; i < kLanes; ++i) {
        if (first + i < count) {
          sum[i] = reduce_add(load(sums_ + (first + i) * kLanes));
        } else {  // a lane without a row
          h_[first + i] = h_[0];
          base_[first + i] = -kInf;
        }
      }
      const Normalized n =
          writer.normalizer(load(base_ + first), sum, load<vi>(h_ + first));
      for (int i = 0; i < kLanes && first + i < count; ++i) {
        const int32_t packed = row0 + first + i;
        float* o = o_ + (first + i) * kDimV;
        for (int d = 0; d < kDimV; d += kLanes) store(o + d, load(o + d) * n.factor[i]);
        ordered_dims<Matrix, Value, kDimV>(o);
        writer.write(packed / w.head_count, h_[first + i],
                     int64_t{w.partial} - w.row_begin + packed, o, n.lse[i]);
      }
    }
  }

  const Context c_;
  Matrix* q_;       // [row][kDim]
  float* o_;        // [row][kDimV]
  float* s_;        // [row][key]
  Matrix* k_rows_;  // [key][kDim] when keys are not used in place
  Matrix* v_rows_;
  float* base_;  // per row, base-2 units
  float* sums_;  // [row][lane]: partial sums of weights
  int32_t* h_;
  int32_t* q_idx_;
  Rows* rows_;
};

}  // namespace fajit
