// The key tiles that a work item visits, with the mask's state for each.
//
// Every lane classifies one tile by the mask's interval form (and the block mask), so one
// evaluation serves 32 tiles: a tile proven empty is never loaded, one proven full runs no mask
// code. Every warp does this separately, which needs no block barrier; its state is in shared
// memory, because the loop over the keys has no registers to spare. A loop takes single tiles
// (`next`) or runs of adjacent ones with the same state (`take_run`), of which the next is found
// before the one in use ends.
//
// Under a mask, items of more than 64 tiles are classified by chunks first: 2 to 32 adjacent tiles,
// as many as let 32 chunks cover the item. The tiles of a chunk proven empty or full are not
// classified, so an item costs an evaluation for its chunks and one for each 32 tiles from a
// partial chunk on, however many of its tiles are empty.
//
//     chunks  | empty | full  | full  | empty | empty |partial| empty | ...    an evaluation
//     tiles           |ffff ffff ffff ffff|           |pfff p   ---- ...       another
#pragma once
#include <fajit/cuda/common/block_states.h>
#include <fajit/cuda/common/key_rows.h>
#include <fajit/cuda/common/packed_rows.h>
#include <fajit/interval.h>

namespace fajit::cuda {

struct KvTile {
  int32_t begin, end;  // positions of the item; none when begin >= end
  bool full;           // every pair is kept, and lines of hooks hold: no mask, no bounds check
  FAJIT_DEV bool valid() const { return begin < end; }
};

// `begin` plus `keys`, but at most `end`: the sum may exceed the range of positions.
FAJIT_DEV int32_t cut(int32_t begin, int32_t keys, int32_t end) {
  return end - begin < keys ? end : begin + keys;
}

// Adjacent tiles, all full or all partial.
struct KvRun {
  int32_t begin, end;
  bool full;
  FAJIT_DEV bool valid() const { return begin < end; }
};

// Whether kernels use the lines of hooks. A pair is rounded differently in tiles that do: so not
// where other requests decide how a tile is handled. Key lists have no adjacent keys.
template <class Config, class Hooks>
inline constexpr bool kHasLines = Hooks::kLine && !Config::kSparse && !Config::kMixedRows;

// Whether key_factor * k + query_factor * q + constant is an int32 for all pairs of a box; kFolded:
// and is nowhere negative or nowhere positive, so that its absolute value is linear too.
template <bool kFolded>
FAJIT_FN bool is_line(const Interval& k, const Interval& q, int64_t key_factor,
                      int64_t query_factor, int64_t constant) {
  const int64_t lo = key_factor * (key_factor < 0 ? k.hi : k.lo) +
                     query_factor * (query_factor < 0 ? q.hi : q.lo) + constant;
  const int64_t hi = key_factor * (key_factor < 0 ? k.lo : k.hi) +
                     query_factor * (query_factor < 0 ? q.lo : q.hi) + constant;
  return lo > INT32_MIN && hi <= INT32_MAX && (!kFolded || lo >= 0 || hi <= 0);
}

// Tiles of kKeys keys of an item that start at begin, begin + kStep, ... and end at `end`.
template <class Config, class Hooks, int kKeys, int kStep>
class KvWalk {
 public:
  // Key lists are classified key by key, so a chunk of theirs costs as much as its tiles.
  static constexpr bool kChunks = (Hooks::kMask || Config::kBlockMask) && !Config::kSparse;
  // Of a warp: the state, the run that was found, the chunks.
  static constexpr int kSharedBytes = kChunks ? 48 : 32;

  FAJIT_DEV KvWalk(const Context& c, const KeyDivisors& divisors, const fajit_work& item,
                   int32_t begin, int32_t end, unsigned char* shared)
      : c_(c), divisors_(divisors), item_(item), shared_(ptx::shared_address(shared)) {
    if constexpr (kChunks) {
      // No tile or chunk is left of those before the first, so next_group() classifies the first.
      const int shift = chunk_shift(begin, end);
      store_chunks({begin - (32 * kStep << shift), shift, 0, 0});
      store({begin, max(begin, end), 0, 0});
    } else {
      // The group before the first: next_group() classifies the first one too, as the code is
      // large.
      store({begin - 32 * kStep, max(begin, end), 0, 0});
    }
  }

  // Finds the first run.
  FAJIT_DEV void start_runs() const { find_run(0); }

  // The next tile that is not empty; at the end, and on every later call, an invalid one.
  FAJIT_DEV KvTile next() const {
    State s;
    if (!next_group(s)) return {0, 0, false};
    const int i = first_bit(s.visit);
    s.visit &= s.visit - 1;
    store(s);
    const int32_t first = s.group + i * kStep;
    return {first, cut(first, kKeys, s.end), (s.full >> i & 1) != 0};
  }

  // Takes the run that was found, and finds the one after it: at the end, and on every later call,
  // an invalid one. Both are kept in shared memory until the next call.
  FAJIT_DEV KvRun take_run() const {
    uint32_t words[4];
    ptx::load_words(words, shared_ + 16);
    find_run(words[1]);  // stores after it has synchronised the warp
    return {static_cast<int32_t>(words[0]), static_cast<int32_t>(words[1]), words[2] != 0};
  }
  // The end of the run that was taken, the begin of the one that was found, or -1 if that is
  // invalid.
  FAJIT_DEV int32_t taken_end() const { return ptx::load_word(shared_ + 28); }
  FAJIT_DEV int32_t found_begin() const { return ptx::load_word(shared_ + 16); }
  // The end of the item's positions.
  FAJIT_DEV int32_t end() const { return ptx::load_word(shared_ + 4); }

  // The tile at `begin` of the run that was taken, full or not; whether the run goes on after it;
  // the begin of the tile after it, of this run or the next one, or -1 if there is none.
  FAJIT_DEV KvTile tile_at(int32_t begin) const { return {begin, cut(begin, kKeys, end()), false}; }
  FAJIT_DEV bool has_next(int32_t begin) const { return taken_end() - begin > kKeys; }
  FAJIT_DEV int32_t next_tile(int32_t begin) const {
    return has_next(begin) ? begin + kKeys : found_begin();
  }

 private:
  // Bits for 32 tiles, the first at `group`: those left to visit, those that are full.
  struct State {
    int32_t group, end;
    uint32_t visit, full;
  };
  // Bits for 32 chunks of 2^shift tiles, the first at `begin`: those left to visit, those that are
  // full. With a shift of 0 tiles are classified at once.
  struct Chunks {
    int32_t begin, shift;
    uint32_t visit, full;
  };
  static FAJIT_DEV int chunk_shift(int32_t begin, int32_t end) {
    constexpr int kWhole = 2, kMost = 5;  // two evaluations are not worth a third; 32 tiles
    const uint32_t keys =
        begin < end ? static_cast<uint32_t>(end) - static_cast<uint32_t>(begin) : 0;
    int shift = 0;
    if (keys > kWhole * 32 * kStep) {
      while (shift < kMost && keys > 32u * kStep << shift) ++shift;
    }
    return shift;
  }

  // The state with a tile to visit; false if there is none.
  FAJIT_DEV bool next_group(State& s) const {
    s = load();
    if constexpr (kChunks) {
      return next_of_chunks(s);
    } else {
      return next_of_tiles(s);
    }
  }
  FAJIT_DEV bool next_of_tiles(State& s) const {
    while (s.visit == 0) {
      // Unsigned: the distance from a group before position 0 may exceed int32.
      if (static_cast<uint32_t>(s.end) - static_cast<uint32_t>(s.group) <= 32 * kStep) {
        store(s);  // so that the next call need not classify the last groups again
        return false;
      }
      s.group += 32 * kStep;
      classify_group(s, 0);
    }
    return true;
  }
  FAJIT_DEV bool next_of_chunks(State& s) const {
    if (s.visit != 0) return true;
    Chunks chunks = load_chunks();
    while (s.visit == 0) {
      const bool finer = chunks.visit != 0;
      State found{0, s.end, 0, 0};
      if (!finer) {
        const int32_t keys = 32 * kStep << chunks.shift;
        // Unsigned: the distance from chunks before position 0 may exceed int32.
        if (static_cast<uint32_t>(s.end) - static_cast<uint32_t>(chunks.begin) <= keys) break;
        chunks.begin += keys;
        found.group = chunks.begin;
      } else {
        // The first chunk, and as many after it as have 32 tiles together; if it is full, those
        // that are.
        const int i = first_bit(chunks.visit), most = 32 >> chunks.shift;
        const int full = first_bit(~(chunks.full >> i) | 1u << most);  // of them, one by one
        const int count = full > 0 ? full : most;
        chunks.visit &= ~(low_bits(count) << i);
        found.group = chunks.begin + (i * kStep << chunks.shift);
        if (full > 0) found.visit = found.full = low_bits(count << chunks.shift);
      }
      if (found.visit == 0) classify_group(found, finer ? 0 : chunks.shift);
      if (finer || chunks.shift == 0) {
        s = found;
      } else {
        chunks.visit = found.visit;
        chunks.full = found.full;
      }
    }
    store_chunks(chunks);
    store(s);  // so that the next call need not classify the last groups again
    return s.visit != 0;
  }
  static FAJIT_DEV int first_bit(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }
  static FAJIT_DEV uint32_t low_bits(int count) { return count == 32 ? ~0u : (1u << count) - 1; }

  FAJIT_DEV void find_run(uint32_t taken_end) const {
    const KvRun run = next_run();
    if (ptx::lane_index() == 0)
      ptx::store_words(shared_ + 16, static_cast<uint32_t>(run.begin),
                       static_cast<uint32_t>(run.end), run.full, taken_end);
    __syncwarp();
  }
  FAJIT_DEV KvRun next_run() const {
    State s;
    if (!next_group(s)) return {-1, -1, false};
    const int first = first_bit(s.visit);
    const bool full = (s.full >> first & 1) != 0;
    const uint32_t same = (s.visit & (full ? s.full : ~s.full)) >> first;
    const int count = ~same == 0 ? 32 : first_bit(~same);
    s.visit &= ~(low_bits(count) << first);
    store(s);
    const int32_t begin = s.group + first * kStep;
    return {begin, cut(begin, count * kStep, s.end), full};
  }

  FAJIT_DEV State load() const {
    uint32_t words[4];
    ptx::load_words(words, shared_);
    __syncwarp();  // before any lane stores
    return {static_cast<int32_t>(words[0]), static_cast<int32_t>(words[1]), words[2], words[3]};
  }
  FAJIT_DEV void store(const State& s) const {
    if (ptx::lane_index() == 0)
      ptx::store_words(shared_, static_cast<uint32_t>(s.group), static_cast<uint32_t>(s.end),
                       s.visit, s.full);
    __syncwarp();
  }

  FAJIT_DEV Chunks load_chunks() const {
    uint32_t words[4];
    ptx::load_words(words, shared_ + 32);
    __syncwarp();  // before any lane stores
    return {static_cast<int32_t>(words[0]), static_cast<int32_t>(words[1]), words[2], words[3]};
  }
  FAJIT_DEV void store_chunks(const Chunks& c) const {  // before a call of store()
    if (ptx::lane_index() == 0)
      ptx::store_words(shared_ + 32, static_cast<uint32_t>(c.begin), static_cast<uint32_t>(c.shift),
                       c.visit, c.full);
  }

  // The bits of 32 boxes from s.group on, each of 2^shift tiles.
  FAJIT_DEV void classify_group(State& s, int shift) const {
    const RowSpan rows =
        row_span<Config::kMixedRows>(*c_.args, item_, item_.row_begin, item_.row_end);
    int state = FAJIT_TILE_EMPTY;
    bool line = true;
    // Positions fit int32, but not every lane's tile exists.
    const int64_t first = int64_t{s.group} + int64_t{ptx::lane_index()} * (kStep << shift);
    const int32_t keys = kKeys + (kStep << shift) - kStep;
    if (first < s.end) {
      const int32_t k0 = static_cast<int32_t>(first);
      const int32_t k1 = cut(k0, keys, s.end);
      if constexpr (Config::kSparse) {
        state = classify_listed(rows, k0, k1);
      } else {
        state = classify(rows, k0, k1);
        if constexpr (kHasLines<Config, Hooks>)
          line = Hooks::is_line(c_, Interval{k0, k1 - 1}, Interval{rows.q_first, rows.q_last});
      }
    }
    s.visit = __ballot_sync(ptx::kAllLanes, state != FAJIT_TILE_EMPTY);
    // A tile that the end cuts off needs a bounds check.
    s.full =
        __ballot_sync(ptx::kAllLanes, state == FAJIT_TILE_FULL && line && s.end - first >= keys);
  }

  // Positions [p0, p1) of the key lists, by the hull of their keys.
  FAJIT_DEV int classify_listed(const RowSpan& rows, int32_t p0, int32_t p1) const {
    const KeyLists lists(*c_.args, item_.request);
    int32_t first = lists.end, last = lists.first;
    bool all = true;
    int32_t block = divided(p0, divisors_.key_block), at = p0 - block * lists.block_size;
    for (int32_t p = p0; p < p1; ++block, at = 0) {
      const int32_t count = min(p1 - p, lists.block_size - at);
      const int64_t begin = lists.key(block, at), end = begin + count;
      if (begin < lists.end && end > lists.first) {
        first = min(first, static_cast<int32_t>(max(begin, int64_t{lists.first})));
        last = max(last, static_cast<int32_t>(min(end, int64_t{lists.end})));
      }
      all = all && begin >= lists.first && end <= lists.end;
      p += count;
    }
    if (first >= last) return FAJIT_TILE_EMPTY;
    const int state = classify(rows, first, last);
    return state == FAJIT_TILE_FULL && !all ? FAJIT_TILE_PARTIAL : state;
  }

  FAJIT_DEV int classify([[maybe_unused]] const RowSpan& rows, [[maybe_unused]] int32_t k0,
                         [[maybe_unused]] int32_t k1) const {
    if constexpr (Config::kBlockMask) {
      const int blocks = BlockStates(*c_.args, item_).of(k0, k1);
      if (blocks != FAJIT_TILE_PARTIAL) return blocks;
      // Across several blocks, some may be full, where mask_mod does not apply.
      const int32_t size = c_.args->block_mask.kv_block;
      if (k0 / size != (k1 - 1) / size) return FAJIT_TILE_PARTIAL;
    }
    if constexpr (Hooks::kMask) {
      return Hooks::classify(c_, Interval{rows.b_first, rows.b_last},
                             Interval{rows.h_first, rows.h_last},
                             Interval{rows.q_first, rows.q_last}, Interval{k0, k1 - 1});
    }
    return FAJIT_TILE_FULL;
  }

  const Context c_;
  const KeyDivisors& divisors_;
  const fajit_work& item_;
  const uint32_t shared_;
};

}  // namespace fajit::cuda
