// Few rows: decoding and other tiles of a few packed query rows, bound by memory.
//
//   for each tile of kTileQ packed rows                                   Q kept in L1
//     for each key tile that the mask does not empty
//       for each kv head of the items that run together (kMaxHeads)
//         S = Q K^T            few_scores: K read in place, lanes over head_dim
//         hooks, mask, max, exp, sum of each row, keys on lanes
//         O = alpha O + P V    few_values: V read in place, lanes over head_dim_v
//     after a sum block of keys (kv_walk.h), sums and O are added to the totals
//   normalise, sink, output_mod, cast
//
// On AMX, bf16 uses AMX tiles (amx/few_row.h) for any number of rows; kTileQ is up to 32.
//
// Rows of K or V are copied to a buffer only when a key_mod or value_mod does more than decode
// them, when codes have a codebook or groups of channels (latent rows too) and are not multiplied
// as they are, or when the head dim does not fill vectors (a load would reach past the row). Q
// takes scales of channels, which blocks of keys share (codes/channels.h).
#pragma once
#include <fajit/cpu/codes/channels.h>
#include <fajit/cpu/codes/code_products.h>
#include <fajit/cpu/few_row_kernel.h>
#if FAJIT_AMX
#include <fajit/cpu/amx/few_row.h>
#include <fajit/cpu/amx/tiles_or_vectors.h>
#endif
#include <fajit/cpu/kv_walk.h>
#include <fajit/cpu/pack.h>
#include <fajit/cpu/packed_rows.h>
#include <fajit/cpu/scratch.h>
#include <fajit/cpu/softmax.h>

namespace fajit {

template <class Config, class Hooks, bool OnTiles>
class FewRowKernel {
  using Q = typename Config::Q;
  using K = typename Config::K;
  using V = typename Config::V;
  using Matrix = typename Config::Matrix;
  using Rows = decltype(Hooks::rows(Context{}, 0, int32_t{}, int32_t{}));
  using Keys = decltype(Hooks::keys(Context{}, 0, 0, vi{}));
  using Writer = RowWriter<Config, Hooks>;

  static constexpr int kDim = round_up(Config::kHeadDim, KeyVector<Matrix, Matrix, 0>::kElements);
  static constexpr int kDimV =
      round_up(Config::kHeadDimV, ValueStep<Matrix, Matrix, 0>::kVectors* kLanes);
  // Rows that products can read where they are: whole vectors, in each half of packed codes.
  static constexpr bool kWholeKeys =
      !same<K, latent_t> &&
      Config::kHeadDim % (kPerElement<K> * KeyVector<Matrix, Matrix, 0>::kElements) == 0;
  static constexpr bool kWholeValues =
      !same<V, latent_t> &&
      Config::kHeadDimV % (kPerElement<V> * ValueStep<Matrix, Matrix, 0>::kVectors * kLanes) == 0;
  // What hooks that only decode rows need.
  using KeyNumbers = typename Hooks::KeyNumbers;
  using ValueNumbers = typename Hooks::ValueNumbers;
  static constexpr bool kDecodesKeys = kIsDecoding<KeyNumbers, K>,
                        kDecodesValues = kIsDecoding<ValueNumbers, V>;
  static constexpr bool kKeyChannels = kByChannel<KeyNumbers, K>,
                        kValueChannels = kByChannel<ValueNumbers, V>;
  static constexpr int kTileKv = round_up(Config::kTileKv, kLanes);
#if FAJIT_AMX
  static_assert(kTileKv % kTileDepth == 0);  // tiles write whole steps of keys
  static constexpr bool kTiles = OnTiles && same<Matrix, bfloat16_t>;
  using TileSession = TileUnit;
  // Whether tiles read V where it is, else in pairs of rows.
  static constexpr bool kWide = kTiles && kDimV >= 256;
  static constexpr int kPairWords = kTiles && !kWide ? kTileKv / 2 * kDimV : 0;
#else
  static constexpr bool kTiles = false, kWide = false;
  static constexpr int kPairWords = 0;
  using TileSession = NoSession;
#endif
  // Rows beyond the last are zero, so that a group of three runs as one of four.
  static constexpr int kGroup = kTiles ? 16 : kFewRowGroup;
  static constexpr int kTileRows = round_up(Config::kTileQ, kGroup);
  static constexpr int kPaddedRows = kTileRows + kLanes;
  static constexpr bool kPairHooks = Hooks::kScore || Hooks::kMask;
  static constexpr bool kIndirect = Config::kIndirect;
  static constexpr bool kKeysOfRows = kIndirect && Hooks::kKeysReadRequest;

  // Codes are multiplied with Q times the scales that their channels have in a block of keys.
  static constexpr bool kFoldsKeys = !kTiles && kWholeKeys && takes_folded<KeyNumbers, K, Q>();
  using ScoreNumbers = Choose<kFoldsKeys, Unscaled, KeyNumbers>;
  // Codes that are multiplied as they are.
  using KeyProducts = CodeProducts<!kTiles && kWholeKeys, Q, K, kDim, ScoreNumbers>;
  using ValueProducts = CodeProducts<!kTiles && kWholeValues, Q, V, kDimV, ValueNumbers>;
  static constexpr bool kCodeKeys = KeyProducts::kTakes, kCodeValues = ValueProducts::kTakes;
  // One scale of a row multiplies its scores or its weight instead.
  static constexpr bool kScaleScores = !kCodeKeys && kWholeKeys && kIsScale<KeyNumbers>;
  static constexpr bool kScaleWeights = !kCodeValues && kWholeValues && kIsScale<ValueNumbers>;
  static constexpr bool kKeysInPlace =
      kCodeKeys || kScaleScores || kFoldsKeys || (!Hooks::kKeyMod && kWholeKeys);
  static constexpr bool kValuesInPlace =
      kCodeValues || kScaleWeights || (!Hooks::kValueMod && kWholeValues);
  // Whether values may be the first dims of decoded keys: 8 rows of latents (e4m3, 576 + 512 dims)
  // took 0.78 of the time when these were decoded once (Zen 4, cpu:avx512_bf16, by hand).
  static constexpr bool kMayBeKeys =
      !kKeysInPlace && !kValuesInPlace && Config::kHeadDimV == kDimV && kDimV <= kDim &&
      may_be_keys<Hooks, K, V, Config::kHeadDim, Config::kHeadDimV>();
  // Groups of channels whose weights differ.
  static constexpr int kWeightGroups = kCodeValues ? ValueNumbers::kGroups : 1;
  // Keys that several groups of rows read are converted once, where that costs more than a shift.
  static constexpr bool kConvertOnce = !kTiles && !kCodeKeys && kKeysInPlace && !same<K, Matrix> &&
                                       !kPaired<Matrix, K, kDim> && kTileRows > kFewRowGroup;
  // Keys of a list, or of blocks that a hook makes small, may be few of each block: decoded.
  static constexpr bool kMayDecode = kFoldsKeys;

  // Element types of K and V as the products read them.
  using Key = Choose<kKeysInPlace, K, Matrix>;
  using Value = Choose<kValuesInPlace, V, Matrix>;

  static constexpr int kStepK = elements_of<K>(Config::kHeadDim),  // from a head to the next
      kStepV = elements_of<V>(Config::kHeadDimV);
  static constexpr int kBytesK = kStepK * sizeof(K), kBytesV = kStepV * sizeof(V);
  static constexpr int kRowBytes = larger_of(kBytesK, kBytesV);
  // Rows of K and V are prefetched this many rows ahead of those in use. A tile before that, their
  // pages are touched, all of a tile at once, so that misses of the TLB overlap: decoding takes 0.6
  // of the time in fp32 and 0.7 to 0.8 in bf16 with this and the order of RowStream (one thread of
  // a virtual machine on a Zen 4, cpu:avx2, timed by hand). Without touching, pages of 4 KB
  // took 1.4 times as long as pages of 2 MB.
  static constexpr int kAheadK = prefetch_keys(kBytesK), kAheadV = prefetch_keys(kBytesV);

 public:
  // Where the kv heads of a token are adjacent ([B, N, H, D], [N, H, D], pages), items of the same
  // rows and keys run together, tile by tile, up to 2 KB of a token: memory is then read in its
  // order, and a page is translated once for all heads. Their K and V of a tile stay in L2, of
  // which CPUs with AMX have 2 MB: 4 KB, 8 heads of 128 in fp32, take 0.9 of the time there.
  static constexpr int kRows = (FAJIT_AMX ? 4096 : 2048) / kRowBytes;  // of a token
  static constexpr bool kAlone = Config::kBlockMask || Hooks::kMaskReadsHead || kRows < 2;
  static constexpr int kMaxHeads = kAlone ? 1 : kRows < 8 ? kRows : 8;

 private:
  // Several heads prefetch a tile ahead, AMX tiles at least.
  static constexpr int kMostAhead =
      larger_of(kMaxHeads > 1 || kTiles ? kTileKv : 0, larger_of(kAheadK, kAheadV));
  using KvRows = KeysOf<Config, kMostAhead + 2 * kTileKv>;
  // Keys of a sum block; where the totals begin.
  static constexpr int kSumKeys = 512;
  static constexpr int kAllRows = kMaxHeads * kTileRows, kTotalO = kAllRows * kDimV,
                       kTotalSums = kAllRows * kLanes, kTotalBase = kMaxHeads * kPaddedRows;

 public:
  FewRowKernel(const Context& c, Carver& carver)
      : c_(c),
        q_(carver.take<Matrix>(uint64_t{kMaxHeads} * kTileRows * kDim)),
        o_(carver.take<float>(uint64_t{2} * kAllRows * kDimV)),
        s_(carver.take<float>(uint64_t{kWide ? 2 : kWeightGroups} * kTileRows * kTileKv)),
        qt_(carver.take<int32_t>(kTiles ? uint64_t{kMaxHeads} * kTileRows * kDim / 2 : 0)),
        k_rows_(kKeysInPlace && !kConvertOnce && !kMayDecode
                    ? nullptr
                    : carver.take<Matrix>(uint64_t{kTileKv} * kDim)),
        v_rows_(kValuesInPlace ? nullptr : carver.take<Matrix>(uint64_t{kTileKv} * kDimV)),
        pairs_(carver.take<int32_t>(kPairWords)),
        key_numbers_(carver.take<float>(uint64_t{kMaxHeads} * KeyNumbers::kCount * kTileKv)),
        value_numbers_(carver.take<float>(uint64_t{kMaxHeads} * ValueNumbers::kCount * kTileKv)),
        queries_(carver.take<CodeRow>(kCodeKeys ? kMaxHeads * kTileRows : 0)),
        query_sums_(
            carver.take<int32_t>(kCodeKeys ? kMaxHeads * kTileRows * (kDim / kLeastGroup) : 0)),
        folded_(carver.take<Matrix>(kFoldsKeys ? kTileRows * kDim : 0)),
        block_s_(carver.take<float>(kFoldsKeys ? kTileRows * kTileKv : 0)),
        weights_(carver.take<CodeRow>(kCodeValues ? kWeightGroups * kTileRows : 0)),
        zero_sums_(carver.take<float>(kCodeValues ? kWeightGroups * kTileRows : 0)),
        base_(carver.take<float>(2 * kMaxHeads * kPaddedRows)),
        sums_(carver.take<float>(uint64_t{2} * kAllRows * kLanes)),
        h_(carver.take<int32_t>(kMaxHeads * kPaddedRows)),
        q_idx_(carver.take<int32_t>(kTileRows)),
        rows_(carver.take<Rows>(kMaxHeads * kTileRows)),
        b_(carver.take<int32_t>(kIndirect ? kPaddedRows : 0)),
        kv_(carver) {}

  using Session = Choose<kTiles, TileSession, NoSession>;
  static constexpr bool kOnTiles = kTiles, kOnlyCodes = kCodeKeys && kCodeValues;

  // Packed rows [row0, row0 + count) of `heads` items, which differ in their kv heads alone: those
  // from that of the first item on. `next`: the item that may follow, or null.
  void run_tile(const fajit_work* items, int heads, int row0, int count, const fajit_work* next) {
    const fajit_work& w = items[0];
    const fajit_args& a = *c_.args;
    Session::configure(count < 16 && !kWide ? count : 16);
    if constexpr (kIndirect) c_.kv_request = a.row_request != nullptr ? w.request : -1;
    key_products_ = KeyProducts::template of<KeyNumbers>(c_);
    value_products_ = ValueProducts::template of<ValueNumbers>(c_);
    for (int j = 0; j < heads; ++j) start_head(items[j], head(j), row0, count);
    const RowSpan span = row_span<kIndirect>(w, b_, q_idx_, count);
    KvWalk<Config, Hooks, KvRows, kSumKeys> walk(c_, w, span, row0, kv_);
    totals_ = false;
    kv_.follow(next, c_.group_size());
    // Rows that are prefetched ahead.
    const int ahead_k = heads > 1 ? kTileKv : larger_of(kAheadK, kTiles ? kTileKv : 0);
    const int ahead_v = heads > 1 ? kTileKv : larger_of(kAheadV, kTiles ? kTileKv : 0);
    for (KvTile tile; walk.next(tile);) {
      const KeyRows k = kv_.keys();
      const ValueRows v = kv_.values();
      const int keys = tile.end - tile.begin, left = keys + walk.left();
      if (tile.ends_sums) add_to_totals(heads, count);
      if (!tile.follows) {
        start_rows<kTileKv, kBytesK>(k, ahead_k, heads, left);
        start_rows<kTileKv, kBytesV>(v, ahead_v, heads, left);
      }
      touch_pages<kTileKv>(k, ahead_k + kTileKv);
      touch_pages<kTileKv>(v, ahead_v + kTileKv);
      load_head_numbers<KeyNumbers, K, Config::kHeadDim, kTileKv>(c_, w, heads, kv_, keys,
                                                                  key_numbers_, key_blocks_);
      load_head_numbers<ValueNumbers, V, Config::kHeadDimV, kTileKv>(c_, w, heads, kv_, keys,
                                                                     value_numbers_, value_blocks_);
      RowStream<KeyRows> next_k(k.from(ahead_k, 0), heads * kBytesK);
      RowStream<ValueRows> next_v(v.from(ahead_v, 0), heads * kBytesV);
      for (int j = 0; j < heads; ++j) {
        run_keys(items[j], head(j), j, tile, count, k.from(0, j * kStepK), v.from(0, j * kStepV),
                 next_k, next_v);
      }
    }
    if (totals_) add_to_totals(heads, count);
    for (int j = 0; j < heads; ++j) finish(items[j], head(j), row0, count);
  }

 private:
  using KeyRows = decltype(static_cast<const KvRows*>(nullptr)->keys());
  using ValueRows = decltype(static_cast<const KvRows*>(nullptr)->values());
#if FAJIT_AMX
  using Stream = TileStream<kBytesK, kBytesV, RowStream<KeyRows>, RowStream<ValueRows>>;
#else
  using Stream = NoStream;
#endif

  // The state of the rows of one kv head.
  struct Head {
    Matrix* q;
    float* o;
    int32_t* qt;
    CodeRow* queries;
    int32_t* query_sums;
    float* base;
    float* sums;
    int32_t* h;
    Rows* rows;
  };
  FAJIT_INLINE Head head(int j) const {
    const int row = j * kTileRows;
    return {q_ + row * kDim,
            o_ + row * kDimV,
            qt_ + (kTiles ? row * kDim / 2 : 0),
            queries_ + (kCodeKeys ? row : 0),
            query_sums_ + (kCodeKeys ? row * (kDim / kLeastGroup) : 0),
            base_ + j * kPaddedRows,
            sums_ + row * kLanes,
            h_ + j * kPaddedRows,
            rows_ + row};
  }

  void start_head(const fajit_work& w, const Head& s, int32_t row0, int count) {
    const int rows = (count + kGroup - 1) / kGroup * kGroup;
    __builtin_memset(s.q, 0, sizeof(Matrix) * rows * kDim);
    __builtin_memset(s.o, 0, sizeof(float) * rows * kDimV);
    for (int i = 0; i < count; ++i) {
      const PackedRow row = packed_row<kIndirect>(*c_.args, w, row0 + i);
      s.h[i] = row.h;
      q_idx_[i] = row.q_idx;
      if constexpr (kIndirect) b_[i] = row.b;
      s.base[i] = -kInf;
      store(s.sums + i * kLanes, vf{});
      if constexpr (kPairHooks) s.rows[i] = Hooks::rows(c_, row.b, row.h, row.q_idx);
      convert_query<Config, Hooks, kDim>(c_, w, row, s.q + i * kDim);
      if constexpr (kPaired<Matrix, Key, kDim>) paired_row<kDim>(s.q + i * kDim);
      if constexpr (kCodeKeys && !kFoldsKeys) {  // in place
        alignas(64) float x[kDim];
        load_row<Matrix, kDim>(s.q + i * kDim, x);
        s.queries[i] = key_products_.template query<kDim>(
            x, reinterpret_cast<int8_t*>(s.q + i * kDim),
            KeyNumbers::kGroups > 1 ? s.query_sums + i * (kDim / kLeastGroup) : nullptr);
      }
    }
#if FAJIT_AMX
    if constexpr (kTiles) pack_queries<kDim>(s.q, count, s.qt);
#endif
  }

  // Adds the sums of a sum block to the totals and sets them to 0.
  __attribute__((noinline)) void add_to_totals(int heads, int count) {
    for (int i = 0; i < heads * count; ++i) {
      const Head s = head(i / count);
      const int r = i % count;
      const float base = s.base[r], old = totals_ ? s.base[kTotalBase + r] : base;
      const vf kept = splat(old == base ? 1.0f : math::exp2((old - base) * kToBase2<Hooks>));
      s.base[kTotalBase + r] = base;
      add_sums(s.sums + r * kLanes, s.sums + kTotalSums + r * kLanes, kept, totals_);
      for (int d = r * kDimV; d < (r + 1) * kDimV; d += kLanes)
        add_sums(s.o + d, s.o + kTotalO + d, kept, totals_);
    }
    totals_ = true;
  }

  // One head's products with a tile of keys, during which as many rows are prefetched.
  __attribute__((noinline)) void run_keys(const fajit_work& w, const Head& s, int number,
                                          const KvTile& tile, int count, KeyRows k_src,
                                          ValueRows v_src, RowStream<KeyRows>& next_k,
                                          RowStream<ValueRows>& next_v) {
    const fajit_args& a = *c_.args;
    const int32_t b = w.request, kv_h = w.head_begin / c_.group_size();
    const int keys = tile.end - tile.begin;
    [[maybe_unused]] const float* const key_numbers =
        key_numbers_ + number * KeyNumbers::kCount * kTileKv;
    [[maybe_unused]] const float* const value_numbers =
        value_numbers_ + number * ValueNumbers::kCount * kTileKv;

    const bool same_rows = same_address(k_src(0), v_src(0));
    bool are_keys = false;  // whether values are decoded keys
    if constexpr (kMayBeKeys)
      are_keys = same_rows &&
                 same_numbers<KeyNumbers, ValueNumbers, kTileKv>(key_numbers, value_numbers, keys);
    const float scale = kNaturalUnits<Hooks> ? a.scale : a.scale * kLog2e;
    Stream stream(next_k, next_v, keys, same_rows);  // products with vectors prefetch on their own
    const auto fetch = [&]() __attribute__((always_inline)) { next_k.template next<kBytesK>(); };
    // Scores of keys [0, keys) of k, with rows of Q or what Q was folded to.
    const auto multiply_with = [&](auto k, int keys, const Matrix* q, const CodeRow* queries,
                                   float* to) __attribute__((always_inline)) {
#if FAJIT_AMX
      if constexpr (kTiles) {
        // Values in place, or those that are decoded keys, are packed during these products.
        const bool packs = !kWide && (kValuesInPlace || are_keys);
        const auto rows = either<kValuesInPlace>(v_src, StridedRows<Matrix>{k_rows_, kDim});
        PairedValues<kDimV, decltype(rows)> pairs(rows, packs ? keys : 0, pairs_);
        const auto between = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 1
          for (int i = 0; i < 16; i += kScoreSteps<kDim>) {
            if (packs) pairs.next(1);
            stream.next(1);
          }
        };
        return tile_few_scores<kDim, kWide>(k, keys, s.qt, count, scale, s_, kTileKv, stream,
                                            between);
      }
#endif
      with_rows<kTiles ? 0 : kTileRows>(count, [&](auto rows, int groups) {
        using Read = typename decltype(k)::Element;
        // Several groups never read keys that are converted once.
        if constexpr (kCodeKeys && !same<Read, Matrix>)
          code_scores<ScoreNumbers, kDim, rows.count, rows.several, kTileKv,
                      kDim* int{sizeof(Matrix)}>(key_products_, k, keys, key_numbers,
                                                 reinterpret_cast<const int8_t*>(q), queries,
                                                 s.query_sums, groups, scale, to, kTileKv, fetch);
        else if constexpr (!kConvertOnce || kMayDecode || rows.several == same<Read, Matrix>)
          few_scores<Matrix, Read, kDim, rows.count>(k, keys, q, groups, scale, to, kTileKv, fetch);
      });
    };
    const auto multiply = [&](auto k) __attribute__((always_inline)) {
      if constexpr (kFoldsKeys)
        fold_blocks<KeyNumbers, kDim, kTileRows>(
            c_, key_products_, b, kv_h, kv_, key_blocks_, s.q, count, scale, folded_, queries_, s_,
            block_s_, kTileKv, [&](int n, int own, float* to) __attribute__((always_inline)) {
              multiply_with(k.from(n, 0), own, folded_, queries_, to);
            });
      else multiply_with(k, keys, s.q, s.queries, s_);
    };
    const auto multiply_decoded = [&]() __attribute__((always_inline)) {
      if constexpr (kKeyChannels)
        decode_blocks<KeyNumbers, Config::kHeadDim, kDim>(c_, b, kv_h, k_src, kv_, key_blocks_,
                                                          keys, k_rows_);
      multiply_with(StridedRows<Matrix>{k_rows_, kDim}, keys, s.q, s.queries, s_);
    };
    const auto multiply_converted = [&]() __attribute__((always_inline)) {
      const Table table = Table::of<KeyNumbers>(c_);
      for (int n = 0; n < keys; ++n) {
        stream.next(n % 2);
        Matrix* const to = k_rows_ + n * kDim;
        if constexpr (kDecodesKeys && !kKeysInPlace)
          decode_row<KeyNumbers, K, Config::kHeadDim, kDim, kTileKv>(k_src(n), key_numbers + n,
                                                                     table, to);
        else
          convert_key<Config, Hooks, kDim, !kKeysInPlace>(c_, b, kv_h, kv_.position(n), k_src(n),
                                                          to);
      }
      multiply(StridedRows<Matrix>{k_rows_, kDim});
    };
    if (kMayDecode && key_blocks_.count > 2 + keys / 32) {
      multiply_decoded();
    } else if constexpr (kKeyChannels && !kFoldsKeys) {
      multiply_decoded();
    } else if constexpr (!kKeysInPlace) {
      multiply_converted();
    } else if constexpr (kConvertOnce) {
      count > kFewRowGroup ? multiply_converted() : multiply(k_src);
    } else {
      multiply(k_src);
    }

    soften(s, b, kv_h, key_numbers, value_numbers, tile, count, stream);

    const int32_t* words = reinterpret_cast<const int32_t*>(s_);
    const auto accumulate = [&](auto v) __attribute__((always_inline)) {
#if FAJIT_AMX
      if constexpr (kTiles)
        return tile_few_values<kDimV, kWide, kTileRows>(v, kValuesInPlace || are_keys, keys, words,
                                                        count, kTileKv, s.o, pairs_, stream);
#endif
      with_rows<kTiles ? 0 : kTileRows>(count, [&](auto rows, int groups) {
        if constexpr (kCodeValues)
          return code_values<ValueNumbers, kDimV, rows.count, kTileRows, kTileKv>(
              value_products_, v, keys, reinterpret_cast<const int8_t*>(s_), weights_, zero_sums_,
              groups, s.o, [&]() __attribute__((always_inline)) {
                next_v.template next<kFetchedKeys<ValueProducts> * kBytesV /
                                     kValuePasses<ValueProducts, kDimV, rows.count>>();
              });
        constexpr int steps = ValueParts<kDimV, rows.count>::count;  // for a row
        constexpr int piece = kBytesV * ValueStep<Matrix, Value, kDimV>::kKeys / steps;
        few_values<Matrix, Value, kDimV, rows.count, rows.several>(
            v, keys, words, kTileKv, groups, s.o,
            [&]() __attribute__((always_inline)) { next_v.template next<piece>(); });
      });
    };
    if constexpr (kValuesInPlace) {
      accumulate(v_src);
    } else {
      StridedRows<Matrix> values{v_rows_, kDimV};
      if (are_keys) {
        values = {k_rows_, kDim};
      } else if constexpr (kValueChannels) {
        decode_blocks<ValueNumbers, Config::kHeadDimV, kDimV>(c_, b, kv_h, v_src, kv_,
                                                              value_blocks_, keys, v_rows_);
      } else if constexpr (kDecodesValues) {
        const Table table = Table::of<ValueNumbers>(c_);
        for (int n = 0; n < keys; ++n)
          decode_row<ValueNumbers, V, Config::kHeadDimV, kDimV, kTileKv>(
              v_src(n), value_numbers + n, table, v_rows_ + n * kDimV);
      } else {
        for (int n = 0; n < keys; ++n)
          convert_value<Config, Hooks, kDimV>(c_, b, kv_h, kv_.position(n), v_src(n),
                                              v_rows_ + n * kDimV);
      }
      accumulate(values);
    }
    stream.next(kTileKv);
  }

  // Hooks and softmax: scores in s_ become weights in place, o_ is rescaled.
  __attribute__((flatten)) void soften(const Head& head, int32_t b, int32_t kv_h,
                                       [[maybe_unused]] const float* key_scales,
                                       const float* value_numbers, const KvTile& tile, int count,
                                       Stream& stream) {
    const int keys = tile.end - tile.begin, vectors = (keys + kLanes - 1) / kLanes;
    const bool masked = Hooks::kMask && tile.state != FAJIT_TILE_FULL;
    vf top[kTileRows];
    for (int r = 0; r < count; ++r) top[r] = splat(-kInf);
    for (int j = 0; j < vectors; ++j) {
      const vi inside = iota() + j * kLanes < keys;
      stream.next(1);
      const vi kv_idx = kv_.positions(j * kLanes, inside, keys - 1);
      [[maybe_unused]] Keys key;
      if constexpr (kPairHooks && !kKeysOfRows) key = Hooks::keys(c_, b, kv_h, kv_idx);
      for (int r = 0; r < count; ++r) {
        float* s = s_ + r * kTileKv + j * kLanes;
        vf x = load(s);
        if constexpr (kScaleScores) x *= load(key_scales + j * kLanes);
        if constexpr (kPairHooks && kKeysOfRows)
          if (r == 0 || b_[r] != b_[r - 1]) key = Hooks::keys(c_, b_[r], kv_h, kv_idx);
        if constexpr (Hooks::kScore) x = Hooks::score(c_, x, head.rows[r], key);
        if constexpr (Hooks::kPointwise) {
          x = Hooks::pointwise(c_, x);
          if constexpr (Hooks::kPointwiseScale)
            x = x * Hooks::pointwise_scale(c_, kIndirect ? b_[r] : b, head.h[r], q_idx_[r]);
        }
        const vf hidden = splat(Hooks::kPointwise ? 0.0f : -kInf);
        if constexpr (Hooks::kMask)
          if (masked) x = select(Hooks::mask(c_, head.rows[r], key), x, hidden);
        x = select(inside, x, hidden);
        store(s, x);
        top[r] = max(top[r], x);
      }
    }
    for (int r = 0; r < count; ++r) {
      stream.next(1);
      if constexpr (!Hooks::kPointwise) normalize_row(head, r, vectors, top[r]);
      if constexpr (!kCodeValues) put_weights(s_ + r * kTileKv, vectors, value_numbers, count);
    }
    if constexpr (kCodeValues)
      with_rows<kTileRows>(count, [&](auto rows, int groups) {
        for (int i = 0; i < groups * rows.count; i += rows.count)
          put_code_weights<ValueNumbers, rows.count, kTileRows, kTileKv>(
              value_products_, s_ + i * kTileKv, vectors, value_numbers, weights_ + i,
              zero_sums_ + i);
      });
  }

  // A row of weights as the second product reads them: times the scales of values.
  FAJIT_INLINE void put_weights(float* row, int vectors, [[maybe_unused]] const float* numbers,
                                [[maybe_unused]] int count) {
    if constexpr (kScaleWeights)
      for (int n = 0; n < vectors * kLanes; n += kLanes)
        store(row + n, load(row + n) * load(numbers + n));
#if FAJIT_AMX
    if constexpr (kWide) return put_word_weights<kTileRows>(row, count, vectors, kTileKv);
#endif
    pack_row_weights<Matrix, Value, kDimV>(row, vectors * kLanes);
  }

  // One row's scores of a tile become weights e^(s - base), where the base is the row's maximum:
  // the largest weight is 1, which bf16 holds exactly. Most tiles of a long row do not raise the
  // maximum, and need neither a horizontal reduction nor rescaling (100 of 640 ns for 64 keys and 4
  // rows, during which no row of K or V is fetched).
  FAJIT_INLINE void normalize_row(const Head& head, int r, int vectors, vf top) {
    if (any(top > head.base[r])) {
      const float highest = max(head.base[r], reduce_max(top));
      const float rescale = math::exp2((head.base[r] - highest) * kToBase2<Hooks>);
      head.base[r] = highest;
      store(head.sums + r * kLanes, load(head.sums + r * kLanes) * rescale);
      for (int d = 0; d < kDimV; d += kLanes)
        store(head.o + r * kDimV + d, load(head.o + r * kDimV + d) * rescale);
    }
    // A row without a key so far: any finite base makes its weights 0.
    const float base = head.base[r] == -kInf ? 0.0f : head.base[r];
    vf sum{};
    for (int j = 0; j < vectors; ++j) {
      float* s = s_ + r * kTileKv + j * kLanes;
      const vf x = weight_exp2<float>((load(s) - base) * kToBase2<Hooks>);
      sum += x;
      store(s, x);
    }
    store(head.sums + r * kLanes, load(head.sums + r * kLanes) + sum);
  }

  void finish(const fajit_work& w, const Head& head, int32_t row0, int count) {
    const Writer writer{c_, w.request, emit_of(*c_.args, w.partial)};
    for (int first = 0; first < count; first += kLanes) {
      vf sum{};
      for (int i = 0; i < kLanes; ++i) {
        if (first + i < count) {
          sum[i] = reduce_add(load(head.sums + (totals_ ? kTotalSums : 0) + (first + i) * kLanes));
        } else {  // a lane without a row
          head.h[first + i] = head.h[0];
          if constexpr (kIndirect) b_[first + i] = b_[0];
          head.base[first + i] = -kInf;
        }
      }
      const vi b = kIndirect ? load<vi>(b_ + first) : splat(w.request);
      const Normalized n = writer.normalizer(load(head.base + first) * kToNatural<Hooks>, sum, b,
                                             load<vi>(head.h + first));
      for (int i = 0; i < kLanes && first + i < count; ++i) {
        const int32_t packed = row0 + first + i;
        float* o = head.o + (totals_ ? kTotalO : 0) + (first + i) * kDimV;
        for (int d = 0; d < kDimV; d += kLanes) store(o + d, load(o + d) * n.factor[i]);
        if constexpr (!kCodeValues) ordered_dims<Matrix, Value, kDimV>(o);
        writer.write(packed_row<kIndirect>(*c_.args, w, packed),
                     int64_t{w.partial} - w.row_begin + packed, o, n.lse[i]);
      }
    }
  }

  Context c_;
  KeyProducts key_products_;
  ValueProducts value_products_;
  Matrix* q_;       // [head][row][kDim]
  bool totals_;     // whether sums were added to totals
  float* o_;        // [head][row][kDimV], then totals; base_ and sums_ likewise
  float* s_;        // [row][key] of one head; kWide: then the weights for even dims
  int32_t* qt_;     // [head][block of rows][word][row], for AMX tiles
  Matrix* k_rows_;  // [key][kDim] when keys are not used in place
  Matrix* v_rows_;
  int32_t* pairs_;      // of V, for AMX tiles
  float* key_numbers_;  // [head][number][key of the tile]
  float* value_numbers_;
  BlocksOf<KeyNumbers, K, kTileKv> key_blocks_;
  BlocksOf<ValueNumbers, V, kTileKv> value_blocks_;
  CodeRow* queries_;     // [head][row]
  int32_t* query_sums_;  // [head][row][kLeastGroup channels]
  Matrix* folded_;       // [row][kDim]: Q times the scales of a block
  float* block_s_;       // as s_, of a block that begins within a vector of keys
  CodeRow* weights_;     // [group of channels][row] of one head, as s_
  float* zero_sums_;     // likewise: of weights times zero points
  float* base_;          // [head][row], in the units of scores
  float* sums_;          // [head][row][lane]: partial sums of weights
  int32_t* h_;           // [head][row]
  int32_t* q_idx_;
  Rows* rows_;  // [head][row]
  int32_t* b_;  // request of each row, indirect kernels only
  KvRows kv_;
};

#if FAJIT_AMX
template <class Config, class Hooks>
using FewRow = TilesOrVectors<FewRowKernel<Config, Hooks, true>,
                              FewRowKernel<RowsOfVectors<Config>, Hooks, false>, kFewRowGroup>;
#else
template <class Config, class Hooks>
using FewRow = FewRowKernel<Config, Hooks, false>;
#endif

}  // namespace fajit
