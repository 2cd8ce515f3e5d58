// Vectors as values of hooks: their types, and the operations that differ from those of scalars.
// Register types by IR dtype: bool -> vi (0 / -1); int8, uint8, int16, int32 -> vi; int64 -> vl;
// float32 -> vf; float64 -> vd.
#pragma once
#include <fajit/cpu/vector/vec.h>
#include <fajit/hook_types.h>

namespace fajit {
namespace ops {

#define FAJIT_VECTOR(V, L)                               \
  template <> inline constexpr bool is_vector<V> = true; \
  template <> struct lane_of<V> { using type = L; };     \
  template <> struct vector_of<L> { using type = V; };   \
  template <> struct vector_of<V> { using type = V; };
FAJIT_VECTOR(vf, float)
FAJIT_VECTOR(vi, int32_t)
FAJIT_VECTOR(vl, int64_t)
FAJIT_VECTOR(vd, double)
#undef FAJIT_VECTOR
template <> struct vector_of<bool> { using type = vi; };

template <> struct unsigned_of<vi> { using type = vu; };
template <> struct unsigned_of<vl> {
  typedef uint64_t type __attribute__((vector_size(sizeof(vl))));
};

template <class From, class To, class T> FAJIT_INLINE auto cast_lanes(From, To, T x) {
  using W = Vector<typename To::type>;
  if constexpr (same<From, To>) return x;
  else if constexpr (same<To, dt::b1>) return __builtin_convertvector(x != T{}, vi);
  else if constexpr (same<From, dt::b1>) return __builtin_convertvector(-x, W);
  else return __builtin_convertvector(x, W);
}

// The result of a comparison as a vector of bool.
template <class M> FAJIT_INLINE vi mask_of(M m) { return __builtin_convertvector(m, vi); }

template <class A, class B> FAJIT_INLINE auto select_lanes(vi c, A a, B b) {
  using W = Vector<Wide<A, B>>;
  if constexpr (sizeof(W) == sizeof(vl))
    return W(__builtin_convertvector(c, vl) ? widen<W>(a) : widen<W>(b));
  else return W(c ? widen<W>(a) : widen<W>(b));
}

// Exact for all int32: the double quotient of two 32-bit integers never rounds across an integer.
FAJIT_INLINE vi truncdiv_vi(vi a, vi b) {
  vd q = __builtin_convertvector(a, vd) / __builtin_convertvector(b, vd);
  vi r = __builtin_convertvector(__builtin_convertvector(q, vl), vi);
  return b == 0 ? vi{} : r;
}

// `of_lane`: the same operation on one lane.
#define FAJIT_DIVISION(name, of_int32)                                    \
  template <class A, class B, class F>                                    \
  FAJIT_INLINE auto name##_lanes(A a, B b, F of_lane) {                   \
    if constexpr (same<Wide<A, B>, vi>) {                                 \
      const vi x = widen<vi>(a), y = widen<vi>(b), q = truncdiv_vi(x, y); \
      [[maybe_unused]] const vi m = y == 0 ? vi{} : x - q * y;            \
      [[maybe_unused]] const vi off = (m != 0) & ((m ^ y) < 0);           \
      return vi(of_int32);                                                \
    } else {                                                              \
      return each_lane(of_lane, a, b);                                    \
    }                                                                     \
  }
FAJIT_DIVISION(truncdiv, q)
FAJIT_DIVISION(fmod, m)
FAJIT_DIVISION(floordiv, q + off)
FAJIT_DIVISION(remainder, m + (off & y))
#undef FAJIT_DIVISION

}  // namespace ops
}  // namespace fajit
