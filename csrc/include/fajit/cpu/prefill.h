// Prefill: many query rows, bound by arithmetic. Packed query rows are on lanes throughout.
//
//   for each tile of kTileQ packed rows (one kv head)                     Q^T packed once
//     for each key tile that the mask does not empty                      classify, runs of tiles
//       K rows: in place, or converted / key_mod into a buffer
//       V rows: packed for the products, once for all row blocks
//       for each block of up to kMaxVectors vectors of rows
//         classify chunks of kChunk keys of a partial tile: trim, and mask where partial
//         for each part of the key tile: 64 keys with AMX tiles, else all
//           S^T = K Q^T          products.h             L1: Q^T block
//           hooks, mask, max; where a base changes: O^T = alpha O^T + V^T P^T of the parts so far
//           exp, sum, P^T                               L1: S^T, P^T
//         O^T = alpha O^T + V^T P^T  products.h         L1: P^T, packed V streams from L2
//     after a sum block of keys (kv_walk.h), sums and O^T are added to the totals
//   normalise, transpose, sink, output_mod, cast
//
// Working memory does not depend on kv_len. Blocks are 48 rows on 16 lanes: Q^T of 48 x 128 is 24
// KB in fp32 and 12 KB in bf16, which a 48 KB L1 keeps through the whole key tile. AMX uses blocks
// of 32 rows: 2,090 GFLOP/s on two cores of a Xeon, where vectors of bf16 reach 225 and torch's
// SDPA 1,150 (S4096, head_dim 128; benchmarks/cpu_attention.py).
#pragma once
#include <fajit/cpu/codes/channels.h>
#include <fajit/cpu/hooks/pair_squares.h>
#include <fajit/cpu/kv_walk.h>
#include <fajit/cpu/products.h>
#include <fajit/cpu/scratch.h>
#include <fajit/cpu/softmax.h>

namespace fajit {

template <class Config, class Hooks>
class Prefill {
  using Q = typename Config::Q;
  using K = typename Config::K;
  using V = typename Config::V;
  using Matrix = typename Config::Matrix;
  static constexpr bool kIndirect = Config::kIndirect;
  static constexpr bool kKeysOfRows = kIndirect && Hooks::kKeysReadRequest;
  // In indirect kernels each row has its own request.
  using Request = Choose<kIndirect, vi, int32_t>;
  using Rows = decltype(Hooks::rows(Context{}, Request{}, vi{}, vi{}));
  using Keys = decltype(Hooks::keys(Context{}, 0, 0, int32_t{}));
  using Writer = RowWriter<Config, Hooks>;

  static constexpr int kTileVectors = (Config::kTileQ + kLanes - 1) / kLanes;
  static constexpr int kTileRows = kTileVectors * kLanes;
  static constexpr int kTileKv = Config::kTileKv;

  using Products = ProductsOf<Matrix, Config::kHeadDim, Config::kHeadDimV, kTileKv>;
  static constexpr int kMaxVectors = Products::kMaxVectors;
  static constexpr int kPack = Dot<Matrix>::kPack;
  static constexpr int kWords = Products::kWords;
  static constexpr int kQRow = round_up(kWords, kLanes) * kPack;  // elements of a padded q row
  static constexpr int kKRow = kWords * kPack;                    // elements of a converted k row
  static constexpr int kOutDims = Products::kOutDims;
  static constexpr int kVRow = Products::kVRow;
  static constexpr int kKvSlots = Products::kKvSlots;
  static constexpr int kChunk = 32;  // keys classified together in a partial tile
  static_assert(kChunk % Products::kStep == 0);
  static constexpr int kChunks = (kTileKv + kChunk - 1) / kChunk;
  static constexpr int kPartKeys = Products::kPartKeys;
  static constexpr bool kParts = kPartKeys < kTileKv;
  static_assert(!kParts || kPartKeys % kChunk == 0);
  static constexpr int kSumKeys = 4096;                 // of a block
  static constexpr int kTotalO = kTileRows * kOutDims;  // where totals begin
  static constexpr bool kLateBases = Products::kRescalesApart && !Hooks::kPointwise;

  static constexpr bool kKeysInPlace = Products::kKeysAnywhere && same<K, Matrix> &&
                                       !Hooks::kKeyMod && Config::kHeadDim % kPack == 0;
  static constexpr bool kKeysInTiles =
      !Products::kKeysAnywhere && same<K, Matrix> && !Hooks::kKeyMod && Config::kHeadDim == kKRow;
  static constexpr bool kValuesInPlace =
      same<V, Matrix> && !Hooks::kValueMod && Config::kHeadDimV == kVRow;
  // Hooks that only decode rows are not called: 128 rows of latents with scales of groups took 0.63
  // of the time (int8 and e4m3, 576 + 512 dims; decoded once for keys and values; as in few_row.h).
  using KeyNumbers = typename Hooks::KeyNumbers;
  using ValueNumbers = typename Hooks::ValueNumbers;
  static constexpr bool kDecodesKeys = kIsDecoding<KeyNumbers, K> &&
                                       kWholeGroups<KeyNumbers, K, Config::kHeadDim>,
                        kDecodesValues = kIsDecoding<ValueNumbers, V> &&
                                         kWholeGroups<ValueNumbers, V, Config::kHeadDimV>;
  // Whether values may be the first dims of decoded keys (latent attention).
  static constexpr bool kMayBeKeys =
      kDecodesKeys == kDecodesValues && (kDecodesKeys || same<K, latent_t>) &&
      Config::kHeadDimV == kVRow && kVRow <= kKRow &&
      may_be_keys<Hooks, K, V, Config::kHeadDim, Config::kHeadDimV>();
  static constexpr int kNumberKeys = round_up(kTileKv, kLanes);
  static constexpr bool kPairHooks = Hooks::kScore || Hooks::kMask;
  using KvRows = KeysOf<Config, kTileKv>;
  using KeyRows = decltype(static_cast<const KvRows*>(nullptr)->keys());
  using ValueRows = decltype(static_cast<const KvRows*>(nullptr)->values());

  using NextRows =
      fajit::NextRows<elements_of<K>(Config::kHeadDim) * sizeof(K),
                      elements_of<V>(Config::kHeadDimV) * sizeof(V), KeyRows, ValueRows>;

  static constexpr uint64_t kLineBytes = kQRow * sizeof(Matrix) > Writer::kPaddedV * sizeof(float)
                                             ? kQRow * sizeof(Matrix)
                                             : Writer::kPaddedV * sizeof(float);

  // Vectors [first, first + count) of the tile.
  struct Block {
    int first, count;
    RowSpan span;
  };

 public:
  static constexpr int kMaxBlocks = (kTileVectors + kMaxVectors - 1) / kMaxVectors;

  Prefill(const Context& c, Carver& carver)
      : c_(c),
        qt_(carver.take<int32_t>(uint64_t{kTileRows} * kWords)),
        o_(carver.take<float>(uint64_t{2} * kTileRows * kOutDims)),
        s_(carver.take<float>(uint64_t{kParts ? kPartKeys : kKvSlots} * kMaxVectors * kLanes)),
        p_(kParts ? carver.take<int32_t>(uint64_t{kKvSlots} / kPack * kMaxVectors * kLanes)
                  : reinterpret_cast<int32_t*>(s_)),
        values_(carver.take<int32_t>(Products::kValueWords)),
        k_rows_(kKeysInPlace ? nullptr : carver.take<Matrix>(uint64_t{kKvSlots} * kKRow)),
        key_numbers_(carver.take<float>(kDecodesKeys ? KeyNumbers::kCount * kNumberKeys : 0)),
        value_numbers_(carver.take<float>(kDecodesValues ? ValueNumbers::kCount * kNumberKeys : 0)),
        line_(carver.take<char>(uint64_t{kLanes} * kLineBytes)),
        max_(carver.take<float>(2 * kTileRows)),
        sum_(carver.take<float>(2 * kTileRows)),
        rounded_(carver.take<float>(kLateBases ? 2 * kTileRows : 0)),
        h_(carver.take<int32_t>(kTileRows)),
        q_idx_(carver.take<int32_t>(kTileRows)),
        rows_(carver.take<Rows>(kTileVectors)),
        keys_(carver.take<Keys>(kTileKv)),
        b_(carver.take<int32_t>(kIndirect ? kTileRows : 0)),
        kv_(carver) {
    if constexpr (Hooks::kPairSquares) squares_ = carver.take<PairSquares>(1);
  }

  using Session = typename Products::Session;

  // --- one tile of rows -----------------------------------------------------------------------

  static constexpr int kMaxHeads = 1;

  void run_tile(const fajit_work* items, int, int32_t row0, int32_t row_count, const fajit_work*) {
    const fajit_work& w = items[0];
    const fajit_args& a = *c_.args;
    if constexpr (kIndirect) c_.kv_request = a.row_request != nullptr ? w.request : -1;
    // Keys of lists do not follow each other.
    if constexpr (Hooks::kPairSquares) c_.squares = a.key_blocks == nullptr ? squares_ : nullptr;
    const int vectors = (row_count + kLanes - 1) / kLanes;
    for (int i = 0; i < vectors * kLanes; ++i) {
      // Padding lanes repeat the last row.
      const PackedRow row = packed_row<kIndirect>(a, w, row0 + (i < row_count ? i : row_count - 1));
      h_[i] = row.h;
      q_idx_[i] = row.q_idx;
      if constexpr (kIndirect) b_[i] = row.b;
      max_[i] = -kInf;
      sum_[i] = 0.0f;
      if constexpr (kLateBases) rounded_[i] = 0.0f;
    }
    if constexpr (kPairHooks)
      for (int j = 0; j < vectors; ++j)
        rows_[j] = Hooks::rows(c_, request(w, j), load<vi>(h_ + j * kLanes),
                               load<vi>(q_idx_ + j * kLanes));

    // Blocks of nearly equal width: a block of one vector runs at half speed.
    Block blocks[kMaxBlocks];
    const int num_blocks = (vectors + kMaxVectors - 1) / kMaxVectors;
    for (int i = 0, first = 0; i < num_blocks; ++i) {
      const int count = (vectors - first + num_blocks - i - 1) / (num_blocks - i);
      blocks[i] = {first, count, span(w, first * kLanes, (first + count) * kLanes)};
      pack_queries(w, blocks[i], row0, row_count);
      first += count;
    }
    __builtin_memset(o_, 0, sizeof(float) * vectors * kLanes * kOutDims);

    writes_lse_ = Hooks::kOutputMod || emit_of(a, w.partial) != Emit::kFinal ||
                  (a.flags & FAJIT_WRITE_LSE) != 0;
    const RowSpan rows = span(w, 0, row_count);
    if constexpr (kIndirect) {
      kv_h_ = w.head_begin / c_.group_size();
      key_request_ = rows.b_first;
      several_requests_ = rows.b_first != rows.b_last;
    }
    KvWalk<Config, Hooks, KvRows, kSumKeys> walk(c_, w, rows, row0, kv_);
    totals_ = false;
    for (KvTile tile; walk.next(tile);) {
      if (tile.ends_sums) add_to_totals(blocks, num_blocks);
      const int count = tile.end - tile.begin, left = walk.left();
      NextRows next{kv_.keys().from(count, 0), kv_.values().from(count, 0),
                    left < kTileKv ? left : kTileKv, num_blocks * Products::work(count)};
      run_keys(w, tile, blocks, num_blocks, next);
    }

    if (totals_) add_to_totals(blocks, num_blocks);
    for (int i = 0; i < num_blocks; ++i) finish(w, blocks[i], row0, row_count);
  }

 private:
  // The span of packed rows [i0, i1) of the tile; padding lanes repeat real rows.
  RowSpan span(const fajit_work& w, int i0, int i1) const {
    return row_span<kIndirect>(w, b_ + i0, q_idx_ + i0, i1 - i0);
  }

  // The requests of vector j of the tile's rows.
  FAJIT_INLINE Request request(const fajit_work& w, int j) const {
    if constexpr (kIndirect) return load<vi>(b_ + j * kLanes);
    else return w.request;
  }

  void pack_queries(const fajit_work& w, const Block& block, int32_t row0, int32_t row_count) {
    const fajit_args& a = *c_.args;
    Matrix* line = reinterpret_cast<Matrix*>(line_);
    for (int j = 0; j < block.count; ++j) {
      const int32_t* rows[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int at = (block.first + j) * kLanes + i;
        Matrix* dst = line + i * kQRow;
        rows[i] = reinterpret_cast<const int32_t*>(dst);
        if (at >= row_count) {
          __builtin_memset(dst, 0, kQRow * sizeof(Matrix));
          continue;
        }
        const PackedRow row = packed_row<kIndirect>(a, w, row0 + at);
        convert_query<Config, Hooks, kQRow>(c_, w, row, dst);
      }
      transpose_rows<kWords>(rows, qt_ + int64_t{block.first} * kLanes * kWords + j * kLanes,
                             block.count * kLanes);
    }
  }

  // --- one tile of keys -----------------------------------------------------------------------

  void run_keys(const fajit_work& w, const KvTile& tile, const Block* blocks, int num_blocks,
                NextRows& next) {
    const int32_t b = w.request, kv_h = w.head_begin / c_.group_size();
    const int count = tile.end - tile.begin;
    if constexpr (kPairHooks)
      if (!kKeysOfRows || !several_requests_)
        for (int n = 0; n < count; ++n)
          keys_[n] = Hooks::keys(c_, kIndirect ? key_request_ : b, kv_h, kv_.position(n));

    if constexpr (kDecodesValues)
      load_tile_numbers<ValueNumbers, kNumberKeys>(c_, b, kv_h, kv_, count, value_numbers_);
    if constexpr (kKeysInPlace) {
      pack_values(count, b, kv_h, num_blocks);
      run_blocks(tile, blocks, num_blocks, kv_.keys(), next);
    } else if constexpr (kKeysInTiles) {
      const auto k = kv_.keys();
      const typename Products::KeyTiles tiles(k, count, k_rows_, [&](int n) {
        convert_key<Config, Hooks, kKRow>(c_, b, kv_h, kv_.position(n), k(n),
                                          k_rows_ + int64_t{n} * kKRow);
      });
      pack_values(count, b, kv_h, num_blocks);
      run_blocks(tile, blocks, num_blocks, tiles, next);
    } else {
      convert_keys(count, b, kv_h);
      pack_values(count, b, kv_h, num_blocks);
      run_blocks(tile, blocks, num_blocks, StridedRows<Matrix>{k_rows_, kKRow}, next);
    }
  }

  template <class Source>
  FAJIT_INLINE void run_blocks(const KvTile& tile, const Block* blocks, int num_blocks, Source k,
                               NextRows& next) {
    for (int i = 0; i < num_blocks; ++i) {
      switch (blocks[i].count) {
        case 1: run_block<1>(tile, blocks[i], k, num_blocks, next); break;
        case kMaxVectors: run_block<kMaxVectors>(tile, blocks[i], k, num_blocks, next); break;
        default: run_block<kMaxVectors == 2 ? 1 : 2>(tile, blocks[i], k, num_blocks, next);
      }
    }
  }

  // Also decides whether values are decoded with keys.
  FAJIT_INLINE void convert_keys(int count, int32_t b, int32_t kv_h) {
    const auto k = kv_.keys();
    if constexpr (kByChannel<KeyNumbers, K>) {
      BlocksOf<KeyNumbers, K, kNumberKeys> blocks;
      blocks.find(c_, b, kv_h, kv_, count);
      decode_blocks<KeyNumbers, Config::kHeadDim, kKRow>(c_, b, kv_h, k, kv_, blocks, count,
                                                         k_rows_);
    } else if constexpr (kDecodesKeys) {
      load_tile_numbers<KeyNumbers, kNumberKeys>(c_, b, kv_h, kv_, count, key_numbers_);
      const Table table = Table::of<KeyNumbers>(c_);
      for (int n = 0; n < count; ++n)
        decode_row<KeyNumbers, K, Config::kHeadDim, kKRow, kNumberKeys>(
            k(n), key_numbers_ + n, table, k_rows_ + int64_t{n} * kKRow);
    } else {
      for (int n = 0; n < count; ++n)
        convert_key<Config, Hooks, kKRow>(c_, b, kv_h, kv_.position(n), k(n),
                                          k_rows_ + int64_t{n} * kKRow);
    }
    if constexpr (kMayBeKeys)
      values_are_keys_ =
          same_address(k(0), kv_.values()(0)) &&
          same_numbers<KeyNumbers, ValueNumbers, kNumberKeys>(key_numbers_, value_numbers_, count);
  }

  // Whether rows of V need no conversion, and such a row.
  FAJIT_INLINE bool has_matrix_values() const {
    return kValuesInPlace || (kMayBeKeys && values_are_keys_);
  }
  FAJIT_INLINE const Matrix* matrix_value(int n) const {
    if constexpr (kValuesInPlace) return kv_.values()(n);
    else return k_rows_ + int64_t{n} * kKRow;
  }
  // Whether V is packed by parts as it is multiplied: where no other block of rows needs it. A
  // packed tile is written to L2, line by line: 16 rows of bf16 took 0.86 to 0.97 of the time with
  // parts in L1, those of 576 + 512 dims 0.9; fp32 0.98 to 1.01 (Zen 4, medians of 4 by hand).
  FAJIT_INLINE bool by_parts(int num_blocks) const {
    return Products::kByParts && num_blocks == 1 && has_matrix_values();
  }

  FAJIT_INLINE void pack_values(int count, int32_t b, int32_t kv_h, int num_blocks) {
    if (by_parts(num_blocks)) return;
    if (has_matrix_values())
      return Products::pack(count, values_, [&](int n) { return matrix_value(n); });
    if constexpr (!kValuesInPlace) {
      alignas(64) Matrix line[Products::kHeld][kVRow];
      const auto v = kv_.values();
      const auto pack = [&](auto convert) __attribute__((always_inline)) {
        Products::pack(count, values_, [&](int n) -> const Matrix* {
          Matrix* dst = line[n % Products::kHeld];
          convert(n, dst);
          return dst;
        });
      };
      if constexpr (kByChannel<ValueNumbers, V>) {
        Blocks<ValueNumbers, kNumberKeys> blocks;
        blocks.find(c_, b, kv_h, kv_, count);
        DecodedBlocks<ValueNumbers, Config::kHeadDimV, kNumberKeys, KvRows> decoded(c_, b, kv_h,
                                                                                    kv_, blocks);
        pack([&](int n, Matrix* dst) { decoded.template decode<kVRow>(v(n), n, dst); });
      } else {
        const Table table = Table::of<ValueNumbers>(c_);
        pack([&](int n, Matrix* dst) {
          if constexpr (kDecodesValues)
            decode_row<ValueNumbers, V, Config::kHeadDimV, kVRow, kNumberKeys>(
                v(n), value_numbers_ + n, table, dst);
          else convert_value<Config, Hooks, kVRow>(c_, b, kv_h, kv_.position(n), v(n), dst);
        });
      }
    }
  }

  // --- a block of rows against a tile of keys -------------------------------------------------

  template <int NV, class Source>
  void run_block(const KvTile& tile, const Block& block, Source k, int num_blocks, NextRows& next) {
    uint8_t states[kChunks];
    int n0 = 0, n1 = tile.end - tile.begin;
    if (!classify_chunks(tile, block.span, states, n0, n1)) return;

    const int64_t row0 = int64_t{block.first} * kLanes;
    float* const o = o_ + row0 * kOutDims;
    const auto fetch = [&](int words) __attribute__((always_inline)) { next(words); };
    const auto add_values = [&](int first, int end, const float* alpha) {
      if constexpr (Products::kByParts)
        if (by_parts(num_blocks))
          return Products::template pack_and_multiply_values<NV>(
              values_, first, end, p_, alpha, o, [&](int n) { return matrix_value(n); }, fetch);
      Products::template multiply_values<NV>(values_, first, end, p_, alpha, o, fetch);
    };
    // Weights of keys [end, last) are in p_, and their factors for the old outputs in alphas[0]. A
    // part that changes a base has factors of its own. The last part comes first: where scores grow
    // towards the row's own position, as with ALiBi, it has the largest ones. Rows of a block do
    // not change each other's results: parts begin at multiples of kPartKeys, and sums have one
    // order.
    alignas(64) float alphas[2][NV * kLanes];
    int last = n1;
    for (int end = n1, n; end > n0; end = n) {
      n = kParts ? (end - 1) / kPartKeys * kPartKeys : n0;
      if (n < n0) n = n0;
      float* const s = kParts ? s_ - n * NV * kLanes : s_;  // of key 0
      Products::template multiply_scores<NV>(k, n, end, qt_ + row0 * kWords, s, fetch);
      float* const alpha = alphas[end != n1];
      const bool changed = find_bases(block, states, s, n, end, alpha);
      if (kParts && end != n1 && changed) {
        add_values(end, last, alphas[0]);
        last = end;
        __builtin_memcpy(alphas[0], alpha, sizeof alphas[0]);
      }
      weigh_keys(block, s, n, end, alpha);
    }
    add_values(n0, last, alphas[0]);
  }

  // Sets the states of the chunks of a tile for one block and shrinks [n0, n1) to the chunks that
  // are not empty. False when all are empty. On a causal diagonal this halves the work of a 128-key
  // tile.
  FAJIT_INLINE bool classify_chunks(const KvTile& tile, const RowSpan& rows, uint8_t* states,
                                    int& n0, int& n1) const {
    const int count = n1, chunks = (count + kChunk - 1) / kChunk;
    for (int i = 0; i < chunks; ++i) states[i] = static_cast<uint8_t>(tile.state);
    if constexpr (Hooks::kMask) {
      if (tile.state != FAJIT_TILE_PARTIAL) return true;
      int first = chunks, last = -1;
      for (int i = 0; i < chunks; ++i) {
        const int end = (i + 1) * kChunk < count ? (i + 1) * kChunk : count;
        int32_t low, high;
        kv_.hull(i * kChunk, end, low, high);
        states[i] = static_cast<uint8_t>(classify_span<Hooks>(c_, rows, low, high + 1));
        if (states[i] == FAJIT_TILE_EMPTY) continue;
        if (first > i) first = i;
        last = i;
      }
      n0 = first * kChunk;
      n1 = (last + 1) * kChunk < count ? (last + 1) * kChunk : count;
      return last >= 0;
    }
    return true;
  }

  FAJIT_INLINE ScoreUnits<Hooks> units() const { return {c_.args->scale}; }

  // Pass 1 over keys [n0, n1) of a block: hooks, mask, and the bases of the weights. `alpha`: the
  // factors for the old sums and outputs; whether one of them is not 1. `s`: the scores of key 0.
  __attribute__((noinline, flatten)) bool find_bases(const Block& block, const uint8_t* states,
                                                     float* s, int n0, int n1, float* alpha) {
    const int stride = block.count * kLanes;
    float factor = units().factor();
    if (units().scaled_before()) {
      for (int i = n0 * stride; i < n1 * stride; i += kLanes) store(s + i, load(s + i) * factor);
      factor = 1.0f;
    }
    bool changed = false;
    for (int j = 0; j < block.count; ++j) {
      const int v = block.first + j;
      float* const own = s + j * kLanes;
      vf row_scale{};
      if constexpr (Hooks::kPointwiseScale)
        for (int i = 0; i < kLanes; ++i)
          row_scale[i] =
              Hooks::pointwise_scale(c_, kIndirect ? b_[v * kLanes + i] : block.span.b_first,
                                     h_[v * kLanes + i], q_idx_[v * kLanes + i]);
      const vf old = load(max_ + v * kLanes);
      vf top = old;
      if constexpr (kKeysOfRows) {
        if (several_requests_) {
          const RowKeys keys{c_, load<vi>(b_ + v * kLanes), kv_h_, kv_};
          top = hook_chunks(states, own, stride, n0, n1, rows_[v], keys, row_scale, factor, top);
        } else {
          top = hook_chunks(states, own, stride, n0, n1, rows_[v], keys_, row_scale, factor, top);
        }
      } else {
        top = hook_chunks(states, own, stride, n0, n1, rows_[v], keys_, row_scale, factor, top);
      }
      vf rescale = splat(1.0f);
      if constexpr (!Hooks::kPointwise) {
        rescale = weight_exp2<float>((old - finite(top)) * units().to_base2());
        if constexpr (kLateBases) {
          const vi stays = rescale >= 0x1p-8f;  // weights up to 2^8
          top = select(stays, old, top);
          rescale = select(stays | (old == -kInf), splat(1.0f), rescale);
        }
        store(max_ + v * kLanes, top);
      }
      store(alpha + j * kLanes, rescale);
      changed |= any(rescale != 1.0f);
    }
    return changed;
  }

  // Pass 2: scores of keys [n0, n1) become weights in p_, which are added to the sums.
  __attribute__((noinline)) void weigh_keys(const Block& block, const float* s, int n0, int n1,
                                            const float* alpha) {
    if constexpr (!kLateBases) weigh_all<Sums::kExact>(block, s, n0, n1, alpha);
    else if (writes_lse_) weigh_all<Sums::kBoth>(block, s, n0, n1, alpha);
    else weigh_all<Sums::kRounded>(block, s, n0, n1, alpha);
  }
  template <Sums kSums>
  FAJIT_INLINE void weigh_all(const Block& block, const float* s, int n0, int n1,
                              const float* alpha) {
    const int stride = block.count * kLanes;
    for (int j = 0; j < block.count; ++j) {
      const int v = (block.first + j) * kLanes;
      const WeightSums sums =
          weigh<Matrix, Hooks, kSums>(s + j * kLanes, p_ + j * kLanes, stride, n0, n1,
                                      finite(load(max_ + v)), units().to_base2());
      const vf rescale = load(alpha + j * kLanes);
      if constexpr (kSums != Sums::kRounded) store(sum_ + v, load(sum_ + v) * rescale + sums.exact);
      if constexpr (kSums != Sums::kExact)
        store(rounded_ + v, load(rounded_ + v) * rescale + sums.rounded);
    }
  }

  // The hooks' values of each key where they differ between the requests of a vector's rows.
  struct RowKeys {
    const Context& c;
    vi b;
    int32_t kv_h;
    const KvRows& kv;
    FAJIT_INLINE auto operator[](int n) const { return Hooks::keys(c, b, kv_h, kv.position(n)); }
  };

  // Calls `hook_scores` for one vector over chunks of keys, with the mask unless a chunk is full.
  // `rows` is a copy: stores of scores could change values behind a reference, which would then be
  // loaded again for each key.
  template <class KeysAt>
  FAJIT_INLINE vf hook_chunks([[maybe_unused]] const uint8_t* states, float* s, int stride, int n0,
                              int n1, Rows rows, const KeysAt& keys, vf row_scale, float scale,
                              vf top) {
    if constexpr (Hooks::kPairSquares) squares_->forget();
    if constexpr (!Hooks::kMask)
      return hook_scores<Hooks, false>(c_, s, stride, n0, n1, rows, keys, row_scale, scale, top);
    for (int n = n0; n < n1; n += kChunk) {
      const int end = n + kChunk < n1 ? n + kChunk : n1;
      if constexpr (Hooks::kMask) {
        if (states[n / kChunk] != FAJIT_TILE_FULL) {
          top = hook_scores<Hooks, true>(c_, s, stride, n, end, rows, keys, row_scale, scale, top);
          continue;
        }
      }
      top = hook_scores<Hooks, false>(c_, s, stride, n, end, rows, keys, row_scale, scale, top);
    }
    return top;
  }

  // Adds the sums of a sum block to the totals and sets them to 0.
  __attribute__((noinline)) void add_to_totals(const Block* blocks, int num_blocks) {
    float* o = o_;
    for (const Block* block = blocks; block < blocks + num_blocks; ++block) {
      vf kept[kMaxVectors];
      for (int j = 0; j < block->count; ++j) {
        const int at = (block->first + j) * kLanes;
        const vf base = load(max_ + at), old = load(max_ + kTileRows + at);
        kept[j] = Hooks::kPointwise ? splat(1.0f)
                                    : weight_exp2<float>((old - finite(base)) * units().to_base2());
        store(max_ + kTileRows + at, base);
        add_sums(sum_ + at, sum_ + kTileRows + at, kept[j], totals_);
        if constexpr (kLateBases)
          add_sums(rounded_ + at, rounded_ + kTileRows + at, kept[j], totals_);
      }
      for (int d = 0; d < kOutDims; ++d)
        for (int j = 0; j < block->count; ++j, o += kLanes)
          add_sums(o, o + kTotalO, kept[j], totals_);
    }
    totals_ = true;
  }

  // --- output ---------------------------------------------------------------------------------

  void finish(const fajit_work& w, const Block& block, int32_t row0, int32_t row_count) {
    const Writer writer{c_, w.request, emit_of(*c_.args, w.partial)};
    float* lines = reinterpret_cast<float*>(line_);
    const int64_t split0 = int64_t{w.partial} - w.row_begin;
    for (int j = 0; j < block.count; ++j) {
      const int at = (block.first + j) * kLanes, sums = at + (totals_ ? kTileRows : 0);
      const vi b = kIndirect ? load<vi>(b_ + at) : splat(w.request);
      const vf top = load(max_ + at) * units().to_natural();
      const vi h = load<vi>(h_ + at);
      Normalized n = writer.normalizer(top, load(sum_ + sums), b, h);
      if constexpr (kLateBases)
        n.factor = writer.normalizer(top, load(rounded_ + sums), b, h).factor;
      const float* o =
          o_ + (totals_ ? kTotalO : 0) + int64_t{block.first} * kLanes * kOutDims + j * kLanes;
      for (int d = 0; d < Config::kHeadDimV; d += kLanes) {
        vi square[kLanes];
        for (int i = 0; i < kLanes; ++i)
          square[i] = d + i < kOutDims
                          ? as_int(load(o + int64_t{d + i} * block.count * kLanes) * n.factor)
                          : vi{};
        transpose(square);
        for (int i = 0; i < kLanes; ++i) store(lines + i * Writer::kPaddedV + d, square[i]);
      }
      for (int i = 0; i < kLanes && at + i < row_count; ++i) {
        const int32_t packed = row0 + at + i;
        writer.write(packed_row<kIndirect>(*c_.args, w, packed), split0 + packed,
                     lines + i * Writer::kPaddedV, n.lse[i]);
      }
    }
  }

  Context c_;
  int32_t* qt_;         // [block][word][row of the block]
  bool totals_;         // whether sums were added to totals
  float* o_;            // [block][dim][row of the block], then totals; max_ and sums likewise
  float* s_;            // [key of the part][row of the block]
  int32_t* p_;          // [key / pack][row of the block]; without parts s_, which is read first
  int32_t* values_;     // V in the layout of the products
  Matrix* k_rows_;      // [key][kKRow] when keys are not used in place
  float* key_numbers_;  // [number][key]
  float* value_numbers_;
  bool values_are_keys_ = false;  // those of k_rows_
  char* line_;                    // kLanes rows of q or of the output
  float* max_;                    // per row, in the units of s_ after `hook_scores`
  float* sum_;
  float* rounded_;  // likewise, of rounded weights
  bool writes_lse_ = true;
  int32_t* h_;
  int32_t* q_idx_;
  Rows* rows_;  // per vector of rows
  Keys* keys_;  // per key of the tile
  // Indirect kernels: requests of the rows, and whether the tile has more than one.
  int32_t* b_;
  int32_t kv_h_ = 0, key_request_ = 0;
  bool several_requests_ = false;
  PairSquares* squares_ = nullptr;
  KvRows kv_;
};

}  // namespace fajit
