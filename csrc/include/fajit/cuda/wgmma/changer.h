// The changers of a block: four warps that change rows of K and of V between their copy and the
// products: codes are widened to 16-bit rows, and key_mod and value_mod are run. Each warp has a
// quarter of a tile's rows.
//
//     TMA ---> codes ---> changers ---> K, V ---> consumers
//     TMA -------------> K, V <-> changers -----> consumers      rows that are no codes
//
// Land, change, fence, arrive: wgmma reads through another proxy than the one that the changers
// write through, so each lane fences its own writes before the warp arrives. Rows of a tile from
// its end on, of the next request or of slots that were never written, become zeros in V, as a
// weight of 0 times a NaN would be NaN.
//
//     numbers of V(n) | widen K(n) | numbers of K(n+1) | widen V(n) | numbers of V(n+1) | ...
//
// The numbers of codes (scales, zero points) are loaded before the rows of another side or tile are
// changed, which hides their latency. For that a tile's record is enough: only a change waits for
// the bytes.
#pragma once
#include <fajit/cuda/params.h>
#include <fajit/cuda/tile/hook_rows.h>
#include <fajit/cuda/wgmma/ring.h>

namespace fajit::cuda {

template <class Config, class Hooks>
class Changer {
  using Element = typename Config::Element;
  using Parts = Ring<Config, Hooks>;
  using Keys = typename Parts::KeyChanges;
  using Values = typename Parts::ValueChanges;
  // The side that is changed first; the other one, of the same tile, comes behind it.
  using First = typename Select<Keys::kAny, Keys, Values>::Type;
  static constexpr bool kBoth = Keys::kAny && Values::kAny;
  static constexpr int kRows = Parts::kChangedRows;
  static_assert(kRows % 8 == 0 && kRows <= 32, "whole swizzle patterns, a row's numbers a lane");

 public:
  // warp: of the changers.
  FAJIT_DEV Changer(const Params<Config, Hooks>& params, const Parts& ring, int warp)
      : c_(params.context()),
        a_(params.args),
        ring_(ring),
        first_(warp * kRows),
        temps_(reinterpret_cast<float*>(ring.shared + Parts::kTempsBegin) +
               (Parts::kConsumerWarps + warp) * Hooks::kRowTemps),
        numbers_(reinterpret_cast<float*>(ring.shared + Parts::kNumbersBegin) +
                 warp * Parts::kNumbers) {}

  FAJIT_DEV void run() {
    for_each_item(a_, ring_, [&](const fajit_work& item) {
      request_ = item.request;
      kv_h_ = item.head_begin / c_.group_size();
      change_tiles();
    });
  }

 private:
  template <class Side>
  using HeldOf = typename Side::Widen::Held;

  FAJIT_DEV void change_tiles() {
    TileRecord now = described_tile(turn_);
    HeldOf<First> held = load<First>(now);
    [[maybe_unused]] HeldOf<Values> held_values{};
#pragma unroll 1
    for (;;) {
      TileRecord next = now;
      const auto look_ahead = [&] {
        if (now.last) return;
        next = described_tile(turn_ + 1);
        held = load<First>(next);
      };
      // `held` may be the next tile's below: of it `change` uses the codebook alone.
      put<First>(held);
      if constexpr (kBoth) held_values = load<Values>(now);
      if constexpr (!kBoth && First::kCoded) look_ahead();
      change<First>(now, held);
      if constexpr (kBoth) {
        if constexpr (First::kCoded) look_ahead();
        put<Values>(held_values);
        change<Values>(now, held_values);
      }
      ++turn_;
      if (now.last) break;
      now = First::kCoded ? next : described_tile(turn_);
    }
  }

  FAJIT_DEV TileRecord described_tile(uint32_t turn) const {
    ptx::wait(ring_.described(turn), Parts::description_phase(turn));
    return ring_.template read_record<Records::kLandings>(turn);
  }

  // The rows of this warp that are keys; an item without tiles has a tile without keys.
  FAJIT_DEV int count_of(const TileRecord& record) const {
    return record.tile.end - record.tile.begin - first_;
  }
  template <class Side>
  FAJIT_DEV HeldOf<Side> load(const TileRecord& record) const {
    if constexpr (!Side::kCoded) return {};
    const int lane = ptx::lane_index();
    const bool exists = lane < min(count_of(record), kRows);
    const int32_t key = exists ? record.tile.begin + first_ + lane : 0;
    return Side::Widen::load(c_, request_, kv_h_, key, exists);
  }
  template <class Side>
  FAJIT_DEV float* numbers() const {
    return numbers_ + (Side::kKeys ? 0 : Parts::kKeyNumbers);
  }
  template <class Side>
  FAJIT_DEV void put(const HeldOf<Side>& held) const {
    if constexpr (Side::kCoded) {
      Side::Widen::template put<kRows>(numbers<Side>(), held);
      __syncwarp();
    }
  }

  FAJIT_DEV unsigned char* stage(int begin, int bytes) const {  // of this turn
    return ring_.shared + begin + turn_ % Parts::kStages * bytes;
  }
  // Changes the rows of a tile, when they have landed, and hands it on.
  template <class Side>
  FAJIT_DEV void change(const TileRecord& record, const HeldOf<Side>& held) const {
    ptx::wait(ring_.template landed<Side>(turn_), Parts::phase(turn_));
    // Rows that are no codes have landed where they stay.
    if constexpr (Side::kCoded)
      ptx::wait(ring_.template empty<Side>(turn_), Parts::phase(turn_) ^ 1);
    unsigned char* const tile =
        stage(Side::kKeys ? Parts::kKBegin : Parts::kVBegin, Side::Layout::kBytes);
    const int count = count_of(record);
    if constexpr (Side::kCoded) {
      const unsigned char* const codes =
          stage(Side::kKeys ? Parts::kKeyCodesBegin : Parts::kValueCodesBegin,
                Side::kLandingBytes) +
          first_ * Side::kPitch;
      Side::Widen::template run<kRows>(tile, first_, codes, count, numbers<Side>(), held.entry,
                                       [](const auto&, int) {});
    } else {
      const auto hook = [&](int r) {
        Side::run_hook(c_, TileRow<Element, typename Side::Layout>{tile, first_ + r}, temps_,
                       request_, kv_h_, record.tile.begin + first_ + r);
      };
      const int exist = min(count, kRows);
      // Of several rows at once, so that what a hook reads from tables arrives in the meantime.
      constexpr int kTogether = 8;
      int r = 0;
#pragma unroll 1
      for (; r + kTogether <= exist; r += kTogether) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) hook(r + i);
      }
#pragma unroll 1
      for (; r < exist; ++r) hook(r);
      if (!Side::kKeys && count < kRows)
        clear_rows<typename Side::Layout>(tile, first_ + max(count, 0), first_ + kRows);
    }
    ptx::fence_async_proxy();
    __syncwarp();
    if (ptx::lane_index() == 0) {
      if (Side::kKeys && first_ == 0) ring_.write_record(turn_, record);
      ptx::arrive(ring_.template full<Side>(turn_));
      if constexpr (Side::kCoded) ptx::arrive(ring_.template taken<Side>(turn_));
    }
    __syncwarp();
  }

  const Context c_;
  const fajit_args& a_;
  const Parts ring_;
  const int first_;  // row
  float* const temps_;
  float* const numbers_;
  int32_t request_ = 0, kv_h_ = 0;
  uint32_t turn_ = 0;
};

}  // namespace fajit::cuda
