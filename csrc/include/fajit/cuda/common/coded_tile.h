// The rows of a tile that are stored as codes, and what a warp does to those that it has loaded.
#pragma once
#include <fajit/cuda/common/scores.h>
#include <fajit/cuda/tile/codes.h>

namespace fajit::cuda {

// Rows [first, first + count) of a tile, by one warp. Called by all of its lanes. kFolds: see
// `Widening`.
template <class Config, class Hooks, bool kFolds>
struct CodedTile {
  using Element = typename Config::Element;
  template <class Layout>
  using Keys = Widening<typename CodesOf<Config>::Keys, typename Hooks::KeyNumbers, Element, Layout,
                        Config::kHeadDim, Hooks::kKeyMod, kFolds>;
  template <class Layout>
  using Values = Widening<typename CodesOf<Config>::Values, typename Hooks::ValueNumbers, Element,
                          Layout, Config::kHeadDimV, Hooks::kValueMod, kFolds>;

  template <class Side>
  static constexpr int folded() {
    return Side::kFolded ? Side::kGroups : 0;
  }

  static constexpr int kKeyPitch =
      CodeRows<typename CodesOf<Config>::Keys, Config::kHeadDim>::kPitch;
  static constexpr int kValuePitch =
      CodeRows<typename CodesOf<Config>::Values, Config::kHeadDimV>::kPitch;
  // Groups of channels whose scales the products apply; 0: those of rows are applied here.
  static constexpr int kKeyGroups = folded<Keys<RowLayout<Config::kDim>>>();
  static constexpr int kValueGroups = folded<Values<RowLayout<Config::kDimV>>>();
  // Floats of a row, of keys or of values in turn.
  static constexpr int kNumbers =
      larger(Keys<RowLayout<Config::kDim>>::kNumbers, Values<RowLayout<Config::kDimV>>::kNumbers);

  const Context& c;
  const KvTile& tile;
  uint32_t listed;  // see key_position
  int first, count;
  int32_t request, kv_h;
  int lane;
  float* numbers;  // kNumbers of each row
  float* temps;    // of row hooks

  // From codes to rows of `to`, from first_row on.
  template <int kRows, class Layout>
  FAJIT_DEV void widen_keys(unsigned char* to, int first_row, const unsigned char* codes) const {
    Keys<Layout>::template run<kRows>(
        c, to, first_row, codes, count, numbers, request, kv_h, [&](int r) { return position(r); },
        [&]([[maybe_unused]] const auto& row, [[maybe_unused]] int32_t key) {
          if constexpr (Hooks::kKeyMod) Hooks::key_mod(c, row, temps, lane, request, kv_h, key);
        });
  }
  template <int kRows, class Layout>
  FAJIT_DEV void widen_values(unsigned char* to, int first_row, const unsigned char* codes) const {
    Values<Layout>::template run<kRows>(
        c, to, first_row, codes, count, numbers, request, kv_h, [&](int r) { return position(r); },
        [&]([[maybe_unused]] const auto& row, [[maybe_unused]] int32_t key) {
          if constexpr (Hooks::kValueMod) Hooks::value_mod(c, row, temps, lane, request, kv_h, key);
        });
  }

 private:
  FAJIT_DEV int32_t position(int r) const { return key_position<Config>(tile, listed, first + r); }
};

// Of kernels without codes.
struct NoCodedTile {
  static constexpr int kKeyPitch = 0, kValuePitch = 0, kNumbers = 0;
  static constexpr int kKeyGroups = 0, kValueGroups = 0;
};
template <class Config, class Hooks, bool kFolds>
using CodedTileOf =
    typename Select<CodesOf<Config>::kAny, CodedTile<Config, Hooks, kFolds>, NoCodedTile>::Type;

}  // namespace fajit::cuda
