// Addresses of the keys and values of a work item: rows of a tensor, or slots of pages.
//
// The keys of an item are numbered by positions: logical positions or, with key lists, positions in
// the lists, each of which names the logical position of a key, or no key.
#pragma once
#include <fajit/context.h>
#include <fajit/cuda/tile/codes.h>
#include <fajit/cuda/tile/load_rows.h>
#include <fajit/divide.h>

namespace fajit::cuda {

// The location of a lane's key, before strides; the same for K and V. Without pages and key lists:
// that of the first key that its warp loads, from which the others follow.
struct KeyLocation {
  int32_t page, row;  // row within the page; without pages, from the first stored key
  int32_t key;        // with key lists, the entry: see is_key
};

// The divisors of positions, from the host: kernel parameters, in the constant bank. A turn of the
// few-row loop with pages has 21 instructions fewer than with a division by page_size (504 and 525
// at head_dim 128 on sm_80, 2,220 and 2,305 clocks in the model of machine code).
struct KeyDivisors {
  Divisor page_size, key_block;

  KeyDivisors() = default;
  FAJIT_FN explicit KeyDivisors(const fajit_args& a)
      : page_size(a.page_size), key_block(a.key_block) {}
};

FAJIT_DEV int32_t divided(int32_t position, const Divisor& divisor) {
  return static_cast<int32_t>(divisor.divide(static_cast<uint32_t>(position)));
}

// `listed`: an entry of the key lists, the logical position of a key; or ~p for no key, where p is
// the first stored position: that row is read, and its position passed to hooks, instead.
FAJIT_DEV bool is_key(int32_t listed) { return listed >= 0; }
FAJIT_DEV int32_t seen_as(int32_t listed) { return listed ^ listed >> 31; }

// The key lists, with the keys of one item's request.
struct KeyLists {
  const int32_t* blocks;
  int32_t block_size, first, end;  // keys of the request: [first, end)

  FAJIT_DEV KeyLists(const fajit_args& a, int32_t request)
      : blocks(a.key_blocks),
        block_size(a.key_block),
        first(a.kv_first == nullptr ? 0 : a.kv_first[request]),
        end(a.kv_len[request]) {}
  FAJIT_DEV KeyLists(const fajit_args& a, int32_t first, int32_t end)
      : blocks(a.key_blocks), block_size(a.key_block), first(first), end(end) {}

  // Logical position of offset `at` in entry `block` of the lists, whether or not there is such a
  // key.
  FAJIT_DEV int64_t key(int32_t block, int32_t at) const {
    return int64_t{__ldg(blocks + block)} * block_size + at;
  }
  FAJIT_DEV bool holds(int64_t key) const { return key >= first && key < end; }
};

// The end of an item's positions, clipped to the keys that exist.
template <class Config>
FAJIT_DEV int32_t end_of_positions(const fajit_args& a, const fajit_work& item) {
  if constexpr (Config::kSparse) return min(item.kv_end, a.num_key_blocks * a.key_block);
  return min(item.kv_end, a.kv_len[item.request]);
}

// The addresses of the item's first rows are shared memory address, a copy for each warp, and are
// reloaded for every tile: the largest tiles have no registers left for them.
// kReadOnce: no other item reads the same keys.
template <class Config, bool kReadOnce>
class KeyRows {
 public:
  static constexpr bool kLookedUp = Config::kPaged || Config::kSparse;
  // Per warp: addresses of K and V, then the first page of the item, and [first, end) of its keys.
  static constexpr int kSharedBytes = kLookedUp ? 32 : 16;

  FAJIT_DEV KeyRows(const fajit_args& a, const KeyDivisors& divisors, const fajit_work& item,
                    int32_t kv_h, unsigned char* shared)
      : a_(a), divisors_(divisors), bases_(ptx::shared_address(shared)) {
    const int64_t request = Config::kPaged ? 0 : item.request;
    const int32_t kv_first = a.kv_first == nullptr ? 0 : a.kv_first[item.request];
    const int64_t row = Config::kPaged ? 0 : int64_t{a.kv_row0[item.request]} - kv_first;
    const int64_t k = request * a.k_stride[0] + kv_h * a.k_stride[1] + row * a.k_stride[2];
    const int64_t v = request * a.v_stride[0] + kv_h * a.v_stride[1] + row * a.v_stride[2];
    if (ptx::lane_index() == 0) {
      ptx::store_shared(bases_, moved<typename CodesOf<Config>::Keys>(a.k, k),
                        moved<typename CodesOf<Config>::Values>(a.v, v));
      if constexpr (kLookedUp) {
        const int32_t pages = Config::kPaged ? a.page_indptr[item.request] : 0;
        ptx::store_words(bases_ + 16, pages, kv_first, a.kv_len[item.request], 0);
      }
    }
    __syncwarp();
  }

  FAJIT_DEV const KeyDivisors& divisors() const { return divisors_; }

  // Where the keys of `rows` positions from `first` on are: lane r gets position first + r, but at
  // most end - 1. With pages this reads the page table, with key lists first the lists: call it
  // early.
  FAJIT_DEV KeyLocation locate(int32_t first, int rows, int32_t end) const {
    if constexpr (!kLookedUp) return {0, first, 0};
    // The key after the last one may have no position: in unsigned arithmetic, which wraps.
    const uint32_t begin = static_cast<uint32_t>(first);
    const int32_t left = static_cast<int32_t>(static_cast<uint32_t>(end - 1) - begin);
    const int32_t position = static_cast<int32_t>(begin + min(ptx::lane_index() % rows, left));
    uint32_t words[4];
    ptx::load_words(words, bases_ + 16);
    const int32_t stored = static_cast<int32_t>(words[1]);
    KeyLocation location{0, position, position};
    if constexpr (Config::kSparse) {
      const KeyLists lists(a_, stored, static_cast<int32_t>(words[2]));
      const int32_t block = divided(position, divisors_.key_block);
      const int64_t key = lists.key(block, position - block * lists.block_size);
      location.key = lists.holds(key) ? static_cast<int32_t>(key) : ~stored;
      location.row = seen_as(location.key);
    }
    if constexpr (Config::kPaged) {
      const int32_t key = location.row - stored, at = divided(key, divisors_.page_size);
      const int32_t page = __ldg(a_.page_indices + words[0] + at);
      // An invalid page index must not give an invalid address.
      location.page = page >= 0 && page < a_.num_pages ? page : 0;
      location.row = key - at * a_.page_size;
    }
    return location;
  }

  // Stores the list entries of kRows positions, whose locations the first lanes hold, for the
  // hooks; those from `count` on are marked as no key.
  template <int kRows>
  FAJIT_DEV void store_listed(uint32_t to, int count, KeyLocation location) const {
    if constexpr (Config::kSparse) {
      const int lane = ptx::lane_index();
      const int32_t key = lane < count || location.key < 0 ? location.key : ~location.key;
      if (lane < kRows) ptx::store_word(to + lane * 4, key);
    }
  }

  // Copies the rows of kRows keys, whose locations `locate` gave, into rows [first_row, first_row +
  // kRows) of a tile. Rows from `count` on become zeros, because 0 times a
  // stale NaN would be NaN. Called by all lanes of a warp.
  template <int kRows>
  FAJIT_DEV void load_keys(unsigned char* tile, int first_row, int count,
                           KeyLocation location) const {
    load<Config::kHeadDim, RowLayout<Config::kDim>, kRows>(tile, first_row, count, location,
                                                           ptx::load_shared(bases_), a_.k_stride);
  }
  template <int kRows>
  FAJIT_DEV void load_values(unsigned char* tile, int first_row, int count,
                             KeyLocation location) const {
    load<Config::kHeadDimV, RowLayout<Config::kDimV>, kRows>(
        tile, first_row, count, location, ptx::load_shared(bases_ + 8), a_.v_stride);
  }

  // The same of codes, from `to` on; rows from `count` on are left as they are.
  template <int kRows>
  FAJIT_DEV void load_key_codes(unsigned char* to, int count, KeyLocation location) const {
    load_coded<typename CodesOf<Config>::Keys, Config::kHeadDim, kRows>(
        to, count, location, ptx::load_shared(bases_), a_.k_stride);
  }
  template <int kRows>
  FAJIT_DEV void load_value_codes(unsigned char* to, int count, KeyLocation location) const {
    load_coded<typename CodesOf<Config>::Values, Config::kHeadDimV, kRows>(
        to, count, location, ptx::load_shared(bases_ + 8), a_.v_stride);
  }

 private:
  // An address moved by elements of a tensor: values of 16 bits, or bytes of codes.
  template <class Codes>
  static FAJIT_DEV const unsigned char* moved(const void* from, int64_t elements) {
    return static_cast<const unsigned char*>(from) + elements * (Codes::kBits == 16 ? 2 : 1);
  }
  template <class Codes, int HeadDim, int kRows>
  FAJIT_DEV void load_coded(unsigned char* to, int count, KeyLocation location, const void* base,
                            const int64_t (&stride)[3]) const {
    const int64_t row = location.row + (kLookedUp ? 0 : ptx::lane_index() % kRows);
    const int64_t page = Config::kPaged ? location.page * stride[0] : 0;
    fajit::cuda::load_codes<CodeRows<Codes, HeadDim>, kRows, Config::kAligned>(
        to, count, moved<Codes>(base, row * stride[2] + page), policy_);
  }
  template <int HeadDim, class Layout, int kRows>
  FAJIT_DEV void load(unsigned char* tile, int first_row, int count, KeyLocation location,
                      const uint16_t* base, const int64_t (&stride)[3]) const {
    const uint16_t* mine = base + location.row * stride[2];
    if constexpr (Config::kPaged) mine += location.page * stride[0];
    if constexpr (kLookedUp) {
      load_rows<HeadDim, Layout, kRows, Config::kAligned>(tile, first_row, count, HeldRows{mine},
                                                          policy_);
    } else {
      constexpr int kChunks = Layout::kDim / 8;
      const StridedRows rows{mine, stride[2]};
      if constexpr (Config::kAligned && ptx::kAsyncCopies && 32 % kChunks == 0 && kRows % 8 == 0 &&
                    kRows * kChunks % 32 == 0) {
        load_strided_rows<HeadDim, Layout, kRows>(tile, first_row, count, rows, policy_);
      } else {
        load_rows<HeadDim, Layout, kRows, Config::kAligned>(tile, first_row, count, rows, policy_);
      }
    }
  }

  const fajit_args& a_;
  const KeyDivisors& divisors_;
  const uint32_t bases_;  // in shared memory
  const ptx::L2Policy<kReadOnce> policy_{};
};

}  // namespace fajit::cuda
