// Few rows: decoding and other tiles of at most 16 packed query rows, bound by memory.
//
// The warps of a block share the rows and split the keys: of each tile of kTileKv keys, warp w
// takes the w-th part. Each warp has its own ring of buffers, running softmax and waits, so the
// loop has no barrier and every warp keeps the loads of kStages - 1 tiles in flight.
//
//   warp w:  copies    t0 t1 .. | t(n-1)  | t(n)    | ...           n = kStages
//            compute              t0        t1        ...
//
//   barrier; merge the warps' states through shared memory, one warp per row; finalise, write.
//
// The location of the next key is looked up one tile ahead: with pages the look-up is a load, which
// the copies would otherwise wait for.
//
// An item is the only one that reads its keys, those of groups included: all rows that see them are
// in its tile. So the L2 evicts their lines first, and keeps what is read again. A page that
// several requests name is found there as often as by default, since the lines of K and V have the
// same priority among themselves. Block rows of key lists and of block masks are items of their own
// that read the same keys, so there the policy is the default.
#pragma once
#include <fajit/cuda/common/coded_tile.h>
#include <fajit/cuda/common/items.h>
#include <fajit/cuda/common/key_rows.h>
#include <fajit/cuda/common/scores.h>
#include <fajit/cuda/common/softmax.h>
#include <fajit/cuda/common/state.h>
#include <fajit/cuda/mma_sync/products.h>

namespace fajit::cuda {

template <class Config, class Hooks>
class FewRow {
  using Element = typename Config::Element;
  using QLayout = RowLayout<Config::kDim>;
  using VLayout = RowLayout<Config::kDimV>;

  static constexpr int kWarps = Config::kWarps;
  static constexpr int kKeys = Config::kTileKv / kWarps;  // keys of a tile per warp
  static constexpr int kN = kKeys / 8;
  static constexpr int kD = Config::kDimV / 8;
  static constexpr int kStages = Config::kStages;
  using Softmax = OnlineSoftmax<1, Hooks::kScore>;
  using Keys = KeyRows<Config, !Config::kSparse && !Config::kBlockMask>;
  using Walk = KvWalk<Config, Hooks, kKeys, Config::kTileKv>;
  static_assert(Config::kTileQ == 16, "one block of 16 rows");
  static_assert(kStages >= 2, "a tile is loaded while another is in use");
  static_assert(kKeys % 16 == 0 && kKeys <= 32, "a lane holds the location of one key");

  // Shared memory: Q, the warps' rings, addresses and walk of each warp, rings of key list entries,
  // scratch of row hooks. A ring of codes is followed by a tile that they are widened to, in turn
  // keys and values, and by the numbers of its rows. At the end the warps' states overwrite the
  // rings: [warp][row][kOutPitch] fp32, then [warp][row] maxima and sums.
  using Coded = CodedTileOf<Config, Hooks, kKeys, true>;
  static constexpr bool kCodes = CodesOf<Config>::kAny;
  static constexpr int kQBytes = 16 * QLayout::kRowBytes;
  static constexpr int kKBytes = kKeys * (kCodes ? Coded::kKeyPitch : QLayout::kRowBytes);
  static constexpr int kVBytes = kKeys * (kCodes ? Coded::kValuePitch : VLayout::kRowBytes);
  static constexpr int kWideBegin = kStages * (kKBytes + kVBytes);  // of a warp's ring
  static constexpr int kNumbersBegin =
      kWideBegin + (kCodes ? kKeys * larger(QLayout::kRowBytes, VLayout::kRowBytes) : 0);
  static constexpr int kRingBytes =
      kNumbersBegin + (kCodes ? round_up(Coded::kNumbers * 4, 128) : 0);
  static constexpr int kOutPitch = round_up(Config::kDimV, 32) + 8;  // floats
  static constexpr int kStateBytes = kWarps * 16 * (kOutPitch + 2) * 4;
  static constexpr int kWarpsBegin =
      round_up(kQBytes + larger(kWarps * kRingBytes, kStateBytes), 16);
  static constexpr int kWarpBytes = Keys::kSharedBytes + Walk::kSharedBytes;
  static constexpr int kListedBegin = kWarpsBegin + kWarps * kWarpBytes;
  static constexpr int kListedBytes = Config::kSparse ? kKeys * 4 : 0;  // per tile
  static constexpr int kScratchBegin = kListedBegin + kWarps * kStages * kListedBytes;

 public:
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kSharedBytes = kScratchBegin + kWarps * Hooks::kRowTemps * 4;

  FAJIT_DEV FewRow(const Context& c, const Units& units, const KeyDivisors& divisors,
                   unsigned char* shared, const fajit_work& item)
      : c_(item_context<Config>(c, item)),
        a_(*c.args),
        units_(units),
        item_(item),
        warp_(ptx::warp_index()),
        lane_(ptx::lane_index()),
        count_(item.row_end - item.row_begin),
        kv_h_(item.head_begin / c.group_size()),
        q_(shared),
        ring_(shared + kQBytes + warp_ * kRingBytes),
        states_(reinterpret_cast<float*>(shared + kQBytes)),
        walk_(shared + kWarpsBegin + warp_ * kWarpBytes + Keys::kSharedBytes),
        listed_(ptx::shared_address(shared + kListedBegin + warp_ * kStages * kListedBytes)),
        temps_(reinterpret_cast<float*>(shared + kScratchBegin) + warp_ * Hooks::kRowTemps),
        keys_(a_, divisors, item, kv_h_, shared + kWarpsBegin + warp_ * kWarpBytes),
        mine_(packed_row<Config::kMixedRows>(a_, item,
                                             min(item.row_begin + lane_ % 16, item.row_end - 1))) {}

  FAJIT_DEV void run(const ItemFeed& feed) {
    const ThreadRows<Config, Hooks, 1> rows(c_, a_, item_);
    Softmax softmax;
    float o[1][kD][4];
    clear(o);

    Walk walk(c_, keys_.divisors(), item_, item_.kv_begin + warp_ * kKeys,
              end_of_positions<Config>(a_, item_), walk_);
    start_queries();

    constexpr int kAhead = kStages - 1;
    KvTile tiles[kAhead + 2];  // in use, in flight, and the next, whose location is known
    tiles[0] = walk.next();
    KeyLocation location = own_location(tiles[0]);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      tiles[i + 1] = walk.next();
      const KeyLocation next = own_location(tiles[i + 1]);
      load_pair(tiles[i], location, i);
      location = next;
    }
    finish_queries<kAhead>();
    [[maybe_unused]] typename Coded::Held held{}, next_held{};
    if constexpr (kCodes) held = load_numbers(tiles[0], 0);
    int stage = 0;
    while (tiles[0].valid()) {
      ptx::wait_copies<kAhead - 1>();
      __syncwarp();
      tiles[kAhead + 1] = walk.next();
      const KeyLocation next = own_location(tiles[kAhead + 1]);
      load_pair(tiles[kAhead], location, stage == 0 ? kStages - 1 : stage - 1);
      location = next;

      unsigned char* const k = ring_ + stage * (kKBytes + kVBytes);
      const uint32_t listed = listed_ + stage * kListedBytes;
      unsigned char* const keys = kCodes ? ring_ + kWideBegin : k;
      const int next_stage = stage == kStages - 1 ? 0 : stage + 1;
      if constexpr (kCodes) {
        coded(tiles[0], listed).put(held);
        next_held = load_numbers(tiles[1], next_stage);
        coded(tiles[0], listed).widen_keys(keys, 0, k, held);
      } else {
        change_rows(tiles[0], k, listed);
      }
      float s[1][kN][4], shift[2];
      multiply_scores<Element, QLayout, Coded::kKeyGroups>(s, ptx::shared_address(q_),
                                                           ptx::shared_address(keys), numbers());
      if (tiles[0].full) {
        hook_scores<false, Config, Hooks>(s, shift, c_, rows, units_, item_, kv_h_, tiles[0],
                                          listed);
      } else {
        hook_scores<true, Config, Hooks>(s, shift, c_, rows, units_, item_, kv_h_, tiles[0],
                                         listed);
      }
      if constexpr (!Hooks::kPointwise)
        softmax.template step<kByLine<false, Config, Hooks>>(s, shift, o, units_);
      if constexpr (kCodes) {
        __syncwarp();  // all lanes have finished with the keys
        coded(tiles[0], listed).widen_values(keys, 0, k + kKBytes, held);
      }
      multiply_values<Element, VLayout, Coded::kValueGroups>(
          o, s, ptx::shared_address(kCodes ? keys : k + kKBytes), numbers() + Coded::kKeyNumbers);
#pragma unroll
      for (int i = 0; i <= kAhead; ++i) tiles[i] = tiles[i + 1];
      stage = next_stage;
      held = next_held;
    }
    ptx::wait_copies<0>();
    feed.end_item<Config>();
    softmax.finish();
    share_states(softmax, o);
    write_states();
  }

 private:
  // The block shares Q; warp 0 loads it and applies query_mod while the first keys are in flight.
  FAJIT_DEV void start_queries() {
    if (warp_ != 0) return;
    const uint16_t* from = static_cast<const uint16_t*>(a_.q) +
                           row_offset<Config::kMixedRows>(a_, item_, mine_, a_.q_stride);
    load_rows<Config::kHeadDim, QLayout, 16, Config::kAligned>(q_, 0, count_, HeldRows{from});
    ptx::commit_copies();
  }
  // kYounger: the number of copy groups committed after that of Q.
  template <int kYounger>
  FAJIT_DEV void finish_queries() {
    if (warp_ == 0) {
      ptx::wait_copies<kYounger>();
      __syncwarp();
      if constexpr (Hooks::kQueryMod) {
        for (int r = 0; r < count_; ++r) {
          const PackedRow row = row_from_lane(mine_, r);
          Hooks::query_mod(c_, TileRow<Element, QLayout>{q_, r}, temps_, lane_, row.b, row.h,
                           row.q_idx);
        }
        __syncwarp();
      }
      if (units_.query != 1.0f) multiply_rows<Element, QLayout>(q_, 0, count_, units_.query);
    }
    __syncthreads();
  }

  FAJIT_DEV KeyLocation own_location(const KvTile& tile) const {
    if (!tile.valid()) return {0, 0, 0};
    return keys_.locate(tile.begin, kKeys, tile.end);
  }
  FAJIT_DEV void load_pair(const KvTile& tile, KeyLocation location, int stage) {
    if (tile.valid()) {
      unsigned char* const k = ring_ + stage * (kKBytes + kVBytes);
      keys_.template store_listed<kKeys>(listed_ + stage * kListedBytes, tile.end - tile.begin,
                                         location);
      if constexpr (kCodes) {
        keys_.template load_key_codes<kKeys>(k, tile.end - tile.begin, location);
        keys_.template load_value_codes<kKeys>(k + kKBytes, tile.end - tile.begin, location);
      } else {
        keys_.template load_keys<kKeys>(k, 0, tile.end - tile.begin, location);
        keys_.template load_values<kKeys>(k + kKBytes, 0, tile.end - tile.begin, location);
      }
    }
    ptx::commit_copies();
  }

  // The numbers of this lane's row of a tile, long before they are due.
  FAJIT_DEV typename Coded::Held load_numbers(const KvTile& tile, int stage) const {
    if (Config::kSparse) __syncwarp();  // the entries of its key list are written
    if (!tile.valid()) return {};
    return coded(tile, listed_ + stage * kListedBytes).load();
  }
  FAJIT_DEV float* numbers() const { return reinterpret_cast<float*>(ring_ + kNumbersBegin); }
  FAJIT_DEV Coded coded(const KvTile& tile, uint32_t listed) const {
    return {c_, tile, listed, 0, tile.end - tile.begin, item_.request, kv_h_, numbers(), temps_};
  }

  FAJIT_DEV void change_rows(const KvTile& tile, unsigned char* k, uint32_t listed) {
    for (int r = 0; r < tile.end - tile.begin; ++r) {
      const int32_t key = key_position<Config>(tile, listed, r);
      if constexpr (Hooks::kKeyMod)
        Hooks::key_mod(c_, TileRow<Element, QLayout>{k, r}, temps_, lane_, item_.request, kv_h_,
                       key);
      if constexpr (Hooks::kValueMod)
        Hooks::value_mod(c_, TileRow<Element, VLayout>{k + kKBytes, r}, temps_, lane_,
                         item_.request, kv_h_, key);
      if (!Hooks::kKeyMod && !Hooks::kValueMod) break;
    }
    if constexpr (Hooks::kKeyMod || Hooks::kValueMod) __syncwarp();
  }

  FAJIT_DEV float* state_row(int warp, int row) const {
    return states_ + (warp * 16 + row) * kOutPitch;
  }
  FAJIT_DEV float* tops() const { return states_ + kWarps * 16 * kOutPitch; }
  FAJIT_DEV float* sums() const { return tops() + kWarps * 16; }

  FAJIT_DEV void share_states(const Softmax& softmax, const float (&o)[1][kD][4]) {
    __syncthreads();  // all warps have finished with their rings
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane_ / 4 + i * 8;
      if (row >= count_) continue;
      float* const to = state_row(warp_, row) + lane_ % 4 * 2;
#pragma unroll
      for (int d = 0; d < kD; ++d)
        *reinterpret_cast<float2*>(to + d * 8) = float2{o[0][d][i * 2], o[0][d][i * 2 + 1]};
      if (lane_ % 4 == 0) {
        tops()[warp_ * 16 + row] = softmax.top[i];
        sums()[warp_ * 16 + row] = softmax.sum[i];
      }
    }
    __syncthreads();
  }

  // Warp w merges rows w, w + kWarps, ... over all warps, in order, into the state of warp 0.
  FAJIT_DEV void write_states() {
    const StateWriter<Config, Hooks> writer{c_, emit_of(a_, item_.partial)};
    for (int r = warp_; r < count_; r += kWarps) {
      float top = -FAJIT_INF, sum = 0.0f, weight[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        weight[w] = tops()[w * 16 + r];
        top = fmaxf(top, weight[w]);
      }
      const float base = top == -FAJIT_INF ? 0.0f : top;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        weight[w] =
            Hooks::kPointwise ? 1.0f : ptx::exp2_approx((weight[w] - base) * units_.exponent);
        sum += sums()[w * 16 + r] * weight[w];
      }
      const PackedRow row = row_from_lane(mine_, r);
      const Normalized n = writer.normalizer(Softmax::in_base2(top, units_), sum, row);
      for (int d = lane_; d < Config::kDimV; d += 32) {
        float value = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) value += state_row(w, r)[d] * weight[w];
        state_row(0, r)[d] = value * n.factor;
      }
      __syncwarp();
      writer.write_row(item_, row, int64_t{item_.partial} + r, state_row(0, r), n.lse, temps_);
    }
  }

  const Context c_;
  const fajit_args& a_;
  const Units& units_;
  const fajit_work& item_;
  const int warp_, lane_;
  const int count_;  // rows
  const int32_t kv_h_;
  unsigned char* const q_;
  unsigned char* const ring_;
  float* const states_;
  unsigned char* const walk_;
  const uint32_t listed_;  // shared memory address: key list entries of each stage
  float* const temps_;
  const Keys keys_;
  const PackedRow mine_;
};

}  // namespace fajit::cuda
