// Copies new rows of K and V into the pages of a cache.
//
// An item of work is some new tokens of one request: row r of the request, packed token
// q_row0[request] + r, becomes key kv_begin + (r - row_begin), which is stored in slot key %
// page_size of page page_indices[page_indptr[request] + key / page_size]. Invalid page indices are
// skipped.
//
// Arguments: `tensors` are k [tokens, heads, head_dim], v [tokens, heads, head_dim_v] and the
// caches [pages, page_size, heads, ...], all of them as bytes; rows are copied in units of
// kUnitBytes, which divide their addresses, strides and lengths.
#pragma once
#include <fajit/cuda/ptx/warp.h>
#include <fajit/cuda/utility/entry.h>

namespace fajit::cuda {

template <int kBytes>
struct UnitOf;
template <>
struct UnitOf<1> {
  using Type = uint8_t;
};
template <>
struct UnitOf<2> {
  using Type = uint16_t;
};
template <>
struct UnitOf<4> {
  using Type = uint32_t;
};
template <>
struct UnitOf<8> {
  using Type = uint2;
};
template <>
struct UnitOf<16> {
  using Type = uint4;
};

template <int kUnitBytes>
struct AppendPagedKv {
  using Unit = typename UnitOf<kUnitBytes>::Type;
  static constexpr int kThreads = 128;

  // Source and destination of the rows of K or of V. Strides in units.
  struct Rows {
    const Unit* from;
    Unit* to;
    int64_t from_token, from_head, to_page, to_slot, to_head;
    int32_t units;
  };
  struct Params {
    const fajit_work* work;
    const int32_t* q_row0;
    const int32_t* page_indptr;
    const int32_t* page_indices;
    int32_t page_size, num_pages, num_kv_heads;
    Rows rows[2];
  };

  static int fill(const fajit_args* a, Params& p, uint32_t& blocks) {
    if (a->num_tensors != 4) return FAJIT_BAD_ARGS;
    if (a->num_work > 0 && (a->work == nullptr || a->page_indptr == nullptr ||
                            a->page_indices == nullptr || a->page_size < 1))
      return FAJIT_BAD_ARGS;
    p.work = a->work;
    p.q_row0 = a->q_row0;
    p.page_indptr = a->page_indptr;
    p.page_indices = a->page_indices;
    p.page_size = a->page_size;
    p.num_pages = a->num_pages;
    p.num_kv_heads = static_cast<int32_t>(a->tensors[0].sizes[1]);
    for (int i = 0; i < 2; ++i) {
      const fajit_tensor& from = a->tensors[i];
      const fajit_tensor& to = a->tensors[2 + i];
      const auto units = [](int64_t bytes) { return bytes / kUnitBytes; };
      // The kernel counts the units of a token in 32 bits.
      int64_t count;
      if (__builtin_mul_overflow(from.sizes[1], units(from.sizes[2]), &count) ||
          count > INT32_MAX - kThreads)
        return FAJIT_BAD_ARGS;
      p.rows[i] = {static_cast<const Unit*>(from.ptr),
                   static_cast<Unit*>(const_cast<void*>(to.ptr)),
                   units(from.strides[0]),
                   units(from.strides[1]),
                   units(to.strides[0]),
                   units(to.strides[1]),
                   units(to.strides[2]),
                   static_cast<int32_t>(units(from.sizes[2]))};
    }
    blocks = static_cast<uint32_t>(a->num_work);
    return FAJIT_OK;
  }

  static FAJIT_DEV void run(const Params& p) {
    const fajit_work item = p.work[blockIdx.x];
    const int32_t* const pages = p.page_indices + p.page_indptr[item.request];
    const int64_t first_token = p.q_row0[item.request];
    for (int32_t row = item.row_begin; row < item.row_end; ++row) {
      const int32_t key = item.kv_begin + (row - item.row_begin);
      const int32_t page = pages[key / p.page_size];
      if (page < 0 || page >= p.num_pages) continue;
      copy(p.rows[0], first_token + row, page, key % p.page_size, p.num_kv_heads);
      copy(p.rows[1], first_token + row, page, key % p.page_size, p.num_kv_heads);
    }
  }

 private:
  static FAJIT_DEV void copy(const Rows& r, int64_t token, int64_t page, int64_t slot,
                             int32_t heads) {
    const Unit* const from = r.from + token * r.from_token;
    Unit* const to = r.to + page * r.to_page + slot * r.to_slot;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < heads * r.units; i += kThreads) {
      const int32_t head = i / r.units, unit = i % r.units;
      to[head * r.to_head + unit] = from[head * r.from_head + unit];
    }
  }
};

}  // namespace fajit::cuda
