// Calls the entry points of one artifact with random valid arguments, and with invalid ones, under
// AddressSanitizer and UBSan. Compiled into one program with the rendered source.
//
//   driver SEED SECONDS
//
// The artifact's variant is fixed (see test_fuzz.py):
//   score_mod  cap * tanh(s / cap) + bias[h, k - q]      (negative indices wrap)
//   mask_mod   |q - k| < window and documents[b, q] == documents[b, k]
//   sink       sink[h]
//   output_mod row * gate[h]
// fuzz_config.h, which the test writes, has the spec's dtypes, head dims, slots and tables.
//
// Every tensor is allocated with its exact size, so that the sanitizer reports an overrun. Memory
// that must not be read holds NaN, so that a read of it shows in the output. Gaps of the output
// must keep their pattern. Results are compared with a plain loop in fp64.
#include <fajit/abi.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "fuzz_config.h"

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr uint32_t kPattern = 0x7fc0dead;  // a NaN in fp32, and in bf16 either half is not zero
constexpr int kTableBlock = 64, kMinTableLength = 1024;
constexpr double kTolerance = FUZZ_BF16 ? 4e-2 : 2e-4;

[[noreturn]] void fail(const char* what, long long a = 0, long long b = 0, double x = 0,
                       double y = 0) {
  std::fprintf(stderr, "FUZZ FAILURE: %s (%lld, %lld) %g %g\n", what, a, b, x, y);
  std::abort();
}

struct Random {
  std::mt19937_64 engine;
  int64_t between(int64_t low, int64_t high) {  // both included
    return std::uniform_int_distribution<int64_t>(low, high)(engine);
  }
  bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(engine) < p; }
  float normal() { return std::normal_distribution<float>(0, 1)(engine); }
};

#if FUZZ_BF16
using Item = uint16_t;
float to_float(Item x) {
  const uint32_t bits = uint32_t{x} << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
Item from_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc1;
  return static_cast<Item>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#else
using Item = float;
float to_float(Item x) { return x; }
Item from_float(float x) { return x; }
#endif

// An allocation of exactly `count` items: the sanitizer reports an access past its end. Never null.
template <class T>
class Exact {
 public:
  explicit Exact(int64_t count, T fill = T{})
      : data_(static_cast<T*>(std::malloc(sizeof(T) * static_cast<size_t>(count)))), count_(count) {
    std::fill_n(data_, count, fill);
  }
  ~Exact() { std::free(data_); }
  Exact(const Exact&) = delete;
  Exact& operator=(const Exact&) = delete;
  T* data() { return data_; }
  int64_t count() const { return count_; }
  T& operator[](int64_t i) {
    if (i < 0 || i >= count_) fail("the driver itself reads outside", i, count_);
    return data_[i];
  }

 private:
  T* data_;
  int64_t count_;
};

// [request, head, row, dim] with random gaps, heads or rows outermost, requests packed or not.
struct Layout {
  int64_t stride[3] = {0, 0, 0};
  std::vector<int32_t> row0;
  int64_t offset = 0, count = 0;

  Layout(Random& r, const std::vector<int32_t>& rows, int heads, int dim, bool packed) {
    const int64_t gap = r.chance(0.5) ? r.between(1, 9) : 0;
    int64_t most = 0, total = 0;
    for (const int32_t n : rows) {
      row0.push_back(packed ? static_cast<int32_t>(total) : 0);
      total += n;
      most = n > most ? n : most;
    }
    const int64_t height = packed ? total : most;
    if (r.chance(0.5)) {  // row, head, dim
      stride[1] = dim + gap;
      stride[2] = stride[1] * heads + (r.chance(0.3) ? 3 : 0);
      stride[0] = packed ? 0 : stride[2] * height;
    } else {  // head, row, dim
      stride[2] = dim + gap;
      stride[1] = stride[2] * height + (r.chance(0.3) ? 5 : 0);
      stride[0] = packed ? 0 : stride[1] * heads;
    }
    offset = r.chance(0.5) ? r.between(1, 5) : 0;
    count = offset;  // ends with the last row's last item: no slack
    for (size_t b = 0; b < rows.size(); ++b)
      if (rows[b] > 0) {
        const int64_t end = at(static_cast<int>(b), heads - 1, rows[b] - 1) + dim;
        count = end > count ? end : count;
      }
  }
  int64_t at(int b, int h, int64_t row) const {
    return offset + b * stride[0] + h * stride[1] +
           (row0[static_cast<size_t>(b)] + row) * stride[2];
  }
};

struct Problem {
  std::vector<int32_t> q_len, kv_len, q_offset, token0;
  int requests, kv_heads, group, heads;
  int64_t positions = 1;  // that documents covers

  explicit Problem(Random& r) {
    requests = static_cast<int>(r.between(1, 3));
    kv_heads = static_cast<int>(r.chance(0.5) ? r.between(1, 2) : r.between(3, 11));
    group = static_cast<int>(r.between(1, 5));
    heads = kv_heads * group;
    const bool long_keys = r.chance(0.05);
    for (int b = 0; b < requests; ++b) {
      q_len.push_back(r.chance(0.1) ? 0 : static_cast<int32_t>(r.between(1, FUZZ_MAX_Q_LEN)));
      const int64_t most = long_keys ? 2600 : r.chance(0.3) ? 20 : 230;
      kv_len.push_back(r.chance(0.1) ? 0 : static_cast<int32_t>(r.between(1, most)));
      const int32_t end = kv_len.back() - q_len.back();
      q_offset.push_back(r.chance(0.5) && end > 0 ? end : static_cast<int32_t>(r.between(0, 40)));
      token0.push_back(0);
      const int64_t reach = std::max<int64_t>(kv_len.back(), q_offset.back() + q_len.back());
      positions = std::max(positions, reach);
    }
  }
};

struct Params {
  int64_t window;
  double cap;
  int64_t bias_size;
  Exact<float> bias, sink, gate;
  Exact<int32_t> documents;
  int64_t positions;
  std::vector<fajit_tensor> tensors;
  std::vector<Exact<int32_t>*> tables;
  uint64_t scalars[2];

  Params(Random& r, const Problem& p)
      : window(r.between(1, r.chance(0.5) ? r.chance(0.2) ? 2000 : 300 : 25)),
        cap(r.chance(0.5) ? 2.5 : 50.0),
        bias_size(2 * window),
        bias(p.heads * bias_size),
        sink(p.heads),
        gate(p.heads),
        documents(p.requests * p.positions),
        positions(p.positions),
        tensors(FUZZ_NUM_TENSORS + 2 * FUZZ_NUM_TABLES) {
    for (int64_t i = 0; i < bias.count(); ++i) bias[i] = r.normal();
    for (int h = 0; h < p.heads; ++h) sink[h] = r.normal(), gate[h] = r.normal();
    const bool one = r.chance(0.3);  // one document: full tiles occur
    for (int b = 0; b < p.requests; ++b)
      for (int64_t i = 0, id = 0; i < positions; ++i) {
        documents[b * positions + i] = static_cast<int32_t>(id);
        if (!one && r.chance(0.03)) ++id;
      }
    for (fajit_tensor& t : tensors) std::fill_n(t.sizes, FAJIT_MAX_RANK, int64_t{1});
    set(FUZZ_SLOT_BIAS, bias.data(), {p.heads, bias_size});
    set(FUZZ_SLOT_SINK, sink.data(), {p.heads});
    set(FUZZ_SLOT_GATE, gate.data(), {p.heads});
    set(FUZZ_SLOT_DOCUMENTS, documents.data(), {p.requests, positions});
    for (int i = 0; i < FUZZ_NUM_TABLES; ++i) add_tables(p, i);
    scalars[FUZZ_SCALAR_WINDOW] = static_cast<uint64_t>(window);
    std::memcpy(&scalars[FUZZ_SCALAR_CAP], &cap, 8);
  }
  ~Params() {
    for (Exact<int32_t>* table : tables) delete table;
  }

  void set(size_t slot, const void* data, std::vector<int64_t> sizes) {
    fajit_tensor& t = tensors[slot];
    t.ptr = data;
    int64_t stride = 1;
    for (size_t d = sizes.size(); d-- > 0;) {
      t.sizes[d] = sizes[d];
      t.strides[d] = stride;
      stride *= sizes[d];
    }
  }

  // The lo and hi tables of `documents` along positions; empty for short dims, as the host has
  // them.
  void add_tables(const Problem& p, int index) {
    const size_t slot = FUZZ_NUM_TENSORS + 2 * static_cast<size_t>(index);
    if (positions < kMinTableLength) {
      set(slot, nullptr, {0});
      set(slot + 1, nullptr, {0});
      return;
    }
    const int64_t blocks = (positions + kTableBlock - 1) / kTableBlock;
    auto* lo = new Exact<int32_t>(p.requests * blocks, INT32_MAX);
    auto* hi = new Exact<int32_t>(p.requests * blocks, INT32_MIN);
    tables.push_back(lo);
    tables.push_back(hi);
    for (int b = 0; b < p.requests; ++b)
      for (int64_t i = 0; i < positions; ++i) {
        const int64_t at = b * blocks + i / kTableBlock;
        (*lo)[at] = std::min((*lo)[at], documents[b * positions + i]);
        (*hi)[at] = std::max((*hi)[at], documents[b * positions + i]);
      }
    set(slot, lo->data(), {p.requests, blocks});
    set(slot + 1, hi->data(), {p.requests, blocks});
  }

  bool mask(int b, int64_t q, int64_t k) {
    return std::llabs(q - k) < window &&
           documents[b * positions + q] == documents[b * positions + k];
  }
  double score(double s, int h, int64_t q, int64_t k) {
    const int64_t i = k - q;
    return cap * std::tanh(s / cap) + bias[h * bias_size + (i < 0 ? i + bias_size : i)];
  }
};

// Cuts [0, n) into one to `most` ranges, some of them possibly empty.
std::vector<int32_t> cuts(Random& r, int32_t n, int most) {
  std::vector<int32_t> at{0, n};
  for (int64_t i = r.between(0, most - 1); i > 0; --i)
    at.push_back(static_cast<int32_t>(r.between(0, n)));
  std::sort(at.begin(), at.end());
  return at;
}

struct Work {
  std::vector<fajit_work> items;
  std::vector<fajit_merge_work> merges;
  int32_t partial_rows = 0;

  Work(Random& r, const Problem& p) {
    const bool planned = r.chance(0.5);  // heads of a request are cut alike and follow each other
    for (int b = 0; b < p.requests; ++b) {
      const Random first = r;
      for (int kv_h = 0; kv_h < p.kv_heads; ++kv_h) {
        if (planned) r = first;
        const int count = r.chance(0.7) ? p.group : 1;
        for (int h = kv_h * p.group; h < (kv_h + 1) * p.group; h += count) add(r, p, b, h, count);
      }
    }
    // Padding, as plans with limits have it.
    for (int64_t i = r.between(0, 2); i > 0; --i) items.push_back({-1, 0, 0, 0, 0, 0, 0, -1});
    if (r.chance(0.3)) merges.push_back({-1, 0, 0, 0, 0, 0, 0, 0});
    for (size_t i = planned ? 0 : items.size(); i > 1; --i)  // the order of items must not matter
      std::swap(items[i - 1],
                items[static_cast<size_t>(r.between(0, static_cast<int64_t>(i) - 1))]);
  }

  void add(Random& r, const Problem& p, int b, int head, int head_count) {
    const auto index = static_cast<size_t>(b);
    const std::vector<int32_t> rows = cuts(r, p.q_len[index] * head_count, 4);
    for (size_t i = 0; i + 1 < rows.size(); ++i) {
      if (rows[i] == rows[i + 1]) continue;
      fajit_work item{b, head, head_count, rows[i], rows[i + 1], 0, p.kv_len[index], -1};
      if (r.chance(0.6)) {
        items.push_back(item);
        continue;
      }
      const std::vector<int32_t> keys = cuts(r, p.kv_len[index], 5);
      const auto splits = static_cast<int32_t>(keys.size()) - 1;
      merges.push_back({b, head, head_count, rows[i], rows[i + 1], partial_rows, splits, 0});
      for (int32_t s = 0; s < splits; ++s) {
        item.kv_begin = keys[static_cast<size_t>(s)];
        item.kv_end = keys[static_cast<size_t>(s) + 1];
        item.partial = partial_rows;
        items.push_back(item);
        partial_rows += item.row_end - item.row_begin;
      }
    }
  }
};

// Gives each worker a list of work. Two calls for each list may run at once; the later one computes
// the items that the other leaves.
int run_lists(Random& r, fajit_args a) {
  std::vector<int32_t> lists = cuts(r, a.num_work, 6);
  std::vector<int32_t> cursors(lists.size() - 1, 0);
  a.worker_indptr = lists.data();
  a.cursors = cursors.data();
  a.num_workers = static_cast<int32_t>(cursors.size());
  std::atomic<int> status{FAJIT_OK};
#pragma omp parallel for num_threads(a.num_threads) schedule(dynamic)
  for (int32_t call = 0; call < 2 * a.num_workers; ++call) {
    fajit_args mine = a;
    mine.worker = call / 2;
    if (const int failed = fajit_attention(&mine)) status = failed;
  }
  return status;
}

// Makes merges read listed states instead of consecutive ones; returns the list.
std::vector<int32_t> listed_sources(std::vector<fajit_merge_work>& merges) {
  std::vector<int32_t> sources;
  for (fajit_merge_work& item : merges) {
    const int32_t first = item.first_partial;
    item.first_partial = static_cast<int32_t>(sources.size());
    for (int32_t i = 0; i < item.num_splits; ++i)
      sources.push_back(first + i * (item.row_end - item.row_begin));
  }
  return sources;
}

void check_row(Params& params, const Problem& p, int b, int h, int64_t row, bool partial,
               const std::vector<float>& q, const Layout& kl, Exact<Item>& k, const Layout& vl,
               Exact<Item>& v, float scale, const float* out, const float* lse) {
  const auto index = static_cast<size_t>(b);
  const int kv_h = h / p.group;
  const int64_t q_idx = p.q_offset[index] + row;
  std::vector<double> scores;
  std::vector<int32_t> keys;
  double top = -kInf;
  for (int32_t j = 0; j < p.kv_len[index]; ++j) {
    if (!params.mask(b, q_idx, j)) continue;
    double dot = 0;
    for (int d = 0; d < FUZZ_HEAD_DIM; ++d)
      dot += double{q[static_cast<size_t>(d)]} * to_float(k[kl.at(b, kv_h, j) + d]);
    scores.push_back(params.score(dot * scale, h, q_idx, j));
    keys.push_back(j);
    top = std::max(top, scores.back());
  }
  const double sink = partial ? -kInf : params.sink[h];
  const double base = std::max(top, sink);
  double sum = base == -kInf ? 0 : std::exp(sink - base);
  std::vector<double> expected(FUZZ_HEAD_DIM_V, 0.0);
  for (size_t i = 0; i < keys.size(); ++i) {
    const double weight = std::exp(scores[i] - base);
    sum += weight;
    for (int d = 0; d < FUZZ_HEAD_DIM_V; ++d)
      expected[static_cast<size_t>(d)] += weight * to_float(v[vl.at(b, kv_h, keys[i]) + d]);
  }
  for (int d = 0; d < FUZZ_HEAD_DIM_V; ++d) {
    double y = sum > 0 ? expected[static_cast<size_t>(d)] / sum : 0.0;
    if (!partial) y *= params.gate[h];
    if (!(std::fabs(out[d] - y) <= kTolerance * (1 + std::fabs(y)))) fail("out", row, d, out[d], y);
  }
  if (lse != nullptr) {
    const double y = sum > 0 ? base + std::log(sum) : -kInf;
    const bool same =
        y == -kInf ? *lse == -kInf : std::fabs(*lse - y) <= kTolerance * (1 + std::fabs(y));
    if (!same) fail("lse", row, h, *lse, y);
  }
}

void check_classify(Random& r, const Problem& p, Params& params, const fajit_args& args) {
  const int b = static_cast<int>(r.between(0, p.requests - 1));
  fajit_classify_args c{};
  c.args = &args;
  c.request = b;
  c.head_end = p.heads;
  c.q_begin = static_cast<int32_t>(r.between(0, params.positions - 1));
  c.q_end = static_cast<int32_t>(r.between(c.q_begin, params.positions));
  c.kv_begin = static_cast<int32_t>(r.between(0, params.positions - 1));
  c.kv_end = static_cast<int32_t>(r.between(c.kv_begin, params.positions));
  c.tile_q = static_cast<int32_t>(r.between(1, 64));
  c.tile_kv = static_cast<int32_t>(r.between(1, 64));
  const int64_t rows = (c.q_end - c.q_begin + c.tile_q - 1) / c.tile_q;
  const int64_t columns = (c.kv_end - c.kv_begin + c.tile_kv - 1) / c.tile_kv;
  Exact<uint8_t> states(rows * columns, 99);
  c.states = states.data();
  if (fajit_classify(&c) != FAJIT_OK) fail("classify refused");
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      bool any = false, all = true;
      for (int64_t q = c.q_begin + i * c.tile_q;
           q < std::min<int64_t>(c.q_end, c.q_begin + (i + 1) * c.tile_q); ++q)
        for (int64_t k = c.kv_begin + j * c.tile_kv;
             k < std::min<int64_t>(c.kv_end, c.kv_begin + (j + 1) * c.tile_kv); ++k) {
          const bool kept = params.mask(b, q, k);
          any |= kept;
          all &= kept;
        }
      const int state = states[i * columns + j];
      if (state > FAJIT_TILE_FULL || (state == FAJIT_TILE_EMPTY && any) ||
          (state == FAJIT_TILE_FULL && !all))
        fail("classify is not sound", i, j, state);
    }
}

// Wrong arguments are refused with a status. A refused call writes nothing: `out` keeps its
// pattern.
void check_refusals(const fajit_args& good, bool has_work, bool has_merges) {
  const auto expect = [](int got, int want, const char* what) {
    if (got != want) fail(what, got, want);
  };
  expect(fajit_attention(nullptr), FAJIT_BAD_ABI, "null args");
  expect(fajit_merge(nullptr), FAJIT_BAD_ABI, "null args of merge");
  expect(fajit_classify(nullptr), FAJIT_BAD_ARGS, "null args of classify");
  fajit_args bad = good;
  bad.abi_version += 1;
  expect(fajit_attention(&bad), FAJIT_BAD_ABI, "abi_version");
  expect(fajit_merge(&bad), FAJIT_BAD_ABI, "abi_version of merge");
  bad = good;
  bad.args_bytes -= 8;
  expect(fajit_attention(&bad), FAJIT_BAD_ABI, "args_bytes");
  for (int32_t fajit_args::* field : {&fajit_args::head_dim, &fajit_args::head_dim_v}) {
    bad = good;
    bad.*field += 1;
    expect(fajit_attention(&bad), FAJIT_BAD_ARGS, "head dims");
    expect(fajit_merge(&bad), FAJIT_BAD_ARGS, "head dims of merge");
  }
  bad = good;
  bad.num_kv_heads = 0;
  expect(fajit_attention(&bad), FAJIT_BAD_ARGS, "num_kv_heads=0");
  bad = good;
  bad.flags |= FAJIT_WRITE_LSE;
  bad.lse = nullptr;
  expect(fajit_attention(&bad), FAJIT_BAD_ARGS, "lse is null");
  if (has_work) {
    bad = good;
    bad.q = nullptr;
    expect(fajit_attention(&bad), FAJIT_BAD_ARGS, "q is null");
    bad = good;
    bad.work = nullptr;
    expect(fajit_attention(&bad), FAJIT_BAD_ARGS, "work is null");
  }
  if (has_merges) {
    bad = good;
    bad.partial_out = nullptr;
    expect(fajit_merge(&bad), FAJIT_BAD_ARGS, "partial_out is null");
    bad = good;
    bad.merge_work = nullptr;
    expect(fajit_merge(&bad), FAJIT_BAD_ARGS, "merge_work is null");
  }
}

void once(Random& r) {
  const Problem p(r);
  Params params(r, p);
  Work work(r, p);
  const bool packed_q = r.chance(0.5), packed_kv = r.chance(0.5);
  const Layout ql(r, p.q_len, p.heads, FUZZ_HEAD_DIM, packed_q);
  const Layout ol(r, p.q_len, p.heads, FUZZ_HEAD_DIM_V, packed_q);
  const Layout ll(r, p.q_len, p.heads, 1, packed_q);
  const Layout kl(r, p.kv_len, p.kv_heads, FUZZ_HEAD_DIM, packed_kv);
  const Layout vl(r, p.kv_len, p.kv_heads, FUZZ_HEAD_DIM_V, packed_kv);
  Exact<Item> q(ql.count, from_float(kNan)), k(kl.count, from_float(kNan)),
      v(vl.count, from_float(kNan));

  for (int b = 0; b < p.requests; ++b) {
    const auto index = static_cast<size_t>(b);
    for (int h = 0; h < p.heads; ++h)
      for (int32_t i = 0; i < p.q_len[index]; ++i)
        for (int d = 0; d < FUZZ_HEAD_DIM; ++d) q[ql.at(b, h, i) + d] = from_float(r.normal());
    for (int32_t j = 0; j < p.kv_len[index]; ++j) {
      bool seen = false;
      for (int32_t i = 0; i < p.q_len[index] && !seen; ++i)
        seen = params.mask(b, p.q_offset[index] + i, j);
      for (int h = 0; h < p.kv_heads; ++h) {
        // A key that no row sees keeps its NaN; values are always finite.
        for (int d = 0; d < FUZZ_HEAD_DIM && seen; ++d)
          k[kl.at(b, h, j) + d] = from_float(r.normal());
        for (int d = 0; d < FUZZ_HEAD_DIM_V; ++d) v[vl.at(b, h, j) + d] = from_float(r.normal());
      }
    }
  }

  const bool partial = r.chance(0.3), with_lse = r.chance(0.6);
  const bool wide = partial || !FUZZ_BF16;  // fp32 output
  Exact<uint32_t> out32(wide ? ol.count : 0, kPattern);
  Exact<uint16_t> out16(wide ? 0 : ol.count, static_cast<uint16_t>(kPattern));
  Exact<float> lse(with_lse ? ll.count : 0, kNan);
  Exact<float> partial_out(int64_t{work.partial_rows} * FUZZ_HEAD_DIM_V, kNan);
  Exact<float> partial_lse(work.partial_rows, kNan);

  fajit_args a{};
  a.abi_version = FAJIT_ABI_VERSION;
  a.args_bytes = sizeof(fajit_args);
  a.q = q.data() + ql.offset;
  a.k = k.data() + kl.offset;
  a.v = v.data() + vl.offset;
  a.out = wide ? static_cast<void*>(out32.data() + ol.offset)
               : static_cast<void*>(out16.data() + ol.offset);
  a.lse = with_lse ? lse.data() + ll.offset : nullptr;
  for (int i = 0; i < 3; ++i) {
    a.q_stride[i] = ql.stride[i];
    a.k_stride[i] = kl.stride[i];
    a.v_stride[i] = vl.stride[i];
    a.out_stride[i] = ol.stride[i];
    a.lse_stride[i] = ll.stride[i];
  }
  a.num_requests = p.requests;
  a.num_q_heads = p.heads;
  a.num_kv_heads = p.kv_heads;
  a.head_dim = FUZZ_HEAD_DIM;
  a.head_dim_v = FUZZ_HEAD_DIM_V;
  a.flags = (with_lse ? FAJIT_WRITE_LSE : 0) | (partial ? FAJIT_PARTIAL : 0);
  a.scale = 0.2f;
  a.num_threads = static_cast<int32_t>(r.between(1, 3));
  a.q_len = p.q_len.data();
  a.kv_len = p.kv_len.data();
  a.q_row0 = ql.row0.data();
  a.kv_row0 = kl.row0.data();
  a.q_offset = p.q_offset.data();
  a.q_token0 = a.kv_token0 = p.token0.data();
  a.tensors = params.tensors.data();
  a.scalars = params.scalars;
  a.num_tensors = static_cast<int32_t>(params.tensors.size());
  a.num_scalars = 2;
  a.work = work.items.data();
  a.merge_work = work.merges.data();
  a.num_work = static_cast<int32_t>(work.items.size());
  a.num_merge_work = static_cast<int32_t>(work.merges.size());
  a.partial_out = partial_out.data();
  a.partial_lse = partial_lse.data();

  check_refusals(a, !work.items.empty(), !work.merges.empty());
  check_classify(r, p, params, a);
  const bool by_worker = a.num_work > 0 && r.chance(0.5);
  const int status = by_worker ? run_lists(r, a) : fajit_attention(&a);
  if (status != FAJIT_OK) fail("attention refused", status, a.num_work);
  std::vector<int32_t> sources;
  if (r.chance(0.5)) {
    sources = listed_sources(work.merges);
    a.merge_sources = sources.data();
  }
  if (const int refused = fajit_merge(&a)) fail("merge refused", refused, a.num_merge_work);

  std::vector<bool> owned(static_cast<size_t>(ol.count), false);
  for (int b = 0; b < p.requests; ++b)
    for (int h = 0; h < p.heads; ++h)
      for (int32_t i = 0; i < p.q_len[static_cast<size_t>(b)]; ++i) {
        std::vector<float> query, got;
        for (int d = 0; d < FUZZ_HEAD_DIM; ++d) query.push_back(to_float(q[ql.at(b, h, i) + d]));
        for (int d = 0; d < FUZZ_HEAD_DIM_V; ++d) {
          const int64_t at = ol.at(b, h, i) + d;
          owned[static_cast<size_t>(at)] = true;
          float x;
          if (wide) {
            std::memcpy(&x, &out32[at], 4);
          } else {
            const uint32_t bits = uint32_t{out16[at]} << 16;
            std::memcpy(&x, &bits, 4);
          }
          got.push_back(x);
        }
        check_row(params, p, b, h, i, partial, query, kl, k, vl, v, a.scale, got.data(),
                  with_lse ? &lse[ll.at(b, h, i)] : nullptr);
      }
  for (int64_t i = 0; i < ol.count; ++i)
    if (!owned[static_cast<size_t>(i)] &&
        (wide ? out32[i] != kPattern : out16[i] != static_cast<uint16_t>(kPattern)))
      fail("a gap of the output was written", i);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
#if FUZZ_TILES
  if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) fail("no permission to use AMX tiles");
#endif
  const std::string version = "\"abi_version\":" + std::to_string(FAJIT_ABI_VERSION);
  if (std::strstr(fajit_describe(), version.c_str()) == nullptr) fail("describe");
  const auto begin = std::chrono::steady_clock::now();
  const double seconds = std::atof(argv[2]);
  uint64_t seed = std::strtoull(argv[1], nullptr, 10);
  int count = 0;
  for (;; ++seed, ++count) {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    if (spent.count() > seconds) break;
    Random random{std::mt19937_64(seed)};
    std::fprintf(stderr, "seed %llu\r", static_cast<unsigned long long>(seed));
    once(random);
  }
  std::printf("%d problems\n", count);
  return 0;
}
