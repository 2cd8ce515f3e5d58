// The rows of a tile that are stored as codes, and what a warp does to those that it has loaded.
#pragma once
#include <fajit/cuda/common/scores.h>
#include <fajit/cuda/tile/codes.h>

namespace fajit::cuda {

// Rows [first, first + count) of a tile, at most kRows of them, by one warp. Called by all of its
// lanes. kFolds: see `Widening`.
template <class Config, class Hooks, int kRows, bool kFolds>
struct CodedTile {
  using Element = typename Config::Element;
  using KLayout = RowLayout<Config::kDim>;
  using VLayout = RowLayout<Config::kDimV>;
  using Keys = Widening<typename CodesOf<Config>::Keys, typename Hooks::KeyNumbers, Element,
                        KLayout, Config::kHeadDim, Hooks::kKeyMod, kFolds>;
  // A weight times a scale may be beyond the numbers of float16, or subnormal there.
  using Values =
      Widening<typename CodesOf<Config>::Values, typename Hooks::ValueNumbers, Element, VLayout,
               Config::kHeadDimV, Hooks::kValueMod, kFolds && Element::kBfloat16>;

  static constexpr int kKeyPitch = Keys::Rows::kPitch, kValuePitch = Values::Rows::kPitch;
  // Groups of channels whose scales the products apply; 0: those of rows are applied here.
  static constexpr int kKeyGroups = Keys::kFolded ? Keys::kGroups : 0;
  static constexpr int kValueGroups = Values::kFolded ? Values::kGroups : 0;
  static constexpr int kKeyNumbers = kRows * Keys::kNumbers;  // floats; those of values follow
  static constexpr int kNumbers = kKeyNumbers + kRows * Values::kNumbers;

  struct Held {
    typename Keys::Held keys;
    typename Values::Held values;
  };

  const Context& c;
  const KvTile& tile;
  uint32_t listed;  // see key_position
  int first, count;
  int32_t request, kv_h;
  float* numbers;  // kNumbers floats
  float* temps;    // of row hooks

  FAJIT_DEV Held load() const {
    const int lane = ptx::lane_index();
    const bool exists = lane < min(count, kRows);
    const int32_t key = exists ? position(lane) : 0;
    return {Keys::load(c, request, kv_h, key, exists), Values::load(c, request, kv_h, key, exists)};
  }
  FAJIT_DEV void put(const Held& held) const {
    Keys::template put<kRows>(numbers, held.keys);
    Values::template put<kRows>(numbers + kKeyNumbers, held.values);
    __syncwarp();
  }

  // From codes to rows of `to`, from first_row on.
  FAJIT_DEV void widen_keys(unsigned char* to, int first_row, const unsigned char* codes,
                            const Held& held) const {
    Keys::template run<kRows>(to, first_row, codes, count, numbers, held.keys.entry,
                              [&]([[maybe_unused]] const auto& row, [[maybe_unused]] int r) {
                                if constexpr (Hooks::kKeyMod)
                                  Hooks::key_mod(c, row, temps, ptx::lane_index(), request, kv_h,
                                                 position(r));
                              });
  }
  FAJIT_DEV void widen_values(unsigned char* to, int first_row, const unsigned char* codes,
                              const Held& held) const {
    Values::template run<kRows>(
        to, first_row, codes, count, numbers + kKeyNumbers, held.values.entry,
        [&]([[maybe_unused]] const auto& row, [[maybe_unused]] int r) {
          if constexpr (Hooks::kValueMod)
            Hooks::value_mod(c, row, temps, ptx::lane_index(), request, kv_h, position(r));
        });
  }

 private:
  FAJIT_DEV int32_t position(int r) const { return key_position<Config>(tile, listed, first + r); }
};

// Of kernels without codes.
struct NoCodedTile {
  static constexpr int kKeyPitch = 0, kValuePitch = 0, kKeyNumbers = 0, kNumbers = 0;
  static constexpr int kKeyGroups = 0, kValueGroups = 0;
  struct Held {};
};
template <class Config, class Hooks, int kRows, bool kFolds>
using CodedTileOf = typename Select<CodesOf<Config>::kAny, CodedTile<Config, Hooks, kRows, kFolds>,
                                    NoCodedTile>::Type;

}  // namespace fajit::cuda
