// Units of work: row tiles of requests and groups, with all their keys, and their costs. balance.h
// cuts them. Row tiles without costs, which are dealt out to ranks of several machines.
#pragma once

#include <cstdint>
#include <vector>

#include "batch_plan.h"
#include "extents.h"

namespace fajit::scheduler {

struct Unit {
  int32_t entity;              // request, or group after the requests
  int32_t head;                // kv head of its key list; -1: one unit for every kv head
  int32_t row_begin, row_end;  // packed rows
  Extent extent;
  int32_t origin;  // its keys are cut at origin + a multiple of tile_kv or split_keys
  int8_t kind;
  bool shared = false;   // other units cover its rows too, so it writes a partial state
  bool dropped = false;  // it has no keys, and other units cover its rows
  double key_ns;         // of a visited key
  double cost_ns;        // of all keys, without writing a state

  int32_t rows() const { return row_end - row_begin; }
};

// The arguments of a batch's masks: `mask_args` (params and layouts of the mask), and its requests
// and heads. Points to arrays of `lengths`.
fajit_args batch_args(const Lengths& lengths, const PlanOptions& options,
                      const fajit_args& mask_args);

// The units of requests, in order, then those of groups; for one kv head unless lists are per head.
// Throws if a request needs a kind that does not exist, or if key lists do not match.
std::vector<Unit> make_units(const Lengths& lengths, const KeyLists& lists, const Kind (&kinds)[2],
                             const PlanOptions& options, const fajit_args& mask_args);

// The kind of a request or group: 1 (few-row) for few rows, else 0 (prefill); see
// PlanOptions::few_rows.
int kind_of(int32_t q_len, int32_t q_block, int32_t group_size, int32_t few_rows);

// Packed rows of each tile, but the last one, of a request or block of `span` packed rows: nearly
// equal shares, which waste less than full tiles and a tail.
int32_t rows_of_tile(int64_t span, const Kind& kind);

// Query rows [row_begin, row_end) of a request, and the keys of their `Extent` (extents.h). Results
// depend on the lengths and the mask alone, not on the machine that computes them.
struct RowTile {
  int32_t request, row_begin, row_end;
  int32_t kv_begin, kv_end;
  int32_t base, cell;
  int32_t visited;  // keys
  uint64_t cells;
};
static_assert(sizeof(RowTile) == 40, "read by numpy");

// Tiles of at most `tile_q` rows of each request, in order. `module`: evaluates the mask where
// options.classify is set; a tile is of all heads of the options. Throws std::invalid_argument
// unless the tiles are positive and the lengths without groups.
std::vector<RowTile> make_row_tiles(const Lengths& lengths, const runtime::Module* module,
                                    const PlanOptions& options, const fajit_args& mask_args,
                                    int32_t tile_q, int32_t tile_kv);

}  // namespace fajit::scheduler
