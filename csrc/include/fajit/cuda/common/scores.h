// The hooks and the mask on the scores of a tile.
//
// A thread holds 2 kM query rows (rows l/4 and l/4 + 8 of each block of 16) and, of each block of 8
// keys, two adjacent ones (2(l%4), + 1): see ptx/matrix.h.
#pragma once
#include <fajit/cuda/common/kv_walk.h>
#include <fajit/cuda/common/units.h>
#include <fajit/cuda/hooks/soft_cap.h>

namespace fajit::cuda {

// The query rows of a thread: rows l/4 and l/4 + 8 of each block of 16 that its warp holds. The
// tile's rows are split among the warps, or with kWarpPairs among pairs of them, unless one warp
// holds all of them: then every warp does.
//
// The hooks' values of a row are kept in registers where there is a score_mod, which every tile
// runs: each lane of a quad, whose lanes share 2 kM rows, keeps those of one, and hands them to the
// others in each tile. With a mask alone they are recomputed in the few partial tiles, which saves
// registers in the others.
template <class Config, class Hooks, int kM>
class ThreadRows {
 public:
  using Row = decltype(Hooks::rows(Context{}, int32_t{}, int32_t{}, int32_t{}));

  FAJIT_DEV ThreadRows(const Context& c, const fajit_args& a, const fajit_work& item)
      : c_(c), a_(a), item_(item) {
    static_assert(2 * kM <= 4, "a lane keeps one row of its quad");
    if constexpr (kKept && kWords > 0) {
      const Row row = make(ptx::thread_here() % (2 * kM));
      __builtin_memcpy(kept_, &row, sizeof(Row));
    }
  }

  // Rows past the item's end repeat its last one.
  FAJIT_DEV PackedRow at(int i) const {
    constexpr int kWarpRows = 16 * kM, kGroups = Config::kTileQ / kWarpRows;
    const int thread = ptx::thread_here();
    const int warp = kGroups == 1 ? 0 : Config::kWarpPairs ? thread / 32 % kGroups : thread / 32;
    const int32_t p = item_.row_begin + warp * kWarpRows + i * 8 + thread % 32 / 4;
    return packed_row<Config::kMixedRows>(a_, item_, min(p, item_.row_end - 1));
  }
  FAJIT_DEV Row row(int i) const {
    if constexpr (kWords == 0) return Row{};
    if constexpr (!kKept) return make(i);
    uint32_t words[kWords > 0 ? kWords : 1];
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = ptx::from_quad_lane(kept_[w], i);
    Row row;
    __builtin_memcpy(&row, words, sizeof(Row));
    return row;
  }

 private:
  static constexpr bool kKept = Hooks::kScore;
  static constexpr int kWords = __is_empty(Row) ? 0 : (sizeof(Row) + 3) / 4;
  FAJIT_DEV Row make(int i) const {
    const PackedRow row = at(i);
    return Hooks::rows(c_, row.b, row.h, row.q_idx);
  }

  const Context c_;
  const fajit_args& a_;
  const fajit_work& item_;
  uint32_t kept_[kWords > 0 ? kWords : 1] = {};
};

// The logical position of key `r` of a tile, for hooks. listed: shared memory address of the tile's
// key list entries.
template <class Config>
FAJIT_DEV int32_t key_position(const KvTile& tile, [[maybe_unused]] uint32_t listed, int r) {
  if constexpr (Config::kSparse) return seen_as(ptx::load_word(listed + r * 4));
  return tile.begin + r;
}

// Whether the scores of a full tile lack a term per row, of a line or of a soft cap: `Hooks::line`.
template <bool kMasked, class Config, class Hooks>
inline constexpr bool kByLine = !kMasked && kHasLines<Config, Hooks>;

// Applies score_mod, the pointwise function and the mask to a tile's scores in place. Without
// kMasked the tile is full: no mask code and no bounds check. The scores of row i lack at_first[i],
// which the softmax takes off its base; without kByLine it is 0. listed: see key_position.
template <bool kMasked, class Config, class Hooks, int kM, int kN>
FAJIT_DEV void hook_scores(float (&s)[kM][kN][4], [[maybe_unused]] float (&at_first)[2 * kM],
                           const Context& c, const ThreadRows<Config, Hooks, kM>& rows,
                           const Units& units, const fajit_work& item, int32_t kv_h,
                           const KvTile& tile, [[maybe_unused]] uint32_t listed) {
  constexpr bool kNatural = !Hooks::kRaw && (Hooks::kScore || Hooks::kPointwise);
  constexpr bool kLine = kByLine<kMasked, Config, Hooks>;
  constexpr bool kReadsKeys = Hooks::kScore || (kMasked && Hooks::kMask);
  if constexpr (!Hooks::kScore && !Hooks::kPointwise && !kMasked) return;
  using Row = typename ThreadRows<Config, Hooks, kM>::Row;
  [[maybe_unused]] Row row[2 * kM];
  [[maybe_unused]] PackedRow packed[2 * kM];
  [[maybe_unused]] float slope[2 * kM];
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    if constexpr (kReadsKeys) row[i] = rows.row(i);
    if constexpr (kLine) {
      const auto line = Hooks::line(c, row[i], tile.begin + ptx::lane_index() % 4 * 2);
      at_first[i] = line.at_first;
      slope[i] = line.slope;
    } else {
      at_first[i] = 0.0f;
    }
    if constexpr (Hooks::kPointwiseScale || Config::kMixedRows) packed[i] = rows.at(i);
  }
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    [[maybe_unused]] int32_t pair[2] = {};
    if constexpr (Config::kSparse && (kMasked || kReadsKeys))
      ptx::load_word_pair(pair, listed + (n * 8 + ptx::lane_index() % 4 * 2) * 4);
    if constexpr (kLine) {
      if constexpr (Hooks::kSoftCap) {
        const int32_t first = tile.begin + n * 8 + ptx::lane_index() % 4 * 2;
        const auto key = Hooks::keys(c, item.request, kv_h, first);
        const auto next = Hooks::keys(c, item.request, kv_h, first + 1);
#pragma unroll
        for (int i = 0; i < 2 * kM; ++i) {
          float* const x = s[i / 2][n] + i % 2 * 2;
          x[0] = Hooks::exponent(c, x[0], row[i], key);
          x[1] = Hooks::exponent(c, x[1], row[i], next);
          ops::half_tanh(x[0], x[1]);
        }
      }
    }
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
        const int state = BlockStates(*c.args, item).at(kv_idx);
        always = inside && state == FAJIT_TILE_FULL;
        maybe = inside && state == FAJIT_TILE_PARTIAL;
      }
      using Key = decltype(Hooks::keys(c, item.request, kv_h, kv_idx));
      [[maybe_unused]] Key key{};
      if constexpr (kReadsKeys && !Config::kMixedRows)
        key = Hooks::keys(c, item.request, kv_h, kv_idx);
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) {
        float& x = s[i / 2][n][i % 2 * 2 + j];
        if constexpr (kReadsKeys && Config::kMixedRows)
          key = Hooks::keys(c, packed[i].b, kv_h, kv_idx);
        if constexpr (kNatural) x *= units.score;
        if constexpr (kLine) {
          x = Hooks::rest(c, x, row[i], key);
          if constexpr (Hooks::kSlope) x = fmaf(slope[i], static_cast<float>(n * 8 + j), x);
        } else if constexpr (Hooks::kScore) {
          x = Hooks::score(c, x, row[i], key);
        }
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

}  // namespace fajit::cuda
