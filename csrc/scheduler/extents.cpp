#include "extents.h"

#include <algorithm>

#include "rounding.h"

namespace fajit::scheduler {
namespace {

constexpr int32_t kMostCells = 64;
constexpr int64_t kEvaluations = 8192;  // total cells of all tiles of a plan: well under 1 ms
constexpr size_t kKnown = 256;          // entries of the cache of extents; a power of two

// The largest index in [0, count] for which `holds` is true; `holds` is monotone (true, then false)
// and true at 0. A correct `guess` takes two evaluations, or one if it is `count`.
template <class Holds>
int32_t last_true(int32_t count, int32_t guess, const Holds& holds) {
  int32_t low = 0, high = count + 1;  // holds(low), not holds(high)
  guess = std::clamp(guess, 0, count);
  if (guess > 0) (holds(guess) ? low : high) = guess;
  for (int32_t step = 1; high == count + 1 && low < count; step *= 2) {
    const int32_t next = static_cast<int32_t>(std::min<int64_t>(int64_t{low} + step, count));
    (holds(next) ? low : high) = next;
  }
  for (int32_t step = 1; low == 0 && high > 1 && high <= count; step *= 2) {
    const int32_t next = std::max(high - step, 0);
    if (next == 0) break;
    (holds(next) ? low : high) = next;
  }
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    (holds(middle) ? low : high) = middle;
  }
  return low;
}

int32_t lowest(uint64_t bits) { return bits != 0 ? __builtin_ctzll(bits) : 64; }

struct CellRun { int32_t first, last; };

// The longest run of cells that are not in `cells` and lie before one that is.
CellRun longest_gap(uint64_t cells) {
  CellRun gap{0, 0};
  for (int32_t at = 0; at < 64 && cells >> at != 0;) {
    const int32_t next = at + lowest(cells >> at);
    if (next - at > gap.last - gap.first) gap = {at, next};
    at = next + lowest(~(cells >> next));
  }
  return gap;
}

}  // namespace

int64_t Extent::visited_cells(int32_t from, int32_t to) const {
  int64_t sum = 0;
  for (int32_t at = from; at < to;) {
    const int32_t i = (at - base) / cell, next = std::min(to, end_of_cell(i));
    if (cells >> i & 1) sum += next - at;
    at = next;
  }
  return sum;
}

int32_t Extent::reach(int32_t from, int64_t keys) const {
  if (cell == 0)
    return static_cast<int32_t>(
        std::min<int64_t>(end, int64_t{from} + std::min<int64_t>(keys, end)));
  int32_t at = from;
  while (at < end) {
    const int32_t i = (at - base) / cell, next = std::min(end, end_of_cell(i));
    if (cells >> i & 1) {
      if (keys < next - at) return static_cast<int32_t>(at + keys);
      keys -= next - at;
    }
    at = next;
  }
  return end;
}

MaskExtents::MaskExtents(const runtime::Module* module, const fajit_args& args,
                         const PlanOptions& options, int64_t num_tiles)
    : module_(module),
      contiguous_(options.mask_is_contiguous),
      reads_request_(options.mask_reads_request),
      num_requests_(args.num_requests) {
  call_.args = &args;
  call_.head_end = args.num_q_heads;
  const int64_t cells = options.batch_invariant ? kMostCells : kEvaluations / (num_tiles + 1);
  most_cells_ = static_cast<int32_t>(std::clamp<int64_t>(cells, 4, kMostCells));
  if (module != nullptr && !reads_request_) known_.resize(kKnown);
}

bool MaskExtents::is_empty(int32_t from, int32_t to) {
  uint8_t state = FAJIT_TILE_PARTIAL;
  call_.kv_begin = from;
  call_.kv_end = to;
  call_.tile_kv = to - from;
  call_.states = &state;
  if (module_->classify(call_) != FAJIT_OK) failed_ = true;
  return state == FAJIT_TILE_EMPTY;
}

Extent MaskExtents::of(int32_t entity, int32_t first, int32_t last, int32_t begin, int32_t end,
                       int32_t tile_kv) {
  if (begin >= end) return {begin, begin, 0, 0, 0};
  // The rows of a group belong to several requests.
  if (module_ == nullptr || failed_ || (reads_request_ && entity >= num_requests_)) {
    return {begin, end, 0, 0, 0};
  }
  Known* known = nullptr;
  if (!known_.empty()) {
    const uint32_t hash = (static_cast<uint32_t>(last) * 0x9E3779B1u) ^
                          (static_cast<uint32_t>(end) * 0x85EBCA77u) ^
                          (static_cast<uint32_t>(first) * 0xC2B2AE3Du);
    known = &known_[hash >> 24 & (kKnown - 1)];
    if (known->first == first && known->last == last && known->begin == begin &&
        known->end == end && known->tile_kv == tile_kv) {
      return known->extent;
    }
  }
  call_.request = reads_request_ ? entity : 0;
  call_.q_begin = first;
  call_.q_end = last + 1;
  call_.tile_q = last + 1 - first;
  Extent extent = contiguous_ ? search(begin, end, tile_kv) : by_cells(begin, end, tile_kv);
  if (failed_) return {begin, end, 0, 0, 0};
  if (known != nullptr) *known = {first, last, begin, end, tile_kv, extent};
  return extent;
}

Extent MaskExtents::search(int32_t begin, int32_t end, int32_t tile_kv) {
  // Borders: `begin`, then multiples of tile_kv, then `end`.
  const int32_t first_tile = begin / tile_kv, count = ceil_div(end, tile_kv) - first_tile;
  const auto border = [&](int32_t i) {
    if (i == 0) return begin;
    return i == count ? end : (first_tile + i) * tile_kv;
  };
  const auto index_of = [&](int64_t key) {
    return static_cast<int32_t>(std::clamp<int64_t>(key / tile_kv - first_tile, 0, count));
  };
  // If the last hull reached an end, this one most likely does too, which takes one evaluation.
  int32_t guess = low_at_begin_ ? 0 : index_of(int64_t{call_.q_begin} + low_from_first_);
  const int32_t low =
      last_true(count, guess, [&](int32_t i) { return is_empty(begin, border(i)); });
  if (low == count) return {begin, begin, 0, 0, 0};
  const int32_t most = count - low - 1;  // borders that the end can be moved by
  if (high_at_end_ && (most == 0 || !is_empty(border(count - 1), end))) {
    guess = -1;
  } else {
    guess = count - index_of(int64_t{call_.q_end} - 1 + high_from_last_ + tile_kv - 1);
  }
  const int32_t moved =
      guess < 0
          ? 0
          : last_true(most, guess, [&](int32_t i) { return is_empty(border(count - i), end); });
  const Extent found{border(low), border(count - moved), 0, 0, 0};
  low_at_begin_ = low == 0;
  high_at_end_ = moved == 0;
  if (low > 0) low_from_first_ = int64_t{found.begin} - call_.q_begin;
  if (moved > 0) high_from_last_ = int64_t{found.end} - (int64_t{call_.q_end} - 1);
  return found;
}

Extent MaskExtents::by_cells(int32_t begin, int32_t end, int32_t tile_kv) {
  const int32_t base = begin / tile_kv * tile_kv;
  const int32_t cell = ceil_div(ceil_div(int64_t{end} - base, most_cells_), tile_kv) * tile_kv;
  const int32_t count = ceil_div(int64_t{end} - base, cell);
  Extent extent{begin, begin, base, cell, 0};
  const auto end_of = [&](int32_t i) { return std::min(end, extent.end_of_cell(i)); };
  const auto classify = [&](int32_t first, int32_t last) {
    if (first >= last || failed_) return;
    uint8_t states[kMostCells];
    call_.kv_begin = base + first * cell;
    call_.kv_end = end_of(last - 1);
    call_.tile_kv = cell;
    call_.states = states;
    if (module_->classify(call_) != FAJIT_OK) {
      failed_ = true;
      return;
    }
    for (int32_t i = first; i < last; ++i) {
      if (states[i - first] != FAJIT_TILE_EMPTY) extent.cells |= uint64_t{1} << i;
    }
  };
  // The cells where earlier rows had their gap are most likely empty: one evaluation for all.
  const auto border = [&](int64_t key) {
    return static_cast<int32_t>(std::clamp<int64_t>((key - base) / cell, 0, count));
  };
  const int32_t first = border(gap_begin_ + cell - 1);
  const int32_t last = border(call_.q_begin - gap_to_query_);
  const bool skips = last - first > 1 && is_empty(base + first * cell, end_of(last - 1));
  classify(0, skips ? first : count);
  if (skips) classify(last, count);
  if (extent.cells == 0) return extent;
  const CellRun gap = longest_gap(extent.cells);
  if (gap.last > gap.first) {
    // The distance shrinks slowly: too long a gap costs more than one that is a cell too short.
    const int64_t to_query = int64_t{call_.q_begin} - (base + gap.last * cell);
    gap_to_query_ = std::max(to_query, gap_to_query_ - (gap_to_query_ - to_query) / 8);
    gap_begin_ = base + gap.first * cell;
  }
  extent.begin = std::max(begin, base + lowest(extent.cells) * cell);
  extent.end = end_of(63 - __builtin_clzll(extent.cells));
  return extent;
}

}  // namespace fajit::scheduler
