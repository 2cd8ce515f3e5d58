// Vectors of FAJIT_LANES 32-bit lanes, as GCC vector extensions, and the few operations that the
// extensions lack. The same names exist for float and int32_t, so that one template serves vectors
// and scalars.
//
// <immintrin.h> is not included: parsing it costs 0.23 s of a 1 s compile (measured). An
// instruction that the compiler has no portable builtin for is one line of asm on registers. A mask
// is a vi of 0 / -1 (bool for scalars).
#pragma once
#include <stdint.h>

#ifndef FAJIT_LANES
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define FAJIT_LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#define FAJIT_LANES 8
#else
#define FAJIT_LANES 4
#endif
#endif

// The x86 vector instructions that asm may use: 512 for AVX-512, 256 for AVX2, else 0.
#if defined(__x86_64__) && FAJIT_LANES >= 8
#define FAJIT_AVX (32 * FAJIT_LANES)
#else
#define FAJIT_AVX 0
#endif

// Every function with vectors in its signature is inlined, so their calling convention does not
// matter.
#pragma GCC diagnostic ignored "-Wpsabi"
#define FAJIT_INLINE inline __attribute__((always_inline))

namespace fajit {

constexpr int kLanes = FAJIT_LANES;

typedef float vf __attribute__((vector_size(4 * FAJIT_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * FAJIT_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * FAJIT_LANES)));
typedef int64_t vl __attribute__((vector_size(8 * FAJIT_LANES)));
typedef double vd __attribute__((vector_size(8 * FAJIT_LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * FAJIT_LANES)));
typedef uint16_t vw __attribute__((vector_size(4 * FAJIT_LANES)));  // two a lane
#if FAJIT_LANES == 16
typedef uint16_t v32 __attribute__((vector_size(64)));
#endif

constexpr float kInf = __builtin_inff();

// The integer type with as many lanes as T.
template <class T>
struct int_of;
template <>
struct int_of<float> {
  typedef int32_t type;
};
template <>
struct int_of<vf> {
  typedef vi type;
};
template <class T>
using int_t = typename int_of<T>::type;

// --- making vectors ---------------------------------------------------------------------------

FAJIT_INLINE vf splat(float x) { return x - vf{}; }
FAJIT_INLINE vi splat(int32_t x) { return x - vi{}; }
template <class T>
FAJIT_INLINE T splat_as(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    return splat(x);
  }
}

FAJIT_INLINE vi iota() {
#if FAJIT_LANES == 16
  return vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif FAJIT_LANES == 8
  return vi{0, 1, 2, 3, 4, 5, 6, 7};
#else
  return vi{0, 1, 2, 3};
#endif
}

// Unaligned. memcpy avoids strict-aliasing and UBSan violations, and compiles to one move.
template <class V = vf>
FAJIT_INLINE V load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
FAJIT_INLINE void store(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

// --- bits and conversions ---------------------------------------------------------------------

FAJIT_INLINE int32_t as_int(float x) { return __builtin_bit_cast(int32_t, x); }
FAJIT_INLINE float as_float(int32_t x) { return __builtin_bit_cast(float, x); }
FAJIT_INLINE vi as_int(vf x) { return (vi)x; }
FAJIT_INLINE vf as_float(vi x) { return (vf)x; }

FAJIT_INLINE int32_t to_int(float x) { return static_cast<int32_t>(x); }  // truncates
FAJIT_INLINE float to_float(int32_t x) { return static_cast<float>(x); }
FAJIT_INLINE vi to_int(vf x) { return __builtin_convertvector(x, vi); }
FAJIT_INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }
FAJIT_INLINE double to_double(float x) { return x; }
FAJIT_INLINE vd to_double(vf x) { return __builtin_convertvector(x, vd); }
FAJIT_INLINE float narrow(double x) { return static_cast<float>(x); }
FAJIT_INLINE vf narrow(const vd& x) { return __builtin_convertvector(x, vf); }

// --- selection and reductions over lanes ------------------------------------------------------

FAJIT_INLINE float select(bool m, float a, float b) { return m ? a : b; }
FAJIT_INLINE int32_t select(bool m, int32_t a, int32_t b) { return m ? a : b; }
FAJIT_INLINE vf select(vi m, vf a, vf b) { return m ? a : b; }
FAJIT_INLINE vi select(vi m, vi a, vi b) { return m ? a : b; }
FAJIT_INLINE vf select(vi m, vf a, float b) { return m ? a : splat(b); }
FAJIT_INLINE vf select(vi m, float a, vf b) { return m ? splat(a) : b; }
FAJIT_INLINE vf select(vi m, float a, float b) { return m ? splat(a) : splat(b); }
FAJIT_INLINE vf select(bool m, vf a, vf b) { return m ? a : b; }

// The mask as an integer, one bit per lane.
FAJIT_INLINE unsigned mask_bits(vi m) {
#if FAJIT_AVX == 512
  unsigned short k;
  asm("vpmovd2m %1, %0" : "=Yk"(k) : "v"(m));
  return k;
#elif FAJIT_AVX == 256
  unsigned bits;
  asm("vmovmskps %1, %0" : "=r"(bits) : "x"(m));
  return bits;
#else
  unsigned bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<unsigned>(m[i] & 1) << i;
  return bits;
#endif
}
FAJIT_INLINE bool any(vi m) { return mask_bits(m) != 0; }
FAJIT_INLINE bool all(vi m) { return mask_bits(m) == (1u << kLanes) - 1u; }
FAJIT_INLINE bool any(bool m) { return m; }
FAJIT_INLINE bool all(bool m) { return m; }

// any(x >= bound). With AVX-512 two instructions, where gcc 12 makes five of the mask of `any`.
FAJIT_INLINE bool any_at_least(float x, float bound) { return x >= bound; }
FAJIT_INLINE bool any_at_least(vf x, float bound) {
#if FAJIT_AVX == 512
  unsigned short k;
  bool found;
  asm("vcmpps $29, %3, %2, %1\n\tkortestw %1, %1"
      : "=@ccnz"(found), "=&Yk"(k)
      : "v"(x), "v"(splat(bound)));
  return found;
#else
  return any(x >= bound);
#endif
}

// values[index & 15]. In AVX the permutations ignore the higher bits.
FAJIT_INLINE vf lookup16(const float* values, vi index) {
  vf r;
#if FAJIT_AVX
  asm("vpermps %1, %2, %0" : "=v"(r) : "v"(load(values)), "v"(index));
#if FAJIT_AVX != 512
  vf high;
  asm("vpermps %1, %2, %0" : "=v"(high) : "v"(load(values + 8)), "v"(index));
  asm("vblendvps %2, %1, %0, %0" : "+x"(r) : "x"(high), "x"(index << 28));  // by the sign
#endif
#else
  for (int i = 0; i < kLanes; ++i) r[i] = values[index[i] & 15];
#endif
  return r;
}

// --- arithmetic -------------------------------------------------------------------------------

// a < b ? a : b: when either is NaN the result is b. Pass the value that may be NaN second.
FAJIT_INLINE float min(float a, float b) { return a < b ? a : b; }
FAJIT_INLINE float max(float a, float b) { return a > b ? a : b; }
FAJIT_INLINE vf min(vf a, vf b) {
#if FAJIT_AVX
  vf r;
  asm("vminps %2, %1, %0" : "=v"(r) : "v"(a), "vm"(b));
  return r;
#else
  return a < b ? a : b;
#endif
}
FAJIT_INLINE vf max(vf a, vf b) {
#if FAJIT_AVX
  vf r;
  asm("vmaxps %2, %1, %0" : "=v"(r) : "v"(a), "vm"(b));
  return r;
#else
  return a > b ? a : b;
#endif
}

FAJIT_INLINE float abs(float x) { return __builtin_fabsf(x); }
FAJIT_INLINE vf abs(vf x) { return as_float(as_int(x) & 0x7fffffff); }
FAJIT_INLINE float copysign(float x, float s) { return __builtin_copysignf(x, s); }
FAJIT_INLINE vf copysign(vf x, vf s) {
  return as_float((as_int(x) & 0x7fffffff) | (as_int(s) & INT32_MIN));
}

FAJIT_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
FAJIT_INLINE vf sqrt(vf x) {
  vf r{};
#if FAJIT_AVX
  asm("vsqrtps %1, %0" : "=v"(r) : "v"(x));
#else
  for (int i = 0; i < kLanes; ++i) r[i] = __builtin_sqrtf(x[i]);
#endif
  return r;
}

// Rounding to an integral value. The immediates are those of vrndscaleps and vroundps.
#if FAJIT_AVX == 512
#define FAJIT_ROUND_CODE "vrndscaleps"
#elif FAJIT_AVX == 256
#define FAJIT_ROUND_CODE "vroundps"
#endif
#ifdef FAJIT_ROUND_CODE
#define FAJIT_ROUND(name, imm, scalar)                             \
  FAJIT_INLINE float name(float x) { return scalar(x); }           \
  FAJIT_INLINE vf name(vf x) {                                     \
    vf r;                                                          \
    asm(FAJIT_ROUND_CODE " $" #imm ", %1, %0" : "=v"(r) : "v"(x)); \
    return r;                                                      \
  }
#else
#define FAJIT_ROUND(name, imm, scalar)                    \
  FAJIT_INLINE float name(float x) { return scalar(x); }  \
  FAJIT_INLINE vf name(vf x) {                            \
    vf r{};                                               \
    for (int i = 0; i < kLanes; ++i) r[i] = scalar(x[i]); \
    return r;                                             \
  }
#endif
FAJIT_ROUND(round_even, 8, __builtin_rintf)
FAJIT_ROUND(trunc, 11, __builtin_truncf)
#undef FAJIT_ROUND

// --- reductions -------------------------------------------------------------------------------

// Lane i of the result is lane i ^ step of x.
FAJIT_INLINE vf exchanged(vf x, int step) {
#if defined(__clang__)
  vf r;
  for (int i = 0; i < kLanes; ++i) r[i] = x[i ^ step];
  return r;
#else
  return __builtin_shuffle(x, iota() ^ step);
#endif
}

// Sums and maxima over lanes in a fixed tree, so that results do not depend on the compiler.
FAJIT_INLINE float reduce_add(vf x) {
#pragma GCC unroll 4
  for (int step = kLanes / 2; step > 0; step /= 2) x = x + exchanged(x, step);
  return x[0];
}
FAJIT_INLINE int32_t reduce_max(vi x) {
#pragma GCC unroll 4
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const vi other = (vi)exchanged((vf)x, step);
    x = other > x ? other : x;
  }
  return x[0];
}
FAJIT_INLINE float reduce_max(vf x) {
#pragma GCC unroll 4
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const vf other = exchanged(x, step);
    x = other > x ? other : x;
  }
  return x[0];
}

}  // namespace fajit
