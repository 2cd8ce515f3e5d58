// The packed query rows of a work item: request, head and position of each.
#pragma once
#include <fajit/context.h>
#include <fajit/cuda/ptx/warp.h>

namespace fajit::cuda {

// The context of an item's hooks: with mixed rows, shared keys are stored by the item's own
// request.
template <class Config>
FAJIT_DEV Context item_context(Context c, const fajit_work& item) {
  if constexpr (Config::kMixedRows) c.kv_request = item.request;
  return c;
}

struct PackedRow {
  int32_t b;      // request whose lengths and params hooks see
  int32_t h;      // query head
  int32_t token;  // index in q, out, lse: row of the item's request; with mixed rows, packed token
  int32_t q_idx;  // logical position
};

// Packed row `p` of an item (a fajit_work or fajit_merge_work).
template <bool kMixedRows, class Item>
FAJIT_DEV PackedRow packed_row(const fajit_args& a, const Item& item, int32_t p) {
  const int32_t token = p / item.head_count;
  PackedRow row{item.request, item.head_begin + p - token * item.head_count, token, 0};
  if constexpr (kMixedRows) {
    const int32_t entry = a.q_row0[item.request] + token;
    row.token = a.row_token == nullptr ? entry : a.row_token[entry];
    row.b = a.row_request[row.token];
    row.q_idx = a.q_offset[row.b] + row.token - a.q_row0[row.b];
  } else {
    row.q_idx = a.q_offset[item.request] + token;
  }
  return row;
}

// The row held by lane `lane`.
FAJIT_DEV PackedRow row_from_lane(const PackedRow& row, int lane) {
  return {ptx::from_lane(row.b, lane), ptx::from_lane(row.h, lane), ptx::from_lane(row.token, lane),
          ptx::from_lane(row.q_idx, lane)};
}

// Offset in elements of a row of q, out or lse: strides are (request, head, row).
template <bool kMixedRows, class Item>
FAJIT_DEV int64_t row_offset(const fajit_args& a, const Item& item, const PackedRow& row,
                             const int64_t (&stride)[3]) {
  // With mixed rows the tensors are packed, so the token alone selects the row.
  if constexpr (kMixedRows) return row.h * stride[1] + row.token * stride[2];
  return item.request * stride[0] + row.h * stride[1] +
         (int64_t{a.q_row0[item.request]} + row.token) * stride[2];
}

// Inclusive ranges of the indices of several rows, for the interval form of the mask.
struct RowSpan { int32_t b_first, b_last, h_first, h_last, q_first, q_last; };

// The span of packed rows [begin, end) of an item. Rows of one request are in order, so the first
// and last row suffice; rows of several requests are all read, 32 at a time.
template <bool kMixedRows>
FAJIT_DEV RowSpan row_span(const fajit_args& a, const fajit_work& item, int32_t begin,
                           int32_t end) {
  const PackedRow first = packed_row<kMixedRows>(a, item, begin);
  const PackedRow last = packed_row<kMixedRows>(a, item, end - 1);
  RowSpan span{first.b,     last.b,    item.head_begin, item.head_begin + item.head_count - 1,
               first.q_idx, last.q_idx};
  if (first.token == last.token) {
    span.h_first = first.h;
    span.h_last = last.h;
  }
  if constexpr (kMixedRows) {
    RowSpan all{first.b, first.b, span.h_first, span.h_last, first.q_idx, first.q_idx};
    for (int32_t p = begin + ptx::lane_index(); p < end; p += 32) {
      const PackedRow row = packed_row<kMixedRows>(a, item, p);
      all.b_first = min(all.b_first, row.b);
      all.b_last = max(all.b_last, row.b);
      all.q_first = min(all.q_first, row.q_idx);
      all.q_last = max(all.q_last, row.q_idx);
    }
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      all.b_first = min(all.b_first, __shfl_xor_sync(ptx::kAllLanes, all.b_first, other));
      all.b_last = max(all.b_last, __shfl_xor_sync(ptx::kAllLanes, all.b_last, other));
      all.q_first = min(all.q_first, __shfl_xor_sync(ptx::kAllLanes, all.q_first, other));
      all.q_last = max(all.q_last, __shfl_xor_sync(ptx::kAllLanes, all.q_last, other));
    }
    span = all;
  }
  return span;
}

}  // namespace fajit::cuda
