// Plans random batches, right and wrong, under AddressSanitizer and UBSan.
//
//   plan_driver SEED SECONDS
//
// Every array is allocated with its exact size, so that the sanitizer reports a read past its end.
// A batch is refused with std::invalid_argument, or its plan is checked: items lie inside their
// requests, every partial state is written once and merged once, and without key lists or shared
// keys the items of a row cover each of its keys once. Prints how many batches were refused and
// planned.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "../../csrc/scheduler/batch_plan.h"

namespace {

using namespace fajit::scheduler;

constexpr int64_t kWild[] = {INT32_MIN, -7,  -1,      0,       1,         2,         3,
                             17,        255, 1 << 16, 1 << 30, INT32_MAX, 1LL << 31, INT64_MAX};

[[noreturn]] void fail(const char* what, long long a = 0, long long b = 0) {
  std::fprintf(stderr, "FUZZ FAILURE: %s (%lld, %lld)\n", what, a, b);
  std::abort();
}

struct Random {
  std::mt19937_64 engine;
  int64_t below(int64_t end) { return std::uniform_int_distribution<int64_t>(0, end - 1)(engine); }
  bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(engine) < p; }
  template <size_t N>
  int64_t of(const int64_t (&values)[N]) {
    return values[below(N)];
  }
  int64_t of(std::initializer_list<int64_t> values) { return values.begin()[below(values.size())]; }
};

class Fuzz {
 public:
  explicit Fuzz(uint64_t seed) : r_{std::mt19937_64(seed)}, wrong_(r_.chance(0.6)) {}

  bool once() {
    const int64_t count = r_.below(7);
    std::vector<int64_t> q_len, kv_len, offsets;
    for (int64_t i = 0; i < count; ++i) {
      q_len.push_back(r_.of({0, 1, 1, 2, 3, 9, 40}));
      kv_len.push_back(r_.of({0, 1, 7, 64, 500, 3000}));
      offsets.push_back(r_.below(500) - 5);
    }
    const int32_t page_size = static_cast<int32_t>(r_.of({0, 0, 1, 16}));
    const std::vector<int64_t> tokens = sums(q_len);
    const Array q_indptr = array(tokens, 1 << 16), q_offset = array(offsets);
    const StorageArrays keys = storage(kv_len, page_size);
    const bool dense = r_.chance(0.3);
    const std::vector<LevelArrays> shared =
        dense ? std::vector<LevelArrays>{} : levels(tokens.back(), page_size);
    const Lengths lengths =
        dense ? dense_lengths(rows_or_wild(40), rows_or_wild(3000), narrowed(kv_len),
                              narrowed(offsets))
              : read_lengths(q_indptr, keys, r_.chance(0.3) ? q_offset : Array{}, shared);

    PlanOptions o;
    o.num_kv_heads = static_cast<int32_t>(r_.of({1, 2, 3}));
    o.num_q_heads = o.num_kv_heads * static_cast<int32_t>(r_.of({1, 2, 5}));
    o.head_dim_v = 8;
    o.few_rows = static_cast<int32_t>(r_.of({0, 1, 8, 16}));
    o.share_workers = r_.chance(0.5);
    o.num_workers[0] = o.num_workers[1] = static_cast<int32_t>(r_.of({1, 2, 5, 40}));
    if (!o.share_workers) o.num_workers[1] = static_cast<int32_t>(r_.of({1, 3, 16}));
    o.batch_invariant = r_.chance(0.3);
    for (int32_t& keys_of_split : o.split_keys)
      keys_of_split = static_cast<int32_t>(r_.of({0, 16, 256}));
    o.mask_reads_request = r_.chance(0.5);
    o.merge_ns = 100.0;
    if (r_.chance(0.2)) {
      o.limits = {8, 300, 3200, 4000};
      o.num_levels = static_cast<int32_t>(r_.below(3));
    }
    Kind kinds[2] = {kind(), kind()};
    const KeyLists lists = shared.empty() && r_.chance(0.4) ? key_lists(lengths, o) : KeyLists{};
    if (lists.key_block == 0 && shared.empty() && r_.chance(0.3)) {
      o.row_block = static_cast<int32_t>(r_.of({1, 3, 16, 64, INT32_MAX}));
    }
    const BatchPlan plan = plan_batch(lengths, lists, kinds, o, fajit_args{});
    check(plan, lengths, lists, o, shared.empty() && lists.key_block == 0);
    return true;
  }

 private:
  // An array of the values, sometimes with a wrong entry, which is not in [gap, INT32_MAX].
  Array array(std::vector<int64_t> values, int64_t gap = INT64_MAX) {
    if (wrong_ && r_.chance(0.25)) {
      int64_t wild = r_.of(kWild);
      if (wild >= gap && wild <= INT32_MAX) wild = INT64_MAX;
      if (!values.empty() && r_.chance(0.7)) {
        values[static_cast<size_t>(r_.below(static_cast<int64_t>(values.size())))] = wild;
      } else if (!values.empty() && r_.chance(0.5)) {
        values.pop_back();
      } else {
        values.push_back(wild);
      }
    }
    const bool wide = r_.chance(0.5);
    const size_t item = wide ? 8 : 4;
    memory_.emplace_back(std::malloc(std::max<size_t>(values.size() * item, 1)), &std::free);
    void* const data = memory_.back().get();
    for (size_t i = 0; i < values.size(); ++i) {
      if (wide) {
        static_cast<int64_t*>(data)[i] = values[i];
      } else {
        static_cast<int32_t*>(data)[i] = static_cast<int32_t>(values[i]);
      }
    }
    return {data, static_cast<int64_t>(values.size()), static_cast<int>(item)};
  }

  // The number of rows of a dense call's requests; a wild number is refused.
  int32_t rows_or_wild(int32_t most) {
    if (wrong_ && r_.chance(0.1)) return static_cast<int32_t>(r_.of({INT32_MIN, -1, INT32_MAX}));
    return static_cast<int32_t>(r_.chance(0.5) ? most : r_.below(most));
  }

  std::vector<int32_t> narrowed(std::vector<int64_t> values) {
    if (wrong_ && !values.empty() && r_.chance(0.2)) values[0] = r_.of({INT32_MIN, -7, INT32_MAX});
    return {values.begin(), values.end()};
  }

  static std::vector<int64_t> sums(const std::vector<int64_t>& lengths) {
    std::vector<int64_t> out{0};
    for (const int64_t n : lengths) out.push_back(out.back() + n);
    return out;
  }

  StorageArrays storage(const std::vector<int64_t>& kv_len, int32_t page_size) {
    StorageArrays s;
    s.page_size = wrong_ && r_.chance(0.05) ? static_cast<int32_t>(r_.of(kWild)) : page_size;
    if (page_size == 0) {
      s.kv_indptr = array(sums(kv_len));
      return s;
    }
    std::vector<int64_t> pages, last;
    for (const int64_t n : kv_len) {
      pages.push_back((n + page_size - 1) / page_size);
      last.push_back(n > 0 ? (n - 1) % page_size + 1 : 0);
    }
    s.page_indptr = array(sums(pages));
    s.last_page_len = array(last);
    s.num_page_indices = wrong_ && r_.chance(0.1) ? r_.of(kWild) : sums(pages).back();
    return s;
  }

  std::vector<LevelArrays> levels(int64_t tokens, int32_t page_size) {
    std::vector<LevelArrays> out;
    for (int64_t n = r_.chance(0.4) ? r_.below(3) : 0; n > 0; --n) {
      std::vector<int64_t> starts{0, tokens}, kv_len, members;
      for (int64_t i = r_.below(4); i > 0; --i) starts.push_back(r_.below(tokens + 1));
      std::sort(starts.begin(), starts.end());
      for (size_t i = 1; i < starts.size(); ++i) kv_len.push_back(r_.below(60));
      for (int64_t t = 0; t < tokens; ++t) members.push_back(t);
      std::shuffle(members.begin(), members.end(), r_.engine);
      const Array indptr = array(starts, 1 << 16);
      out.push_back(
          {indptr, r_.chance(0.4) ? array(members) : Array{}, storage(kv_len, page_size)});
    }
    return out;
  }

  Kind kind() {
    Kind k;
    if (r_.chance(0.1)) return k;
    k.tile_q = static_cast<int32_t>(r_.of({1, 4, 16, 64}));
    k.row_granule = static_cast<int32_t>(r_.of({1, 4, 16}));
    k.tile_kv = static_cast<int32_t>(r_.of({1, 16, 64}));
    k.min_chunk = static_cast<int32_t>(r_.of({1, 64, 256}));
    for (double* cost : {&k.item_ns, &k.load_ns, &k.pair_ns, &k.state_ns}) {
      *cost = static_cast<double>(r_.below(1000));
    }
    if (wrong_ && r_.chance(0.1)) k.tile_kv = static_cast<int32_t>(r_.of(kWild));
    if (wrong_ && r_.chance(0.1)) k.pair_ns = r_.chance(0.5) ? -1.0 : 1.0 / 0.0;
    return k;
  }

  KeyLists key_lists(const Lengths& lengths, const PlanOptions& o) {
    KeyLists lists;
    lists.q_block = static_cast<int32_t>(r_.of({1, 4, 64}));
    lists.key_block =
        static_cast<int32_t>(wrong_ && r_.chance(0.1) ? r_.of(kWild) : r_.of({1, 16}));
    lists.per_head = r_.chance(0.5);
    int64_t rows = 0;
    for (const int32_t n : lengths.q_len) rows += (n + lists.q_block - 1) / lists.q_block;
    if (lists.per_head) rows *= o.num_kv_heads;
    std::vector<int64_t> count;
    for (int64_t i = 0; i < rows; ++i) count.push_back(r_.below(6));
    std::vector<int64_t> begin = sums(count);
    lists.num_key_blocks = wrong_ && r_.chance(0.2) ? r_.of(kWild) : begin.back();
    begin.pop_back();
    lists.begin = array(begin);
    lists.count = array(count);
    return lists;
  }

  void check(const BatchPlan& plan, const Lengths& l, const KeyLists& lists, const PlanOptions& o,
             bool all_keys) {
    using Row = std::tuple<int32_t, int32_t, int32_t>;  // request, first head, packed row
    std::map<Row, std::vector<std::pair<int32_t, int32_t>>> visited;
    std::vector<int> written(static_cast<size_t>(plan.partial_rows), 0), merged = written;
    const auto entities = static_cast<int32_t>(l.q_len.size());
    const auto check_rows = [&](const auto& item) {
      if (item.request < 0 || item.request >= entities) fail("request", item.request);
      if (item.head_begin < 0 || item.head_begin + item.head_count > o.num_q_heads) fail("heads");
      const int64_t rows = int64_t{l.q_len[static_cast<size_t>(item.request)]} * item.head_count;
      if (item.row_begin < 0 || item.row_end > rows) fail("rows", item.row_begin, item.row_end);
    };
    for (const KindPlan& kind : plan.kinds) {
      for (const fajit_work& item : kind.work) {
        check_rows(item);
        const size_t b = static_cast<size_t>(item.request);
        const int64_t end =
            lists.key_block > 0 ? lists.num_key_blocks * lists.key_block : l.kv_len[b];
        if (item.kv_begin < 0 || item.kv_end < item.kv_begin || item.kv_end > end) {
          fail("keys", item.kv_begin, item.kv_end);
        }
        if (o.row_block > 0 && item.row_begin / item.head_count / o.row_block !=
                                   (item.row_end - 1) / item.head_count / o.row_block) {
          fail("rows of two blocks", item.row_begin, item.row_end);
        }
        for (int32_t row = item.row_begin; row < item.row_end; ++row) {
          if (item.partial >= 0)
            ++written.at(static_cast<size_t>(item.partial + row - item.row_begin));
          if (all_keys)
            visited[{item.request, item.head_begin, row}].emplace_back(item.kv_begin, item.kv_end);
        }
      }
    }
    for (const fajit_merge_work& item : plan.merge_work) {
      check_rows(item);
      const int32_t rows = item.row_end - item.row_begin;
      for (int32_t i = 0; i < item.num_splits; ++i) {
        const int32_t first =
            plan.merge_sources.empty()
                ? item.first_partial + i * rows
                : plan.merge_sources.at(static_cast<size_t>(item.first_partial + i));
        for (int32_t row = 0; row < rows; ++row) ++merged.at(static_cast<size_t>(first + row));
      }
    }
    for (size_t i = 0; i < written.size(); ++i) {
      if (written[i] != 1 || merged[i] != 1) fail("a partial state", written[i], merged[i]);
    }
    if (!all_keys) return;
    const int32_t group = o.num_q_heads / o.num_kv_heads;
    for (int32_t b = 0; b < l.num_requests; ++b) {
      const int32_t rows = l.q_len[static_cast<size_t>(b)] * group;
      for (int32_t head = 0; head < o.num_q_heads; head += group) {
        for (int32_t row = 0; row < rows; ++row) {
          auto& spans = visited[{b, head, row}];
          std::sort(spans.begin(), spans.end());
          int32_t at = 0;
          for (const auto& [begin, end] : spans) {
            if (begin != at) fail("keys are visited twice or not", b, row);
            at = end;
          }
          if (spans.empty() || at != l.kv_len[static_cast<size_t>(b)])
            fail("keys are left", b, row);
        }
      }
    }
  }

  Random r_;
  bool wrong_;
  std::vector<std::unique_ptr<void, decltype(&std::free)>> memory_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const auto begin = std::chrono::steady_clock::now();
  const double seconds = std::atof(argv[2]);
  uint64_t seed = std::strtoull(argv[1], nullptr, 10);
  int planned = 0, refused = 0;
  for (;; ++seed) {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    if (spent.count() > seconds) break;
    std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed));
    try {
      planned += Fuzz(seed).once();
    } catch (const std::invalid_argument&) {
      ++refused;
    }
  }
  std::printf("%d %d\n", refused, planned);
  return 0;
}
