// What becomes of the rows of K, or of V, between their copy and the products: nothing, or they are
// widened from codes, or key_mod or value_mod changes them. See changer.h.
#pragma once
#include <fajit/context.h>
#include <fajit/cuda/tile/codes.h>
#include <fajit/cuda/tile/panel_layout.h>

namespace fajit::cuda {

// The numbers of rows that are codes: `Hooks` has some for them alone.
template <class Hooks, bool kKeys, bool kCoded>
struct NumbersOf {
  using Type = NoNumbers;
};
template <class Hooks>
struct NumbersOf<Hooks, true, true> {
  using Type = typename Hooks::KeyNumbers;
};
template <class Hooks>
struct NumbersOf<Hooks, false, true> {
  using Type = typename Hooks::ValueNumbers;
};

// The rows of K, or those of V.
template <class Config, class Hooks, bool kIsKeys>
struct Changes {
  static constexpr bool kKeys = kIsKeys;
  using Element = typename Config::Element;
  using Codes = typename Select<kKeys, typename CodesOf<Config>::Keys,
                                typename CodesOf<Config>::Values>::Type;
  static constexpr int kHeadDim = kKeys ? Config::kHeadDim : Config::kHeadDimV;
  using Layout = PanelLayout<kKeys ? Config::kDim : Config::kDimV, Config::kTileKv>;

  static constexpr bool kCoded = Codes::kBits != 16;
  static constexpr bool kHook = kKeys ? Hooks::kKeyMod : Hooks::kValueMod;
  static constexpr bool kAny = kCoded || kHook;

  // Of codes, which land in stages of their own.
  using Widen = Widening<Codes, typename NumbersOf<Hooks, kKeys, kCoded>::Type, Element, Layout,
                         kHeadDim, kHook, false>;
  static_assert(!kCoded || !kHook || Widen::kDecodes, "kernels of mma.sync run hooks over codes");
  static constexpr int kPitch = kCoded ? Widen::Rows::kPitch : 0;
  static constexpr int kLandingBytes = Config::kTileKv * kPitch;  // of a stage

  // Runs key_mod or value_mod on a row.
  template <class Row>
  static FAJIT_DEV void run_hook([[maybe_unused]] const Context& c, [[maybe_unused]] const Row& row,
                                 [[maybe_unused]] float* temps, [[maybe_unused]] int32_t request,
                                 [[maybe_unused]] int32_t kv_h, [[maybe_unused]] int32_t position) {
    if constexpr (kHook && kKeys)
      Hooks::key_mod(c, row, temps, ptx::lane_index(), request, kv_h, position);
    if constexpr (kHook && !kKeys)
      Hooks::value_mod(c, row, temps, ptx::lane_index(), request, kv_h, position);
  }
};

// Writes zeros to rows [first, end) of a tile. Called by all lanes of a warp.
template <class Layout>
FAJIT_DEV void clear_rows(unsigned char* tile, int first, int end) {
  constexpr int kChunks = Layout::kPanels * 8;
#pragma unroll 1
  for (int i = first * kChunks + ptx::lane_index(); i < end * kChunks; i += 32)
    *reinterpret_cast<uint4*>(tile + Layout::offset(i / kChunks, i % kChunks)) = uint4{0, 0, 0, 0};
}

}  // namespace fajit::cuda
