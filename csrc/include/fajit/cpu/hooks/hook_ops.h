// The functions that rendered hooks call on CPUs: the operations of fajit/hook_ops.h on scalars and
// vectors, loads of params, slots of keys, and reductions over a row.
#pragma once
#include <fajit/cpu/hooks/hook_vectors.h>
#include <fajit/cpu/hooks/pair_squares.h>
#include <fajit/cpu/vector/fast_math.h>
#include <fajit/cpu/vector/load_row.h>
#include <fajit/hook_ops.h>

namespace fajit {
namespace ops {

// --- loads ---------------------------------------------------------------------------------------

// Half of the lanes of a vl, which fill a register: gcc 12 computes comparisons and choices of
// wider vectors lane by lane.
typedef int64_t half_l __attribute__((vector_size(sizeof(vl) / 2)));
template <class F> FAJIT_INLINE vl each_half(vl x, F f) {
  half_l half[2];
  __builtin_memcpy(half, &x, sizeof x);
  half[0] = f(half[0]);
  half[1] = f(half[1]);
  __builtin_memcpy(&x, half, sizeof x);
  return x;
}

// The element offset of one index: negative indices wrap, others are clamped into the tensor.
template <bool Unit, class I> FAJIT_INLINE auto offset(const fajit_tensor& t, int dim, I index) {
  const int64_t size = t.sizes[dim], stride = Unit ? 1 : t.strides[dim];
  if constexpr (is_vector<I>) {
    return each_half(cast<dt::i32, dt::i64>(index), [=](half_l i) __attribute__((always_inline)) {
      i += i < 0 ? half_l{} + size : half_l{};
      i = i < size ? i : half_l{} + (size - 1);
      return half_l((i < 0 ? half_l{} : i) * stride);
    });
  } else {
    int64_t i = int64_t(index);
    i = i < 0 ? i + size : i;
    i = i > size - 1 ? size - 1 : i;
    return (i < 0 ? 0 : i) * stride;
  }
}

// The 32-bit entries of `p` at 64-bit offsets. Gathers need no mask: offsets are clamped, so every
// lane is readable, also those of pairs that are masked off.
template <class S> FAJIT_INLINE auto gather32(const S* p, vl offset) {
  static_assert(sizeof(S) == 4);
  Vector<S> r;
#if FAJIT_AVX == 512
  typedef float half_f __attribute__((vector_size(32)));
  typedef long long half_l __attribute__((vector_size(64)));
  half_l o[2];
  __builtin_memcpy(o, &offset, sizeof o);
  half_f lo = __builtin_ia32_gatherdiv16sf(half_f{}, p, o[0], -1, 4);
  half_f hi = __builtin_ia32_gatherdiv16sf(half_f{}, p, o[1], -1, 4);
  __builtin_memcpy(&r, &lo, 32);
  __builtin_memcpy(reinterpret_cast<char*>(&r) + 32, &hi, 32);
#else
  for (int i = 0; i < FAJIT_LANES; ++i) r[i] = p[offset[i]];
#endif
  return r;
}

// A param without elements (numel 0) has no readable address; its loads give 0.
template <class D, class O> FAJIT_INLINE auto load(const fajit_tensor& t, O offset) {
  const auto element = [&](int64_t at) { return load_scalar<D>(t, at); };
  using R = decltype(each_lane(element, offset));
  if (t.ptr == nullptr) return R{};
  if constexpr (is_vector<O>) {
    if constexpr (same<D, dt::f32>) return gather32(static_cast<const float*>(t.ptr), offset);
    if constexpr (same<D, dt::i32>) return gather32(static_cast<const int32_t*>(t.ptr), offset);
  }
  return each_lane(element, offset);
}

// The element at the sum of the offsets of a row and of a key, which indexes `dim`, whose stride is
// 1. A slot of `c.squares` has one param and one set of rows.
template <class D, int Slot, class R, class K>
FAJIT_INLINE auto load_pair(const Context& c, const fajit_tensor& t, [[maybe_unused]] int dim,
                            R row, K key) {
  if constexpr (same<R, vl> && !is_vector<K>) {
    decltype(load<D>(t, row)) r;
    static_assert(sizeof(r) == sizeof(vi));
    const int64_t size = t.sizes[dim];
    if (c.squares != nullptr && size >= kLanes && t.ptr != nullptr) {
      PairSquares& squares = *c.squares;
      if (uint64_t(key - squares.first[Slot]) >= kLanes)
        read_square<D, Slot>(t, size, row, key, squares);
      const vi words = fajit::load<vi>(squares.words[Slot] + (key - squares.first[Slot]) * kLanes);
      __builtin_memcpy(&r, &words, sizeof r);
      return r;
    }
  }
  return load<D>(t, add(row, key));
}

// The element `i` steps along `dim` after `offset`.
template <class D, class O>
FAJIT_INLINE auto load_at(const fajit_tensor& t, O offset, int dim, int i) {
  return load<D>(t, O(offset + i * t.strides[dim]));
}

// --- slots ---------------------------------------------------------------------------------------

// The slot of key `kv_idx` of request `r` in paged storage; 0 if there is no such key.
FAJIT_INLINE int64_t paged_slot(const Context& c, int32_t r, int64_t kv_idx) {
  const fajit_args& a = *c.args;
  const int64_t first = a.kv_first == nullptr ? 0 : a.kv_first[r];
  if (kv_idx < first || kv_idx >= a.kv_len[r]) return 0;
  const int32_t n = int32_t(kv_idx - first), page = n / a.page_size;
  const int32_t named = a.page_indices[a.page_indptr[r] + page];
  // An invalid page index must not give an invalid slot.
  return int64_t(named >= 0 && named < a.num_pages ? named : 0) * a.page_size + n % a.page_size;
}
// The slots of a vector of keys of one request, as paged_slot has them.
FAJIT_INLINE vl paged_slots(const Context& c, int32_t r, vi kv_idx) {
  const fajit_args& a = *c.args;
  const auto wide = [](vi x) { return __builtin_convertvector(x, vl); };
  const int32_t first = a.kv_first == nullptr ? 0 : a.kv_first[r], size = a.page_size;
  const int32_t* const pages = a.page_indices + a.page_indptr[r];
  const int shift = __builtin_ctz(size);
  const bool is_power = size == 1 << shift;
  const vi there = (kv_idx >= first) & (kv_idx < a.kv_len[r]);
  if (!any(there)) return vl{};
  // Most often they follow each other in one page.
  if (all(there & (kv_idx == kv_idx[0] + iota()))) {
    const int32_t least = kv_idx[0] - first;
    const int32_t page = is_power ? least >> shift : least / size, at = least - page * size;
    if (at + FAJIT_LANES <= size) {
      const int32_t named = pages[page];
      const int64_t valid = named >= 0 && named < a.num_pages ? named : 0;
      return wide(at + iota()) + valid * size;
    }
  }
  const vi n = there ? kv_idx - first : vi{};
  const vi page = is_power ? n >> shift : truncdiv_vi(n, vi{} + size);
  const vi named = gather32(pages, wide(page));
  const vi valid = (named >= 0) & (named < a.num_pages) ? named : vi{};
  return wide(there ? valid : vi{}) * size + wide(there ? n - page * size : vi{});
}
template <class B, class K>
FAJIT_INLINE auto kv_slot(const Context& c, B b, K kv_idx) {
  // The request whose storage holds the key: where rows of several requests share keys, that of the
  // keys.
  const auto owner = [&](int64_t r) { return c.kv_request >= 0 ? c.kv_request : request(c, r); };
  if (c.args->page_indptr != nullptr) {
    if constexpr (same<K, vi> && !is_vector<B>) return paged_slots(c, owner(b), kv_idx);
    else
      return each_lane([&](int64_t r, int64_t k) { return paged_slot(c, owner(r), k); },
                       cast<dt::i32, dt::i64>(b), cast<dt::i32, dt::i64>(kv_idx));
  }
  const auto of_request = [&](int64_t r) { return int64_t{c.args->kv_token0[owner(r)]}; };
  return add(cast<dt::i32, dt::i64>(kv_idx), each_lane(of_request, b));
}

// --- reductions over a row -----------------------------------------------------------------------

// Sixteen partial results: no serial dependency in the loop, and a fixed order of operations.
template <class T, int N, class Join, class F> FAJIT_INLINE T reduce(Join join, T first, F f) {
  T part[16];
  for (int j = 0; j < 16; ++j) part[j] = first;
  int i = 0;
  for (; i + 16 <= N; i += 16)
    for (int j = 0; j < 16; ++j) part[j] = join(part[j], f(i + j));
  for (int j = 0; i + j < N; ++j) part[j] = join(part[j], f(i + j));
  for (int width = 8; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) part[j] = join(part[j], part[j + width]);
  return part[0];
}

template <class T, int N, class F> FAJIT_INLINE T reduce_sum(F f) {
  return reduce<T, N>([](T a, T b) { return T(add(a, b)); }, T(0), f);
}
template <class T, int N, class F> FAJIT_INLINE T reduce_prod(F f) {
  return reduce<T, N>([](T a, T b) { return T(mul(a, b)); }, T(1), f);
}
template <class T, int N, class F> FAJIT_INLINE T reduce_amax(F f) {
  return reduce<T, N>([](T a, T b) { return T(maximum(a, b)); }, f(0), f);
}
template <class T, int N, class F> FAJIT_INLINE T reduce_amin(F f) {
  return reduce<T, N>([](T a, T b) { return T(minimum(a, b)); }, f(0), f);
}
template <class T, int N, class F> FAJIT_INLINE T reduce_any(F f) {
  return reduce<T, N>([](T a, T b) { return T(a | b); }, T(false), f);
}
template <class T, int N, class F> FAJIT_INLINE T reduce_all(F f) {
  return reduce<T, N>([](T a, T b) { return T(a & b); }, T(true), f);
}

}  // namespace ops
}  // namespace fajit
