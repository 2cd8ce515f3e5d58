// Storage types and the conversion of rows between them and float.
//
// Every K, V and Q row that is not already in the matrix dtype is read by load_row<T>, so a new
// storage type needs only a specialisation of Storage.
#pragma once
#include <fajit/cpu/vector/vec.h>
#include <fajit/types.h>

namespace fajit {

struct half_t { uint16_t bits; };
struct bfloat16_t { uint16_t bits; };
struct e4m3_t {  // float8_e4m3fn: no infinities, NaN is 0x7f
  uint8_t bits;
};
struct e5m2_t { uint8_t bits; };
// Two integers of 4 bits, -8 to 7, stored as themselves plus 8: byte i of a row of N has those of
// dim i, in its low bits, and of dim i + N / 2.
struct int4x2_t { uint8_t bits; };
// A byte of a token's row in FlashMLA's fp8 cache: 512 codes of e4m3, 4 scales of 128 codes each
// (fp32), 64 values of bf16. Such a row has 576 dims, and without the bf16 values 512.
struct latent_t { uint8_t bits; };
constexpr int kLatentCodes = 512, kLatentGroups = 4;
constexpr int kLatentBytes = kLatentCodes + kLatentGroups * int{sizeof(float)};  // before bf16

// Codes of 8 or 4 bits, which each matrix dtype holds exactly.
template <class T>
constexpr bool kIsCode = same<T, int8_t> || same<T, e4m3_t> || same<T, e5m2_t> || same<T, int4x2_t>;

// Bits of the exponent of floats of 8 bits; 0 of other types.
template <class T>
constexpr int kExponentBits = same<T, e4m3_t>   ? 4
                              : same<T, e5m2_t> ? 5
                                                : 0;

// Values that an element of a row holds, and the elements of a row.
template <class T>
constexpr int kPerElement = 1;
template <>
constexpr int kPerElement<int4x2_t> = 2;
template <class T>
constexpr int elements_of(int dims) {
  return same<T, latent_t> ? kLatentBytes + 2 * (dims - kLatentCodes) : dims / kPerElement<T>;
}

typedef uint8_t vb __attribute__((vector_size(FAJIT_LANES)));
typedef int8_t vs __attribute__((vector_size(FAJIT_LANES)));

// --- lanes ------------------------------------------------------------------------------------

// Wider integers, by one instruction: gcc 12 extends vectors of bytes one by one (48 instructions
// for eight), and those of words by halves. Rows of int8 are read in 0.14 of the time (AVX2, timed
// by hand).
#if FAJIT_AVX
#define FAJIT_WIDEN(name, From, To, code)   \
  FAJIT_INLINE To name(From x) {            \
    To r;                                   \
    asm(code " %1, %0" : "=v"(r) : "v"(x)); \
    return r;                               \
  }
#else
#define FAJIT_WIDEN(name, From, To, code) \
  FAJIT_INLINE To name(From x) { return __builtin_convertvector(x, To); }
#endif
FAJIT_WIDEN(widen, vh, vu, "vpmovzxwd")
FAJIT_WIDEN(widen, vb, vu, "vpmovzxbd")
FAJIT_WIDEN(widen, vs, vi, "vpmovsxbd")
FAJIT_WIDEN(widen_to_words, vb, vh, "vpmovzxbw")
#undef FAJIT_WIDEN

#if FAJIT_AVX == 512
// table[index & 31]. One instruction, where gcc 12 makes three of __builtin_shuffle.
FAJIT_INLINE v32 lookup32(v32 table, v32 index) {
  v32 r;
  asm("vpermw %1, %2, %0" : "=v"(r) : "v"(table), "v"(index));
  return r;
}
// 32 bytes as words, unsigned and signed.
FAJIT_INLINE v32 load_bytes(const void* p) {
  v32 w;
  asm("vpmovzxbw %1, %0" : "=v"(w) : "m"(*static_cast<const char (*)[32]>(p)));
  return w;
}
FAJIT_INLINE v32 load_signed_bytes(const void* p) {
  v32 w;
  asm("vpmovsxbw %1, %0" : "=v"(w) : "m"(*static_cast<const char (*)[32]>(p)));
  return w;
}
#endif

FAJIT_INLINE vf bfloat16_to_float(vh h) { return (vf)(widen(h) << 16); }
// Round to nearest even; NaN stays NaN.
FAJIT_INLINE vh float_to_bfloat16(vf x) {
  const vu bits = (vu)x;
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(x == x ? rounded : (bits >> 16) | 64, vh);
}

FAJIT_INLINE vf half_to_float(vh h) {
#if FAJIT_AVX
  vf r;
  asm("vcvtph2ps %1, %0" : "=v"(r) : "v"(h));
  return r;
#else
  const vu w = widen(h);
  const vu magnitude = w & 0x7fff;
  // Normal numbers, infinity and NaN are rebiased by an addition; subnormals are converted as
  // integers.
  const vf normal = (vf)((magnitude << 13) + 0x38000000u);
  const vf tiny = to_float((vi)magnitude) * 0x1p-24f;
  const vf special = (vf)((magnitude << 13) + 0x70000000u);
  const vf r = magnitude >= 0x7c00 ? special : magnitude < 0x400 ? tiny : normal;
  return (vf)((vu)r | ((w & 0x8000) << 16));
#endif
}
FAJIT_INLINE vh float_to_half(vf x) {
#if FAJIT_AVX
  vh r;
  asm("vcvtps2ph $0, %1, %0" : "=v"(r) : "v"(x));
  return r;
#else
  const vu bits = (vu)x, magnitude = bits & 0x7fffffff;
  const vu normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000u) >> 13;
  // Adding 0.5 puts a subnormal's rounded integer value into the low mantissa bits.
  const vu tiny = (vu)((vf)magnitude + 0.5f) - 0x3f000000u;
  vu r = magnitude < 0x38800000u ? tiny : normal;
  r = magnitude >= 0x477ff000u ? vu{} + 0x7c00u : r;
  r = magnitude > 0x7f800000u ? vu{} + 0x7e00u : r;
  return __builtin_convertvector(r | ((bits >> 16) & 0x8000), vh);
#endif
}

// Floats of 8 bits are read as halves: e5m2 is the upper byte of one, e4m3 has an exponent that is
// less by 8. Beyond 448, the largest e4m3, is its NaN.
FAJIT_INLINE vf e4m3_to_float(vb b) {
  const vh w = widen_to_words(b);
  const vf x = half_to_float((w + (w & 0x80)) << 7) * 256.0f;
  return ((vu)x & 0x7fffffff) > (vu)splat(448.0f) ? splat(__builtin_nanf("")) : x;
}
FAJIT_INLINE vf e5m2_to_float(vb b) { return half_to_float(widen_to_words(b) << 8); }

FAJIT_INLINE float bfloat16_to_float(uint16_t h) {
  return as_float(static_cast<int32_t>(static_cast<uint32_t>(h) << 16));
}
FAJIT_INLINE float half_to_float(uint16_t h) { return half_to_float(vh{} + h)[0]; }
FAJIT_INLINE float e4m3_to_float(uint8_t b) { return e4m3_to_float(vb{} + b)[0]; }
FAJIT_INLINE float e5m2_to_float(uint8_t b) { return e5m2_to_float(vb{} + b)[0]; }

// --- one vector of a storage type -------------------------------------------------------------

template <class T>
struct Storage;
template <>
struct Storage<float> {
  static FAJIT_INLINE vf load(const void* p) { return fajit::load(p); }
  static FAJIT_INLINE void store(void* p, vf x) { fajit::store(p, x); }
};
template <>
struct Storage<bfloat16_t> {
  static FAJIT_INLINE vf load(const void* p) { return bfloat16_to_float(fajit::load<vh>(p)); }
  static FAJIT_INLINE void store(void* p, vf x) { fajit::store(p, float_to_bfloat16(x)); }
};
template <>
struct Storage<half_t> {
  static FAJIT_INLINE vf load(const void* p) { return half_to_float(fajit::load<vh>(p)); }
  static FAJIT_INLINE void store(void* p, vf x) { fajit::store(p, float_to_half(x)); }
};
template <>
struct Storage<int8_t> {
  static FAJIT_INLINE vf load(const void* p) { return to_float(widen(fajit::load<vs>(p))); }
};
template <>
struct Storage<e4m3_t> {
  static FAJIT_INLINE vf load(const void* p) { return e4m3_to_float(fajit::load<vb>(p)); }
};
template <>
struct Storage<e5m2_t> {
  static FAJIT_INLINE vf load(const void* p) { return e5m2_to_float(fajit::load<vb>(p)); }
};

// --- rows -------------------------------------------------------------------------------------

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr int larger_of(int a, int b) { return a > b ? a : b; }

// The bits of dims [d, d + kLanes) of a row of N are the four lowest ones.
template <int N>
FAJIT_INLINE vi load_bits(const int4x2_t* row, int d) {
  constexpr int half = N / 2;
  static_assert(half % kLanes == 0);
  return (vi)(widen(load<vb>(row + d % half)) >> (d < half ? 0 : 4));
}

// Dims [d, d + kLanes) of a row of N.
template <class T, int N>
FAJIT_INLINE vf load_dims(const T* row, int d) {
  if constexpr (same<T, int4x2_t>) {
    return to_float((load_bits<N>(row, d) & 15) - 8);
  } else {
    return Storage<T>::load(row + d);
  }
}

// Whether two vectors of a row are read at once, in fewer operations than one after the other.
template <class T>
constexpr bool kReadsTwo = FAJIT_AVX > 0 && kExponentBits<T> > 0;

// Returned by value: where asm writes through references, gcc 12 keeps the caller's sums in memory,
// and decoding e4m3 with 4 rows takes 1.25 times as long (AVX2, by hand).
struct TwoVectors { vf low, high; };
#if FAJIT_AVX
// 2 kLanes floats of 8 bits as halves: those of e5m2 as they are, those of e4m3 times 2^-8, where
// NaN is 1.875.
template <int E>
FAJIT_INLINE vw small_float_halves(const void* p) {
  const auto& codes = *static_cast<const char (*)[2 * kLanes]>(p);
  vw w;
  if constexpr (E == 5) {
    asm("vpmovzxbw %1, %0" : "=v"(w) : "m"(codes));
    return w << 8;
  } else {
    asm("vpmovsxbw %1, %0" : "=v"(w) : "m"(codes));
    return (w << 7) & uint16_t{0xbfff};
  }
}
FAJIT_INLINE TwoVectors widen_halves(vw halves) {
  vf low;
  vh upper;
#if FAJIT_AVX == 512
  asm("vcvtph2ps %t1, %0" : "=v"(low) : "v"(halves));
  asm("vextracti64x4 $1, %1, %0" : "=v"(upper) : "v"(halves));
#else
  asm("vcvtph2ps %x1, %0" : "=x"(low) : "x"(halves));
  asm("vextracti128 $1, %1, %0" : "=x"(upper) : "x"(halves));
#endif
  return {low, half_to_float(upper)};
}
#endif

// Dims [d, d + kLanes) of a row of N, and the kLanes after them.
template <class T, int N>
FAJIT_INLINE TwoVectors load_two_dims(const T* row, int d) {
#if FAJIT_AVX
  if constexpr (kExponentBits<T> == 5) {
    return widen_halves(small_float_halves<5>(row + d));
  } else if constexpr (kExponentBits<T> == 4) {
    const vw halves = small_float_halves<4>(row + d);
    const vw nan = (vw)((halves & uint16_t{0x7fff}) == uint16_t{0x3f80});
    const TwoVectors x = widen_halves(halves | nan);
    return {x.low * 256.0f, x.high * 256.0f};
  }
#endif
  return {load_dims<T, N>(row, d), load_dims<T, N>(row, d + kLanes)};
}

// The integers of a row of N, one a byte.
template <int N>
FAJIT_INLINE void unpack_codes(const int4x2_t* row, int8_t* codes) {
  for (int i = 0; i < N / 2; ++i) {
    codes[i] = static_cast<int8_t>((row[i].bits & 15) - 8);
    codes[i + N / 2] = static_cast<int8_t>((row[i].bits >> 4) - 8);
  }
}

// dst[0, N) as float; dst has room for N rounded up to kLanes, and the rest of it is zeroed.
template <class T, int N>
FAJIT_INLINE void load_row(const T* src, float* dst) {
  constexpr int whole = N / kLanes * kLanes;
  if constexpr (same<T, int4x2_t> && N % (2 * kLanes) != 0) {
    alignas(64) int8_t codes[round_up(N, kLanes)] = {};
    unpack_codes<N>(src, codes);
    load_row<int8_t, N>(codes, dst);
  } else {
    int i = 0;
    if constexpr (kReadsTwo<T>) {
      for (; i + 2 * kLanes <= whole; i += 2 * kLanes) {
        const TwoVectors x = load_two_dims<T, N>(src, i);
        store(dst + i, x.low);
        store(dst + i + kLanes, x.high);
      }
    }
    for (; i < whole; i += kLanes) store(dst + i, load_dims<T, N>(src, i));
    if constexpr (whole < N) {
      alignas(64) T tail[kLanes] = {};
      __builtin_memcpy(tail, src + whole, (N - whole) * sizeof(T));
      store(dst + whole, Storage<T>::load(tail));
    }
  }
}

// dst[0, N) from float; src has N rounded up to kLanes.
template <class T, int N>
FAJIT_INLINE void store_row(T* dst, const float* src) {
  constexpr int whole = N / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) Storage<T>::store(dst + i, load(src + i));
  if constexpr (whole < N) {
    alignas(64) T tail[kLanes];
    Storage<T>::store(tail, load(src + whole));
    __builtin_memcpy(dst + whole, tail, (N - whole) * sizeof(T));
  }
}

}  // namespace fajit
