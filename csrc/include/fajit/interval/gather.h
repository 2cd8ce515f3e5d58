// The minimum and maximum of a param tensor over a box of indices.
//
// A short range is read directly, a long one through a table that the host built: the minimum and
// the maximum of every 64 entries of one dim (variants/interval/range_tables.py). Both give the
// exact hull, so a table changes the time but not the result.
#pragma once
#include <fajit/interval/real.h>

namespace fajit {
namespace interval {

FAJIT_SHARED float half_bits(uint16_t x) {
  const uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = (x >> 10) & 31, fraction = x & 1023;
  if (exponent == 0) {
    const float tiny = float(fraction) * 0x1p-24f;
    return sign ? -tiny : tiny;
  }
  const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
  return __builtin_bit_cast(float, sign | (wide << 23) | (fraction << 13));
}
FAJIT_SHARED float bfloat_bits(uint16_t x) { return __builtin_bit_cast(float, uint32_t(x) << 16); }

// Storage types of elements: how they are read, and the type of their tables.
template <class T> struct Plain {
  using Storage = T;
  using Value = T;
  static FAJIT_SHARED Value value(T x) { return x; }
};
struct Half {
  using Storage = uint16_t;
  using Value = float;
  static FAJIT_SHARED Value value(uint16_t x) { return half_bits(x); }
};
struct BFloat {
  using Storage = uint16_t;
  using Value = float;
  static FAJIT_SHARED Value value(uint16_t x) { return bfloat_bits(x); }
};

template <class T> inline constexpr bool is_real = false;
template <> inline constexpr bool is_real<float> = true;
template <> inline constexpr bool is_real<double> = true;

// Running hull. A NaN sets `nan` and is otherwise skipped.
template <class T> struct Hull {
  T lo, hi;
  bool some, nan;
};

#if defined(__CUDA_ARCH__)
constexpr bool kVectorised = false;
#else
constexpr bool kVectorised = true;
#endif

// Adds n elements: from the first array minima, from the second maxima. They are the same array, or
// the lo and the hi table, whose loads then overlap.
template <class E, class T>
FAJIT_SHARED void scan(Hull<T>& hull, const typename E::Storage* least,
                       const typename E::Storage* most, int64_t stride, int64_t n) {
  if (n <= 0) return;
  if constexpr (is_real<T>) {
    FAJIT_ROLLED
    for (int64_t i = 0; i < n; ++i) {
      const T lo = E::value(least[i * stride]), hi = E::value(most[i * stride]);
      if (lo != lo || hi != hi) {
        hull.nan = true;
      } else {
        hull.lo = !hull.some || lo < hull.lo ? lo : hull.lo;
        hull.hi = !hull.some || hi > hull.hi ? hi : hull.hi;
        hull.some = true;
      }
    }
  } else {
    T lo = least[0], hi = most[0];
    if (kVectorised && stride == 1) {  // a separate loop, which the compiler vectorises
      for (int64_t i = 1; i < n; ++i) {
        lo = least[i] < lo ? least[i] : lo;
        hi = most[i] > hi ? most[i] : hi;
      }
    } else {
      FAJIT_ROLLED
      for (int64_t i = 1; i < n; ++i) {
        const T x = least[i * stride], y = most[i * stride];
        lo = x < lo ? x : lo;
        hi = y > hi ? y : hi;
      }
    }
    hull.lo = !hull.some || lo < hull.lo ? lo : hull.lo;
    hull.hi = !hull.some || hi > hull.hi ? hi : hull.hi;
    hull.some = true;
  }
}

// `scan` of adjacent bytes that are 0 or 1, eight at a time; another byte counts as 0 and 1, which
// proves nothing. The loop of `scan` is scalar up to a vector of 64 bytes.
template <class T>
FAJIT_SHARED void scan_bools(Hull<T>& hull, const uint8_t* x, int64_t n) {
  constexpr uint64_t ones = 0x0101010101010101;
  uint64_t any = 0, all = ones;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t word;
    __builtin_memcpy(&word, x + i, 8);
    any |= word;
    all &= word;
  }
  for (; i < n; ++i) {
    any |= x[i];
    all &= x[i] | ~uint64_t(0xff);
  }
  hull.lo = all == ones && (!hull.some || hull.lo != 0);
  hull.hi = any != 0 || (hull.some && hull.hi != 0);
  hull.some = true;
}

// Indices of a gather: negative ones wrap, then all are clamped into the dim.
FAJIT_SHARED Interval i_index(Interval x, int64_t size) {
  if (x.hi < 0) {
    x = {add_lo(x.lo, size), x.hi + size};
  } else if (x.lo < 0) {
    return {0, size - 1};
  }
  return {smaller(larger(x.lo, 0), size - 1), smaller(larger(x.hi, 0), size - 1)};
}

// The lo table of a dim, followed by the hi table, if the host built them. (A flag instead of a
// null pointer: with a pointer that may be null, device code would use generic loads.)
struct Tables {
  const fajit_tensor* lo;
  bool some;
  FAJIT_SHARED Tables(decltype(nullptr)) : lo(nullptr), some(false) {}
  FAJIT_SHARED Tables(const fajit_tensor* t, bool built) : lo(t), some(built) {}
};
FAJIT_SHARED Tables tables_at(const Context& c, int slot) {
  return {c.tensors + slot, slot + 1 < c.args->num_tensors};
}

// Calls f(offset in t, offset in a table) for each index tuple of the dims that are not scanned.
// False if there are too many.
template <int Rank, int Scan, class F>
FAJIT_SHARED bool each_row(const fajit_tensor& t, Tables tables, const Interval* at, F f) {
  int64_t rows = 1;
  for (int d = 0; d < Rank; ++d) {
    if (d == Scan) continue;
    const int64_t n = at[d].hi - at[d].lo + 1;
    if (n > kMaxRows || rows * n > kMaxRows) return false;
    rows *= n;
  }
  int64_t index[Rank > 0 ? Rank : 1] = {};
  FAJIT_ROLLED
  for (int64_t row = 0; row < rows; ++row) {
    int64_t offset = 0, table_offset = 0;
    for (int d = 0; d < Rank; ++d) {
      if (d == Scan) continue;
      offset += (at[d].lo + index[d]) * t.strides[d];
      if (tables.some) table_offset += (at[d].lo + index[d]) * tables.lo->strides[d];
    }
    f(offset, table_offset);
    for (int d = Rank - 1; d >= 0; --d) {
      if (d == Scan) continue;
      if (++index[d] < at[d].hi - at[d].lo + 1) break;
      index[d] = 0;
    }
  }
  return true;
}

// The hull of t[at]. `tables`: the lo and the hi table of dim Scan (none where they are not worth
// it). Returns false, without visiting any element, if the box is too large. Truth: whether 0 and
// not 0 are told apart alone.
template <class E, int Rank, int Scan, bool Truth = false>
FAJIT_SHARED bool gather_hull(Hull<typename E::Value>& hull, const fajit_tensor& t, Tables tables,
                              const Interval* index) {
  using V = typename E::Value;
  using S = typename E::Storage;
  Interval at[Rank > 0 ? Rank : 1];
  hull = {V(0), V(0), false, false};
  for (int d = 0; d < Rank; ++d) {
    if (t.sizes[d] == 0) {  // no element: loads give 0
      hull.some = true;
      return true;
    }
    at[d] = i_index(index[d], t.sizes[d]);
  }
  const S* data = static_cast<const S*>(t.ptr);
  if (data == nullptr) {
    hull.some = true;
    return true;
  }
  if constexpr (Rank == 0) {
    scan<E>(hull, data, data, 1, 1);
    return true;
  } else {
    const int64_t lo = at[Scan].lo, hi = at[Scan].hi, stride = t.strides[Scan];
    const bool by_table = tables.some && tables.lo->ptr && hi - lo + 1 > kScan;
    return each_row<Rank, Scan>(
        t, Tables{tables.lo, by_table}, at, [&](int64_t offset, int64_t table_offset) {
          const S* row = data + offset;
          if constexpr (Truth && kVectorised && sizeof(S) == 1) {
            if (hull.some && hull.lo == 0 && hull.hi != 0) return;  // no entry changes that
            if (!by_table && stride == 1) {
              scan_bools(hull, reinterpret_cast<const uint8_t*>(row) + lo, hi + 1 - lo);
              return;
            }
          }
          // The entries before the first whole block and after the last one, or all entries.
          const int64_t first = (lo + kBlock - 1) / kBlock, last = (hi + 1) / kBlock;
          FAJIT_ROLLED
          for (int end = 0; end < (by_table ? 2 : 1); ++end) {
            const int64_t begin = end == 0 ? lo : last * kBlock;
            const int64_t behind = end == 0 && by_table ? first * kBlock : hi + 1;
            const S* from = row + begin * stride;
            scan<E>(hull, from, from, stride, behind - begin);
          }
          if (!by_table) return;
          const int64_t step = tables.lo->strides[Scan], begin = table_offset + first * step;
          scan<Plain<V>>(hull, static_cast<const V*>(tables.lo[0].ptr) + begin,
                         static_cast<const V*>(tables.lo[1].ptr) + begin, step, last - first);
        });
  }
}

template <class E, int Rank, int Scan>
FAJIT_SHARED Interval i_gather(const fajit_tensor& t, Tables tables, const Interval* index,
                               Interval top) {
  Hull<typename E::Value> hull;
  if (!gather_hull<E, Rank, Scan>(hull, t, tables, index)) return top;
  return {int64_t(hull.lo), int64_t(hull.hi)};
}

template <class E, int Rank, int Scan>
FAJIT_SHARED Tri t_gather(const fajit_tensor& t, Tables tables, const Interval* index) {
  Hull<typename E::Value> hull;
  if (!gather_hull<E, Rank, Scan, true>(hull, t, tables, index)) return {true, false};
  return {hull.hi != 0, hull.lo != 0};
}

template <class E, int Rank, int Scan>
FAJIT_SHARED FInterval f_gather(const fajit_tensor& t, Tables tables, const Interval* index) {
  constexpr double inf = __builtin_inf();
  Hull<typename E::Value> hull;
  if (!gather_hull<E, Rank, Scan>(hull, t, tables, index) || hull.nan) return {-inf, inf, true};
  return {double(hull.lo), double(hull.hi), false};
}

// --- bits ----------------------------------------------------------------------------------------

struct Bits { uint64_t any, all; };

// `any`: bits set in some element of t[at]; `all`: bits set in all elements.
template <class E, int Rank, int Scan>
FAJIT_SHARED Bits gather_bits(const fajit_tensor& t, const Interval* index) {
  Interval at[Rank > 0 ? Rank : 1];
  int64_t count = 1;
  for (int d = 0; d < Rank; ++d) {
    if (t.sizes[d] == 0) return {0, 0};
    at[d] = i_index(index[d], t.sizes[d]);
    const int64_t n = smaller(at[d].hi - at[d].lo + 1, kMaxBitLoads + 1);
    count = smaller(count * n, kMaxBitLoads + 1);
  }
  if (count > kMaxBitLoads) return {~uint64_t(0), 0};
  const auto* data = static_cast<const typename E::Storage*>(t.ptr);
  if (data == nullptr) return {0, 0};
  if constexpr (Rank == 0) {
    return {uint64_t(int64_t(*data)), uint64_t(int64_t(*data))};
  } else {
    Bits bits = {0, ~uint64_t(0)};
    const bool visited = each_row<Rank, Scan>(t, nullptr, at, [&](int64_t offset, int64_t) {
      FAJIT_ROLLED
      for (int64_t i = at[Scan].lo; i <= at[Scan].hi; ++i) {
        const uint64_t x = uint64_t(int64_t(data[offset + i * t.strides[Scan]]));
        bits.any |= x;
        bits.all &= x;
      }
    });
    return visited ? bits : Bits{~uint64_t(0), 0};
  }
}

FAJIT_SHARED Bits bits_of(Interval x) {
  return x.lo == x.hi ? Bits{uint64_t(x.lo), uint64_t(x.lo)} : Bits{~uint64_t(0), 0};
}

// Bit number `at` (0 or 1) of numbers of `width` bits.
FAJIT_SHARED Interval i_bit(Bits bits, Interval at, int64_t width) {
  if (at.lo < 0 || at.hi >= width) return {0, 1};
  const uint64_t mask = (~uint64_t(0) >> (63 - at.hi)) & (~uint64_t(0) << at.lo);
  return {(bits.all & mask) == mask, (bits.any & mask) != 0};
}

// --- scalars, sizes, lengths, slots, sorted params -----------------------------------------------

FAJIT_SHARED Interval i_scalar(const Context& c, int slot) { return i_point(c.scalar_i64(slot)); }
FAJIT_SHARED FInterval f_scalar(const Context& c, int slot) { return f_point(c.scalar_f64(slot)); }
// The ranges of all indices of a dim, and of all ranks in a sorted param.
FAJIT_SHARED Interval i_places(const Context& c, int slot, int dim) {
  return {0, c.size(slot, dim) - 1};
}
FAJIT_SHARED Interval i_ranks(const Context& c, int slot) { return {0, c.size(slot, 0)}; }

FAJIT_SHARED bool requests(const Context& c, Interval b) {
  return b.lo >= 0 && b.lo <= b.hi && b.hi < c.args->num_requests;
}
template <class F>
FAJIT_SHARED Interval over_requests(const Context& c, Interval b, Interval top, F f) {
  if (!requests(c, b)) return top;
  Interval r = f(b.lo);
  FAJIT_ROLLED
  for (int64_t i = b.lo + 1; i <= b.hi; ++i) r = i_hull(r, f(i));
  return r;
}
FAJIT_SHARED Interval i_q_len(const Context& c, Interval b) {
  return over_requests(c, b, {0, kMaxPosition},
                       [&](int64_t i) { return Interval{c.args->q_len[i], c.args->q_len[i]}; });
}
FAJIT_SHARED Interval i_kv_len(const Context& c, Interval b) {
  return over_requests(c, b, {0, kMaxPosition},
                       [&](int64_t i) { return Interval{c.args->kv_len[i], c.args->kv_len[i]}; });
}
FAJIT_SHARED Interval i_q_row(const Context& c, Interval b, Interval q) {
  return over_requests(c, b, kTop, [&](int64_t i) {
    const int64_t base = int64_t(c.args->q_token0[i]) - c.args->q_offset[i];
    return i_add(q, {base, base});
  });
}
FAJIT_SHARED Interval i_kv_slot(const Context& c, Interval b, Interval k) {
  // The page table may be in another device's memory: return all slots.
  if (c.args->page_indptr != nullptr) {
    return {0, int64_t(c.args->num_pages) * c.args->page_size - 1};
  }
  if (c.kv_request >= 0) b = {c.kv_request, c.kv_request};
  return over_requests(c, b, kTop, [&](int64_t i) {
    const int64_t base = c.args->kv_token0[i];
    return i_add(k, {base, base});
  });
}

template <class E, bool Right>
FAJIT_SHARED int64_t rank_of(const fajit_tensor& t, int64_t value) {
  const auto* data = static_cast<const typename E::Storage*>(t.ptr);
  int64_t lo = 0, hi = data == nullptr ? 0 : t.sizes[0];
  FAJIT_ROLLED
  while (lo < hi) {
    const int64_t mid = lo + (hi - lo) / 2;
    const int64_t x = data[mid * t.strides[0]];
    if (Right ? x <= value : x < value) lo = mid + 1;
    else hi = mid;
  }
  return lo;
}
// Ranks in a sorted integer param.
template <class E, bool Right>
FAJIT_SHARED Interval i_searchsorted(const fajit_tensor& t, Interval x) {
  return {rank_of<E, Right>(t, x.lo), rank_of<E, Right>(t, x.hi)};
}

}  // namespace interval
}  // namespace fajit
