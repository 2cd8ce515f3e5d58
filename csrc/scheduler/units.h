// Units of work: row tiles of requests and groups, and what they cost. Whole; balance.h cuts them.
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
  bool shared = false;   // its rows have states of other units too, so it writes one
  bool dropped = false;  // it sees no keys, and its rows have other units
  double key_ns;         // of a visited key
  double cost_ns;        // whole, without a state

  int32_t rows() const { return row_end - row_begin; }
};

// Of requests, ascending, then of groups; of one kv head unless lists are per head. Throws where a
// request needs a kind that is not there, or where key lists do not fit.
std::vector<Unit> make_units(const Lengths& lengths, const KeyLists& lists, const Kind (&kinds)[2],
                             const PlanOptions& options, const fajit_args& mask_args);

// 1 where the rows of a request or group are few, else 0; see PlanOptions::few_rows.
int kind_of(int32_t q_len, int32_t q_block, int32_t group_size, int32_t few_rows);

}  // namespace fajit::scheduler
