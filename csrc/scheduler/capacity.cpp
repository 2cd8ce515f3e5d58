// The maximum sizes of plans within limits: the fixed layout of captured graphs.
#include <algorithm>

#include "../runtime/launch/sections.h"
#include "batch_plan.h"
#include "rounding.h"

namespace fajit::scheduler {
namespace {

// Maxima of one kind: row tiles of all kv heads, packed rows in them and in one tile, and cuts.
struct Bound { int64_t units = 0, rows = 0, tile_rows = 0, cuts = 0, splits = 1; };

Bound bound_of(int kind, const Kind& k, const PlanOptions& o, int32_t q_block) {
  Bound bound;
  if (k.tile_q == 0) return bound;
  const int64_t group = o.num_q_heads / o.num_kv_heads, levels = o.num_levels + 1;
  const int64_t tokens = int64_t{o.limits.max_q_tokens} * levels;
  const int64_t entities = int64_t{o.limits.max_requests} * levels;
  // Rows are divided in spans: requests and groups, or block rows of key lists.
  const int64_t spans = std::min(tokens, q_block > 0 ? tokens / q_block + entities : entities);
  int64_t rows = tokens * group;
  if (kind == 1) rows = std::min(rows, spans * std::max(o.few_rows, 1));
  // The last tile of every span may be partly filled.
  bound.units = std::min(rows, rows / k.tile_q + spans) * o.num_kv_heads;
  bound.rows = rows * o.num_kv_heads;
  const int64_t of_span = kind == 1 ? std::max(o.few_rows, 1) : rows;
  bound.tile_rows = std::min({int64_t{k.tile_q}, of_span, rows});
  if (!o.batch_invariant) {
    bound.cuts = o.num_workers[kind];  // at most one cut per worker, of one head or of all
    if (o.share_workers && !o.heads_apart && kind == 1) bound.cuts *= o.num_kv_heads;
  } else if (o.split_keys[kind] > 0) {
    // Lists consist of whole blocks, so they may have more keys than max_kv_len.
    bound.splits = ceil_div(o.limits.max_kv_len, o.split_keys[kind]) + (q_block > 0 ? 1 : 0);
    bound.cuts = bound.units * (bound.splits - 1);
  }
  return bound;
}

}  // namespace

int64_t workspace_bytes(int64_t partial_rows, int32_t head_dim_v) {
  return runtime::WorkspaceLayout(partial_rows, head_dim_v).bytes;
}

Capacity capacity_of(const Kind (&kinds)[2], const PlanOptions& o, int32_t q_block) {
  Capacity c;
  const int64_t levels = o.num_levels;
  c.requests = int64_t{o.limits.max_requests} * (levels + 1);
  c.row_tokens = levels > 0 ? int64_t{o.limits.max_q_tokens} * (levels + 1) : 0;
  int64_t units = 0, cuts = 0, widest = 0, splits = 1;
  for (int kind = 0; kind < 2; ++kind) {
    const Bound bound = bound_of(kind, kinds[kind], o, q_block);
    const int64_t tile_q = kinds[kind].tile_q;
    c.work[kind] = bound.units + bound.cuts;
    units += bound.units;
    cuts += bound.cuts;
    widest = std::max(widest, tile_q);
    splits = std::max(splits, bound.splits);
    if (o.batch_invariant) {
      if (levels > 0 || bound.splits > 1) c.partial_rows += bound.rows * bound.splits;
    } else {
      // A cut makes two states of none, or one more if the unit is cut or shared already.
      const int64_t of_cuts = bound.cuts * bound.tile_rows;
      c.partial_rows += of_cuts + (levels > 0 ? bound.rows : std::min(of_cuts, bound.rows));
    }
  }
  if (levels > 0) {
    // A segment begins where a unit, or a request in a group, begins.
    const int64_t segments = units + 2 * c.requests * o.num_kv_heads;
    c.merge_work = std::min(segments, int64_t{o.limits.max_q_tokens} * o.num_q_heads);
    c.merge_sources = o.batch_invariant ? c.merge_work * (levels + 1) * splits
                                        : c.merge_work * (levels + 1) + cuts * widest;
  } else if (cuts > 0) {
    c.merge_work = std::min(units, cuts);
  }
  if (c.merge_work > 0) c.max_merge_rows = static_cast<int32_t>(widest);
  return c;
}

}  // namespace fajit::scheduler
