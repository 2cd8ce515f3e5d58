// The packed query rows of a work item: request, head and position of each.
#pragma once
#include <fajit/context.h>
#include <fajit/cpu/vector/vec.h>

namespace fajit {

struct PackedRow {
  int32_t b;      // request whose lengths and params hooks see
  int32_t h;      // query head
  int32_t q_idx;  // logical position
  int32_t row;    // row index in q, out and lse, relative to the item's request
};

// Packed row `p` of an item (a fajit_work or fajit_merge_work). In indirect kernels the rows of an
// item may belong to several requests: where `row_request` is set.
template <bool Indirect, class Item>
FAJIT_INLINE PackedRow packed_row(const fajit_args& a, const Item& w, int32_t p) {
  const int32_t b = w.request, row = p / w.head_count;
  PackedRow r{b, w.head_begin + p % w.head_count, a.q_offset[b] + row, a.q_row0[b] + row};
  if constexpr (Indirect) {
    if (a.row_request != nullptr) {
      if (a.row_token != nullptr) r.row = a.row_token[r.row];
      r.b = a.row_request[r.row];
      r.q_idx = a.q_offset[r.b] + (r.row - a.q_row0[r.b]);
    }
  }
  return r;
}

// Offset in elements of a row of q, out or lse: strides are (request, head, row).
FAJIT_INLINE int64_t row_offset(const int64_t (&stride)[3], int32_t request, int32_t h,
                                int64_t row) {
  return request * stride[0] + h * stride[1] + row * stride[2];
}

// Inclusive ranges of the indices of several rows, for the mask.
struct RowSpan { int32_t b_first, b_last, h_first, h_last, q_first, q_last; };

// The span of `count` rows with requests `b` and positions `q_idx`. Direct kernels: one request,
// positions ascending. Indirect kernels: several requests in any order.
template <bool Indirect>
FAJIT_INLINE RowSpan row_span(const fajit_work& w, const int32_t* b, const int32_t* q_idx,
                              int count) {
  RowSpan span{w.request, w.request,       w.head_begin, w.head_begin + w.head_count - 1,
               q_idx[0],  q_idx[count - 1]};
  if constexpr (Indirect) {
    span.b_first = span.b_last = b[0];
    for (int i = 0; i < count; ++i) {
      span.b_first = b[i] < span.b_first ? b[i] : span.b_first;
      span.b_last = b[i] > span.b_last ? b[i] : span.b_last;
      span.q_first = q_idx[i] < span.q_first ? q_idx[i] : span.q_first;
      span.q_last = q_idx[i] > span.q_last ? q_idx[i] : span.q_last;
    }
  }
  return span;
}

}  // namespace fajit
