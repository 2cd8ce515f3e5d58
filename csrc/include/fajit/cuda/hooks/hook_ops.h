// The functions that rendered hooks call on CUDA: the operations of fajit/hook_ops.h on scalars (a
// thread holds one value), divisions by divisors that the host prepared, loads of params, and slots
// of keys.
#pragma once
#include <fajit/cuda/hooks/math.h>
#include <fajit/cuda/hooks/soft_cap.h>
#include <fajit/cuda/hooks/storage.h>
#include <fajit/hook_ops.h>

namespace fajit {
namespace ops {

// --- divisions -----------------------------------------------------------------------------------

// By a divisor that the host prepared; a quotient takes about ten instructions.
FAJIT_FN int32_t truncdiv(int32_t a, const Divisor& d) {
  const uint32_t q = d.divide(a < 0 ? 0u - uint32_t(a) : uint32_t(a));
  return int32_t((a ^ d.value) < 0 ? 0u - q : q);
}
FAJIT_FN int32_t floordiv(int32_t a, const Divisor& d) {
  // The floor of a negative quotient -n / d is -1 - (n - 1) / d.
  const bool negative = a != 0 && (a ^ d.value) < 0;
  const uint32_t n = a < 0 ? 0u - uint32_t(a) : uint32_t(a);
  const uint32_t q = d.divide(negative ? n - 1 : n);
  return d.value != 0 ? int32_t(negative ? ~q : q) : 0;
}
FAJIT_FN int32_t remainder(int32_t a, const Divisor& d) {
  const uint32_t m = uint32_t(a) - uint32_t(floordiv(a, d)) * uint32_t(d.value);
  return d.value != 0 ? int32_t(m) : 0;
}
FAJIT_FN int32_t fmod(int32_t a, const Divisor& d) {
  const uint32_t m = uint32_t(a) - uint32_t(truncdiv(a, d)) * uint32_t(d.value);
  return d.value != 0 ? int32_t(m) : 0;
}

// --- terms of scores -----------------------------------------------------------------------------

// x * factor; the greatest number instead of infinity where both are finite, so that 0 times the
// result is 0: a penalty like finfo.min, of keys that a mask tensor does not select.
FAJIT_FN float scaled(float x, float factor) {
  const float product = x * factor, most = as_float(0x7f7fffff);
  const bool exceeds = __builtin_fabsf(product) > most && __builtin_fabsf(x) <= most &&
                       __builtin_fabsf(factor) <= most;
  return exceeds ? __builtin_copysignf(most, product) : product;
}

// The factor of a distance, at most 2^20 unless it is infinite. Where a tile has up to 128 keys,
// the rounding of the term at its first key is then at most 2^4 at all others: without the bound
// weights would be infinite. Beyond it the nearest keys have all the weight in any case.
FAJIT_FN float slope(float x) {
  const float size = __builtin_fabsf(x), most = 0x1p20f;
  return size > most && size <= as_float(0x7f7fffff) ? __builtin_copysignf(most, x) : x;
}

// -x where `by` is negative, else x.
FAJIT_FN float flipped(float x, int32_t by) { return as_float(as_int(x) ^ (by & INT32_MIN)); }

// --- loads ---------------------------------------------------------------------------------------

// The element offset of one index: negative indices wrap, others are clamped into the tensor.
// 32-bit indices are wrapped and clamped in 32 bits; a dim beyond 2^31 - 1 is clipped there.
// Natural: the index is not negative. Offsets along a unit stride stay narrow.
template <bool Unit, bool Natural = false, class I>
FAJIT_FN auto offset(const fajit_tensor& t, int dim, I index) {
  using N = decltype(index + 0);  // bool counts as int
  constexpr int64_t kMost = sizeof(N) == 4 ? INT32_MAX : INT64_MAX;
  const N size = N(t.sizes[dim] < kMost ? t.sizes[dim] : kMost);
  N i = N(index);
  if constexpr (Natural) {  // a dim of size 0 has no element to clamp to, and is not read
    i = Unsigned<N>(i) < Unsigned<N>(size - 1) ? i : size - 1;
  } else {
    i = i < 0 ? i + size : i;
    i = i < size ? i : size - 1;
    i = i < 0 ? 0 : i;
  }
  const Unsigned<N> place = Unsigned<N>(i);
  if constexpr (Unit) return place;
  else return int64_t(place) * t.strides[dim];
}

// The address of a param's first element, and the address `offset` elements further.
template <class D> FAJIT_FN auto place(const fajit_tensor& t) {
  return static_cast<const typename storage<D>::type*>(t.ptr);
}
template <class S, class O> FAJIT_FN const S* moved(const S* place, O offset) {
  return place + offset;
}

// The value of the element at `place`.
template <class D, class S> FAJIT_FN auto value_at(const S* place) {
  return from_storage<D>(load_global(place));
}

// The element at `place`. A param without elements (numel 0) has no readable address: it gives 0.
template <class D, class S> FAJIT_FN auto read(const fajit_tensor& t, const S* place) {
  using R = decltype(value_at<D>(place));
  return t.ptr == nullptr ? R{} : value_at<D>(place);
}
// The element `i` steps along `dim` after `p`.
template <class D, class S>
FAJIT_FN auto read_at(const fajit_tensor& t, const S* p, int dim, int i) {
  return read<D>(t, p + i * t.strides[dim]);
}

template <class D> FAJIT_FN auto load(const fajit_tensor& t, int64_t offset) {
  return read<D>(t, place<D>(t) + offset);
}

// --- slots ---------------------------------------------------------------------------------------

// The slot of key `kv_idx` of request `b`; in paged storage, 0 if there is no such key.
FAJIT_FN int64_t kv_slot(const Context& c, int64_t b, int64_t kv_idx, const Divisor& page_size) {
  const fajit_args& a = *c.args;
  const int32_t r = c.kv_request >= 0 ? c.kv_request : request(c, b);
  if (a.page_indptr == nullptr) return kv_idx + load_global(a.kv_token0 + r);
  const int32_t first = a.kv_first == nullptr ? 0 : load_global(a.kv_first + r);
  if (kv_idx < first || kv_idx >= load_global(a.kv_len + r)) return 0;
  const int32_t key = int32_t(kv_idx) - first;
  const int32_t page = int32_t(page_size.divide(uint32_t(key)));
  const int32_t named = load_global(a.page_indices + load_global(a.page_indptr + r) + page);
  // An invalid page index must not give an invalid slot.
  const int64_t held = uint32_t(named) < uint32_t(a.num_pages) ? named : 0;
  return held * page_size.value + (key - page * page_size.value);
}

}  // namespace ops
}  // namespace fajit
