#include "units.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "rounding.h"

namespace fajit::scheduler {
namespace {

// The rows of a request are divided in this many parts, one hull each: a finer division costs more
// than it gains.
constexpr int32_t kHullsARequest = 32;

// Tiles of a mask without contiguous rows that may have 64 cells each; more tiles have fewer cells.
// MaskExtents divides the cells of a plan among the tiles that it is told of, 64 to each of 128.
constexpr int64_t kTilesOfManyCells = 1024;
constexpr int64_t kToldOfManyCells = 128;

class UnitMaker {
 public:
  UnitMaker(const Lengths& lengths, const KeyLists& lists, const Kind (&kinds)[2],
            const PlanOptions& options, const fajit_args& mask_args)
      : lengths_(lengths),
        lists_(lists),
        kinds_(kinds),
        options_(options),
        group_size_(options.num_q_heads / options.num_kv_heads),
        extents_(mask_module(), mask_args, options, count_tiles()) {}

  std::vector<Unit> make() {
    const int32_t entities = lengths_.num_requests + lengths_.num_groups;
    units_.reserve(static_cast<size_t>(num_tiles_));
    if (lists_.q_block > 0) {
      make_listed();
    } else {
      const bool blocks = options_.row_block > 0;
      const bool parts = !lengths_.whole_q_len.empty();
      for (int32_t e = 0; e < entities; ++e) {
        if (parts || (blocks && q_len(e) > options_.row_block)) make_tiles(e);
        else make_ranged(e);
      }
    }
    return std::move(units_);
  }

 private:
  int32_t q_len(int32_t entity) const { return lengths_.q_len[static_cast<size_t>(entity)]; }

  // That of the request which the entity is a part of, or its own.
  int32_t whole_len(int32_t entity) const {
    const auto& whole = lengths_.whole_q_len;
    return static_cast<size_t>(entity) < whole.size() ? whole[static_cast<size_t>(entity)]
                                                      : q_len(entity);
  }

  const runtime::Module* mask_module() const {
    if (!options_.classify || lists_.q_block > 0) return nullptr;
    return kinds_[0].module != nullptr ? kinds_[0].module.get() : kinds_[1].module.get();
  }

  std::string name_of(int32_t entity) const {
    return entity < lengths_.num_requests ? "request " + number(entity)
                                          : "group " + number(entity - lengths_.num_requests);
  }

  // Also checks that every request has a kind.
  int64_t count_tiles() {
    int32_t before = 0, tiles = 0;
    for (int32_t e = 0; e < lengths_.num_requests + lengths_.num_groups; ++e) {
      if (q_len(e) == 0) continue;
      if (q_len(e) == before && lengths_.whole_q_len.empty()) {
        num_tiles_ += tiles;
        continue;
      }
      const int kind = kind_of(whole_len(e), lists_.q_block, group_size_, options_.few_rows);
      // Packed rows, rounded up to a whole tile or granule, are counted in 32 bits.
      const int32_t rounding = std::max(kinds_[kind].tile_q, kinds_[kind].row_granule);
      if (int64_t{q_len(e)} * group_size_ + rounding > std::numeric_limits<int32_t>::max()) {
        fail(name_of(e) + " has q_len=" + number(q_len(e)) + " x " + number(group_size_) +
             " heads per kv head, which does not fit 32 bits");
      }
      if (kinds_[kind].tile_q == 0) {
        fail(name_of(e) + " has q_len=" + number(q_len(e)) + ", which is " +
             (kind == 1 ? "few-row" : "prefill") + " work, but the plan has no such kernel");
      }
      tiles = ceil_div(int64_t{q_len(e)} * group_size_, kinds_[kind].tile_q);
      num_tiles_ += tiles;
      before = q_len(e);
    }
    return num_tiles_;
  }

  // Appends units of packed rows [begin, end), in nearly equal shares of `span` rows (by default of
  // these).
  void add_rows(Unit unit, int32_t begin, int32_t end, int64_t span = 0) {
    const Kind& kind = kinds_[unit.kind];
    const int32_t share = rows_of_tile(span > 0 ? span : end - begin, kind);
    const double full_ns = key_ns(kind, share);
    for (int32_t row = begin; row < end; row += share) {
      unit.row_begin = row;
      unit.row_end = std::min(row + share, end);
      unit.key_ns = unit.rows() == share ? full_ns : key_ns(kind, unit.rows());
      units_.push_back(unit);
    }
  }

  static double key_ns(const Kind& kind, int32_t rows) {
    if (kind.row_granule > 1) rows = round_up(rows, kind.row_granule);
    return std::max(kind.load_ns, rows * kind.pair_ns);
  }

  void price(Unit& unit) const {
    const int64_t keys = unit.extent.visited(unit.extent.begin, unit.extent.end);
    unit.cost_ns = kinds_[unit.kind].item_ns + static_cast<double>(keys) * unit.key_ns;
  }

  void make_ranged(int32_t entity) {
    const int32_t queries_len = q_len(entity);
    if (queries_len == 0) return;
    const size_t e = static_cast<size_t>(entity);
    if (queries_len != known_.q_len) know(queries_len);
    const int32_t rows = queries_len * group_size_;
    if (rows > kinds_[known_.kind].tile_q) return make_tiles(entity);
    // A fast path for decoding: hundreds of requests with equal rows. Without it, 256 mixed
    // requests took 7 us longer (of 40).
    const auto [q_first, q_last] = queries(entity, 0, queries_len - 1);
    Unit& unit = units_.emplace_back();
    unit.entity = entity;
    unit.head = -1;
    unit.row_end = rows;
    unit.kind = known_.kind;
    unit.key_ns = known_.key_ns;
    unit.extent = extents_.of(entity, q_first, q_last, lengths_.kv_first[e], lengths_.kv_len[e],
                              kinds_[known_.kind].tile_kv);
    price(unit);
  }

  void make_tiles(int32_t entity) {
    const size_t e = static_cast<size_t>(entity);
    const int32_t queries_len = q_len(entity);
    const int32_t block = options_.row_block > 0 ? options_.row_block : queries_len;
    Unit unit{};
    unit.entity = entity;
    unit.head = -1;
    unit.kind = static_cast<int8_t>(kind_of(whole_len(entity), 0, group_size_, options_.few_rows));
    const int64_t whole = options_.row_block > 0 ? 0 : int64_t{whole_len(entity)} * group_size_;
    const size_t first = units_.size();
    for (int64_t row = 0; row < queries_len; row += block) {
      const int64_t next = std::min<int64_t>(row + block, queries_len);
      add_rows(unit, static_cast<int32_t>(row) * group_size_,
               static_cast<int32_t>(next) * group_size_, whole);
    }
    const int32_t tile_kv = kinds_[unit.kind].tile_kv;
    const int64_t span = int64_t{std::max(tile_kv, queries_len / kHullsARequest)} * group_size_;
    for (size_t i = first; i < units_.size();) {
      size_t last = i;
      while (last + 1 < units_.size() && units_[last + 1].row_end - units_[i].row_begin <= span) {
        ++last;
      }
      const auto [q_first, q_last] = queries(entity, units_[i].row_begin / group_size_,
                                             (units_[last].row_end - 1) / group_size_);
      const Extent extent =
          extents_.of(entity, q_first, q_last, lengths_.kv_first[e], lengths_.kv_len[e], tile_kv);
      for (; i <= last; ++i) {
        units_[i].extent = extent;
        price(units_[i]);
      }
    }
  }

  void know(int32_t queries_len) {
    known_.q_len = queries_len;
    known_.kind = static_cast<int8_t>(kind_of(queries_len, 0, group_size_, options_.few_rows));
    known_.key_ns = key_ns(kinds_[known_.kind], queries_len * group_size_);
  }

  // The smallest and the largest q_idx of rows first..last of a request or group.
  std::pair<int32_t, int32_t> queries(int32_t entity, int32_t first, int32_t last) const {
    const Lengths& l = lengths_;
    if (entity < l.num_requests) {
      const int32_t offset = l.q_offset[static_cast<size_t>(entity)];
      return {offset + first, offset + last};
    }
    if (!options_.classify) return {0, 0};
    int32_t least = std::numeric_limits<int32_t>::max();
    int32_t most = std::numeric_limits<int32_t>::min();
    for (int32_t row = first; row <= last; ++row) {
      const size_t at = static_cast<size_t>(l.q_row0[static_cast<size_t>(entity)] + row);
      const int32_t token = l.row_token.empty() ? static_cast<int32_t>(at) : l.row_token[at];
      const size_t b = static_cast<size_t>(l.row_request[static_cast<size_t>(token)]);
      const int32_t query = l.q_offset[b] + token - l.q_row0[b];
      least = std::min(least, query);
      most = std::max(most, query);
    }
    return {least, most};
  }

  struct KeyList {
    int64_t begin, count;
    bool operator==(const KeyList& other) const {
      return begin == other.begin && count == other.count;
    }
  };

  KeyList list_at(int64_t i, int32_t request, int64_t block_row) const {
    const KeyList list{lists_.begin.at(i), lists_.count.at(i)};
    if (list.begin < 0 || list.count < 0 || list.begin > lists_.num_key_blocks ||
        list.count > lists_.num_key_blocks - list.begin) {
      fail("key lists: block row " + number(block_row) + " of request " + number(request) +
           " has " + number(list.count) + " entries from " + number(list.begin) + " on, of " +
           number(lists_.num_key_blocks) + ": indptr must ascend and end there");
    }
    return list;
  }

  void check_lists(int64_t block_rows) const {
    if (lengths_.num_groups > 0) {
      fail("key lists and levels of shared keys cannot be combined in one plan");
    }
    if (lists_.key_block < 1) fail("key_block=" + number(lists_.key_block) + " must be positive");
    const int64_t needed = block_rows * (lists_.per_head ? options_.num_kv_heads : 1);
    if (lists_.begin.size != needed || lists_.count.size != needed) {
      fail("key lists have " + number(std::min(lists_.begin.size, lists_.count.size)) +
           " block rows; requests with blocks of " + number(lists_.q_block) + " query rows have " +
           number(needed) + (lists_.per_head ? " of all kv heads" : ""));
    }
    const int64_t most = std::numeric_limits<int32_t>::max();
    if (lists_.num_key_blocks > most / lists_.key_block) {
      fail("key lists: " + number(lists_.num_key_blocks) + " entries of " +
           number(lists_.key_block) + " keys do not fit 32 bits");
    }
  }

  void make_listed() {
    const int64_t q_block = lists_.q_block;
    int64_t block_rows = 0;
    for (int32_t b = 0; b < lengths_.num_requests; ++b) block_rows += ceil_div(q_len(b), q_block);
    check_lists(block_rows);
    int64_t first = 0;
    for (int32_t b = 0; b < lengths_.num_requests; ++b) {
      const int64_t rows = ceil_div(q_len(b), q_block);
      for (int32_t s = 0; s < (lists_.per_head ? options_.num_kv_heads : 1); ++s) {
        const int64_t base = s * block_rows + first;
        for (int64_t i = 0; i < rows;) {
          // Adjacent block rows of one list are one span.
          const KeyList list = list_at(base + i, b, i);
          int64_t next = i + 1;
          while (next < rows && list_at(base + next, b, next) == list) ++next;
          add_list(b, lists_.per_head ? s : -1, i * q_block,
                   std::min<int64_t>(next * q_block, q_len(b)), list);
          i = next;
        }
      }
      first += rows;
    }
  }

  void add_list(int32_t request, int32_t head, int64_t begin, int64_t end, const KeyList& list) {
    Unit unit{};
    unit.entity = request;
    unit.head = head;
    unit.kind = static_cast<int8_t>(
        kind_of(q_len(request), lists_.q_block, group_size_, options_.few_rows));
    unit.origin = static_cast<int32_t>(list.begin * lists_.key_block);
    unit.extent.begin = unit.origin;
    unit.extent.end = static_cast<int32_t>((list.begin + list.count) * lists_.key_block);
    const size_t first = units_.size();
    add_rows(unit, static_cast<int32_t>(begin) * group_size_,
             static_cast<int32_t>(end) * group_size_);
    for (size_t i = first; i < units_.size(); ++i) price(units_[i]);
  }

  const Lengths& lengths_;
  const KeyLists& lists_;
  const Kind (&kinds_)[2];
  const PlanOptions& options_;
  const int32_t group_size_;
  int64_t num_tiles_ = 0;
  MaskExtents extents_;
  std::vector<Unit> units_;
  struct {
    int32_t q_len = -1;
    int8_t kind = 0;
    double key_ns = 0;  // for all rows of the request
  } known_;             // values for requests with the same q_len as the last one
};

}  // namespace

int kind_of(int32_t q_len, int32_t q_block, int32_t group_size, int32_t few_rows) {
  const int64_t rows = q_block > 0 ? std::min(q_block, q_len) : q_len;
  return rows * group_size <= few_rows ? 1 : 0;
}

int32_t rows_of_tile(int64_t span, const Kind& kind) {
  if (span <= kind.tile_q) return static_cast<int32_t>(span);
  return std::min(kind.tile_q,
                  round_up(ceil_div(span, ceil_div(span, kind.tile_q)), kind.row_granule));
}

fajit_args batch_args(const Lengths& lengths, const PlanOptions& options,
                      const fajit_args& mask_args) {
  fajit_args args = mask_args;
  args.num_requests = lengths.num_requests;
  args.num_q_heads = options.num_q_heads;
  args.num_kv_heads = options.num_kv_heads;
  args.head_dim_v = options.head_dim_v;
  lengths.fill(args);
  return args;
}

std::vector<Unit> make_units(const Lengths& lengths, const KeyLists& lists, const Kind (&kinds)[2],
                             const PlanOptions& options, const fajit_args& mask_args) {
  return UnitMaker(lengths, lists, kinds, options, mask_args).make();
}

std::vector<RowTile> make_row_tiles(const Lengths& lengths, const runtime::Module* module,
                                    const PlanOptions& options, const fajit_args& mask_args,
                                    int32_t tile_q, int32_t tile_kv) {
  if (tile_q < 1 || tile_kv < 1) fail("tile_q and tile_kv of row tiles must be positive");
  if (lengths.num_groups > 0) fail("row tiles have no levels of shared keys");
  const fajit_args args = batch_args(lengths, options, mask_args);
  int64_t count = 0;
  for (const int32_t rows : lengths.q_len) count += ceil_div(rows, tile_q);
  const int64_t told = std::max<int64_t>(count / kTilesOfManyCells * kToldOfManyCells - 1, 0);
  MaskExtents extents(options.classify ? module : nullptr, args, options, told);
  std::vector<RowTile> tiles;
  tiles.reserve(static_cast<size_t>(count));
  for (int32_t b = 0; b < lengths.num_requests; ++b) {
    const size_t at = static_cast<size_t>(b);
    const int32_t rows = lengths.q_len[at], offset = lengths.q_offset[at];
    for (int32_t row = 0; row < rows; row += tile_q) {
      const int32_t end = static_cast<int32_t>(std::min<int64_t>(int64_t{row} + tile_q, rows));
      const Extent e =
          extents.of(b, offset + row, offset + end - 1, 0, lengths.kv_len[at], tile_kv);
      const int64_t visited = e.empty() ? 0 : e.visited(e.begin, e.end);
      tiles.push_back(
          {b, row, end, e.begin, e.end, e.base, e.cell, static_cast<int32_t>(visited), e.cells});
      if (end == rows) break;
    }
  }
  return tiles;
}

}  // namespace fajit::scheduler
