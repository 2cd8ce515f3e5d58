// Lengths of requests and places of rows and keys inside hooks: fa.q_len, kv_len, q_row, kv_slot.
//
// The request may be a scalar or, where rows of several requests lie on lanes, a vector.
#pragma once
#include <fajit/cpu/hook_ops.h>

namespace fajit {
namespace ops {

FAJIT_INLINE int32_t request(const Context& c, int64_t b) {
  const int32_t n = c.args->num_requests;
  b = b < 0 ? b + n : b;
  return b < 0 || b >= n ? 0 : int32_t(b);
}
// What f gives for a request, or for that of each lane (rows of several requests on lanes).
template <class B, class F>
FAJIT_INLINE auto of_request(const Context& c, B b, F f) {
  if constexpr (is_vector<B>) {
    Vector<decltype(f(0))> r;
    for (int i = 0; i < FAJIT_LANES; ++i) r[i] = f(request(c, b[i]));
    return r;
  } else {
    return f(request(c, b));
  }
}
template <class I>
FAJIT_INLINE auto wide_index(I i) {
  if constexpr (is_vector<I>)
    return cast_index(i);
  else
    return int64_t(i);
}
template <class B>
FAJIT_INLINE auto q_len(const Context& c, B b) {
  return of_request(c, b, [&](int32_t r) { return c.args->q_len[r]; });
}
template <class B>
FAJIT_INLINE auto kv_len(const Context& c, B b) {
  return of_request(c, b, [&](int32_t r) { return c.args->kv_len[r]; });
}
template <class B, class Q>
FAJIT_INLINE auto q_row(const Context& c, B b, Q q_idx) {
  const auto base = of_request(
      c, b, [&](int32_t r) { return int64_t(c.args->q_token0[r]) - c.args->q_offset[r]; });
  return add(wide_index(q_idx), base);
}
// The slot of a key that exists, where keys are paged; else 0.
FAJIT_INLINE int64_t paged_slot(const Context& c, int32_t r, int64_t kv_idx) {
  const fajit_args& a = *c.args;
  const int64_t first = a.kv_first == nullptr ? 0 : a.kv_first[r];
  if (kv_idx < first || kv_idx >= a.kv_len[r]) return 0;
  const int32_t n = int32_t(kv_idx - first), page = n / a.page_size;
  const int32_t named = a.page_indices[a.page_indptr[r] + page];
  return int64_t(named >= 0 && named < a.num_pages ? named : 0) * a.page_size + n % a.page_size;
}
template <class B, class K>
FAJIT_INLINE auto kv_slot(const Context& c, B b, K kv_idx) {
  // Whose storage the key lies in: that of the keys' request where rows of several share them.
  const auto owner = [&](int64_t r) { return c.kv_request >= 0 ? c.kv_request : request(c, r); };
  if (c.args->page_indptr != nullptr)
    return each_lane2(wide_index(b), wide_index(kv_idx),
                      [&](int64_t r, int64_t k) { return paged_slot(c, owner(r), k); });
  const auto base =
      of_request(c, b, [&](int32_t r) { return int64_t(c.args->kv_token0[owner(r)]); });
  return add(wide_index(kv_idx), base);
}

}  // namespace ops
}  // namespace fajit
