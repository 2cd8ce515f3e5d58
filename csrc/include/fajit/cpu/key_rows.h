// Addresses of the key and value rows of a tile: evenly spaced, or read from a table.
//
// Direct kernels take rows at a stride (StridedKeys). Indirect ones fill a table of addresses and
// logical positions for each tile (KeyTable), from pages and key lists, so the products need not
// handle either. With pages of 16 the table cost 1.5 to 2.5 ns a key when entries were written one
// by one instead of by vectors; loading K and V of a key of 128 floats from memory takes 75 ns
// (measured). Pages in random order cost more than the table, because of TLB misses.
#pragma once
#include <fajit/context.h>
#include <fajit/cpu/microkernel.h>
#include <fajit/cpu/packed_rows.h>
#include <fajit/cpu/scratch.h>
#include <fajit/types.h>

namespace fajit {

// operator()(n) is the address of row n of a tile; from(n, d) the same rows from row n and dim d
// on.
template <class T>
struct StridedRows {
  using Element = T;
  const T* first;
  int64_t stride;
  FAJIT_INLINE const T* operator()(int64_t n) const { return first + stride * n; }
  FAJIT_INLINE StridedRows from(int64_t n, int d) const { return {first + n * stride + d, stride}; }
};
template <class T>
struct HeldRows {
  using Element = T;
  const T* const* rows;
  int d = 0;
  FAJIT_INLINE const T* operator()(int64_t n) const { return rows[n] + d; }
  FAJIT_INLINE HeldRows from(int64_t n, int more) const { return {rows + n, d + more}; }
};

// The first or the second of two kinds of rows.
template <bool First, class A, class B>
FAJIT_INLINE auto either([[maybe_unused]] const A& a, [[maybe_unused]] const B& b) {
  if constexpr (First) return a;
  else return b;
}

// Whether a row of keys and one of values are at one address: latent attention.
FAJIT_INLINE bool same_address(const void* key, const void* value) { return key == value; }

// Rows [first, first + count) one by one, without those that begin on the page of the row before:
// a row's page for the translation of addresses, of which the smallest is meant (4 KB).
constexpr int64_t kTranslatedPage = 4096;
template <class T, class F>
FAJIT_INLINE void each_page(const StridedRows<T>& rows, int first, int count, F f) {
  const int64_t stride = rows.stride * int64_t{sizeof(T)}, bytes = stride * count;
  const int64_t step = stride < kTranslatedPage ? kTranslatedPage : stride;
  const char* p = reinterpret_cast<const char*>(rows(first));
  for (int64_t i = 0; i < bytes; i += step) f(p + i);
}
template <class T, class F>
FAJIT_INLINE void each_page(const HeldRows<T>& rows, int first, int count, F f) {
  int64_t last = -1;
  for (int n = first; n < first + count; ++n) {
    const char* p = reinterpret_cast<const char*>(rows(n));
    const int64_t page = reinterpret_cast<int64_t>(p) / kTranslatedPage;
    if (page != last) f(p);
    last = page;
  }
}

// Table of the keys that an item visits, in order, a window at a time. Keys that do not exist
// (entries of a list that are negative or beyond the request's keys) are skipped.
//
// The window reaches up to `kAhead` keys past the tile, so that products can prefetch those rows.
// It ends with the first rows of the next item: 32 requests of 256 keys take 0.84 to 0.92 of the
// time (cpu:avx512_bf16 on a Xeon, 2 threads, keys from memory; 0.96 on cpu:avx2, 1.0 on AMX).
template <class Config, int kAhead>
class KeyTable {
  using K = typename Config::K;
  using V = typename Config::V;
  // `write_entries` and products may round up to whole vectors or steps of AMX tiles.
  static constexpr int kRoom = Config::kTileKv + kAhead + kLanes, kStep = 32;

 public:
  explicit KeyTable(Carver& carver)
      : k_(carver.take<const K*>(kRoom)),
        v_(carver.take<const V*>(kRoom)),
        position_(carver.take<int32_t>(kRoom)) {}

  // Starts the keys of an item: positions [begin, end) of its request or, if `listed`, of the key
  // lists.
  void open(const fajit_args& a, const fajit_work& w, int32_t kv_h, int32_t begin, int32_t end) {
    a_ = &a;
    listed_ = a.key_blocks != nullptr;
    keys_of_ = Source(a, w.request, kv_h);
    next_count_ = 0;
    kv_len_ = a.kv_len[w.request];
    k_step_ = a.k_stride[2] * int64_t{sizeof(K)};
    v_step_ = a.v_stride[2] * int64_t{sizeof(V)};
    const vl lanes = __builtin_convertvector(iota(), vl);
    k_steps_ = lanes * k_step_;
    v_steps_ = lanes * v_step_;
    used_ = size_ = 0;
    at_ = run_ = begin;
    end_ = run_end_ = end;
    if (listed_) run_end_ = run_;
  }

  // The item that this thread may do next, or null.
  void follow(const fajit_work* w, int32_t group_size) {
    if (listed_ || w == nullptr || w->request < 0) return;
    next_ = Source(*a_, w->request, w->head_begin / group_size);
    next_begin_ = w->kv_begin > next_.first ? w->kv_begin : next_.first;
    const int32_t len = a_->kv_len[w->request], end = w->kv_end < len ? w->kv_end : len;
    next_count_ = end > next_begin_ ? end - next_begin_ : 0;
  }

  // The next tile is logical positions [begin, begin + count); for items without a list.
  FAJIT_INLINE void seek(int32_t begin, int count) {
    drop();
    if (size_ > 0 && begin >= position_[0] && begin - position_[0] < size_) {
      used_ = begin - position_[0];
      drop();
    } else {
      size_ = 0;
      run_ = begin;
    }
    fill();
    used_ = count;
  }

  // Loads the next tile of a list and returns its number of keys, 0 at the end.
  FAJIT_INLINE int next() {
    drop();
    fill();
    used_ = size_ < Config::kTileKv ? size_ : Config::kTileKv;
    return used_;
  }

  HeldRows<K> keys() const { return {k_}; }
  HeldRows<V> values() const { return {v_}; }
  // Logical position of key n, and of keys [n, n + kLanes); lanes that are not `inside` get that of
  // key `last`.
  int32_t position(int n) const { return position_[n]; }
  vi positions(int n, vi inside, int last) const {
    return select(inside, load<vi>(position_ + n), splat(position_[last]));
  }
  bool listed() const { return listed_; }

  // Smallest and largest position of keys [n0, n1) of the tile.
  FAJIT_INLINE void hull(int n0, int n1, int32_t& low, int32_t& high) const {
    low = position_[n0];
    high = position_[n1 - 1];
    if (!listed_) return;
    for (int n = n0; n < n1; ++n) {
      low = position_[n] < low ? position_[n] : low;
      high = position_[n] > high ? position_[n] : high;
    }
  }

 private:
  // Removes the keys of the last tile from the table.
  void drop() {
    if (used_ == 0) return;
    size_ -= used_;
    __builtin_memmove(k_, k_ + used_, sizeof(*k_) * static_cast<unsigned>(size_));
    __builtin_memmove(v_, v_ + used_, sizeof(*v_) * static_cast<unsigned>(size_));
    __builtin_memmove(position_, position_ + used_, sizeof(int32_t) * static_cast<unsigned>(size_));
    used_ = 0;
  }

  void fill() {
    const int slots = Config::kTileKv + kAhead;
    if (size_ >= slots) return;
    while (size_ < slots && (run_ < run_end_ || next_run())) {
      const int room = slots - size_;
      const int32_t count = run_end_ - run_ < room ? run_end_ - run_ : room;
      append(keys_of_, run_, count, size_);
      size_ += count;
      run_ += count;
    }
    if (size_ == 0) return;
    // The last key again, at least up to a multiple of kStep: products need not, but may, read
    // whole vectors or steps of AMX tiles. Then the next item's keys, if any, for prefetches.
    const int most = slots + kLanes, wanted = size_ + kAhead + kLanes;
    for (int i = size_; i < (wanted < most ? wanted : most); ++i) {
      k_[i] = k_[size_ - 1];
      v_[i] = v_[size_ - 1];
    }
    const int next = round_up(size_, kStep), room = slots - next;
    if (room > 0) append(next_, next_begin_, next_count_ < room ? next_count_ : room, next);
  }

  // Sets the run to the next contiguous existing keys of a list; false at its end.
  bool next_run() {
    if (!listed_) return false;
    const int32_t block = a_->key_block;
    while (at_ < end_) {
      const int32_t entry = at_ / block, skipped = at_ - entry * block;
      const int32_t left = end_ - at_ < block - skipped ? end_ - at_ : block - skipped;
      at_ += left;
      const int64_t first = int64_t{a_->key_blocks[entry]} * block;
      int64_t low = first + skipped, high = low + left;
      if (first < 0) continue;
      low = low < keys_of_.first ? keys_of_.first : low;
      high = high > kv_len_ ? kv_len_ : high;
      if (low >= high) continue;
      run_ = static_cast<int32_t>(low);
      run_end_ = static_cast<int32_t>(high);
      return true;
    }
    return false;
  }

  // Where the keys of a request and a kv head are: in pages, or one after the other.
  struct Source {
    Source() = default;
    Source(const fajit_args& a, int32_t b, int32_t kv_h)
        : k(static_cast<const K*>(a.k) + kv_h * a.k_stride[1]),
          v(static_cast<const V*>(a.v) + kv_h * a.v_stride[1]),
          first(a.kv_first == nullptr ? 0 : a.kv_first[b]) {
      if (a.page_size > 0) {
        pages = a.page_indices + a.page_indptr[b];
      } else {
        const int64_t row0 = a.kv_row0[b];
        k += b * a.k_stride[0] + row0 * a.k_stride[2];
        v += b * a.v_stride[0] + row0 * a.v_stride[2];
      }
    }
    const K* k = nullptr;
    const V* v = nullptr;
    const int32_t* pages = nullptr;
    int32_t first = 0;  // position of its first key
  };

  // Writes keys [j, j + count), which exist, to the table, from entry `to` on.
  FAJIT_INLINE void append(const Source& from, int32_t j, int32_t count, int to) {
    const fajit_args& a = *a_;
    const int32_t size = a.page_size, n = j - from.first;
    if (size <= 0) {
      write_entries(from.k + n * a.k_stride[2], from.v + n * a.v_stride[2], j, count, to);
      return;
    }
    int32_t at = n / size, slot = n - at * size;
    while (count > 0) {
      const int32_t named = from.pages[at++];
      // An invalid page index must not give an invalid address.
      const int64_t page = named >= 0 && named < a.num_pages ? named : 0;
      const int32_t here = count < size - slot ? count : size - slot;
      write_entries(from.k + page * a.k_stride[0] + slot * a.k_stride[2],
                    from.v + page * a.v_stride[0] + slot * a.v_stride[2], j, here, to);
      j += here;
      to += here;
      count -= here;
      slot = 0;
    }
  }

  // Writes whole vectors: up to kLanes entries past the last one, which the next call overwrites.
  FAJIT_INLINE void write_entries(const K* k, const V* v, int32_t j, int32_t count, int to) {
    const vl k_at = reinterpret_cast<int64_t>(k) + k_steps_;
    const vl v_at = reinterpret_cast<int64_t>(v) + v_steps_;
    for (int32_t i = 0; i < count; i += kLanes) {
      store(k_ + to + i, k_at + i * k_step_);
      store(v_ + to + i, v_at + i * v_step_);
      store(position_ + to + i, iota() + (j + i));
    }
  }

  const K** k_;
  const V** v_;
  int32_t* position_;
  const fajit_args* a_ = nullptr;
  Source keys_of_, next_;
  int32_t next_begin_ = 0, next_count_ = 0;  // keys of next_
  int64_t k_step_ = 0, v_step_ = 0;          // bytes from a key to the next
  vl k_steps_{}, v_steps_{};                 // lane i: i times these
  bool listed_ = false;
  int32_t kv_len_ = 0;             // of the request's keys
  int size_ = 0, used_ = 0;        // entries of the table; of these, keys of the tile
  int32_t at_ = 0, end_ = 0;       // positions in the key lists not read yet
  int32_t run_ = 0, run_end_ = 0;  // contiguous keys not in the table yet
};

// The interface of KeyTable for keys at a constant stride; it needs no table.
template <class Config>
class StridedKeys {
  using K = typename Config::K;
  using V = typename Config::V;

 public:
  explicit StridedKeys(Carver&) {}

  void open(const fajit_args& a, const fajit_work& w, int32_t kv_h, int32_t, int32_t) {
    const int32_t b = w.request;
    const int64_t row0 = a.kv_row0[b];
    k_ = {static_cast<const K*>(a.k) + row_offset(a.k_stride, b, kv_h, row0), a.k_stride[2]};
    v_ = {static_cast<const V*>(a.v) + row_offset(a.v_stride, b, kv_h, row0), a.v_stride[2]};
  }
  void follow(const fajit_work*, int32_t) {}  // its rows often follow in memory
  FAJIT_INLINE void seek(int32_t begin, int) { begin_ = begin; }

  StridedRows<K> keys() const { return k_.from(begin_, 0); }
  StridedRows<V> values() const { return v_.from(begin_, 0); }
  int32_t position(int n) const { return begin_ + n; }
  vi positions(int n, vi inside, int last) const {
    return begin_ + (inside ? iota() + n : splat(last));
  }
  void hull(int n0, int n1, int32_t& low, int32_t& high) const {
    low = begin_ + n0;
    high = begin_ + n1 - 1;
  }

 private:
  StridedRows<K> k_{};
  StridedRows<V> v_{};
  int32_t begin_ = 0;  // logical position of the tile's first key
};

// Prefetches the rows of K and then of V of the next tile by pieces during the products of this
// tile, evenly over their work: `operator()` is called with the words of K or V that each part
// multiplies. Without it, copying and packing them took 4 % of the time in fp32 and 10 % in bf16,
// with it 1 % and 5 % (D128, S4096, a Xeon with AMX, sampled by hand). Over both products instead
// of the first alone: 0.93 to 0.97 of the time with 16 to 48 rows (bf16, AVX-512), 0.95 to 0.98
// on AMX, 1.0 elsewhere (least times of one thread of a Xeon, by hand).
template <int kBytesK, int kBytesV, class KeyRows, class ValueRows>
struct NextRows {
  static constexpr int kPieceK = piece_of(kBytesK), kPieceV = piece_of(kBytesV);
  static constexpr int kPiecesK = (kBytesK + kPieceK - 1) / kPieceK,
                       kPiecesV = (kBytesV + kPieceV - 1) / kPieceV;
  KeyRows k;
  ValueRows v;
  int count;     // keys of the next tile
  int64_t work;  // words that this tile's products multiply
  // Values that are the first dims of keys came with them: without their prefetches, 16 and 32
  // rows of bf16 (latent attention, 576 + 512) took 0.94 of the time (Zen 4, by hand).
  int pieces = count * (kPiecesK + (same_address(k(0), v(0)) ? 0 : kPiecesV));
  int fetched = 0;
  int64_t due = 0;
  FAJIT_INLINE void operator()(int words) {
    for (due += int64_t{words} * pieces; due >= work; due -= work) {
      if (fetched >= pieces) continue;
      if (const int i = fetched - count * kPiecesK; i < 0)
        prefetch_row<kPieceK>(at<kPieceK>(k(fetched / kPiecesK), fetched % kPiecesK));
      else prefetch_row<kPieceV>(at<kPieceV>(v(i / kPiecesV), i % kPiecesV));
      ++fetched;
    }
  }
  template <int Bytes>
  static FAJIT_INLINE const char* at(const void* row, int piece) {
    return static_cast<const char*>(row) + piece * Bytes;
  }
};

// KeyTable in indirect kernels (pages, key lists), else StridedKeys.
template <class Config, int kAhead>
using KeysOf = Choose<Config::kIndirect, KeyTable<Config, kAhead>, StridedKeys<Config>>;

}  // namespace fajit
