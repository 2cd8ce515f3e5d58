// Plans one batch: reads the requests and the layout of their keys, and assigns work to workers.
//
// A batch has up to two kinds of tiles, prefill (many rows) and few-row. Each kind is one launch
// with its own work lists, one per worker; on CPUs the lists of both kinds share the workers. Units
// of work are (request or shared group, kv head, row tile). The longest unit goes to the least
// loaded worker (a heap); a unit that would raise a worker's load above the balanced share is cut
// at the share, and its rest goes to the next worker. So no worker has more than the share plus the
// granularity of a cut, and there are at most as many cuts as workers: at most 2 x workers partial
// tiles (Ye et al. 2025, arXiv 2501.01005, algorithm 1 and appendix D.3).
//
// All code here runs on the host, on lengths in host memory, without device synchronisation.
#pragma once

#include <fajit/abi.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../runtime/module.h"

namespace fajit::scheduler {

[[noreturn]] inline void fail(const std::string& message) { throw std::invalid_argument(message); }
inline std::string number(int64_t value) { return std::to_string(value); }

// A contiguous int32 or int64 array in host memory.
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
  // Keys that another plan visits: here they only count, in lengths and positions.
  bool elsewhere = false;
};

// One level of shared keys: group g is entries [q_indptr[g], q_indptr[g + 1]) of `tokens` (packed
// tokens; without data: entry e is token e), which all see the group's keys.
struct LevelArrays {
  Array q_indptr, tokens;
  StorageArrays storage;
};

// The requests of a batch, checked; groups of shared keys follow them as further requests. The
// arrays are those of fajit_args, num_requests + num_groups entries each.
struct Lengths {
  uint64_t id = 0;  // unique in this process
  int32_t num_requests = 0, num_groups = 0;
  int64_t num_q_tokens = 0;
  int64_t num_kv_tokens = 0;     // ragged: rows that k and v must have
  int64_t num_page_indices = 0;  // paged: entries of all levels' page_indices, one after another:
                                 // requests first, then level 0, 1, ...
  int32_t page_size = 0;         // 0: ragged
  std::vector<int32_t> q_len, kv_len, q_row0, kv_row0, q_offset, q_token0, kv_token0, kv_first;
  std::vector<int32_t> page_indptr;  // paged: one more entry, into the level's page_indices[:end]
  std::vector<int32_t> row_request, row_token;  // with groups; see fajit_args
  // Where requests are parts of longer ones: the q_len of the whole one, by which kind and row
  // tiles are chosen, so that the tiles of parts are tiles of the whole one. Else empty.
  std::vector<int32_t> whole_q_len;
  int32_t max_q_len = 0, max_kv_len = 0;  // of the requests, without groups

  // Sets the pointers of an argument block to the per-request arrays.
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

// What bounds the query tokens of a batch: packed rows of a request, in 32 bits, and the rows of q
// that the memory of its device can hold.
struct QueryBounds {
  int32_t group_size = 0;  // 0: no bound of a request
  int64_t max_q_tokens = INT32_MAX;
};

// Throws std::invalid_argument that names the array and the request. `q_offset` without data:
// "end", the last query is at the position of the last key. `levels` are outer to inner; the
// requests' own keys follow the keys of the levels. With levels, kv_len counts all keys of a
// request.
Lengths read_lengths(const Array& q_indptr, const StorageArrays& storage, const Array& q_offset,
                     const std::vector<LevelArrays>& levels, const QueryBounds& bounds = {});

// Requests of dense tensors (one dim): each has `q_len` rows of q and `kv_rows` rows of k and v, of
// which the first kv_len[b] are keys. Throws std::invalid_argument that names the request.
Lengths dense_lengths(int32_t q_len, int32_t kv_rows, std::vector<int32_t> kv_len,
                      std::vector<int32_t> q_offset);

// Of the first page_indptr[-1] entries of `indices`, or of all if there are fewer: 0 or the
// smallest negative one, and the largest one; {0, -1} of none.
std::pair<int64_t, int64_t> page_range(const Array& indices, const Array& page_indptr);

// The key lists of block rows. Block row i of request b and list head s is at
//   s * (sum of block rows of all requests) + (block rows of requests before b) + i,
// and covers query rows [i * q_block, (i + 1) * q_block) of the request.
struct KeyLists {
  int32_t q_block = 0, key_block = 0;  // 0: no lists
  bool per_head = false;               // one list per kv head; else one for all heads
  Array begin, count;                  // first entry and number of entries in key_blocks
  int64_t num_key_blocks = 0;
};

struct Kind {
  // Null: the other kind's module evaluates the mask.
  std::shared_ptr<const runtime::Module> module;
  int32_t tile_q = 0;       // maximum packed rows of an item; 0: there is no such kind
  int32_t row_granule = 1;  // rows are charged and cut in multiples of this
  int32_t tile_kv = 0;      // keys are cut at multiples of this
  int32_t min_chunk = 0;    // minimum keys of each part of a cut
  // Nanoseconds: an item costs item_ns + keys * max(load_ns, rows * pair_ns), rows rounded up to
  // the granule, plus state_ns per row if it writes a partial state. load_ns is that of a worker
  // while all are active and share the memory's bandwidth. With fewer each is faster, down to
  // alone_ns per key, where the copies in flight to one worker limit it.
  double item_ns = 0, load_ns = 0, alone_ns = 0, pair_ns = 0, state_ns = 0;
  double cached_keys = 0;  // of one kv head, how many a device's cache holds; 0: not known

  // The part of the workers that saturate the memory; 1: they do not share a bandwidth.
  double saturating_share() const {
    const double busy = std::max(load_ns, tile_q * pair_ns);
    return busy > 0 ? std::max(alone_ns, tile_q * pair_ns) / busy : 1.0;
  }
};

struct Limits {
  int32_t max_requests = 0, max_q_tokens = 0, max_kv_len = 0, max_pages = 0;  // 0: no limits
};

struct PlanOptions {
  int32_t num_q_heads = 0, num_kv_heads = 0, head_dim_v = 0;
  int32_t few_rows = 0;             // a request with at most this many packed rows is few-row work
  int32_t num_workers[2] = {1, 1};  // of each launch; CPU: threads, the same for both
  bool share_workers = false;       // CPU: one balance over both kinds
  bool heads_apart = false;         // the rows of a kv head, not of a token, are adjacent in memory
  bool batch_invariant = false;    // cut at multiples of split_keys, whatever the rest of the batch
  int32_t split_keys[2] = {0, 0};  // 0: never cut
  bool classify = false;           // estimate costs with the mask's interval form
  bool mask_is_contiguous = false;  // the keys of a row are one range, whose bounds are searched
  bool mask_reads_request = true;   // if not, equal lengths have equal extents, also for groups
  double merge_ns = 0;              // cost of launching a merge
  int32_t row_block = 0;  // no item has query rows of two blocks of this size; 0: no blocks
  Limits limits;
  int32_t num_levels = 0;  // maximum levels of shared keys of plans within the limits
};

// A launch of one kind.
struct KindPlan {
  std::vector<fajit_work> work;        // sorted by worker
  std::vector<int32_t> worker_indptr;  // [num_workers + 1]
  std::vector<float> load_ns;  // [num_workers]: the cost of their items while all are active
};

// Maximum number of entries of a plan within the limits: the fixed layout of a captured graph.
struct Capacity {
  int64_t requests = 0, work[2] = {0, 0}, merge_work = 0, merge_sources = 0, row_tokens = 0,
          partial_rows = 0;
  int32_t max_merge_rows = 0;
};

struct BatchPlan {
  uint64_t lengths_id = 0;  // the Lengths of the plan: against these its work needs no check
  int32_t num_q_heads = 0, num_kv_heads = 0, key_block = 0;
  int64_t num_key_blocks = 0;
  KindPlan kinds[2];  // prefill, few-row
  std::vector<fajit_merge_work> merge_work;
  std::vector<int32_t> merge_sources;
  int64_t partial_rows = 0;
  int32_t max_merge_rows = 0, most_splits = 1;
  int64_t workspace_bytes = 0;  // see workspace_bytes()
  // The sum over workers, and until the last one ends, of both launches.
  double total_ns = 0, critical_ns = 0;
  bool has_limits = false;
  Capacity capacity;  // with limits; else the plan's own sizes
};

// partial_out [rows, head_dim_v] and, from the next multiple of 64 bytes, partial_lse [rows], fp32.
int64_t workspace_bytes(int64_t partial_rows, int32_t head_dim_v);

// The capacity for options.limits. `q_block`: that of the plans' key lists, 0 without lists.
Capacity capacity_of(const Kind (&kinds)[2], const PlanOptions& options, int32_t q_block = 0);

// `mask_args`: tensors and scalars that the mask's interval form reads; its lengths are ignored.
// Throws std::invalid_argument for a batch beyond the limits (naming both sizes).
BatchPlan plan_batch(const Lengths& lengths, const KeyLists& lists, const Kind (&kinds)[2],
                     const PlanOptions& options, const fajit_args& mask_args);

// A plan of given work, each item for its own worker.
BatchPlan plan_of_work(int kind, std::vector<fajit_work> work,
                       std::vector<fajit_merge_work> merge_work, std::vector<int32_t> merge_sources,
                       int64_t partial_rows);

}  // namespace fajit::scheduler
