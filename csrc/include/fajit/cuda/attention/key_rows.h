// Where the keys and values of a work item lie: rows of a tensor, or slots of pages.
#pragma once
#include <fajit/context.h>
#include <fajit/cuda/tile/load_rows.h>

namespace fajit::cuda {

// Where one key lies, before strides: K and V share it.
struct Place {
  int32_t page, row;  // row within the page; without pages, of the request
};

// The addresses of the item's first rows lie in shared memory, a copy for each warp, and are read
// again for every tile: kept in registers, they are the ones that a full tile has not.
template <class Config>
class KeyRows {
 public:
  static constexpr int kSharedBytes = 16;  // a warp

  FAJIT_DEV KeyRows(const fajit_args& a, const fajit_work& item, int32_t kv_h,
                    unsigned char* shared)
      : a_(a), bases_(ptx::shared_address(shared)) {
    const int64_t request = Config::kPaged ? 0 : item.request;
    const int64_t row = Config::kPaged ? 0 : a.kv_row0[item.request];
    const int64_t k = request * a.k_stride[0] + kv_h * a.k_stride[1] + row * a.k_stride[2];
    const int64_t v = request * a.v_stride[0] + kv_h * a.v_stride[1] + row * a.v_stride[2];
    if (ptx::lane_index() == 0)
      ptx::store_shared(bases_, static_cast<const uint16_t*>(a.k) + k,
                        static_cast<const uint16_t*>(a.v) + v);
    __syncwarp();
    if constexpr (Config::kPaged) pages_ = a.page_indices + a.page_indptr[item.request];
  }

  // The place of a key position below kv_len. With pages this reads the page table: ask early.
  FAJIT_DEV Place place(int32_t key) const {
    if constexpr (Config::kPaged) {
      const int32_t at = key / a_.page_size;
      const int32_t page = __ldg(pages_ + at);
      // A table that names a page which is not there must not become a wild address.
      return {page >= 0 && page < a_.num_pages ? page : 0, key - at * a_.page_size};
    } else {
      return {0, key};
    }
  }

  // Copies kRows keys' rows into rows [first_row, first_row + kRows) of a tile: those that the
  // first kRows lanes hold the places of, in order. Rows from `count` on become zeros, because 0
  // times a stale NaN would be NaN. All lanes of a warp together.
  template <int kRows>
  FAJIT_DEV void load_keys(unsigned char* tile, int first_row, int count, Place place) const {
    load<Config::kHeadDim, Config::kDim, kRows>(tile, first_row, count, place,
                                                ptx::load_shared(bases_), a_.k_stride);
  }
  template <int kRows>
  FAJIT_DEV void load_values(unsigned char* tile, int first_row, int count, Place place) const {
    load<Config::kHeadDimV, Config::kDimV, kRows>(tile, first_row, count, place,
                                                      ptx::load_shared(bases_ + 8), a_.v_stride);
  }

 private:
  template <int HeadDim, int Dim, int kRows>
  FAJIT_DEV static void load(unsigned char* tile, int first_row, int count, Place place,
                             const uint16_t* base, const int64_t (&stride)[3]) {
    const uint16_t* mine = base + place.row * stride[2];
    if constexpr (Config::kPaged) {
      mine += place.page * stride[0];
      load_rows<HeadDim, Dim, kRows, Config::kAligned>(tile, first_row, count, HeldRows{mine});
    } else {
      constexpr int kChunks = Dim / 8;
      const StridedRows rows{ptx::pointer_from_lane(mine, 0), stride[2]};
      if constexpr (Config::kAligned && ptx::kAsyncCopies && 32 % kChunks == 0 &&
                    kRows % 8 == 0 && kRows * kChunks % 32 == 0) {
        load_strided_rows<HeadDim, Dim, kRows>(tile, first_row, count, rows);
      } else {
        load_rows<HeadDim, Dim, kRows, Config::kAligned>(tile, first_row, count, rows);
      }
    }
  }

  const fajit_args& a_;
  const uint32_t bases_;  // of K and of V, in shared memory
  const int32_t* pages_ = nullptr;
};

}  // namespace fajit::cuda
