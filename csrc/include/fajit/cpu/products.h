// The two matrix products of a prefill kernel: with vectors, or with AMX tiles for bf16 where the
// target has them. Both have query rows on lanes, so hooks, masks and softmax between the products
// are the same code.
//
//   Session        object that a thread holds while it computes
//   kMaxVectors    vectors of rows in a block
//   kWords         words of a row of Q and K, padded for the products
//   kVRow          elements of a row of V, likewise; kOutDims: dims of O
//   kKvSlots       keys that P has room for
//   kPartKeys      most keys whose scores are computed before their weights
//   kValueWords    words of a packed tile of V
//   kKeysAnywhere  K rows may be at any addresses; otherwise contiguous, or of KeyTiles
//   kByParts       whether there is pack_and_multiply_values
//   kRescalesApart whether multiply_values reads and writes O once more where an alpha is not 1:
//                  bases of weights then follow the maxima of rows late, and the sum of rounded
//                  weights normalises
//   pack(count, words, row)         V of keys [0, count); `row(n)` is valid until row(n + kHeld)
//   multiply_scores<NV>(keys, n0, n1, qt, s, fetch)
//   multiply_values<NV>(words, n0, n1, p, alpha, o, fetch)
//                  of keys [n0, n1), n0 a multiple of kStep; scores are not scaled; s and p: of key
//                  0, with room for the last keys up to a multiple of kStep;
//                  fetch(words): called with the words of K or V that each part multiplies
//   work(count)    words of K and V that both products of a block multiply
#pragma once
#include <fajit/cpu/pack.h>
#if FAJIT_AMX
#include <fajit/cpu/amx/prefill.h>
#endif

namespace fajit {

template <class Matrix, int Dim, int DimV, int TileKv>
struct VectorProducts {
  static constexpr int kMaxVectors = fajit::kMaxVectors;
  static constexpr int kPack = Dot<Matrix>::kPack;
  using Session = Choose<kPack == 2, FlushDenormals, NoSession>;
  static constexpr int kWords = (Dim + kPack - 1) / kPack;
  static constexpr int kVRow = round_up(DimV, kPanel);
  static constexpr int kOutDims = round_up(DimV, kMicroRows);
  static constexpr int kKvSlots = round_up(TileKv, kMicroRows), kPartKeys = kKvSlots;
  static constexpr int64_t kPanelStride = int64_t{(TileKv + kPack - 1) / kPack} * kPanel;
  static constexpr int kPanels = kVRow / kPanel;
  static constexpr uint64_t kValueWords = kPanelStride * kPanels;
  static constexpr bool kKeysAnywhere = true, kByParts = true, kRescalesApart = false;
  static constexpr int kHeld = 2, kStep = 2;

  template <class Row>
  static FAJIT_INLINE void pack(int count, int32_t* words, Row row) {
    pack_panels<Matrix>(count, kPanels, words, kPanelStride, row);
  }
  template <int NV, class KeyRows, class Fetch>
  static FAJIT_INLINE void multiply_scores(KeyRows keys, int n0, int n1, const int32_t* qt,
                                           float* s, Fetch fetch) {
    fajit::multiply_scores<Matrix, NV, kWords>(keys.from(n0, 0), n1 - n0, qt,
                                               s + int64_t{n0} * NV * kLanes, fetch);
  }
  template <int NV, class Fetch>
  static FAJIT_INLINE void multiply_values(const int32_t* words, int n0, int n1, const int32_t* p,
                                           const float* alpha, float* o, Fetch fetch) {
    const int64_t first = n0 / kPack;
    fajit::multiply_values<Matrix, NV>(words + first * kPanel, kPanelStride, kOutDims, n0 / kPack,
                                       (n1 - n0 + kPack - 1) / kPack, p + first * NV * kLanes,
                                       alpha, o, fetch);
  }
  static constexpr int64_t work(int count) {
    return int64_t{count} * kWords + int64_t{kOutDims} * ((count + kPack - 1) / kPack);
  }
  // multiply_values of rows that nothing else is multiplied with, packed by parts that stay in L1.
  // `row(n)`: row n of V, in the matrix dtype.
  static constexpr int64_t kPartBytes = 12288;
  static constexpr int kPartPanels =
      kPartBytes < 4 * kPanelStride ? 1 : static_cast<int>(kPartBytes / (4 * kPanelStride));
  template <int NV, class Row, class Fetch>
  static FAJIT_INLINE void pack_and_multiply_values(int32_t* words, int n0, int n1,
                                                    const int32_t* p, const float* alpha, float* o,
                                                    Row row, Fetch fetch) {
    const int count = n1 - n0, depth = (count + kPack - 1) / kPack;
    for (int first = 0; first < kPanels; first += kPartPanels) {
      const int left = kPanels - first, panels = left < kPartPanels ? left : kPartPanels;
      const int d = first * kPanel, dims = kOutDims - d;
      pack_panels<Matrix>(count, panels, words, kPanelStride,
                          [&](int n) { return row(n0 + n) + d; });
      fajit::multiply_values<Matrix, NV>(
          words, kPanelStride, dims < panels * kPanel ? dims : panels * kPanel, n0 / kPack, depth,
          p + n0 / kPack * NV * kLanes, alpha, o + int64_t{d} * NV * kLanes, fetch);
    }
  }
};

#if FAJIT_AMX
template <int Dim, int DimV, int TileKv>
struct TileProducts {
  using Session = TileUnit;
  static constexpr int kMaxVectors = 2;
  static constexpr int kWords = round_up(Dim, kTileDepth) / 2;
  static constexpr int kVRow = round_up(DimV, kTileDepth);
  static constexpr int kOutDims = kVRow;
  // Scores of 64 keys stay in L1, which K and V stream through, while O is read and written once in
  // a tile: parts of 64 in tiles of 256 keys take 0.82 of the time of 128 keys at once (D128, in
  // L2, least times of one thread of a Xeon, by hand).
  static constexpr int kKvSlots = round_up(TileKv, kTileDepth), kPartKeys = 64;
  // V^T of 32 dims is contiguous, a step of 32 keys after the other: 2 KB of each step, a multiple
  // of 4 KB apart, would share half of the sets of the L1.
  static constexpr int kStepWords = 2 * 16 * 16;
  static constexpr int64_t kPairWords = int64_t{kStepWords} * (kKvSlots / kTileDepth);
  static constexpr int kPairs = kVRow / 32;
  static constexpr uint64_t kValueWords = kPairWords * kPairs;
  // Rescaling O where the largest score rises a little took 5 % of the time (D128).
  static constexpr bool kKeysAnywhere = false, kByParts = false, kRescalesApart = true;
  static constexpr int kHeld = kTileDepth, kStep = kTileDepth;

  template <class Row>
  static FAJIT_INLINE void pack(int count, int32_t* words, Row row) {
    alignas(64) static const bfloat16_t zero[kVRow] = {};
    for (int n = 0; n < count; n += kTileDepth) {
      const bfloat16_t* rows[kTileDepth];
      for (int i = 0; i < kTileDepth; ++i) rows[i] = n + i < count ? row(n + i) : zero;
      pack_value_tiles<kPairs, kPairWords>(rows, words + n / kTileDepth * kStepWords);
    }
  }
  // The rows of K of a key tile, 16 at a time: in place where a tile can load them there, else in
  // `copy`, of contiguous rows, which `convert(n)` writes. Copying all took 3 % of the time with
  // 512 rows, 5 % with 64 (heads of a token side by side).
  class KeyTiles {
   public:
    template <class KeyRows, class Convert>
    FAJIT_INLINE KeyTiles(const KeyRows& k, int count, const bfloat16_t* copy, Convert convert) {
      for (int n = 0; n < count; n += 16) {
        const int64_t stride = n + 16 <= count ? even_stride(k, n) : 0;
        if (stride > 0) {
          tiles_[n / 16] = {reinterpret_cast<const char*>(k(n)), stride};
        } else {
          for (int i = n; i < count && i < n + 16; ++i) convert(i);
          tiles_[n / 16] = {reinterpret_cast<const char*>(copy + n * kWords * 2), kWords * 4};
        }
      }
    }
    FAJIT_INLINE const TileRows& operator()(int n) const { return tiles_[n / 16]; }

   private:
    TileRows tiles_[kKvSlots / 16];
  };
  template <int NV, class Tiles, class Fetch>
  static FAJIT_INLINE void multiply_scores(const Tiles& k, int n0, int n1, const int32_t* qt,
                                           float* s, Fetch fetch) {
    const auto tile = [&](int n) __attribute__((always_inline)) {
      if constexpr (same<Tiles, KeyTiles>) return k(n);
      else return TileRows{reinterpret_cast<const char*>(k(n)), kWords * 4};
    };
    tile_scores<NV, kWords>(tile, n0, n1, qt, s, fetch);
  }
  template <int NV, class Fetch>
  static FAJIT_INLINE void multiply_values(const int32_t* words, int n0, int n1, int32_t* p,
                                           const float* alpha, float* o, Fetch fetch) {
    // Words of keys past the last one are multiplied with zeros of V, but may be NaN: clear them.
    const int steps = (n1 - n0 + kTileDepth - 1) / kTileDepth;
    const int first = (n1 + 1) / 2 * NV * kLanes, end = (n0 / 2 + steps * 16) * NV * kLanes;
    if (first < end) __builtin_memset(p + first, 0, 4 * static_cast<unsigned>(end - first));
    for (int j = 0; j < NV; ++j) {
      const vf factor = load(alpha + j * kLanes);
      if (!any(factor != 1.0f)) continue;
      for (int d = 0; d < kOutDims; ++d) {
        float* at = o + (d * NV + j) * kLanes;
        store(at, load(at) * factor);
      }
    }
    tile_values<NV, kPairs, kPairWords>(words + n0 / kTileDepth * kStepWords, steps,
                                        p + n0 / 2 * NV * kLanes, o, fetch);
  }
  static constexpr int64_t work(int count) {
    return int64_t{round_up(count, 16)} * kWords +
           int64_t{kOutDims} * (round_up(count, kTileDepth) / 2);
  }
};
#endif

template <class Matrix, int Dim, int DimV, int TileKv>
struct ProductsFor {
  using type = VectorProducts<Matrix, Dim, DimV, TileKv>;
};
#if FAJIT_AMX
template <int Dim, int DimV, int TileKv>
struct ProductsFor<bfloat16_t, Dim, DimV, TileKv> {
  using type = TileProducts<Dim, DimV, TileKv>;
};
#endif
template <class Matrix, int Dim, int DimV, int TileKv>
using ProductsOf = typename ProductsFor<Matrix, Dim, DimV, TileKv>::type;

}  // namespace fajit
