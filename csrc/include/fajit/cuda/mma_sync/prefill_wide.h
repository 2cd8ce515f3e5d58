// Head dims from 257 to 576: a tile of 32 or 64 packed query rows. Two warps share 16 rows. For the
// scores each has half of a tile's keys, for the output half of its dims: 128 accumulators a lane
// with 512 dims, where a warp with whole rows would need 256. The weights pass through shared
// memory.
//
//   two stages (two pairs of buffers)
//
//     copies     Q K0 V0 | K1 V1                    | K2 V2
//     barrier            A            M   P         A
//     compute              S of half    W   O of half  S ...
//
//     A: the tile is loaded, and all warps have finished with the buffers that are filled next.
//     M, P: of the two warps. M: both have the maxima of their scores. P: both have their weights.
//
//   one stage (K and V in one buffer each)
//
//     copies     Q K0 | V0                    | K1            | V1
//     barrier         A            M        B                 A
//     compute           S of half    W          O of half       S ...
//
//     B: V and the weights are there, and all warps have finished with K.
//
//   codes: see prefill.h. A warp widens the rows that it has loaded, before a barrier.
//
// With kValuesInKeys the first kHeadDimV columns of K are V; with one stage the copies of a tile
// then begin when all warps have finished with the one before it.
//
// query_mod, key_mod and value_mod change rows in shared memory, one warp per row; the last two add
// a barrier. Key list entries: see prefill.h.
#pragma once
#include <fajit/cuda/common/coded_tile.h>
#include <fajit/cuda/common/items.h>
#include <fajit/cuda/common/key_rows.h>
#include <fajit/cuda/common/scores.h>
#include <fajit/cuda/common/softmax.h>
#include <fajit/cuda/common/state.h>
#include <fajit/cuda/mma_sync/products.h>
#include <fajit/cuda/ptx/warpgroup.h>

namespace fajit::cuda {

template <class Config, class Hooks>
class PrefillWide {
  using Element = typename Config::Element;
  static constexpr bool kShared = Config::kValuesInKeys;
  using QLayout = RowLayout<Config::kDim>;
  using VLayout = RowLayout<kShared ? Config::kDim : Config::kDimV>;
  using WeightLayout = RowLayout<Config::kTileKv>;
  using Keys = KeyRows<Config, false>;
  using Walk = KvWalk<Config, Hooks, Config::kTileKv, Config::kTileKv>;
  using Softmax = OnlineSoftmax<1, Hooks::kScore>;

  static constexpr int kWarps = Config::kWarps, kStages = Config::kStages;
  static constexpr int kGroups = kWarps / 2;  // of 16 rows
  static constexpr int kHalfKeys = Config::kTileKv / 2;
  static constexpr int kN = kHalfKeys / 8;                        // blocks of 8 keys of a warp
  static constexpr int kD = round_up(Config::kDimV / 2, 16) / 8;  // blocks of 8 dims of a warp
  static constexpr int kLoadRows = Config::kTileKv / kWarps, kQueryRows = Config::kTileQ / kWarps;
  static_assert(Config::kTileQ == 16 * kGroups && (kStages == 1 || kStages == 2));
  static_assert(kN == 1 || kN == 2, "16 or 32 keys");
  using Coded = CodedTileOf<Config, Hooks, kLoadRows, false>;
  static constexpr bool kCodes = CodesOf<Config>::kAny;
  static_assert(!kCodes || kStages == 1, "codes have one stage");
  static_assert(!kShared || (!kCodes && !Hooks::kKeyMod && !Hooks::kValueMod), "V is K");

  // Shared memory: Q, K stages, V stages, codes of K and of V and the numbers of each warp's rows,
  // weights of each group, addresses and walk of each warp, key list entries, scratch of row hooks.
  // At the end the output is staged in it, 8 rows of each group at a time.
  static constexpr int kQBytes = Config::kTileQ * QLayout::kRowBytes;
  static constexpr int kKBytes = Config::kTileKv * QLayout::kRowBytes;
  static constexpr int kVBytes = kShared ? 0 : Config::kTileKv * VLayout::kRowBytes;
  static constexpr int kCodesBegin = kQBytes + kStages * (kKBytes + kVBytes);
  static constexpr int kValueCodesBegin = kCodesBegin + Config::kTileKv * Coded::kKeyPitch;
  static constexpr int kNumbersBegin = kValueCodesBegin + Config::kTileKv * Coded::kValuePitch;
  static constexpr int kWeightsBegin = round_up(kNumbersBegin + kWarps * Coded::kNumbers * 4, 128);
  static constexpr int kWeightBytes = 16 * WeightLayout::kRowBytes;
  static constexpr int kOutPitch = round_up(Config::kDimV, 32) + 8;  // floats
  static constexpr int kOutBytes = kGroups * 8 * kOutPitch * 4;
  static constexpr int kWarpsBegin =
      round_up(larger(kWeightsBegin + kGroups * kWeightBytes, kOutBytes), 16);
  static constexpr int kWarpBytes = Keys::kSharedBytes + Walk::kSharedBytes;
  static constexpr int kListedBegin = kWarpsBegin + kWarps * kWarpBytes;
  static constexpr int kListedBytes = Config::kSparse ? Config::kTileKv * 4 : 0;  // of a tile
  static constexpr int kScratchBegin = kListedBegin + 2 * kListedBytes;

 public:
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kSharedBytes = kScratchBegin + kWarps * Hooks::kRowTemps * 4;

  FAJIT_DEV PrefillWide(const Context& c, const Units& units, const KeyDivisors& divisors,
                        unsigned char* shared, const fajit_work& item)
      : c_(item_context<Config>(c, item)),
        a_(*c.args),
        units_(units),
        item_(item),
        warp_(ptx::warp_index()),
        lane_(ptx::lane_index()),
        group_(warp_ % kGroups),
        half_(warp_ / kGroups),
        kv_h_(item.head_begin / c.group_size()),
        q_(shared),
        k_(shared + kQBytes),
        v_(kShared ? k_ : shared + kQBytes + kStages * kKBytes),
        weights_(shared + kWeightsBegin + group_ * kWeightBytes),
        walk_(shared + kWarpsBegin + warp_ * kWarpBytes + Keys::kSharedBytes),
        listed_(ptx::shared_address(shared + kListedBegin)),
        temps_(reinterpret_cast<float*>(shared + kScratchBegin) + warp_ * Hooks::kRowTemps),
        keys_(a_, divisors, item, kv_h_, shared + kWarpsBegin + warp_ * kWarpBytes) {}

  FAJIT_DEV void run(const ItemFeed&) {
    const ThreadRows<Config, Hooks, 1> rows(c_, a_, item_);
    Softmax softmax;
    float o[1][kD][4];
    clear(o);
    const Walk walk(c_, keys_.divisors(), item_, item_.kv_begin,
                    end_of_positions<Config>(a_, item_), walk_);
    load_queries();
    run_tiles(walk, rows, softmax, o);
    softmax.finish();
    join_sums(softmax);
    write_states(rows, softmax, o);
  }

 private:
  // --- rows of Q, K and V ---------------------------------------------------------------------

  // The packed row of Q of this lane among the rows that its warp loads; see Prefill::own_row.
  FAJIT_DEV PackedRow query_row() const {
    const int32_t p = item_.row_begin + warp_ * kQueryRows + lane_ % kQueryRows;
    return packed_row<Config::kMixedRows>(a_, item_, min(p, item_.row_end - 1));
  }
  FAJIT_DEV int query_rows() const {  // that exist
    return item_.row_end - item_.row_begin - warp_ * kQueryRows;
  }
  FAJIT_DEV void load_queries() {
    const uint16_t* from = static_cast<const uint16_t*>(a_.q) +
                           row_offset<Config::kMixedRows>(a_, item_, query_row(), a_.q_stride);
    load_rows<Config::kHeadDim, QLayout, kQueryRows, Config::kAligned>(
        q_, warp_ * kQueryRows, query_rows(), HeldRows{from});
  }
  // What happens to Q before the first product; each warp changes the rows that it has loaded.
  FAJIT_DEV void finish_queries() {
    if (!Hooks::kQueryMod && units_.query == 1.0f) return;
    ptx::wait_copies<0>();
    __syncwarp();
    const int count = min(query_rows(), kQueryRows);
    if constexpr (Hooks::kQueryMod) {
      const PackedRow mine = query_row();
      for (int r = 0; r < count; ++r) {
        const PackedRow row = row_from_lane(mine, r);
        Hooks::query_mod(c_, TileRow<Element, QLayout>{q_, warp_ * kQueryRows + r}, temps_, lane_,
                         row.b, row.h, row.q_idx);
      }
      __syncwarp();
    }
    if (units_.query != 1.0f)
      multiply_rows<Element, QLayout>(q_, warp_ * kQueryRows, count, units_.query);
    __syncwarp();
  }

  // Starts the copies of the keys, with two stages or kShared of all of a tile.
  FAJIT_DEV void load_tile(int32_t begin, const Walk& walk, int turn) {
    if (begin < 0) return;
    const int stage = kStages == 1 ? 0 : turn;
    const KvTile tile = walk.tile_at(begin);
    const KeyLocation location = own_location(tile);
    keys_.template store_listed<kLoadRows>(listed(turn) + warp_ * kLoadRows * 4, own_keys(tile),
                                           location);
    if constexpr (kCodes) {
      keys_.template load_key_codes<kLoadRows>(key_codes(), own_keys(tile), location);
      keys_.template load_value_codes<kLoadRows>(value_codes(), own_keys(tile), location);
      if (Config::kSparse) __syncwarp();  // the entries of the key list are written
      held_ = coded(tile, turn).load();
      return;
    }
    keys_.template load_keys<kLoadRows>(k_ + stage * kKBytes, warp_ * kLoadRows, own_keys(tile),
                                        location);
    if constexpr (kStages == 2) load_values(tile, location, stage);
  }
  FAJIT_DEV void load_values(const KvTile& tile, const KeyLocation& location, int stage) {
    if constexpr (!kShared)
      keys_.template load_values<kLoadRows>(v_ + stage * kVBytes, warp_ * kLoadRows, own_keys(tile),
                                            location);
  }
  FAJIT_DEV unsigned char* key_codes() const {  // of this warp
    return q_ + kCodesBegin + warp_ * kLoadRows * Coded::kKeyPitch;
  }
  FAJIT_DEV unsigned char* value_codes() const {
    return q_ + kValueCodesBegin + warp_ * kLoadRows * Coded::kValuePitch;
  }
  FAJIT_DEV Coded coded(const KvTile& tile, int turn) const {
    float* const numbers = reinterpret_cast<float*>(q_ + kNumbersBegin) + warp_ * Coded::kNumbers;
    return {c_,    tile,    listed(turn), warp_ * kLoadRows, own_keys(tile), item_.request,
            kv_h_, numbers, temps_};
  }
  FAJIT_DEV void widen_rows(const KvTile& tile, int turn) {
    const Coded rows = coded(tile, turn);
    rows.put(held_);
    rows.widen_keys(k_, warp_ * kLoadRows, key_codes(), held_);
    rows.widen_values(v_, warp_ * kLoadRows, value_codes(), held_);
  }
  FAJIT_DEV KeyLocation own_location(const KvTile& tile) const {
    const uint32_t first = static_cast<uint32_t>(tile.begin) + warp_ * kLoadRows;
    return keys_.locate(static_cast<int32_t>(first), kLoadRows, tile.end);
  }
  FAJIT_DEV int own_keys(const KvTile& tile) const {
    return tile.end - tile.begin - warp_ * kLoadRows;
  }
  FAJIT_DEV uint32_t listed(int turn) const { return listed_ + turn * kListedBytes; }
  FAJIT_DEV void change_keys(const KvTile& tile, int stage, int turn) {
    if constexpr (Hooks::kKeyMod && !kCodes) {
      for (int r = warp_; r < tile.end - tile.begin; r += kWarps)
        Hooks::key_mod(c_, TileRow<Element, QLayout>{k_ + stage * kKBytes, r}, temps_, lane_,
                       item_.request, kv_h_, key_position<Config>(tile, listed(turn), r));
      __syncthreads();
    }
  }
  FAJIT_DEV void change_values(const KvTile& tile, int stage, int turn) {
    if constexpr (Hooks::kValueMod && !kCodes) {
      for (int r = warp_; r < tile.end - tile.begin; r += kWarps)
        Hooks::value_mod(c_, TileRow<Element, VLayout>{v_ + stage * kVBytes, r}, temps_, lane_,
                         item_.request, kv_h_, key_position<Config>(tile, listed(turn), r));
      __syncthreads();
    }
  }

  // --- tiles of keys --------------------------------------------------------------------------

  // A loop for runs of full tiles and one for partial ones: see Prefill::run_tiles.
  template <class Rows>
  FAJIT_DEV void run_tiles(const Walk& walk, const Rows& rows, Softmax& softmax,
                           float (&o)[1][kD][4]) {
    walk.start_runs();
    load_tile(walk.found_begin(), walk, 0);
    ptx::commit_copies();
    finish_queries();
    int turn = 0;
#pragma unroll 1
    for (;;) {
      const KvRun run = walk.take_run();
      if (!run.valid()) break;
      if (run.full) {
        attend<false>(run.begin, turn, walk, rows, softmax, o);
      } else {
        attend<true>(run.begin, turn, walk, rows, softmax, o);
      }
    }
    ptx::wait_copies<0>();
  }

  template <bool kMasked, class Rows>
  FAJIT_DEV void attend(int32_t begin, int& turn, const Walk& walk, const Rows& rows,
                        Softmax& softmax, float (&o)[1][kD][4]) {
    bool more;
#pragma unroll 1
    do {
      KvTile tile = walk.tile_at(begin);
      if (!kMasked) tile.full = true;
      const int stage = kStages == 1 ? 0 : turn;
      ptx::wait_copies<0>();
      __syncthreads();
      const int32_t next = walk.next_tile(begin);
      if constexpr (kCodes) widen_rows(tile, turn);
      if constexpr (kCodes || kStages == 2) {
        load_tile(next, walk, turn ^ 1);
      } else if constexpr (!kShared) {
        load_values(tile, own_location(tile), 0);
      }
      ptx::commit_copies();
      if constexpr (kCodes) __syncthreads();
      change_keys(tile, stage, turn);

      float s[1][kN][4], shift[2];
      score(s, ptx::shared_address(k_ + stage * kKBytes));
      const KvTile own{tile.begin + half_ * kHalfKeys, tile.end, tile.full};
      hook_scores<kMasked, Config, Hooks>(s, shift, c_, rows, units_, item_, kv_h_, own,
                                          listed(turn) + half_ * kHalfKeys * 4);
      if constexpr (!Hooks::kPointwise)
        softmax.template step<kByLine<kMasked, Config, Hooks>>(
            s, shift, o, units_, [this](float (&best)[2]) { join_maxima(best); });
      store_weights(s);

      if constexpr (kStages == 1 && !kShared && !kCodes) {
        ptx::wait_copies<0>();
        __syncthreads();
        load_tile(next, walk, turn ^ 1);
        ptx::commit_copies();
      } else {
        wait_for_partner();
      }
      change_values(tile, stage, turn);
      add_values(o, ptx::shared_address(v_ + stage * (kShared ? kKBytes : kVBytes)));
      if constexpr (kStages == 1 && kShared) {
        __syncthreads();
        load_tile(next, walk, turn ^ 1);
        ptx::commit_copies();
      }
      turn ^= 1;
      more = walk.has_next(begin);
      begin += Config::kTileKv;
    } while (more);
  }

  // --- products -------------------------------------------------------------------------------

  // Scores of the group's 16 rows with the warp's half of a tile of keys.
  FAJIT_DEV void score(float (&s)[1][kN][4], uint32_t k) const {
    const uint32_t q = ptx::shared_address(q_ + group_ * 16 * QLayout::kRowBytes);
    k += half_ * kHalfKeys * QLayout::kRowBytes;
    if constexpr (kN == 2) {
      multiply_scores<Element, QLayout>(s, q, k);
    } else {
      multiply_narrow_scores<Element, QLayout>(s[0][0], q, k);
    }
  }

  // The maxima of a group's rows over both halves of the keys. A warp leaves its own where its
  // partner's weights will be: the partner reads them before it stores those.
  FAJIT_DEV void join_maxima(float (&best)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (lane_ % 4 == 0) *word_of(i, 1 - half_) = best[i];
    wait_for_partner();
#pragma unroll
    for (int i = 0; i < 2; ++i) best[i] = fmaxf(best[i], *word_of(i, half_));
    __syncwarp();  // all lanes have read before one stores weights there
  }
  // The sums likewise, when the weights of the last tile have been read.
  FAJIT_DEV void join_sums(Softmax& softmax) const {
    if constexpr (!Hooks::kPointwise) {
      wait_for_partner();
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (lane_ % 4 == 0) *word_of(i, 1 - half_) = softmax.sum[i];
      wait_for_partner();
#pragma unroll
      for (int i = 0; i < 2; ++i) softmax.sum[i] += *word_of(i, half_);
    }
  }
  FAJIT_DEV float* word_of(int i, int half) const {
    return reinterpret_cast<float*>(weights_ + WeightLayout::offset(i * 8 + lane_ / 4, half * kN));
  }
  FAJIT_DEV void wait_for_partner() const { ptx::wait_named(1 + group_, 64); }

  FAJIT_DEV void store_weights(const float (&s)[1][kN][4]) const {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<uint32_t*>(
            weights_ + WeightLayout::offset(i * 8 + lane_ / 4, half_ * kN + n) + lane_ % 4 * 4) =
            Element::pack(s[0][n][i * 2], s[0][n][i * 2 + 1]);
  }

  // The warp's half of the dims += weights of all keys of the tile times values: of every 32 dims
  // the first or the second 16, so that the addresses of both warps of a group have the same steps.
  FAJIT_DEV void add_values(float (&o)[1][kD][4], uint32_t v) const {
    const uint32_t p_lane = compute_here(
        ptx::shared_address(weights_) + WeightLayout::offset(block_row(lane_), block_chunk(lane_)));
    const uint32_t v_lane =
        compute_here(v + VLayout::offset(block_row(lane_), block_chunk(lane_) + half_ * 2));
#pragma unroll
    for (int n = 0; n < Config::kTileKv; n += 16) {
      uint32_t a[4];
      ptx::load_matrices(a, WeightLayout::step(p_lane, n / 8));
#pragma unroll
      for (int d = 0; d < kD; d += 2) {
        if (d * 16 + 16 == Config::kDimV && half_ == 1) continue;  // an odd number of 16 dims
        uint32_t b[4];
        ptx::load_matrices_transposed(b, VLayout::step(v_lane, d * 2) + n * VLayout::kRowBytes);
        ptx::multiply_add<Element>(o[0][d], a, b[0], b[1]);
        ptx::multiply_add<Element>(o[0][d + 1], a, b[2], b[3]);
      }
    }
  }

  // --- results --------------------------------------------------------------------------------

  // Rows are staged as fp32; each of a group's warps writes half of them.
  template <class Rows>
  FAJIT_DEV void write_states(const Rows& rows, const Softmax& softmax, float (&o)[1][kD][4]) {
    const StateWriter<Config, Hooks> writer{c_, emit_of(a_, item_.partial)};
    const int first = group_ * 16, count = item_.row_end - item_.row_begin - first;
    float* const staged = reinterpret_cast<float*>(q_) + group_ * 8 * kOutPitch;
    __syncthreads();  // all warps have finished with the tiles and the sums
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Normalized n =
          writer.normalizer(Softmax::in_base2(softmax.top[i], units_), softmax.sum[i], rows.at(i));
      float* const row_out = staged + lane_ / 4 * kOutPitch + half_ * 16 + lane_ % 4 * 2;
#pragma unroll
      for (int d = 0; d < kD; ++d)
        *reinterpret_cast<float2*>(row_out + d / 2 * 32 + d % 2 * 8) =
            float2{o[0][d][i * 2] * n.factor, o[0][d][i * 2 + 1] * n.factor};
      wait_for_partner();
      for (int r = half_; r < 8 && i * 8 + r < count; r += 2) {
        const int32_t p = item_.row_begin + first + i * 8 + r;
        const PackedRow row = packed_row<Config::kMixedRows>(a_, item_, p);
        writer.write_row(item_, row, int64_t{item_.partial} + first + i * 8 + r,
                         staged + r * kOutPitch, ptx::from_lane(n.lse, r * 4), temps_);
      }
      wait_for_partner();
    }
  }

  const Context c_;
  const fajit_args& a_;
  const Units& units_;
  const fajit_work& item_;
  const int warp_, lane_, group_, half_;
  const int32_t kv_h_;
  unsigned char* const q_;
  unsigned char* const k_;
  unsigned char* const v_;
  unsigned char* const weights_;
  unsigned char* const walk_;
  const uint32_t listed_;
  float* const temps_;
  const Keys keys_;
  typename Coded::Held held_{};  // of the next tile, or of the one that is due
};

}  // namespace fajit::cuda
