// Prefill on Hopper: a tile of 64 or 128 packed query rows. Warpgroups have roles; the block goes
// through its list of work items without a barrier of all threads.
//
//   producer      K0 . K1 V0 . K2 V1 . K3 V2 ...      by TMA, into rings of K and V; queries too
//
//   changers      K0 . V0 K1 . V1 K2 ...               of codes, key_mod and value_mod: changer.h
//
//   consumers     S = Q K^T and O += P V of 64 rows each, by wgmma, P in registers
//
//     group 0     QK1 PV0 | softmax 1 .......... | QK2 PV1 | softmax 2 .......... |
//     group 1      .......... | QK1 PV0 | softmax 1 .......... | QK2 PV1 | softmax 2
//
// In a step a group issues the scores of the next tile, then the values of this one, and computes
// the softmax of the scores while the values are multiplied. The products of one group run beside
// the softmax of the other. With a score_mod and head dims up to 64 the groups take turns to issue,
// by named barriers: on an H200, ALiBi gained 7 % and a soft cap 0 to 2 %. Without hooks turns
// gained nothing (an H100: minus 1 to plus 1 % at head dim 128, minus 6 to 0 % at 64).
//
//     step n:  wait full K(n+1); turn; issue S; wait full V(n); issue O; pass the turn
//              wait for S, release K(n+1); hooks, maxima, weights
//              wait for O, release V(n); rescale O if a base moved; pack P
//
// Between an issue and its wait nothing may touch the registers of the product, and there is no
// branch on the tile's state: runs of full and of partial tiles have a loop each. Every warp
// releases by itself: a wait says that the products of the own warp have ended.
#pragma once
#include <fajit/cuda/common/scores.h>
#include <fajit/cuda/common/softmax.h>
#include <fajit/cuda/common/state.h>
#include <fajit/cuda/tile/store_rows.h>
#include <fajit/cuda/wgmma/changer.h>
#include <fajit/cuda/wgmma/producer.h>
#include <fajit/cuda/wgmma/products.h>

namespace fajit::cuda {

template <class Config, class Hooks, class Wgmma>
class Consumer {
  using Element = typename Config::Element;
  using Parts = Ring<Config, Hooks>;
  using QLayout = typename Parts::QLayout;
  using KLayout = typename Parts::KLayout;
  using VLayout = typename Parts::VLayout;
  using Rows = ThreadRows<Config, Hooks, 1>;
  using Softmax = OnlineSoftmax<1, Hooks::kScore>;

  static constexpr int kN = Config::kTileKv / 8;    // blocks of 8 keys
  static constexpr int kD = Config::kHeadDimV / 8;  // blocks of 8 dims of V
  static constexpr int kWarpRows = 16;
  static constexpr bool kTakesTurns =
      Parts::kGroups == 2 && Hooks::kScore && Config::kHeadDim <= 64 && Config::kHeadDimV <= 64;
  static constexpr int kTurnThreads = 2 * ptx::kGroupThreads;

 public:
  FAJIT_DEV Consumer(const Params<Config, Hooks>& params, const Parts& ring)
      : c_(params.context()),
        a_(params.args),
        units_(params.units),
        ring_(ring),
        warp_(ptx::warp_index()),
        lane_(ptx::lane_index()) {}

  FAJIT_DEV void run() {
    if (kTakesTurns && group() == 1) ptx::arrive_named(turn_of(0), kTurnThreads);
    for_each_item(a_, ring_, [&](const fajit_work& item) {
      attend(item);
      ++num_items_;
    });
  }

 private:
  FAJIT_DEV int group() const { return warp_ / ptx::kGroupWarps; }
  static FAJIT_DEV int turn_of(int group) { return 1 + group; }  // a named barrier
  FAJIT_DEV void take_turn() const {
    if constexpr (kTakesTurns) ptx::wait_named(turn_of(group()), kTurnThreads);
  }
  FAJIT_DEV void pass_turn() const {
    if constexpr (kTakesTurns) ptx::arrive_named(turn_of(group() ^ 1), kTurnThreads);
  }
  FAJIT_DEV void release(uint32_t barrier) const {
    if (lane_ == 0) ptx::arrive(barrier);
  }

  FAJIT_DEV void attend(const fajit_work& item) {
    const Rows rows(c_, a_, item);
    Softmax softmax;
    float o[1][kD][4];
#pragma unroll
    for (int d = 0; d < kD; ++d) o[0][d][0] = o[0][d][1] = o[0][d][2] = o[0][d][3] = 0.0f;

    ptx::wait(ring_.full_queries(group(), num_items_), Parts::query_phase(num_items_));
    finish_queries(item);
    run_tiles(item, rows, softmax, o);
    softmax.finish();
    write_states(item, rows, softmax, o);
    release(ring_.empty_queries(group(), num_items_));
  }

  FAJIT_DEV TileRecord next_tile() const {
    ptx::wait(ring_.full_keys(turn_), Parts::phase(turn_));
    return ring_.read_record(turn_);
  }

  FAJIT_DEV void run_tiles(const fajit_work& item, const Rows& rows, Softmax& softmax,
                           float (&o)[1][kD][4]) {
    TileRecord now = next_tile();
    if (!now.absent) {
      uint32_t p[kN / 2][4];
      first_scores(now.tile, item, rows, softmax, p);
#pragma unroll 1
      while (!now.last) {
        now = next_tile();
        if (now.tile.full) {
          steps<false>(now, item, rows, softmax, p, o);
        } else {
          steps<true>(now, item, rows, softmax, p, o);
        }
      }
      ptx::wait(ring_.full_values(turn_ - 1), Parts::phase(turn_ - 1));
      ptx::start_products();
      start_values<Wgmma, VLayout, kN>(o, p, ring_.values(turn_ - 1));
      ptx::commit_products();
      ptx::wait_products<0>();
      ptx::read_after_wait(o);
      release(ring_.empty_values(turn_ - 1));
    } else {
      // Changers hand on the values later than the keys.
      if constexpr (Parts::ValueChanges::kAny)
        ptx::wait(ring_.full_values(turn_), Parts::phase(turn_));
      release(ring_.empty_keys(turn_));
      release(ring_.empty_values(turn_));
      ++turn_;
    }
  }

  // The weights of an item's first tile, with the mask.
  FAJIT_DEV void first_scores(const KvTile& tile, const fajit_work& item, const Rows& rows,
                              Softmax& softmax, uint32_t (&p)[kN / 2][4]) {
    float s[1][kN][4], shift[2], factor[2];
    ptx::start_products();
    start_scores<Wgmma, QLayout, KLayout>(s, queries(), ring_.keys(turn_));
    ptx::commit_products();
    ptx::wait_products<0>();
    ptx::read_after_wait(s);
    release(ring_.empty_keys(turn_));
    hook_scores<true, Config, Hooks>(s, shift, c_, rows, units_, item, kv_head(item), tile, 0);
    if constexpr (!Hooks::kPointwise) softmax.template step_ahead<false>(s, shift, factor, units_);
    pack_weights<Element>(p, s);
    ++turn_;
  }

  // Steps to tiles that are full (or partial), as long as the next one is too. now: the first one
  // on entry, the last one on return. p: the weights of the tile before.
  template <bool kMasked>
  FAJIT_DEV void steps(TileRecord& now, const fajit_work& item, const Rows& rows, Softmax& softmax,
                       uint32_t (&p)[kN / 2][4], float (&o)[1][kD][4]) {
#pragma unroll 1
    for (;;) {
      const uint32_t turn = turn_, before = turn_ - 1;
      take_turn();
      float s[1][kN][4], shift[2], factor[2];
      ptx::start_products();
      start_scores<Wgmma, QLayout, KLayout>(s, queries(), ring_.keys(turn));
      ptx::commit_products();
      ptx::wait(ring_.full_values(before), Parts::phase(before));
      ptx::start_products();
      start_values<Wgmma, VLayout, kN>(o, p, ring_.values(before));
      ptx::commit_products();
      pass_turn();
      ptx::wait_products<1>();
      ptx::read_after_wait(s);
      release(ring_.empty_keys(turn));
      hook_scores<kMasked, Config, Hooks>(s, shift, c_, rows, units_, item, kv_head(item), now.tile,
                                          0);
      bool moved = false;
      if constexpr (!Hooks::kPointwise)
        moved =
            softmax.template step_ahead<kByLine<kMasked, Config, Hooks>>(s, shift, factor, units_);
      ptx::wait_products<0>();
      ptx::read_after_wait(o);
      release(ring_.empty_values(before));
      if (moved) Softmax::multiply(o, factor);
      pack_weights<Element>(p, s);
      ++turn_;
      if (now.last) break;
      const TileRecord next = next_tile();
      if (next.tile.full == kMasked) break;
      now = next;
    }
  }

  FAJIT_DEV int32_t kv_head(const fajit_work& item) const {
    return item.head_begin / c_.group_size();
  }
  FAJIT_DEV uint32_t queries() const {
    return ring_.address(Parts::queries(num_items_)) + group() * ptx::kGroupRows * kPanelRowBytes;
  }

  // --- the ends of an item -----------------------------------------------------------------------

  FAJIT_DEV int own_rows(const fajit_work& item) const {  // rows of this warp that exist
    return item.row_end - item.row_begin - warp_ * kWarpRows;
  }
  // The packed row of this lane; a lane past the end repeats the last row.
  FAJIT_DEV PackedRow own_row(const fajit_work& item) const {
    const int32_t p = item.row_begin + warp_ * kWarpRows + lane_ % kWarpRows;
    return packed_row<false>(a_, item, min(p, item.row_end - 1));
  }
  FAJIT_DEV unsigned char* query_tile() const { return ring_.shared + Parts::queries(num_items_); }
  FAJIT_DEV float* temps() const {
    return reinterpret_cast<float*>(ring_.shared + Parts::kTempsBegin) + warp_ * Hooks::kRowTemps;
  }

  // What happens to Q before the first product; each warp changes its own rows, and is the only one
  // that reads them.
  FAJIT_DEV void finish_queries(const fajit_work& item) const {
    const int count = min(own_rows(item), kWarpRows);
    if constexpr (Hooks::kQueryMod) {
      const PackedRow mine = own_row(item);
      for (int r = 0; r < count; ++r) {
        const PackedRow row = row_from_lane(mine, r);
        Hooks::query_mod(c_, TileRow<Element, QLayout>{query_tile(), warp_ * kWarpRows + r},
                         temps(), lane_, row.b, row.h, row.q_idx);
      }
      __syncwarp();
    }
    if (units_.query != 1.0f)
      multiply_rows<Element, QLayout>(query_tile(), warp_ * kWarpRows, count, units_.query);
    ptx::fence_async_proxy();
    __syncwarp();
  }

  // Final rows that no hook changes are packed to 16 bits in the warp's own rows of Q, where they
  // have room, and written 16 bytes a lane. Other states are staged there as fp32 rows, a few at a
  // time.
  using OutLayout = PanelLayout<Config::kDimV, Config::kTileQ>;
  static constexpr bool kPacksRows = !Hooks::kOutputMod && OutLayout::kPanels <= QLayout::kPanels;
  static constexpr int kStagedRows = kD <= 8 ? 8 : kD <= 16 ? 4 : 2;
  static_assert(kStagedRows * kD * 8 * 4 <= kWarpRows * kPanelRowBytes, "in the first panel");

  FAJIT_DEV void write_states(const fajit_work& item, const Rows& rows, const Softmax& softmax,
                              float (&o)[1][kD][4]) const {
    const StateWriter<Config, Hooks> writer{c_, emit_of(a_, item.partial)};
    const PackedRow mine = own_row(item);
    const int count = own_rows(item);
    unsigned char* const own = query_tile() + warp_ * kWarpRows * kPanelRowBytes;
    const bool packs = kPacksRows && writer.emit == Emit::kFinal;
    __syncwarp();  // all lanes have finished with the warp's Q
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Normalized n =
          writer.normalizer(Softmax::in_base2(softmax.top[i], units_), softmax.sum[i], rows.at(i));
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        o[0][d][i * 2] *= n.factor;
        o[0][d][i * 2 + 1] *= n.factor;
      }
      if (packs) {
        const int r = i * 8 + lane_ / 4;
        if (lane_ % 4 == 0 && r < count) writer.write_lse(item, rows.at(i), n.lse);
#pragma unroll
        for (int d = 0; d < kD; ++d)
          *reinterpret_cast<uint32_t*>(own + OutLayout::offset(r, d) + lane_ % 4 * 4) =
              Element::pack(o[0][d][i * 2], o[0][d][i * 2 + 1]);
        continue;
      }
      float* const staged = reinterpret_cast<float*>(own);
#pragma unroll 1
      for (int first = 0; first < 8; first += kStagedRows) {
        const int r = lane_ / 4 - first;
        if (r >= 0 && r < kStagedRows) {
#pragma unroll
          for (int d = 0; d < kD; ++d)
            *reinterpret_cast<float2*>(staged + (r * kD + d) * 8 + lane_ % 4 * 2) =
                float2{o[0][d][i * 2], o[0][d][i * 2 + 1]};
        }
        __syncwarp();
        for (int r = first; r < first + kStagedRows && i * 8 + r < count; ++r) {
          const PackedRow row = row_from_lane(mine, i * 8 + r);
          const int64_t split = item.partial + int64_t{warp_} * kWarpRows + i * 8 + r;
          writer.write_row(item, row, split, staged + (r - first) * kD * 8,
                           ptx::from_lane(n.lse, r * 4), temps());
        }
        __syncwarp();
      }
    }
    if constexpr (kPacksRows) {
      if (packs) {
        __syncwarp();
        store_rows<Config::kHeadDimV, OutLayout, kWarpRows>(
            static_cast<uint16_t*>(a_.out) + row_offset<false>(a_, item, mine, a_.out_stride),
            count, own);
      }
    }
    __syncwarp();
  }

  const Context c_;
  const fajit_args& a_;
  const Units& units_;
  const Parts ring_;
  const int warp_, lane_;
  uint32_t turn_ = 0;       // of the next tile's keys
  uint32_t num_items_ = 0;  // before this one
};

// The kernel: warpgroups 0 .. kGroups - 1 consume, the next one produces; one more changes rows.
template <class Config, class Hooks, class Wgmma>
class WgmmaPrefill {
  using Parts = Ring<Config, Hooks>;
  static_assert(Config::kTileQ == 64 || Config::kTileQ == 128, "one or two groups of consumers");
  static_assert(Config::kTileKv % 16 == 0 && Config::kStages >= 2);
  static_assert(!Config::kMixedRows && !Config::kSparse && Config::kAligned,
                "kernels of mma.sync have these");

 public:
  static constexpr int kThreads = (Parts::kGroups + 1 + Parts::kChanges) * ptx::kGroupThreads;
  static constexpr int kSharedBytes = Parts::kBytes;
  static_assert(kThreads == Config::kWarps * 32);

  FAJIT_DEV static void run(const Params<Config, Hooks>& params, unsigned char* shared) {
    const Parts ring{shared};
    if (threadIdx.x == 0) ring.make_barriers();
    __syncthreads();
    const int warp = ptx::warp_index();
    if (warp < Parts::kConsumerWarps) {
      if constexpr (Config::kConsumerRegisters > 0)
        ptx::take_registers<Config::kConsumerRegisters>();
      Consumer<Config, Hooks, Wgmma>(params, ring).run();
      return;
    }
    if constexpr (Parts::kChanges) {
      const int changer = warp - Parts::kConsumerWarps - ptx::kGroupWarps;
      if (changer >= 0) {
        if constexpr (Config::kChangerRegisters > 0)
          ptx::give_registers<Config::kChangerRegisters>();
        Changer<Config, Hooks>(params, ring, changer).run();
        return;
      }
    }
    if constexpr (Config::kProducerRegisters > 0) ptx::give_registers<Config::kProducerRegisters>();
    const int role = warp - Parts::kConsumerWarps;
    if (role == 0) {
      Producer<Config, Hooks>(params, ring).send_tiles();
    } else if (role <= Parts::kGroups) {
      Producer<Config, Hooks>(params, ring).send_queries(role - 1);
    } else if (role == Parts::kGroups + 1) {
      if constexpr (Parts::kRuns > 0) Producer<Config, Hooks>(params, ring).find_runs();
    }
  }
};

}  // namespace fajit::cuda
