// Reads and checks the lengths of a batch: requests, then groups of shared keys.
#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>
#include <string>

#include "batch_plan.h"

namespace fajit::scheduler {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

uint64_t next_id() {
  static std::atomic<uint64_t> made{0};
  return ++made;
}

// The owner of arrays, for messages: the requests, or a level, whose entries are groups.
struct Owner {
  int64_t level = -1;

  std::string array(const char* name) const {
    return level < 0 ? name : std::string(name) + " of level " + number(level);
  }
  std::string entry(int64_t i) const {
    return level < 0 ? "request " + number(i) : "group " + number(i) + " of level " + number(level);
  }
};

// Returns `array` as int32, checked: starts with 0 and does not descend. `what`: the counts that it
// sums.
std::vector<int32_t> read_indptr(const Array& array, const char* name, const Owner& owner,
                                 const char* what) {
  if (array.data == nullptr || array.size < 1) {
    fail(owner.array(name) + " has " + number(array.size) +
         " entries; it needs one more than there are " + (owner.level < 0 ? "requests" : "groups") +
         ", and starts with 0");
  }
  if (array.at(0) != 0) {
    fail(owner.array(name) + "[0]=" + number(array.at(0)) + " must be 0: pass the " + what +
         " from the first " + (owner.level < 0 ? "request" : "group") + " on");
  }
  std::vector<int32_t> out(static_cast<size_t>(array.size));
  int64_t before = 0;
  for (int64_t i = 1; i < array.size; ++i) {
    const int64_t value = array.at(i);
    if (value < before) {
      fail(owner.array(name) + " descends at " + owner.entry(i - 1) + ", from " + number(before) +
           " to " + number(value) + ": it must be the running sum of the " + what);
    }
    if (value > kMost) {
      fail(owner.array(name) + " reaches " + number(value) + " at " + owner.entry(i - 1) +
           ", which does not fit 32 bits: plan fewer requests at once");
    }
    out[static_cast<size_t>(i)] = static_cast<int32_t>(value);
    before = value;
  }
  return out;
}

void require_count(const Array& array, const char* name, int64_t count, const Owner& owner) {
  if (array.size != count || (array.data == nullptr && count > 0)) {
    fail(owner.array(name) + " has " + number(array.size) + " entries for " + number(count) +
         (owner.level < 0 ? " requests" : " groups") + " of q_indptr");
  }
}

void require_indptr_count(const Array& array, const char* name, int64_t count, const Owner& owner) {
  if (array.size != count + 1) {
    fail(owner.array(name) + " has " + number(array.size) + " entries; q_indptr has " +
         number(count) + (owner.level < 0 ? " requests" : " groups") + ", so it needs " +
         number(count + 1));
  }
}

using Range = std::pair<int64_t, int64_t>;

template <class T>
__attribute__((always_inline)) inline Range range_of(const T* values, int64_t count) {
  T least = 0, most = -1;
#pragma omp simd reduction(min : least) reduction(max : most)
  for (int64_t i = 0; i < count; ++i) {
    least = values[i] < least ? values[i] : least;
    most = values[i] > most ? values[i] : most;
  }
  return {least, most};
}

// Also compiled for AVX2; the loader selects one. 63,000 entries take 2.4 us, 17 us with SSE2.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
__attribute__((target_clones("avx2", "default")))
#endif
Range range_of_int32(const int32_t* values, int64_t count) {
  return range_of(values, count);
}

class Reader {
 public:
  explicit Reader(Lengths& lengths) : out_(lengths) {}

  // Appends the lengths and addresses of the keys of `count` requests or groups. Those of groups
  // whose keys are elsewhere are not appended; the result is the number of keys of each.
  std::vector<int32_t> read_storage(const StorageArrays& storage, int64_t count,
                                    const Owner& owner) {
    if (storage.page_size < 0) {
      fail("page_size=" + number(storage.page_size) + " must be positive");
    }
    Lengths apart;
    if (storage.elsewhere) {
      Reader(apart).read_keys(storage, count, owner);
      if (owner.level < 0) {
        out_.kv_len = apart.kv_len;
        out_.kv_row0.assign(static_cast<size_t>(count), 0);
      }
      return apart.kv_len;
    }
    if (!has_storage_) {
      out_.page_size = storage.page_size;
    } else if (storage.page_size != out_.page_size) {
      fail("level " + number(owner.level) + " has " + described(storage.page_size) +
           ", the requests have " + described(out_.page_size) +
           ": keys of all levels must be in one storage");
    }
    has_storage_ = true;
    const size_t first = out_.kv_len.size();
    read_keys(storage, count, owner);
    return {out_.kv_len.begin() + static_cast<std::ptrdiff_t>(first), out_.kv_len.end()};
  }

  // Adjusts kv_row0: ragged k and v hold the keys of level 0, 1, ..., then those of the requests.
  void put_levels_first(int64_t request_keys) {
    if (out_.page_size > 0) return;
    const int32_t ahead = static_cast<int32_t>(out_.num_kv_tokens - request_keys);
    for (size_t i = 0; i < out_.kv_row0.size(); ++i) {
      out_.kv_row0[i] +=
          i < static_cast<size_t>(out_.num_requests) ? ahead : -static_cast<int32_t>(request_keys);
    }
  }

 private:
  void read_keys(const StorageArrays& storage, int64_t count, const Owner& owner) {
    storage.page_size > 0 ? read_pages(storage, count, owner) : read_ragged(storage, count, owner);
  }

  static std::string described(int32_t page_size) {
    return page_size > 0 ? "pages of " + number(page_size) : "ragged keys";
  }

  void read_ragged(const StorageArrays& storage, int64_t count, const Owner& owner) {
    const std::vector<int32_t> indptr =
        read_indptr(storage.kv_indptr, "kv_indptr", owner, "key counts");
    require_indptr_count(storage.kv_indptr, "kv_indptr", count, owner);
    // Levels follow the requests here; see put_levels_first.
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      out_.kv_len.push_back(indptr[i + 1] - indptr[i]);
      const int64_t row0 = out_.num_kv_tokens + indptr[i];
      if (row0 + out_.kv_len.back() > kMost) {
        fail(owner.entry(static_cast<int64_t>(i)) + " ends at row " +
             number(row0 + out_.kv_len.back()) + " of k and v, which does not fit 32 bits");
      }
      out_.kv_row0.push_back(static_cast<int32_t>(row0));
    }
    out_.num_kv_tokens += indptr.back();
  }

  void read_pages(const StorageArrays& storage, int64_t count, const Owner& owner) {
    const std::vector<int32_t> indptr =
        read_indptr(storage.page_indptr, "page_indptr", owner, "page counts");
    require_indptr_count(storage.page_indptr, "page_indptr", count, owner);
    require_count(storage.last_page_len, "last_page_len", count, owner);
    if (indptr.back() > storage.num_page_indices) {
      fail(owner.array("page_indptr") + " ends at " + number(indptr.back()) + ", but " +
           owner.array("page_indices") + " has " + number(storage.num_page_indices) + " entries");
    }
    const int64_t base = out_.num_page_indices;
    if (base + indptr.back() > kMost) {
      fail(owner.array("page_indptr") + " ends at page " + number(base + indptr.back()) +
           " of all levels, which does not fit 32 bits");
    }
    const size_t first = out_.kv_len.size(), all = first + static_cast<size_t>(count);
    out_.kv_len.resize(all);
    out_.kv_row0.resize(all, 0);
    out_.page_indptr.resize(all + 1);
    for (int64_t i = 0; i < count; ++i) {
      const size_t n = static_cast<size_t>(i);
      const int64_t pages = indptr[n + 1] - indptr[n];
      const int64_t last = storage.last_page_len.at(i);
      if (last < (pages > 0 ? 1 : 0) || last > storage.page_size) {
        fail(owner.array("last_page_len") + "[" + number(i) + "]=" + number(last) + ": " +
             owner.entry(i) + " has " + number(pages) + " pages, so it must be " +
             (pages > 0 ? "1" : "0") + " to page_size=" + number(storage.page_size));
      }
      const int64_t kv_len = pages > 0 ? (pages - 1) * storage.page_size + last : 0;
      if (kv_len > kMost) {
        fail(owner.entry(i) + " has " + number(kv_len) + " keys, which do not fit 32 bits");
      }
      out_.kv_len[first + n] = static_cast<int32_t>(kv_len);
      out_.page_indptr[first + n + 1] = static_cast<int32_t>(base + indptr[n + 1]);
    }
    out_.num_page_indices = base + indptr.back();
  }

  Lengths& out_;
  bool has_storage_ = false;  // whether page_size is known
};

// Reads the tokens of the groups of levels, outer to inner.
class Groups {
 public:
  explicit Groups(Lengths& lengths)
      : out_(lengths),
        keys_before_(static_cast<size_t>(lengths.num_q_tokens), 0),
        level_of_(static_cast<size_t>(lengths.num_q_tokens), -1),
        group_of_(static_cast<size_t>(lengths.num_requests), -1) {}

  // Appends the groups' q_len, q_row0 and kv_first, and adds the keys of outer levels to their
  // kv_len. `own_keys`: may be
  // elsewhere; then nothing is appended.
  void read_tokens(const LevelArrays& level, const std::vector<int32_t>& indptr, const Owner& owner,
                   const std::vector<int32_t>& own_keys) {
    const bool here = !level.storage.elsewhere;
    const size_t first_kv_len = out_.kv_len.size() - (here ? own_keys.size() : 0);
    const bool listed = level.tokens.data != nullptr;
    const int64_t entries = listed ? level.tokens.size : out_.num_q_tokens;
    if (indptr.back() > entries) {
      fail(owner.array("q_indptr") + " ends at " + number(indptr.back()) + ", but there are " +
           number(entries) + (listed ? " entries of " + owner.array("tokens") : " packed tokens"));
    }
    const int64_t base = listed ? static_cast<int64_t>(out_.row_token.size()) : 0;
    if (base + indptr.back() > kMost) {
      fail(owner.array("tokens") + " has too many entries to fit 32 bits");
    }
    for (size_t g = 0; g + 1 < indptr.size(); ++g) {
      const int32_t begin = indptr[g], end = indptr[g + 1];
      const std::string name = owner.entry(static_cast<int64_t>(g));
      const int32_t keys = own_keys[g];
      int32_t before = 0, last_token = -1, last_request = -1;
      for (int32_t e = begin; e < end; ++e) {
        const int64_t token = listed ? level.tokens.at(e) : e;
        if (token < 0 || token >= out_.num_q_tokens) {
          fail(owner.array("tokens") + "[" + number(e) + "]=" + number(token) + " in " + name +
               " is none of the " + number(out_.num_q_tokens) + " packed tokens of q_indptr");
        }
        const size_t t = static_cast<size_t>(token);
        const int32_t request = out_.row_request[t];
        check_order(token, request, last_token, last_request, stamp_, name, owner);
        if (level_of_[t] == owner.level) {
          fail("token " + number(token) + " of request " + number(request) + " is in " + name +
               " and in an earlier group of the level: a token may be in one only");
        }
        if (e == begin) before = keys_before_[t];
        if (keys_before_[t] != before) {
          fail(name + ": its first token has " + number(before) + " keys in outer levels, token " +
               number(token) + " of request " + number(request) + " has " +
               number(keys_before_[t]) + "; the tokens of a group must have equally many");
        }
        if (int64_t{before} + keys > kMost) {
          fail(name + " has " + number(int64_t{before} + keys) +
               " keys with those of outer levels, which do not fit 32 bits");
        }
        level_of_[t] = static_cast<int32_t>(owner.level);
        keys_before_[t] = before + keys;
        last_token = static_cast<int32_t>(token);
        last_request = request;
        if (listed && here) out_.row_token.push_back(last_token);
      }
      ++stamp_;
      if (!here) continue;
      out_.q_len.push_back(end - begin);
      out_.q_row0.push_back(static_cast<int32_t>(base) + begin);
      out_.kv_first.push_back(before);
      out_.kv_len[first_kv_len + g] = before + keys;
    }
  }

  // The number of keys in outer levels, which must be the same for all tokens of a request.
  int32_t keys_before(int32_t request) const {
    const size_t begin = static_cast<size_t>(out_.q_row0[static_cast<size_t>(request)]);
    const size_t end = begin + static_cast<size_t>(out_.q_len[static_cast<size_t>(request)]);
    if (begin == end) return 0;
    for (size_t t = begin + 1; t < end; ++t) {
      if (keys_before_[t] == keys_before_[begin]) continue;
      fail("request " + number(request) + ": its first token has " + number(keys_before_[begin]) +
           " keys in shared levels, token " + number(static_cast<int64_t>(t)) + " has " +
           number(keys_before_[t]) + "; the tokens of a request must have equally many");
    }
    return keys_before_[begin];
  }

 private:
  // Checks that the tokens of a request are consecutive in a group, so that its rows are
  // contiguous.
  void check_order(int64_t token, int32_t request, int32_t last_token, int32_t last_request,
                   int32_t stamp, const std::string& name, const Owner& owner) {
    int32_t& seen = group_of_[static_cast<size_t>(request)];
    const bool follows = request == last_request ? token == int64_t{last_token} + 1 : seen != stamp;
    if (!follows) {
      fail(owner.array("tokens") + ": the tokens of request " + number(request) + " in " + name +
           " must follow one another in ascending order, token " + number(token) + " does not");
    }
    seen = stamp;
  }

  Lengths& out_;
  std::vector<int32_t> keys_before_, level_of_;  // of tokens
  std::vector<int32_t> group_of_;                // of requests: the last group with tokens of it
  int32_t stamp_ = 0;
};

// Before arrays of an entry a token are allocated: a wrong q_indptr may end anywhere.
void check_queries(const std::vector<int32_t>& q, const QueryBounds& bounds) {
  for (size_t b = 0; b + 1 < q.size(); ++b) {
    const int64_t q_len = q[b + 1] - q[b];
    // See Units::count_tiles: a tile has at least one row.
    if (q_len * bounds.group_size >= kMost) {
      fail("request " + number(static_cast<int64_t>(b)) + " has q_len=" + number(q_len) + " x " +
           number(bounds.group_size) + " heads per kv head, which does not fit 32 bits");
    }
  }
  if (q.back() > bounds.max_q_tokens) {
    fail("q_indptr ends at " + number(q.back()) +
         " packed tokens, but the memory of the device has room for " +
         number(bounds.max_q_tokens) +
         " rows of q: it must be the running sum of the query counts");
  }
}

}  // namespace

Range page_range(const Array& indices, const Array& page_indptr) {
  const int64_t used = page_indptr.size > 0 ? page_indptr.at(page_indptr.size - 1) : 0;
  const int64_t count = std::min(used, indices.size);
  if (indices.item_bytes == 8) return range_of(static_cast<const int64_t*>(indices.data), count);
  return range_of_int32(static_cast<const int32_t*>(indices.data), count);
}

Lengths read_lengths(const Array& q_indptr, const StorageArrays& storage, const Array& q_offset,
                     const std::vector<LevelArrays>& levels, const QueryBounds& bounds) {
  Lengths out;
  const Owner requests;
  const std::vector<int32_t> q = read_indptr(q_indptr, "q_indptr", requests, "query counts");
  check_queries(q, bounds);
  const int64_t count = q_indptr.size - 1;
  out.num_requests = static_cast<int32_t>(count);
  out.num_q_tokens = q.back();
  if (q_offset.data != nullptr || q_offset.size > 0) {
    require_count(q_offset, "q_offset", count, requests);
  }
  Reader reader(out);
  reader.read_storage(storage, count, requests);
  const int64_t request_keys = out.num_kv_tokens;
  out.q_row0.assign(q.begin(), q.end() - 1);
  out.q_len.resize(static_cast<size_t>(count));
  for (size_t b = 0; b + 1 < q.size(); ++b) out.q_len[b] = q[b + 1] - q[b];
  out.kv_first.assign(static_cast<size_t>(count), 0);

  if (!levels.empty()) {
    out.row_request.resize(static_cast<size_t>(out.num_q_tokens));
    for (int32_t b = 0; b < out.num_requests; ++b) {
      const size_t i = static_cast<size_t>(b);
      std::fill(out.row_request.begin() + q[i], out.row_request.begin() + q[i + 1], b);
    }
    const bool listed = std::any_of(levels.begin(), levels.end(), [](const LevelArrays& level) {
      return level.tokens.data != nullptr && !level.storage.elsewhere;
    });
    if (listed) {
      out.row_token.resize(static_cast<size_t>(out.num_q_tokens));
      for (size_t t = 0; t < out.row_token.size(); ++t) out.row_token[t] = static_cast<int32_t>(t);
    }
    Groups groups(out);
    for (size_t l = 0; l < levels.size(); ++l) {
      const Owner owner{static_cast<int64_t>(l)};
      const std::vector<int32_t> indptr =
          read_indptr(levels[l].q_indptr, "q_indptr", owner, "token counts");
      const std::vector<int32_t> keys =
          reader.read_storage(levels[l].storage, levels[l].q_indptr.size - 1, owner);
      groups.read_tokens(levels[l], indptr, owner, keys);
    }
    reader.put_levels_first(request_keys);
    for (int32_t b = 0; b < out.num_requests; ++b) {
      const size_t i = static_cast<size_t>(b);
      const int64_t keys = int64_t{out.kv_len[i]} + (out.kv_first[i] = groups.keys_before(b));
      if (keys > kMost) {
        fail("request " + number(b) + " has " + number(keys) + " keys, which do not fit 32 bits");
      }
      out.kv_len[i] = static_cast<int32_t>(keys);
      if (storage.elsewhere) out.kv_first[i] = out.kv_len[i];
    }
  }
  out.num_groups = static_cast<int32_t>(out.q_len.size()) - out.num_requests;

  const size_t all = out.q_len.size();
  out.q_offset.assign(all, 0);
  out.kv_token0.assign(all, 0);
  out.q_token0 = out.q_row0;
  for (size_t i = 0; i < all; ++i) {
    if (i < static_cast<size_t>(count)) {
      const int64_t offset = q_offset.data != nullptr ? q_offset.at(static_cast<int64_t>(i))
                                                      : int64_t{out.kv_len[i]} - out.q_len[i];
      if (offset < -kMost || offset > kMost - out.q_len[i]) {
        fail("q_offset[" + number(static_cast<int64_t>(i)) + "]=" + number(offset) +
             ": the positions of its " + number(out.q_len[i]) + " queries do not fit 32 bits");
      }
      out.q_offset[i] = static_cast<int32_t>(offset);
      out.max_q_len = std::max(out.max_q_len, out.q_len[i]);
      out.max_kv_len = std::max(out.max_kv_len, out.kv_len[i]);
    }
    if (out.page_size == 0) out.kv_token0[i] = out.kv_row0[i] - out.kv_first[i];
  }
  out.id = next_id();
  return out;
}

Lengths dense_lengths(int32_t q_len, int32_t kv_rows, std::vector<int32_t> kv_len,
                      std::vector<int32_t> q_offset) {
  const size_t count = kv_len.size();
  Lengths out;
  out.num_requests = static_cast<int32_t>(count);
  out.num_q_tokens = int64_t{q_len} * out.num_requests;
  out.num_kv_tokens = int64_t{kv_rows} * out.num_requests;
  if (q_len < 0 || kv_rows < 0 || std::max(out.num_q_tokens, out.num_kv_tokens) > kMost) {
    fail(number(out.num_requests) + " requests of q_len=" + number(q_len) + " and " +
         number(kv_rows) + " keys have more rows than fit 32 bits");
  }
  for (size_t b = 0; b < count; ++b) {
    const std::string name = "[" + number(static_cast<int64_t>(b)) + "]=";
    if (kv_len[b] < 0 || kv_len[b] > kv_rows) {
      fail("kv_len" + name + number(kv_len[b]) + " is outside of [0, " + number(kv_rows) + "]");
    }
    if (q_offset[b] < -kMost || q_offset[b] > kMost - q_len) {
      fail("q_offset" + name + number(q_offset[b]) + ": the positions of its " + number(q_len) +
           " queries do not fit 32 bits");
    }
    out.max_kv_len = std::max(out.max_kv_len, kv_len[b]);
    out.q_token0.push_back(static_cast<int32_t>(b) * q_len);
    out.kv_token0.push_back(static_cast<int32_t>(b) * kv_rows);
  }
  out.max_q_len = count > 0 ? q_len : 0;
  out.q_len.assign(count, q_len);
  for (std::vector<int32_t>* zeros : {&out.q_row0, &out.kv_row0, &out.kv_first}) {
    zeros->assign(count, 0);
  }
  out.kv_len = std::move(kv_len);
  out.q_offset = std::move(q_offset);
  out.id = next_id();
  return out;
}

}  // namespace fajit::scheduler
