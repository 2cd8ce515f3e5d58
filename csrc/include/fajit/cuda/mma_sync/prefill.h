// Prefill: a tile of 64 or 128 packed query rows, bound by arithmetic. One block computes one work
// item; warp w computes rows [w, w + 1) * kTileQ / kWarps for all keys.
//
//   one stage (K and V in one buffer each)
//
//     copies     Q K0 | V0          | K1          | V1          | K2
//     barrier         A             B             A             B
//     compute           S = Q K0^T    hooks, softmax, O += P V0   S = Q K1^T   ...
//
//     A: K loaded, all warps have finished with V.   B: V loaded, all warps have finished with K.
//
//   two stages (two pairs of buffers)
//
//     copies     Q K0 V0 | K1 V1           | K2 V2
//     barrier            A                 A
//     compute              S, softmax, O     S, softmax, O
//
//     A: the tile's K and V are loaded, and all warps have finished with the buffers that are
//     filled next.
//
//   codes (one stage of codes, and one tile of 16-bit rows)
//
//     copies     Q K0 V0 | K1 V1                | K2 V2
//     barrier            A           B          A
//     compute              widen 0     S, softmax, O   widen 1   S, softmax, O
//
//     A: all warps have finished with the tile. B: all rows are in it. A warp widens the rows that
//     it has loaded.
//
// query_mod, key_mod and value_mod change rows in shared memory, one warp per row; the last two add
// a barrier.
//
// The key list entries of a tile are written when its keys are loaded, and read after barrier A.
// The previous tile is still in use then, so two buffers alternate.
#pragma once
#include <fajit/cuda/common/coded_tile.h>
#include <fajit/cuda/common/items.h>
#include <fajit/cuda/common/key_rows.h>
#include <fajit/cuda/common/scores.h>
#include <fajit/cuda/common/softmax.h>
#include <fajit/cuda/common/state.h>
#include <fajit/cuda/mma_sync/products.h>
#include <fajit/cuda/tile/store_rows.h>

namespace fajit::cuda {

template <class Config, class Hooks>
class Prefill {
  using Element = typename Config::Element;
  using QLayout = RowLayout<Config::kDim>;
  using VLayout = RowLayout<Config::kDimV>;
  using Keys = KeyRows<Config, false>;
  using Walk = KvWalk<Config, Hooks, Config::kTileKv, Config::kTileKv>;

  static constexpr int kWarps = Config::kWarps;
  static constexpr int kWarpRows = Config::kTileQ / kWarps;
  static constexpr int kM = kWarpRows / 16;                   // blocks of 16 query rows a warp
  static constexpr int kN = Config::kTileKv / 8;              // blocks of 8 keys
  static constexpr int kD = Config::kDimV / 8;                // blocks of 8 dims of V
  static constexpr int kLoadRows = Config::kTileKv / kWarps;  // keys that a warp loads
  static constexpr int kStages = Config::kStages;
  using Softmax = OnlineSoftmax<kM, Hooks::kScore>;
  static_assert(kStages == 1 || kStages == 2, "a turn loads one tile ahead");
  static_assert(kWarpRows == 16 || kWarpRows == 32, "a lane holds one packed row of its warp");
  static_assert(Config::kTileKv % 16 == 0 && Config::kTileKv % kWarps == 0 && kLoadRows <= 32,
                "keys are loaded by whole warps");

  // Shared memory: Q, then K stages, V stages, addresses and walk of each warp, key list entries,
  // scratch of row hooks. At the end the output states are staged in it, 8 rows of each warp at a
  // time.
  using Coded = CodedTileOf<Config, Hooks, kLoadRows, false>;
  static constexpr bool kCodes = CodesOf<Config>::kAny;
  static_assert(!kCodes || kStages == 1, "codes have one stage");
  static constexpr int kQBytes = Config::kTileQ * QLayout::kRowBytes;
  static constexpr int kKBytes = Config::kTileKv * QLayout::kRowBytes;
  static constexpr int kVBytes = Config::kTileKv * VLayout::kRowBytes;
  static constexpr int kTempBytes = kWarps * Hooks::kRowTemps * 4;
  // With codes: those of K and of V, and the numbers of the rows of each warp.
  static constexpr int kCodesBegin = kQBytes + kStages * (kKBytes + kVBytes);
  static constexpr int kValueCodesBegin = kCodesBegin + Config::kTileKv * Coded::kKeyPitch;
  static constexpr int kNumbersBegin = kValueCodesBegin + Config::kTileKv * Coded::kValuePitch;
  static constexpr int kTilesBytes = kNumbersBegin + kWarps * Coded::kNumbers * 4;
  static constexpr int kOutPitch = round_up(Config::kDimV, 32) + 8;  // floats
  static constexpr int kOutBytes = kWarps * 8 * kOutPitch * 4;
  static constexpr int kWarpsBegin = round_up(larger(kTilesBytes, kOutBytes), 16);
  static constexpr int kWarpBytes = Keys::kSharedBytes + Walk::kSharedBytes;
  static constexpr int kListedBegin = kWarpsBegin + kWarps * kWarpBytes;
  static constexpr int kListedBytes = Config::kSparse ? Config::kTileKv * 4 : 0;  // of a tile
  static constexpr int kScratchBegin = kListedBegin + 2 * kListedBytes;

 public:
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kSharedBytes = kScratchBegin + kTempBytes;

  FAJIT_DEV Prefill(const Context& c, const Units& units, const KeyDivisors& divisors,
                    unsigned char* shared, const fajit_work& item)
      : c_(item_context<Config>(c, item)),
        a_(*c.args),
        units_(units),
        item_(item),
        warp_(ptx::warp_index()),
        lane_(ptx::lane_index()),
        kv_h_(item.head_begin / c.group_size()),
        q_(shared),
        k_(shared + kQBytes),
        v_(shared + kQBytes + kStages * kKBytes),
        scratch_(shared),
        walk_(shared + kWarpsBegin + warp_ * kWarpBytes + Keys::kSharedBytes),
        listed_(ptx::shared_address(shared + kListedBegin)),
        temps_(reinterpret_cast<float*>(shared + kScratchBegin) + warp_ * Hooks::kRowTemps),
        keys_(a_, divisors, item, kv_h_, shared + kWarpsBegin + warp_ * kWarpBytes) {}

  // Without feed.end_item(): the merge may start when the blocks end, an estimated 1 us later. Any
  // code that is added after the loops changes how ptxas schedules them, by up to 1.2 % of the
  // predicted clocks (plain attention, head_dim 64, sm_90, nvcc 13.0).
  FAJIT_DEV void run(const ItemFeed&) {
    const ThreadRows<Config, Hooks, kM> rows(c_, a_, item_);
    Softmax softmax;
    float o[kM][kD][4];
    clear(o);

    const Walk walk(c_, keys_.divisors(), item_, item_.kv_begin,
                    end_of_positions<Config>(a_, item_), walk_);
    load_queries();
    run_tiles(walk, rows, softmax, o);
    softmax.finish();
    write_states(rows, softmax, o);
  }

 private:
  // The packed row of this lane; a lane past the end repeats the last row. Recomputed at each use,
  // because the loop over the keys has no register to spare.
  FAJIT_DEV PackedRow own_row() const {
    const int32_t p = item_.row_begin + warp_ * kWarpRows + lane_ % kWarpRows;
    return packed_row<Config::kMixedRows>(a_, item_, min(p, item_.row_end - 1));
  }
  FAJIT_DEV int own_rows() const {  // rows of this warp that exist
    return item_.row_end - item_.row_begin - warp_ * kWarpRows;
  }

  FAJIT_DEV void load_queries() {
    const uint16_t* from = static_cast<const uint16_t*>(a_.q) +
                           row_offset<Config::kMixedRows>(a_, item_, own_row(), a_.q_stride);
    load_rows<Config::kHeadDim, QLayout, kWarpRows, Config::kAligned>(q_, warp_ * kWarpRows,
                                                                      own_rows(), HeldRows{from});
  }

  // The location of the keys that this warp loads.
  FAJIT_DEV KeyLocation own_location(const KvTile& tile) const {
    const uint32_t first = static_cast<uint32_t>(tile.begin) + warp_ * kLoadRows;
    return keys_.locate(static_cast<int32_t>(first), kLoadRows, tile.end);
  }
  FAJIT_DEV int own_keys(const KvTile& tile) const {
    return tile.end - tile.begin - warp_ * kLoadRows;
  }
  // count: the keys among those of this warp that exist. turn: the buffer for the key list entries.
  FAJIT_DEV void load_codes(int count, KeyLocation location, int turn) {
    keys_.template store_listed<kLoadRows>(listed(turn) + warp_ * kLoadRows * 4, count, location);
    keys_.template load_key_codes<kLoadRows>(key_codes(), count, location);
    keys_.template load_value_codes<kLoadRows>(value_codes(), count, location);
  }
  FAJIT_DEV unsigned char* key_codes() const {  // of this warp
    return q_ + kCodesBegin + warp_ * kLoadRows * Coded::kKeyPitch;
  }
  FAJIT_DEV unsigned char* value_codes() const {
    return q_ + kValueCodesBegin + warp_ * kLoadRows * Coded::kValuePitch;
  }
  // The rows that this warp loads; their numbers are loaded with them, and held until they are due.
  FAJIT_DEV Coded coded(const KvTile& tile, int turn) const {
    float* const numbers = reinterpret_cast<float*>(q_ + kNumbersBegin) + warp_ * Coded::kNumbers;
    return {c_,    tile,    listed(turn), warp_ * kLoadRows, own_keys(tile), key_request(),
            kv_h_, numbers, temps_};
  }
  FAJIT_DEV void widen_rows(const KvTile& tile, int turn) {
    const Coded rows = coded(tile, turn);
    rows.put(held_);
    rows.widen_keys(k_, warp_ * kLoadRows, key_codes(), held_);
    rows.widen_values(v_, warp_ * kLoadRows, value_codes(), held_);
  }
  FAJIT_DEV void load_keys(int count, KeyLocation location, int stage, int turn) {
    keys_.template store_listed<kLoadRows>(listed(turn) + warp_ * kLoadRows * 4, count, location);
    keys_.template load_keys<kLoadRows>(k_ + stage * kKBytes, warp_ * kLoadRows, count, location);
  }
  FAJIT_DEV void load_values(int count, KeyLocation location, int stage) {
    keys_.template load_values<kLoadRows>(v_ + stage * kVBytes, warp_ * kLoadRows, count, location);
  }

  // What happens to Q before the first product; each warp changes its own rows.
  FAJIT_DEV void finish_queries() {
    if (!Hooks::kQueryMod && units_.query == 1.0f) return;
    ptx::wait_copies<0>();
    __syncwarp();
    if constexpr (Hooks::kQueryMod) {
      const PackedRow mine = own_row();
      for (int r = 0; r < min(own_rows(), kWarpRows); ++r) {
        const PackedRow row = row_from_lane(mine, r);
        Hooks::query_mod(c_, TileRow<Element, QLayout>{q_, warp_ * kWarpRows + r}, temps_, lane_,
                         row.b, row.h, row.q_idx);
      }
      __syncwarp();
    }
    if (units_.query != 1.0f)
      multiply_rows<Element, QLayout>(q_, warp_ * kWarpRows, min(own_rows(), kWarpRows),
                                      units_.query);
    __syncwarp();
  }
  FAJIT_DEV uint32_t listed(int turn) const { return listed_ + turn * kListedBytes; }
  FAJIT_DEV void change_keys(const KvTile& tile, int stage, int turn) {
    if constexpr (Hooks::kKeyMod) {
      for (int r = warp_; r < tile.end - tile.begin; r += kWarps)
        Hooks::key_mod(c_, TileRow<Element, QLayout>{k_ + stage * kKBytes, r}, temps_, lane_,
                       key_request(), kv_h_, key_position<Config>(tile, listed(turn), r));
      __syncthreads();
    }
  }
  FAJIT_DEV void change_values(const KvTile& tile, int stage, int turn) {
    if constexpr (Hooks::kValueMod) {
      for (int r = warp_; r < tile.end - tile.begin; r += kWarps)
        Hooks::value_mod(c_, TileRow<Element, VLayout>{v_ + stage * kVBytes, r}, temps_, lane_,
                         key_request(), kv_h_, key_position<Config>(tile, listed(turn), r));
      __syncthreads();
    }
  }
  // Rows of several requests share keys, so key_mod and value_mod see the item's own request.
  FAJIT_DEV int32_t key_request() const { return item_.request; }

  FAJIT_DEV void score(float (&s)[kM][kN][4], int stage) {
    multiply_scores<Element, QLayout>(
        s, ptx::shared_address(q_ + warp_ * kWarpRows * QLayout::kRowBytes),
        ptx::shared_address(k_ + stage * kKBytes));
  }

  // Runs of full tiles and runs of partial ones have a loop each, whose body has no branch on the
  // tile's state and keeps nothing of the walk in registers.
  template <class Rows>
  FAJIT_DEV void run_tiles(const Walk& walk, const Rows& rows, Softmax& softmax,
                           float (&o)[kM][kD][4]) {
    walk.start_runs();
    KeyLocation kept{};
    keep_location(walk.found_begin(), walk, kept);
    load_ahead(walk.found_begin(), walk, kept, 0);
    ptx::commit_copies();
    finish_queries();
    int turn = 0;
#pragma unroll 1
    for (;;) {
      const KvRun run = walk.take_run();
      if (!run.valid()) break;
      if (run.full) {
        attend<false>(run.begin, turn, kept, walk, rows, softmax, o);
      } else {
        attend<true>(run.begin, turn, kept, walk, rows, softmax, o);
      }
    }
    ptx::wait_copies<0>();
  }

  // Attends to the tiles of a run, the first of which is in flight; starts the copies of the first
  // tile of the next run at the last one. turn: counts tiles, modulo 2. kept: see kKeepsLocation.
  template <bool kMasked, class Rows>
  FAJIT_DEV void attend(int32_t begin, int& turn, KeyLocation& kept, const Walk& walk,
                        const Rows& rows, Softmax& softmax, float (&o)[kM][kD][4]) {
    bool more;
#pragma unroll 1
    do {
      const KvTile tile =
          kMasked ? walk.tile_at(begin) : KvTile{begin, begin + Config::kTileKv, true};
      const int stage = kStages == 1 ? 0 : turn;
      ptx::wait_copies<0>();
      __syncthreads();
      if constexpr (kCodes) {
        widen_rows(tile, turn);
        load_ahead(walk.next_tile(begin), walk, kept, turn ^ 1);
      } else if constexpr (kStages == 1) {
        load_values(kMasked ? own_keys(tile) : kLoadRows,
                    kKeepsLocation ? kept : own_location(tile), 0);
        keep_location(walk.next_tile(begin), walk, kept);
      } else {
        load_ahead(walk.next_tile(begin), walk, kept, turn ^ 1);
      }
      ptx::commit_copies();
      if constexpr (kCodes) {
        __syncthreads();
      } else {
        change_keys(tile, stage, turn);
      }
      float s[kM][kN][4];
      score(s, stage);
      if constexpr (kStages == 1 && !kCodes) {
        ptx::wait_copies<0>();
        __syncthreads();
        load_ahead(walk.next_tile(begin), walk, kept, turn ^ 1);
        ptx::commit_copies();
      }
      if constexpr (!kCodes) change_values(tile, stage, turn);
      float shift[2 * kM];
      hook_scores<kMasked, Config, Hooks>(s, shift, c_, rows, units_, item_, kv_h_, tile,
                                          listed(turn));
      if constexpr (!Hooks::kPointwise)
        softmax.template step<kByLine<kMasked, Config, Hooks>>(s, shift, o, units_);
      multiply_values<Element, VLayout>(o, s, ptx::shared_address(v_ + stage * kVBytes));
      turn ^= 1;
      more = walk.has_next(begin);
      begin += Config::kTileKv;
    } while (more);
  }

  // With one stage a location that is looked up serves the keys of a tile, and a barrier later its
  // values. The look-up starts before the product of the tile before it, which hides its latency.
  static constexpr bool kKeepsLocation = kStages == 1 && Keys::kLookedUp && !kCodes;
  FAJIT_DEV void keep_location(int32_t begin, const Walk& walk, KeyLocation& kept) const {
    if (kKeepsLocation && begin >= 0) kept = own_location(walk.tile_at(begin));
  }
  // Starts the copies of the tile of the next turn: its keys, with two stages its values too.
  FAJIT_DEV void load_ahead(int32_t begin, const Walk& walk, const KeyLocation& kept, int turn) {
    if (begin < 0) return;
    const KeyLocation location = kKeepsLocation ? kept : own_location(walk.tile_at(begin));
    const int32_t left = walk.end() - begin;
    if (left >= Config::kTileKv) {
      load_turn(kLoadRows, location, turn);  // without bounds checks
    } else {
      load_turn(left - warp_ * kLoadRows, location, turn);
    }
    if constexpr (kCodes) {
      if (Config::kSparse) __syncwarp();  // the entries of the key list are written
      held_ = coded(walk.tile_at(begin), turn).load();
    }
  }
  FAJIT_DEV void load_turn(int count, const KeyLocation& location, int turn) {
    if constexpr (kCodes) {
      load_codes(count, location, turn);
      return;
    }
    load_keys(count, location, kStages == 1 ? 0 : turn, turn);
    if constexpr (kStages == 2) load_values(count, location, turn);
  }

  // Final rows that no hook changes are packed to 16 bits in the warp's own rows of Q, whose layout
  // has room for those of V, and written 16 bytes a lane. Other states are staged as fp32 rows.
  static constexpr bool kPacksRows =
      Config::kAligned && !Hooks::kOutputMod && VLayout::kRowBytes <= QLayout::kRowBytes;

  template <class Rows>
  FAJIT_DEV void write_states(const Rows& rows, const Softmax& softmax, float (&o)[kM][kD][4]) {
    const StateWriter<Config, Hooks> writer{c_, emit_of(a_, item_.partial)};
    const bool packs = kPacksRows && writer.emit == Emit::kFinal;
    const PackedRow mine = own_row();
    unsigned char* const packed = q_ + warp_ * kWarpRows * QLayout::kRowBytes;
    float* const staged = reinterpret_cast<float*>(scratch_) + warp_ * 8 * kOutPitch;
    if (packs) {
      __syncwarp();  // all lanes have finished with the warp's Q
    } else {
      __syncthreads();  // all warps have finished with the tiles
    }
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const Normalized n =
          writer.normalizer(Softmax::in_base2(softmax.top[i], units_), softmax.sum[i], rows.at(i));
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        o[i / 2][d][i % 2 * 2] *= n.factor;
        o[i / 2][d][i % 2 * 2 + 1] *= n.factor;
      }
      if (packs) {
        const int r = i * 8 + lane_ / 4;
        if (lane_ % 4 == 0 && r < own_rows()) writer.write_lse(item_, rows.at(i), n.lse);
#pragma unroll
        for (int d = 0; d < kD; ++d)
          *reinterpret_cast<uint32_t*>(packed + VLayout::offset(r, d) + lane_ % 4 * 4) =
              Element::pack(o[i / 2][d][i % 2 * 2], o[i / 2][d][i % 2 * 2 + 1]);
        continue;
      }
      float* const row_out = staged + lane_ / 4 * kOutPitch + lane_ % 4 * 2;
#pragma unroll
      for (int d = 0; d < kD; ++d)
        *reinterpret_cast<float2*>(row_out + d * 8) =
            float2{o[i / 2][d][i % 2 * 2], o[i / 2][d][i % 2 * 2 + 1]};
      __syncwarp();
      for (int r = 0; r < 8 && i * 8 + r < own_rows(); ++r) {
        const PackedRow row = row_from_lane(mine, i * 8 + r);
        const int64_t split = item_.partial + int64_t{warp_} * kWarpRows + i * 8 + r;
        writer.write_row(item_, row, split, staged + r * kOutPitch, ptx::from_lane(n.lse, r * 4),
                         temps_);
      }
      __syncwarp();
    }
    if constexpr (kPacksRows) {
      if (!packs) return;
      __syncwarp();
      store_rows<Config::kHeadDimV, VLayout, kWarpRows>(
          static_cast<uint16_t*>(a_.out) +
              row_offset<Config::kMixedRows>(a_, item_, mine, a_.out_stride),
          own_rows(), packed);
    }
  }

  const Context c_;
  const fajit_args& a_;
  const Units& units_;
  const fajit_work& item_;
  const int warp_, lane_;
  const int32_t kv_h_;
  unsigned char* const q_;
  unsigned char* const k_;
  unsigned char* const v_;
  unsigned char* const scratch_;
  unsigned char* const walk_;
  const uint32_t listed_;  // shared memory address: key list entries of each turn
  float* const temps_;
  const Keys keys_;
  typename Coded::Held held_{};  // of the next tile, or of the one that is due
};

}  // namespace fajit::cuda
