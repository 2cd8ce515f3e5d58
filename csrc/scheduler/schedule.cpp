#include "schedule.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <utility>

#include "rounding.h"

namespace fajit::scheduler {
namespace {

constexpr int32_t kCostTiles = 64;  // cells a row of tiles is divided into for its cost

struct TileRow {
  fajit_work work;  // the whole key range
  int64_t cost;
};

// Row ranges of one request and head group: equal shares, multiples of the granule, never across a
// block of a block mask. Equal shares waste less than full tiles and a short tail.
std::vector<std::pair<int32_t, int32_t>> row_ranges(const fajit_args& args, int32_t rows,
                                                    int32_t heads, const Options& o) {
  const int64_t block_rows =
      args.block_mask.q_block > 0 ? int64_t{args.block_mask.q_block} * heads : rows;
  std::vector<std::pair<int32_t, int32_t>> out;
  for (int64_t block = 0; block < rows; block += block_rows) {
    const int32_t end = static_cast<int32_t>(std::min<int64_t>(rows, block + block_rows));
    const int32_t span = end - static_cast<int32_t>(block);
    const int32_t tiles = ceil_div(span, o.tile_q);
    const int32_t share = std::min(o.tile_q, round_up(ceil_div(span, tiles), o.row_granule));
    for (int32_t row = static_cast<int32_t>(block); row < end; row += share) {
      out.emplace_back(row, std::min(row + share, end));
    }
  }
  return out;
}

struct VisitedKeys {
  int32_t begin, end;  // hull of the visited keys
  int64_t visited;
};

// The keys that rows [row_begin, row_end) visit, from the mask's interval form over all heads.
VisitedKeys visited_keys(const runtime::Module* module, const fajit_args& args, int32_t request,
                    int32_t first_query, int32_t last_query, const Options& o,
                    std::vector<uint8_t>& states) {
  const int32_t kv_len = args.kv_len[request];
  VisitedKeys all{0, kv_len, kv_len};
  if (!o.classify || module == nullptr || kv_len == 0) return all;
  const int32_t cell = round_up(ceil_div(kv_len, kCostTiles), o.tile_kv);
  const int32_t cells = ceil_div(kv_len, cell);
  states.resize(static_cast<size_t>(cells));
  fajit_classify_args c{};
  c.args = &args;
  c.request = request;
  c.head_end = args.num_q_heads;
  c.q_begin = args.q_offset[request] + first_query;
  c.q_end = args.q_offset[request] + last_query + 1;
  c.tile_q = c.q_end - c.q_begin;
  c.kv_end = kv_len;
  c.tile_kv = cell;
  c.states = states.data();
  if (module->classify(c) != FAJIT_OK) return all;
  VisitedKeys extent{kv_len, 0, 0};
  for (int32_t i = 0; i < cells; ++i) {
    if (states[static_cast<size_t>(i)] == FAJIT_TILE_EMPTY) continue;
    const int32_t begin = i * cell, end = std::min(kv_len, begin + cell);
    extent.begin = std::min(extent.begin, begin);
    extent.end = end;
    extent.visited += end - begin;
  }
  if (extent.end == 0) extent.begin = 0;
  return extent;
}

std::vector<TileRow> make_units(const runtime::Module* module, const fajit_args& args,
                             const Options& o) {
  std::vector<TileRow> units;
  std::vector<uint8_t> states;
  const int32_t group = args.num_q_heads / args.num_kv_heads;
  const int32_t heads = o.share_heads ? group : 1;
  for (int32_t request = 0; request < args.num_requests; ++request) {
    const int32_t rows = args.q_len[request] * heads;
    for (const auto& [begin, end] : row_ranges(args, rows, heads, o)) {
      const VisitedKeys extent =
          visited_keys(module, args, request, begin / heads, (end - 1) / heads, o, states);
      // Rows below the granule cost as much as the granule; +1: an item without keys still writes.
      const int64_t cost = int64_t{round_up(end - begin, o.row_granule)} * extent.visited + 1;
      for (int32_t head = 0; head < args.num_q_heads; head += heads) {
        units.push_back({{request, head, heads, begin, end, extent.begin, extent.end, -1}, cost});
      }
    }
  }
  return units;
}

// The most loaded worker when workers take items in order.
int64_t critical_cost(const std::vector<int64_t>& costs, int32_t num_workers) {
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> loads;
  for (int32_t i = 0; i < num_workers; ++i) loads.push(0);
  int64_t critical = 0;
  for (const int64_t cost : costs) {
    const int64_t load = loads.top() + cost;
    loads.pop();
    loads.push(load);
    critical = std::max(critical, load);
  }
  return critical;
}

std::vector<int64_t> costs_of(const std::vector<TileRow>& units) {
  std::vector<int64_t> costs;
  costs.reserve(units.size());
  for (const TileRow& unit : units) costs.push_back(unit.cost);
  return costs;
}

void longest_first(std::vector<TileRow>& units) {
  std::stable_sort(units.begin(), units.end(),
                   [](const TileRow& a, const TileRow& b) { return a.cost > b.cost; });
}

// The least cost of an item such that no more than `most` items are cut: the search of FlashInfer's
// scheduler (Ye et al. 2025, arXiv 2501.01005, algorithm 1), on costs.
int64_t least_item_cost(const std::vector<TileRow>& units, int64_t most) {
  int64_t low = 1, high = 1;
  for (const TileRow& unit : units) high = std::max(high, unit.cost);
  while (low < high) {
    const int64_t cost = low + (high - low) / 2;
    int64_t items = 0;
    for (const TileRow& unit : units) items += (unit.cost + cost - 1) / cost;
    if (items <= most)
      high = cost;
    else
      low = cost + 1;
  }
  return low;
}

// The units, those of more than `item_cost` cut into chunks of about that cost and merged.
Schedule cut(const std::vector<TileRow>& units, int64_t item_cost, const Options& o) {
  Schedule s;
  std::vector<TileRow> items;
  for (const TileRow& unit : units) {
    const fajit_work& w = unit.work;
    const int32_t keys = w.kv_end - w.kv_begin, rows = w.row_end - w.row_begin;
    int32_t chunk = keys;
    if (unit.cost > item_cost) {
      const int64_t fair = int64_t{keys} * item_cost / unit.cost;
      chunk = round_up(std::max<int64_t>(fair, o.min_chunk), o.tile_kv);
    }
    const int32_t splits = keys > chunk ? ceil_div(keys, chunk) : 1;
    if (splits == 1) {
      items.push_back(unit);
      continue;
    }
    s.merge_work.push_back(
        {w.request, w.head_begin, w.head_count, w.row_begin, w.row_end, s.partial_rows, splits, 0});
    // A partial row is written and read as fp32, which on a device takes as long as two keys.
    const int64_t state_cost = o.device ? 2 * int64_t{rows} * round_up(rows, o.row_granule) : 0;
    for (int32_t i = 0; i < splits; ++i) {
      TileRow part = unit;
      part.work.kv_begin = w.kv_begin + i * chunk;
      part.work.kv_end = std::min(w.kv_end, part.work.kv_begin + chunk);
      part.work.partial = s.partial_rows;
      part.cost = unit.cost * (part.work.kv_end - part.work.kv_begin) / keys + 1 + state_cost;
      s.partial_rows += rows;
      items.push_back(part);
    }
    s.most_splits = std::max(s.most_splits, splits);
  }
  if (!s.merge_work.empty()) longest_first(items);
  s.critical_cost = critical_cost(costs_of(items), o.num_workers);
  for (const TileRow& item : items) s.work.push_back(item.work);
  return s;
}

// What the merge's own launch costs a device, and each wave of blocks after the first: as much as
// this many keys of the longest unit.
constexpr int64_t kMergeLaunchKeys = 128;
constexpr int64_t kWaveStartKeys = 64;
constexpr int64_t kMostWaves = 4;

// Items for one wave of slots, or for up to four: 256 equal units fill 396 slots badly, whole or in
// as many parts as the slots hold at once, but in thirds they fill them twice over.
Schedule split_for_slots(const std::vector<TileRow>& units, Schedule whole, const Options& o) {
  const int64_t count = static_cast<int64_t>(units.size());
  const fajit_work& longest = units.front().work;
  const int64_t rows = round_up(longest.row_end - longest.row_begin, o.row_granule);
  int64_t least = whole.critical_cost * 19 / 20;
  Schedule best = std::move(whole);
  for (int64_t waves = 1; waves <= kMostWaves; ++waves) {
    const int64_t slots = waves * o.num_workers;
    Schedule split = cut(units, least_item_cost(units, count < slots ? slots : count + slots), o);
    if (split.merge_work.empty()) continue;
    const int64_t cost =
        split.critical_cost + rows * (kMergeLaunchKeys + (waves - 1) * kWaveStartKeys);
    if (cost >= least) continue;
    least = cost;
    best = std::move(split);
  }
  return best;
}

}  // namespace

Schedule schedule(const runtime::Module* module, const fajit_args& args, const Options& o) {
  std::vector<TileRow> units = make_units(module, args, o);
  longest_first(units);
  int64_t total = 0;
  for (const TileRow& unit : units) total += unit.cost;
  const int64_t ideal = total / std::max(1, o.num_workers) + 1;
  Schedule s = cut(units, std::numeric_limits<int64_t>::max(), o);
  // Whole units leave a worker waiting: cut the long ones, for threads into a quarter of a fair
  // share.
  if (o.allow_splits && o.num_workers > 1 && s.critical_cost * 10 > ideal * 11) {
    s = o.device ? split_for_slots(units, std::move(s), o) : cut(units, ideal / 4, o);
  }
  s.total_cost = total;
  return s;
}

}  // namespace fajit::scheduler
