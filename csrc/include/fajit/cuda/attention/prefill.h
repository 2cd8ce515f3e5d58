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
//   n > 1 stages (a ring of n pairs of buffers)
//
//     copies     Q K0 V0 .. | K,V n-1         | K,V n
//     barrier               A                 A
//     compute                 S, softmax, O     S, softmax, O
//
//     A: the tile's K and V are loaded, and all warps have finished with the buffer that is filled
//     next.
//
// query_mod, key_mod and value_mod change rows in shared memory, one warp per row, and add a
// barrier.
//
// The key list entries of a tile are written when its keys are loaded, and read after barrier A.
// With one stage the previous tile is still in use then, so two buffers alternate.
#pragma once
#include <fajit/cuda/attention/key_rows.h>
#include <fajit/cuda/attention/state.h>
#include <fajit/cuda/tile/fragments.h>

namespace fajit::cuda {

template <class Config, class Hooks>
class Prefill {
  using Element = typename Config::Element;
  using QLayout = RowLayout<Config::kDim>;
  using VLayout = RowLayout<Config::kDimV>;
  using Keys = KeyRows<Config>;
  using Walk = KvWalk<Config, Hooks, Config::kTileKv, Config::kTileKv>;

  static constexpr int kWarps = Config::kWarps;
  static constexpr int kWarpRows = Config::kTileQ / kWarps;
  static constexpr int kM = kWarpRows / 16;                   // blocks of 16 query rows a warp
  static constexpr int kN = Config::kTileKv / 8;              // blocks of 8 keys
  static constexpr int kD = Config::kDimV / 8;                // blocks of 8 dims of V
  static constexpr int kLoadRows = Config::kTileKv / kWarps;  // keys that a warp loads
  static constexpr int kStages = Config::kStages;
  static_assert(kWarpRows == 16 || kWarpRows == 32, "a lane holds one packed row of its warp");
  static_assert(Config::kTileKv % 16 == 0 && Config::kTileKv % kWarps == 0 && kLoadRows <= 32,
                "keys are loaded by whole warps");

  // Shared memory: Q, then K stages, V stages, addresses and walks, key list entries, scratch of
  // row hooks. At the end the output states are staged in it, 8 rows of each warp at a time.
  static constexpr int kQBytes = Config::kTileQ * QLayout::kRowBytes;
  static constexpr int kKBytes = Config::kTileKv * QLayout::kRowBytes;
  static constexpr int kVBytes = Config::kTileKv * VLayout::kRowBytes;
  static constexpr int kTempBytes = kWarps * Hooks::kRowTemps * 4;
  static constexpr int kTilesBytes = kQBytes + kStages * (kKBytes + kVBytes);
  static constexpr int kOutPitch = round_up(Config::kDimV, 32) + 8;  // floats
  static constexpr int kOutBytes = kWarps * 8 * kOutPitch * 4;
  static constexpr int kBasesBegin = round_up(larger(kTilesBytes, kOutBytes), 16);
  static constexpr int kWalkBegin = kBasesBegin + kWarps * Keys::kSharedBytes;
  static constexpr int kListedBegin = kWalkBegin + kWarps * Walk::kSharedBytes;
  static constexpr int kListedBytes = Config::kSparse ? Config::kTileKv * 4 : 0;  // of a tile
  static constexpr int kScratchBegin = kListedBegin + larger(kStages, 2) * kListedBytes;

 public:
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kSharedBytes = kScratchBegin + kTempBytes;

  FAJIT_DEV Prefill(const Context& c, unsigned char* shared, const fajit_work& item)
      : c_(item_context<Config>(c, item)),
        a_(*c.args),
        item_(item),
        warp_(ptx::warp_index()),
        lane_(ptx::lane_index()),
        kv_h_(item.head_begin / c.group_size()),
        q_(shared),
        k_(shared + kQBytes),
        v_(shared + kQBytes + kStages * kKBytes),
        scratch_(shared),
        walk_(shared + kWalkBegin + warp_ * Walk::kSharedBytes),
        listed_(ptx::shared_address(shared + kListedBegin)),
        temps_(reinterpret_cast<float*>(shared + kScratchBegin) + warp_ * Hooks::kRowTemps),
        keys_(a_, item, kv_h_, shared + kBasesBegin + warp_ * Keys::kSharedBytes) {}

  FAJIT_DEV void run() {
    const ThreadRows<Config, Hooks, kM> rows(c_, a_, item_, item_.row_begin + warp_ * kWarpRows);
    const Units units = units_of<Hooks>(a_.scale);
    OnlineSoftmax<kM> softmax;
    float o[kM][kD][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int d = 0; d < kD; ++d) o[m][d][0] = o[m][d][1] = o[m][d][2] = o[m][d][3] = 0.0f;

    Walk walk(c_, item_, item_.kv_begin, end_of_positions<Config>(a_, item_), walk_);
    load_queries();
    if constexpr (kStages == 1) {
      run_single(walk, rows, units, softmax, o);
    } else {
      run_ring(walk, rows, units, softmax, o);
    }
    softmax.finish();
    write_states(rows, units, softmax, o);
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
    load_rows<Config::kHeadDim, Config::kDim, kWarpRows, Config::kAligned>(
        q_, warp_ * kWarpRows, own_rows(), HeldRows{from});
  }

  // The location of this lane's key among the keys that its warp loads.
  FAJIT_DEV KeyLocation own_location(const KvTile& tile) const {
    return keys_.locate(min(tile.begin + warp_ * kLoadRows + lane_ % kLoadRows, tile.end - 1));
  }
  FAJIT_DEV int own_keys(const KvTile& tile) const {
    return tile.end - tile.begin - warp_ * kLoadRows;
  }
  // `turn`: the buffer for the key list entries.
  FAJIT_DEV void load_keys(const KvTile& tile, KeyLocation location, int stage, int turn) {
    keys_.template store_listed<kLoadRows>(listed(turn) + warp_ * kLoadRows * 4, own_keys(tile),
                                           location);
    keys_.template load_keys<kLoadRows>(k_ + stage * kKBytes, warp_ * kLoadRows, own_keys(tile),
                                        location);
  }
  FAJIT_DEV void load_values(const KvTile& tile, KeyLocation location, int stage) {
    keys_.template load_values<kLoadRows>(v_ + stage * kVBytes, warp_ * kLoadRows, own_keys(tile),
                                          location);
  }

  FAJIT_DEV void change_queries() {
    if constexpr (Hooks::kQueryMod) {
      const PackedRow mine = own_row();
      for (int r = 0; r < min(own_rows(), kWarpRows); ++r) {
        const PackedRow row = row_from_lane(mine, r);
        Hooks::query_mod(c_, TileRow<Element, Config::kDim>{q_, warp_ * kWarpRows + r}, temps_,
                         lane_, row.b, row.h, row.q_idx);
      }
      __syncwarp();
    }
  }
  FAJIT_DEV uint32_t listed(int turn) const { return listed_ + turn * kListedBytes; }
  FAJIT_DEV void change_keys(const KvTile& tile, int stage, int turn) {
    if constexpr (Hooks::kKeyMod) {
      for (int r = warp_; r < tile.end - tile.begin; r += kWarps)
        Hooks::key_mod(c_, TileRow<Element, Config::kDim>{k_ + stage * kKBytes, r}, temps_, lane_,
                       key_request(), kv_h_, key_position<Config>(tile, listed(turn), r));
      __syncthreads();
    }
  }
  FAJIT_DEV void change_values(const KvTile& tile, int stage, int turn) {
    if constexpr (Hooks::kValueMod) {
      for (int r = warp_; r < tile.end - tile.begin; r += kWarps)
        Hooks::value_mod(c_, TileRow<Element, Config::kDimV>{v_ + stage * kVBytes, r}, temps_,
                         lane_, key_request(), kv_h_, key_position<Config>(tile, listed(turn), r));
      __syncthreads();
    }
  }
  // Rows of several requests share keys, so key_mod and value_mod see the item's own request.
  FAJIT_DEV int32_t key_request() const { return item_.request; }

  FAJIT_DEV void score(float (&s)[kM][kN][4], int stage) {
    multiply_scores<Element, Config::kDim>(
        s, ptx::shared_address(q_ + warp_ * kWarpRows * QLayout::kRowBytes),
        ptx::shared_address(k_ + stage * kKBytes));
  }

  template <class Rows>
  FAJIT_DEV void weigh(float (&s)[kM][kN][4], const KvTile& tile, const Rows& rows,
                       const Units& units, const Walk& walk, int turn, OnlineSoftmax<kM>& softmax,
                       float (&o)[kM][kD][4]) {
    if (tile.full) {
      apply_hooks<false, Config, Hooks>(s, c_, rows, units, item_.request, kv_h_, tile, walk,
                                        listed(turn));
    } else {
      apply_hooks<true, Config, Hooks>(s, c_, rows, units, item_.request, kv_h_, tile, walk,
                                       listed(turn));
    }
    if constexpr (!Hooks::kPointwise) softmax.step(s, o, units.exponent);
  }

  template <class Rows>
  FAJIT_DEV void run_single(Walk& walk, const Rows& rows, const Units& units,
                            OnlineSoftmax<kM>& softmax, float (&o)[kM][kD][4]) {
    KvTile tile = walk.next();
    KeyLocation location = tile.valid() ? own_location(tile) : KeyLocation{};
    int turn = 0;
    if (tile.valid()) load_keys(tile, location, 0, turn);
    ptx::commit_copies();
    bool first = true;
    while (tile.valid()) {
      ptx::wait_copies<0>();
      __syncthreads();
      if (first) change_queries();
      first = false;
      load_values(tile, location, 0);
      ptx::commit_copies();
      // A page look-up is started before the product, which hides its latency. Plain arithmetic is
      // done after it: its result would only occupy registers.
      KvTile next{};
      if constexpr (Keys::kLookedUp) {
        next = walk.next();
        if (next.valid()) location = own_location(next);
      }
      change_keys(tile, 0, turn);
      float s[kM][kN][4];
      score(s, 0);
      ptx::wait_copies<0>();
      __syncthreads();
      if constexpr (!Keys::kLookedUp) {
        next = walk.next();
        if (next.valid()) location = own_location(next);
      }
      if (next.valid()) load_keys(next, location, 0, turn ^ 1);
      ptx::commit_copies();
      change_values(tile, 0, turn);
      weigh(s, tile, rows, units, walk, turn, softmax, o);
      multiply_values<Element, Config::kDimV>(o, s, ptx::shared_address(v_));
      tile = next;
      turn ^= 1;
    }
    ptx::wait_copies<0>();
  }

  template <class Rows>
  FAJIT_DEV void run_ring(Walk& walk, const Rows& rows, const Units& units,
                          OnlineSoftmax<kM>& softmax, float (&o)[kM][kD][4]) {
    constexpr int kAhead = kStages - 1;
    KvTile tiles[kAhead + 1];  // the one in use, and those in flight
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      tiles[i] = walk.next();
      load_pair(tiles[i], i);
    }
    int stage = 0;
    bool first = true;
    while (tiles[0].valid()) {
      ptx::wait_copies<kAhead - 1>();
      __syncthreads();
      tiles[kAhead] = walk.next();
      load_pair(tiles[kAhead], stage == 0 ? kStages - 1 : stage - 1);
      if (first) change_queries();
      first = false;
      change_keys(tiles[0], stage, stage);
      change_values(tiles[0], stage, stage);
      float s[kM][kN][4];
      score(s, stage);
      weigh(s, tiles[0], rows, units, walk, stage, softmax, o);
      multiply_values<Element, Config::kDimV>(o, s, ptx::shared_address(v_ + stage * kVBytes));
#pragma unroll
      for (int i = 0; i < kAhead; ++i) tiles[i] = tiles[i + 1];
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    ptx::wait_copies<0>();
  }

  FAJIT_DEV void load_pair(const KvTile& tile, int stage) {
    if (tile.valid()) {
      const KeyLocation location = own_location(tile);
      load_keys(tile, location, stage, stage);
      load_values(tile, location, stage);
    }
    ptx::commit_copies();
  }

  template <class Rows>
  FAJIT_DEV void write_states(const Rows& rows, const Units& units,
                              const OnlineSoftmax<kM>& softmax, float (&o)[kM][kD][4]) {
    const StateWriter<Config, Hooks> writer{c_, emit_of(a_, item_.partial)};
    const PackedRow mine = own_row();
    float* const out = reinterpret_cast<float*>(scratch_) + warp_ * 8 * kOutPitch;
    __syncthreads();  // all warps have finished with the tiles
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const Normalized n =
          writer.normalizer(softmax.top[i] * units.exponent, softmax.sum[i], rows.at(i));
      float* const row_out = out + lane_ / 4 * kOutPitch + lane_ % 4 * 2;
#pragma unroll
      for (int d = 0; d < kD; ++d)
        *reinterpret_cast<float2*>(row_out + d * 8) =
            float2{o[i / 2][d][i % 2 * 2] * n.factor, o[i / 2][d][i % 2 * 2 + 1] * n.factor};
      __syncwarp();
      for (int r = 0; r < 8 && i * 8 + r < own_rows(); ++r) {
        const PackedRow row = row_from_lane(mine, i * 8 + r);
        const int64_t packed = int64_t{warp_} * kWarpRows + i * 8 + r;
        writer.write_row(item_, row, item_.partial + packed, out + r * kOutPitch,
                         ptx::from_lane(n.lse, r * 4), temps_);
      }
      __syncwarp();
    }
  }

  const Context c_;
  const fajit_args& a_;
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
};

}  // namespace fajit::cuda
