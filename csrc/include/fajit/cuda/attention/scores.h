// From raw scores to weights: hooks, mask, and the online softmax of one tile.
//
// A thread holds 2 kM query rows (rows l/4 and l/4 + 8 of each block of 16) and, of each block of 8
// keys, two adjacent ones (2(l%4), + 1): see ptx/matrix.h.
#pragma once
#include <fajit/cuda/attention/kv_walk.h>
#include <fajit/cuda/attention/units.h>

namespace fajit::cuda {

#define FAJIT_INF __int_as_float(0x7f800000)

// The query rows of a thread: rows l/4 and l/4 + 8 of each block of 16 that its warp holds. The
// tile's rows are split among the warps, unless one warp holds all of them: then every warp does.
//
// The hooks' values of a row are kept in registers where there is a score_mod, which every tile
// runs. With a mask alone they are recomputed in the few partial tiles, which saves registers in
// the others.
template <class Config, class Hooks, int kM>
class ThreadRows {
 public:
  using Row = decltype(Hooks::rows(Context{}, int32_t{}, int32_t{}, int32_t{}));

  FAJIT_DEV ThreadRows(const Context& c, const fajit_args& a, const fajit_work& item)
      : c_(c), a_(a), item_(item) {
    if constexpr (kKept)
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) kept_[i] = make(i);
  }

  // Rows past the item's end repeat its last one.
  FAJIT_DEV PackedRow at(int i) const {
    constexpr int kWarpRows = 16 * kM;
    const int thread = ptx::thread_here(), warp = Config::kTileQ > kWarpRows ? thread / 32 : 0;
    const int32_t p = item_.row_begin + warp * kWarpRows + i * 8 + thread % 32 / 4;
    return packed_row<Config::kMixedRows>(a_, item_, min(p, item_.row_end - 1));
  }
  FAJIT_DEV Row row(int i) const {
    if constexpr (kKept) return kept_[i];
    return make(i);
  }

 private:
  static constexpr bool kKept = Hooks::kScore;
  FAJIT_DEV Row make(int i) const {
    const PackedRow row = at(i);
    return Hooks::rows(c_, row.b, row.h, row.q_idx);
  }

  const Context c_;
  const fajit_args& a_;
  const fajit_work& item_;
  Row kept_[kKept ? 2 * kM : 1];
};

// The logical position of key `r` of a tile, for hooks. listed: shared memory address of the tile's
// key list entries.
template <class Config>
FAJIT_DEV int32_t key_position(const KvTile& tile, [[maybe_unused]] uint32_t listed, int r) {
  if constexpr (Config::kSparse) return seen_as(ptx::load_word(listed + r * 4));
  return tile.begin + r;
}

// Applies score_mod, the pointwise function and the mask to a tile's scores in place. Without
// kMasked the tile is full: no mask code and no bounds check. listed: see key_position.
template <bool kMasked, class Config, class Hooks, int kM, int kN, class Walk>
FAJIT_DEV void apply_hooks(float (&s)[kM][kN][4], const Context& c,
                           const ThreadRows<Config, Hooks, kM>& rows, const Units& units,
                           int32_t request, int32_t kv_h, const KvTile& tile, const Walk& walk,
                           [[maybe_unused]] uint32_t listed) {
  constexpr bool kNatural = Hooks::kScore || Hooks::kPointwise;
  constexpr bool kReadsKeys = Hooks::kScore || (kMasked && Hooks::kMask);
  if constexpr (!kNatural && !kMasked) return;
  using Row = typename ThreadRows<Config, Hooks, kM>::Row;
  [[maybe_unused]] Row row[2 * kM];
  [[maybe_unused]] PackedRow packed[2 * kM];
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    if constexpr (kReadsKeys) row[i] = rows.row(i);
    if constexpr (Hooks::kPointwiseScale || Config::kMixedRows) packed[i] = rows.at(i);
  }
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    [[maybe_unused]] int32_t pair[2] = {};
    if constexpr (Config::kSparse && (kMasked || kReadsKeys))
      ptx::load_word_pair(pair, listed + (n * 8 + ptx::lane_index() % 4 * 2) * 4);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      // Unsigned: a position past the end may exceed the range of int32.
      const uint32_t position =
          static_cast<uint32_t>(tile.begin) + n * 8 + ptx::lane_index() % 4 * 2 + j;
      bool inside = !kMasked || position < static_cast<uint32_t>(tile.end);
      // Hooks are never called with a position that has no key.
      int32_t kv_idx = inside ? static_cast<int32_t>(position) : tile.end - 1;
      if constexpr (Config::kSparse) {
        inside = !kMasked || is_key(pair[j]);
        kv_idx = seen_as(pair[j]);
      }
      bool always = false, maybe = inside;
      if constexpr (kMasked && Config::kBlockMask) {
        const int state = walk.block_state(kv_idx);
        always = inside && state == FAJIT_TILE_FULL;
        maybe = inside && state == FAJIT_TILE_PARTIAL;
      }
      using Key = decltype(Hooks::keys(c, request, kv_h, kv_idx));
      [[maybe_unused]] Key key{};
      if constexpr (kReadsKeys && !Config::kMixedRows) key = Hooks::keys(c, request, kv_h, kv_idx);
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) {
        float& x = s[i / 2][n][i % 2 * 2 + j];
        if constexpr (kReadsKeys && Config::kMixedRows)
          key = Hooks::keys(c, packed[i].b, kv_h, kv_idx);
        if constexpr (kNatural) x *= units.score;
        if constexpr (Hooks::kScore) x = Hooks::score(c, x, row[i], key);
        if constexpr (Hooks::kPointwise) {
          x = Hooks::pointwise(c, x);
          if constexpr (Hooks::kPointwiseScale)
            x *= Hooks::pointwise_scale(c, packed[i].b, packed[i].h, packed[i].q_idx);
        }
        if constexpr (kMasked) {
          bool keep = maybe;
          if constexpr (Hooks::kMask) keep = keep && Hooks::mask(c, row[i], key);
          if (!(keep || always)) x = Hooks::kPointwise ? 0.0f : -FAJIT_INF;
        }
      }
    }
  }
}

// Running base and sum of a thread's rows. The base is in the scores' units and the same in the
// four lanes that share a row; the sum is this lane's part until `finish`.
//
// The base is raised to the row's maximum only when that exceeds it by more than kSlack in base-2
// units: weights up to 2^8 are as exact as weights up to 1, and after the first tiles the
// accumulators are hardly ever rescaled, which costs a multiplication for each of them.
template <int kM>
struct OnlineSoftmax {
  static constexpr float kSlack = 8.0f;
  float top[2 * kM], sum[2 * kM];

  FAJIT_DEV OnlineSoftmax() {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      top[i] = -FAJIT_INF;
      sum[i] = 0.0f;
    }
  }

  // Turns scores into weights in place; rescales the accumulators where the base changes.
  template <int kN, int kD>
  FAJIT_DEV void step(float (&s)[kM][kN][4], float (&o)[kM][kD][4], float exponent) {
    float best[2 * kM];
    bool moves = false;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int m = i / 2, first = i % 2 * 2;
      best[i] = top[i];
#pragma unroll
      for (int n = 0; n < kN; ++n)
        best[i] = fmaxf(best[i], fmaxf(s[m][n][first], s[m][n][first + 1]));
      best[i] = ptx::quad_max(best[i]);
      // At the first key of a row the difference to -inf is infinite. Without a key it is NaN:
      // false.
      const bool grown = (best[i] - top[i]) * exponent > kSlack;
      if (!grown) best[i] = top[i];
      moves = moves || grown;
    }
    if (__any_sync(ptx::kAllLanes, moves)) {
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) {
        const int m = i / 2, first = i % 2 * 2;
        const float rescale =
            best[i] == top[i] ? 1.0f : ptx::exp2_approx((top[i] - best[i]) * exponent);
        top[i] = best[i];
        sum[i] *= rescale;
#pragma unroll
        for (int d = 0; d < kD; ++d) {
          o[m][d][first] *= rescale;
          o[m][d][first + 1] *= rescale;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int m = i / 2, first = i % 2 * 2;
      // A row without a key so far: any finite base makes its weights 0.
      const float base = top[i] == -FAJIT_INF ? 0.0f : top[i] * exponent;
      float total = 0.0f;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int j = first; j < first + 2; ++j) {
          s[m][n][j] = ptx::exp2_approx(fmaf(s[m][n][j], exponent, -base));
          total += s[m][n][j];
        }
      }
      sum[i] += total;
    }
  }

  // Adds up the parts of the four lanes of each row.
  FAJIT_DEV void finish() {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) sum[i] = ptx::quad_sum(sum[i]);
  }
};

}  // namespace fajit::cuda
