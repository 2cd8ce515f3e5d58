// Plans one batch: the requests and where their keys lie, and who computes which part of them.
//
// A batch has up to two kinds of tiles, prefill (many rows) and few-row. Each kind is one launch
// with its own lists of work, a list a worker; on CPUs the lists of both kinds share the workers.
// Units of work are (request or shared group, kv head, row tile). The longest goes to the least
// loaded worker (a heap); a unit that would lift a worker above the balanced share is cut at the
// share, and what is left of it goes on to the next worker. So no worker has more than the share
// and the granularity of a cut, and there are at most as many cuts as workers: at most
// 2 x workers partial tiles (Ye et al. 2025, arXiv 2501.01005, algorithm 1 and appendix D.3).
//
// Everything here is host code on host lengths: nothing of a device is read or waited for.
#pragma once

#include <fajit/abi.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../runtime/module.h"

namespace fajit::scheduler {

[[noreturn]] inline void fail(const std::string& message) { throw std::invalid_argument(message); }
inline std::string number(int64_t value) { return std::to_string(value); }

// A contiguous int32 or int64 array of the host.
struct Array {
  const void* data = nullptr;
  int64_t size = 0;
  int item_bytes = 4;

  int64_t at(int64_t i) const {
    if (item_bytes == 8) return static_cast<const int64_t*>(data)[i];
    return static_cast<const int32_t*>(data)[i];
  }
};

// The keys of requests or groups: ragged (indptr of tokens) or paged (indptr of pages).
struct StorageArrays {
  Array kv_indptr;                   // ragged
  Array page_indptr, last_page_len;  // paged
  int32_t page_size = 0;             // 0: ragged
  int64_t num_page_indices = 0;      // entries of this level's page_indices
};

// One level of shared keys: group g is entries [q_indptr[g], q_indptr[g + 1]) of `tokens` (packed
// tokens; without data: entry e is token e), which all see the group's keys.
struct LevelArrays {
  Array q_indptr, tokens;
  StorageArrays storage;
};

// The requests of a batch, checked; groups of shared keys follow them as further requests. Arrays
// are what fajit_args wants, num_requests + num_groups entries each.
struct Lengths {
  uint64_t id = 0;  // of this object alone, in this process
  int32_t num_requests = 0, num_groups = 0;
  int64_t num_q_tokens = 0;
  int64_t num_kv_tokens = 0;     // ragged: rows that k and v must have
  int64_t num_page_indices = 0;  // paged: entries of all levels' page_indices, one after another:
                                 // requests first, then level 0, 1, ...
  int32_t page_size = 0;         // 0: ragged
  std::vector<int32_t> q_len, kv_len, q_row0, kv_row0, q_offset, q_token0, kv_token0, kv_first;
  std::vector<int32_t> page_indptr;  // paged: one more entry, into the level's page_indices[:end]
  std::vector<int32_t> row_request, row_token;  // with groups; see fajit_args
  int32_t max_q_len = 0, max_kv_len = 0;        // of the requests, groups apart

  // Lets an argument block find the arrays that every request has.
  void fill(fajit_args& args) const {
    args.q_len = q_len.data();
    args.kv_len = kv_len.data();
    args.q_row0 = q_row0.data();
    args.kv_row0 = kv_row0.data();
    args.q_offset = q_offset.data();
    args.q_token0 = q_token0.data();
    args.kv_token0 = kv_token0.data();
  }
};

// Throws std::invalid_argument that names the array and the request. `q_offset` without data:
// "end", so that the last query sits on the last key. `levels` are outer to inner, the requests'
// own keys come last and begin where their levels end. With levels, kv_len counts all keys of a
// request.
Lengths read_lengths(const Array& q_indptr, const StorageArrays& storage, const Array& q_offset,
                     const std::vector<LevelArrays>& levels);

// Requests that are a dim of their tensors: each has `q_len` rows of q and `kv_rows` of k and v, of
// which it sees kv_len[b]. Throws std::invalid_argument that names the request.
Lengths dense_lengths(int32_t q_len, int32_t kv_rows, std::vector<int32_t> kv_len,
                      std::vector<int32_t> q_offset);

// The key lists of block rows. Block row i of request b and list head s is at
//   s * (sum of block rows of all requests) + (block rows of requests before b) + i,
// and covers query rows [i * q_block, (i + 1) * q_block) of the request.
struct KeyLists {
  int32_t q_block = 0, key_block = 0;  // 0: no lists
  bool per_head = false;               // a list a kv head; else one for all
  Array begin, count;                  // first entry and number of entries in key_blocks
  int64_t num_key_blocks = 0;
};

struct Kind {
  std::shared_ptr<const runtime::Module> module;  // null: masks are costed by the other kind's
  int32_t tile_q = 0;       // most packed rows of an item; 0: there is no such kind
  int32_t row_granule = 1;  // rows cost and are cut in multiples of this
  int32_t tile_kv = 0;      // keys are cut at multiples of this
  int32_t min_chunk = 0;    // no part of a cut is shorter, in keys
  // Nanoseconds: an item costs item_ns + keys * max(load_ns, rows * pair_ns), rows rounded up to
  // the granule, and state_ns a row more where it writes a partial state.
  double item_ns = 0, load_ns = 0, pair_ns = 0, state_ns = 0;
};

struct Limits {
  int32_t max_requests = 0, max_q_tokens = 0, max_kv_len = 0, max_pages = 0;  // 0: no limits
};

struct PlanOptions {
  int32_t num_q_heads = 0, num_kv_heads = 0, head_dim_v = 0;
  int32_t few_rows = 0;             // packed rows up to which a request is few-row work
  int32_t num_workers[2] = {1, 1};  // of each launch; CPU: threads, the same for both
  bool share_workers = false;       // CPU: one balance over both kinds
  bool batch_invariant = false;     // cut at multiples of split_keys, whatever else is in the batch
  int32_t split_keys[2] = {0, 0};   // 0: never cut
  bool classify = false;            // cost the mask by its interval form
  bool mask_is_contiguous = false;  // rows keep one run of keys: bounds are searched, not tiles
  bool mask_reads_request = true;   // else equal lengths have equal costs, and groups are costed
  double merge_ns = 0;              // what a merge costs apart from its states: its launch
  int32_t row_block = 0;            // no item has query rows of two blocks of so many; 0: no blocks
  Limits limits;
  int32_t num_levels = 0;  // levels of shared keys that a plan within the limits may have
};

// A launch of one kind.
struct KindPlan {
  std::vector<fajit_work> work;        // by worker
  std::vector<int32_t> worker_indptr;  // [num_workers + 1]
  std::vector<float> cost_ns;          // of each item, predicted
  std::vector<float> load_ns;          // [num_workers]: their sums
};

// Most entries that a plan within the limits can have: the fixed layout of a captured graph.
struct Capacity {
  int64_t requests = 0, work[2] = {0, 0}, merge_work = 0, merge_sources = 0, row_tokens = 0,
          partial_rows = 0;
  int32_t max_merge_rows = 0;
};

struct BatchPlan {
  uint64_t lengths_id = 0;  // what it was made of; work needs no check against the same
  int32_t num_q_heads = 0, num_kv_heads = 0, key_block = 0;
  int64_t num_key_blocks = 0;
  KindPlan kinds[2];  // prefill, few-row
  std::vector<fajit_merge_work> merge_work;
  std::vector<int32_t> merge_sources;
  int64_t partial_rows = 0;
  int32_t max_merge_rows = 0, most_splits = 1;
  int64_t workspace_bytes = 0;           // see workspace_bytes()
  double total_ns = 0, critical_ns = 0;  // sum over workers; the longest worker, launches added up
  bool has_limits = false;
  Capacity capacity;  // with limits; else what the plan has
};

// partial_out [rows, head_dim_v] and, from the next multiple of 64 bytes, partial_lse [rows], fp32.
int64_t workspace_bytes(int64_t partial_rows, int32_t head_dim_v);

// Within options.limits. `q_block`: that of the plans' key lists; 0 without.
Capacity capacity_of(const Kind (&kinds)[2], const PlanOptions& options, int32_t q_block = 0);

// `mask_args`: tensors and scalars that the mask's interval form reads; its lengths are ignored.
// Throws std::invalid_argument for a batch beyond the limits (naming both sizes).
BatchPlan plan_batch(const Lengths& lengths, const KeyLists& lists, const Kind (&kinds)[2],
                     const PlanOptions& options, const fajit_args& mask_args);

// A plan of work that somebody else made, each item for a worker of its own.
BatchPlan plan_of_work(int kind, std::vector<fajit_work> work,
                       std::vector<fajit_merge_work> merge_work, std::vector<int32_t> merge_sources,
                       int64_t partial_rows);

}  // namespace fajit::scheduler
