// Few rows: decoding and other tiles of a few packed query rows, bound by memory.
//
//   for each tile of kTileQ packed rows (one kv head)                     Q kept in L1
//     for each key tile that the mask does not empty
//       S = Q K^T            few_scores: K read in place, lanes over head_dim
//       hooks, mask, max, exp, sum of each row, keys on lanes
//       O = alpha O + P V    few_values: V read in place, lanes over head_dim_v
//   normalise, sink, output_mod, cast
//
// On AMX, products of bf16 with more than one row use AMX tiles (amx/few_row.h), and kTileQ is up
// to 32.
//
// Rows of K or V are copied to a buffer only when a key_mod or value_mod changes them, or when the
// head dim does not fill vectors (a load would reach past the row).
#pragma once
#include <fajit/cpu/few_row_kernel.h>
#if FAJIT_AMX
#include <fajit/cpu/amx/few_row.h>
#endif
#include <fajit/cpu/kv_walk.h>
#include <fajit/cpu/pack.h>
#include <fajit/cpu/packed_rows.h>
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

  struct NoSession {};
  static constexpr int kDim = round_up(Config::kHeadDim, KeyVector<Matrix, Matrix>::kElements);
  static constexpr int kDimV =
      round_up(Config::kHeadDimV, ValueStep<Matrix, Matrix>::kVectors* kLanes);
  static constexpr bool kKeysInPlace =
      !Hooks::kKeyMod && kDim == Config::kHeadDim && (same<Matrix, float> || same<K, Matrix>);
  static constexpr bool kValuesInPlace =
      !Hooks::kValueMod && kDimV == Config::kHeadDimV && (same<Matrix, float> || same<V, Matrix>);
  static constexpr int kTileKv = round_up(Config::kTileKv, kLanes);
#if FAJIT_AMX
  static_assert(kTileKv % kTileDepth == 0);  // tiles write whole steps of keys
  static constexpr bool kTiles = same<Matrix, bfloat16_t>;
  using TileSession = TileUnit;
#else
  static constexpr bool kTiles = false;
  using TileSession = NoSession;
#endif
  // Rows beyond the last are zero, so that a group of three runs as one of four.
  static constexpr int kTileRows = round_up(Config::kTileQ, kTiles ? 16 : kFewRowGroup);
  static constexpr bool kPairHooks = Hooks::kScore || Hooks::kMask;
  static constexpr bool kIndirect = Config::kIndirect;
  static constexpr bool kKeysOfRows = kIndirect && Hooks::kKeysReadRequest;

  // Up to this many rows are computed with vectors, more with AMX tiles: one row took 5.7 ms with
  // vectors; two took 6.1 with tiles and 7.6 with vectors (8 requests of 4,096 keys, 8 KV heads, 2
  // threads, timed by hand).
  static constexpr int kVectorRows = 1;

  // Element types of K and V as the products read them.
  using Key = Choose<kKeysInPlace, K, Matrix>;
  using Value = Choose<kValuesInPlace, V, Matrix>;

  // How many rows ahead the products prefetch, through the table of addresses.
  static constexpr int kAheadK = prefetch_keys(kDim * sizeof(Key));
  static constexpr int kAheadV = prefetch_keys(kDimV * sizeof(Value));
  static constexpr int kAhead = kAheadK > kAheadV ? kAheadK : kAheadV;
  using KvRows = KeysOf<Config, kAhead>;

 public:
  FewRow(const Context& c, Carver& carver)
      : c_(c),
        q_(carver.take<Matrix>(uint64_t{kTileRows} * kDim)),
        o_(carver.take<float>(uint64_t{kTileRows} * kDimV)),
        s_(carver.take<float>(uint64_t{kTileRows} * kTileKv)),
        qt_(carver.take<int32_t>(kTiles ? uint64_t{kTileRows} * kDim / 2 : 0)),
        k_rows_(kKeysInPlace ? nullptr : carver.take<Matrix>(uint64_t{kTileKv} * kDim)),
        v_rows_(kValuesInPlace ? nullptr : carver.take<Matrix>(uint64_t{kTileKv} * kDimV)),
        base_(carver.take<float>(kTileRows + kLanes)),
        sums_(carver.take<float>(uint64_t{kTileRows} * kLanes)),
        h_(carver.take<int32_t>(kTileRows + kLanes)),
        q_idx_(carver.take<int32_t>(kTileRows)),
        rows_(carver.take<Rows>(kTileRows)),
        b_(carver.take<int32_t>(kIndirect ? kTileRows + kLanes : 0)),
        kv_(carver) {}

  using Session = Choose<kTiles, TileSession, NoSession>;

  void run_tile(const fajit_work& w, int32_t row0, int count) {
    const fajit_args& a = *c_.args;
    if constexpr (kIndirect) c_.kv_request = a.row_request != nullptr ? w.request : -1;
    __builtin_memset(q_, 0, sizeof(Matrix) * kTileRows * kDim);
    __builtin_memset(o_, 0, sizeof(float) * kTileRows * kDimV);
    for (int i = 0; i < count; ++i) {
      const PackedRow row = packed_row<kIndirect>(a, w, row0 + i);
      h_[i] = row.h;
      q_idx_[i] = row.q_idx;
      if constexpr (kIndirect) b_[i] = row.b;
      base_[i] = -kInf;
      store(sums_ + i * kLanes, vf{});
      if constexpr (kPairHooks) rows_[i] = Hooks::rows(c_, row.b, row.h, row.q_idx);
      convert_query<Config, Hooks, kDim>(c_, w, row, q_ + i * kDim);
      if constexpr (kPaired<Matrix, Key, kDim>) paired_row<kDim>(q_ + i * kDim);
    }
    if constexpr (kTiles) pack_queries(count);
    const RowSpan span = row_span<kIndirect>(w, b_, q_idx_, count);
    KvWalk<Config, Hooks, KvRows> walk(c_, w, span, row0, kv_);
    for (KvTile tile; walk.next(tile);) run_keys(w, tile, count);
    finish(w, row0, count);
  }

 private:
  // Transposes Q by words, for the products with AMX tiles.
  void pack_queries(int count) {
    const int blocks = (count + 15) / 16;
    for (int j = 0; j < blocks; ++j) {
      const int32_t* rows[kLanes];
      for (int i = 0; i < kLanes; ++i)
        rows[i] = reinterpret_cast<const int32_t*>(q_ + (j * 16 + i) * kDim);
      transpose_rows<kDim / 2>(rows, qt_ + j * kLanes, blocks * kLanes);
    }
  }

  __attribute__((noinline)) void run_keys(const fajit_work& w, const KvTile& tile, int count) {
    const fajit_args& a = *c_.args;
    const int32_t b = w.request, kv_h = w.head_begin / c_.group_size();
    const int keys = tile.end - tile.begin;
    const auto k_src = kv_.keys();
    const auto v_src = kv_.values();

    const float scale = kNaturalUnits<Hooks> ? a.scale : a.scale * kLog2e;
#if FAJIT_AMX
    RowStream<Config::kHeadDim * sizeof(K), Config::kHeadDimV * sizeof(V), kAhead, decltype(k_src),
              decltype(v_src)>
        stream(k_src, v_src, keys);
#endif
    const auto multiply = [&](auto k) __attribute__((always_inline)) {
#if FAJIT_AMX
      if constexpr (kTiles) {
        if (count > kVectorRows)
          return tile_few_scores<kDim>(k, keys, qt_, count, scale, s_, kTileKv, stream);
      }
#endif
      with_rows(count, [&](auto rows) {
        few_scores<Matrix, Key, kDim, rows.count, rows.groups>(k, keys, q_, scale, s_, kTileKv);
      });
    };
    if constexpr (kKeysInPlace) {
      multiply(k_src);
    } else {
      for (int n = 0; n < keys; ++n)
        convert_key<Config, Hooks, kDim>(c_, b, kv_h, kv_.position(n), k_src(n),
                                         k_rows_ + n * kDim);
      multiply(StridedRows<Matrix>{k_rows_, kDim});
    }

    soften(b, kv_h, tile, count);

    const int32_t* words = reinterpret_cast<const int32_t*>(s_);
    const auto accumulate = [&](auto v) __attribute__((always_inline)) {
#if FAJIT_AMX
      if constexpr (kTiles) {
        if (count > kVectorRows)
          return tile_few_values<kDimV>(v, keys, words, count, kTileKv, o_, stream);
      }
#endif
      with_rows(count, [&](auto rows) {
        if constexpr (rows.groups > 1) {
          grouped_values<Matrix, Value, kDimV, rows.count, rows.groups>(v, keys, words, kTileKv,
                                                                        o_);
        } else {
          few_values<Matrix, Value, kDimV, rows.count>(v, keys, words, kTileKv, o_);
        }
      });
    };
    if constexpr (kValuesInPlace) {
      accumulate(v_src);
    } else {
      for (int n = 0; n < keys; ++n)
        convert_value<Config, Hooks, kDimV>(c_, b, kv_h, kv_.position(n), v_src(n),
                                            v_rows_ + n * kDimV);
      accumulate(StridedRows<Matrix>{v_rows_, kDimV});
    }
  }

  template <int N, int G>
  struct Groups {
    static constexpr int count = N, groups = G;
  };
  // Calls `f` with a group size for rows [0, count): the rows of a group share each loaded vector.
  // One group of 1, 2 or 4 rows, or all groups of 4. Results of rows past `count` are not read.
  template <class F>
  FAJIT_INLINE void with_rows(int count, F f) {
    if constexpr (kTiles) {
      static_assert(kVectorRows == 1);
      return f(Groups<1, 1>{});
    }
    constexpr int all = kTileRows / kFewRowGroup;
    if (all > 1 && count > kFewRowGroup) {
      f(Groups<kFewRowGroup, all>{});
    } else if (count >= 3) {
      f(Groups<4, 1>{});
    } else if (count == 2) {
      f(Groups<2, 1>{});
    } else {
      f(Groups<1, 1>{});
    }
  }

  // Hooks and softmax: scores in s_ become weights in place, o_ is rescaled.
  __attribute__((flatten)) void soften(int32_t b, int32_t kv_h, const KvTile& tile, int count) {
    const int keys = tile.end - tile.begin, vectors = (keys + kLanes - 1) / kLanes;
    const bool masked = Hooks::kMask && tile.state != FAJIT_TILE_FULL;
    vf top[kTileRows];
    for (int r = 0; r < count; ++r) top[r] = splat(-kInf);
    for (int j = 0; j < vectors; ++j) {
      const vi inside = iota() + j * kLanes < keys;
      const vi kv_idx = kv_.positions(j * kLanes, inside, keys - 1);
      [[maybe_unused]] Keys key;
      if constexpr (kPairHooks && !kKeysOfRows) key = Hooks::keys(c_, b, kv_h, kv_idx);
      for (int r = 0; r < count; ++r) {
        float* s = s_ + r * kTileKv + j * kLanes;
        vf x = load(s);
        if constexpr (kPairHooks && kKeysOfRows)
          if (r == 0 || b_[r] != b_[r - 1]) key = Hooks::keys(c_, b_[r], kv_h, kv_idx);
        if constexpr (Hooks::kScore) x = Hooks::score(c_, x, rows_[r], key);
        if constexpr (Hooks::kPointwise) {
          x = Hooks::pointwise(c_, x);
          if constexpr (Hooks::kPointwiseScale)
            x = x * Hooks::pointwise_scale(c_, kIndirect ? b_[r] : b, h_[r], q_idx_[r]);
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

  // One row's scores of a tile become weights e^(s - base), where the base is the row's maximum:
  // the largest weight is 1, which bf16 holds exactly. Most tiles of a long row do not raise the
  // maximum, and need neither a horizontal reduction nor rescaling (100 of 640 ns for 64 keys and 4
  // rows, during which no row of K or V is fetched).
  FAJIT_INLINE void normalize_row(int r, int vectors, vf top) {
    if (any(top > base_[r])) {
      const float highest = max(base_[r], reduce_max(top));
      const float rescale = math::exp2((base_[r] - highest) * kToBase2<Hooks>);
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
      const vf x = weight_exp2<float>((load(s) - base) * kToBase2<Hooks>);
      sum += x;
      store(s, x);
    }
    store(sums_ + r * kLanes, sum);
  }

  void finish(const fajit_work& w, int32_t row0, int count) {
    const Writer writer{c_, w.request, emit_of(*c_.args, w.partial)};
    for (int first = 0; first < count; first += kLanes) {
      vf sum{};
      for (int i = 0; i < kLanes; ++i) {
        if (first + i < count) {
          sum[i] = reduce_add(load(sums_ + (first + i) * kLanes));
        } else {  // a lane without a row
          h_[first + i] = h_[0];
          if constexpr (kIndirect) b_[first + i] = b_[0];
          base_[first + i] = -kInf;
        }
      }
      const vi b = kIndirect ? load<vi>(b_ + first) : splat(w.request);
      const Normalized n =
          writer.normalizer(load(base_ + first) * kToNatural<Hooks>, sum, b, load<vi>(h_ + first));
      for (int i = 0; i < kLanes && first + i < count; ++i) {
        const int32_t packed = row0 + first + i;
        float* o = o_ + (first + i) * kDimV;
        for (int d = 0; d < kDimV; d += kLanes) store(o + d, load(o + d) * n.factor[i]);
        ordered_dims<Matrix, Value, kDimV>(o);
        writer.write(packed_row<kIndirect>(*c_.args, w, packed),
                     int64_t{w.partial} - w.row_begin + packed, o, n.lse[i]);
      }
    }
  }

  Context c_;
  Matrix* q_;       // [row][kDim]
  float* o_;        // [row][kDimV]
  float* s_;        // [row][key]
  int32_t* qt_;     // [block of rows][word][row], for AMX tiles
  Matrix* k_rows_;  // [key][kDim] when keys are not used in place
  Matrix* v_rows_;
  float* base_;  // per row, in the units of scores
  float* sums_;  // [row][lane]: partial sums of weights
  int32_t* h_;
  int32_t* q_idx_;
  Rows* rows_;
  int32_t* b_;  // request of each row, indirect kernels only
  KvRows kv_;
};

}  // namespace fajit
